"""Kernels of Numba's, and copies, that print the same each time."""

import sys

import numpy as np
from numba import cuda


@cuda.jit
def decay(values, rate):
    at = cuda.grid(1)
    if at < values.size:
        values[at] -= rate * values[at]


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
values = cuda.to_device(np.linspace(0, 1, 1 << 16))
for number in range(steps):
    decay[256, 256](values, 0.1)
    if number % 8 == 7:
        print(f"step {number + 1}: sum {values.copy_to_host().sum():.3f}")
print(f"{steps} steps")
