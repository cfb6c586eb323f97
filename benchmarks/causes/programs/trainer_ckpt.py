"""A vision transformer in a Trainer that saves all its state every ten steps."""

import torch
from parts import CURED, Clock, device, size
from torch import nn
from trainer_lib import Trainer


class Patches(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, 1000)

    def forward(self, x):
        return self.head(self.body(self.cut(x).flatten(2).transpose(1, 2)).mean(1))


def noise(dev, n):
    while True:
        yield torch.randn(n, 3, 160, 160, device=dev), torch.randint(0, 1000, (n,), device=dev)


if __name__ == "__main__":
    dev = device()
    net = Patches(size(512, 32), size(8, 1)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), 3e-4, fused=dev.type == "cuda")
    Trainer(net, opt, dev, 10000 if CURED else 10).fit(noise(dev, size(96, 2)), Clock())
