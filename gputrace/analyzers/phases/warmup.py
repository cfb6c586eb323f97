"""What the first steps have more of than the steady ones: the cause of a long warm-up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host import Call, HostCalls
from gputrace.analyzers.intervals import EMPTY, Intervals, joined, union
from gputrace.analyzers.kernels.families import family_of
from gputrace.analyzers.kernels.tensorcores import PRODUCTS
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.shard import OneGpu, Shard
from gputrace.analyzers.steps import FoundSteps, StepWindows
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace


class WarmupCause(NamedTuple):
    """What people are told of a cause."""

    told: str
    advice: str


WARMUP_CAUSES: Final = {
    "compilation": WarmupCause(
        "compilation",
        "keep what was compiled: a cache on disk (TORCHINDUCTOR_CACHE_DIR, CUDA_CACHE_PATH)",
    ),
    "module_loading": WarmupCause(
        "loading modules",
        "leave CUDA_MODULE_LOADING=LAZY, its default, so that only what runs is loaded",
    ),
    "allocation": WarmupCause(
        "allocating memory", "an allocator's pool fills once; a search allocates what it tries with"
    ),
    "autotuning": WarmupCause(
        "trying algorithms that later steps do not use",
        "fewer input shapes; without the search (cudnn.benchmark = False) where runs are short",
    ),
    "data_feeding": WarmupCause("waiting for data", "start the loader before the model is made"),
    "host": WarmupCause(
        "the host's own work outside of CUDA calls",
        "libraries, compilation and plans of convolutions are made on the host in the first steps",
    ),
}
"""In order of precedence: a nanosecond counts for the first that is shown."""

_COMPARED: Final = 30
"""Steady steps that tell what is usual."""
_LOADS: Final = re.compile(
    r"cu(Library|Module)(Load|Get|Unload)|cuKernelGet(Function|Library)|cudaLibraryLoad"
)
_COMPILES: Final = re.compile(r"cuLink|nvrtc")
_COMPILE_RANGE: Final = re.compile(
    r"compil|inductor|dynamo|nvrtc|(?<![a-z])(jit|ptxas|xla.?build)(?![a-z])", re.IGNORECASE
)
_COMPILE_OVERHEAD: Final = re.compile(r"JIT|compiler", re.IGNORECASE)
_LOAD_OVERHEAD: Final = re.compile(r"module loading|function loading|lazy", re.IGNORECASE)
_MOST_BETWEEN: Final = 3
"""Kernels from one that was tried to the next in one search."""
_LONG_LAUNCH_NS: Final = 500_000
"""A launch in the first steps that takes longer loads the code that it launches."""


def find_warmup_causes(gpus: PerGpu, found: FoundSteps) -> dict[int, dict[str, int]]:
    """By rank, and by `WARMUP_CAUSES`, nanoseconds that its warm-up has beyond as many steady
    steps; what is not shown is not there. Nothing where no calls were recorded.
    """
    if not gpus.has_calls or not found.warmup:
        return {}
    lanes: dict[int, LaneSummary] = {}
    for lane in gpus.lanes:
        if len(found.by_rank.get(lane.gpu.rank, ())) > found.warmup:
            lanes.setdefault(lane.gpu.rank, lane)
    windows = [_first(found.by_rank[rank], found.warmup + _COMPARED) for rank in lanes]
    causes = gpus.each(_causes, lanes.values(), windows, same=(found.warmup,))
    return dict(zip(lanes, causes, strict=True))


def _first(windows: StepWindows, count: int) -> StepWindows:
    first = slice(count)
    return replace(
        windows,
        start=windows.start[first],
        end=windows.end[first],
        busy_from=windows.busy_from[first],
        interludes=(),
    )


def _named_spans(shard: Shard) -> Mapping[str, Mapping[int, Intervals]]:
    """Ranges and overheads that name a cause themselves, by process."""
    trace = shard.trace
    columns = ("start", "end", "name", "process")
    found: dict[str, dict[int, Intervals]] = {"compilation": {}, "module_loading": {}}
    for kind, cause, pattern in (
        (Kind.RANGE, "compilation", _COMPILE_RANGE),
        (Kind.OVERHEAD, "compilation", _COMPILE_OVERHEAD),
        (Kind.OVERHEAD, "module_loading", _LOAD_OVERHEAD),
    ):
        if kind not in trace.kinds:
            continue
        events = trace.events([kind], columns)
        named = list(trace.search(distinct_ids(events.name), pattern))
        events = events.select(np.isin(events.name, named))
        for process in distinct_ids(events.process).tolist():
            rows = events.process == process
            more = union(events.start[rows], events.end[rows])
            known = found[cause].get(process, EMPTY)
            found[cause][process] = joined(known, more)
    return found


def _causes(one: OneGpu, windows: StepWindows, warmup: int) -> dict[str, int]:
    """Of one rank, of which no more steps are given than are compared."""
    proofs = _on_gpu(one, windows, warmup)
    for cause, called in _on_host(one, windows).items():
        proofs[cause] = joined(proofs[cause], called)
    given = EMPTY
    shown = {}
    for cause in WARMUP_CAUSES:
        shown[cause] = proofs[cause].difference(given)
        given = joined(given, proofs[cause])
    return _beyond_usual(shown, windows, warmup)


def _on_gpu(one: OneGpu, windows: StepWindows, warmup: int) -> dict[str, Intervals]:
    """When each cause is shown by the GPU, or by ranges and overheads that name it."""
    spans, process = one.once(_named_spans), one.operations.gpu.process
    return {
        "compilation": spans["compilation"].get(process, EMPTY),
        "module_loading": spans["module_loading"].get(process, EMPTY),
        "allocation": EMPTY,
        "autotuning": _tried(one.trace, one.operations, windows, warmup),
        "data_feeding": one.lane.causes.of["data_feeding"],
        "host": EMPTY,
    }


def _on_host(one: OneGpu, windows: StepWindows) -> dict[str, Intervals]:
    """When some causes are shown by the calls of the GPU's process, where there are any."""
    calls, first = one.calls, (int(windows.start[0]), int(windows.end[-1]))
    mine = None if calls is None else _rows_of(calls, one.operations.gpu.process, first[1])
    if calls is None or mine is None or not len(mine):
        return {}
    names = one.trace.names(distinct_ids(calls.name[mine]))
    launch = mine[(calls.sort[mine] == Call.ISSUE) & _long(calls, mine)]
    busy_threads = distinct_ids(calls.thread[mine[calls.sort[mine] == Call.ISSUE]])
    inside = mine[np.isin(calls.thread[mine], busy_threads)]
    return {
        "compilation": _called(calls, mine, names, _COMPILES),
        "module_loading": joined(_called(calls, mine, names, _LOADS), _spans(calls, launch)),
        "allocation": _spans(calls, mine[calls.sort[mine] == Call.ALLOC]),
        "host": one.lane.timeline.gaps.clip(*first).difference(_spans(calls, inside)),
    }


def _rows_of(calls: HostCalls, process: int, until: int) -> NDArray[np.intp]:
    """A process's calls that begin before a moment."""
    rows = []
    for index, (own, _) in enumerate(calls.threads):
        if own == process:
            first, end = int(calls.first[index]), int(calls.first[index + 1])
            rows.append(np.arange(first, first + np.searchsorted(calls.start[first:end], until)))
    return np.concatenate(rows) if rows else np.empty(0, np.intp)


def _long(calls: HostCalls, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    return calls.end[rows] - calls.start[rows] > _LONG_LAUNCH_NS


def _spans(calls: HostCalls, rows: NDArray[np.intp]) -> Intervals:
    return union(calls.start[rows], calls.end[rows])


def _called(
    calls: HostCalls, rows: NDArray[np.intp], names: Mapping[int, str], pattern: re.Pattern[str]
) -> Intervals:
    wanted = [id for id, name in names.items() if pattern.match(name)]
    return _spans(calls, rows[np.isin(calls.name[rows], wanted)])


def _tried(trace: Trace, own: GpuOperations, windows: StepWindows, warmup: int) -> Intervals:
    """From one product of the first steps that no later step uses to the next: algorithms tried.

    A search runs one after another, with those that are chosen among them.
    """
    kernels = own.events.kind == Kind.KERNEL
    early = kernels & (own.start < windows.end[warmup - 1])
    later = kernels & (own.start >= windows.start[warmup])
    only = np.setdiff1d(
        distinct_ids(own.events.name[early]),
        distinct_ids(own.events.name[later]),
        assume_unique=True,
    )
    names = trace.names(only)
    tried = [id for id, name in names.items() if family_of(name) in PRODUCTS]
    among = np.flatnonzero(kernels)
    place = np.flatnonzero((early & np.isin(own.events.name, tried))[among])
    rows = among[place]
    soon = np.flatnonzero(np.diff(place) <= _MOST_BETWEEN)
    searches = union(own.start[rows[soon]], own.end[rows[soon + 1]])
    return joined(searches, union(own.start[rows], own.end[rows]))


def _beyond_usual(
    shown: Mapping[str, Intervals], windows: StepWindows, warmup: int
) -> dict[str, int]:
    beyond = {}
    for cause, intervals in shown.items():
        each = intervals.within(windows.start, windows.end)
        more = int(each[:warmup].sum()) - warmup * int(np.median(each[warmup:]))
        if more > 0:
            beyond[cause] = more
    return beyond
