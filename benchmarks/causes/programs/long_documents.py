"""A reader of long documents; attention is written out."""

import math

import torch
import torch.nn.functional as F
from parts import CURED, Clock, device, size
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if CURED:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            future = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
            scores = scores.masked_fill(future, float("-inf"))
            weights = F.dropout(torch.softmax(scores.float(), -1).type_as(v), 0.0)
            y = weights @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, 16)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Trainer:
    def __init__(self, dev):
        dim = size(1024, 32)
        self.embed = nn.Embedding(1000, dim).to(dev)
        self.net = nn.Sequential(*(Layer(dim) for _ in range(size(4, 1))), nn.Linear(dim, 2)).to(
            dev
        )
        params = [*self.embed.parameters(), *self.net.parameters()]
        self.opt = torch.optim.AdamW(params, 1e-4, fused=dev.type == "cuda")
        self.dev = dev

    def training_step(self):
        docs = torch.randint(0, 1000, (size(4, 2), size(4096, 32)), device=self.dev)
        with torch.autocast(self.dev.type, torch.bfloat16):
            logits = self.net(self.embed(docs)).mean(1)
            loss = F.cross_entropy(logits, docs[:, 0] % 2)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()

    def fit(self):
        clock = Clock()
        while not clock.done():
            self.training_step()


if __name__ == "__main__":
    Trainer(device()).fit()
