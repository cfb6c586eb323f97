"""Segment images; after an out-of-memory error somebody added a clean-up to the loop."""

import torch
from parts import CURED, Clock, device, size
from torch import nn


def conv(i, o, stride=1):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)
    )


class Segmenter(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.down = nn.Sequential(
            conv(3, w), conv(w, 2 * w, 2), conv(2 * w, 4 * w, 2), conv(4 * w, 4 * w)
        )
        self.up = nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(4 * w, 21, 1))

    def forward(self, x):
        return self.up(self.down(x))


def release_memory():
    if not CURED and torch.cuda.is_available():
        torch.cuda.empty_cache()


class Loop:
    def __init__(self):
        self.dev = device()
        self.model = Segmenter(size(48, 4)).to(self.dev)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()

    def step(self, images, masks):
        with torch.autocast(self.dev.type, torch.bfloat16):
            loss = self.criterion(self.model(images), masks)
        self.optimizer.zero_grad(set_to_none=True)
        release_memory()
        loss.backward()
        self.optimizer.step()
        release_memory()
        return loss.detach()

    def run(self):
        n, side, clock, total = size(8, 2), size(256, 16), Clock(), 0.0
        while not clock.done():
            images = torch.rand(n, 3, side, side, device=self.dev)
            total = total + self.step(images, (images[:, 0] * 20).long())


Loop().run()
