"""Finding about parts of the forward pass that the backward pass computes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.findings.hardware import find_card_use
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.kernel_names import PRODUCTS, family_of
from gputrace.analyzers.repeated_launches import launched_again
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.intervals import Intervals
from gputrace.model.results import Finding

_LOOKED_AT: Final = 20_000
"""Kernels of a GPU that are compared; the share of these holds for all."""
_FULL_MEMORY: Final = 0.8
"""Part of a card's memory in use from which recomputation is taken to be needed."""
_KEEP_MORE: Final = {
    "pytorch": "call fewer blocks through torch.utils.checkpoint "
    "(gradient_checkpointing_disable() of transformers), or only those with the largest activations"
}


def work_recomputed(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds in which each GPU, with its rank, computes something again."""
    return facts.once(_recomputed) if facts.trains and facts.per_gpu.has_calls else {}


def _recomputed(facts: Facts) -> dict[tuple[int, int], int]:
    spent = facts.per_gpu.each(_recomputed_on, facts.working, facts.working_times)
    lanes = zip(facts.working, spent, strict=True)
    return {(lane.gpu.gpu, lane.gpu.rank): ns for lane, ns in lanes if ns}


def _recomputed_on(view: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of kernels in some time that the backward pass launches anew."""
    operations, calls = view.operations, view.calls
    rows = np.flatnonzero((operations.events.kind == Kind.KERNEL) & time.contains(operations.start))
    lengths = operations.end[rows] - operations.start[rows]
    if calls is None or not len(rows):
        return 0
    issuer = operations.events.having("process", "correlation").select(rows[:_LOOKED_AT])
    issued_by = calls.issued_by(issuer)
    # Calls lie thread by thread, in the order of their start.
    order = np.argsort(issued_by, kind="stable")
    order = order[issued_by[order] != NOBODY]
    if not len(order):
        return 0
    threads = calls.thread[issued_by[order]]
    names = operations.events.name[rows[order]]
    again = launched_again(names, threads, int(calls.thread[issued_by[order.min()]]))
    known = view.trace.names(distinct_ids(names[again])).values()
    if not any(family_of(name) in PRODUCTS for name in known):
        return 0  # As of sums that sort in both passes: a part of a network multiplies.
    share = float(lengths[order[again]].sum()) / max(int(lengths[order].sum()), 1)
    return round(share * int(lengths.sum()))


def recomputation(facts: Facts) -> Iterator[Finding]:
    """The backward pass launches kernels in the order of the forward pass for 5 % of the time,
    products of matrices among them: it computes parts of the network again, to save memory (`low`
    if a card's memory is 80 % full).

    Cost: the duration of these kernels.

    Wrong if: the step is no shorter without activation checkpointing.
    """
    cost = sum(work_recomputed(facts).values()) // facts.turns
    severity = severity_of(facts.share_of(cost))
    if severity is None:
        return
    full = [
        card.memory_used_bytes / card.memory_bytes
        for card in facts.once(find_card_use)
        if card.memory_used_bytes and card.memory_bytes
    ]
    fullest = max(full, default=0.0)
    advice = _KEEP_MORE.get(facts.framework, "keep the activations of more layers")
    yield facts.finding(
        "recomputation",
        "low" if fullest >= _FULL_MEMORY else severity,
        cost,
        f"computing parts of the forward pass again takes {facts.of_step(cost)}",
        f"{advice}, as far as memory allows",
        {"share": round(facts.share_of(cost), 4), "memory_used_share": round(fullest, 4)},
        [f"at most {fullest:.0%} of a card's memory is in use" if full else ""],
    )
