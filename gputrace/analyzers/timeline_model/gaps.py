"""Explanation of a gap (operations before and after, host activity, other GPUs) or a long step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Final

import numpy as np

from gputrace.analyzers.breakdown import (
    NO_ISSUER,
    evidence_of,
    in_loader,
    line_of,
    range_of,
)
from gputrace.analyzers.cuda_api_calls import NOBODY, CudaApiCalls, read_calls, read_host
from gputrace.analyzers.findings.facts import MEDIUM
from gputrace.analyzers.findings.slow_steps import HOST_THEN, IN_SLOW_STEPS
from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.grouping import time_of
from gputrace.analyzers.host_state import Counters, read_counters, read_host_state
from gputrace.analyzers.idle_causes import read_evidence
from gputrace.analyzers.lanes import ranks_of
from gputrace.analyzers.ledger.causes import DEFAULTS, IDLING
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.python_samples import PythonLines, read_python_lines
from gputrace.analyzers.timeline_model import NO_STEP, Scene, SceneLane, index_in
from gputrace.analyzers.timeline_model.cells import Layers
from gputrace.errors import UsageError
from gputrace.model.comparison import StepExplanation, StepKernel, StepOnGpu, StepPart
from gputrace.model.events import UNKNOWN, Events, Kind
from gputrace.model.intervals import EMPTY, Intervals, merge_touching, union
from gputrace.model.options import Window
from gputrace.model.results import Analysis, Finding, Gap, Step
from gputrace.model.time_class import BY_ID, IDLE_CAUSES
from gputrace.model.trace import Trace
from gputrace.units import format_change, format_ns

_HOST_KINDS: Final = (
    Kind.DATA_WAIT,
    Kind.OS_RUNTIME,
    Kind.API,
    Kind.RANGE,
    Kind.OVERHEAD,
    Kind.STEP,
)
"""Kinds of host activity, the most informative first."""


_PHASES: Final[Mapping[str, tuple[str, ...]]] = {
    "warmup": ("warmup",),
    "validation": ("validation-downtime",),
    "checkpoint": ("checkpoint-stall",),
}
"""Findings that a gap in a phase may belong to; they come before those of its causes."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a GPU."""

    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    bytes: int
    """Negative where it moves none, or where that is unknown."""
    correlation: int


@dataclass(frozen=True, slots=True)
class HostTime:
    """Activity of a host thread under one name during a gap."""

    kind: Kind
    name: str
    count: int
    ns: int
    """Time within the gap; nested rows of one name count once."""


@dataclass(frozen=True, slots=True)
class GapDetail:
    """Gap with its context; mappings are in nanoseconds, the longest first."""

    gap: Gap
    lane: int
    """Index of its lane."""
    by_cause: Mapping[str, int]
    before: Operation | None
    """Operation that ended where it begins."""
    after: Operation | None
    """Operation that starts where it ends."""
    others: Mapping[int, Mapping[str, int]]
    """Time of all other lanes by class, by the index of the lane."""
    finding: Finding | None
    """Finding that it belongs to."""
    launch: IssuingCall | None = None
    """Call that issued the operation after it."""
    host: tuple[HostTime, ...] = ()
    """Activity of the feeding thread meanwhile, by kind."""

    @property
    def elsewhere(self) -> Mapping[str, int]:
        """Time of all other lanes together by class."""
        return _summed(self.others.values())

    @property
    def itself(self) -> Window:
        """The gap with a microsecond on either side."""
        return Window(self.gap.start_ns - 1_000, self.gap.end_ns + 1_000)

    @property
    def around(self) -> Window:
        """The gap with half its length, or a millisecond, on either side."""
        margin = max(self.gap.length_ns // 2, 10**6)
        return Window(self.gap.start_ns - margin, self.gap.end_ns + margin)


def worst_gaps(scene: Scene, analysis: Analysis) -> tuple[GapDetail, ...]:
    """Return the largest gaps of the measured steps, then those of the whole run not among them."""
    in_steps = analysis.gaps.largest_in_steps
    rest = [gap for gap in analysis.gaps.largest if gap not in in_steps]
    index_of = {(lane.gpu, lane.rank): index for index, lane in enumerate(scene.lanes)}
    return tuple(
        _detail(scene, index_of[gap.gpu, gap.rank], gap, analysis) for gap in (*in_steps, *rest)
    )


def _detail(scene: Scene, lane: int, gap: Gap, analysis: Analysis | None) -> GapDetail:
    """Return a gap with what a scene shows of it."""
    operations = scene.lanes[lane].operations
    assert operations is not None
    times = (gap.start_ns, gap.end_ns)
    shares = [times_in(other.layers, *times) for other in scene.lanes]
    before, after = (
        None if row is None else operation_at(scene, operations, row)
        for row in _neighbours(operations, *times)
    )
    return GapDetail(
        gap=gap,
        lane=lane,
        by_cause={cause: ns for cause, ns in shares[lane].items() if cause in IDLE_CAUSES},
        before=before,
        after=after,
        others={index: other for index, other in enumerate(shares) if index != lane},
        finding=finding_of(gap, analysis) if analysis else None,
    )


def times_in(layers: Layers, start: int, end: int) -> dict[str, int]:
    """Return the nanoseconds of a window by class, the longest first, without zeros."""
    parts = layers.split((start, end))[0].tolist()
    return _summed([dict(zip(layers.classes, parts, strict=True))])


def _summed(times: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum nanoseconds by class, the longest first, without zeros."""
    total: Counter[str] = Counter()
    for by_class in times:
        total.update(by_class)
    return {name: ns for name, ns in total.most_common() if ns}


def describe_gap(trace: Trace, scene: Scene, row: int) -> GapDetail:
    """Read the rows around a gap, which is given as a row of the scene's table."""
    table = scene.gaps
    start, end = int(table.start[row]), int(table.end[row])
    number, step = int(table.lane[row]), int(table.step[row])
    operations = scene.lanes[number].operations
    assert operations is not None
    after = _neighbours(operations, start, end)[1]
    issued = None if after is None else find_issuer(trace, scene, operations, after, start)
    evidence, waited = "", scene.lanes[number].loader.clip(start, end).total
    if issued is not None:
        thread = int(issued.calls.thread[issued.call])
        os_calls, ranges = (
            read_host(trace, issued.pair[0], kind, Window(start, end))
            for kind in (Kind.OS_RUNTIME, Kind.RANGE)
        )
        evidence = evidence_of(trace, issued.calls, os_calls, thread, start, end, waited)
        evidence += range_of(trace, ranges, issued.pair, start, end)
        shard = Shard(trace)
        state = read_host_state(shard).during(issued.pair, start, end)
        evidence = ", ".join([evidence, *state])
        lines = read_python_lines(shard)
        evidence += line_of(lines, issued.pair, start, end) if lines is not None else ""
    elif Kind.API in trace.kinds:
        evidence = NO_ISSUER
    evidence = f"{in_loader(waited, start, end)}{evidence}"
    gap = Gap(
        operations.gpu.gpu,
        operations.gpu.rank,
        None if step == NO_STEP else step,
        start,
        end,
        IDLE_CAUSES[int(table.cause[row])],
        evidence,
        times_in(scene.lanes[number].lost, start, end),
    )
    detail = _detail(scene, number, gap, scene.analysis)
    if issued is None:
        return detail
    return replace(detail, launch=issued.launch, host=_host(trace, issued.pair, start, end))


def _neighbours(operations: GpuOperations, start: int, end: int) -> tuple[int | None, int | None]:
    """Return the operation that ends where a gap begins, and the one after the gap."""
    before = int(np.searchsorted(operations.reach, start))
    after = int(np.searchsorted(operations.start, end))
    ended = before < len(operations) and operations.end[before] == start
    return before if ended else None, after if after < len(operations) else None


def operation_at(scene: Scene, operations: GpuOperations, row: int) -> Operation:
    """Return one row of a GPU's operations, with its name."""
    events, kind = operations.events, Kind(int(operations.events.kind[row]))
    return Operation(
        operation_name(scene.names, int(events.name[row]), kind),
        kind,
        int(operations.start[row]),
        int(operations.end[row]),
        int(events.bytes[row]),
        int(events.correlation[row]),
    )


def operation_name(names: Mapping[int, str], id: int, kind: Kind) -> str:
    """Return the name of an operation; copies and memsets have none, and are called by kind."""
    return names.get(id, "") if id != -1 else kind.name.lower().replace("_", " ")


def finding_of(gap: Gap, analysis: Analysis) -> Finding | None:
    """Return the finding that a gap belongs to, by its phase, the cause that most of it is charged
    to, its class, its GPU and its rank.
    """
    middle = (gap.start_ns + gap.end_ns) // 2
    phases = [
        phase.phase
        for phase in analysis.phases
        if phase.rank == gap.rank and phase.start_ns <= middle < phase.end_ns
    ]
    ids = [id for phase in phases for id in _PHASES.get(phase, ())]
    for id in (*ids, *list(gap.charges)[:1], *BY_ID[gap.cause].findings):
        for finding in analysis.findings:
            # One without GPUs or ranks concerns all of them.
            on_gpu = not finding.gpus or gap.gpu in finding.gpus
            on_rank = not finding.ranks or gap.rank in finding.ranks
            if finding.id == id and on_gpu and on_rank:
                return finding
    return None


def _host(trace: Trace, pair: tuple[int, int], start: int, end: int) -> tuple[HostTime, ...]:
    process, thread = pair
    columns = ("start", "end", "kind", "name", "process", "thread")
    events = trace.events(set(_HOST_KINDS) & trace.kinds, columns, Window(start, end))
    events = events.select((events.process == process) & (events.thread == thread))
    keys = events.kind.astype(np.int64) << 32 | events.name.astype(np.int64) & 0xFFFFFFFF
    names = trace.names(np.unique(events.name))
    activity = []
    for key in np.unique(keys):
        rows = keys == key
        kind, id = Kind(int(events.kind[rows][0])), int(events.name[rows][0])
        inside = union(events.start[rows], events.end[rows]).clip(start, end)
        if inside.total:
            activity.append(HostTime(kind, names[id], int(rows.sum()), inside.total))
    return tuple(sorted(activity, key=lambda time: (_HOST_KINDS.index(time.kind), -time.ns)))


_BEFORE_NS: Final = (1_000_000, 100_000_000)
"""Time before an operation to search for its call, before the whole trace is searched."""


@dataclass(frozen=True, slots=True)
class IssuingCall:
    """Host call that issued an operation."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    """Thread, by the number of the operating system."""


@dataclass(frozen=True, slots=True)
class Issued:
    """Host call that issued an operation, among the calls around it."""

    calls: CudaApiCalls
    call: int
    """Index in ``calls``."""
    launch: IssuingCall

    @property
    def pair(self) -> tuple[int, int]:
        """Process index and thread, as the trace counts them."""
        return self.calls.threads[int(self.calls.thread[self.call])]


def find_issuer(
    trace: Trace, scene: Scene, operations: GpuOperations, row: int, since: int
) -> Issued | None:
    """Return the call that issued an operation; None where the trace does not show it.

    The calls around it are all those that touch the time from ``since`` to the operation.
    """
    if Kind.API not in trace.kinds or operations.events.correlation[row] <= 0:
        return None
    process = scene.processes[int(operations.events.process[row])]
    correlation = operations.events.correlation[row : row + 1]
    started = int(operations.start[row])
    windows = [Window(min(since, started - before), started + 1) for before in _BEFORE_NS]
    for window in (*windows, None):
        calls = read_calls(trace, window=window)
        if calls is None:
            continue
        # A reopened trace may number the process only once its calls are read.
        index = np.array([index_in(trace, process)])
        call = int(calls.issued_by(Events({"process": index, "correlation": correlation}))[0])
        if call != NOBODY:
            id, thread = int(calls.name[call]), calls.threads[int(calls.thread[call])][1]
            times = int(calls.start[call]), int(calls.end[call])
            launch = IssuingCall(trace.names([id])[id], *times, thread & 0xFFFFFFFF)
            return Issued(calls, call, launch)
    return None


_SCHEMA_VERSION: Final = 1
_MOST_KERNELS: Final = 10
_LEAST_SHARE: Final = 0.01
"""Share of the median step by which a kernel must differ to be listed, and a step to be longer."""
_NAMED_SHARE: Final = 0.2
"""Share of the growth from which a cause is named."""
_WAITING: Final = DEFAULTS["communication"]
_UNEXPLAINED: Final = DEFAULTS["other_idle"]


def explain_step(
    scene: Scene, number: int | str, shard: Shard, *, evidence: bool = True
) -> StepExplanation:
    """Compare a step with the median step on every GPU that has it.

    ``slowest`` is the longest measured one. The shard has the whole trace of the scene. The
    evidence of the longest gaps, which takes longest to read, can be left out. Raises UsageError
    where no such step was found, or no other one was measured.
    """
    analysis = scene.analysis
    assert analysis is not None
    counters = shard.once(read_counters)
    ranked = ranks_of(shard.trace, dict.fromkeys(counters, 0))[0]
    counters = {rank: counters[process] for rank, process in ranked.items()}
    steps = analysis.step_list
    if isinstance(number, str):
        steady = [step for step in steps if step.phase == "steady"]
        number = max(steady, key=_length).step if steady else 0
    here = [step for step in steps if step.step == number]
    if not here and (named := [step for step in steps if step.number == number]):
        number, here = named[0].step, [step for step in steps if step.step == named[0].step]
    rows = []
    for index, lane in enumerate(scene.lanes):
        mine = [step for step in steps if (step.gpu, step.rank) == (lane.gpu, lane.rank)]
        step = next((each for each in mine if each.step == number), None)
        others = [each for each in mine if each.phase == "steady" and each.step != number]
        if step is not None and others:
            usual = sorted(others, key=_length)[(len(others) - 1) // 2]
            counted = counters.get(lane.rank)
            rows.append(_on_gpu(scene, shard, index, step, usual, counted, evidence=evidence))
    if not rows:
        count = max((step.step for step in steps), default=-1)
        why = "no steps were found in it"
        if here:
            why = f"it has no other measured step to compare step {number} with"
        elif count >= 0:
            why = f"no step {number}; it has steps 0 to {count}"
        raise UsageError(f"{scene.title}: {why}")
    rows.sort(key=_own_growth, reverse=True)
    message, advice = _message(analysis, here[0], rows[0]), _advice(analysis, number, rows[0])
    return StepExplanation(
        _SCHEMA_VERSION, analysis.path, number, here[0].phase, message, tuple(rows), advice
    )


_ON_CARDS: Final = ("shared-gpu", "throttling", "clock-mismatch")
_SAME_KERNELS: Final = "look at the card's clocks and other programs: the same kernels take longer"
_CLASS_OF: Final = {cause: name for name, cause in DEFAULTS.items()}


def _advice(analysis: Analysis, number: int, row: StepOnGpu) -> str:
    """Return what to do about a step: as one of the slow steps, if it is one; else about the cause
    that grew most on a GPU. Empty if it is no longer than the median step.
    """
    if row.more_ns < _LEAST_SHARE * row.usual_ns:
        return ""
    grown, found = row.parts[0].cause, analysis.findings
    slow = (f for f in found if f.id == "slow-steps" and f.evidence["rank"] == row.rank)
    for finding in slow:
        steps = str(finding.evidence["steps"])
        edges = (part.partition("-") for part in steps.split(", "))
        if any(int(first) <= number <= int(last or first) for first, _, last in edges):
            what = finding.advice.partition(" (gputrace analyze ")[0]
            return f"it is one of the slow steps ({steps}): {what}"
    same = [each.launches <= each.usual_launches for each in row.kernels if each.more_ns > 0]
    if grown == "compute" and same and all(same):
        on_card = (f"; {f.message}" for f in found if f.id in _ON_CARDS and row.gpu in f.gpus)
        return _SAME_KERNELS + next(on_card, "")
    wanted = (grown, *BY_ID["data_feeding"].findings) if grown == "host_data" else (grown,)
    at = f"look at {row.line.partition(' (')[0]}" if row.line and grown != "compute" else ""
    if not at and row.more_ns >= MEDIUM * row.usual_ns:
        at = IN_SLOW_STEPS.get(_CLASS_OF.get(grown, grown), HOST_THEN)
    known = (f.advice for f in found if f.id in wanted)
    return next(known, at.replace("these steps", "such steps"))


def _length(step: Step) -> int:
    return step.end_ns - step.start_ns


def _own_growth(row: StepOnGpu) -> int:
    """Return by how much a step grew by something else than waiting for others."""
    return row.more_ns - sum(part.more_ns for part in row.parts if part.cause == _WAITING)


def _on_gpu(
    scene: Scene,
    shard: Shard,
    index: int,
    step: Step,
    usual: Step,
    counters: Counters | None,
    *,
    evidence: bool,
) -> StepOnGpu:
    lane, analysis, trace = scene.lanes[index], scene.analysis, shard.trace
    assert analysis is not None
    spent, before = (_by_cause(lane, each, counters) for each in (step, usual))
    names = dict.fromkeys([*spent, *before])
    times = ((name, spent.get(name, 0), before.get(name, 0)) for name in names)
    parts = [StepPart(name, _label(analysis, name), ns, was, ns - was) for name, ns, was in times]
    parts.sort(key=lambda part: (-part.more_ns, -part.ns))
    gap = _longest_gap(scene, index, step, trace if evidence else None)
    lines, line = shard.once(read_python_lines), None
    if lines is not None:
        time = union([gap.start_ns], [gap.end_ns]) if gap else time_of([step])
        waits = None if gap else parts[0].cause == "host_data"
        line = _line(trace, lines, lane, time, waits_for_data=waits)
    return StepOnGpu(
        lane.gpu, lane.rank, step.start_ns, step.end_ns, usual.step, _length(usual),
        _length(step) - _length(usual), tuple(parts), gap, line,
        tuple(islice(_kernels(scene, lane, step, usual), _MOST_KERNELS)),
    )  # fmt: skip


_QUEUED: Final = "cpu-starved"
_MAY_BE_QUEUED: Final = (*IDLING, "host_rest"), ("host_data",)
"""Causes of which waiting for a core may be a part; of waits for data, in which a thread may sleep,
only what the others have no room for.
"""


def _by_cause(lane: SceneLane, step: Step, counters: Counters | None) -> dict[str, int]:
    """Return the nanoseconds of a step by cause; they sum to its length."""
    spent = _by_proof(lane, step)
    queued = 0 if counters is None else counters.queued_in(time_of([step]))
    for causes in _MAY_BE_QUEUED if queued else ():
        mine = {cause: spent[cause] for cause in causes if spent.get(cause, 0) > 0}
        share = min(1.0, queued / max(sum(mine.values()), 1))
        for cause, ns in mine.items():
            part = round(ns * share)
            spent[_QUEUED], spent[cause] = spent.get(_QUEUED, 0) + part, ns - part
            queued -= part
    return spent


def _by_proof(lane: SceneLane, step: Step) -> dict[str, int]:
    """Return the nanoseconds of a step by cause, without waits for a core."""
    edges = (step.start_ns, step.end_ns)
    layers = lane.layers.split(edges)[0].tolist()
    spent = dict(zip(lane.layers.classes, layers, strict=True))
    if lane.gpu is None:
        return {cause: ns for cause, ns in spent.items() if ns}
    lost = dict(zip(lane.lost.classes, lane.lost.split(edges)[0].tolist(), strict=True))
    spent = {"compute": spent["compute"], **lost}
    # A step may reach beyond the first and the last operation of a GPU.
    rest = _length(step) - sum(spent.values())
    spent[_UNEXPLAINED] = spent.get(_UNEXPLAINED, 0) + rest
    return {cause: ns for cause, ns in spent.items() if ns or cause == "compute"}


def _label(analysis: Analysis, cause: str) -> str:
    words = {"compute": "compute", "host_data": "waiting for data", "host_rest": "other host time"}
    return words.get(cause) or analysis.cause_label(cause)


def _longest_gap(scene: Scene, index: int, step: Step, trace: Trace | None) -> Gap | None:
    """Return the longest gap whose middle lies in a step of a lane; the trace has its evidence."""
    table, (first, last) = scene.gaps, scene.gaps.of_lane(index)
    rows = np.flatnonzero(table.step[first:last] == step.step) + first
    if not len(rows):
        return None
    row = int(rows[np.argmax(table.length[rows])])
    if trace is not None:
        return describe_gap(trace, scene, row).gap
    cause = IDLE_CAUSES[int(table.cause[row])]
    times = int(table.start[row]), int(table.end[row])
    return Gap(scene.lanes[index].gpu or 0, step.rank, step.step, *times, cause, "")


def _line(
    trace: Trace,
    lines: PythonLines,
    lane: SceneLane,
    time: Intervals,
    *,
    waits_for_data: bool | None,
) -> str | None:
    """Return the line with more than half of the samples of a rank's thread in some time, and how
    many it has: of its waits for data, or of the rest, if asked for one of them.
    """
    work = {process: len(lines.times[thread]) for process, thread in lines.stand_ins.items()}
    processes = ranks_of(trace, work)[0]
    process = processes.get(lane.rank, UNKNOWN)
    thread, place = lines.stand_ins.get(process), None
    if waits_for_data is not None:
        data = read_evidence(trace).data.items()
        waits = reduce(merge_touching, (some for (of, _), some in data if of == process), EMPTY)
        time = time.intersection(waits) if waits_for_data else time.difference(waits)
    if thread is not None:
        place = lines.place({thread: lines.within(thread, time)})
    if place is None or 2 * place.count <= place.samples:
        return None
    return f"{place.line} ({place.count} of {place.samples} samples)"


def _kernels(scene: Scene, lane: SceneLane, step: Step, usual: Step) -> Iterator[StepKernel]:
    """Yield the kernels that differ most between two steps of a GPU."""
    if (operations := lane.operations) is None:
        return
    ids = operations.events.name
    is_kernel = operations.events.kind == Kind.KERNEL
    found: list[Counter[int]] = []
    for each in (step, usual):
        first, last = np.searchsorted(operations.start, (each.start_ns, each.end_ns))
        rows = np.flatnonzero(is_kernel[first:last]) + first
        lengths = operations.end[rows] - operations.start[rows]
        count, total = Counter[int](), Counter[int]()
        for id, ns in zip(ids[rows].tolist(), lengths.tolist(), strict=True):
            count[id] += 1
            total[id] += ns
        found += [count, total]
    launches, ns, before, usual_ns = found
    least = _LEAST_SHARE * _length(usual)
    differ = {id: ns[id] - usual_ns[id] for id in {*ns, *usual_ns}}
    for id, more in sorted(differ.items(), key=lambda item: (-abs(item[1]), item[0])):
        if abs(more) >= least:
            name = operation_name(scene.names, id, Kind.KERNEL)
            yield StepKernel(name, launches[id], before[id], ns[id], usual_ns[id], more)


def _message(analysis: Analysis, step: Step, row: StepOnGpu) -> str:
    where = ""
    if len(analysis.gpus) > 1:
        kind = "rank" if row.gpu is None else "GPU"
        where = f" on {kind} {row.rank if row.gpu is None else row.gpu}"
    named = "" if step.number in (None, step.step) else f" (the program's {step.number})"
    took = f"step {step.step}{named} took {format_ns(row.end_ns - row.start_ns)}{where}"
    if row.more_ns < _LEAST_SHARE * row.usual_ns:
        usual = f"step {row.usual_step}, {format_ns(row.usual_ns)}"
        return f"{took}, no longer than the median step ({usual})"
    grown = [part for part in row.parts if part.more_ns >= _NAMED_SHARE * row.more_ns]
    why = ", ".join(f"{part.label} {format_change(part.more_ns)}" for part in grown[:2])
    at = f", at {row.line.partition(' (')[0]}" if row.line else ""
    return (
        f"{took}, {format_ns(row.more_ns)} longer than the median step (step {row.usual_step})"
        f"{why and ': '}{why}{at}"
    )
