"""Race of cures for a budget: which one the next run is for, and when it is decided.

Each cure gets a first answer before any gets a surer one, and the one that may bring most is the
next: by the lower bound of its ratio; before there is one, by what its causes take of a step, as
far as its prediction says that they go. What gains nothing worthwhile is over, as is all that
cannot beat a clear winner. Rounds beyond the first answer go to the best, and to those that could
still be better than it, as their intervals say: LUCB (Kalyanakrishnan, Tewari, Auer and Stone, "PAC
subset selection in stochastic multi-armed bandits", ICML 2012), with several at a time, as runs are
shared. The intervals hold whichever look is the last, so that a choice by them biases none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, TypeVar

from gputrace.trials.cures import Value, combine
from gputrace.trials.history import TURNS, History, Row
from gputrace.trials.runs import Measured
from gputrace.trials.statistics import CLEAR, FEWEST, GLANCE, LOOKS, MANY, MOST, WORTH, Verdict

T = TypeVar("T")

_FEWEST_TURNS: Final = LOOKS[1]
"""Minimum rounds for which a run is worth its start, of what promises little."""
_SLOW: Final = 3
"""Assumed length of the start with a slow cure, in starts without."""
_WORTH_A_RUN: Final = 1 / 4
"""Part of what a clear winner saves that another cure has to promise for a run of its own."""
_VARIES: Final = 1.25
"""Ratio of the predicted length of a run to the shortest, as starts vary."""
_TOGETHER: Final = 0.3
"""Maximum part of the budget that is kept for the best cures together."""


def next_run(history: History, rows: Sequence[Row], left_s: float) -> list[Row]:
    """Return which rows have the next run of turns, or round of whole runs, in the seconds left;
    none if that is too short for an answer.

    A round is a run without cures and one with each of its rows.
    """
    costs = costs_of(history)
    lot = next_lot(rows, left_s, costs, history.trial_s)
    row = _foremost(rows)
    if row is not None and row not in lot and costs.run <= _VARIES * left_s:
        return [row]
    many = [row for row in rows if _is_many(row)]
    if not any(row in lot for row in many):
        lot = next_lot(many, _VARIES * left_s, costs, history.trial_s) or lot
    if not lot and not any(row.over or row.ratio for row in history.rows):
        # A run that may be cut off is better than no answer at all.
        lot = next_lot(rows, _VARIES * left_s, costs, history.trial_s)[:1]
    if not lot and not any(row.cured for row in history.rows):
        # What a run takes is a guess as yet.
        lot = [row for first in lots(rows)[:1] for row in first[:1]]
    return lot


def _foremost(rows: Sequence[Row]) -> Row | None:
    """Return the row of whole runs that promises most, if one or two may decide it, and far more
    than any by turns.

    What these take is a guess, too high by what the first run alone compiles, say; but no other row
    is worth the time.
    """
    first = next((lot[0] for lot in lots(rows)), None)
    others = [1 - row.hope for row in rows if row is not first and row.within and not row.over]
    if first is None or first.within or first.cured:
        return None
    if min(first.hope, 1 - first.cost) > 1 / MANY:
        return None
    least = _WORTH_A_RUN * (1 - first.hope)
    return first if max(others, default=0.0) < least else None


def has_one_run(history: History, row: Row, left_s: float) -> bool:
    """Return whether a row of whole runs has a single one, compared with the first run of all.

    The causes of such a row take most of a step, and the time left is too short for the rounds that
    tell what is `MANY` times as fast: the program compiles at its start, say.
    """
    if row.within or row.cured or row.cost < 1 - 1 / MANY:
        return False
    return GLANCE * costs_of(history).glance(row) > left_s


def after(lot: Sequence[Row], run: Measured) -> list[Row]:
    """Return copies of the rows of a run with what it measured so far."""
    later = [copy(row) for row in lot]
    for row, pairs in zip(later, run.turns, strict=True):
        row.take(run, pairs)
    return later


def next_turns(
    later: Sequence[Row],
    others: Sequence[Row],
    left_s: float,
    kept_s: float,
    trial_s: float,
    costs: Costs,
) -> list[int]:
    """Return which rows of a run have further turns in it, by their numbers from 1; none to end it.

    Decided cures get no more turns, nor do those that cannot be the best while others can, but for
    a first answer of what gains something; the run
    ends when the time left is needed for the first answers of others, or, if nothing in it gains
    anything so far, when others wait for theirs or its part of the budget is over.

    Args:
        later: rows of the run, with what it measured so far.
        others: rows that have no turns in it.
        left_s: seconds left for all rows.
        kept_s: seconds of them to keep for others.
        trial_s: seconds left for rows that have shown nothing.
        costs: durations of runs.
    """
    further = contenders(later, others)
    if not further:
        # What gains something may add to a clear winner, and has begun.
        wanting = [row for row in later if row.within and row.verdict == Verdict.OPEN]
        further = [row for row in wanting if row.promises and len(row.cured) < TURNS]
    turn_s = _turns(further) * costs.turn(later)
    answered = all(row.over or len(row.cured) >= TURNS for row in later)
    if left_s <= turn_s or (answered and left_s - turn_s <= kept_s):
        return []
    # What shows nothing makes room for first answers of others.
    promising = any(row.promises for row in further)
    if not promising and (trial_s <= turn_s or (answered and kept_s > 0)):
        return []
    return [1 + later.index(row) for row in further]


def kept_for_best(history: History, left_s: float) -> float:
    """Return the seconds kept for an answer on the best cures together; 0 if time is too short.

    First answers for all cures that start as fast come first.
    """
    costs = costs_of(history)
    fast = [row for row in history.rows if not row.slow]
    left_s -= kept(fast, math.inf, costs)
    allowed = [row.candidate for row in history.rows if row.joins]
    for some in ([each for each in allowed if each.switched], allowed):
        together = combine(some)
        answer_s = costs.answer([Row(together)])
        most_s = min(_TOGETHER * history.request.budget_s, left_s)
        if len(together.settings) > 1 and answer_s <= most_s:
            return answer_s
    return 0.0


def order(names: Sequence[T], round_number: int) -> list[T]:
    """Return the order of a round: every second one is reversed."""
    return list(names) if round_number % 2 == 0 else list(reversed(names))


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of runs in seconds, as far as is known."""

    start: float
    """Start and warm-up of a run, and its end."""
    run: float
    """A run as a whole, with the steps measured in it."""
    turn: Callable[[Sequence[Row]], float]
    """A turn of the program as it is, within a run of some rows."""

    def answer(self, lot: Sequence[Row], turns: int = TURNS) -> float:
        """Return the seconds to the next answer for rows that share a run, or rounds.

        Args:
            lot: rows, all of which have turns within a run, or runs as a whole.
            turns: rounds of turns at least.
        """
        if not lot[0].within:
            rounds = [_rounds(row, FEWEST) for row in lot]
            runs = sum(n * (row.seconds or self.run) for n, row in zip(rounds, lot, strict=True))
            # One run of the program as it is serves all cures of a round.
            return max(rounds) * self.run + runs
        start = self.start * (_SLOW if any(row.slow for row in lot) else 1)
        return start + max(_rounds(row, turns) for row in lot) * _turns(lot) * self.turn(lot)

    def glance(self, row: Row) -> float:
        """Return the seconds to the first sign of what a row gains that has runs of its own."""
        starts = _SLOW if row.slow else 1
        if not row.within:
            return (1 + starts) * self.run
        return starts * self.start + _turns([row]) * self.turn([row])


def costs_of(history: History) -> Costs:
    """Return the durations of runs, by the last one."""
    assert history.pilot is not None
    step_s = history.pilot.step_ns / 1e9
    measured_s = history.steps * step_s
    run_s = (
        history.bare[-1].seconds
        if history.bare
        else history.pilot.start_s + history.warmup * step_s + measured_s
    )
    return Costs(run_s - measured_s, run_s, lambda lot: history.turns(lot).stretch * step_s)


def _is_many(row: Row) -> bool:
    """Return whether one more round of whole runs may show that a row is many times as fast."""
    begun = len(row.cured) == GLANCE - 1 and not (row.within or row.over)
    return begun and row.so_far <= 1 / MANY


def _turns(rows: Sequence[Row]) -> float:
    """Return how many turns of the program as it is are as long as a round of some rows."""
    return 1 + sum(min(row.hope, 1.0) for row in rows)


def _rounds(row: Row, fewest: int) -> int:
    """Return how many more rounds a row needs for its next answer."""
    count = len(row.cured)
    if _is_many(row) or (row.within and count < GLANCE == fewest):
        return GLANCE - count
    return next((look for look in LOOKS if look > count and look >= fewest), MOST) - count


def lots(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each run of turns, and those of whole runs, in the order of the race."""
    beaten, done = _beaten(rows), settled(rows)

    def place(row: Row) -> tuple[bool, bool, bool, float, float]:
        return row in beaten, row.ratio is not None, row.slow, row.hope, _predicted(row)

    left = sorted((row for row in rows if not row.over and row not in done), key=place)
    whole = [row for row in left if not row.within]
    each = [*sharing([row for row in left if row.within]), *([whole] if whole else [])]
    return sorted(each, key=lambda lot: left.index(lot[0]))


def next_lot(
    rows: Sequence[Row],
    left_s: float,
    costs: Costs,
    trial_s: Callable[[Sequence[Row]], float] = lambda _: math.inf,
) -> list[Row]:
    """Return the rows of the next run, or round; none if the time left is too short for an answer.

    The first round of whole runs is for all rows, however long it takes. Those that take more than
    ``trial_s`` to the first sign of what they gain have none.
    """
    for lot in lots(rows):
        is_shared = lot[0].within and len(lot) > 1
        able = [row for row in lot if is_shared or costs.glance(row) <= trial_s([row])]
        chosen: list[Row] = []
        for row in able:
            # What is as much faster as it promises is seen at a glance.
            few = GLANCE if row.hope <= 1 / MANY else FEWEST
            turns = few if row.hope <= 1 / CLEAR else _FEWEST_TURNS
            if costs.answer([*chosen, row], turns) <= left_s:
                chosen.append(row)
        screening = not any(row.cured or row.within for row in lot)
        if chosen:
            return able if screening else chosen
    return []


def why_not_tried(history: History, row: Row) -> str:
    """Return why a row had no run; empty if only because the time was over."""
    costs = costs_of(history)
    winner = _clear_winner(history.rows)
    if winner and row in settled(history.rows):
        return f"little to gain next to {winner.candidate}"
    start_s = costs.glance(row)
    if start_s > history.trial_s([row]):
        return f"a first sign takes {start_s:.0f} s; try --budget {math.ceil(start_s / 20)}min"
    return ""


def kept(rows: Sequence[Row], left_s: float, costs: Costs) -> float:
    """Return how much of the time left to keep for the first answers of rows."""
    seconds = 0.0
    for other in lots(rows):
        waiting = [row for row in other if row.ratio is None]
        # Of whole runs, one answer: the first round shows for which row.
        most = len(waiting) if waiting and waiting[0].within else min(len(waiting), 1)
        answers = (costs.answer(waiting[:count]) for count in range(most, 0, -1))
        seconds += next((answer for answer in answers if seconds + answer <= left_s), 0.0)
    return seconds


def contenders(rows: Collection[Row], others: Sequence[Row]) -> list[Row]:
    """Return the rows that go on in a run: those that could be the best of all, else all."""
    every = [*rows, *others]
    beaten, done = _beaten(every), settled(every)
    going = [row for row in rows if row.within and not row.over and row not in done]
    return [row for row in going if row not in beaten] or going


def _beaten(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are proven to be slower than the best, or to gain little."""
    bounds = [_high(row) for row in rows if row.verdict == Verdict.FASTER]
    return [row for row in rows if row.ratio and row.ratio.low >= min(bounds, default=1 / WORTH)]


def settled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are not tried further: those proven to gain nothing worthwhile, and,
    where another is a clear winner, those that cannot be better, and of those without a run what
    it excludes and what promises far less.
    """
    winner = _clear_winner(rows)
    if winner is None:
        return [row for row in rows if row.ratio and row.ratio.low >= 1 / WORTH]
    best = _high(winner)

    def is_done(row: Row) -> bool:
        if row.ratio or row.cured or not row.cost:
            return row.ratio is not None and row.ratio.low >= best
        both = combine([winner.candidate, row.candidate]).settings
        is_other = len(both) < len(winner.candidate.settings) + len(row.candidate.settings)
        if is_other:
            return best < _predicted(row)
        return 1 - row.hope < _WORTH_A_RUN * (1 - best)

    return [row for row in rows if is_done(row)]


def _clear_winner(rows: Sequence[Row]) -> Row | None:
    """Return the best row that may be in the best set, if that is seen at a glance."""
    faster = [row for row in rows if row.verdict == Verdict.FASTER and row.joins]
    best = min(faster, key=_high, default=None)
    return best if best and _high(best) <= 1 / CLEAR else None


def _predicted(row: Row) -> float:
    return row.prediction.middle if row.prediction else row.hope


def _high(row: Row) -> float:
    return row.ratio.high if row.ratio else 1.0


def sharing(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each run: those that can be switched in one run, in their order."""
    runs: list[tuple[dict[str, Value], list[Row]]] = []
    for row in rows:
        values = {setting.cure.id: setting.value for setting in row.candidate.settings}
        for known, shared in runs:
            same = all(known.get(id, value) == value for id, value in values.items())
            both = all(row.candidate.shares_run(each.candidate) for each in shared)
            if same and both and not (row.apart or shared[0].apart):
                known |= values
                shared.append(row)
                break
        else:
            runs.append((values, [row]))
    return [shared for _, shared in runs]
