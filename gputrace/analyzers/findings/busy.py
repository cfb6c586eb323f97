"""Findings about what busy GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import HIGH, Facts, severity_of
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.results import Finding
from gputrace.traces.events import Kind, Memory
from gputrace.units import format_ns

_PAGEABLE_SHARE: Final = 0.01
"""Part of the time from which pageable copies are worth a word."""

_OVERLAP_COPIES: Final = {
    "pytorch": "copy the next batch while this one computes: pin_memory=True, "
    ".to(device, non_blocking=True) on a side stream",
    "tensorflow": "prefetch to the GPU (tf.data.experimental.prefetch_to_device)",
    "jax": "put the next batch on the device (jax.device_put) while this one computes",
}
_SEND_LESS: Final = (
    "overlap it with the backward pass (bucket size), send less (bf16 gradients, gradient "
    "accumulation)"
)
_WAIT_LESS: Final = (
    "make the ranks come at the same time (none is always the last): hosts that launch sooner, "
    "batches of one size, loaders without hiccups; sending less gains little"
)
_COPY_LESS: Final = "copy less: smaller types, decoding on the GPU, weights that stay on the GPU"


def h2d_exposed(facts: Facts) -> Iterator[Finding]:
    """Copies to the GPU with nothing running beside them."""
    if facts.trains:
        how = _OVERLAP_COPIES.get(
            facts.framework, "copy the next batch from pinned memory while this one computes"
        )
    else:
        how = "copy what comes next from pinned memory, on a side stream, while this computes"
    yield from facts.costly(
        "h2d-exposed",
        "h2d",
        "{cost} go to host-to-device copies with nothing running beside them",
        f"{how}; {_COPY_LESS}",
    )


def h2d_pageable(facts: Facts) -> Iterator[Finding]:
    """Input copies from pageable memory, which block the host and run slowly."""
    columns = ("start", "end", "bytes", "source_memory")
    copies = facts.trace.events([Kind.COPY_H2D], columns)
    copies = copies.select(copies.source_memory == Memory.PAGEABLE)
    windows = _measured_time(facts)
    copies = copies.select(windows.contains(copies.start) & windows.contains(copies.end - 1))
    total = sum(row.total_ns for row in facts.rows)
    spent = int((copies.end - copies.start).sum())
    if not len(copies) or spent < _PAGEABLE_SHARE * total:
        return
    count = sum(max(row.steps, 1) for row in facts.rows)
    rate = int(copies.bytes.sum()) / max(spent, 1)
    yield facts.finding(
        "h2d-pageable",
        severity_of(spent / total) or "low",
        spent // count,
        f"{format_ns(spent // count)} of {facts.per} ({spent / total:.0%}) go to copies from "
        f"pageable memory, at {rate:.1f} GB/s",
        "copy from pinned memory (pin_memory=True, cudaHostAlloc): it is faster and the host "
        "need not wait",
        {"copies": len(copies), "bytes": int(np.sum(copies.bytes)), "share": spent / total},
    )


def _measured_time(facts: Facts) -> Intervals:
    """The measured steps, or the part of the trace that was asked for."""
    if facts.measured:
        steps = facts.measured
        return union([s.start_ns for s in steps], [s.end_ns for s in steps])
    spans = [lane.timeline.window for lane in facts.lanes]
    return union([w.start for w in spans], [w.end for w in spans])


def communication_exposed(facts: Facts) -> Iterator[Finding]:
    """Communication with no computation beside it; without the wait, if ranks are found late."""
    whole, wait = facts.mean("communication"), facts.mean("communication_wait")
    known = all(row.communication_wait_ns is not None for row in facts.rows)
    apart = known and bool(facts.late)
    cost = whole - wait if apart else whole
    share = cost / max(facts.mean_ns, 1)
    severity = severity_of(share)
    if severity is None:
        return
    if apart:
        told = f"; waiting for other ranks, {format_ns(wait)}, comes on top"
    else:
        told = f", {format_ns(wait)} of that waiting" if known else ", waiting"
        told += " for other ranks" if known else " for other ranks included"
    yield facts.finding(
        "communication-exposed",
        severity,
        cost,
        f"{format_ns(cost)} of {facts.per} ({share:.0%}) go to communication with no computation "
        f"beside it{told}",
        _WAIT_LESS if known and not apart and 2 * wait > whole else _SEND_LESS,
        {
            "share": round(share, 4),
            "communication_ns": whole,
            "wait_ns": wait if known else None,
            "total_ns": facts.mean_ns,
        },
    )


def compute_bound(facts: Facts) -> Iterator[Finding]:
    """The GPU computes nearly all the time."""
    share = facts.share("compute")
    if share < 1 - HIGH:
        return
    yield facts.finding(
        "compute-bound",
        "info",
        facts.mean("compute"),
        f"the GPUs compute {share:.0%} of the time: their speed is the limit",
        "make the kernels cheaper: mixed precision, the layout that the tensor cores want, "
        "compiled or fused operations"
        + (" (torch.compile, channels_last)" if facts.framework == "pytorch" else ""),
        {"share": round(share, 4)},
    )
