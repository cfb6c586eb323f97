"""Weights are sharded by hand: each parameter is gathered alone before the forward pass, each gradient scattered alone."""

import torch
import torch.distributed as dist
from parts import CURED, WORLD, Clock, join, size
from torch import nn


class Sharded:
    def __init__(self, net):
        self.params = list(net.parameters())
        self.shards = [
            p.detach().flatten().chunk(WORLD)[dist.get_rank()].clone() for p in self.params
        ]
        self.flat = torch.cat(self.shards)
        self.total = torch.empty(WORLD * self.flat.numel(), device=self.flat.device)

    def gather(self):
        if CURED:
            dist.all_gather_into_tensor(self.total, self.flat)
            rows = self.total.view(WORLD, -1)
            at = 0
            for p, s in zip(self.params, self.shards):
                p.data.view(WORLD, -1).copy_(rows[:, at : at + s.numel()])
                at += s.numel()
        else:
            for p, s in zip(self.params, self.shards):
                dist.all_gather_into_tensor(p.data.view(-1), s)

    def update(self, lr):
        if CURED:
            grads = torch.cat([p.grad.view(WORLD, -1) for p in self.params], 1)
            own = torch.empty_like(self.flat)
            dist.reduce_scatter_tensor(own, grads.flatten())
            self.flat.add_(own, alpha=-lr / WORLD)
        else:
            for p, s in zip(self.params, self.shards):
                own = torch.empty_like(s)
                dist.reduce_scatter_tensor(own, p.grad.reshape(-1))
                s.add_(own, alpha=-lr / WORLD)
        for p in self.params:
            p.grad = None


def main():
    dev = join()
    w = size(768, 16)
    cell = lambda: nn.Sequential(
        nn.LayerNorm(w),
        nn.Linear(w, w),
        nn.SiLU(),
        nn.Linear(w, w),
        nn.LayerNorm(w),
        nn.Linear(w, 2 * w),
        nn.SiLU(),
        nn.Linear(2 * w, w),
    )
    net = nn.Sequential(*[cell() for _ in range(size(16, 2))]).to(dev)
    sharded, clock = Sharded(net), Clock()
    while True:
        sharded.gather()
        x = torch.randn(size(6144, 8), w, device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = (net(x).float() - x).square().mean()
        loss.backward()
        sharded.update(0.01)
        if clock.done():
            break
    dist.destroy_process_group()


main()
