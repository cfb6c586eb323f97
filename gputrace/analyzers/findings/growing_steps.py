"""Finding on steps that become longer over the run, and the change of their length: growth, a
jump, or two sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.findings.host_work import COLLECT_BETWEEN
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.grouping import edges_of, median, quantile, time_of
from gputrace.analyzers.host_state import FAULT_NS, Counters, read_counters, read_host_state
from gputrace.analyzers.ledger import charges_within
from gputrace.analyzers.python_samples import PythonLines, Thread
from gputrace.analyzers.step_phases import read_phases
from gputrace.model.events import Kind, Mask
from gputrace.model.host import BACKWARD, DATA, FORWARD, PHASES
from gputrace.model.intervals import EMPTY, Intervals, Times, union
from gputrace.model.results import Evidence, Finding, Step
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from gputrace.units import format_bytes, format_ns, format_pair

_KEEPS: Final = (
    "look for what the program keeps from step to step: losses that hold their graph (keep "
    "loss.item()), lists, hooks or callbacks added again, a history that is searched, a file that "
    "is read again"
)
_LONGER: Final = (
    "check whether inputs become longer, or batches larger (sort samples, cut or pack them)"
)
_ADVICE: Final = {
    FORWARD: f"{_LONGER}, or hooks are added again",
    BACKWARD: f"{_LONGER}, or a loss holds the graphs of earlier steps",
    "garbage-collection": "a collection walks all objects that are kept: look for lists and "
    f"caches that grow, losses that hold their graph; or {COLLECT_BETWEEN}",
    "data-feeding": "look for what makes later samples slower: a list that is searched, a cache "
    "that fills, longer samples, files read from farther away",
    "compute": f"{_LONGER}; if all kernels take longer, the GPU's clock, heat and other programs",
    "communication-exposed": "check what else uses the links then, and whether messages grow",
    "page-faults": "reuse large buffers, and look for what the program keeps",
    "cpu-starved": "look for what takes the cores then: more threads or workers of its own, other "
    "programs on the machine (top); give the run dedicated cores (taskset, numactl)",
}
"""Advice by the row that grew, then by the shape of the change."""
_AT_ONCE: Final = (
    "check what changed at that step: longer inputs, a larger batch, clocks and heat, "
    "another program on the machine, a cache that no longer fits"
)
_COMPARE: Final = {
    "grow": "compare an early step with a late one (--steps)",
    "jump": "compare steps before and after it (--steps)",
}
_NAMED_SHARE: Final = 0.5
"""Share of the growth that a line has if it is named."""
_FAULTS_SHARE: Final = 0.1
"""Share of the growth that more page faults take at least, to be told."""
_TOLD_SHARE: Final = 0.2
"""Part by which kernels become more, or what a process holds, to be told."""
_FEW_KERNELS: Final = 0.1
_ALIKE_SHARE: Final = 0.7
"""Part of the kernels that may grow less, and share of the mean growth that the others have, where
all kernels become longer alike."""
_HELD: Final = {
    "resident memory": ("the process's memory grows", format_bytes, 1 << 26),
    "Python blocks": ("Python's objects grow", "{:,.0f}".format, 20_000),
    "open files": ("its open files grow", "{:,.0f}".format, 20),
}
"""Things that a process may hold ever more of, and by how much they must grow to be told."""


def steps_grow(facts: Facts) -> Iterator[Finding]:
    """Forty or more steps grow by 15 % over the run, or take so much longer from one step on, three
    times as much as they scatter. Details name the row of the ledger that grew most (without a GPU,
    the phase of the host, or its collections), the line, and what the process holds ever more of.

    Cost: the time that they take longer than at the begin, or before that step, on average, less
    the part in which their GPUs idle, which is charged to what keeps them idle.

    Wrong if: steps recorded late in another run are as long as early ones.
    """
    found = {rank: drift for rank in facts.ranks if (drift := _drift_of(facts, rank)) is not None}
    if not found:
        return
    rank, drift = max(found.items(), key=lambda item: item[1].to_ns - item[1].from_ns)
    longer = min(facts.mean_ns, drift.to_ns) - drift.from_ns
    severity = severity_of(facts.share_of(longer))
    if severity is None:
        return
    # While its GPU idles, that is charged to what keeps it idle.
    own = sum(ns for name, ns in drift.grew if name not in IDLE_CAUSES)
    cost = round(longer * own / max(sum(ns for _, ns in drift.grew), 1))
    severity = severity_of(facts.share_of(cost)) or "low"
    steps, lengths = _steps(facts, rank), format_pair(drift.from_ns, "to", drift.to_ns)
    message = f"steps grow from {lengths} over {len(steps)} steps"
    if drift.shape == "jump":
        message = f"steps grow from {lengths} at step {steps[drift.since].step}"
    since = drift.since if drift.shape == "grow" else steps[drift.since].step
    row, details, known = _what_grew(facts, rank, steps, drift)
    evidence = {"from_ns": drift.from_ns, "to_ns": drift.to_ns, "since": since, **known}
    evidence |= {f"{name}_ns": ns for name, ns in drift.grew}
    otherwise = _KEEPS if drift.shape == "grow" else _AT_ONCE
    advice = f"{_ADVICE.get(row, otherwise)}; {_COMPARE[drift.shape]}"
    yield facts.finding("steps-grow", severity, cost, message, advice, evidence, details)


def longer_ns(facts: Facts, rank: int) -> int:
    """Return by how many nanoseconds the mean step of a rank is longer than its first ones."""
    drift = _drift_of(facts, rank)
    return 0 if drift is None else max(facts.mean_ns - drift.from_ns, 0)


def _drift_of(facts: Facts, rank: int) -> Drift | None:
    """Return how the steps of a rank become longer; None if they do not, or come in two sizes."""
    steps = _steps(facts, rank)
    lengths = [step.end_ns - step.start_ns for step in steps]
    drift = find_drift(lengths, time_by_part(facts, rank, steps)) if steps else None
    return drift if drift is not None and drift.shape in _COMPARE else None


def _steps(facts: Facts, rank: int) -> Sequence[Step]:
    """Return the steady steps of a rank's first GPU, with calls or without."""
    mine = [step for step in facts.timed if step.rank == rank]
    return [step for step in mine if step.gpu == mine[0].gpu]


def time_by_part(facts: Facts, rank: int, steps: Sequence[Step]) -> dict[str, Times]:
    """Return the nanoseconds of each step of a rank by class; without a GPU, by the host's phase as
    far as it is known, and what is left as ``host``.
    """
    if steps[0].gpu is not None:
        known = {name: [*map(attrgetter(f"{name}_ns"), steps)] for name in CLASSES}
        return {name: np.array(ns, np.int64) for name, ns in known.items() if None not in ns}
    starts, ends = edges_of(steps)
    waited = np.array([step.host_data_ns or 0 for step in steps], np.int64)
    phases = facts.read(read_phases).get(facts.processes.get(rank, -1))
    of = {} if phases is None else phases.of
    parts = {name: of[name].within(starts, ends) for name in of if name != DATA}
    return {"host_data": waited, **parts, "host": ends - starts - waited - sum(parts.values())}


class _Stretch(NamedTuple):
    """Early or late steps of a rank, and their time."""

    steps: Sequence[Step]
    time: Intervals

    def mean(self, of: Intervals) -> int:
        """Return the nanoseconds of a mean step that lie in some time."""
        return of.intersection(self.time).total // len(self.steps)

    def at_lines(self, lines: PythonLines, thread: Thread) -> Counter[str]:
        """Return the nanoseconds of a mean step by line, and by function, as samples met them."""
        met = lines.names[thread][lines.within(thread, self.time)]
        each, spent = self.time.total / len(self.steps) / max(len(met), 1), Counter[str]()
        for id, count in zip(
            *(x.tolist() for x in np.unique(met, return_counts=True)), strict=True
        ):
            at, _, function = lines.text[id].partition(" ")
            spent[lines.text[id]] += round(each * count)
            if function and function != "<module>":
                spent[f"{function} ({at.rpartition(':')[0]})"] += round(each * count)
        return spent


def _what_grew(
    facts: Facts, rank: int, steps: Sequence[Step], drift: Drift
) -> tuple[str, list[str], Evidence]:
    """Return the row of the ledger that grew most, or, without a GPU, the part of a step; details
    on it, and evidence.
    """
    process, shard = facts.processes.get(rank, -1), facts.per_gpu.whole
    chosen = [[steps[n] for n in np.flatnonzero(of).tolist()] for of in drift.compared]
    early, late = (_Stretch(part, time_of(part)) for part in chosen)
    edges, rows = [edges_of(part) for part in chosen], Counter(dict(drift.grew))
    counters = shard.once(read_counters).get(process)
    queued, faults = _more_load(counters, rank, (early, late), drift)
    whose = steps[0].gpu, rank
    lanes = [lane for lane in facts.working if (lane.gpu.gpu, lane.gpu.rank) == whose]
    if lanes and facts.ledger.rows:
        before, after = facts.per_gpu.each(_mean_charges, lanes, same=(edges,))[0]
        rows = Counter(compute=rows["compute"])
        rows.update(after)
        rows.subtract(before)
    elif rows:
        collections = shard.once(read_host_state).collections.get(process, EMPTY)
        collected = late.mean(collections) - early.mean(collections)
        if collected >= _NAMED_SHARE * max(rows.values()):
            rows = Counter({"garbage-collection": collected})
    if not rows:
        return "", [], {}
    ((row, ns),) = rows.most_common(1)
    row = "data-feeding" if row == "host_data" else row
    if row != "compute" and queued >= _NAMED_SHARE * ns:
        row, ns = "cpu-starved", queued
    labels = {cause.id: cause.label for cause in facts.causes}
    labels |= {**PHASES, "host": "other host time", "compute": "computing"}
    labels |= {"cpu-starved": "waiting for a core"}
    details = [f"what grew most is {labels.get(row, row)} ({format_ns(ns)})"]
    evidence: dict[str, float | int | str | None] = {"row": row, "row_ns": ns}
    lines = facts.lines
    thread = None if lines is None else lines.stand_ins.get(process)
    if row == "compute":
        details += facts.per_gpu.each(_kernels_then, lanes, same=(edges,))
    elif lines and thread and row not in ("garbage-collection", "cpu-starved"):
        grew = late.at_lines(lines, thread)
        grew.subtract(early.at_lines(lines, thread))
        # A line goes before its function, which has as much at least.
        named = (line for line in grew if grew[line] >= _NAMED_SHARE * ns)
        line = max(named, key=lambda line: ("(" not in line, grew[line]), default=None)
        if line is not None:
            details.append(f"the host is at {line} for {format_ns(grew[line])} longer")
            evidence |= {"line": line, "line_ns": grew[line]}
    if counters is not None and row != "cpu-starved":
        details += faults
        for name, (first, last) in counters.held(_HELD, time_of(steps)).items():
            clause, write, least = _HELD[name]
            if last - first >= max(least, _TOLD_SHARE * first):
                details.append(f"{clause} from {write(first)} to {write(last)}")
                evidence |= {f"{name.lower().replace(' ', '_')}_from": first}
                evidence |= {f"{name.lower().replace(' ', '_')}_to": last}
    return row, details, evidence


def _more_load(
    counters: Counters | None, rank: int, stretches: Sequence[_Stretch], drift: Drift
) -> tuple[int, Sequence[str]]:
    """Return for how many nanoseconds longer the thread is queued for a core in a late step, and
    a clause on its page faults, if more of them explain a part of the growth.
    """
    if counters is None:
        return 0, ()
    before, after = (counters.load_in(of.time, rank, len(of.steps)) for of in stretches)
    if before is None or after is None:
        return 0, ()
    lengths = drift.from_ns / before.covered_ns, drift.to_ns / after.covered_ns
    # As long as the thread works for longer, it is queued for longer.
    usual = before.queued_ns * after.on_core_ns / max(before.on_core_ns, 1)
    queued = round(after.queued_ns * lengths[1] - usual * lengths[0])
    faults = before.minor_faults * lengths[0], after.minor_faults * lengths[1]
    least = round((faults[1] - faults[0]) * FAULT_NS)
    if least < _FAULTS_SHARE * (drift.to_ns - drift.from_ns):
        return queued, ()
    pair = f"{faults[0]:,.0f} to {faults[1]:,.0f}"
    return queued, (f"page faults grow from {pair} a step, which take at least {format_ns(least)}",)


def _mean_charges(view: GpuShardView, edges: Sequence[Times]) -> list[Counter[str]]:
    """Return what a GPU is charged with in the mean one of some steps by cause, for each choice."""
    means = []
    for part in edges:
        charged: Counter[str] = Counter()
        for of_step in charges_within(view, *part):
            charged.update(of_step)
        means.append(Counter({cause: ns // part.shape[1] for cause, ns in charged.items()}))
    return means


def _kernels_then(view: GpuShardView, edges: Sequence[Times]) -> str:
    """Return what late steps have more of than early ones: kernels, or longer ones of all names, as
    with a lower clock, or of some, as with longer inputs.
    """
    events = view.operations.events
    kernels = events.select(events.kind == Kind.KERNEL)
    size = int(kernels.name.max(initial=0)) + 1
    inside = [union(*part).contains(kernels.start) for part in edges]
    counts = [np.bincount(kernels.name[rows], minlength=size) for rows in inside]
    times = [
        np.bincount(kernels.name[rows], (kernels.end - kernels.start)[rows], size)
        for rows in inside
    ]
    before, after = (count.sum() / part.shape[1] for count, part in zip(counts, edges, strict=True))
    if after > (1 + _TOLD_SHARE) * before:
        return f"a step has {after:,.0f} kernels instead of {before:,.0f}"
    same = (counts[0] > 0) & (counts[1] > 0)
    first, then = (time[same] / count[same] for time, count in zip(times, counts, strict=True))
    if not len(first) or not first.all():
        return ""
    ratios, often = then / first, counts[0][same]
    mean = float((then * often).sum() / (first * often).sum())
    if quantile(ratios, _FEW_KERNELS) >= 1 + _ALIKE_SHARE * (mean - 1):
        why = "as with a lower clock, or beside another program"
        return f"all kernels are {mean:.2g} times as long, {why}"
    longer = int(np.count_nonzero(ratios > 1 + _NAMED_SHARE * (mean - 1)))
    return f"{longer} of {len(ratios)} kernels are longer, as with longer inputs"


_FEWEST_STEPS: Final = 40
"""Minimum number of steps."""
_MOST_STRETCHES: Final = 40
_STEPS_A_STRETCH: Final = 3
"""Stretches of which the medians are looked at, at most, and steps in each, at least: a few slow
steps, and noise from step to step, are no change over the run."""
_LEAST_CHANGE: Final = 0.15
"""Minimum change, as a part of the length before it."""
_CLEAR_CHANGE_RATIO: Final = 3.0
"""Minimum ratio of a change to the usual deviation of stretches from it."""
_RISING_ERRORS: Final = 3.3
"""Minimum number of standard deviations by which more pairs of stretches rise than fall."""
_EACH_SIDE_PART: Final = 0.2
"""Part of the stretches that each side of a jump has at least: at the begin of a run, steps may be
shorter until what was prefetched is used up."""
_BEYOND_MIDDLE_PART: Final = 0.9
"""Part of either side of a jump that is beyond the middle between both."""
_EACH_SIZE_PART: Final = 0.2
"""Minimum part of the steps that each of two sizes has."""
_DEVIATION: Final = 1.4826
"""Standard deviation of normal values, as a multiple of their median deviation."""


class Drift(Struct, frozen=True, dict=True):
    """Change of the length of a rank's steps over a run.

    Attributes:
        shape: ``grow``, ``jump`` or ``two sizes``.
        from_ns: length at the begin, before the jump, or of the shorter size.
        to_ns: length at the end, after the jump, or of the longer size.
        since: position of the first step that is longer.
        grew: nanoseconds by which parts of a step are longer then, largest first.
        compared: masks of the short steps and of the long ones that are compared.
    """

    shape: str
    from_ns: int
    to_ns: int
    since: int
    grew: tuple[tuple[str, int], ...]
    compared: tuple[Mask, Mask]


def find_drift(lengths: ArrayLike, parts: Mapping[str, ArrayLike]) -> Drift | None:
    """Return how the lengths of consecutive steps change; None if they do not.

    ``parts`` are the nanoseconds of each step by what they go to. Steps that become shorter, as at
    the tail of a warm-up, are not reported.
    """
    lengths = np.asarray(lengths, np.float64)
    count = len(lengths)
    if count < _FEWEST_STEPS:
        return None
    edges = np.linspace(0, count, min(_MOST_STRETCHES, count // _STEPS_A_STRETCH) + 1).astype(int)
    blocks = np.array([median(part) for part in np.split(lengths, edges[1:-1])])
    growth, jump = _growth(blocks), _jump(blocks)
    since = 0
    if growth is not None and (jump is None or growth[0] <= jump[0]):
        shape, (_, before, after) = "grow", growth
        ends = edges[[len(edges) // 5, -len(edges) // 5]]
        shorter, longer = np.arange(count) < ends[0], np.arange(count) >= ends[1]
    elif jump is not None:
        shape, (_, before, after, block) = "jump", jump
        # Where most steps from it on are longer than the middle, and most before it shorter.
        apart = lengths[edges[block - 1] : edges[block + 1]] > (before + after) / 2
        wrong = np.append(0, np.cumsum(apart)) + np.append(np.cumsum(~apart[::-1])[::-1], 0)
        since = int(edges[block - 1] + np.argmin(wrong))
        longer = np.arange(count) >= since
        shorter = ~longer
    else:
        longer = _two_sizes(lengths)
        if not longer.any():
            return None
        shape, shorter, since = "two sizes", ~longer, int(np.argmax(longer))
        before, after = float(median(lengths[shorter])), float(median(lengths[longer]))
    more = {
        name: int(median(np.asarray(ns)[longer]) - median(np.asarray(ns)[shorter]))
        for name, ns in parts.items()
    }
    grew = sorted(((name, ns) for name, ns in more.items() if ns > 0), key=lambda row: -row[1])
    return Drift(shape, round(before), round(after), since, tuple(grew), (shorter, longer))


def _growth(blocks: NDArray[np.float64]) -> tuple[float, float, float] | None:
    """Return the mean deviation from a line, and its ends, if stretches clearly follow one upwards.

    The line is that of Theil (1950) and Sen (1968), the test that of Mann (1945) and Kendall.
    """
    count = len(blocks)
    first, second = np.triu_indices(count, 1)
    rises = blocks[second] - blocks[first]
    slope = float(median(rises / (second - first)))
    line = slope * np.arange(count)
    start = float(median(blocks - line))
    deviation = np.abs(blocks - line - start)
    surely = (
        np.sign(rises).sum() > _RISING_ERRORS * (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    )
    least = max(_LEAST_CHANGE * start, _CLEAR_CHANGE_RATIO * _DEVIATION * float(median(deviation)))
    if not surely or line[-1] < least:
        return None
    return float(deviation.mean()), start, start + float(line[-1])


def _jump(blocks: NDArray[np.float64]) -> tuple[float, float, float, int] | None:
    """Return the mean deviation from two levels, these, and the first stretch of the higher one, if
    stretches clearly have them.
    """
    edge = max(int(_EACH_SIDE_PART * len(blocks)), 2)
    best: tuple[float, float, float, int] | None = None
    for place in range(edge, len(blocks) - edge + 1):
        low, high = blocks[:place], blocks[place:]
        before, after = float(median(low)), float(median(high))
        deviations = np.abs(np.concatenate([low - before, high - after]))
        if best is None or deviations.mean() < best[0]:
            best = float(deviations.mean()), before, after, place
    if best is None:
        return None
    deviation, before, after, place = best
    middle = (before + after) / 2
    apart = min(np.mean(blocks[:place] < middle), np.mean(blocks[place:] > middle))
    least = max(_LEAST_CHANGE * before, _CLEAR_CHANGE_RATIO * deviation)
    return best if apart >= _BEYOND_MIDDLE_PART and after - before >= least else None


def _two_sizes(lengths: NDArray[np.float64]) -> Mask:
    """Return the steps of the longer of two sizes; none if there are no two that are apart, or each
    comes once only.
    """
    ordered = np.sort(lengths)
    few = int(_EACH_SIZE_PART * len(ordered))
    if not 0 < ordered[few] < ordered[-few - 1]:
        return np.zeros(len(lengths), np.bool_)
    ratios = ordered[few + 1 : len(ordered) - few] / ordered[few : len(ordered) - few - 1]
    longer: Mask = lengths > ordered[few + int(np.argmax(ratios))]
    share = float(np.mean(longer))
    in_turn = np.count_nonzero(np.diff(longer)) >= share * (1 - share) * len(lengths)
    sizes = [lengths[~longer], lengths[longer]]
    low, high = (float(median(size)) for size in sizes)
    scatter = max(_DEVIATION * float(median(np.abs(size - median(size)))) for size in sizes)
    apart = high - low >= max(_LEAST_CHANGE * low, 2 * _CLEAR_CHANGE_RATIO * scatter)
    return longer if in_turn and apart else np.zeros(len(lengths), np.bool_)
