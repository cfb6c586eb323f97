"""Finding on steps that become longer over the run, and the change of their length: growth, a
jump, or two sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.grouping import median
from gputrace.model.events import Mask
from gputrace.model.results import Finding, Step
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES, IDLE_CAUSES, TIME_CLASSES
from gputrace.units import format_ns, format_pair

_DRIFT_ADVICE: Final = {
    "grow": "look for what the program keeps from step to step: losses that hold their graph "
    "(keep loss.item()), lists, hooks or callbacks added again, a history that is searched; "
    "compare an early step with a late one (--steps)",
    "jump": "check what changed at that step: longer inputs, a larger batch, clocks and heat, "
    "another program on the machine, a cache that no longer fits; compare steps before and after "
    "it (--steps)",
}
_ACTIVITIES: Final = {
    **{row.id: row.activity for row in TIME_CLASSES},
    "host_data": "waiting for data",
    "host": "other host time",
}


def steps_grow(facts: Facts) -> Iterator[Finding]:
    """Forty or more steps grow by 15 % over the run, or take so much longer from one step on, three
    times as much as they scatter. A detail names the class that grew most.

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
    count, lengths = len(_steps(facts, rank)), format_pair(drift.from_ns, "to", drift.to_ns)
    message = f"steps grow from {lengths} over {count} steps"
    if drift.shape == "jump":
        message = f"steps grow from {lengths} at step {drift.since}"
    details = [
        f"what grew most is {_ACTIVITIES[name]} ({format_ns(longer)})"
        for name, longer in drift.grew[:1]
    ]
    evidence = {"from_ns": drift.from_ns, "to_ns": drift.to_ns, "since": drift.since}
    evidence |= {f"{name}_ns": ns for name, ns in drift.grew}
    advice = _DRIFT_ADVICE[drift.shape]
    yield facts.finding("steps-grow", severity, cost, message, advice, evidence, details)


def longer_ns(facts: Facts, rank: int) -> int:
    """Return by how many nanoseconds the mean step of a rank is longer than its first ones."""
    drift = _drift_of(facts, rank)
    return 0 if drift is None else max(facts.mean_ns - drift.from_ns, 0)


def _drift_of(facts: Facts, rank: int) -> Drift | None:
    """Return how the steps of a rank become longer; None if they do not, or come in two sizes."""
    steps = _steps(facts, rank)
    parts = {name: [getattr(step, f"{name}_ns") for step in steps] for name in CLASSES}
    lengths = [step.end_ns - step.start_ns for step in steps]
    waits = [step.host_data_ns or 0 for step in steps]
    if steps and steps[0].gpu is None:
        host = [length - wait for length, wait in zip(lengths, waits, strict=True)]
        parts = {"host_data": waits, "host": host}
    drift = find_drift(lengths, {name: ns for name, ns in parts.items() if None not in ns})
    if drift is None or drift.shape not in _DRIFT_ADVICE:
        return None
    return drift if drift.shape == "grow" else replace(drift, since=steps[drift.since].step)


def _steps(facts: Facts, rank: int) -> Sequence[Step]:
    """Return the steady steps of a rank's first GPU, with calls or without."""
    mine = [step for step in facts.timed if step.rank == rank]
    return [step for step in mine if step.gpu == mine[0].gpu]


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
    """

    shape: str
    from_ns: int
    to_ns: int
    since: int
    grew: tuple[tuple[str, int], ...]


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
    return Drift(shape, round(before), round(after), since, tuple(grew))


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
