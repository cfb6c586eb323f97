"""Augment pictures on the GPU, one after the other."""

import random

import torch
from parts import CURED, Clock, device, size
from torch import nn
from torch.nn import functional as F


def augment_one(picture):
    if random.random() < 0.5:
        picture = picture.flip(-1)
    picture = picture * (0.8 + 0.4 * random.random())
    mean = picture.mean()
    picture = (picture - mean) * (0.8 + 0.4 * random.random()) + mean
    side = picture.shape[-1]
    top, left = random.randrange(9), random.randrange(9)
    picture = F.pad(picture, (4, 4, 4, 4))[:, top : top + side, left : left + side]
    noise = torch.randn_like(picture) * 0.05
    return (picture + noise).clamp(0, 1)


def augment_all(pictures):
    n = len(pictures)

    def each():
        return torch.rand(n, 1, 1, 1, device=pictures.device)

    pictures = torch.where(each() < 0.5, pictures.flip(-1), pictures) * (0.8 + 0.4 * each())
    mean = pictures.mean((1, 2, 3), keepdim=True)
    pictures = (pictures - mean) * (0.8 + 0.4 * each()) + mean
    return (pictures + torch.randn_like(pictures) * 0.05).clamp(0, 1)


def main():
    dev = device()
    w = size(96, 4)
    model = nn.Sequential(
        nn.Conv2d(3, w, 4, 4), nn.ReLU(), nn.Conv2d(w, 2 * w, 3, 2, 1), nn.ReLU(), nn.Conv2d(2 * w, 4 * w, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10),
    ).to(dev)  # fmt: skip
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    pool = torch.rand(size(1024, 16), 3, size(64, 16), size(64, 16), device=dev)
    clock = Clock()
    while True:
        picked = torch.randint(0, len(pool), (size(128, 4),), device=dev)
        batch = pool[picked]
        batch = augment_all(batch) if CURED else torch.stack([augment_one(one) for one in batch])
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(batch), picked % 10)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if clock.done():
            break


main()
