"""Statistics of a trial: whether steps with a cure are shorter, and whether losses differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from gputrace.analyzers.compare.runs import student

ALIKE: Final = 0.02
"""Part of a step up to which a difference is none."""
LOOKS: Final = (3, 4, 6, 8, 11, 15, 21, 29)
"""Rounds after which it is decided whether that was enough. To look more often would make chance
decide more often."""
GLANCE: Final = 2
"""Rounds after which what is `MANY` times as fast has an answer, if there is no time for more."""
MANY: Final = 2
FEWEST: Final = LOOKS[0]
MOST: Final = LOOKS[-1]
_ALL: Final = sum(LOOKS)
"""Rounds of all looks, each of which may err in proportion to its own: 5 % together, by Bonferroni.
So the last rounds, dearest to get, have the most to say, and the intervals hold whichever look is
the last (repeated confidence intervals: Jennison and Turnbull, J. R. Stat. Soc. B 51, 1989)."""
_TRIMMED: Final = 0.1
"""Part of the rounds left out at each end of the ratios."""
_OUTSIDE: Final = 0.05
"""Chance with which the truth is outside of the interval of a single look."""
_NARROW: Final = 0.03
_NARROW_PART: Final = 0.15
"""Half-width at which the interval of a difference is narrow enough: of a step, of the gain."""
WORTH: Final = 1.03
"""Minimum gain for which a cure is worthwhile, as the ratio of steps without it to with it."""
CLEAR: Final = 1.3
"""Ratio of steps beyond which a difference is seen at a glance: noise that hides it from the plain
interval of a few rounds would have to be as large."""
_GLANCES: Final = 3
"""Looks, of all, at which such a difference is mostly decided, if at all."""
_CLEAR_NARROW: Final = 0.15
_SEEN: Final = 6
"""Half-width at which the interval of a clear difference is narrow enough, and rounds after which
it is as wide as it may be.
"""


class Verdict(StrEnum):
    """Answers to the question whether a cure helps."""

    FASTER = "faster"
    ALIKE = "no difference"
    SLOWER = "slower"
    OPEN = "cannot tell yet"
    NOTHING = "changes nothing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Step with a cure as a fraction of the step without, with its interval.

    It is one of 95 % after all looks at a growing number of rounds, whichever was the last.
    """

    ratio: float
    low: float
    high: float
    error: float
    """Standard error of its logarithm, by the scatter of its rounds."""
    rounds: int
    verdict: Verdict
    enough: bool
    """True if more rounds would not change the answer, and the interval is narrow."""


def compare(bare: Sequence[float], cured: Sequence[float], *, least: float = 0.0) -> Ratio | None:
    """Compare steps of the same rounds; None for fewer than `FEWEST` rounds.

    Args:
        bare: steps of the program as it is, one number a round, any unit.
        cured: steps with the cure, in the same rounds.
        least: part of a step by which both may be off in the same way in all rounds: the interval
            has to leave out as much for one to be faster.
    """
    rounds = len(cured)
    if rounds < FEWEST:
        return None
    logs = np.sort(np.log(np.asarray(cured, float) / np.asarray(bare, float)))
    cut = int(_TRIMMED * rounds)
    kept = logs[cut : rounds - cut]
    # A trimmed mean with its error by the winsorized variance, after Yuen: a round in which the
    # machine was busy with something else counts little.
    scatter = float(np.clip(logs, kept[0], kept[-1]).std(ddof=1))
    middle, error = float(kept.mean()), scatter * math.sqrt(rounds) / len(kept)
    # The interval that holds whichever look is the last, and that of a single look.
    half, plain = (error * student(looks, len(kept) - 1) for looks in (_ALL / rounds, _GLANCES))
    verdict = _verdict(middle - half, middle + half, math.log1p(least))
    width = max(_NARROW, _NARROW_PART * abs(math.expm1(middle)))
    narrow = verdict == Verdict.ALIKE or (verdict != Verdict.OPEN and half <= width)
    if not narrow and abs(middle) - plain > math.log(CLEAR):
        verdict = Verdict.FASTER if middle < 0 else Verdict.SLOWER
        half = plain
        narrow = rounds >= _SEEN or plain <= max(_CLEAR_NARROW, _NARROW_PART * abs(middle))
    low, high = math.exp(middle - half), math.exp(middle + half)
    enough = rounds >= MOST or (rounds in LOOKS and narrow)
    return Ratio(math.exp(middle), low, high, error, rounds, verdict, enough)


def glance(bare: Sequence[float], cured: Sequence[float]) -> Ratio | None:
    """Compare two runs or turns with a cure to two without; None unless one side is `MANY` times as
    fast and that is seen at a glance.

    Both sides have a scatter of their own: two pairs would say little of theirs. They are in the
    order ABBA, so that what drifts is a part of that scatter.
    """
    logs = [np.log(np.asarray(side, float)) for side in (bare, cured)]
    middle = float(logs[1].mean() - logs[0].mean())
    error = math.sqrt(sum(float(side.var(ddof=1)) / len(side) for side in logs))
    half = error * student(_GLANCES + 1, 2 * (len(cured) - 1))
    if abs(middle) < math.log(MANY) or abs(middle) - half <= math.log(CLEAR):
        return None
    verdict = Verdict.FASTER if middle < 0 else Verdict.SLOWER
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Ratio(math.exp(middle), low, high, error, len(cured), verdict, enough=False)


def compare_with_first(first: Sequence[float], cured: Sequence[float]) -> Ratio | None:
    """Compare the steps of a run with a cure to those of the first run; None unless some of these
    take `MANY` times as long as any with the cure, so often that it is seen at a glance.

    The interval is that of how often a step is as slow (Clopper and Pearson, Biometrika 26, 1934).
    The others count as the steps with the cure do, since the first run is recorded.
    """
    slow = [step for step in first if step >= MANY * max(cured)]
    if not slow:
        return None
    more = sum(slow) / len(slow) / (sum(cured) / len(cured)) - 1
    count, parts = len(first), np.linspace(0, 1, 10_001)
    chances = [
        math.comb(count, n) * parts**n * (1 - parts) ** (count - n) for n in range(count + 1)
    ]
    least = parts[sum(chances[len(slow) :]) >= _OUTSIDE / 2].min()
    most = parts[sum(chances[: len(slow) + 1]) >= _OUTSIDE / 2].max()
    low, ratio, high = (1 / (1 + float(part) * more) for part in (most, len(slow) / count, least))
    if high > 1 / CLEAR:
        return None
    return Ratio(ratio, low, high, math.log(high / low) / 4, 1, Verdict.FASTER, enough=False)


def across(starts: Sequence[Ratio], *, least: float = 0.0) -> Ratio:
    """Return the mean of the ratios of several starts, with the interval of that mean.

    What a start decides, as where memory lies and which cores are busy, is the same in all rounds
    of a run, so that their scatter does not show it. The variance between starts is what theirs is
    beyond that of their rounds (DerSimonian and Laird, Control. Clin. Trials 7, 1986); the interval
    is that of the first where there is none.

    Args:
        starts: ratios of three starts or more.
        least: see `compare`.
    """
    first, count = starts[0], len(starts)
    logs = np.log([start.ratio for start in starts])
    beyond = float(logs.var(ddof=1)) - sum(start.error**2 for start in starts) / count
    between = math.sqrt(max(beyond, 0.0) / count) * student(1, count - 1)
    middle, half = float(logs.mean()), max(between, math.log(first.high / first.low) / 2)
    low, high = middle - half, middle + half
    return replace(
        first,
        ratio=math.exp(middle),
        low=math.exp(low),
        high=math.exp(high),
        verdict=_verdict(low, high, math.log1p(least)),
    )


def _verdict(low: float, high: float, least: float) -> Verdict:
    """Return the answer of an interval of the logarithm of a ratio."""
    alike = math.log1p(ALIKE)
    if -alike <= low and high <= alike:
        return Verdict.ALIKE
    if high < -least:
        return Verdict.FASTER
    return Verdict.SLOWER if low > least else Verdict.OPEN


_MOST_LOSS: Final = 0.01
"""Part of the loss up to which a difference is none."""


def losses_differ(bare: Sequence[Sequence[float]], cured: Sequence[Sequence[float]]) -> bool | None:
    """Return whether the losses of the same steps differ beyond what runs and batches differ by.

    Each run counts by its mean loss over the second half of the steps that all have, with the error
    that the scatter from step to step gives it, or that of the runs, if larger. None where a side
    has no losses.
    """
    sides = [[run for run in side if run] for side in (bare, cured)]
    count = min((len(run) for side in sides for run in side), default=0)
    if not all(sides) or count < 2 * FEWEST:
        return None
    halves = [np.asarray([run[count // 2 : count] for run in side], float) for side in sides]
    if not all(np.isfinite(half).all() for half in halves):
        return bool(np.isfinite(halves[0]).all())
    means = [half.mean(axis=1) for half in halves]
    difference = abs(float(means[1].mean() - means[0].mean()))
    if difference <= _MOST_LOSS * abs(float(means[0].mean())):
        return False
    # Runs with the same seed have the same batches: more runs do not make their mean surer.
    batches = [float((np.diff(half) ** 2).mean()) / 2 / half.shape[1] for half in halves]
    runs = [float(side.var(ddof=1)) / len(side) if len(side) > 1 else 0.0 for side in means]
    error = math.sqrt(sum(map(max, batches, runs)))
    return difference > error * student(len(LOOKS), count // 2)


def turn_losses_differ(pairs: Sequence[tuple[float, float]]) -> bool | None:
    """Return whether losses with a cure differ from those of the same rounds beyond their scatter.

    Args:
        pairs: mean losses without the cure and with it, in each round of a run.

    None for fewer rounds than `FEWEST`, or where the program's own losses are not finite.
    """
    bare, cured = np.asarray(pairs, float).T
    if len(pairs) < FEWEST or not np.isfinite(bare).all():
        return None
    if not np.isfinite(cured).all():
        return True
    differences = cured - bare
    error = float(differences.std(ddof=1)) / math.sqrt(len(pairs))
    least = _MOST_LOSS * abs(float(bare.mean()))
    sure = error * student(len(LOOKS), len(pairs) - 1)
    return abs(float(differences.mean())) > max(least, sure)
