"""A logger of its own: records queue up, and a thread ships them to a slow server."""

import threading
import time

import torch
from parts import CURED, Clock, device, encoder, size
from torch.nn import functional as F


class Server:
    """Stands for a tracking server that takes 12 ms to answer."""

    def post(self, records):
        time.sleep(0.012)
        return len(records)


class Logger:
    def __init__(self, server):
        self.server, self.records, self.sent = server, [], 0
        self.lock = threading.Lock()
        threading.Thread(target=self.ship, daemon=True).start()

    def log(self, **values):
        with self.lock:
            self.records.append(values)

    def ship(self):
        while True:
            if CURED:
                with self.lock:
                    out, self.records = self.records, []
                self.sent += self.server.post(out)
            else:
                with self.lock:
                    self.sent += self.server.post(self.records)
                    self.records.clear()
            time.sleep(0.004)


def main():
    dev = device()
    logger = Logger(Server())
    model = encoder(size(512, 32), size(4, 1), size(8, 2), 4096).to(dev)
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=dev.type == "cuda")
    clock, step = Clock(), 0
    while True:
        ids = torch.randint(0, 4096, (size(16, 2), size(257, 17)), device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        logger.log(step=step, kind="loss", value=loss.detach())
        opt.step()
        logger.log(step=step, kind="rate", value=opt.param_groups[0]["lr"])
        step += 1
        if clock.done():
            break


main()
