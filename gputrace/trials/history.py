"""History of a trial: what it was asked for, and what its runs have shown so far.

All that changes while a trial runs is here: `trial` makes the runs, `race` decides which is next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.analyzers.whatif import Pair
from gputrace.model.results import Analysis
from gputrace.studies.runner import Failed
from gputrace.trials.choice import charge
from gputrace.trials.cures import Candidate, Prediction, predict
from gputrace.trials.ledger import learn
from gputrace.trials.runs import FAILURE, WHOLE, Change, Measured, Turn, Turns, why_idle
from gputrace.trials.statements import EVERY
from gputrace.trials.statistics import (
    FEWEST,
    GLANCE,
    LOOKS,
    WORTH,
    Ratio,
    Verdict,
    across,
    compare,
    glance,
)

WARMUP: Final = 10
TURNS: Final = LOOKS[2]
"""Rounds within a run for a first answer: with fewer, intervals are wide."""
PILOT_STEPS: Final = 40
_RUN_NS: Final = (7 * 10**8, 3 * 10**9)
"""Minimum and maximum time to measure in a run; in between, as long as the program takes to start:
longer measuring costs rounds, which make the answer sure; shorter saves little."""
_RUN_PART: Final = 0.02
"""Maximum part of the budget to measure in a run: an answer takes six, each with its start."""
_STEPS: Final = (20, 200)
_FEWEST_PASSED, _FEWEST_MEASURED, _SLOW_PART = 3, 5, 0.03
"""Steps of a run to pass and to measure at least, and the part of the budget that more of either
may take in a run.
"""
_BEYOND: Final = 5
"""Steps of warm-up after those whose batches were ready before the first one."""
_TURN_NS: Final = 400_000_000
_BUFFERS: Final = 3
"""Minimum steps of a loader's turn for each batch it may have ready: fewer hide its speed."""
_TURN: Final = (5, 80)
"""Minimum and maximum steps of a turn within a run."""
_AS_FAR: Final = 1.1
"""Maximum ratio of steps without a cure to with it, if both ended at the same place: a program that
trains for a given time does not end at the same step."""
_BATCHES: Final = 0.025
"""Part of a step by which the turn of a loader may be off, since only whole batches are counted: by
simulation up to 2.3%, where the loader is a little slower than the training."""
_PART: Final = 0.5
"""Part of the time of its causes that a cure without a prediction is hoped to save."""
_TRIAL_PART: Final = 1 / 3
"""Maximum part of the budget for a cure that has shown nothing, unless it promises most: that has a
part as large as its promise next to the best of the others.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """Program, cures and limits of a trial."""

    command: tuple[str, ...]
    name: str = field(default="", kw_only=True)
    """Name of the program in the ledger; empty for its command line."""
    candidates: tuple[Candidate, ...] | None = None
    """Cures to try; None for those that a recording asks for."""
    recording: Path | None = None
    """Trace whose findings and predictions count; None to record the program."""
    budget_s: float = 600.0
    warmup: int | None = None
    steps: int | None = None
    """Steps of each run; None to choose by their length."""
    workdir: Path | None = None
    keep_trackers: bool = False
    ledger: Path | None = None
    """File to keep the answers in; None for that of the user, which need not be writable."""
    keep_recording: Path | None = None
    """File for the recording of the first run; None to remove it."""


@dataclass(slots=True, eq=False)
class Row:
    """Candidate in the race, with its rounds and its answer so far."""

    candidate: Candidate
    prediction: Prediction | None = None
    cost: float = 0.0
    """Part of a step that its causes take; 0 if unknown."""
    period: int = 1
    """Steps of which one has what it cures."""
    joins: bool = True
    """True if it may be in the best set: what changes results, only if it was asked for."""
    within: bool = field(init=False)
    """True if its cures are switched off and on within runs."""
    apart: bool = False
    """True if no others are switched in those runs, whatever its cures are."""
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
    """Time of its last run."""
    spent_s: float = 0.0
    """Its share of all its runs."""
    why: str = ""
    verdict: Verdict = Verdict.OPEN
    ratio: Ratio | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.within = self.candidate.switched

    @property
    def slow(self) -> bool:
        """True if a program takes much longer to start with it."""
        return any(setting.cure.slow for setting in self.candidate.settings)

    @property
    def ahead(self) -> set[str]:
        """Return whether its turn begins with ``batches`` or ``epochs`` made before it."""
        return {setting.cure.ahead for setting in self.candidate.settings} - {""}

    @property
    def hope(self) -> float:
        """Return the best ratio that it may have, as far as is known."""
        if self.ratio is not None:
            return self.ratio.low
        return self.so_far if self.cured else self.foretold

    @property
    def foretold(self) -> float:
        """Return the best ratio that it may have by its prediction and the cost of its causes."""
        if self.prediction is None:
            return 1 - _PART * self.cost
        return max(self.prediction.middle, 1 - self.cost) if self.cost else self.prediction.middle

    @property
    def so_far(self) -> float:
        """Return the ratio of all steps so far with the cures to those without."""
        return self.ratio.ratio if self.ratio else sum(self.cured) / sum(self.bare)

    @property
    def promises(self) -> bool:
        """Return whether steps so far gain what is worthwhile."""
        return bool(self.cured) and self.so_far < 1 / WORTH

    def rivals(self, other: Row) -> bool:
        """Return whether another row is not of the same cures with other values."""
        mine, its = ({s.cure.id for s in row.candidate.settings} for row in (self, other))
        return mine != its

    def take(self, run: Measured, turns: Sequence[Turn]) -> None:
        """Add what a run measured: steps without the cures and with them, a pair a round."""
        self.bare = [*self.bare, *(turn.bare_ns for turn in turns)]
        # By turns, what is to run in one of many steps runs in none.
        thins = any(setting.cure.edit == "every" for setting in self.candidate.settings)
        part = 1 / EVERY if run.turns and thins else 0.0
        saved = (max(turn.bare_ns - turn.cured_ns, 0.0) for turn in turns)
        cured = (turn.cured_ns + part * ns for turn, ns in zip(turns, saved, strict=True))
        self.cured = [*self.cured, *cured]
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
            self.end(Verdict.FAILED if failed else Verdict.NOTHING, why.removeprefix(FAILURE))
            return
        if len(self.cured) == GLANCE:
            self.ratio = glance(self.bare, self.cured) or self.ratio
            if self.ratio is not None:
                self.verdict = self.ratio.verdict
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
        """Drop the rounds so far, and the answer: later rounds are of another kind."""
        self.bare, self.cured, self.turn_losses = [], [], []
        self.verdict, self.ratio = Verdict.OPEN, None

    def end(self, verdict: Verdict, why: str) -> None:
        """Record an answer without a ratio, and why."""
        self.verdict, self.why, self.over, self.ratio = verdict, why, True, None


@dataclass(slots=True)
class History:
    """Runs of a trial so far, and the candidates with their rounds and answers."""

    request: Request
    rows: list[Row] = field(default_factory=list)
    """Candidates, in the order in which they entered the race."""
    pilot: Measured | None = None
    """First run, which may be recorded and measures nothing."""
    unchanged: list[Measured] = field(default_factory=list)
    """All runs without cures, measured or not."""
    bare: list[Measured] = field(default_factory=list)
    """Runs without cures in rounds of whole runs."""
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Why cures were not tried, or no longer, by name."""
    warmup: int = field(init=False)
    steps: int = field(init=False)
    """Steps to pass and to measure in each run without turns."""
    start_s: float = math.inf
    """Shortest time to the end of the first step."""
    made: int | None = None
    """Fewest steps after which the program ended by itself."""

    def __post_init__(self) -> None:
        self.warmup = self.request.warmup or WARMUP
        self.steps = self.request.steps or PILOT_STEPS

    def winners(self) -> list[Row]:
        """Return the rows that are faster and may be in the best set, the fastest first."""
        faster = [row for row in self.rows if row.verdict == Verdict.FASTER and row.joins]
        return sorted(faster, key=lambda row: row.ratio.ratio if row.ratio else 1.0)

    def trial_s(self, lot: Sequence[Row]) -> float:
        """Return the seconds that rows may share as long as none has shown anything."""
        if len(self.rows) == 1 or any(row.promises for row in lot):
            return math.inf
        seconds = 0.0
        for row in lot:
            rivals = [1 - each.foretold for each in self.rows if row.rivals(each)]
            mine = 1 - row.foretold
            most = max(rivals, default=0.0)
            part = mine / (mine + most) if mine > most else 0.0
            most_s = max(_TRIAL_PART, 1 / len(self.rows), part) * self.request.budget_s
            seconds += max(most_s - row.spent_s, 0.0)
        return seconds

    def turns(self, lot: Sequence[Row]) -> Turns:
        """Return the turns of a run in which cures are switched."""
        assert self.pilot is not None
        least, most = _TURN
        steps = min(max(round(_TURN_NS / self.pilot.step_ns), least), most)
        passed, period = 1, 1
        for row in lot:
            period = max(period, row.period)
            if row.ahead:
                # What is ready when a turn begins was made in others; and batches of several
                # workers come in bursts.
                ready = _ready(row.candidate, self.pilot.buffered)
                passed, steps = max(passed, 1 + ready), max(steps, _BUFFERS * ready)
                period = max(period, _workers(row.candidate), self.pilot.buffered)
        if self.made is not None:
            room = (self.made - self.warmup) // (TURNS * (len(lot) + 1)) - passed
            steps = min(steps, max(room, least))
        steps = math.ceil(steps / period) * period
        return Turns(tuple(row.candidate for row in lot), passed + steps, passed)

    def ends_alike(self, run: Measured) -> bool | None:
        """Return whether the program without cures ends as a run with some did; None if no run
        shows how it ends after as many steps.
        """
        if not any(each.code is not None or each.made > run.made for each in self.unchanged):
            return None
        return any(
            each.code == run.code and each.made <= _AS_FAR * run.made for each in self.unchanged
        )

    def enter(
        self,
        candidates: Sequence[Candidate],
        analysis: Analysis | None,
        known: Sequence[Pair] = (),
    ) -> None:
        """Let candidates into the race, and choose how many steps to pass and to measure, the same
        in all runs.

        ``known`` are earlier predictions of cures, from which the ranges of these are learnt.
        """
        request, pilot = self.request, self.pilot
        assert pilot is not None
        slow = int(_SLOW_PART * request.budget_s * 1e9 / max(pilot.step_ns, 1))
        if request.warmup is None:
            ready = max(_ready(each, pilot.buffered) for each in (Candidate(), *candidates))
            self.warmup = max(min(WARMUP, slow), _FEWEST_PASSED, ready + _BEYOND * (ready > 0))
        if request.steps is None:
            (least, most), (shortest, longest) = _STEPS, _RUN_NS
            most_s = min(pilot.start_s, _RUN_PART * request.budget_s)
            steps = round(min(max(1e9 * most_s, shortest), longest) / pilot.step_ns)
            self.steps = min(max(steps, min(least, slow), _FEWEST_MEASURED), most)
        may_change = request.candidates is not None
        self.rows = [Row(each, joins=may_change or not each.numerics) for each in candidates]
        if analysis is not None:
            charges = charge(analysis)
            for row in self.rows:
                row.cost, prediction = charges.of(row.candidate), predict(row.candidate, analysis)
                row.period = _period(row.candidate, analysis)
                row.prediction = prediction and learn(row.candidate, prediction, known)
        if request.steps is None:
            period = max((row.period for row in self.rows if not row.within), default=1)
            self.steps = math.ceil(self.steps / period) * period
        for row in self.rows:
            if str(row.candidate) == f"threads={pilot.threads}":
                # No run with the cure would tell.
                row.end(Verdict.NOTHING, "torch has as many already")

    def add_run(self, candidate: Candidate, run: Measured) -> None:
        """Note what any run tells of the program."""
        self.start_s = min(run.start_s, self.start_s)
        if run.code is not None:
            self.made = min(run.made, self.made or run.made)
        if not candidate.settings:
            self.unchanged.append(run)

    def add_turns(
        self, lot: Sequence[Row], run: Measured, turns: Turns, others: Sequence[Row]
    ) -> None:
        """Add the rounds of a run to its rows.

        A row that got too few before the program ended by itself starts again; one that got too few
        before the time was over keeps them.
        """
        for row, pairs in zip(lot, run.turns, strict=True):
            row.take(run, pairs)
            if not row.within:
                _have_whole_runs(row, others)
            elif run.code is not None and not row.over and len(row.cured) < FEWEST:
                row.forget()
                # A program of few steps has shorter turns, then those for one cure, or whole runs.
                if self.turns(lot).stretch >= turns.stretch:
                    row.apart, row.within = True, len(lot) > 1

    def add_failure(self, row: Row, rows: Sequence[Row], error: Failed) -> None:
        """Note that a run of turns for one row failed."""
        if row.ahead:
            # Two loaders may be too many.
            row.forget()
            _have_whole_runs(row, [row, *rows])
        else:
            row.end(Verdict.FAILED, str(error))


def _period(candidate: Candidate, analysis: Analysis) -> int:
    """Return the steps from one checkpoint to the next, for what cures these; 1 for others."""
    cured = {finding for setting in candidate.settings for finding in setting.cure.findings}
    saved = {each.step for each in analysis.phases if each.phase == "checkpoint"} - {None}
    if "checkpoint-stall" not in cured or not saved:
        return 1
    steps = sorted(step for step in saved if step is not None)
    periods = np.diff([-1, *steps])
    return min(int(np.median(periods)), _TURN[1])


def _have_whole_runs(first: Row, rows: Sequence[Row]) -> None:
    """Give whole runs to the rows that change a loader as the first does, and have no rounds."""
    for row in rows:
        row.within &= row.ahead.isdisjoint(first.ahead) or bool(row.cured)


def _ready(candidate: Candidate, buffered: int) -> int:
    """Return the most batches that a loader may have ready, with or without these cures.

    Args:
        candidate: cures.
        buffered: batches that it may have ready without.
    """
    values: Mapping[str, object] = {s.cure.id: s.value for s in candidate.settings}
    factor, workers = values.get("prefetch", 0), _workers(candidate)
    if not isinstance(factor, int):
        return buffered
    # Without other workers, those that have two batches ready each, as torch has it.
    return max(buffered, workers * (factor or 2), 0 if workers else buffered * factor // 2)


def _workers(candidate: Candidate) -> int:
    """Return the number of workers that these cures set; 0 if they set none."""
    value = next((s.value for s in candidate.settings if s.cure.id == "workers"), 0)
    return value if isinstance(value, int) else 0
