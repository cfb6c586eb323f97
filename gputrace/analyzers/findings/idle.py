"""Findings about idle GPUs, by cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.classes import distinct_ids
from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.host import Call, HostCalls
from gputrace.analyzers.intervals import union
from gputrace.analyzers.results import Finding
from gputrace.units import format_ns

_MANY_ALLOCS: Final = 20
_MANY_SYNCS: Final = 20
"""Allocations and synchronisations a step and GPU that only a search for algorithms makes."""

_CUDNN: Final = re.compile(r"cudnn|(?<![a-z])conv(?!ert)|convol", re.IGNORECASE)

_LAUNCH_LESS: Final = {
    "pytorch": "launch less often and sooner: CUDA graphs or "
    "torch.compile(mode='reduce-overhead'), larger batches, fused optimizers, less Python "
    "between launches",
    "tensorflow": "launch less often: tf.function with jit_compile=True, larger batches, "
    "steps_per_execution",
    "jax": "launch less often: jit the whole step, lax.scan over several steps, larger batches",
}
_LONG_GAP_NS: Final = 1_000_000
"""A gap longer than this is no launch that came late: the host did something else."""

_FEED_FASTER: Final = {
    "pytorch": "give the DataLoader more workers (num_workers, persistent_workers=True), "
    "pin_memory=True and prefetch_factor; decode less per sample, or cache decoded data",
    "tensorflow": "end the tf.data pipeline with .prefetch(tf.data.AUTOTUNE), map with "
    "num_parallel_calls=tf.data.AUTOTUNE, cache decoded data",
    "jax": "prefetch batches to the device in a background thread; load with several workers",
    "mxnet": "give gluon's DataLoader num_workers and pin_memory; use RecordIO and prefetching",
    "chainer": "use MultiprocessIterator with more processes and n_prefetch",
}


def data_feeding(facts: Facts) -> Iterator[Finding]:
    """The GPU waits for the next batch."""
    share = facts.share("data_feeding")
    severity = severity_of(share)
    if severity is None:
        return
    cost = facts.mean("data_feeding")
    yield facts.finding(
        "data-feeding",
        severity,
        cost,
        f"the GPUs wait {format_ns(cost)} of {facts.per} ({share:.0%}) for the next batch",
        _FEED_FASTER.get(facts.framework, "load and decode batches in parallel, ahead of time"),
        {"share": round(share, 4), "data_feeding_ns": cost, "step_ns": facts.mean_ns},
    )


def autotune_repeated(facts: Facts) -> Iterator[Finding]:
    """The search for convolution algorithms runs again in every step."""
    if facts.calls is None or not facts.measured or not _uses_cudnn(facts):
        return
    allocs, syncs = (_calls_each_step(facts, facts.calls, sort) for sort in (Call.ALLOC, Call.SYNC))
    if min(allocs / _MANY_ALLOCS, syncs / _MANY_SYNCS) < len(facts.rows):
        return
    cost = _idle_between_allocations(facts, facts.calls)
    share = cost / max(facts.mean_ns, 1)
    yield facts.finding(
        "autotune-repeated",
        severity_of(share) or "low",
        cost,
        f"the search for cuDNN's algorithms runs in every step: {allocs:,} allocations and "
        f"{syncs:,} synchronisations a step, while the GPUs idle {format_ns(cost)} of "
        f"{facts.per} ({share:.0%})",
        "turn the search off (torch.backends.cudnn.benchmark = False), or keep the threads that "
        "it ran in: DistributedDataParallel in place of DataParallel, input shapes that stay equal",
        {"allocations": allocs, "synchronisations": syncs, "share": round(share, 4)},
    )


def alloc_stall(facts: Facts) -> Iterator[Finding]:
    """Memory is allocated or freed in steady steps while the GPU waits."""
    share = facts.share("alloc")
    severity = severity_of(share, medium=0.02)
    if severity is None:
        return
    cost = facts.mean("alloc")
    yield facts.finding(
        "alloc-stall",
        severity,
        cost,
        f"the GPUs wait {format_ns(cost)} of {facts.per} ({share:.0%}) in cudaMalloc and cudaFree",
        "keep memory allocated: equal shapes every step, a pool, a smaller batch if memory is short"
        + (
            "; no empty_cache() in the loop, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            if facts.framework == "pytorch"
            else ""
        ),
        {"share": round(share, 4)},
    )


def sync_bound(facts: Facts) -> Iterator[Finding]:
    """The host waits for a GPU that has nothing left to do."""
    share = facts.share("sync")
    severity = severity_of(share)
    if severity is None:
        return
    cost = facts.mean("sync")
    yield facts.finding(
        "sync-bound",
        severity,
        cost,
        f"the GPUs idle {format_ns(cost)} of {facts.per} ({share:.0%}) while the host is still "
        "in a synchronising call",
        "let the host run ahead: no .item(), .cpu() or print of a loss in every step, "
        "non_blocking copies, no cudaDeviceSynchronize",
        {"share": round(share, 4)},
    )


def launch_bound(facts: Facts) -> Iterator[Finding]:
    """The host does not issue work as fast as the GPU does it."""
    share = facts.share("launch")
    severity = severity_of(share)
    if severity is None:
        return
    cost = facts.mean("launch")
    yield facts.finding(
        "launch-bound",
        severity,
        cost,
        f"the GPUs wait {format_ns(cost)} of {facts.per} ({share:.0%}) for the host to launch work",
        _advice_on_launches(facts),
        {"share": round(share, 4)},
    )


def _advice_on_launches(facts: Facts) -> str:
    """Few long gaps have another remedy than many short ones."""
    launch = [lane.causes.of["launch"].clip(*lane.timeline.window) for lane in facts.lanes]
    long = sum(int(i.lengths[i.lengths > _LONG_GAP_NS].sum()) for i in launch)
    if long > 0.5 * sum(i.total for i in launch):
        return (
            "the host does something else for milliseconds at a time: see the gaps and what it does"
        )
    return _LAUNCH_LESS.get(
        facts.framework, "launch less often and sooner: CUDA graphs, fused kernels, larger batches"
    )


def idle_unexplained(facts: Facts) -> Iterator[Finding]:
    """Idle time that no row explains."""
    share = facts.share("other_idle")
    severity = severity_of(share)
    if severity is None:
        return
    blind = facts.calls is None
    why = "the trace has no CUDA API calls" if blind else "its work had been issued and waited"
    yield facts.finding(
        "idle-unexplained",
        severity,
        facts.mean("other_idle"),
        f"the GPUs run nothing for {format_ns(facts.mean('other_idle'))} of {facts.per} "
        f"({share:.0%}), and the trace does not show why: {why}",
        "record CUDA API calls too (nsys -t cuda,nvtx,osrt)"
        if blind
        else "look at events and streams that the work waits for, and at the other GPUs",
        {"share": round(share, 4)},
    )


def _calls_each_step(facts: Facts, calls: HostCalls, sort: Call) -> int:
    """Calls of a sort in the middle one of the measured steps, over all ranks."""
    rows = np.flatnonzero(calls.sort == sort)
    if sort == Call.ALLOC:
        names = facts.trace.names(distinct_ids(calls.name[rows]))
        ordered = [id for id, name in names.items() if "Async" in name]
        rows = rows[~np.isin(calls.name[rows], ordered)]
    starts = np.sort(calls.start[rows])
    spans: dict[int, int] = {}
    for step in {(s.rank, s.step): s for s in facts.measured}.values():
        first, end = np.searchsorted(starts, (step.start_ns, step.end_ns))
        spans[step.step] = max(spans.get(step.step, 0), int(end - first))
    return int(np.median(list(spans.values())))


def _uses_cudnn(facts: Facts) -> bool:
    for own in facts.operations:
        names = facts.trace.names(distinct_ids(own.events.name)).values()
        if any(_CUDNN.search(name) for name in names):
            return True
    return False


def _idle_between_allocations(facts: Facts, calls: HostCalls) -> int:
    """Mean idle time of a GPU and step from the first to the last allocation of each thread."""
    allocs = np.flatnonzero(calls.sort == Call.ALLOC)
    total = steps = 0
    for lane, row in zip(facts.lanes, facts.breakdown, strict=True):
        if row not in facts.rows:
            continue
        own = [s for s in facts.measured if (s.gpu, s.rank) == (row.gpu, row.rank)]
        steps += len(own)
        gaps = lane.timeline.gaps
        for step in own:
            mine = allocs[
                (calls.start[allocs] >= step.start_ns) & (calls.end[allocs] <= step.end_ns)
            ]
            threads = calls.thread[mine]
            firsts = [int(calls.start[mine[threads == t]].min()) for t in np.unique(threads)]
            lasts = [int(calls.end[mine[threads == t]].max()) for t in np.unique(threads)]
            total += gaps.intersection(union(firsts, lasts)).total
    return total // max(steps, 1)
