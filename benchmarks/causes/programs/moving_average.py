"""A classifier with an exponential moving average of its weights."""

import copy

import torch
from parts import CURED, Clock, device, size
from torch import nn
from torch.nn import functional as F


class EMA:
    def __init__(self, model, decay=0.999):
        self.model, self.decay = model, decay
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self):
        if CURED:
            ours, theirs = list(self.shadow.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(ours, theirs, 1 - self.decay)
            return
        state = self.model.state_dict()
        for name, value in self.shadow.state_dict().items():
            if value.dtype.is_floating_point:
                new = self.decay * value + (1.0 - self.decay) * state[name].detach()
                value.copy_(new)
            else:
                value.copy_(state[name])


def block(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def net(width, depth):
    return nn.Sequential(
        nn.Linear(64, width), *(block(width) for _ in range(depth)), nn.Linear(width, 10)
    )


if __name__ == "__main__":
    dev = device()
    model = net(size(256, 16), size(150, 3)).to(dev)
    ema = EMA(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=True)
    clock = Clock()
    x, y = (
        torch.randn(size(2048, 32), 64, device=dev),
        torch.randint(0, 10, (size(2048, 32),), device=dev),
    )
    while not clock.done():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update()
