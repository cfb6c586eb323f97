"""Phases of training steps: what the thread that trains was at, and how long GPUs idled meanwhile;
and the modules of the network that launched what ran.

Recorded are waits for data and calls that are a part of a step (`Kind.PHASE`). A forward pass is
one where a framework calls it; else it lasts from the end of what came before it to the beginning
of a backward pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, by_thread, captured_in
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.grouping import StepsOf, median, time_of
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.python_samples import read_sources
from gputrace.analyzers.steps.inferred import LEAST_INPUT_BYTES
from gputrace.analyzers.steps.rollouts import phase_of, read_named_ranges, rollouts_of
from gputrace.model.events import COPY_KINDS, UNKNOWN, Events, Kind, distinct_ids, is_among
from gputrace.model.host import (
    BACKWARD,
    CHECKPOINT,
    CLIPPING,
    DATA,
    FORWARD,
    MODEL,
    OPTIMIZER,
    OTHER,
    PHASES,
    REFERENCE,
    REWARD,
    ROLLOUT,
    UNSCALING,
    UPDATE,
    WEIGHT_SYNC,
    StepPhase,
    StepPhases,
)
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, number_windows, union
from gputrace.model.results import ModuleUse, Step
from gputrace.model.struct import Struct

_GENERATE: Final = "generate"
"""Name of the calls of a network that generates."""
_KNOWN: Final = tuple(name for name in PHASES if name != OTHER)
_TIMED: Final = (Kind.PHASE, Kind.RANGE)
_LEAST_SENT: Final = 8
"""Number of copies of a kilobyte and more and of collectives before a rollout, from which they are
of weights."""

_IN_UPDATE: Final = (FORWARD, BACKWARD, UNSCALING, CLIPPING, OPTIMIZER)


class PhaseTimes(Struct, frozen=True, dict=True):
    """When the thread of a process that trains was in each phase but `OTHER`; disjoint."""

    of: Mapping[str, Intervals]

    def within(self, time: Intervals) -> NDArray[np.int64]:
        """Return the nanoseconds of some time in each of `PHASES`; they sum to all of it."""
        known = [self.of[name].intersection(time).total for name in _KNOWN]
        return np.array([*known, time.total - sum(known)], np.int64)

    @property
    def between_passes(self) -> Intervals:
        """When the thread was in no phase, from a forward or backward pass of an update on."""
        known = [(self.of[name], name) for name in _KNOWN]
        start, end = (np.concatenate([getattr(t, at) for t, _ in known]) for at in ("start", "end"))
        names = np.concatenate([np.full(len(times), name) for times, name in known])
        order = np.argsort(start)
        start, end, names = start[order], end[order], names[order]
        inside = np.isin(names[:-1], _IN_UPDATE[:-1]) & np.isin(names[1:], _IN_UPDATE[1:])
        return union(end[:-1][inside], start[1:][inside])


def read_phases(shard: Shard) -> Mapping[int, PhaseTimes]:
    """Read the phases of each process in which some were recorded, or ranges of rollouts."""
    trace = shard.trace
    events = trace.events(
        trace.kinds & {Kind.PHASE, Kind.RANGE, Kind.DATA_WAIT, Kind.STEP},
        ("start", "end", "kind", "name", "process", "thread"),
    )
    called = events.kind == Kind.PHASE
    names = trace.names(distinct_ids(events.name[called]))
    ranges: dict[int, str] = {}
    if rollouts := trace.once(read_named_ranges).rollouts:
        texts = trace.names(distinct_ids(events.name[events.kind == Kind.RANGE]))
        ranges = {id: phase for id, text in texts.items() if (phase := phase_of(text))}
    events = events.select((events.kind != Kind.RANGE) | is_among(events.name, [*ranges]))
    by_process, generates = {}, {ROLLOUT, _GENERATE}.intersection(names.values())
    for process in distinct_ids(events.process[is_among(events.kind, _TIMED)]).tolist():
        mine = events.select(events.process == process)
        mine = mine.select(mine.thread == _training_thread(mine))
        rolled = rollouts_of(process, rollouts)
        sent = _weights_sent(shard, process) if generates or len(rolled) else EMPTY
        by_process[process] = _phase_times(mine, names, ranges, rolled, sent)
    return by_process


def _training_thread(events: Events) -> int:
    """Return the thread of a process that is longest in phases: autograd's have nested ones."""
    kind = Kind.PHASE if (events.kind == Kind.PHASE).any() else Kind.RANGE
    called = events.select(events.kind == kind)

    def length(thread: int) -> int:
        mine = called.thread == thread
        return union(called.start[mine], called.end[mine]).total

    threads: list[int] = distinct_ids(called.thread).tolist()
    return max(threads, key=length)


def _weights_sent(shard: Shard, process: int) -> Intervals:
    """Return when a process issued copies and collectives that may carry weights."""
    calls, sent = shard.calls, EMPTY
    for operations in shard.operations if calls is not None else ():
        kinds, sizes = operations.events.kind, operations.events.bytes
        rows = operations.classes == OperationClass.COMMUNICATION
        rows |= is_among(kinds, COPY_KINDS) & (sizes >= LEAST_INPUT_BYTES)
        if calls is not None and operations.gpu.process == process:
            by = calls.issued_by(operations.events, rows)
            by = by[by != NOBODY]
            sent = merge_touching(sent, union(calls.start[by], calls.end[by]))
    return sent


def _phase_times(
    events: Events,
    names: Mapping[int, str],
    ranges: Mapping[int, str],
    rolled: Intervals,
    sent: Intervals,
) -> PhaseTimes:
    """Return the phases of one thread; of calls within each other, the inner one counts.

    An optimizer may call a closure with forward and backward passes, and a backward pass an
    optimizer for each parameter. ``rolled`` are rollouts, of other processes where it has none;
    ``sent`` is when it sent what may be weights.
    """

    def calls(name: str) -> Intervals:
        rows = np.zeros(len(events), np.bool_)
        for kind, texts in ((Kind.PHASE, names), (Kind.RANGE, ranges)):
            ids = [id for id, text in texts.items() if text == name]
            rows |= (events.kind == kind) & is_among(events.name, ids)
        return union(events.start[rows], events.end[rows])

    waits = events.kind == Kind.DATA_WAIT
    data, backward, optimizer = (
        union(events.start[waits], events.end[waits]),
        calls(BACKWARD),
        calls(OPTIMIZER),
    )
    inner = backward.contains(optimizer.start)
    inside, around = optimizer.select(inner), optimizer.select(~inner).difference(calls(OTHER))
    between = {UNSCALING: calls(UNSCALING), CLIPPING: calls(CLIPPING)}
    # An engine may get new weights in a rollout.
    before = {name: calls(name) for name in (CHECKPOINT, WEIGHT_SYNC, REWARD)}
    reference = calls(REFERENCE)
    own = calls(ROLLOUT)
    if len(backward):
        own = merge_touching(own, calls(_GENERATE))
    rolled = own if len(own) else rolled
    ends = [data.end, backward.end, around.end, *(times.end for times in between.values())]
    ends += [rolled.end, reference.end, *(times.end for times in before.values())]
    ends.append(events.end[events.kind == Kind.STEP])
    last_end = np.sort(np.concatenate(ends))
    if len(before[WEIGHT_SYNC]):
        # To pickle weights for an engine is to save them.
        before[CHECKPOINT] = before[CHECKPOINT].difference(before[WEIGHT_SYNC])
    else:
        before[WEIGHT_SYNC] = _sync_before(rolled, last_end, sent)
    forward, model = calls(FORWARD), calls(MODEL)
    if not len(forward) and (len(optimizer) or len(model)):
        # A forward pass lasts from the last end of anything before a backward pass to its start.
        # Without a recorded optimizer, the program's own would be part of that.
        place = np.searchsorted(last_end, backward.start, "right") - 1
        passed = union(last_end[place[place >= 0]], backward.start[place >= 0])
        passed, scored, compared = _after_rollouts(passed, rolled, model)
        forward = merge_touching(_from(passed, model.start).difference(calls(OTHER)), model)
        before[REWARD] = merge_touching(before[REWARD], scored)
        reference = merge_touching(reference, compared)
        forward = forward.difference(reference)
    # The first to have a nanosecond keeps it.
    layers = [
        (DATA, data),
        (CHECKPOINT, before[CHECKPOINT]),
        (WEIGHT_SYNC, before[WEIGHT_SYNC]),
        (ROLLOUT, own),
        (REWARD, before[REWARD]),
        *between.items(),
        (OPTIMIZER, inside),
        (BACKWARD, backward),
        (FORWARD, forward),
        (OPTIMIZER, around),
        (REFERENCE, reference),
        (UPDATE, calls(UPDATE)),
        (ROLLOUT, rolled),
    ]
    of, given = dict.fromkeys(_KNOWN, EMPTY), EMPTY
    for name, times in layers:
        of[name] = merge_touching(of[name], times.difference(given))
        given = merge_touching(given, times)
    return PhaseTimes(of)


def _sync_before(rolled: Intervals, last_end: Times, sent: Intervals) -> Intervals:
    """Return when weights go to an engine: from the first to the last of many copies or collectives
    between what came last before a rollout and the rollout.
    """
    begin = np.append(last_end[:1], last_end)[np.searchsorted(last_end, rolled.start, "right")]
    first, last = np.searchsorted(sent.start, (begin, rolled.start))
    many = last - first >= _LEAST_SENT
    return union(sent.start[first[many]], sent.end[last[many] - 1])


def _after_rollouts(
    passed: Intervals, rolled: Intervals, model: Intervals
) -> tuple[Intervals, Intervals, Intervals]:
    """Return the forward passes among stretches that end with a backward pass; and, of those that
    begin with the end of a rollout, what comes before a call of a network, which are rewards, and
    the calls before those of other forward passes, which are for log-probabilities.
    """
    first, last = np.searchsorted(model.start, (passed.start, passed.end))
    after = np.isin(passed.start, rolled.end) & (last > first)
    others = (last - first)[~after & (last > first)]
    own = max(int(median(others)), 1) if len(others) else 1
    asked, begins = model.start[first[after]], model.start[np.maximum(last - own, first)[after]]
    starts = passed.start.copy()
    starts[after] = begins
    return union(starts, passed.end), union(passed.start[after], asked), union(asked, begins)


def _from(times: Intervals, starts: Times) -> Intervals:
    """Return each interval from the first start in it on; whole where there is none.

    Those before all starts, of steps from before calls were timed, have the median length.
    """
    if not len(starts):
        return times
    first = np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, times.start)]
    has_one, early = first < times.end, times.end <= starts[0]
    begins = np.where(has_one, first, times.start)
    if has_one.any():
        usual = int(median(times.end[has_one] - first[has_one]))
        begins[early] = np.maximum(times.start, times.end - usual)[early]
    return union(begins, times.end)


def measure_phases(
    gpus: PerGpu,
    lanes: Sequence[LaneSummary],
    processes: Mapping[int, int],
    measured: Sequence[Step],
) -> tuple[StepPhases, ...]:
    """Return the mean measured step of each rank by phase; of ranks in whose steps one was met.

    ``lanes`` are those of the GPUs whose idle time counts, and ``processes`` those of the ranks.
    """
    phases = gpus.whole.once(read_phases)
    if not phases or not measured:
        return ()
    steps_of = StepsOf(measured)
    times = [steps_of.time(lane.gpu, lane.window) for lane in lanes]
    idle_of_lanes = list(zip(lanes, gpus.each(_idle_in_phases, lanes, times), strict=True))
    of_ranks = []
    for rank, process in sorted(processes.items()):
        steps = steps_of.of_rank(rank)
        if process not in phases or not steps:
            continue
        time = time_of(steps)
        host = phases[process].within(time)
        met = dict(zip(PHASES, host.tolist(), strict=True))
        if not any(met[name] for name in _KNOWN if name != DATA):
            continue
        mine = [(lane.gpu, idle) for lane, idle in idle_of_lanes if lane.gpu.rank == rank]
        sums = [idle for _, idle in mine if idle is not None]
        count = sum(len(steps_of(gpu)) for gpu, idle in mine if idle is not None)
        idle: Sequence[int | None] = [None] * len(PHASES)
        launch = idle
        if count:
            idle, launch = (_means(each, count) for each in np.sum(sums, axis=0))
        launch = launch if gpus.has_calls else [None] * len(PHASES)
        rows = zip(PHASES, _means(host, len(steps)), idle, launch, strict=True)
        parts = tuple(StepPhase(*row) for row in rows)
        of_ranks.append(StepPhases(rank, len(steps), time.total // len(steps), parts))
    return tuple(of_ranks)


def _idle_in_phases(view: GpuShardView, time: Intervals) -> NDArray[np.int64] | None:
    """Return the nanoseconds that a GPU idles in some time, and those before launches, while its
    host is in each of `PHASES`: shape (2, phases); None where no phases were recorded.
    """
    phases = view.once(read_phases).get(view.operations.gpu.process)
    if phases is None:
        return None
    timeline = view.lane.timeline
    idle = time.difference(timeline.busy)
    if len(timeline.recorded) > 1:
        idle = idle.intersection(timeline.recorded)
    launch = view.lane.causes.of["launch"].intersection(time)
    return np.stack([phases.within(idle), phases.within(launch)])


def _means(sums: NDArray[np.int64], count: int) -> list[int]:
    """Return means of sums that add up to the mean of all, the last of them the rest."""
    means: list[int] = (sums // count).tolist()
    means[-1] = int(sums.sum()) // count - sum(means[:-1])
    return means


_INSTANCE: Final = r"_\d+(?=/|$)"
"""Number of a module among those of its class."""


def find_modules(gpus: PerGpu, measured: Sequence[Step]) -> tuple[ModuleUse, ...]:
    """Return what each class of modules launched in a mean measured step, by rank.

    Modules of one class at the same place of the tree, such as equal layers, are summed. Of the
    steps, those count in which modules were recorded.
    """
    if not gpus.trace.kinds & {Kind.MODULE, Kind.RANGE} or not gpus.has_calls:
        return ()
    steps_of = StepsOf(measured)
    times = [
        [(step.start_ns, step.end_ns) for step in steps_of(lane.gpu)]
        or [(lane.window.start, lane.window.end)]
        for lane in gpus.lanes
    ]
    launched = gpus.each(_launched_by, gpus.lanes, times)
    sources = gpus.whole.once(read_sources)
    uses: list[ModuleUse] = []
    for rank in sorted({lane.gpu.rank for lane in gpus.lanes}):
        sums: dict[str, NDArray[np.int64]] = {}
        modules: dict[str, set[str]] = {}
        lines: dict[str, Counter[str]] = {}
        parts = [n for n, lane in enumerate(gpus.lanes) if lane.gpu.rank == rank]
        for path, figures in (pair for n in parts for pair in launched[n][0].items()):
            places = re.sub(_INSTANCE, "", path).split("/") if path else [""]
            instances = path.split("/")
            for depth in range(1, len(places) + 1):
                key = "/".join(places[:depth])
                sums[key] = sums.get(key, 0) + figures
                modules.setdefault(key, set()).add("/".join(instances[:depth]))
                line = _line_of(instances[:depth], sources)
                lines.setdefault(key, Counter())[line] += int(figures[3]) * bool(line)
        count = max(sum(launched[n][1] for n in parts), 1)
        if sums.keys() - {""}:
            uses += [
                ModuleUse(
                    rank,
                    path,
                    len(modules[path]) if path else 0,
                    forward_ns=int(figures[0]) // count,
                    backward_ns=int(figures[1]) // count,
                    exposed_communication_ns=int(figures[2]) // count,
                    launches=round(int(figures[3]) / count, 2),
                    line=lines[path].most_common(1)[0][0],
                )
                for path, figures in sorted(sums.items(), key=lambda item: item[0].split("/"))
            ]
    return tuple(uses)


def _line_of(path: Sequence[str], sources: Mapping[str, str]) -> str:
    """Return the line that calls a module; in a graph's, its path begins where it was captured."""
    parts = ("/".join(path[at:]) for at in range(len(path)))
    return next((sources[part] for part in parts if part in sources), "")


def _launched_by(
    view: GpuShardView, steps: Sequence[tuple[int, int]]
) -> tuple[dict[str, NDArray[np.int64]], int]:
    """Return what each module itself launched on a GPU, by path, and in how many of some steps.

    The figures are nanoseconds of kernels of the forward and of the backward pass, nanoseconds of
    exposed communication, and the number of kernels; under no path those of what no module
    launched. Steps count that have at least half as many launches by modules as any.
    """
    ops, (ranges, paths, nodes) = view.operations, view.once(_read_modules)
    if view.calls is None or not len(ranges):
        return {}, 0
    starts, ends = np.array(sorted(steps), np.int64).reshape(-1, 2).T
    step = number_windows(ops.start, starts, ends)
    rows = np.flatnonzero((ops.events.kind == Kind.KERNEL) & (step >= 0))
    if not len(rows):
        return {}, 0
    issued_by = view.calls.issued_by(ops.events, rows)
    launched = view.calls.ranges_around(issued_by, ranges)
    captured = np.full_like(launched, NOBODY)
    if len(nodes):
        captured = captured_in(ops.events.having("process", "node").select(rows), nodes, ranges)
    # What a graph runs is known in all steps, but what launches it in few, as of other kernels.
    known = launched if (launched != NOBODY).any() else captured
    launches = np.bincount(step[rows[known != NOBODY]], minlength=len(starts))
    counted = launches >= max(launches.max() / 2, 1)
    rows, launched, captured = (each[counted[step[rows]]] for each in (rows, launched, captured))
    around = np.where(captured != NOBODY, captured, launched)
    is_backward = (around != NOBODY) & (ranges.correlation[np.maximum(around, 0)] == 1)
    start, end = ops.start[rows], ops.end[rows]
    communicates = ops.classes[rows] == OperationClass.COMMUNICATION
    exposed = np.zeros(len(rows), np.int64)
    classes = view.lane.timeline.classes[OperationClass.COMMUNICATION]
    exposed[communicates] = classes.within(start[communicates], end[communicates])
    lengths = np.where(communicates, 0, end - start)
    columns = (lengths * ~is_backward, lengths * is_backward, exposed, np.ones(len(rows), np.int64))
    names = np.append(ranges.name, UNKNOWN).astype(np.int64)  # That of nobody comes last.
    pairs, index = np.unique(names[launched] << 32 | names[captured] + 1, return_inverse=True)
    figures = np.stack([np.bincount(index, column, len(pairs)) for column in columns], axis=-1)
    sums: dict[str, NDArray[np.int64]] = {}
    for pair, row in zip(pairs.tolist(), figures.astype(np.int64), strict=True):
        outer, inner = (paths.get(id, "") for id in (pair >> 32, (pair & 0xFFFFFFFF) - 1))
        path = _within(outer, inner)
        sums[path] = sums.get(path, 0) + row
    return sums, int(counted.sum())


def _within(outer: str, inner: str) -> str:
    """Return the path of a module that was captured into a graph, from that of what launches it."""
    last, first = outer.rsplit("/", 1)[-1], inner.split("/", 1)[0]
    if re.sub(_INSTANCE, "", last) == re.sub(_INSTANCE, "", first):
        return outer + inner[len(first) :]
    return "/".join(filter(None, (outer, inner)))


_NAMED: Final = (
    r"^(?:\{'Module': ')?(?!(?i:step|iter|epoch|batch|train|micro))([A-Za-z_]\w*(?:\.\w+)*)(?:'|$)"
)
"""Name of a module in that of an NVTX range, or of a dictionary as layer-wise markers push it."""
_REPEATED: Final = r"\.(\d+)(?=\.|$)"
"""Number of a layer in a module's name."""


def _read_modules(shard: Shard) -> tuple[Events, dict[int, str], Events]:
    """Read the stretches of host threads in each module, in order of thread and start; the paths;
    and when which thread captured the nodes of CUDA graphs.

    Where none were recorded, ranges of NVTX are taken whose names are those of modules: dotted, of
    a network of which some have a number within (``model.layers.3.mlp``).
    """
    columns = ("start", "end", "name", "process", "thread", "correlation")
    nodes = shard.trace.events(
        [Kind.GRAPH_NODE], ("start", "process", "thread", "correlation", "bytes")
    )
    ranges = by_thread(shard.trace.events([Kind.MODULE], columns))
    if len(ranges):
        return ranges, shard.trace.names(distinct_ids(ranges.name)), nodes
    ranges = shard.trace.events([Kind.RANGE], columns[:5])
    texts = shard.trace.search(distinct_ids(ranges.name), _NAMED)
    named = {id: match[1] for id, text in texts.items() if (match := re.match(_NAMED, text))}
    networks = {name.split(".")[0] for name in named.values() if re.search(_REPEATED, name)}
    paths = {
        id: re.sub(_REPEATED, r"_\1", name).replace(".", "/")
        for id, name in named.items()
        if name.split(".")[0] in networks
    }
    ranges = ranges.select(np.isin(ranges.name, list(paths)))
    if not len(ranges):
        return ranges, paths, nodes
    from gputrace.readers.operators import CallSpan, innermost

    order = (*CallSpan._fields, "name")
    rows = zip(*(getattr(ranges, column).tolist() for column in order), strict=True)
    calls = ((CallSpan(*at), str(name), False) for *at, name in rows)
    parts = [(*at, int(name), 0) for at, name, _ in innermost(calls)]
    events = Events(dict(zip((*order, "correlation"), np.array(parts, np.int64).T, strict=True)))
    return by_thread(events), paths, nodes
