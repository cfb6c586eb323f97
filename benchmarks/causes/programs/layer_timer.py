"""Find out how long each layer takes; the timer was left in."""

import time
from collections import defaultdict

import torch
from parts import CURED, Clock, device, encoder, size, synchronize
from torch.nn import functional as F


class LayerTimer:
    def __init__(self, model):
        self.spent, self.began = defaultdict(float), {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(lambda *_, name=name: self.start(name))
                module.register_forward_hook(lambda *_, name=name: self.stop(name))

    def start(self, name):
        synchronize()
        self.began[name] = time.perf_counter()

    def stop(self, name):
        synchronize()
        self.spent[name] += time.perf_counter() - self.began[name]


def main():
    dev = device()
    model = encoder(size(768, 32), size(24, 2), size(12, 4), 4096).to(dev)
    if not CURED:
        LayerTimer(model)
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=dev.type == "cuda")
    clock = Clock()
    while not clock.done():
        ids = torch.randint(0, 4096, (size(16, 2), size(257, 17)), device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()


main()
