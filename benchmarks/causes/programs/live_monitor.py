"""A thread watches the training for a dashboard, and never sleeps."""

import threading
import time

import torch
from parts import CURED, Clock, device, encoder, size
from torch.nn import functional as F


class Dashboard(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.state = {"step": 0, "seen": 0}
        self.rate = 0.0

    def run(self):
        last, at = 0, time.time()
        while True:
            if CURED:
                time.sleep(0.5)
            step = self.state["step"]
            if step != last:
                now = time.time()
                self.rate, last, at = (step - last) / max(now - at, 1e-9), step, now


def examples(dev):
    while True:
        ids = torch.randint(0, 4096, (size(8, 2), size(129, 17)), device=dev)
        yield ids[:, :-1], ids[:, 1:]


def main():
    dev = device()
    board = Dashboard()
    board.start()
    model = encoder(size(512, 32), size(1, 2), size(8, 4), 4096).to(dev)
    opt = torch.optim.AdamW(model.parameters(), 3e-4)
    clock = Clock()
    for step, (x, y) in enumerate(examples(dev)):
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        board.state["step"] = step
        if clock.done():
            break


main()
