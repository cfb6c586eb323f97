"""The optimizer is the author's own, in numpy: gradients come to the host, weights go back."""

import numpy as np
import torch
from parts import CURED, Clock, device, size
from torch import nn


class HostAdam:
    def __init__(self, params, lr):
        self.params, self.lr, self.t = list(params), lr, 0
        self.w = [p.detach().cpu().numpy().copy() for p in self.params]
        self.m = [np.zeros_like(w) for w in self.w]
        self.v = [np.zeros_like(w) for w in self.w]

    def update(self):
        self.t += 1
        for p, w, m, v in zip(self.params, self.w, self.m, self.v):
            g = p.grad.cpu().numpy()
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            w -= self.lr * (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
            p.data.copy_(torch.from_numpy(w))
            p.grad = None


def main():
    dev = device()
    w = size(1024, 16)
    net = nn.Sequential(
        nn.Linear(256, w),
        nn.ReLU(),
        *[m for _ in range(5) for m in (nn.Linear(w, w), nn.ReLU())],
        nn.Linear(w, 32),
    ).to(dev)
    mine = HostAdam(net.parameters(), 1e-3)
    theirs = torch.optim.Adam(net.parameters(), 1e-3)
    clock = Clock()
    while True:
        x = torch.randn(size(16384, 16), 256, device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = (net(x).float() - x[:, :32]).square().mean()
        loss.backward()
        if CURED:
            theirs.step()
            theirs.zero_grad()
        else:
            mine.update()
        if clock.done():
            break


main()
