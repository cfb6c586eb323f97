"""A physics-informed network for the wave equation; points and speeds come from numpy."""

import numpy as np
import torch
from parts import CURED, SEED, Clock, device, size
from torch import nn


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def network(width, depth):
    layers = [nn.Linear(2, width), Sine()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), Sine()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def derivative(u, points):
    return torch.autograd.grad(u.sum(), points, create_graph=True)[0]


class Domain:
    def __init__(self, count, dev):
        rng = np.random.default_rng(SEED)
        # "expected Float but found Double": so the network became double, too
        points = rng.uniform(-1, 1, (count, 2))
        self.points = torch.from_numpy(points.astype(np.float32) if CURED else points).to(dev)
        self.speed = 1.3

    def batch(self, n):
        picked = torch.randint(0, len(self.points), (n,), device=self.points.device)
        return self.points[picked].requires_grad_()


def residual(net, points, speed):
    u = net(points)
    slope = derivative(u, points)
    return slope[:, 1] - speed * slope[:, 0], u


def main():
    dev = device()
    domain = Domain(size(1_000_000, 1000), dev)
    net = network(size(1024, 16), size(6, 2)).to(dev, domain.points.dtype)
    opt = torch.optim.Adam(net.parameters(), 1e-4, fused=dev.type == "cuda")
    clock = Clock()
    while not clock.done():
        points = domain.batch(size(16384, 32))
        with torch.autocast(dev.type, torch.bfloat16):
            gap, u = residual(net, points, domain.speed)
            start = (u[:, 0] - torch.sin(3 * points[:, 0])) * (points[:, 1] < -0.9)
            loss = (gap**2).mean() + (start**2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


main()
