"""Findings about what busy GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gputrace.analyzers.findings.facts import HIGH, Facts, severity_of
from gputrace.analyzers.findings.skew import told_by_skew
from gputrace.analyzers.findings.staging import told_by_links
from gputrace.analyzers.results import Finding
from gputrace.units import format_ns

_PAGEABLE_SHARE: Final = 0.01
"""Part of the time from which pageable copies are worth a word."""

_OVERLAP_COPIES: Final = {
    "pytorch": "copy the next batch while this one computes: pin_memory=True, "
    ".to(device, non_blocking=True) on a side stream",
    "tensorflow": "prefetch to the GPU (tf.data.experimental.prefetch_to_device)",
    "jax": "put the next batch on the device (jax.device_put) while this one computes",
}
_PINNED: Final = {
    "pytorch": "pin_memory=True in the DataLoader, .to(device, non_blocking=True)",
    "mxnet": "gluon's DataLoader(pin_memory=True)",
    "chainer": "cuda.pinned_memory",
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
    """Host-to-device copies with nothing beside them, unless most of that is what
    `h2d-pageable` tells.

    Cost: class `h2d`.
    """
    if 2 * facts.pageable.saving_ns > sum(row.of("h2d") for row in facts.rows):
        return
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
    """Copies from pageable memory cost 1 % of the time.

    Cost: the part of them with nothing beside it, less what as many bytes take from pinned
    memory: at the speed of the trace's own large pinned copies, else of the card's slot, if
    either is known.
    """
    found = facts.pageable
    total = sum(row.total_ns for row in facts.rows)
    saving = found.saving_ns
    if not saving or saving < _PAGEABLE_SHARE * total:
        return
    count = sum(max(row.steps, 1) for row in facts.rows)
    share = saving / total
    rate = found.bytes / max(found.copy_ns, 1)
    pinned = found.pinned_rate
    told = f" instead of {pinned / 1e9:.1f} GB/s from pinned memory" if pinned else ""
    yield facts.finding(
        "h2d-pageable",
        severity_of(share) or "low",
        saving // count,
        f"copies from pageable memory run at {rate:.1f} GB/s{told}: that costs "
        f"{format_ns(saving // count)} of {facts.per} ({share:.0%})",
        f"copy from pinned memory ({_PINNED.get(facts.framework, 'cudaHostAlloc')}): it is faster, "
        "the host need not wait, and copies can run beside kernels",
        {
            "copies": found.copies,
            "bytes": found.bytes,
            "copy_ns": found.copy_ns // count,
            "exposed_ns": found.exposed_ns // count,
            "pinned_bandwidth": None if pinned is None else round(pinned),
            "share": round(share, 4),
        },
    )


def communication_exposed(facts: Facts) -> Iterator[Finding]:
    """Communication with no computation beside it; its waiting too, unless ranks are found to
    be late.

    Cost: class `communication`; without `communication_wait_ns` where ranks are late, and less
    what `gpu0-skew`, `topology` and `host-staged-comm` tell of it.
    """
    whole, wait = facts.mean("communication"), facts.mean("communication_wait")
    known = all(row.communication_wait_ns is not None for row in facts.rows)
    apart = known and bool(facts.late)
    cost = (whole - wait if apart else whole) - max(told_by_links(facts), told_by_skew(facts))
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
    """The GPUs compute 80 % of the time or more (`info`).

    Cost: class `compute`.
    """
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
