"""The figures of GPUs that work side by side, as the JSON's ``balance`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What one GPU did over its measured steps, or over the whole span with ``steps`` 0.

    Durations are sums over operations, which may overlap.
    """

    gpu: int
    rank: int
    steps: int
    kernels: int
    """Launches that do not communicate."""
    kernel_ns: int
    own_kernels: int
    """Of these, launches of kernels that no other GPU runs."""
    own_kernel_ns: int
    communication_ns: int
    """Kernels that communicate, their waiting included."""
    h2d_ns: int
    h2d_bytes: int
    d2h_ns: int
    d2h_bytes: int
    d2d_ns: int
    d2d_bytes: int
    peer_ns: int
    """Copies from and to other GPUs."""
    peer_bytes: int
    h2d_run_ns: int
    """Host-to-device copies over the whole recording."""
    memory_bytes: int | None
    """The most in use on the card; None where that was not sampled."""
    extra_ns: Mapping[str, int]
    """Work that no other GPU has, by sort: ``kernels``, ``h2d``, ``d2h``, ``d2d``, ``peer``."""
    alone_ns: int
    """The part of that work during which no other GPU does any of its own."""

    @property
    def turns(self) -> int:
        """The number that totals are divided by for a mean."""
        return max(self.steps, 1)
