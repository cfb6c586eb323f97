"""Steps that a trace names: ranges of recorders, profilers and NVTX, mended one by one, and in the
GPU's time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, CudaApiCalls
from gputrace.analyzers.grouping import median
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps import rollouts
from gputrace.analyzers.steps.inferred import (
    Rows,
    lead_to_graphs,
    part_interludes,
    window_starts,
    without_foreign,
)
from gputrace.analyzers.steps.windows import MarkedSteps, StepWindows, part_by_host, read_between
from gputrace.model.events import Events, Kind, Mask, distinct_ids
from gputrace.model.host import BACKWARD
from gputrace.model.intervals import Times, lie_in, union
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace
from gputrace.units import format_count, format_ns

_LEAST_STEPS: Final = 3
_LEAST_PROFILED: Final = 2
"""Minimum number of ranges that are steps, and of a profiler's, whose name leaves no doubt."""
_LEAST_COVERED: Final = 0.5
_MOSTLY_COVERED: Final = 0.9
"""Part of a GPU's operations that must be issued inside ranges that are named as steps, and as
passes, which may be parts of a step."""
_LOOPS: Final = ("training", "rl", "benchmark")
"""Kinds whose ranges are turns of a loop, between which something else may run."""
_MOST_BEHIND: Final = 0.5
"""Part of a step that a GPU which keeps up with its host may be behind."""

_TURN: Final = (
    r"(?i:(?<![a-z])(step|iter(ation)?|batch)(?![a-z]))"
    r"|(?<=[a-z])(Step|Iter(ation)?|Batch)(?![a-z])"
)
_TRAIN: Final = r"(?i:(?<![a-z])train(ing)?(?![a-z]))"
_PASS: Final = (
    r"(?i:(?<![a-z])(forward|fwd|infer(ence)?|predict(ion)?|generate|generation|decode|prefill"
    r"|execute|bench(mark)?|measured?|timed|run|trial|repetition|pass|eval(uate|uation)?|rollout)(?![a-z]))"
)
"""Names of one turn of a loop; of one or all of them; and of a turn of what does not train, or of a
part of a turn."""
_NAMED: Final = f"{_TURN}|{_TRAIN}|{_PASS}|(?i:warm)"
_NOT_TURN: Final = r"(?i)optim|micro|(?<![a-z])(load|data(loader)?|get|next|fetch)(?![a-z])"
_PART: Final = (
    r"(?i)layer|block|module|expert|head|stage|::|forward|fwd|backward|bwd|optim|micro|epoch|fold"
    r"|copy|memcpy|sync|alloc|init|nccl|mpi|(?<![a-z])(load|data(loader)?|get|next|fetch)(?![a-z])"
)
"""Names of parts of a turn, or of several turns."""
_LAYER: Final = r"(?i)layer|block|module|expert|head|stage|::"
_HALF: Final = r"(?i)forward|fwd", r"(?i)backward|bwd"
_WARMUP: Final = r"(?i)^(?!.*(learning|lr|sched)).*warm[-_ ]?(ing[-_ ]?)?up"
_TOKEN: Final = r"(?i)(?<![a-z])(decod(e|ing)|token)(?![a-z])"
_SEQUENCES: Final = r"(?i)(?<![a-z])(?:bs|batch(?:[ _]?size)?)[ =:_]*(\d+)"
_PROFILER: Final = r"ProfilerStep#?\d*"
_KINDS: Final = (
    ("rl", r"(?i)(?<![a-z])(rollout|ppo|grpo|rlhf)(?![a-z])"),
    ("generation", r"(?i)(?<![a-z])(decod(e|ing)|prefill|generate|generation|generating)(?![a-z])"),
    ("evaluation", r"(?i)(?<![a-z])(eval|valid|val(?![a-z])|test|infer|predict)"),
    ("benchmark", r"(?i)(?<![a-z])(bench|measure|timed|trial|run|repetition)"),
)


def kind_of_ranges(name: str) -> str:
    """Return the kind of loop that ranges of a name mark, ``warmup``, or nothing if they mark none.

    A pass forward is none of training, nor is one backward; both together are.
    """
    if re.search(_WARMUP, name):
        return "warmup"
    is_turn, trains = re.search(_TURN, name), re.search(_TRAIN, name)
    if re.search(_NOT_TURN, name) or (not is_turn and re.search(r"(?i)epoch", name)):
        return ""
    kind = next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "")
    halves = [re.search(half, name) is not None for half in _HALF]
    if trains and kind == "benchmark":
        kind = ""
    if (is_turn or trains) and not kind and halves[0] == halves[1]:
        return "training"
    if halves[1] or re.search(_LAYER, name) or not (kind or re.search(_PASS, name)):
        return ""
    return kind or "evaluation"


class Marks(Struct, frozen=True, dict=True):
    """Ranges of one name on one thread, one a step, in order and disjoint, in host time."""

    process: int
    thread: int
    name: str
    source: str
    start: Times
    end: Times
    numbers: Times
    """Numbers as the program counted them; else from 0."""
    kind: str = "training"
    """Kind of loop that they mark, as far as their name says."""
    after: str = ""
    """Ranges named as warm-up, which these follow: how many, and their name."""
    tokens: int = 0
    """Tokens that a turn of generation makes, 1 if the number of sequences is unknown; else 0."""
    note: str = ""
    """How they were mended."""

    def lie_in(self, windows: Sequence[Window]) -> Mask:
        """Return the mask of steps that lie in one window each."""
        return lie_in(self.start, self.end, windows)

    def in_control_of(self, trace: Trace) -> MarkedSteps | None:
        """Return the steps with and without the recorder; None without control stretches."""
        coverage = trace.coverage(self.process)
        if not coverage.control:
            return None
        masks = map(self.lie_in, (coverage.windows, coverage.control, coverage.idle))
        return MarkedSteps(self.numbers, self.end - self.start, *masks)

    def join(self, first: Rows, last: Rows, what: str) -> Marks:
        """Return turns that each hold the steps from one to another."""
        numbers = self.numbers[first[0]] // int(median(last - first + 1)) + np.arange(len(first))
        start, end, name = self.start[first], self.end[last], f"{self.name}, {what}"
        return replace(self, start=start, end=end, numbers=numbers, name=name)

    def within(self, windows: Sequence[Window]) -> Marks:
        """Return the steps that lie in one window each; all if no window is recorded."""
        return self.select(self.lie_in(windows)) if windows else self

    def select(self, kept: Mask) -> Marks:
        """Return some of the steps."""
        start, end, numbers = (times[kept] for times in (self.start, self.end, self.numbers))
        return replace(self, start=start, end=end, numbers=numbers)


_COLUMNS: Final = "start", "end", "name", "process", "thread", "correlation"


def read_marks(trace: Trace, *, named: bool = True) -> list[Marks]:
    """All families of ranges that may be turns of a loop: markers first, then NVTX ranges, by their
    names; or without ``named``, all but those that are called as parts of a turn.

    Those that lie in ranges named as warm-up are left out.
    """
    marks: list[Marks] = []
    for kind in (kind for kind in (Kind.STEP, Kind.RANGE) if kind in trace.kinds):
        events = trace.events([kind], _COLUMNS)
        ids = distinct_ids(events.name)
        marked = kind == Kind.STEP
        text = trace.search(ids, _NAMED) if named and not marked else trace.names(ids)
        families = {id: re.sub(r"\d+", "#", name) for id, name in text.items()}
        kinds = {name: kind_of_ranges(name) for name in set(families.values())}
        if marked:
            kinds = {name: kind or "training" for name, kind in kinds.items()}
        elif not named:
            is_part = {name: re.search(_PART, name) is not None for name in kinds}
            kinds = {
                name: kind if kind == "warmup" else "" if is_part[name] else "iterations"
                for name, kind in kinds.items()
            }
        events = events.select(np.isin(events.name, [id for id in families if kinds[families[id]]]))
        for process in distinct_ids(events.process).tolist():
            mine = events.select(events.process == process)
            members: dict[str, list[int]] = {}
            for id in distinct_ids(mine.name).tolist():
                members.setdefault(families[id], []).append(id)
            warm = [id for f, names in members.items() if kinds[f] == "warmup" for id in names]
            warmup = mine.select(np.isin(mine.name, warm))
            for family, names in members.items():
                if kinds[family] != "warmup":
                    ranges = mine.select(np.isin(mine.name, names))
                    called = [text[id] for id in names]
                    marks += _by_thread(ranges, kind, family, kinds[family], warmup, called)
    return marks


def read_passes(trace: Trace) -> Iterator[Marks]:
    """Read turns that end with a backward pass each, for programs that are their own optimizers."""
    if Kind.PHASE not in trace.kinds:
        return
    events = trace.events([Kind.PHASE], _COLUMNS)
    events = events.select(trace.matches(events.name, f"^{BACKWARD}$"))
    for process in distinct_ids(events.process).tolist():
        mine = events.select(events.process == process)
        no_warmup = mine.select(mine.start < 0)
        for passes in _by_thread(mine, Kind.PHASE, _PASSES, "training", no_warmup):
            turns = passes.select(np.arange(len(passes.end)) > 0)
            start, numbers = passes.end[:-1], passes.numbers[:-1]
            yield replace(turns, source="markers", start=start, numbers=numbers)


def _by_thread(
    events: Events,
    kind: Kind,
    family: str,
    marked: str,
    warmup: Events,
    names: Collection[str] = (),
) -> Iterator[Marks]:
    """Yield the ranges of a family in one process that are steps on each thread."""
    is_profiled = re.match(_PROFILER, family) is not None
    source = "profiler" if is_profiled else "markers" if kind == Kind.STEP else "nvtx"
    threads = events.thread.astype(np.int64) & 0xFFFFFFFF
    warming = union(warmup.start, warmup.end)
    for thread in distinct_ids(threads).tolist():
        ranges = events.select(threads == thread)
        mended = mend(ranges.start, ranges.end)
        if mended is None:
            continue
        rows, start, end, note = mended
        is_run = ~warming.contains(start)
        rows, start, end = rows[is_run], start[is_run], end[is_run]
        numbers = ranges.correlation[rows]
        if kind != Kind.STEP or (numbers < 0).any():
            numbers = np.arange(len(rows))
        after = f", after {format_count(len(warmup), 'range')} of warm-up" if len(warmup) else ""
        who = int(ranges.process[0]), int(ranges.thread[0])
        if len(rows) >= (_LEAST_PROFILED if is_profiled else _LEAST_STEPS):
            tokens = _tokens(names) if marked == "generation" else 0
            yield Marks(*who, family, source, start, end, numbers, marked, after, tokens, note)


def _tokens(names: Collection[str]) -> int:
    """Return the tokens of a turn whose ranges have some names: one a sequence of the batch, if
    these say how many there are.
    """
    if not all(re.search(_TOKEN, name) for name in names):
        return 0
    sizes = {found[1] for name in names if (found := re.search(_SEQUENCES, name))}
    return int(min(sizes)) if len(sizes) == 1 else 1


_SAME_RANGE_PART: Final = 0.01
"""Part of a range by which both its ends may differ from another's that is the same."""
_OVERLAPPING_PART: Final = 0.1
_MOST_OVERLAPPING: Final = 0.1
"""Part of a range that lies in the one before it, and part of the ranges of which so much may, from
which they are not steps one after another."""


def mend(start: Times, end: Times) -> tuple[NDArray[np.intp], Times, Times, str] | None:
    """Return the rows of ranges that are steps one after another, in order, their starts and ends,
    and what was wrong with them; None if they are no such steps.

    Of those that stand twice one stays, of nested ones the level that has more. One that begins
    before the end of the one before it, as after a correction of a clock, begins there.
    """
    rows = np.lexsort((-end, start))
    problems = []

    def drop(dropped: Mask, one: str, several: str) -> None:
        nonlocal rows
        rows = rows[~dropped]
        if count := int(np.count_nonzero(dropped)):
            what = f"{one} and is" if count == 1 else f"{several} and are"
            problems.append(f"{count:,} {what} left out")

    same = _SAME_RANGE_PART * (end - start)[rows][1:]
    twice = (np.diff(start[rows]) <= same) & (np.abs(np.diff(end[rows])) <= same)
    drop(np.append(False, twice), "repeats another", "repeat others")
    reach = np.maximum.accumulate(end[rows])
    inner = np.append(False, end[rows][1:] <= reach[:-1])
    outer = ~inner & np.append(inner[1:], False)
    more_inside = np.count_nonzero(inner) > np.count_nonzero(outer)
    if more_inside:
        drop(outer, "holds others", "hold others")
    else:
        drop(inner, "is within another", "are within others")
    begins, ends = start[rows], end[rows]
    over = np.maximum(ends[:-1] - begins[1:], 0)
    deep = over > _OVERLAPPING_PART * np.minimum(ends - begins, np.roll(ends - begins, 1))[1:]
    if np.count_nonzero(deep) > _MOST_OVERLAPPING * len(rows):
        return None
    if over.any():
        count, most = int(np.count_nonzero(over)), format_ns(int(over.max()))
        begins = np.append(begins[:1], np.maximum(begins[1:], np.maximum.accumulate(ends)[:-1]))
        problems.append(
            f"{count:,} began {'up to ' * (count > 1)}{most} before the previous one ended, and "
            f"count{'s' * (count == 1)} from there"
        )
    ends = np.maximum(ends, begins)
    return rows, begins, ends, "; ".join(problems)


def choose_marks(
    trace: Trace,
    gpus: Sequence[GpuOperations],
    marks: Sequence[Marks],
    calls: CudaApiCalls | None,
    ranges: rollouts.NamedRanges,
    *,
    training: bool,
) -> StepWindows | None:
    """Return the steps of a rank by the marks that hold its work: markers before NVTX ranges; of
    these, the fewest that hold nearly as much as any. None if none hold enough.

    With ``training``, by those that are named as steps of training, or follow a warm-up.
    """
    if calls is None:
        return None
    best: tuple[tuple[bool, bool, int], StepWindows] | None = None
    for mark in marks:
        if training != (mark.kind in ("training", "rl") or bool(mark.after)):
            continue
        if mark.source == "markers" and re.search(_UPDATE, mark.name):
            rolled = rollouts.rollouts_of(mark.process, ranges.rollouts)
            turns = rollouts.join_updates(rolled, mark.start, mark.end)
            if turns is None:
                mark = join_updates(mark, *_operations_of(mark, max(gpus, key=len), calls))
            else:
                first, last, start = turns
                mark = replace(mark.join(first, last, "a turn of rollouts"), kind="rl", start=start)
        if mark.kind == "training" and ranges.reinforces:
            mark = replace(mark, kind="rl")
        projected = (project(mark, gpu, calls) for gpu in gpus)
        share, windows = next((w for w in projected if w is not None), (0.0, None))
        if windows is None:
            continue
        windows = replace(windows, marked=mark.in_control_of(trace))
        if mark.source != "nvtx":
            rows = np.isin(mark.numbers, [] if windows.numbers is None else windows.numbers)
            if mark.source != "markers" or mark.kind == "rl" or rows.sum() != len(windows):
                return windows
            between = read_between(trace, mark.process, [mark.thread])
            return part_by_host(between, (mark.start[rows], mark.end[rows]), windows)
        counts = re.search(_TURN, mark.name) is not None
        key = (share >= _MOSTLY_COVERED, counts, -len(windows))
        if best is None or key > best[0]:
            best = key, windows
    return None if best is None else best[1]


_PASSES: Final = "backward passes"
_UPDATE: Final = rf"(?i)optimizer|{_PASSES}"
"""Marks of optimizers and of backward passes, of which a turn of a loop may have several."""
_MOST_UPDATES: Final = 4
_FIRST_UPDATE_RATIO: Final = 1.5
_LIKE_UPDATES_PART: Final = 0.2
"""Maximum number of updates in a turn; ratio of the operations of the first of them to those of the
others from which what comes before it is no part of an update; and part by which nine tenths of the
updates at one place of a turn may differ from their median."""


def join_updates(marks: Marks, places: NDArray[np.intp], counts: NDArray[np.intp]) -> Marks:
    """Return the turns of a loop each of which makes several updates, as in reinforcement learning;
    the marks themselves if each is a turn.

    ``counts`` are the numbers of operations of the marks at some places.
    """
    for each in range(2, _MOST_UPDATES + 1):
        turn = [counts[places % each == place] for place in range(each)]
        if min(map(len, turn)) < _LEAST_STEPS:
            break
        usual = np.array([median(of_place) for of_place in turn])
        first = int(np.argmax(usual))
        like = np.abs(counts - usual[places % each]) <= _LIKE_UPDATES_PART * usual[places % each]
        if (
            usual[first] >= _FIRST_UPDATE_RATIO * np.delete(usual, first).max()
            and like.mean() >= _MOSTLY_COVERED
        ):
            last = np.arange(first + each - 1, len(marks.start), each)
            return marks.join(last - each + 1, last, f"{each} a turn")
    return marks


def _operations_of(
    marks: Marks, operations: GpuOperations, calls: CudaApiCalls
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the marks that lie in a recorded window, and the number of operations of each."""
    issued_by = calls.issued_by(operations.events)
    issued = np.sort(calls.start[issued_by[issued_by != NOBODY]])
    counts = np.searchsorted(issued, marks.end) - np.searchsorted(issued, marks.start)
    windows = operations.coverage.windows
    places = np.flatnonzero(marks.lie_in(windows) if windows else np.ones(len(counts), np.bool_))
    return places, counts[places]


def project(
    marks: Marks, operations: GpuOperations, calls: CudaApiCalls
) -> tuple[float, StepWindows] | None:
    """Return the ranges in the GPU's time, through the operations issued inside them, and the part
    of all operations that these are.

    None where too little of the GPU's work is issued in them to be the loop; what was issued before
    passes without training, or after a warm-up, does not count.
    """
    marks = marks.within(operations.coverage.windows)
    issued_by = calls.issued_by(operations.events)
    mine = operations.events.process == marks.process
    rows = np.flatnonzero((issued_by != NOBODY) & mine)
    issued = calls.start[issued_by[rows]]
    step = np.searchsorted(marks.start, issued, "right") - 1
    inside = (step >= 0) & (issued < marks.end[np.maximum(step, 0)])
    is_all = marks.kind in ("training", "rl") and not marks.after
    share = float(np.mean(inside if is_all else inside[step >= 0])) if (step >= 0).any() else 0.0
    is_loop = marks.kind in _LOOPS or bool(marks.after)
    if share < (_LEAST_COVERED if is_loop else _MOSTLY_COVERED):
        return None
    if lead_to_graphs(operations, int(rows[inside][-1])):
        return None
    # Of a step without rows, the first is after the last.
    first = np.full(len(marks.start), np.iinfo(np.intp).max)
    last = np.full(len(marks.start), -1)
    np.minimum.at(first, step[inside], rows[inside])
    np.maximum.at(last, step[inside], rows[inside])
    full, recorded = first <= last, operations.coverage.calls
    with_calls = np.ones_like(full) if recorded is None else marks.lie_in(recorded)
    full &= with_calls
    least = _LEAST_PROFILED if marks.source == "profiler" else _LEAST_STEPS
    if np.count_nonzero(full) < max(least, 0.5 * np.count_nonzero(with_calls)):
        return None
    number, first, last = np.flatnonzero(full), first[full], last[full]
    first = _with_early_copies(operations, first, last)
    is_sampled = not with_calls.all()
    if is_sampled:
        number, first, last = fill_in(operations, number, first, last)
    is_rl = marks.kind == "rl"  # Rollouts have no size, and are no validation.
    first = first if is_rl else without_foreign(operations, first, last)
    starts, ends = window_starts(operations, first), operations.reach[last]
    parted, interludes = part_interludes(operations, first, last, starts, ends)
    ends, interludes = (np.append(starts[1:], ends[-1]), ()) if is_rl else (parted, interludes)
    if is_sampled:  # Steps may be missing between two that do not follow each other.
        follows = np.diff(number) == 1
        interludes = tuple(interlude for interlude in interludes if follows[interlude.after])
    if marks.source == "profiler" and _keeps_up(ends, marks.start[number], marks.end[number]):
        starts, ends, interludes = marks.start[number], marks.end[number], ()
    return share, StepWindows(
        rank=operations.gpu.rank,
        start=starts,
        end=ends,
        busy_from=operations.start[first],
        source=marks.source,
        kind=marks.kind if marks.kind in ("training", "rl") or not marks.after else "benchmark",
        confidence=0.9 if marks.source == "nvtx" else 1.0,
        reason=f"ranges named {marks.name!r}{marks.after}",
        interludes=interludes,
        numbers=marks.numbers[number],
        is_part=bool(marks.numbers[0]),
        tokens=marks.tokens,
        notes=_notes(marks, full | ~with_calls),
    )


def _notes(marks: Marks, held: Mask) -> tuple[str, ...]:
    """Say how marks were mended, and which of them are no steps because nothing ran in them."""
    notes = [f"ranges named {marks.name!r}: {marks.note}"] if marks.note else []
    # Before the first and after the last, nothing may have been recorded.
    ran = np.flatnonzero(held)
    if empty := int(ran[-1] - ran[0] + 1 - len(ran)):
        notes.append(f"{empty:,} ranges named {marks.name!r} issue no work to the GPU: no steps")
    return tuple(notes)


def _keeps_up(done: Times, start: Times, end: Times) -> bool:
    """Return whether the GPU is through with each step soon after the host is.

    A profiler's few steps are then the windows themselves: cut by the GPU's time, the first would
    lose its wait for data, and their sum would not be what the profiler's users know.
    """
    return bool((done - end).max() < _MOST_BEHIND * median(end - start))


def _with_early_copies(operations: GpuOperations, first: Rows, last: Rows) -> Rows:
    """Start each step with the input copies issued after the step before: they feed it."""
    copies = np.flatnonzero(operations.events.kind == Kind.COPY_H2D)
    place = np.searchsorted(copies, np.concatenate([[-1], last[:-1]]), "right")
    early: Rows = np.append(copies, len(operations))[place]
    return np.minimum(first, early)


_ALIKE_STEPS_PART: Final = 0.9
"""Part of the steps with calls that must begin alike, and hold what begins them equally often."""

Numbers = NDArray[np.intp]
Found = tuple[Numbers, Rows, Rows]


def fill_in(operations: GpuOperations, marks: Numbers, first: Rows, last: Rows) -> Found:
    """Return the marks, first and last rows of the steps that have calls and of those between.

    Of the first step of a stretch it is not known what was issued for it before its mark: it counts
    as one without calls.
    """
    known = np.diff(marks, prepend=-1) == 1
    marks, first, last = marks[known], first[known], last[known]
    if len(marks) < 2:
        return marks, first, last
    rows = _like(operations, first)
    place = np.searchsorted(rows, first)
    alike = rows[np.minimum(place, len(rows) - 1)] == first
    counts = np.diff(place)[np.diff(marks) == 1]
    each = int(median(counts)) if len(counts) else 0
    if (
        not each
        or np.mean(counts == each) < _ALIKE_STEPS_PART
        or np.mean(alike) < _ALIKE_STEPS_PART
    ):
        return marks, first, last
    parts = [(marks, first, last)]
    for before in np.flatnonzero(np.diff(marks) > 1).tolist():
        after, steps = before + 1, int(marks[before + 1] - marks[before])
        if alike[[before, after]].all() and place[after] - place[before] == each * steps:
            begins = rows[place[before] + each * np.arange(1, steps)]
            numbers = marks[before] + np.arange(1, steps)
            parts.append((numbers, begins, np.append(begins[1:], first[after]) - 1))
    marks, first, last = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(marks)
    return marks[order], first[order], last[order]


def _like(operations: GpuOperations, first: Rows) -> Rows:
    """Return the operations that are as most of some are."""
    events = operations.events
    keys = np.stack([events.name[first], events.kind[first], events.bytes[first]], axis=-1)
    distinct, counts = np.unique(keys, axis=0, return_counts=True)
    name, kind, size = distinct[np.argmax(counts)]
    return np.flatnonzero((events.name == name) & (events.kind == kind) & (events.bytes == size))
