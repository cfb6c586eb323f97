"""A small trainer, as many projects have their own."""

import pathlib
import tempfile

import torch
from torch import nn


class Trainer:
    def __init__(self, net, opt, dev, every):
        self.net, self.opt, self.dev, self.every = net, opt, dev, every
        self.average = {k: v.detach().clone() for k, v in net.state_dict().items()}
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.count = 0

    def _loss(self, batch):
        with torch.autocast(self.dev.type, torch.bfloat16):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def _after(self):
        with torch.no_grad():
            old = [v for v in self.average.values() if v.is_floating_point()]
            new = [v for v in self.net.state_dict().values() if v.is_floating_point()]
            torch._foreach_lerp_(old, new, 0.001)
        if self.count % self.every == 0:
            self.persist()

    def persist(self):
        parts = {
            "net": self.net.state_dict(),
            "optimizer": self.opt.state_dict(),
            "average": self.average,
            "count": self.count,
        }
        path = self.folder / f"state-{self.count // self.every % 2}.pt"
        torch.save(parts, path)

    def fit(self, batches, clock):
        for batch in batches:
            self.opt.zero_grad(set_to_none=True)
            self._loss(batch).backward()
            self.opt.step()
            self.count += 1
            self._after()
            if clock.done():
                return
