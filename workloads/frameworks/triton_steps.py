"""A kernel of Triton's on tensors of PyTorch that prints the same each time."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def decay(values, rate, size, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    old = tl.load(values + at, mask=at < size)
    tl.store(values + at, old - rate * old, mask=at < size)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
values = torch.linspace(0, 1, 1 << 16, device="cuda")
for number in range(steps):
    decay[(values.numel() // 256,)](values, 0.1, values.numel(), block=256)
    if number % 8 == 7:
        print(f"step {number + 1}: sum {values.double().sum().item():.3f}")
print(f"{steps} steps")
