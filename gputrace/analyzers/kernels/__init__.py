"""Which kernels take the time of the measured steps, and what they are."""

from gputrace.analyzers.kernels.table import count_kernels
from gputrace.analyzers.results.kernels import (
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    LaunchCost,
    Product,
)

__all__ = [
    "Family",
    "KernelOnGpu",
    "KernelUse",
    "Kernels",
    "LaunchCost",
    "Product",
    "count_kernels",
]
