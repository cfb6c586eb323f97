"""Findings about GPUs that idle, or run kernels that wait; of input see `data_feeding`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.cuda_api_calls import NOBODY, Call
from gputrace.analyzers.findings.copies import is_on, is_pinned, read_copies
from gputrace.analyzers.findings.data_feeding import find_loaders
from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.gpu_shards import GpuShardView, Shard
from gputrace.analyzers.grouping import median
from gputrace.analyzers.host_state import measure_allocators, read_counters
from gputrace.analyzers.kernel_names import family_of
from gputrace.analyzers.ledger import AT_EDGES
from gputrace.analyzers.ledger.causes import Host, take_amount
from gputrace.analyzers.step_phases import read_phases
from gputrace.model.events import Events, Kind, Memory, distinct_ids, is_among
from gputrace.model.host import FORWARD, OPTIMIZER, OTHER, Allocator
from gputrace.model.intervals import EMPTY, Intervals, search, union
from gputrace.model.results import Evidence, Finding
from gputrace.units import format_bytes, format_count, format_ns

_LAUNCH_LESS: Final = {
    "pytorch": "launch less often and sooner: CUDA graphs or "
    "torch.compile(mode='reduce-overhead'), larger batches, fused optimizers, less Python "
    "between launches",
    "tensorflow": "launch less often: tf.function with jit_compile=True, larger batches, "
    "steps_per_execution",
    "jax": "launch less often: jit the whole step, lax.scan over several steps, larger batches",
}
_FOREACH: Final = (
    "at {}, call functions that take many tensors at once (torch._foreach_*; for averages of "
    "weights, torch.optim.swa_utils with get_ema_multi_avg_fn), or compile that function; in the "
    "passes, CUDA graphs or torch.compile(mode='reduce-overhead')"
)
_FUSE: Final = "update all parameters at once (fused=True, else foreach=True, of the optimizer)"
_FEWER_BATCHES: Final = "fewer, larger batches a step where memory allows"
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
_SEARCH_ALLOCATIONS: Final = 20
_SEARCH_SYNCHRONISATIONS: Final = 20
"""Allocations and synchronisations per step and GPU that only a search for algorithms makes."""
_STREAM_ORDERED: Final = "Async"
"""Names of stream-ordered allocations, which do not block."""
_CUDNN: Final = r"(?i)cudnn|(?<![a-z])conv(?!ert)|convol"


def claim_autotune(host: Host) -> Intervals:
    """Prove an algorithm search in every step: from the first allocation of each thread in a step
    to its last, where cuDNN runs and the threads that feed the GPU make 20 allocations and 20
    synchronisations in each step.
    """
    calls, (starts, ends) = host.view.calls, host.steps
    if calls is None or not len(starts):
        return EMPTY
    names = host.view.trace.names(distinct_ids(host.view.operations.events.name)).values()
    # Attention by cuDNN is not searched for.
    if not any(re.search(_CUDNN, name) and family_of(name) != "attention" for name in names):
        return EMPTY
    begins, finishes = [], []
    counts = {Call.ALLOC: np.zeros(len(starts)), Call.SYNC: np.zeros(len(starts))}
    for thread in host.issuers:
        first, stop = calls.first[thread : thread + 2].tolist()
        for sort, count in counts.items():
            rows = first + np.flatnonzero(calls.sort[first:stop] == sort)
            if sort == Call.ALLOC:
                rows = rows[~host.view.trace.matches(calls.name[rows], _STREAM_ORDERED)]
            low, high = np.searchsorted(calls.start[rows], np.stack([starts, ends]))
            count += high - low
            if sort == Call.ALLOC:
                some = high > low
                begins.append(calls.start[rows[low[some]]])
                finishes.append(calls.end[rows[high[some] - 1]])
    least = min(
        median(counts[Call.ALLOC]) / _SEARCH_ALLOCATIONS,
        median(counts[Call.SYNC]) / _SEARCH_SYNCHRONISATIONS,
    )
    if least < 1:
        return EMPTY
    return union(np.concatenate(begins), np.concatenate(finishes))


def autotune_repeated(facts: Facts) -> Iterator[Finding]:
    """Steady steps have 20 allocations and 20 synchronisations per step and GPU, and run cuDNN
    kernels.

    Cost: idle time between the first and the last allocation of each thread.

    Wrong if: the allocations remain with `cudnn.benchmark` off.
    """
    cost = facts.ledger.mean("autotune-repeated")
    if not cost:
        return
    share = facts.share_of(cost)
    counts = facts.each(_count_searching)
    allocs, syncs = (sum(count) // facts.turns for count in zip(*counts, strict=True))
    yield facts.finding(
        "autotune-repeated",
        severity_of(share) or "low",
        cost,
        f"{facts.do('wait')} {facts.of_step(cost)} for cuDNN's algorithm search",
        "turn the search off (torch.backends.cudnn.benchmark = False), or keep the threads that "
        "it ran in: DistributedDataParallel instead of DataParallel, constant input shapes",
        {"allocations": allocs, "synchronisations": syncs, "share": round(share, 4)},
        [f"it makes {allocs:,} allocations and {syncs:,} synchronisations in each step of a GPU"],
    )


def _count_searching(gpu: GpuShardView, time: Intervals) -> list[int]:
    """Return the allocations and the synchronisations of the threads that feed a GPU."""
    if gpu.calls is None:
        return [0, 0]
    edges = [slice(*gpu.calls.first[thread : thread + 2]) for thread in Host(gpu).issuers]
    return [
        sum(
            int(
                np.count_nonzero(time.contains(gpu.calls.start[rows][gpu.calls.sort[rows] == sort]))
            )
            for rows in edges
        )
        for sort in (Call.ALLOC, Call.SYNC)
    ]


_EXPANDABLE: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def alloc_stall(facts: Facts) -> Iterator[Finding]:
    """Memory is allocated, pinned or freed (cudaMalloc, cudaHostRegister, cudaFree) while the GPU
    waits; `medium` from 2 %.

    The calls that take most of that time are named. If torch's allocator was recorded, it
    also says whether memory ran out, the program emptied the cache, or steady steps need new
    segments: of which size, and for tensors of which sizes.

    Cost: idle time with that cause.

    Wrong if: the step is no shorter with constant shapes.
    """
    share = facts.share_of(facts.ledger.mean("alloc-stall"))
    calls: list[str] = []
    if share >= ALLOC_MEDIUM_SHARE:
        each = facts.each(_in_allocations)
        spent = sum(map(Counter, each), Counter())
        least = _NAMED_CALL_PART * spent.total()
        calls = [name for name, ns in spent.most_common() if ns >= least]
    advice = "keep memory allocated: constant shapes, a pool, a smaller batch"
    if calls and all(re.search(_HOST_MEMORY_CALLS, call) for call in calls):
        advice = "pin host memory once, before the loop, and reuse it"
    elif not facts.framework:
        advice = "allocate memory once, before the loop, and reuse it (or cudaMallocAsync: a pool)"
    elif facts.framework == "pytorch":
        advice += f"; no empty_cache() in the loop, {_EXPANDABLE}"
    worst = max(
        facts.once(find_allocators), key=lambda use: use.segments + use.segments_freed, default=None
    )
    reason = None if worst is None else _why_allocating(worst)
    details: list[str] = []
    more: Evidence = {}
    if worst is not None and reason is not None:
        clause, advice = reason
        details.append(clause)
        if worst.request_bytes:
            sizes = " and ".join(map(format_bytes, worst.request_bytes[:_SIZES_NAMED]))
            left = len(worst.request_bytes) - _SIZES_NAMED
            others = f" (and {left} more sizes)" if left > 0 else ""
            details.append(f"segments are allocated for tensors of {sizes}{others}")
        more = {
            **{name: getattr(worst, name) for name in _ALLOCATOR_EVIDENCE},
            "request_bytes": max(worst.request_bytes, default=None),
        }
    for finding in facts.costly(
        "alloc-stall",
        f"{{gpus}} in {' and '.join(calls) or 'allocations'} {{cost}}",
        advice,
        details,
        medium=ALLOC_MEDIUM_SHARE,
    ):
        yield replace(finding, evidence={**finding.evidence, **more})


def find_allocators(facts: Facts) -> tuple[Allocator, ...]:
    """Return torch's allocator in the measured steps, by rank; empty where it was not read."""
    shard = facts.per_gpu.whole
    counters, phases = shard.once(read_counters), shard.once(read_phases)
    return measure_allocators(counters, facts.processes, facts.timed or facts.steps, phases)


_FRAGMENTED_PART: Final = 0.1
"""Unused part of reserved memory that cannot be given back, from which it is fragmented."""


def _why_allocating(use: Allocator) -> tuple[str, str] | None:
    """Return why torch's allocator asks the GPU for memory in steady steps, and what helps."""
    steps = format_count(use.steps, "step")
    if use.retries:
        clause = (
            f"torch ran out of memory {format_count(use.retries, 'time')} in {steps}, released "
            f"its cache and retried, with {format_bytes(use.reserved_bytes)} reserved"
        )
        if use.split_bytes < _FRAGMENTED_PART * use.reserved_bytes:
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
        ), "take torch.cuda.empty_cache() out of the loop: the memory it frees is needed again"
    if use.segments:
        return (
            f"torch allocates {format_count(use.segments, 'new segment')} of "
            f"{format_bytes(use.segment_bytes)} in {steps}, as none of its existing ones fits"
        ), (
            "use few input shapes: pad to the longest or to a few lengths, drop the last batch; "
            f"{_EXPANDABLE}"
        )
    return None


_ALLOCATOR_EVIDENCE: Final = (
    *("rank", "retries", "emptied", "segments", "segment_bytes", "segments_freed"),
    *("allocated_bytes", "reserved_bytes", "split_bytes"),
)
"""Evidence from `Allocator`."""
_SIZES_NAMED: Final = 2
ALLOC_MEDIUM_SHARE: Final = 0.02
_NAMED_CALL_PART: Final = 0.25
"""Part of the idle time that allocations take from which one of them is named."""
_HOST_MEMORY_CALLS: Final = r"Host(Alloc|Register|Unregister)|AllocHost|(Malloc|Free)Host"
_VERSION_SUFFIX: Final = r"_v\d+(_ptsz|_ptds)?$"


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
        spent[re.sub(_VERSION_SUFFIX, "", text)] += int(within[names == id].sum())
    return dict(spent)


def claim_late_after_waits(host: Host) -> Intervals:
    """Prove waits for launches that the host would not come late for, had it not waited in
    synchronising calls before.

    Without a wait, all that follows on the host is earlier by its length. That lead is used up by
    the times in which the GPU idles. Threads of a process that feeds several GPUs wait for each
    other too: of them nothing is proven.
    """
    late = host.left["launch"]
    if host.feeds > 1 or not len(late) or not len(host.blocked):
        return EMPTY
    blocked, causes = host.blocked.clip(*host.window), host.view.lane.causes.of
    others = [causes[name].clip(*host.window) for name in causes if name not in ("sync", "launch")]
    others.append(causes["launch"].clip(*host.window).difference(late))
    idle = [late, *others]
    moments = np.concatenate([blocked.end, *(times.start for times in idle)])
    gained = blocked.lengths - causes["sync"].within(blocked.start, blocked.end)
    change = np.concatenate([gained, *(-times.lengths for times in idle)])
    is_late = np.repeat([False, True, False], [len(blocked), len(late), sum(map(len, others))])
    order = np.argsort(moments, kind="stable")
    total = np.cumsum(change[order])
    lead = total - np.minimum(np.minimum.accumulate(total), 0)
    used = np.zeros(len(moments), np.int64)
    used[order] = np.maximum(-np.diff(lead, prepend=0), 0)
    return take_amount(late, used[is_late])


_RUN_AHEAD: Final = {
    "pytorch": "let the host run ahead: no .item(), .cpu() or print of a result in every step, "
    "non_blocking copies, no cudaDeviceSynchronize",
    "tensorflow": "let the host run ahead: no .numpy() or print of a result in every step; several "
    "steps in one tf.function (steps_per_execution)",
    "jax": "let the host run ahead: no float(), print or block_until_ready of a result in every "
    "step",
    "mxnet": "let the host run ahead: no .asnumpy(), .asscalar() or waitall in every step",
    "training": "let the host run ahead: read no loss or metric in every step, copy asynchronously",
    "": "let the host run ahead: no cudaDeviceSynchronize or cudaEventSynchronize but where it "
    "needs a result, cudaMemcpyAsync{pinned}; read results less often",
}
"""Advice where the host waits for GPUs, by framework: the last for programs that do not train."""
_EXCHANGE_MEANWHILE: Final = (
    "overlap the exchange with GPU work: MPI_Isend and MPI_Irecv before kernels that do not need "
    "the data; NCCL or a CUDA-aware MPI between GPUs; check all ranks for the last to arrive"
)
_NAMED_PART: Final = 0.05
"""Share of a cost from which a detail names it."""


def sync_bound(facts: Facts) -> Iterator[Finding]:
    """The host is still in a synchronising call, of CUDA or MPI, when the GPU runs out of work, or
    launches late because it waited in one; without that wait, the host would have been ahead of the
    GPU.

    Cost: idle time with that cause, plus waits for launches after such calls, up to the time that
    the host spent in them.

    Wrong if: the step is no shorter without the synchronising call.
    """
    cost, in_call = facts.ledger.mean("sync-bound"), facts.mean("sync")
    details, late = [], max(cost - in_call, 0)
    if late >= _NAMED_PART * cost:
        details.append(f"{format_ns(late)} of it is before launches that the call delayed")
    advice = _RUN_AHEAD.get(facts.framework or "training" * facts.trains, _RUN_AHEAD["training"])
    pinned = is_pinned(facts, "h2d") and is_pinned(facts, "d2h")
    advice = advice.format(pinned="" if pinned else " to and from pinned memory")
    in_mpi = facts.mean_over_gpus(_in_mpi)
    if in_mpi >= _NAMED_PART * cost:
        details.append(f"{format_ns(in_mpi)} of it is in MPI, for other ranks")
    if 2 * in_mpi > cost:
        advice = _EXCHANGE_MEANWHILE
    if 2 * (early := facts.mean_over_gpus(_in_first_waits)) > cost:
        details.append(
            f"{format_ns(early)} of it is where the recording begins: the GPUs may have run what "
            "was issued before"
        )
        advice = _START_IDLE
    yield from facts.costly(
        "sync-bound",
        "{gpus} {cost}: the host waits in a synchronising call",
        advice,
        details,
        verb="idle",
    )


_START_IDLE: Final = (
    "record more, or from a moment at which nothing runs: synchronise before the profiler starts"
)
_RAN_BEFORE: Final = 0.01
"""Most that a GPU has run before a wait for there to be nothing recorded that is waited for, as a
part of the wait."""


def _in_first_waits(gpu: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of some time that a GPU idles in synchronising calls before which next
    to nothing that it ran was recorded.
    """
    timeline, waits = gpu.lane.timeline, gpu.lane.causes.of["sync"].intersection(time)
    begins = np.full(len(waits), timeline.window.start)
    ran = timeline.busy.within(begins, waits.start)
    return waits.select(ran < _RAN_BEFORE * waits.lengths).total


def _in_mpi(gpu: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of some time that a GPU idles while its host waits in MPI."""
    return gpu.lane.causes.in_mpi.intersection(time).total


def claim_graph_gaps(host: Host) -> Intervals:
    """Prove gaps between two operations of one launch, which are nodes of a CUDA graph."""
    idle, events = host.left["other_idle"], host.view.operations.events
    if not len(idle):
        return EMPTY
    ending = host.ending_operations(idle)
    issued = events.correlation[ending]
    same = (ending > 0) & (issued > 0) & (issued == events.correlation[np.maximum(ending - 1, 0)])
    return idle.select(same)


_KERNEL_GAP_NS: Final = 5_000
"""Gaps up to this before work that had been issued are the GPU's own price of a launch: 1 to 2.5 µs
from kernel to kernel."""


def claim_kernel_gaps(host: Host) -> Intervals:
    """Prove gaps so short that they are the GPU's own price of a launch."""
    idle = host.left["other_idle"]
    idle = idle.select(host.feeders(idle) != NOBODY)
    return idle.select(idle.lengths <= _KERNEL_GAP_NS)


_MANY_SYNCHRONISATIONS: Final = 50
"""Synchronising calls a step from which the finding about launches names them."""
_TINY_KERNELS_SHARE: Final = 0.5
"""Share of the kernels that must be tiny for the finding about launches to say so."""


def launch_bound(facts: Facts) -> Iterator[Finding]:
    """The GPUs wait for the host to launch work while it launches at its own pace: it is in a CUDA
    call, or less than a millisecond lies between two of them; or gaps below 5 µs before kernels
    that were already launched take 5 % of the time.

    Cost: idle time with that cause, plus these gaps.

    Wrong if: the step is no shorter with half the batch size, or in a CUDA graph.
    """
    between = facts.ledger.mean("kernel-gaps")
    between = between if between >= MEDIUM * facts.mean_ns else 0
    if not between and not facts.is_costly("launch-bound"):
        return
    kernels = facts.kernels
    details = [f"{format_ns(between)} of it is between consecutive kernels"] if between else []
    if kernels and kernels.launches.tiny_count >= _TINY_KERNELS_SHARE * kernels.count:
        share, limit = kernels.launches.tiny_count / kernels.count, kernels.launches.tiny_limit_ns
        details.append(f"{share:.0%} of the kernels take less than {format_ns(limit)}")
    if facts.all_steps.cost is None and facts.trace.source == "gputrace":
        has_stretches = facts.trains and facts.framework not in ("jax", "tensorflow")
        has_stretches = has_stretches and Kind.GRAPH not in facts.trace.kinds
        known_by = _BY_STRETCHES if has_stretches else _BY_PACE
        details.append(f"the recorder's own part of it is unknown: {known_by}")
    advice = _LAUNCH_LESS.get(
        facts.framework, "launch less often and sooner: CUDA graphs, fused kernels, larger batches"
    )
    if facts.infers:
        advice = advice.replace("fused optimizers, ", "")
    waits = facts.mean_over_gpus(_synchronisations)
    # Without steps, those of start-up count, too: each copy of the weights is one.
    if facts.measured and waits >= _MANY_SYNCHRONISATIONS:
        often = f"the host synchronises {waits:,} times in {facts.per}"
        details.append(f"{often}, and launches nothing ahead")
        advice += f"; {_RUN_AHEAD.get(facts.framework, _RUN_AHEAD['training'])}".format(pinned="")
    processes = [lane.gpu.process for lane in facts.working]
    feeds_several = len(processes) > len(set(processes))
    if feeds_several and (facts.trains or facts.mean("communication")):
        # Threads of one process hold each other up.
        advice = ONE_PROCESS.get(facts.framework, ONE_PROCESS_ELSE)
    elif facts.framework == "pytorch":
        phase, line = _launching_phase(facts)
        advice = _FOREACH.format(line) if phase == OTHER and line else advice
        if phase == OPTIMIZER:
            advice = f"{_FUSE}; {advice.replace('fused optimizers, ', '')}"
    batches = max((each.batches_per_step for each in facts.once(find_loaders)), default=0.0)
    if facts.trains and batches >= _SEVERAL_BATCHES:
        details.append(f"each step takes {batches:.0f} batches")
        advice = f"{_FEWER_BATCHES}; {advice.replace('larger batches, ', '')}"
    yield from facts.costly(
        "launch-bound",
        "{gpus} {cost} for the host to launch work",
        advice,
        details,
        beside=("kernel-gaps",) if between else (),
    )


_SEVERAL_BATCHES: Final = 2.0
"""Batches of a step from which their gradients are taken to be accumulated."""
_BY_STRETCHES: Final = "recordings of 200 steps, without a window, measure it"
_BY_PACE: Final = "compare the program's own pace with and without it"
"""How to know what recording costs: by control stretches, which programs of XLA or with CUDA graphs
do not have, nor those that do not train; or without."""


def _launching_phase(facts: Facts) -> tuple[str, str]:
    """Return the phase of a step that has most of the waits for launches, and the line that
    launches; empty where none has over half of them, or that is unknown.
    """
    row = facts.at_line("launch-bound")
    if row is None or not (ranks := [of for of in facts.step_phases if of.rank == row.rank]):
        return "", ""
    waits = {phase.name: phase.launch_ns or 0 for phase in ranks[0].phases}
    most = max(waits, key=lambda name: waits[name])
    is_known = waits[FORWARD] > 0 and 2 * waits[most] > sum(waits.values())
    return (most, row.line or "") if is_known else ("", "")


def _synchronisations(gpu: GpuShardView, time: Intervals) -> int:
    """Return the synchronising calls that a GPU's host makes in some time."""
    if gpu.calls is None:
        return 0
    waits = gpu.calls.sort == Call.SYNC
    return int(np.count_nonzero(time.contains(gpu.calls.start[waits])))


def graph_gaps(facts: Facts) -> Iterator[Finding]:
    """Gaps between the nodes of CUDA graphs take 5 % of the time (`low`).

    Cost: these gaps.

    Wrong if: the gaps remain with fewer nodes.
    """
    yield from facts.costly(
        "graph-gaps",
        "{gpus} {cost} between the nodes of CUDA graphs",
        "fewer and larger nodes: fused kernels (torch.compile, Triton), larger batches",
        verb="idle",
    )


def idle_unexplained(facts: Facts) -> Iterator[Finding]:
    """The GPUs are idle and nothing in the trace explains why, or most of that idle time ends when
    a page of managed memory migrates on access.

    Cost: idle time with that cause.

    Wrong if: a more detailed recording (`--python`, all calls) shows another cause, or the step is
    no shorter with managed memory prefetched.
    """
    message, charged = "{gpus} {cost}", facts.ledger.of("idle-unexplained")
    message += ", and the trace does not show why"
    each = facts.each(_unexplained_before)
    before_pages, before_unknown = np.reshape(each, (-1, 2)).sum(axis=0).tolist()
    if 2 * before_pages > sum(row.of("other_idle") for row in facts.rows):
        message = "{gpus} {cost} before page migrations of managed memory"
        why = "pages migrate one after another as they are accessed"
        advice = "move managed memory before it is used (cudaMemPrefetchAsync), or fill it on "
        advice += "the GPU; or cudaMalloc and copies"
    elif not facts.per_gpu.has_calls:
        why = "its CUDA API calls were not recorded"
        advice = "record CUDA API calls too (gputrace record, or nsys -t cuda,nvtx,osrt)"
        if facts.trace.source == "rocprofv3":
            advice = "record HIP's calls too (rocprofv3 --runtime-trace)"
    elif 2 * (before_unknown // facts.turns) > facts.mean("other_idle"):
        why = "the calls that issued the next operations were not recorded"
        advice = "record CUDA API calls from the start (gputrace record, or nsys -t cuda)"
    elif 2 * sum(row.ns for row in charged if row.evidence == AT_EDGES) > sum(
        row.ns for row in charged
    ):
        why = "the recording begins before the GPUs' work, or ends after it"
        advice = "record some steps more (a profiler's schedule with more active steps)"
    else:
        why = "work had been issued and was waiting"
        advice = "check which events and streams the work waits for, and the other GPUs"
    yield from facts.costly("idle-unexplained", message, advice, [why], verb="idle")


def _unexplained_before(gpu: GpuShardView, time: Intervals) -> tuple[int, int]:
    """Return the nanoseconds of unexplained idle time that end with a page of managed memory, and
    those before operations without a known call.
    """
    causes, moved = gpu.lane.causes, gpu.once(_moved_pages)
    idle = causes.of["other_idle"].intersection(time)
    pages = moved.select(is_on(moved, gpu.operations.gpu))
    before_pages = idle.lengths[is_among(idle.end, pages.start)]
    if not len(idle) or not len(causes.ends):
        return int(before_pages.sum()), 0
    cause = np.minimum(search(causes.ends, idle.end), len(causes.ends) - 1)
    unknown = idle.lengths[causes.feeder[cause] == NOBODY]
    return int(before_pages.sum()), int(unknown.sum())


def _moved_pages(shard: Shard) -> Events:
    """Return the copies of pages of managed memory on all GPUs."""
    copies = shard.trace.once(read_copies)
    is_moved = (copies.source_memory == Memory.MANAGED) & (copies.kind != Kind.COPY_PEER)
    return copies.select(is_moved)
