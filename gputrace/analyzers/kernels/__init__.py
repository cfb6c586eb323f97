"""Which kernels take the time of the measured steps, and what they are."""

from gputrace.analyzers.kernels.results import (
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    LaunchCost,
    Product,
)
from gputrace.analyzers.kernels.table import count_kernels

__all__ = [
    "Family",
    "KernelOnGpu",
    "KernelUse",
    "Kernels",
    "LaunchCost",
    "Product",
    "count_kernels",
]
