"""Records come from slow storage through a reader thread of our own."""

import queue
import threading
import time

import torch
from parts import CURED, SEED, Clock, device, encoder, size
from torch.nn import functional as F


class Storage:
    """A remote bucket: each read takes a while, several may be under way."""

    def __init__(self):
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(SEED)

    def fetch(self):
        time.sleep(0.04)
        with self.lock:
            return torch.randint(0, 4096, (size(16, 2), size(257, 17)), generator=self.generator)


class Reader:
    def __init__(self, storage, threads, ahead):
        self.storage, self.queue = storage, queue.Queue(ahead)
        for _ in range(threads):
            threading.Thread(target=self.fill, daemon=True).start()

    def fill(self):
        while True:
            self.queue.put(self.storage.fetch())

    def __iter__(self):
        return self

    def __next__(self):
        return self.queue.get()


def fit(model, reader, dev):
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=dev.type == "cuda")
    clock = Clock()
    for ids in reader:
        ids = ids.to(dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if clock.done():
            return


if __name__ == "__main__":
    where = device()
    fit(
        encoder(size(768, 32), size(8, 1), size(12, 4), 4096).to(where),
        Reader(Storage(), 8 if CURED else 1, 8 if CURED else 1),
        where,
    )
