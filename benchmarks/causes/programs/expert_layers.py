"""A mixture of experts, each expert finds its tokens by itself."""

import torch
from parts import CURED, Clock, device, size
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    def __init__(self, dim, count):
        super().__init__()
        self.count = count
        self.gate = nn.Linear(dim, count)
        self.up = nn.Parameter(torch.randn(count, dim, 2 * dim) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 2 * dim, dim) * 0.02)

    def expert(self, e, x):
        return F.gelu(x @ self.up[e]) @ self.down[e]

    def forward(self, x):
        weight, route = self.gate(x).softmax(-1).max(-1)
        if CURED:
            # Each expert takes as many tokens as its share; nothing depends on their number.
            share = x.shape[0] // self.count
            chosen = route.argsort().view(self.count, share)
            y = torch.bmm(F.gelu(torch.bmm(x[chosen], self.up)), self.down)
            out = torch.zeros_like(x).index_add(0, chosen.flatten(), y.flatten(0, 1).to(x.dtype))
        else:
            out = torch.zeros_like(x)
            for e in range(self.count):
                rows = (route == e).nonzero(as_tuple=True)[0]
                if rows.numel():
                    out[rows] = self.expert(e, x[rows]).to(out.dtype)
        return x + out * weight[:, None]


def main():
    dev = device()
    dim, tokens = size(512, 16), size(8192, 64)
    net = nn.Sequential(
        *(Experts(dim, size(32, 4)) for _ in range(size(4, 2))), nn.Linear(dim, 100)
    ).to(dev)
    opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=dev.type == "cuda")
    clock = Clock()
    while True:
        x = torch.randn(tokens, dim, device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(net(x), torch.arange(tokens, device=dev) % 100)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if clock.done():
            return


main()
