"""Findings about idle GPUs, by the cause of the idle time; for input see `data_feeding`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.copies import is_on
from gputrace.analyzers.findings.context import MEDIUM, Facts, severity_of
from gputrace.analyzers.gpu_shards import GpuShardView, Shard
from gputrace.analyzers.grouping import median
from gputrace.analyzers.host_calls import NOBODY, Call
from gputrace.analyzers.idle_causes import calls_held_by_copies
from gputrace.model.events import Events, Kind, Memory, distinct_ids, is_among
from gputrace.model.host import Allocator
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, search, union
from gputrace.model.results import Finding
from gputrace.units import format_bytes, format_count, format_ns

_MANY_ALLOCS: Final = 20
_MANY_SYNCS: Final = 20
"""Allocations and synchronisations per step and GPU that only a search for algorithms makes."""

_FRAGMENTED: Final = 0.1
"""Unused part of reserved memory that cannot be given back, from which it is fragmented."""
_EXPANDABLE: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

_IN_ORDER: Final = "Async"
"""Names of stream-ordered allocations, which do not block."""
_CUDNN: Final = r"(?i)cudnn|(?<![a-z])conv(?!ert)|convol"

_LAUNCH_LESS: Final = {
    "pytorch": "launch less often and sooner: CUDA graphs or "
    "torch.compile(mode='reduce-overhead'), larger batches, fused optimizers, less Python "
    "between launches",
    "tensorflow": "launch less often: tf.function with jit_compile=True, larger batches, "
    "steps_per_execution",
    "jax": "launch less often: jit the whole step, lax.scan over several steps, larger batches",
}
ONE_PROCESS: Final = {
    "pytorch": "one process per GPU: DistributedDataParallel instead of DataParallel; until then, "
    "compute the loss inside the module, on each GPU, so that no output is gathered",
    "tensorflow": "reduce between the GPUs: MirroredStrategy with NcclAllReduce instead of a "
    "parameter server on one GPU (variable_update=replicated in tf_cnn_benchmarks)",
    "mxnet": "reduce between the GPUs: kvstore='nccl', or Horovod, instead of 'device', and split "
    "each batch to all GPUs straight from the host (gluon.utils.split_and_load)",
    "chainer": "MultiprocessParallelUpdater or ChainerMN instead of ParallelUpdater",
    "jax": "shard the batch straight from the host (jax.device_put with a NamedSharding), and let "
    "the compiled step reduce",
}
ONE_PROCESS_ELSE: Final = (
    "give each GPU its own part of the batch straight from the host, compute the loss there, and "
    "all-reduce the gradients"
)
"""Advice where one process feeds several GPUs, by framework."""

_RUN_AHEAD: Final = {
    "pytorch": "let the host run ahead: no .item(), .cpu() or print of a loss in every step, "
    "non_blocking copies, no cudaDeviceSynchronize",
    "tensorflow": "let the host run ahead: no .numpy() or print of a loss in every step; several "
    "steps in one tf.function (steps_per_execution)",
    "jax": "let the host run ahead: no float(), print or block_until_ready of a result in every "
    "step",
    "mxnet": "let the host run ahead: no .asnumpy(), .asscalar() or waitall in every step",
    "training": "let the host run ahead: read no loss or metric in every step, copy asynchronously",
    "": "let the host run ahead: cudaMemcpyAsync{pinned}, events and streams instead of "
    "cudaDeviceSynchronize; read results less often",
}
"""Advice where the host waits for GPUs, by framework: the last for programs that do not train."""
_EXCHANGE_MEANWHILE: Final = (
    "overlap the exchange with GPU work: MPI_Isend and MPI_Irecv before kernels that do not need "
    "the data; NCCL or a CUDA-aware MPI between GPUs; check all ranks for the last to arrive"
)

_LONG_GAP_NS: Final = 1_000_000
"""Gaps longer than this are no late launches: the host did something else."""

_NEARLY_ALL: Final = 0.9
"""Part of the waits for launches from which another finding that costs as much explains them."""
_HANDOVER_NS: Final = 5_000
"""Gaps up to this before work that had been issued are the GPU's own price of a launch: 1 to 2.5 µs
from kernel to kernel."""

_WORTH_SAYING: Final = 0.05
"""Share of a cost from which a clause says it."""
_MOSTLY_TINY: Final = 0.5
"""Share of the kernels that must be tiny for the finding about launches to say so."""


def autotune_repeated(facts: Facts) -> Iterator[Finding]:
    """Steady steps have 20 allocations and 20 synchronisations per step and GPU, and run cuDNN
    kernels.

    Cost: idle time between the first and the last allocation of each thread.

    Wrong if: the allocations remain with `cudnn.benchmark` off.
    """
    if not facts.per_gpu.has_calls or not facts.repeats or not _uses_cudnn(facts):
        return
    allocs, syncs = (_calls_each_step(facts, sort) for sort in (Call.ALLOC, Call.SYNC))
    if min(allocs / _MANY_ALLOCS, syncs / _MANY_SYNCS) < len(facts.rows):
        return
    cost = _idle_between_allocations(facts)
    share = facts.share_of(cost)
    yield facts.finding(
        "autotune-repeated",
        severity_of(share) or "low",
        cost,
        f"cuDNN's algorithm search runs in every step: {allocs:,} allocations and {syncs:,} "
        f"synchronisations a step, while the GPUs idle {facts.of_step(cost)}",
        "turn the search off (torch.backends.cudnn.benchmark = False), or keep the threads that "
        "it ran in: DistributedDataParallel instead of DataParallel, constant input shapes",
        {"allocations": allocs, "synchronisations": syncs, "share": round(share, 4)},
    )


def alloc_stall(facts: Facts) -> Iterator[Finding]:
    """Memory is allocated, pinned or freed (cudaMalloc, cudaHostRegister, cudaFree) while the GPU
    waits; `medium` from 2 %.

    The message names the calls that take most of that time. If torch's allocator was recorded, it
    also says whether memory ran out, the program emptied the cache, or steady steps need new
    segments: of which size, and for tensors of which sizes.

    Cost: idle time with that cause.

    Wrong if: the step is no shorter with constant shapes.
    """
    calls = _allocating_calls(facts) if facts.share("alloc") >= _ALLOC_MEDIUM else []
    advice = "keep memory allocated: constant shapes, a pool, a smaller batch"
    if calls and all(re.search(_OF_THE_HOST, call) for call in calls):
        advice = "pin host memory once, before the loop, and reuse it"
    elif facts.framework == "pytorch":
        advice += f"; no empty_cache() in the loop, {_EXPANDABLE}"
    findings = facts.costly(
        "alloc-stall",
        "alloc",
        f"the GPUs wait {{cost}} in {' and '.join(calls) or 'allocations'}",
        advice,
        medium=_ALLOC_MEDIUM,
    )
    worst = max(facts.allocators, key=lambda use: use.segments + use.segments_freed, default=None)
    reason = None if worst is None else _why_allocating(worst)
    if worst is None or reason is None:
        yield from findings
        return
    clause, advice = reason
    if worst.request_bytes:
        sizes = " and ".join(map(format_bytes, worst.request_bytes[:_SIZES_SAID]))
        more = len(worst.request_bytes) - _SIZES_SAID
        others = f" (and {more} more sizes)" if more > 0 else ""
        clause += f"; segments are allocated for tensors of {sizes}{others}"
    for finding in findings:
        evidence = {
            **finding.evidence,
            **{name: getattr(worst, name) for name in _OF_THE_ALLOCATOR},
            "request_bytes": max(worst.request_bytes, default=None),
        }
        message = f"{finding.message}; {clause}"
        yield replace(finding, message=message, advice=advice, evidence=evidence)


def _why_allocating(use: Allocator) -> tuple[str, str] | None:
    """Return why torch's allocator asks the GPU for memory in steady steps, and what helps."""
    steps = format_count(use.steps, "step")
    if use.retries:
        clause = (
            f"torch ran out of memory {format_count(use.retries, 'time')} in {steps}, released "
            f"its cache and retried, with {format_bytes(use.reserved_bytes)} reserved"
        )
        if use.split_bytes < _FRAGMENTED * use.reserved_bytes:
            return clause, (
                "use less memory: a smaller batch, activation checkpointing, sharded or offloaded "
                "optimizer states; nothing else on the card"
            )
        return f"{clause}, of which {format_bytes(use.split_bytes)} are unused fragments", (
            f"{_EXPANDABLE}, or max_split_size_mb:512 where the driver has no virtual memory; "
            "then a smaller batch"
        )
    if use.emptied and use.segments_freed:
        return (
            f"torch.cuda.empty_cache() is called {format_count(use.emptied, 'time')} in {steps}, "
            f"and {format_count(use.segments, 'segment')} of {format_bytes(use.segment_bytes)} "
            "are allocated again"
        ), "no torch.cuda.empty_cache() in the loop: the memory that it releases is needed again"
    if use.segments:
        return (
            f"torch allocates {format_count(use.segments, 'new segment')} of "
            f"{format_bytes(use.segment_bytes)} in {steps}, as none of its existing ones fits"
        ), (
            "use few input shapes: pad to the longest or to a few lengths, drop the last batch; "
            f"{_EXPANDABLE}"
        )
    return None


_OF_THE_ALLOCATOR: Final = (
    *("rank", "retries", "emptied", "segments", "segment_bytes", "segments_freed"),
    *("allocated_bytes", "reserved_bytes", "split_bytes"),
)
"""Evidence from `Allocator`."""
_SIZES_SAID: Final = 2
_ALLOC_MEDIUM: Final = 0.02
_ALLOC_NAMED: Final = 0.25
"""Part of the idle time that allocations take from which one of them is named."""
_OF_THE_HOST: Final = r"Host(Alloc|Register|Unregister)|AllocHost|(Malloc|Free)Host"
_VERSION: Final = r"_v\d+(_ptsz|_ptds)?$"


def _allocating_calls(facts: Facts) -> list[str]:
    """Return the names of the allocating calls that take most of the time in which GPUs idle for
    them, most first.
    """
    each = facts.per_gpu.each(_in_allocations, facts.working, facts.working_times)
    spent = sum(map(Counter, each), Counter())
    least = _ALLOC_NAMED * spent.total()
    return [name for name, ns in spent.most_common() if ns >= least]


def _in_allocations(gpu: GpuShardView, time: Intervals) -> dict[str, int]:
    """Return the nanoseconds of each allocating call in which a GPU idles for allocations."""
    if gpu.calls is None:
        return {}
    rows = np.flatnonzero(gpu.calls.sort == Call.ALLOC)
    idle = gpu.lane.causes.of["alloc"].intersection(time)
    within = idle.within(gpu.calls.start[rows], gpu.calls.end[rows])
    names = gpu.calls.name[rows]
    spent: Counter[str] = Counter()
    for id, text in gpu.trace.names(distinct_ids(names[within > 0])).items():
        spent[re.sub(_VERSION, "", text)] += int(within[names == id].sum())
    return dict(spent)


def sync_bound(facts: Facts) -> Iterator[Finding]:
    """The host is still in a synchronising call, of CUDA or MPI, when the GPU runs out of work, or
    launches late because it waited in one; without that wait, the host would have been ahead of the
    GPU.

    Cost: idle time with that cause, plus waits for launches after such calls, up to the time that
    the host spent in them.

    Wrong if: the step is no shorter without the synchronising call.
    """
    late = _launches_after_waits(facts)
    clause = ""
    if late >= _WORTH_SAYING * (late + facts.mean("sync")):
        clause = f", {format_ns(late)} of it before launches that the call delayed"
    advice = _RUN_AHEAD.get(facts.framework or "training" * facts.trains, _RUN_AHEAD["training"])
    is_pinned = facts.is_pinned("h2d") and facts.is_pinned("d2h")
    advice = advice.format(pinned="" if is_pinned else " to and from pinned memory")
    in_mpi = facts.mean_over_gpus(_in_mpi)
    if in_mpi >= _WORTH_SAYING * (late + facts.mean("sync")):
        clause += f", {format_ns(in_mpi)} of it in MPI, for other ranks"
    if 2 * in_mpi > late + facts.mean("sync"):
        advice = _EXCHANGE_MEANWHILE
    yield from facts.costly(
        "sync-bound",
        "sync",
        "the GPUs idle {cost} because the host waits in a synchronising call" + clause,
        advice,
        beside=late,
    )


def _in_mpi(gpu: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of some time that a GPU idles while its host waits in MPI."""
    return gpu.lane.causes.in_mpi.intersection(time).total


def _launches_of_sync_bound(facts: Facts) -> int:
    """Return the nanoseconds per step of waits for launches that `sync_bound` alone counts: those
    after its calls, if a host that does not wait would gain more than one that launches sooner.
    Pauses of the host have a cause of their own, and are told as well.
    """
    finding = None if _waits_are_long(facts) else next(sync_bound(facts), None)
    if finding is None or finding.impact_ns < _NEARLY_ALL * facts.mean("launch"):
        return 0
    return _launches_after_waits(facts)


def _launches_after_waits(facts: Facts) -> int:
    """Return the nanoseconds per step of waits for launches that synchronising calls cause.

    Threads of a process that feeds several GPUs wait for each other too: of them nothing is told.
    """
    return 0 if _feeds_several(facts) else facts.mean_over_gpus(_late_after_waits)


def _feeds_several(facts: Facts) -> bool:
    """Return whether one process feeds several GPUs."""
    processes = [lane.gpu.process for lane in facts.working]
    return len(processes) > len(set(processes))


def _late_after_waits(gpu: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of waits for launches in some time that a host would not come late
    for, had it not waited in synchronising calls before.

    Without a wait, all that follows on the host is earlier by its length. That lead is used up by
    the times in which the GPU idles.
    """
    calls, causes = gpu.calls, gpu.lane.causes.of
    if calls is None:
        return 0
    issued_by = calls.issued_by(gpu.operations.events)
    feeders = distinct_ids(calls.thread[issued_by[issued_by != NOBODY]]).tolist()
    waits = [calls.of_thread(thread, Call.SYNC, Call.COPY) for thread in feeders]
    waits += calls_held_by_copies(gpu.operations, calls).values()
    blocked = reduce(merge_touching, waits, EMPTY).intersection(time)
    idle = {name: times.intersection(time) for name, times in causes.items() if name != "sync"}
    moments = np.concatenate([blocked.end, *(times.start for times in idle.values())])
    gained = blocked.lengths - causes["sync"].within(blocked.start, blocked.end)
    change = np.concatenate([gained, *(-times.lengths for times in idle.values())])
    is_launch = np.repeat(
        [False, *(name == "launch" for name in idle)],
        [len(blocked), *(len(times) for times in idle.values())],
    )
    order = np.argsort(moments, kind="stable")
    total = np.cumsum(change[order])
    lead = total - np.minimum(np.minimum.accumulate(total), 0)
    used = -np.diff(lead, prepend=0)[is_launch[order]]
    return int(used.sum())


def launch_bound(facts: Facts) -> Iterator[Finding]:
    """The GPUs wait for the host to launch work; or gaps below 5 µs before kernels that were
    already launched take 5 % of the time.

    Cost: idle time with that cause, plus these gaps; less the part that `sync-bound` counts, if
    `sync-bound` costs more.

    Wrong if: the step is no shorter with half the batch size, or in a CUDA graph.
    """
    between = _between_kernels(facts)
    clause = _tiny_kernels(facts)
    if between:
        clause = f", {format_ns(between)} of it between consecutive kernels" + clause
    if _waits_are_long(facts):
        clause += f", mostly in pauses of over {format_ns(_LONG_GAP_NS)}"
    findings = facts.costly(
        "launch-bound",
        "launch",
        "the GPUs wait {cost} for the host to launch work" + clause,
        _advice_on_launches(facts),
        beside=between - _launches_of_sync_bound(facts),
    )
    for finding in findings:
        evidence = {**finding.evidence, "long_waits_ns": _long_waits(facts)[0]}
        yield replace(finding, evidence=evidence)


def _between_kernels(facts: Facts) -> int:
    """Return the nanoseconds per step of such gaps; 0 if they are too few to matter."""
    cost = facts.mean_over_gpus(_handovers)
    return cost if cost >= MEDIUM * facts.mean_ns else 0


def _handovers(gpu: GpuShardView, time: Intervals) -> int:
    gaps = gpu.lane.causes.of["other_idle"].intersection(time)
    return int(gaps.lengths[gaps.lengths <= _HANDOVER_NS].sum())


def _tiny_kernels(facts: Facts) -> str:
    """Return a clause on the share of kernels too short to hide a launch, if most are."""
    if facts.kernels is None or _waits_are_long(facts):
        return ""
    launches, count = facts.kernels.launches, facts.kernels.count
    if launches.tiny_count < _MOSTLY_TINY * count:
        return ""
    limit = format_ns(launches.tiny_limit_ns)
    return f"; {launches.tiny_count / count:.0%} of the kernels are shorter than {limit}"


def _waits_are_long(facts: Facts) -> bool:
    """Return whether few long gaps, not many short ones, take most of the time."""
    long, total = _long_waits(facts)
    return long > 0.5 * total


def _long_waits(facts: Facts) -> tuple[int, int]:
    """Return the nanoseconds per step that the GPUs wait for launches, in long gaps and in all."""
    waits = facts.per_gpu.each(_launch_waits, facts.working, facts.working_times)
    long, total = np.array(waits, np.int64).reshape(-1, 2).sum(axis=0).tolist()
    return long // facts.turns, total // facts.turns


def _launch_waits(gpu: GpuShardView, time: Intervals) -> tuple[int, int]:
    """Return the nanoseconds that a GPU waits for launches, in long gaps and in all."""
    waits = gpu.lane.causes.of["launch"].intersection(time)
    return int(waits.lengths[waits.lengths > _LONG_GAP_NS].sum()), waits.total


def _advice_on_launches(facts: Facts) -> str:
    """Return the advice: threads of one process hold each other up, and few long gaps have another
    remedy than many short ones.
    """
    if _feeds_several(facts) and (facts.trains or facts.mean("communication")):
        return ONE_PROCESS.get(facts.framework, ONE_PROCESS_ELSE)
    if _waits_are_long(facts):
        return "the host does other things for milliseconds at a time: see what it does in the gaps"
    return _LAUNCH_LESS.get(
        facts.framework, "launch less often and sooner: CUDA graphs, fused kernels, larger batches"
    )


def idle_unexplained(facts: Facts) -> Iterator[Finding]:
    """The GPUs are idle and nothing in the trace explains why, or most of that idle time ends when
    a page of managed memory migrates on access.

    Cost: idle time with that cause, less the part that `launch-bound` counts.

    Wrong if: a more detailed recording (`--python`, all calls) shows another cause, or the step is
    no shorter with managed memory prefetched.
    """
    why = ", and the trace does not show why: "
    if 2 * sum(facts.per_gpu.each(_before_pages, facts.working, facts.working_times)) > sum(
        row.of("other_idle") for row in facts.rows
    ):
        why = " before page migrations of managed memory, one after another as pages are accessed"
        advice = "move managed memory before it is used (cudaMemPrefetchAsync), or fill it on "
        advice += "the GPU; or cudaMalloc and copies"
    elif not facts.per_gpu.has_calls:
        why += "its CUDA API calls were not recorded"
        advice = "record CUDA API calls too (gputrace record, or nsys -t cuda,nvtx,osrt)"
    elif 2 * facts.mean_over_gpus(_before_unknown_calls) > facts.mean("other_idle"):
        why += "the calls that issued the next operations were not recorded"
        advice = "record CUDA API calls from the start (gputrace record, or nsys -t cuda)"
    else:
        why += "work had been issued and was waiting"
        advice = "check which events and streams the work waits for, and the other GPUs"
    yield from facts.costly(
        "idle-unexplained",
        "other_idle",
        "the GPUs run nothing for {cost}" + why,
        advice,
        beside=-_between_kernels(facts),
    )


def _before_pages(gpu: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of unexplained idle time that end with a page of managed memory."""
    moved = gpu.once(_moved_pages)
    pages = moved.select(is_on(moved, gpu.operations.gpu))
    idle = gpu.lane.causes.of["other_idle"].intersection(time)
    return int(idle.lengths[is_among(idle.end, pages.start)].sum())


def _moved_pages(shard: Shard) -> Events:
    """Return the copies of pages of managed memory on all GPUs."""
    columns = ("start", "end", "source_memory", "process", "device")
    moved = shard.trace.events([Kind.COPY_H2D, Kind.COPY_D2H, Kind.COPY_D2D], columns)
    return moved.select(moved.source_memory == Memory.MANAGED)


def _before_unknown_calls(gpu: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of unexplained idle time before operations without a known call."""
    causes = gpu.lane.causes
    idle = causes.of["other_idle"].intersection(time)
    cause = np.minimum(search(causes.ends, idle.end), max(len(causes.ends) - 1, 0))
    return int(idle.lengths[causes.feeder[cause] == NOBODY].sum()) if len(idle) else 0


def _calls_each_step(facts: Facts, sort: Call) -> int:
    """Return the calls of a sort in the median measured step, over all ranks."""
    starts = np.sort(np.concatenate(facts.per_gpu.each_shard(_starts_of, sort)))
    steps = {(s.rank, s.step): (s.start_ns, s.end_ns) for s in facts.measured}
    begins, ends = np.searchsorted(starts, np.array([*steps.values()], np.int64).reshape(-1, 2)).T
    spans: dict[int, int] = {}
    for (_, step), count in zip(steps, (ends - begins).tolist(), strict=True):
        spans[step] = max(spans.get(step, 0), count)
    return int(median(list(spans.values())))


def _starts_of(shard: Shard, sort: Call) -> Times:
    """Return the start times of calls of a sort; of allocations, only of those that block."""
    calls = shard.calls
    if calls is None:
        return np.empty(0, np.int64)
    rows = np.flatnonzero(calls.sort == sort)
    if sort == Call.ALLOC:
        ordered = shard.trace.search(distinct_ids(calls.name[rows]), _IN_ORDER)
        rows = rows[~np.isin(calls.name[rows], list(ordered))]
    return calls.start[rows]


def _uses_cudnn(facts: Facts) -> bool:
    ids = distinct_ids(
        np.concatenate([operations.names for operations in facts.per_gpu.operations])
    )
    return any(re.search(_CUDNN, name) for name in facts.trace.names(ids).values())


def _idle_between_allocations(facts: Facts) -> int:
    """Return the mean idle time per GPU and step between the first and last allocation of each
    thread, in nanoseconds.
    """
    measured = [facts.measured_of(lane.gpu) for lane in facts.working]
    steps = [[(step.start_ns, step.end_ns) for step in gpu_steps] for gpu_steps in measured]
    return sum(facts.per_gpu.each(_idle_in, facts.working, steps)) // max(
        sum(map(len, measured)), 1
    )


def _idle_in(gpu: GpuShardView, steps: Sequence[tuple[int, int]]) -> int:
    calls, gaps, total = gpu.calls, gpu.lane.timeline.gaps, 0
    if calls is None:
        return 0
    edges = [
        calls.first[[threads.start, threads.stop]]
        for threads in map(calls.threads_of, sorted({of for of, _ in gpu.operations.gpu.pairs}))
    ]
    allocs = np.concatenate(
        [low + np.flatnonzero(calls.sort[low:high] == Call.ALLOC) for low, high in edges]
    )
    for start, end in steps:
        inside = allocs[(calls.start[allocs] >= start) & (calls.end[allocs] <= end)]
        callers = calls.thread[inside]
        by_caller = [inside[callers == thread] for thread in distinct_ids(callers)]
        firsts = [int(calls.start[rows].min()) for rows in by_caller]
        lasts = [int(calls.end[rows].max()) for rows in by_caller]
        total += gaps.intersection(union(firsts, lasts)).total
    return total
