"""CUPTI's kinds of overhead, as nsys numbers and names them."""

from __future__ import annotations

from typing import Final

_UNKNOWN: Final = (1, "Unknown")
_OVERHEADS: Final = {
    1: (2, "Driver JIT compiler (CUDA)"),
    1 << 16: (3, "Buffer flush (Profiler)"),
    2 << 16: (4, "Instrumentation (Profiler)"),
    3 << 16: (5, "Resource creation/destruction (Profiler)"),
    4 << 16: (6, "Runtime module loading (CUDA)"),
    5 << 16: (7, "Lazy function loading (CUDA)"),
    6 << 16: (8, "Command buffer full (CUDA)"),
    7 << 16: (1, "Activity buffer request (Profiler)"),
}


def overhead(kind: int) -> tuple[int, str]:
    """The number and name of nsys for a kind of CUPTI."""
    return _OVERHEADS.get(kind, _UNKNOWN)
