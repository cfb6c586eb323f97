"""Samples refer back to their clip, so their images stay on the GPU until a collection: the author collects in each step."""

import gc
import weakref
from dataclasses import dataclass, field

import torch
from parts import CURED, Clock, device, size
from torch import nn


@dataclass
class Note:
    label: int
    corners: tuple


@dataclass(eq=False)
class Frame:
    clip: object
    pixels: torch.Tensor
    notes: list


@dataclass(eq=False)
class Clip:
    frames: list = field(default_factory=list)


def assemble(annotations, index, dev):
    clip = Clip()
    back = weakref.ref(clip) if CURED else clip
    for k in range(size(48, 4)):
        pixels = torch.rand(3, 128, 128, device=dev)
        clip.frames.append(Frame(back, pixels, annotations[(index * 48 + k) % len(annotations)]))
    return clip


class Stage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a = nn.Conv2d(i, o, 3, 2, 1)
        self.n = nn.GroupNorm(8, o)
        self.b = nn.Conv2d(o, o, 3, 1, 1)

    def forward(self, x):
        x = torch.relu(self.n(self.a(x)))
        return x + torch.relu(self.b(x))


def main():
    dev = device()
    net = nn.Sequential(
        Stage(3, 64),
        Stage(64, 128),
        Stage(128, 256),
        Stage(256, 512),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 80),
    ).to(dev)
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    annotations = [
        [Note(i % 80, (float(i), float(i + 1), 0.5, k)) for k in range(6)]
        for i in range(size(40000, 50))
    ]
    clock, index = Clock(), 0
    while True:
        clip = assemble(annotations, index, dev)
        images = torch.stack([f.pixels for f in clip.frames])
        labels = torch.tensor([f.notes[0].label for f in clip.frames], device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        del clip, images
        if not CURED:
            gc.collect()  # else the frames' memory grows
        index += 1
        if clock.done():
            break


main()
