"""GPT-2 of plain PyTorch, in its smallest size and in one to try programs with."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

SIZES: Final = {"gpt2": (768, 12, 12, 50_257, 256), "tiny": (32, 2, 2, 100, 16)}
"""Width, heads, layers, words, and tokens of a text."""


class Block(nn.Module):  # type: ignore[misc, unused-ignore]  # torch may be absent
    """Attention to earlier tokens, then a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Gpt2(nn.Module):  # type: ignore[misc, unused-ignore]  # torch may be absent
    """Takes tokens, and returns the scores of the next ones, flat."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, heads, layers, self.words, self.length = SIZES[size]
        self.tokens = nn.Embedding(self.words, width)
        self.places = nn.Parameter(0.02 * torch.randn(self.length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)
