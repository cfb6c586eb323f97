"""Phases of a run that are not steady training: what they cost and who waits in them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, Call, find_captures
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.grouping import StepsOf, median, times_by_process
from gputrace.analyzers.kernel_names import PRODUCTS, family_of
from gputrace.analyzers.lanes import AnyLane, AnyLaneSummary, Lane, LaneSummary
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps import BlockedSteps, FoundSteps, find_blocked_steps
from gputrace.analyzers.steps.windows import Interlude, StepWindows
from gputrace.model.events import IdLookup, Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, union
from gputrace.model.results import Phase, Step
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES
from gputrace.model.trace import Trace
from gputrace.units import format_count, format_ids, format_ns

_WORKING_PART: Final = 0.1
"""Minimum work of a rank in a phase, relative to the busiest rank, for it not to be waiting."""
_NAMED_CAUSE_PART: Final = 0.05
"""Minimum part of the cost of warm-up for a cause to be named."""


def list_phases(
    gpus: PerGpu,
    lanes: Sequence[AnyLaneSummary],
    all_steps: FoundSteps,
    steps: Sequence[Step],
    causes: Mapping[int, Mapping[str, int]],
) -> tuple[Phase, ...]:
    """List warm-up, validation, checkpoints and first steps of epochs of every rank.

    The first lane of each rank stands for it; ``causes`` are those of warm-up, by rank.
    """
    by_rank, blocked = all_steps.by_rank, list(find_blocked_steps(all_steps.by_rank))
    first_of = {lane.gpu.rank: lane for lane in reversed(lanes)}
    lanes = [lane for lane in reversed(first_of.values()) if lane.gpu.rank in by_rank]
    steps_of, arguments = StepsOf(steps), []
    for lane in lanes:
        rank, waits = lane.gpu.rank, {}
        for step in steps_of(lane.gpu):
            waited = step.host_data_ns if step.gpu is None else step.data_feeding_ns
            waits[step.step] = waited or 0
        held = [step for step in blocked if step.rank == rank]
        arguments.append((by_rank[rank], causes.get(rank, {}), held, waits))
    columns = zip(*arguments, strict=True) if arguments else ((), (), (), ())
    listed = gpus.each(_phases, lanes, *columns, same=(all_steps.warmup,))
    return tuple(_who_waits([phase for phases in listed for phase in phases]))


def _phases(
    view: GpuShardView,
    windows: StepWindows,
    causes: Mapping[str, int],
    blocked: Sequence[BlockedSteps],
    waits: Mapping[int, int],
    warmup: int,
) -> list[Phase]:
    """List the phases of one rank; ``waits``: nanoseconds of each step waiting for data.

    Work between two steps of warm-up is part of it: compilers try kernels there.
    """
    lane = view.any_lane
    interludes = [i for i in windows.interludes if not 0 <= i.after < warmup - 1]
    return [
        *_warmup(lane, windows, warmup, causes),
        *(_interlude(lane, windows, interlude) for interlude in interludes),
        *(_blocked(lane, steps) for steps in blocked),
        *_epochs(lane, windows, warmup, waits),
    ]


def _warmup(
    lane: AnyLane, windows: StepWindows, warmup: int, causes: Mapping[str, int]
) -> Iterator[Phase]:
    warm = min(warmup, len(windows))
    if not warm:
        return
    start, end = int(windows.start[0]), int(windows.end[warm - 1])
    later = windows.lengths[warm:]
    cost = end - start - warm * int(median(later)) if len(later) else 0
    evidence = f"{format_count(warm, 'step')} before three in a row at the speed of later steps"
    largest = sorted(causes.items(), key=lambda item: -item[1])
    named = [
        f"{WARMUP_CAUSES[c].told} {format_ns(ns)}"
        for c, ns in largest
        if ns > _NAMED_CAUSE_PART * cost
    ]
    if named and cost > 0:
        evidence += f"; of {format_ns(cost)} more than steady steps take: {', '.join(named)}"
    yield Phase(
        "warmup",
        lane.gpu.rank,
        start,
        end,
        lane.idle(start, end),
        evidence,
        cost_ns=max(cost, 0),
        causes=dict(largest),
    )


def _interlude(lane: AnyLane, windows: StepWindows, interlude: Interlude) -> Phase:
    start, end = interlude.start, interlude.end
    phase = Phase(
        interlude.phase,
        lane.gpu.rank,
        start,
        end,
        lane.idle(start, end),
        interlude.evidence,
        step=interlude.after,
        cost_ns=end - start,
        communication_ns=_of(lane, "communication", start, end),
    )
    if not isinstance(lane, Lane):
        return phase
    # Idle time from the start of the phase to its first operation, and before the next step's.
    busy, begins = lane.timeline.busy, int(windows.busy_from[interlude.after + 1])
    following = int(np.searchsorted(busy.end, start, "right"))
    first = int(busy.start[following]) if following < len(busy) else end
    last = int(np.searchsorted(busy.end, begins, "right")) - 1
    idle_from = max(int(busy.end[last]), start) if last >= 0 else start
    # A GPU that works on without a pause does not idle before the next step's first operation.
    if last + 1 < len(busy) and busy.start[last + 1] < begins:
        idle_from = begins
    before, after = max(min(first, end) - start, 0), max(begins - idle_from, 0)
    is_last = not any(i.after == interlude.after and i.start >= end for i in windows.interludes)
    return replace(phase, before_ns=before, after_ns=after if is_last else None)


def _blocked(lane: AnyLane, steps: BlockedSteps) -> Phase:
    start, end = steps.start, steps.end
    idle, joint = lane.idle(start, end), _of(lane, "communication", start, end)
    return Phase(
        steps.interlude.phase,
        lane.gpu.rank,
        start,
        end,
        idle,
        _describe_wait((steps.by,), joint, idle),
        step=steps.interlude.after,
        cost_ns=end - start,
        communication_ns=joint,
        waits_for=(steps.by,),
    )


def _describe_wait(ranks: Sequence[int], joint: int | None, idle: int | None) -> str:
    return (
        f"waits for {format_ids('rank', ranks)}: "
        f"{format_ns(joint or 0)} in communication, {format_ns(idle or 0)} idle"
    )


def _of(lane: AnyLane, name: str, start: int, end: int) -> int | None:
    row = lane.split(np.array([start]), np.array([end]))[0]
    return int(row[CLASSES.index(name)]) if len(row) else None


def _epochs(
    lane: AnyLane, windows: StepWindows, warmup: int, by_step: Mapping[int, int]
) -> Iterator[Phase]:
    """Yield the waits for data that begin epochs, given the waits in all steps of the lane."""
    if len(by_step) != len(windows):
        return
    waits = np.array([by_step[number] for number in range(len(windows))], np.int64)
    waits[:warmup] = median(waits)
    begins = find_epochs(waits, windows.lengths, {i.after + 1 for i in windows.interludes})
    usual = int(median(waits))
    for number in begins:
        start, end = int(windows.start[number]), int(windows.busy_from[number])
        evidence = (
            f"the first step of an epoch of {begins[1] - begins[0]} steps waits "
            f"{format_ns(waits[number])} for data, a usual one {format_ns(usual)}"
        )
        cost = int(waits[number]) - usual
        yield Phase(
            "epoch",
            lane.gpu.rank,
            start,
            max(start, end),
            lane.idle(start, max(start, end)),
            evidence,
            step=number,
            cost_ns=cost,
        )


def _who_waits(phases: Sequence[Phase]) -> Iterator[Phase]:
    """Yield the phases; those of ranks that only wait for others name the others."""
    # By step, nanoseconds in which the GPU of a rank computes or copies.
    by_step: dict[int | None, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for phase in phases:
        if phase.phase in _BETWEEN and not phase.waits_for and phase.idle_ns is not None:
            length = phase.end_ns - phase.start_ns
            work = length - phase.idle_ns - (phase.communication_ns or 0)
            by_step[phase.step][phase.rank] += work
    for phase in phases:
        done = by_step[phase.step]
        enough = _WORKING_PART * max(done.values(), default=0)
        if phase.waits_for or phase.phase not in _BETWEEN or done[phase.rank] >= enough:
            yield phase
            continue
        working = tuple(sorted(rank for rank, work in done.items() if work >= enough))
        evidence = _describe_wait(working, phase.communication_ns, phase.idle_ns)
        yield replace(phase, waits_for=working, evidence=evidence)


_BETWEEN: Final = ("validation", "checkpoint", "between")
"""Phases between steps."""
_LOADER_WAIT_RATIO: Final = 3.0
"""Minimum ratio to the usual wait of one in which a loader may begin anew."""
_LOADER_WAIT_SURPLUS: Final = 0.2
"""Minimum surplus of such a wait, as a fraction of a step."""
_SHORTEST_EPOCH: Final = 3
"""Minimum number of steps of an epoch; shorter ones may be a loader that stutters."""


def find_epochs(waits: Times, lengths: Times, after_phases: Collection[int] = ()) -> list[int]:
    """Return the steps that begin an epoch, without the first step of the run.

    ``after_phases`` are the steps right after a validation or a checkpoint.

    Three long waits at equal distances make epochs; two do if each follows such a phase. The run
    may begin and end within an epoch, but no wait in between may be missing.
    """
    if len(waits) < 2 * _SHORTEST_EPOCH:
        return []
    usual, step = float(median(waits)), float(median(lengths))
    far = (waits > _LOADER_WAIT_RATIO * usual) & (waits > usual + _LOADER_WAIT_SURPLUS * step)
    begins = [number for number in np.flatnonzero(far).tolist() if number > 0]
    enough = 2 if begins and set(begins) <= set(after_phases) else 3
    if len(begins) < enough:
        return []
    distances = np.diff(begins)
    distance = int(distances[0])
    edges = max(begins[0], len(waits) - begins[-1])
    regular = distance >= _SHORTEST_EPOCH and bool((distances == distance).all())
    return begins if regular and edges <= distance else []


class WarmupCause(Struct, frozen=True):
    """Wording of a cause of long warm-up."""

    told: str
    advice: str


WARMUP_CAUSES: Final = {
    "compilation": WarmupCause(
        "compilation", "cache compiled code on disk (TORCHINDUCTOR_CACHE_DIR, CUDA_CACHE_PATH)"
    ),
    "graph_capture": WarmupCause(
        "capturing CUDA graphs", "capture once per input shape, and replay it"
    ),
    "module_loading": WarmupCause(
        "loading modules",
        "leave CUDA_MODULE_LOADING=LAZY, its default, so that only code that runs is loaded",
    ),
    "allocation": WarmupCause(
        "allocating memory",
        "an allocator's pool fills once; an algorithm search allocates its own workspaces",
    ),
    "autotuning": WarmupCause(
        "trying algorithms",
        "fewer input shapes; in short runs, no search (cudnn.benchmark = False)",
    ),
    "data_feeding": WarmupCause("waiting for data", "start the loader before building the model"),
    "host": WarmupCause(
        "host work", "the host loads libraries, compiles and plans convolutions in the first steps"
    ),
}
"""Causes in order of precedence: a nanosecond counts for the first one proven."""

_COMPARED_STEPS: Final = 30
"""Number of steady steps to compare with."""
_LOADS: Final = (
    r"cu(Library|Module)(Load|Get|Unload)|cuKernelGet(Function|Library)|cudaLibraryLoad"
    r"|hipModuleLoad|(cuda|hip)(SetDevice|StreamCreate|DeviceGetStreamPriorityRange)"
)
_ENTRY_POINT: Final = r"(cu|cuda|hip)GetProcAddress"
_ENTRY_POINTS: Final = 100
"""Look-ups of the driver's functions in a gap from which the rest of it is a library's start."""
_COMPILES: Final = r"cuLink|nvrtc"
_COMPILE_RANGE: Final = (
    r"(?i)compil(?!ed)|inductor(?!.*call)|dynamo(?!.*cache)|nvrtc"
    r"|(?<![a-z])(jit|ptxas|xla.?build)(?![a-z])"
)
"""Ranges that compile: what was compiled ("Torch-Compiled Region") and what is looked up in a cache
runs in each step."""
_GENERATED: Final = r"^triton_[a-z]{3}_fused"
_COMPILING_NS: Final = 100_000_000
"""Kernels that TorchInductor generates, and the shortest gap before the first run of one that is
taken for compiling it."""
_COMPILE_OVERHEAD: Final = r"(?i)JIT|compiler"
_LOAD_OVERHEAD: Final = r"(?i)module loading|function loading|lazy"
_KERNELS_BETWEEN_TRIALS: Final = 3
"""Maximum number of kernels between two that were tried in one search."""
_ONCE: Final = ("compilation", "graph_capture", "module_loading", "allocation")
_LONG_ONCE_NS: Final = 1_000_000
"""Causes of warm-up that a process has once, and the shortest call that is taken for one of them in
a trace without steps."""
_FREES: Final = r"(cuda|hip|cu)(Mem)?Free"
_FREES_OF_START_UP: Final = 50
"""Number of calls that free memory from which a program allocates all the time, not once."""
_LONG_LAUNCH_NS: Final = 500_000
"""Minimum duration of a kernel's first launch that loads its code."""


def find_warmup_causes(gpus: PerGpu, all_steps: FoundSteps) -> dict[int, dict[str, int]]:
    """Return nanoseconds of warm-up beyond as many steady steps, by rank and proven cause.

    Causes are those of `WARMUP_CAUSES`. Empty where no calls were recorded.
    """
    warmup, by_rank = all_steps.warmup, all_steps.by_rank
    if not gpus.has_calls or not warmup:
        return {}
    lanes: dict[int, LaneSummary] = {}
    for lane in gpus.lanes:
        if len(by_rank.get(lane.gpu.rank, ())) > warmup:
            lanes.setdefault(lane.gpu.rank, lane)
    first, windows = slice(warmup + _COMPARED_STEPS), []
    for steps in (by_rank[rank] for rank in lanes):
        times = {name: getattr(steps, name)[first] for name in ("start", "end", "busy_from")}
        windows.append(replace(steps, **times, interludes=()))
    causes = gpus.each(_causes, lanes.values(), windows, same=(warmup,))
    return dict(zip(lanes, causes, strict=True))


def _named_spans(shard: Shard) -> Mapping[str, Mapping[int, Intervals]]:
    """Return ranges and overheads whose names show a cause, by cause and process."""
    trace = shard.trace
    columns = ("start", "end", "name", "process")
    spans: dict[str, dict[int, Intervals]] = {"compilation": {}, "module_loading": {}}
    for kind, cause, pattern in (
        (Kind.RANGE, "compilation", _COMPILE_RANGE),
        (Kind.OVERHEAD, "compilation", _COMPILE_OVERHEAD),
        (Kind.OVERHEAD, "module_loading", _LOAD_OVERHEAD),
    ):
        if kind not in trace.kinds:
            continue
        events = trace.events([kind], columns)
        events = events.select(trace.matches(events.name, pattern))
        for process, more in times_by_process(events).items():
            spans[cause][process] = merge_touching(spans[cause].get(process, EMPTY), more)
    return spans


def _causes(view: GpuShardView, windows: StepWindows, warmup: int) -> dict[str, int]:
    """Return the time by cause of the steps of one rank."""
    spans, process = view.once(_named_spans), view.operations.gpu.process
    proofs = {
        "compilation": spans["compilation"].get(process, EMPTY),
        "graph_capture": EMPTY,
        "module_loading": spans["module_loading"].get(process, EMPTY),
        "allocation": EMPTY,
        "freeing": EMPTY,
        "autotuning": _tried(view.trace, view.operations, windows, warmup),
        "data_feeding": view.lane.causes.of["data_feeding"],
        "host": EMPTY,
    }
    # Warm-up may lie outside of the part that is looked at.
    gaps = reduce(merge_touching, view.lane.causes.of.values(), EMPTY)
    for cause, called in _on_host(view, gaps, int(windows.start[0]), int(windows.end[-1])).items():
        proofs[cause] = merge_touching(proofs[cause], called)
    given, beyond = EMPTY, {}
    for cause in WARMUP_CAUSES:
        each = proofs[cause].difference(given).within(windows.start, windows.end)
        given = merge_touching(given, proofs[cause])
        more = int(each[:warmup].sum()) - warmup * int(median(each[warmup:]))
        if more > 0:
            beyond[cause] = more
    return beyond


def find_start_up(view: GpuShardView) -> dict[str, Intervals]:
    """Return by cause when a GPU idles for what a process does once: code is compiled and loaded,
    memory allocated, in calls of a millisecond and more, by a program that seldom frees any.
    """
    spans, process = view.once(_named_spans), view.operations.gpu.process
    gaps, given, once = view.lane.timeline.gaps, EMPTY, {}
    shown = _on_host(view, gaps, *view.lane.window)
    if len(shown.get("freeing", EMPTY)) >= _FREES_OF_START_UP:
        del shown["allocation"]
    for cause in _ONCE:
        known = spans.get(cause, {}).get(process, EMPTY)
        proven = merge_touching(known, shown.get(cause, EMPTY))
        proven = proven.select(proven.lengths >= _LONG_ONCE_NS)
        once[cause] = proven.intersection(gaps).difference(given)
        given = merge_touching(given, once[cause])
    return once


def _on_host(view: GpuShardView, gaps: Intervals, start: int, end: int) -> dict[str, Intervals]:
    """Return when the calls of the GPU's process show some of the causes, given the GPU's gaps."""
    calls = view.calls
    if calls is None:
        return {}
    threads = []
    for thread in calls.threads_of(view.operations.gpu.process):
        low, high = calls.first[thread : thread + 2].tolist()
        high = low + int(np.searchsorted(calls.start[low:high], end))
        threads += [slice(low, high)] if low < high else []
    if not threads:
        return {}

    def spans(chosen: Callable[[slice], Mask]) -> Intervals:
        rows = np.concatenate([part.start + np.flatnonzero(chosen(part)) for part in threads])
        return union(calls.start[rows], calls.end[rows])

    def called(pattern: str) -> Intervals:
        wanted = [id for id, name in names.items() if re.match(pattern, name)]
        return spans(lambda part: is_among(calls.name[part], wanted)) if wanted else EMPTY

    names = view.trace.names(
        distinct_ids(np.concatenate([distinct_ids(calls.name[part]) for part in threads]))
    )
    issuing = [
        part for part in threads if is_among(calls.sort[part], (Call.ISSUE, Call.COPY)).any()
    ]
    inside = [union(calls.start[part], calls.end[part], is_sorted=True) for part in issuing]

    # A launch waits, too, where the GPU's queue is full: code is loaded at a kernel's first.
    events = view.operations.events
    kernels = np.flatnonzero(events.kind == Kind.KERNEL)
    names_of = events.name[kernels]
    first = IdLookup(names_of, kernels).rows(distinct_ids(names_of))
    firsts = events.having("start", "name", "process", "correlation").select(first)
    launches = calls.issued_by(firsts)
    launches = launches[launches != NOBODY]
    launches = launches[calls.end[launches] - calls.start[launches] > _LONG_LAUNCH_NS]

    compiled = firsts.start[view.trace.matches(firsts.name, _GENERATED)]
    compiles = gaps.select(np.isin(gaps.end, compiled) & (gaps.lengths >= _COMPILING_NS))

    wanted = [id for id, name in names.items() if re.match(_ENTRY_POINT, name)]
    parts = [calls.start[part][is_among(calls.name[part], wanted)] for part in threads]
    looked_up = np.sort(np.concatenate(parts))
    edges = np.searchsorted(looked_up, (gaps.start, gaps.end))
    starts = edges[1] - edges[0] >= _ENTRY_POINTS
    libraries = union(looked_up[edges[0][starts]], gaps.end[starts])

    captures = view.once(_captures)
    captures = captures[[any(p.start <= at < p.stop for p in threads) for at in captures[:, 0]]]
    return {
        "graph_capture": union(calls.start[captures[:, 0]], calls.end[captures[:, 1]]),
        "compilation": merge_touching(called(_COMPILES), compiles),
        "module_loading": reduce(
            merge_touching,
            (called(_LOADS), union(calls.start[launches], calls.end[launches]), libraries),
        ),
        "allocation": spans(lambda part: calls.sort[part] == Call.ALLOC),
        "freeing": called(_FREES),
        "host": gaps.clip(start, end).difference(reduce(merge_touching, inside, EMPTY)),
    }


def _captures(shard: Shard) -> NDArray[np.intp]:
    """Return `find_captures` of the calls, of which there are some."""
    assert shard.calls is not None
    return find_captures(shard.trace, shard.calls)


def _tried(trace: Trace, ops: GpuOperations, windows: StepWindows, warmup: int) -> Intervals:
    """Return the searches for algorithms: products in the first steps that no later step uses.

    A search runs one algorithm after another, those that are chosen among them.
    """
    kernels, names = ops.events.kind == Kind.KERNEL, ops.events.name
    warmed_up, steady = windows.end[warmup - 1], windows.start[warmup]
    end, first = np.searchsorted(ops.start, (warmed_up, steady)).tolist()
    early, later = np.flatnonzero(kernels[:end]), names[first:][kernels[first:]]
    only = np.setdiff1d(distinct_ids(names[early]), distinct_ids(later), assume_unique=True)
    tried = [id for id, name in trace.names(only).items() if family_of(name) in PRODUCTS]
    positions = np.flatnonzero(is_among(names[early], tried))
    rows = early[positions]
    soon = np.flatnonzero(np.diff(positions) <= _KERNELS_BETWEEN_TRIALS)
    searches = union(ops.start[rows[soon]], ops.end[rows[soon + 1]])
    return merge_touching(searches, union(ops.start[rows], ops.end[rows]))
