"""Step windows, one set per rank; how many at the start are warm-up, what recording costs a step,
and the time between steps that the host shows: validation, and what else lies between epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.grouping import median, times_by_process
from gputrace.model.events import Kind, Mask, distinct_ids
from gputrace.model.host import CHECKPOINT
from gputrace.model.intervals import EMPTY, Intervals, Times, union
from gputrace.model.results import RecorderCost
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace


class Interlude(Struct, frozen=True, dict=True):
    """A stretch between two steps of a rank that belongs to neither."""

    phase: str
    """``validation``, ``checkpoint``, or ``between`` where it is not known."""
    start: int
    end: int
    after: int
    """The step it follows."""
    evidence: str


class MarkedSteps(Struct, frozen=True, dict=True):
    """Steps of one rank as its host marked them, in order."""

    number: Times
    length: Times
    """Nanoseconds from mark to mark, in host time."""
    recorded: Mask
    """True where GPU activity was recorded for all of the step."""
    control: Mask
    """True where nothing was recorded for all of the step."""
    idle: Mask
    """True where CUPTI stayed in the process nevertheless, for all of the step."""

    def select(self, kept: Mask) -> MarkedSteps:
        """Return some of the steps."""
        times = self.number[kept], self.length[kept]
        return MarkedSteps(*times, self.recorded[kept], self.control[kept], self.idle[kept])


class StepWindows(Struct, frozen=True, dict=True):
    """The steps of one rank, in GPU time, in order and disjoint."""

    rank: int
    start: Times
    end: Times
    busy_from: Times
    """When the first operation of each step starts."""
    source: str
    """``markers``, ``profiler``, ``nvtx`` or ``inferred``."""
    kind: str
    """One of `KINDS`."""
    confidence: float
    reason: str
    """How they are known, and their kind."""
    interludes: tuple[Interlude, ...] = ()
    numbers: Times | None = None
    """Numbers of the steps as the program counted; None if it did not."""
    is_part: bool = False
    """True where the trace has no mark of step 0, as in a part that was cut out of one."""
    marked: MarkedSteps | None = None
    """All steps that the host marked; None without control stretches."""
    with_nodes: int = 0
    """Number of steps left out because the nodes of CUDA graphs were recorded in them."""
    tokens: int = 0
    """Tokens that an iteration of generation makes for all sequences; 1 where it is not known how
    many these are, 0 where an iteration may be more than a token."""
    notes: tuple[str, ...] = ()
    """Marks that were mended or left out."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> Times:
        """Nanoseconds of each step."""
        return self.end - self.start

    def at(self, moment: int) -> int | None:
        """Return the step that contains a moment; None if none does."""
        number = int(np.searchsorted(self.start, moment, "right")) - 1
        return number if number >= 0 and moment < self.end[number] else None


_COMPILED_PART: Final = 0.5
"""Part of the time between two steps in which a process compiles that is not validation."""


def with_compilation(trace: Trace, windows: StepWindows, process: int) -> StepWindows:
    """Return the windows without validation in which the process mostly compiles: what runs then
    are kernels that a compiler tries, for the step that begins with it.
    """
    if Kind.COMPILATION not in trace.kinds:
        return windows
    events = trace.events([Kind.COMPILATION], ("start", "end", "process"))
    compiled = times_by_process(events).get(process, EMPTY)
    return without_validation(
        windows,
        lambda i: compiled.clip(i.start, i.end).total > _COMPILED_PART * (i.end - i.start),
    )


def without_validation(
    windows: StepWindows, is_false: Callable[[Interlude], bool | np.bool_]
) -> StepWindows:
    """Return the windows with what is falsely taken for validation in the steps that follow it."""
    starts = windows.start.copy()
    for interlude in windows.interludes:
        if interlude.phase == "validation" and is_false(interlude):
            starts[interlude.after + 1] = interlude.start
    kept = tuple(i for i in windows.interludes if i.start < starts[i.after + 1])
    return replace(windows, start=starts, interludes=kept)


_WARMUP_SLOWER_PART: Final = 0.15
"""A step longer than the later ones by this part of them is not yet at speed,"""
_WARMUP_DEVIATIONS: Final = 3 * 1.4826
"""unless they scatter so much: three standard deviations, from the median deviation."""
_STEPS_AT_SPEED: Final = 3
"""So many steps at speed end the warm-up: one slow step later on is a hiccup."""
_FIRST_SLOWER: Final = 1.5
_BEYOND_SPREAD: Final = 2
"""The first of less than six steps are warm-up if each takes this many times as long as the longest
of those that follow, and is further from it than this many times what these lie apart."""


def count_warmup(lengths: ArrayLike) -> int:
    """Count the steps before the first three in a row at speed, that of the later half's median.

    At most half of the steps; of three to five, those that are far longer than all that follow.
    """
    lengths = np.asarray(lengths, np.int64)
    half = len(lengths) // 2
    if len(lengths) < 2 * _STEPS_AT_SPEED:
        for step in range(half):
            longest, spread = lengths[step + 1 :].max(), np.ptp(lengths[step + 1 :])
            beyond = longest + _BEYOND_SPREAD * spread
            if step + 2 == len(lengths) or lengths[step] <= max(_FIRST_SLOWER * longest, beyond):
                return step
        return half
    usual = median(lengths[half:])
    scatter = median(np.abs(lengths[half:] - usual))
    fast = lengths <= usual + max(_WARMUP_SLOWER_PART * usual, _WARMUP_DEVIATIONS * scatter)
    for step in range(half):
        if fast[step : step + _STEPS_AT_SPEED].all():
            return step
    return half


_SETTLING_STEPS: Final = 3
"""Steps after the recorder's return that are not compared: it takes time to begin."""
_STEPS_EACH_SIDE: Final = 20
"""Most steps on either side of where recording begins or ends that are compared."""
_FEWEST_COMPARED: Final = 8
"""Minimum number of control steps, and of recorded ones, to compare."""
_FEWEST_FOR_SCATTER: Final = 4
"""Comparisons from which on their scatter says something."""
_SEEN_COST_PART: Final = 0.6
"""Part of the cost of recording that steps with an idle CUPTI are without: the slope through
thirteen comparisons with whole runs without a recorder (ResNet-18, ResNet-50 and GPT-2 on H100,
CUPTI 13.0.1: docs/measurements/recording.md)."""
_SEEN_COST_ERROR: Final = 0.25
"""Standard error of `_SEEN_COST_PART`, as a part of it."""
_MOST_COST: Final = 0.95
"""Most of a recorded step that recording takes: a part divided by `_SEEN_COST_PART` may be
more than all."""
_INTERVAL_ERRORS: Final = 2.0
"""Half-width of the interval, in standard errors."""
_TRIMMED_PART: Final = 0.1
"""Part of the steps that is left out of a mean at either end: a checkpoint, a batch that is late.
A median would leap where others on the machine interrupt nearly half of the steps."""
_ORDINARY_MEDIANS: Final = 3.0
"""Most that an ordinary step takes, in medians; others are left out of the mean of all."""
_SHARED_CONTROL_VARIANCE: Final = 1.5
"""Factor of the variance of a mean of comparisons of which two share their control steps."""


def estimate_cost(ranks: Collection[MarkedSteps | None]) -> RecorderCost | None:
    """Return how much longer a step takes because it is recorded; None without control stretches,
    and where steps have no length.

    Steps count if all ranks were recorded in them, or none: ranks that train together wait for the
    slowest. Where recording ends or begins anew, the steps on either side are compared, since the
    pace of a host wanders; how much it wanders over so many steps is known from recorded steps that
    follow each other (the Allan variance: Allan, 1966). Costs are pooled by their variance, apart
    for the steps before CUPTI first left the process and those after it, which cost more, and taken
    off their mean. Of the cost, a stretch in which CUPTI is idle shows the part `_SEEN_COST_PART`.
    The interval covers two standard errors.
    """
    marked = [steps for steps in ranks if steps is not None and len(steps.number)]
    if not marked or len(marked) < len(ranks):
        return None
    steps = _together(marked)
    settled = _settled(steps)
    control = np.flatnonzero(steps.control)
    runs = np.split(control, np.flatnonzero(np.diff(steps.number[control]) != 1) + 1)
    runs = [run for run in runs if len(run)]
    compared = _compare(steps, settled, runs)
    if min(sum(map(len, runs)), sum(len(beside) for _, beside in compared)) < _FEWEST_COMPARED:
        return None
    if min(_mean(steps.length[rows])[0] for pair in compared for rows in pair) <= 0:
        return None
    rows = settled[count_warmup(steps.length[settled]) :]
    rows = rows[steps.length[rows] <= _ORDINARY_MEDIANS * median(steps.length[rows])]
    lengths = steps.length[rows].astype(np.float64)
    if lengths.sum() <= 0:
        return None
    left = np.flatnonzero(steps.control & ~steps.idle)
    first = left[0] if len(left) else len(steps.number)
    part = unsure = scatter = 0.0
    for is_after in (False, True):
        pairs = [pair for pair in compared if (pair[1][0] > first) == is_after]
        cost, error, by_idle = _pool(steps, settled, pairs or compared)
        share = float(lengths[(rows > first) == is_after].sum() / lengths.sum())
        part += share * cost
        scatter = np.hypot(scatter, share * error)
        unsure += share * by_idle
    scatter = _INTERVAL_ERRORS * float(np.hypot(scatter, _SEEN_COST_ERROR * unsure))
    mean = float(lengths.mean())
    return RecorderCost(
        step_ns=round(mean),
        unrecorded_step_ns=round(mean * (1 - max(part, 0.0))),
        low_ns=round(mean * (1 - min(max(part + scatter, 0.0), _MOST_COST))),
        high_ns=round(mean * (1 - part + scatter)),
        stretches=len(runs),
        steps=sum(map(len, runs)),
    )


def _together(marked: Sequence[MarkedSteps]) -> MarkedSteps:
    """Return the steps that all ranks have, with their mean lengths."""
    common = reduce(np.intersect1d, [steps.number for steps in marked])
    marked = [steps.select(np.isin(steps.number, common)) for steps in marked]
    return MarkedSteps(
        common,
        np.mean([steps.length for steps in marked], axis=0).astype(np.int64),
        np.all([steps.recorded for steps in marked], axis=0),
        np.all([steps.control for steps in marked], axis=0),
        np.any([steps.idle for steps in marked], axis=0),
    )


def _settled(steps: MarkedSteps) -> NDArray[np.int64]:
    """Return the rows of the recorded steps but for those in which recording begins anew."""
    rows = np.flatnonzero(steps.recorded)
    ends = np.flatnonzero(steps.control[:-1] & ~steps.control[1:]) + 1
    first = np.searchsorted(rows, ends)
    anew = (first[:, None] + np.arange(_SETTLING_STEPS)).ravel()
    return np.delete(rows, anew[anew < len(rows)])


def _compare(
    steps: MarkedSteps, settled: NDArray[np.int64], runs: Sequence[NDArray[np.int64]]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return rows of control steps, and of settled steps before or after them, up to the next
    stretch.
    """
    ends = [-1, *(run[-1] for run in runs)]
    begins = [*(run[0] for run in runs[1:]), len(steps.number)]
    compared = []
    for run, since, until in zip(runs, ends, begins, strict=False):
        first, begin, end, last = np.searchsorted(settled, [since, run[0], run[-1], until])
        is_short = len(run) <= 2 * _STEPS_EACH_SIDE
        for stretch, beside in (
            (
                run if is_short else run[:_STEPS_EACH_SIDE],
                settled[max(first, begin - _STEPS_EACH_SIDE) : begin],
            ),
            (run if is_short else run[-_STEPS_EACH_SIDE:], settled[end:last][:_STEPS_EACH_SIDE]),
        ):
            if len(beside):
                compared.append((stretch, beside))
    return compared


def _pool(
    steps: MarkedSteps,
    settled: NDArray[np.int64],
    pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[float, float, float]:
    """Return the part of recorded steps that recording takes, its standard error, and how much of
    it was told by stretches with an idle CUPTI.
    """
    idle = np.array([steps.idle[stretch].any() for stretch, _ in pairs])
    costs = np.array([1 - _mean(steps.length[a])[0] / _mean(steps.length[b])[0] for a, b in pairs])
    costs = np.minimum(np.where(idle, costs / _SEEN_COST_PART, costs), _MOST_COST)
    counts = [min(len(stretch), len(beside)) for stretch, beside in pairs]
    wander = {count: _wander(steps.length[settled], count) for count in set(counts)}
    variances = np.array([wander[count] for count in counts]) / np.where(
        idle, _SEEN_COST_PART**2, 1.0
    )
    weights = 1 / np.maximum(variances, 1e-12)
    total = float(weights.sum())
    weights /= total
    cost = float(weights @ costs)
    variance = _SHARED_CONTROL_VARIANCE / total
    if len(pairs) >= _FEWEST_FOR_SCATTER:
        scattered = float(weights**2 @ (costs - cost) ** 2)
        variance = max(variance, scattered * len(pairs) / (len(pairs) - 1))
    return cost, variance**0.5, float((weights * idle) @ costs)


def _wander(lengths: Times, count: int) -> float:
    """Return the variance of the ratio of the means of so many steps and of the next ones."""
    mean, error = _mean(lengths)
    steady = 2 * (error / max(mean, 1.0)) ** 2 * len(lengths) / count
    blocks = len(lengths) // count
    if blocks < _FEWEST_FOR_SCATTER:
        return steady
    cut = int(_TRIMMED_PART * count)
    each = np.sort(lengths[: blocks * count].reshape(blocks, count), axis=1)
    means = np.maximum(each[:, cut : count - cut].mean(axis=1), 1.0)
    return max(steady, float(np.mean((means[1:] / means[:-1] - 1) ** 2)))


def _mean(values: NDArray[Any]) -> tuple[float, float]:
    """Return the trimmed mean and its standard error (Tukey and McLaughlin, 1963)."""
    values = np.sort(values.astype(np.float64))
    cut = int(_TRIMMED_PART * len(values))
    inner = values[cut : len(values) - cut]
    spread = float(np.std(np.clip(values, inner[0], inner[-1]), ddof=1)) if len(values) > 1 else 0.0
    return float(inner.mean()), spread / (len(inner) / len(values)) / len(values) ** 0.5


_APART_PART: Final = 0.5
"""Part of a usual step that what a program does before one lasts at least to be no part of it."""


class Between(Struct, frozen=True, dict=True):
    """Calls of a process that trains, between which its steps are parted, in host time.

    Attributes:
        waits: when the thread that trains waits for batches, of any loader.
        passes: when it passes batches forward.
        starts: when the process starts a loader's workers.
        saves: when it saves checkpoints.
    """

    waits: Intervals
    passes: Intervals
    starts: Intervals
    saves: Intervals

    def begins(self, start: Times, end: Times) -> Times:
        """Return when the steps from mark to mark begin that follow something else; the others
        begin where they did.

        A step that waits for batches more often than most follows the end of an epoch, or a
        validation. It begins with the start of its loader, or its own first wait. If no step waits,
        passes tell.
        """
        begins = start.copy()
        if not len(start):
            return begins
        for calls in (self.waits, self.passes):
            first, last = np.searchsorted(calls.start, start), np.searchsorted(calls.start, end)
            usual = int(median(last - first))
            if usual and 2 * np.count_nonzero(last - first == usual) > len(start):
                more = np.flatnonzero(last - first > usual)
                begins[more] = calls.start[last[more] - usual]
                break
        for step in np.flatnonzero(begins > start).tolist():
            since = _within(self.passes, int(start[step]), int(begins[step])).end.max(initial=0)
            loads = _within(self.starts, max(int(start[step]), int(since)), int(begins[step]))
            begins[step] = loads.start.min(initial=begins[step])
        return np.where(begins - start > _APART_PART * median(end - start), begins, start)

    def interludes(self, step: int, start: int, end: int) -> Iterator[Interlude]:
        """Yield what lies between the end of a step and the begin of the next."""
        passes, until = _within(self.passes, start, end), start
        if len(passes):
            # A loader is asked once more, and says that it has no more.
            waits = _within(self.waits, start, end)
            until = min(end, max(int(passes.end[-1]), int(waits.end[-1]) if len(waits) else start))
            evidence = f"forward passes ({len(passes)}) and no optimizer"
            yield Interlude("validation", start, until, step, evidence)
        if end > until:
            phase, evidence = "between", "neither a pass nor a wait for a batch"
            if 2 * self.saves.clip(until, end).total > end - until:
                phase, evidence = "checkpoint", "the host saves it"
            yield Interlude(phase, until, end, step, evidence)


def _within(calls: Intervals, start: int, end: int) -> Intervals:
    """Return the calls that begin in some time."""
    return calls.select(slice(*np.searchsorted(calls.start, [start, end])))


def read_between(trace: Trace, process: int, threads: Collection[int]) -> Between:
    """Read what the threads of a process that mark steps do."""
    kinds = [k for k in (Kind.DATA_WAIT, Kind.PHASE, Kind.LOADER) if k in trace.kinds]
    events = trace.events(kinds, ("start", "end", "kind", "name", "process", "thread"))
    events = events.select(events.process == process)
    text = trace.names(distinct_ids(events.name))
    mine = np.isin(events.thread, [*threads])

    def called(rows: Mask, *names: str) -> Intervals:
        rows = rows & np.isin(events.name, [id for id, name in text.items() if name in names])
        return union(events.start[rows], events.end[rows])

    return Between(
        called(mine & (events.kind == Kind.DATA_WAIT), *text.values()),
        called(mine & (events.kind == Kind.PHASE), "model", "forward"),
        called(events.kind == Kind.LOADER, "start workers"),
        called(mine & (events.kind == Kind.PHASE), CHECKPOINT),
    )


def part_by_host(between: Between, marks: tuple[Times, Times], windows: StepWindows) -> StepWindows:
    """Return windows in a GPU's time without what the host does before them: given the marks of the
    steps, in host time.
    """
    known = between.begins(*marks)
    begins = np.clip(known, windows.start, windows.busy_from)
    moved = (known > marks[0]) & (begins - windows.start > _APART_PART * median(windows.lengths))
    begins = np.where(moved, begins, windows.start)
    interludes = [
        interlude
        for step in np.flatnonzero(moved[1:]).tolist()
        for interlude in between.interludes(
            step, int(windows.start[step + 1]), int(begins[step + 1])
        )
    ]
    both = sorted((*windows.interludes, *interludes), key=lambda interlude: interlude.start)
    return replace(windows, start=begins, interludes=tuple(both))
