"""Trials: cures applied to a program from outside, measured in turns, and kept in a ledger.

In each round everything runs once, in the order opposite to that of the round before, so that what
slows the machine by and by slows all alike. A cure is compared with the program as it is within
each round, by the logarithm of the ratio of their steps; rounds are the sample.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gputrace.errors import GputraceError, InputError, UsageError
from gputrace.model.results import Analysis
from gputrace.studies.runner import Failed
from gputrace.trials import ledger
from gputrace.trials.cures import (
    Candidate,
    Prediction,
    Value,
    combine,
    cures_for,
    predict,
    read_candidates,
)
from gputrace.trials.ledger import Entry
from gputrace.trials.patch import Patch, make_patch
from gputrace.trials.runs import (
    FAILURE,
    Change,
    Measured,
    Program,
    Spent,
    Turn,
    Turns,
    call_command,
    why_idle,
)
from gputrace.trials.statistics import (
    FEWEST,
    LOOKS,
    MOST,
    Ratio,
    Verdict,
    compare,
    losses_differ,
    turn_losses_differ,
)
from gputrace.units import parse_duration

__all__ = ["Outcome", "Request", "try_cures", "try_out"]

WARMUP: Final = 10
_PILOT_STEPS: Final = 40
_RUN_NS: Final = (7 * 10**8, 3 * 10**9)
"""Least and most time to measure in a run; between, as long as the program takes to start: to
measure longer costs rounds, which make the answer sure, to measure shorter saves little."""
_STEPS: Final = (20, 200)
_LEAST_TIMEOUT_S: Final = 600.0
_BEYOND: Final = 5
"""Steps of warm-up beyond those whose batches were ready before the first one."""
_TURN_NS: Final = 400_000_000
_TURN: Final = (5, 80)
"""Fewest and most steps of a turn within a run."""
_BEYOND_BUDGET: Final = 0.03
"""Part of the budget by which the last run may take longer than was thought."""
_AS_FAR: Final = 1.1
"""Steps of the program as it is to those with a cure, up to which both ended at the same place:
that of a program which trains for some time is not to the step."""
_ALONE: Final = 0.7
"""Part of the budget for cures by themselves; the rest is for the best together."""


Progress = Callable[[str, float, float], None]
"""Called before each run with its label, and the seconds spent and to be spent."""


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers of a trial. Times are nanoseconds, ratios those of steps with a cure to without."""

    command: tuple[str, ...]
    warmup: int
    steps: int
    """Steps measured in each run."""
    runs: int
    seconds: float
    bare_ns: float | None
    """Mean step of the program as it is."""
    findings: tuple[str, ...]
    """Ids of the recording's findings, the most important first; empty without a recording."""
    rows: tuple[Entry, ...]
    """Answer for each cure, in the order tried; the best together come last."""
    best: str | None
    """Fastest of the cures that are proven and change no results, or were asked for."""
    patch: Patch | None
    """Changes to the program to have it for good."""
    notes: tuple[str, ...]
    interrupted: bool = False


@dataclass(slots=True)
class _Row:
    """Candidate under way."""

    candidate: Candidate
    prediction: Prediction | None
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
    changes: tuple[Change, ...] = ()
    seconds: float = 0.0
    why: str = ""
    verdict: Verdict = Verdict.OPEN
    ratio: Ratio | None = None
    over: bool = False

    @property
    def late(self) -> bool:
        """True if its turn comes when the others have had theirs, as it takes long to start."""
        return not self.cured and any(setting.cure.slow for setting in self.candidate.settings)

    @property
    def so_far(self) -> float:
        """Return the steps with the cures to those without, as foretold before the first round."""
        if self.cured:
            return sum(self.cured) / sum(self.bare)
        return self.prediction.ratio if self.prediction else 1.0

    def __post_init__(self) -> None:
        self.within, self.apart = self.candidate.switched, self.candidate.alone

    def take(self, run: Measured, turns: Sequence[Turn]) -> None:
        """Add what a run measured: steps without the cures and with them, a pair a round."""
        self.bare = [*self.bare, *(turn.bare_ns for turn in turns)]
        self.cured = [*self.cured, *(turn.cured_ns for turn in turns)]
        ids = {setting.cure.id for setting in self.candidate.settings}
        self.changes = tuple(change for change in run.changes if change.cure in ids)
        self.seconds = run.seconds
        if not run.turns:
            self.losses.append(run.losses)
        self.turn_losses = [*self.turn_losses, *(turn.losses for turn in turns if turn.losses)]
        why = why_idle(self.candidate, {change.cure for change in run.changes}, run.reasons)
        if why:
            reasons = (run.reasons.get(s.cure.id, "") for s in self.candidate.settings)
            failed = any(reason.startswith(FAILURE) for reason in reasons)
            self._end(Verdict.FAILED if failed else Verdict.NOTHING, why)
            return
        # Turns come several at a time; to look at other numbers of them would be one more look.
        count = len(self.cured)
        for number in [look for look in LOOKS if look <= count] if run.turns else [count]:
            self.ratio = compare(self.bare[:number], self.cured[:number])
            if self.ratio is not None:
                self.verdict, self.over = self.ratio.verdict, self.ratio.enough
            if self.over:
                return

    def fail(self, error: Failed) -> None:
        self._end(Verdict.FAILED, str(error))

    def _end(self, verdict: Verdict, why: str) -> None:
        self.verdict, self.why, self.over, self.ratio = verdict, why, True, None


def try_cures(
    program: Sequence[str] | Callable[[], object],
    cures: str | None = None,
    *,
    budget: str = "10min",
    steps: int | None = None,
    warmup: int | None = None,
    recording: str | os.PathLike[str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> Outcome:
    """Try cures on a program, as `gputrace try` does.

    Args:
        program: words of the command line that starts it; or a function that trains, of the top
            level of a file. Each run calls it in a new process, which runs the script that it is
            in first, under another name than ``__main__``.
        cures: as the command line takes them: ``workers=8,pinned+fused``; None for those that a
            recording asks for.
        budget: time to spend.
        steps: steps of each run to measure; None to choose by their length.
        warmup: steps of each run to pass first.
        recording: trace that says what to try; None to record the program.
        workdir: folder of which each run gets a copy.
        ledger: file to keep the answers in.

    Raises UsageError for an unknown cure or a function that no other process can call, InputError
    where the program as it is cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="gputrace-try-") as folder:
        if callable(program):
            if "GPUTRACE_TRY" in os.environ:
                raise UsageError('call try_cures under `if __name__ == "__main__":` in a script')
            command = call_command(program, Path(folder))
            of = getattr(program, "func", program)
            name = f"{of.__module__}.{of.__qualname__}()"
        else:
            command, name = tuple(program), ""
        return try_out(
            Request(
                command,
                None if cures is None else tuple(read_candidates(cures)),
                None if recording is None else Path(recording),
                parse_duration(budget) / 1e9,
                warmup,
                steps,
                None if workdir is None else Path(workdir),
                ledger=None if ledger is None else Path(ledger),
                name=name,
            )
        )


def try_out(request: Request, progress: Progress = lambda *_: None) -> Outcome:
    """Try what is asked for, until all is decided or the budget is spent.

    After a KeyboardInterrupt, the outcome says what is known by then. Raises InputError where the
    program as it is cannot be measured.
    """
    return _Trial(request, progress).run()


class _Trial:
    """Runs of one program under way."""

    def __init__(self, request: Request, progress: Progress) -> None:
        self._request, self._progress = request, progress
        self._program = Program(
            request.command,
            request.workdir,
            request.keep_trackers,
            max(request.budget_s, _LEAST_TIMEOUT_S),
        )
        self._began = time.monotonic()
        self._warmup = request.warmup or WARMUP
        self._steps = request.steps or _PILOT_STEPS
        self._bare: list[Measured] = []
        self._rows: list[_Row] = []
        self._runs = 0
        self._notes: list[str] = []
        self._pilot: Measured | None = None
        self._as_it_is: list[Measured] = []
        """All runs without cures, measured or not."""

    def run(self) -> Outcome:
        """Record or run the program once, then try each cure, and the best together."""
        request, interrupted = self._request, False
        analysis: Analysis | None = None
        if request.ledger is not None:
            ledger.append(request.ledger, ())
        try:
            analysis = self._begin()
            candidates = request.candidates
            if candidates is None:
                assert analysis is not None
                candidates = self._choose(analysis)
            self._set_lengths(candidates)
            self._rows = [_Row(c, predict(c, analysis) if analysis else None) for c in candidates]
            alone = _ALONE if len(self._rows) > 1 else 1.0
            self._take_turns(self._rows, alone * request.budget_s)
            together = combine([row.candidate for row in self._winners()])
            if len(together.settings) > 1 and str(together) not in map(str, candidates):
                self._rows.append(_Row(together, None))
                self._take_turns(self._rows[-1:], request.budget_s)
            self._take_turns(self._rows, request.budget_s)
        except Spent:
            if self._pilot is None:
                self._rows = [_Row(candidate, None) for candidate in request.candidates or ()]
                for row in self._rows:
                    row.why = "the budget ended within the first run"
                self._notes.append(
                    f"the first run took longer than the budget, and was ended after "
                    f"{self._spent():.0f} s; give more, or fewer --steps"
                )
        except KeyboardInterrupt:
            interrupted = True
        return self._outcome(analysis, interrupted)

    def _begin(self) -> Analysis | None:
        """Run the program once, recorded where no trace was given, for the predictions.

        That run measures nothing: it pays for files and compilations that later ones have ready.
        """
        request, candidate = self._request, Candidate()
        if request.recording is None:
            with tempfile.TemporaryDirectory(prefix="gputrace-try-") as folder:
                # Absolute, as the program may run in a copy of its folder.
                trace = (request.keep_recording or Path(folder) / "first.sqlite").absolute()
                try:
                    self._pilot = self._go(candidate, "recording", trace)
                    return _analyze(trace)
                except GputraceError:
                    # Cures that were named need no recording.
                    if request.candidates is None or request.keep_recording is not None:
                        raise
        analysis = None if request.recording is None else _analyze(request.recording)
        if self._pilot is None:
            self._pilot = self._go(candidate, "first run")
        return analysis

    def _go(
        self,
        candidate: Candidate,
        label: str,
        record: Path | None = None,
        steps: int = 0,
        turns: Turns | None = None,
        enough: Callable[[Measured], bool] = lambda _: False,
    ) -> Measured:
        """Make a run; raises InputError where the program as it is fails, Spent for no budget."""
        left_s = (1 + _BEYOND_BUDGET) * self._request.budget_s - self._spent()
        if left_s <= 0:
            raise Spent
        self._progress(label, self._spent(), self._request.budget_s)
        self._runs += 1
        steps = steps or self._steps
        try:
            run = self._program.run(candidate, self._warmup, steps, record, turns, enough, left_s)
        except Failed as error:
            if candidate.settings:
                raise
            name = self._request.name or shlex.join(self._request.command)
            raise InputError(name, str(error)) from None
        if not candidate.settings:
            self._as_it_is.append(run)
        elif run.failure:
            self._assert_fails_anyway(run)
        return run

    def _assert_fails_anyway(self, run: Measured) -> None:
        """Raise Failed where the program as it is would not end as a run with cures has.

        Where no run shows how it ends after as many steps, one more does.
        """
        bare = self._as_it_is
        if not any(each.code is not None or each.made > run.made for each in bare):
            try:
                self._go(Candidate(), "as it is, to its end", steps=run.made + 1 - self._warmup)
            except Spent:
                unknown = "the budget ended before it was known whether it does so as it is"
                raise Failed(f"{run.failure}; {unknown}") from None
        if not any(each.code == run.code and each.made <= _AS_FAR * run.made for each in bare):
            raise Failed(run.failure)

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _choose(self, analysis: Analysis) -> tuple[Candidate, ...]:
        pilot = self._pilot
        assert pilot is not None
        there = {
            "gpu": bool(pilot.gpu),
            "ranks": pilot.ranks > 1,
            "workers": any(loader.workers for loader in analysis.loader),
        }
        better = next((loader.better for loader in analysis.loader if loader.better), None)
        return tuple(
            cures_for(
                [finding.id for finding in analysis.findings],
                pilot.versions,
                [word for word, is_so in there.items() if is_so],
                os.cpu_count() or 1,
                better.workers if better else None,
            )
        )

    def _set_lengths(self, candidates: Sequence[Candidate]) -> None:
        """Choose how many steps to pass and to measure, the same in all runs."""
        assert self._pilot is not None
        if self._request.warmup is None:
            ready = max([self._pilot.buffered, *map(_buffered, candidates)])
            self._warmup = max(WARMUP, ready + _BEYOND)
        if self._request.steps is None:
            (least, most), (shortest, longest), step_ns = _STEPS, _RUN_NS, self._pilot.step_ns
            start_ns = 1e9 * self._pilot.seconds - self._pilot.steps * step_ns
            steps = round(min(max(start_ns, shortest), longest) / step_ns)
            self._steps = min(max(steps, least), most)

    def _take_turns(self, rows: Sequence[_Row], until_s: float) -> None:
        """Run rounds of what is not decided, until the budget is spent.

        A round is the program as it is and with each cure; or a run within which cures are off and
        on by turns. The very first one begins with the cures that are foretold to bring most, and
        has as many as the budget can pay an answer for; those that were faster so far have theirs
        first.
        """
        while active := self._affordable([row for row in rows if not row.over], until_s):
            begun = any(row.cured for row in self._rows)
            try:
                whole = [row for row in active if not row.within]
                if whole and not active[0].within:
                    self._round([None, *whole], len(self._bare))
                for rows_of_run in _sharing([row for row in active if row.within]):
                    self._switch(rows_of_run, until_s)
                if whole and active[0].within:
                    self._round([None, *whole], len(self._bare))
            except InputError as error:
                if not begun:
                    raise
                # It ran before: what is known by then is the answer.
                self._notes.append(f"no more rounds were made: {error}")
                return

    def _affordable(self, rows: Sequence[_Row], until_s: float) -> list[_Row]:
        """Return the rows that the next round is for, in their order."""
        assert self._pilot is not None
        begun = any(row.cured for row in self._rows)
        last = (self._bare or [self._pilot])[-1].seconds
        left, chosen, bare_s = until_s - self._spent(), list[_Row](), 0.0
        first = [row for row in rows if not row.late and not row.within]
        if first and not begun and left >= 2 * FEWEST * last:
            return sorted(first, key=lambda row: row.so_far)
        for row in sorted(rows, key=lambda row: (row.late, row.so_far)):
            if row.late and any(len(each.cured) < FEWEST for each in chosen):
                break
            rounds = 1 if row.within else max(FEWEST - len(row.cured), 1)
            # One run of the program as it is serves all cures of a round.
            more_s = 0.0 if row.within else max(rounds * last - bare_s, 0.0)
            needed = rounds * (row.seconds or last) + more_s
            if row.within and not row.apart and any(e.within and not e.apart for e in chosen):
                needed = FEWEST * self._turn * self._pilot.step_ns / 1e9
            if needed <= left or not (begun or chosen):
                chosen.append(row)
                left, bare_s = left - needed, bare_s + more_s
        return chosen

    @property
    def _turn(self) -> int:
        """Return the steps of a turn within a run."""
        assert self._pilot is not None
        least, most = _TURN
        return 1 + min(max(round(_TURN_NS / self._pilot.step_ns), least), most)

    def _switch(self, rows: Sequence[_Row], until_s: float) -> None:
        """Make a run in which cures are off and on by turns, until all are decided.

        What differs from run to run, and what changes slowly, is the same for all then.
        """
        assert self._pilot is not None
        turns = Turns(tuple(row.candidate for row in rows), self._turn)
        steps = MOST * (len(rows) + 1) * turns.stretch
        settings = dict.fromkeys(setting for row in rows for setting in row.candidate.settings)
        label = f"{', '.join(str(row.candidate) for row in rows)} by turns"

        def enough(run: Measured) -> bool:
            return self._spent() >= until_s or all(_over(rows, run))

        try:
            run = self._go(Candidate(tuple(settings)), label, None, steps, turns, enough)
        except Failed as error:
            self._switch_apart(rows, until_s, error)
            return
        for row, pairs in zip(rows, run.turns, strict=True):
            row.take(run, pairs)
            if row.over or len(row.cured) >= FEWEST:
                continue
            row.bare, row.cured, row.turn_losses = [], [], []
            # A program of few steps has them for one cure, or is run as a whole.
            row.apart, row.within = True, len(rows) > 1

    def _switch_apart(self, rows: Sequence[_Row], until_s: float, error: Failed) -> None:
        """Have runs of their own show which cure it is with which the program fails."""
        if len(rows) == 1:
            rows[0].fail(error)
            return
        for row in rows:
            row.apart = True
            self._switch([row], until_s)

    def _round(self, turns: Sequence[_Row | None], number: int) -> None:
        bare: Measured | None = None
        cured: list[tuple[_Row, Measured]] = []
        for index in order(range(len(turns)), number):
            row = turns[index]
            if row is None:
                bare = self._go(Candidate(), "as it is")
                self._bare.append(bare)
                continue
            if bare is not None and cured and not row.cured:
                # To begin with all would leave too little to answer for any.
                answer_s = (2 * FEWEST - 1) * bare.seconds
                if self._spent() + answer_s > self._request.budget_s:
                    continue
            try:
                cured.append((row, self._go(row.candidate, str(row.candidate))))
            except Failed as error:
                row.fail(error)
        assert bare is not None
        for row, run in cured:
            row.take(run, [Turn(bare.step_ns, run.step_ns)])

    def _winners(self) -> list[_Row]:
        """Return the rows that are faster and may be in the best set, the fastest first."""
        faster = [
            row
            for row in self._rows
            if row.verdict == Verdict.FASTER
            and (self._request.candidates is not None or not row.candidate.numerics)
        ]
        return sorted(faster, key=lambda row: row.ratio.ratio if row.ratio else 1.0)

    def _outcome(self, analysis: Analysis | None, interrupted: bool) -> Outcome:
        request, winners = self._request, self._winners()
        entries, patch = [self._entry(row) for row in self._rows], None
        notes = list(dict.fromkeys(self._notes))
        if winners:
            main = next(run.main for run in (*self._bare, self._pilot) if run)
            best = winners[0]
            words = () if request.name else request.command
            patch = make_patch(best.candidate, best.changes, main, words)
        has_begun = self._pilot is not None and not interrupted
        if not self._rows and has_begun:
            notes.append("the verdict names nothing that can be tried; `gputrace try --list` does")
        left = [row for row in self._rows if row.verdict == Verdict.OPEN and not row.over]
        if left and has_begun and not self._notes:
            notes.append(self._what_was_left(left))
        failed = next((run for run in self._as_it_is if run.failure), None)
        if failed is not None:
            notes.append(
                f"the program ends with {failed.failure} after {failed.made} steps as it is, too: "
                "steps before that count"
            )
        if any(not run.ended for run in self._as_it_is):
            notes.append("the program went on after its last step, and was ended by a signal")
        try:
            ledger.append(request.ledger or ledger.default_ledger(), entries)
        except InputError as error:
            notes.append(f"not kept: {error}")
        bare = [run.step_ns for run in self._bare]
        bare = bare or [step for row in self._rows for step in row.bare]
        return Outcome(
            command=(request.name,) if request.name else request.command,
            warmup=self._warmup,
            steps=self._bare[-1].steps if self._bare else self._steps,
            runs=self._runs,
            seconds=self._spent(),
            bare_ns=sum(bare) / len(bare) if bare else None,
            findings=tuple(finding.id for finding in analysis.findings) if analysis else (),
            rows=tuple(entries),
            best=str(winners[0].candidate) if winners else None,
            patch=patch,
            notes=tuple(notes),
            interrupted=interrupted,
        )

    def _what_was_left(self, rows: Sequence[_Row]) -> str:
        """Say what it would take to go on, to the next look at the rounds."""
        last = self._bare[-1] if self._bare else self._pilot
        run_s = last.seconds if last else 0.0
        runs = _sharing([row for row in rows if row.within])
        within_s = sum(max(row.seconds or run_s for row in run) for run in runs)
        whole = [row for row in rows if not row.within]
        each, more, what = within_s, 1, "run of turns"
        if whole:
            each, what = run_s + sum(row.seconds or run_s for row in whole), "round"
            rounds = min(len(row.cured) for row in whole)
            more = next((look for look in LOOKS if look > rounds), MOST) - rounds
        more_s = each * more + (within_s if whole else 0.0)
        minutes = math.ceil((self._spent() + more_s) / 60 / (1 if len(rows) == 1 else _ALONE))
        names = ", ".join(str(row.candidate) for row in rows)
        return (
            f"the budget ended before all was decided ({names}): a {what} takes {each:.0f} s; "
            f"--budget {minutes}min would give {more} more"
        )

    def _entry(self, row: _Row) -> Entry:
        from gputrace.collectors.masking import masked

        run = self._bare[-1] if self._bare else self._pilot
        ratio, prediction = row.ratio, row.prediction
        bare = [each.losses for each in self._bare]
        return Entry(
            time_ns=time.time_ns(),
            program=self._request.name or shlex.join(masked(self._request.command)),
            host=socket.gethostname(),
            gpu=run.gpu if run else "",
            ranks=run.ranks if run else 0,
            versions=", ".join(f"{k} {v}" for k, v in run.versions.items()) if run else "",
            cure=str(row.candidate),
            verdict=str(row.verdict),
            why=row.why or ("" if row.ratio else f"fewer than {FEWEST} rounds in the budget"),
            ratio=ratio.ratio if ratio else None,
            low=ratio.low if ratio else None,
            high=ratio.high if ratio else None,
            rounds=len(row.cured),
            steps=run.steps if run else 0,
            bare_ns=sum(row.bare) / len(row.bare) if row.bare else None,
            predicted=prediction.ratio if prediction else None,
            predicted_low=prediction.low if prediction else None,
            predicted_high=prediction.high if prediction else None,
            numerics=row.candidate.numerics,
            loss_differs=(
                turn_losses_differ(row.turn_losses)
                if row.turn_losses
                else losses_differ(bare, row.losses)
            ),
        )


def _over(rows: Sequence[_Row], run: Measured) -> Iterator[bool]:
    """Yield for each row whether it would be decided by the turns of a run."""
    for row, pairs in zip(rows, run.turns, strict=True):
        later = copy(row)
        later.take(run, pairs)
        yield later.over


def _sharing(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Return the rows of each run: those that may be switched in the same, in their order."""
    runs: list[tuple[dict[str, Value], list[_Row]]] = []
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


def _buffered(candidate: Candidate) -> int:
    """Return how many batches a loader with these cures may have ready before the first step."""
    values: Mapping[str, object] = {s.cure.id: s.value for s in candidate.settings}
    workers, factor = values.get("workers", 0), values.get("prefetch", 2)
    return int(workers) * int(factor) if isinstance(workers, int) and isinstance(factor, int) else 0


def _analyze(trace: Path) -> Analysis:
    from gputrace.api import open as open_trace

    if not trace.exists():
        raise UsageError(f"{trace}: the recording left no trace")
    with open_trace(trace) as opened:
        return opened.analyze()


def order(names: Sequence[int], round_number: int) -> list[int]:
    """Return the order of a round: forwards and backwards in turn."""
    return list(names) if round_number % 2 == 0 else list(reversed(names))
