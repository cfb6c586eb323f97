"""A number on the compiled module anneals every six steps; each value is compiled anew."""

import os

import torch
from parts import CURED, Clock, device, size
from torch import nn

torch._dynamo.config.recompile_limit = 64


class Mixer(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Linear(192, width)
        self.mix = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.SiLU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)
        self.register_buffer("cooled", torch.tensor(1.0))
        self.keep = 1000

    def forward(self, x):
        x = self.stem(x)
        for m in self.mix:
            x = x + m(x)
        heat = self.cooled if CURED else self.keep / 1000
        return self.head(x.mean(1)) * heat


def main():
    dev = device()
    net = Mixer(size(1024, 32), size(4, 2)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), 1e-3, fused=dev.type == "cuda")
    fast = torch.compile(net, backend=os.environ.get("BACKEND", "inductor"))
    clock, i = Clock(), 0
    while True:
        if i % 6 == 5:
            net.keep -= 7
            net.cooled.fill_(net.keep / 1000)
        x, y = (
            torch.randn(size(256, 4), 49, 192, device=dev),
            torch.randint(0, 100, (size(256, 4),), device=dev),
        )
        with torch.autocast(dev.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(fast(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        i += 1
        if clock.done():
            break


main()
