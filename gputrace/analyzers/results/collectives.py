"""What is told of collectives, beside the results of `results`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveTotals:
    """All collectives of one operation among the same GPUs, over the measured steps.

    Over the whole span where there are no steps. Times are those of one GPU in one collective,
    unless they are said to be totals; what cannot be known is None.
    """

    operation: str
    """``AllReduce``, ``Broadcast``, ``PeerCopy`` and so on, or the kernel's name."""
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    one_process: bool
    """Whether one process drives all these GPUs, as DataParallel does."""
    count: int
    """Collectives in all."""
    steps: int
    """Steps that these are of; 0 for the whole span."""
    bytes: int | None
    """Size of the middle message."""
    wait_ns: int | None
    """Median, until the last rank came."""
    transfer_ns: int | None
    """Median, from then on."""
    total_ns: int
    """Of a GPU and step, or of a GPU in all: the time in these kernels or copies."""
    wait_total_ns: int | None
    transfer_total_ns: int | None
    exposed_ns: int
    """The part of ``total_ns`` with no kernel beside it that computes."""
    algorithm_bandwidth: int | None
    """Median, bytes a second: the message's size by the transfer's time."""
    bus_bandwidth: int | None
    """The same by what each link carries, to be compared with what the hardware can do."""
