"""A transformer in fp32 with PyTorch's defaults: no TF32."""

import torch
from parts import CURED, Clock, device, size
from torch import nn

if CURED:
    torch.set_float32_matmul_precision("high")


def block(w):
    return nn.ModuleDict(
        {
            "n": nn.LayerNorm(w),
            "q": nn.Linear(w, w),
            "k": nn.Linear(w, w),
            "v": nn.Linear(w, w),
            "o": nn.Linear(w, w),
            "m": nn.Sequential(
                nn.LayerNorm(w), nn.Linear(w, 4 * w), nn.ReLU(), nn.Linear(4 * w, w)
            ),
        }
    )


class Encoder(nn.Module):
    def __init__(self, w, depth):
        super().__init__()
        self.inp, self.blocks, self.out = (
            nn.Linear(80, w),
            nn.ModuleList(block(w) for _ in range(depth)),
            nn.Linear(w, 40),
        )

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            y = b["n"](x)
            q, k, v = (b[c](y).unflatten(-1, (-1, 64)).transpose(1, 2) for c in "qkv")
            x = x + b["o"](
                nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            )
            x = x + b["m"](x)
        return self.out(x)


dev, clock = device(), Clock()
net = Encoder(size(1024, 64), size(8, 2)).to(dev)
opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=dev.type == "cuda")
while True:
    frames = torch.randn(size(16, 2), 300, 80, device=dev)
    loss = net(frames).log_softmax(-1)[..., 0].mean().neg()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if clock.done():
        break
