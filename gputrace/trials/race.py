"""Race of cures for a budget: which the next run is for, and when it has had its part.

Each cure gets a first answer before any gets a surer one, and the one that may bring most is the
next: by the lower bound of its ratio; before there is one, by what was foretold of it, or by what
its finding costs. Rounds beyond the first answer go to the best, and to those that could still be
better than it, as their intervals say: LUCB (Kalyanakrishnan, Tewari, Auer and Stone, "PAC subset
selection in stochastic multi-armed bandits", ICML 2012), with several at a time, as runs are
shared. The intervals hold whichever look is the last, so that a choice by them biases none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from gputrace.studies.runner import Failed
from gputrace.trials.cures import Candidate, Prediction, Value
from gputrace.trials.ledger import WORTH
from gputrace.trials.runs import FAILURE, WHOLE, Change, Measured, Turn, why_idle
from gputrace.trials.statistics import FEWEST, LOOKS, MOST, Ratio, Verdict, across, compare

TURNS: Final = LOOKS[2]
"""Rounds within a run that a first answer takes: of fewer, intervals are wide."""
_FEWEST_TURNS: Final = LOOKS[1]
"""Rounds within a run without which none is made."""
_SLOW: Final = 3
"""Starts that one with a slow cure is thought to take."""
_BATCHES: Final = 0.025
"""Part of a step by which a turn of a loader may be off, whose batches are counted as whole ones:
up to 2.3% where it is a little slower than the training, by simulation."""
_PART: Final = 0.5
"""Part of what a finding costs that one of its cures may save: few remove all of it."""


@dataclass(slots=True, eq=False)
class Row:
    """Candidate under way."""

    candidate: Candidate
    prediction: Prediction | None = None
    cost: float = 0.0
    """Part of a step that its finding costs."""
    within: bool = field(init=False)
    """True if its cures are switched off and on within runs."""
    apart: bool = field(init=False)
    """True if no others are switched in those runs."""
    bare: list[float] = field(default_factory=list)
    cured: list[float] = field(default_factory=list)
    losses: list[tuple[float, ...]] = field(default_factory=list)
    """Losses of each run with the cures."""
    turn_losses: list[tuple[float, float]] = field(default_factory=list)
    """Mean losses without the cures and with them, of the rounds of turns."""
    starts: tuple[float, ...] = ()
    """Ratios of several starts of the program; empty for an answer of one."""
    changes: tuple[Change, ...] = ()
    seconds: float = 0.0
    why: str = ""
    verdict: Verdict = Verdict.OPEN
    ratio: Ratio | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.within, self.apart = self.candidate.switched, self.candidate.alone

    @property
    def slow(self) -> bool:
        """True if a program starts much later with it."""
        return any(setting.cure.slow for setting in self.candidate.settings)

    @property
    def ahead(self) -> bool:
        """True if batches that are ready before its turn come in it."""
        return any(setting.cure.ahead for setting in self.candidate.settings)

    @property
    def hope(self) -> float:
        """Return the ratio that it has at best, as far as is known."""
        if self.ratio is not None:
            return self.ratio.low
        if self.cured:
            return sum(self.cured) / sum(self.bare)
        return self.prediction.middle if self.prediction else 1 - _PART * self.cost

    def take(self, run: Measured, turns: Sequence[Turn]) -> None:
        """Add what a run measured: steps without the cures and with them, a pair a round."""
        self.bare = [*self.bare, *(turn.bare_ns for turn in turns)]
        self.cured = [*self.cured, *(turn.cured_ns for turn in turns)]
        ids = {setting.cure.id for setting in self.candidate.settings}
        self.changes = tuple(change for change in run.changes if change.cure in ids)
        self.seconds = run.seconds
        if not run.turns:
            self.losses = [*self.losses, run.losses]
        self.turn_losses = [*self.turn_losses, *(turn.losses for turn in turns if turn.losses)]
        if any(run.reasons.get(id, "").startswith(WHOLE) for id in ids):
            self.within = False
            self.forget()
            return
        why = why_idle(self.candidate, {change.cure for change in run.changes}, run.reasons)
        if why:
            reasons = (run.reasons.get(s.cure.id, "") for s in self.candidate.settings)
            failed = any(reason.startswith(FAILURE) for reason in reasons)
            self._end(Verdict.FAILED if failed else Verdict.NOTHING, why.removeprefix(FAILURE))
            return
        # Rounds may come several at a time; to look at other numbers would be one more look.
        for number in (look for look in LOOKS if look <= len(self.cured)):
            self.ratio = compare(self.bare[:number], self.cured[:number], least=self._least)
            if self.ratio is not None:
                self.verdict, self.over = self.ratio.verdict, self.ratio.enough
            if self.over:
                return

    @property
    def _least(self) -> float:
        return _BATCHES if self.ahead and self.within else 0.0

    def repeat(self, starts: Sequence[Ratio]) -> None:
        """Have other starts of the program count as much as the one that gave the answer.

        One that has no answer, as where the program ended early, leaves it as it is.
        """
        if self.ratio is None or len(starts) < 2:
            return
        all_starts = [self.ratio, *starts]
        self.starts = tuple(start.ratio for start in all_starts)
        self.ratio = across(all_starts, least=self._least)
        self.verdict, self.over = self.ratio.verdict, True

    def forget(self) -> None:
        """Drop the rounds so far with their answer, as those to come are of another kind."""
        self.bare, self.cured, self.turn_losses = [], [], []
        self.verdict, self.ratio = Verdict.OPEN, None

    def fail(self, error: Failed) -> None:
        """Have its run's error be the answer."""
        self._end(Verdict.FAILED, str(error))

    def skip(self, why: str) -> None:
        """Have it that the cures change nothing be the answer."""
        self._end(Verdict.NOTHING, why)

    def _end(self, verdict: Verdict, why: str) -> None:
        self.verdict, self.why, self.over, self.ratio = verdict, why, True, None


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that runs take, as far as is known."""

    start: float
    """From the start of a run to the end of its warm-up, and for its end."""
    run: float
    """A run as a whole, with the steps measured in it."""
    turn: Callable[[Sequence[Row]], float]
    """A turn within a run of some rows."""

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
        return start + max(_rounds(row, turns) for row in lot) * (len(lot) + 1) * self.turn(lot)


def _rounds(row: Row, fewest: int) -> int:
    """Return how many rounds of a row its next answer takes."""
    count = len(row.cured)
    return next((look for look in LOOKS if look > count and look >= fewest), MOST) - count


def lots(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each run of turns, and those of whole runs, in the order of the race."""
    beaten = _beaten(rows)

    def place(row: Row) -> tuple[bool, bool, bool, float]:
        return row in beaten, row.ratio is not None, row.slow, row.hope

    left = sorted((row for row in rows if not row.over), key=place)
    whole = [row for row in left if not row.within]
    each = [*sharing([row for row in left if row.within]), *([whole] if whole else [])]
    return sorted(each, key=lambda lot: left.index(lot[0]))


def next_lot(rows: Sequence[Row], left_s: float, costs: Costs) -> list[Row]:
    """Return the rows that the next run, or round, is for; none where the time pays no answer.

    Of whole runs, the very first round is for all, as long as it lasts.
    """
    for lot in lots(rows):
        chosen: list[Row] = []
        for row in lot:
            if costs.answer([*chosen, row], _FEWEST_TURNS) <= left_s:
                chosen.append(row)
        screening = chosen and not any(row.cured or row.within for row in lot)
        if chosen:
            return lot if screening else chosen
    return []


def kept(rows: Sequence[Row], lot: Collection[Row], left_s: float, costs: Costs) -> float:
    """Return how much of the time left to keep for the first answers of those not in a lot."""
    seconds = 0.0
    for other in lots(rows):
        waiting = [row for row in other if row.ratio is None and row not in lot]
        # Of whole runs, the answer for one row: which it is, the first round shows.
        most = len(waiting) if waiting and waiting[0].within else min(len(waiting), 1)
        answers = (costs.answer(waiting[:count]) for count in range(most, 0, -1))
        seconds += next((answer for answer in answers if seconds + answer <= left_s), 0.0)
    return seconds


def contenders(rows: Collection[Row], others: Sequence[Row]) -> list[Row]:
    """Return the rows that go on in a run: those that could be the best of all, or else any."""
    beaten = _beaten([*rows, *others])
    going = [row for row in rows if row.within and not row.over]
    return [row for row in going if row not in beaten] or going


def _beaten(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are proven to be slower than the best, or to bring little."""
    bounds = [row.ratio.high for row in rows if row.ratio and row.verdict == Verdict.FASTER]
    return [row for row in rows if row.ratio and row.ratio.low >= min(bounds, default=1 / WORTH)]


def sharing(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each run: those that may be switched in the same, in their order."""
    runs: list[tuple[dict[str, Value], list[Row]]] = []
    for row in rows:
        values = {setting.cure.id: setting.value for setting in row.candidate.settings}
        for known, shared in runs:
            same = all(known.get(id, value) == value for id, value in values.items())
            if same and not (row.apart or shared[0].apart):
                known |= values
                shared.append(row)
                break
        else:
            runs.append((values, [row]))
    return [shared for _, shared in runs]
