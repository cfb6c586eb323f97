"""Pictures come as bytes and are made floats before they go to the GPU."""

import numpy as np
import torch
from parts import CURED, SEED, Clock, device, size
from torch import nn


class Pictures:
    """Batches of uint8 pictures that lie in memory."""

    def __init__(self, batch, side):
        rng = np.random.default_rng(SEED)
        self.pool = rng.integers(0, 256, (4 * batch, side, side, 3), dtype=np.uint8)
        self.batch = batch

    def __iter__(self):
        at = 0
        while True:
            yield self.pool[at : at + self.batch]
            at = (at + self.batch) % len(self.pool)


def normalize(pictures):
    mean = np.array([0.485, 0.456, 0.406])
    std = np.array([0.229, 0.224, 0.225])
    return ((pictures / 255.0 - mean) / std).transpose(0, 3, 1, 2)


def to_gpu(pictures, dev):
    if not CURED:
        return torch.from_numpy(normalize(pictures)).float().to(dev)
    x = torch.from_numpy(pictures).to(dev).permute(0, 3, 1, 2).float().div_(255)
    mean = torch.tensor([0.485, 0.456, 0.406], device=dev).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=dev).view(3, 1, 1)
    return (x - mean) / std


def main():
    dev = device()
    w = size(128, 4)
    net = nn.Sequential(
        nn.Conv2d(3, w, 4, 4),
        nn.GELU(),
        nn.Conv2d(w, 2 * w, 2, 2),
        nn.GELU(),
        nn.Conv2d(2 * w, 4 * w, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * w, 10),
    ).to(dev)
    opt = torch.optim.AdamW(net.parameters(), 1e-3)
    clock = Clock()
    for pictures in Pictures(size(64, 4), size(160, 32)):
        x = to_gpu(pictures, dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), torch.arange(len(x), device=dev) % 10)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if clock.done():
            break


main()
