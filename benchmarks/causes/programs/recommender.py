"""Recommend items to users, out of a table of millions."""

import torch
from parts import CURED, Clock, device, size
from torch import nn


class TwoTowers(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=CURED)
        self.items = nn.Embedding(items, width, sparse=CURED)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, user, item):
        return self.mlp(torch.cat([self.users(user), self.items(item)], -1)).squeeze(-1)


def optimizers(model):
    if not CURED:
        return [torch.optim.Adam(model.parameters(), 1e-3)]
    tables = [model.users.weight, model.items.weight]
    return [torch.optim.SparseAdam(tables, 1e-3), torch.optim.Adam(model.mlp.parameters(), 1e-3)]


def clicks(users, items, n, dev):
    while True:
        yield (
            torch.randint(0, users, (n,), device=dev),
            torch.randint(0, items, (n,), device=dev),
            torch.rand(n, device=dev).round(),
        )


def main():
    dev, clock = device(), Clock()
    users, items = size(4_000_000, 1000), size(1_000_000, 500)
    model = TwoTowers(users, items, 64).to(dev)
    steps = optimizers(model)
    for user, item, clicked in clicks(users, items, size(8192, 64), dev):
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), clicked)
        for one in steps:
            one.zero_grad(set_to_none=True)
        loss.backward()
        for one in steps:
            one.step()
        if clock.done():
            break


main()
