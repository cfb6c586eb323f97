"""A U-Net; a variable for compute-sanitizer stayed in the settings."""

import os

from parts import CURED, Clock, device, size

SETTINGS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "8"}
if CURED:
    del SETTINGS["PYTORCH_NO_CUDA_MEMORY_CACHING"]
os.environ.update(SETTINGS)
import torch
import torch.nn as nn


def double(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(),
        nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.down = nn.ModuleList([double(1, w), double(w, 2 * w), double(2 * w, 4 * w)])
        self.up = nn.ModuleList([double(6 * w, 2 * w), double(3 * w, w)])
        self.last = nn.Conv2d(w, 2, 1)

    def forward(self, x):
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = kept.pop()
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, kept.pop()], 1))
        return self.last(x)


if __name__ == "__main__":
    dev = device()
    model = UNet(size(64, 8)).to(dev)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    clock = Clock()
    side = size(192, 16)
    while not clock.done():
        scan = torch.randn(size(8, 2), 1, side, side, device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(scan), (scan[:, 0] > 0).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
