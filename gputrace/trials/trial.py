"""Trials: cures applied to a program from outside, measured in turns, and kept in a ledger.

In each round everything runs once, in the reverse order of the round before, so that a gradual
slowdown of the machine affects all alike. A cure is compared with the program as it is within each
round, by the logarithm of the ratio of their steps; rounds are the sample.
"""

from __future__ import annotations

import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from gputrace.analyzers.whatif import Pair
from gputrace.errors import GputraceError, InputError, UsageError
from gputrace.model.results import Analysis
from gputrace.studies.runner import Failed
from gputrace.trials import ledger, race
from gputrace.trials.choice import choose
from gputrace.trials.cures import Candidate, combine, read_candidates
from gputrace.trials.history import PILOT_STEPS, TURNS, History, Request, Row
from gputrace.trials.outcome import Outcome, conclude
from gputrace.trials.runs import Measured, Program, Spent, Turn, Turns, call_command
from gputrace.trials.statistics import FEWEST, MOST, Verdict, compare_with_first
from gputrace.units import parse_duration

_LEAST_TIMEOUT_S: Final = 600.0
_BEYOND_BUDGET: Final = 0.03
"""Part of the budget by which the last run may exceed it."""
_PILOT_PART: Final = 0.25
"""Part of the budget after which the first run ends with few steps."""
_ONE_RUN_PART: Final = 0.95
"""Part of the time left after which a run that is the only one of its cure ends with few steps."""
_STARTS: Final = 3
"""Starts of the program in which the best is measured, if there is time for all of them."""


_SHOWN: Final = 3
"""Most cures whose ratios so far are shown during a run."""

Progress = Callable[[int, str, float, float, str], None]
"""Callback during each run: its number, from 1, its label, the seconds spent, the budget, and what
the best cures gain so far.
"""


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
        request = Request(
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
        return Trial(request).run()


class Trial:
    """Runs of one program under way."""

    def __init__(self, request: Request, progress: Progress = lambda *_: None) -> None:
        self._history, self._progress = History(request), progress
        self._program = Program(
            request.command,
            request.workdir,
            request.keep_trackers,
            max(request.budget_s, _LEAST_TIMEOUT_S),
            self._show,
        )
        self._began = time.monotonic()
        self._runs, self._label, self._so_far = 0, "", ""

    def run(self) -> Outcome:
        """Record or run the program once, then try each cure, and the best together, until all is
        decided or the budget is spent; keep the answers in the ledger.

        After a KeyboardInterrupt, the outcome says what is known by then. Raises InputError if the
        program as it is cannot be measured.
        """
        history, request, interrupted = self._history, self._history.request, False
        analysis: Analysis | None = None
        known: Sequence[Pair] = ()
        path = request.ledger or ledger.default_ledger()
        if request.ledger is not None:
            ledger.append(path, ())
        try:
            analysis = self._begin()
            candidates = request.candidates
            if candidates is None:
                assert analysis is not None
                assert history.pilot is not None
                chosen, history.left_out = choose(analysis, history.pilot)
                candidates = tuple(chosen)
            with suppress(InputError):
                known = ledger.pairs_of(ledger.read(path))
            history.enter(candidates, analysis, known)
            kept_s = race.kept_for_best(history, request.budget_s - self._spent())
            self._race(history.rows, request.budget_s - kept_s)
            together = combine([row.candidate for row in history.winners()])
            if len(together.settings) > 1 and str(together) not in map(str, candidates):
                period = max(row.period for row in history.winners())
                history.rows.append(Row(together, period=period))
                self._race(history.rows[-1:], request.budget_s)
            self._start_anew()
            self._race(history.rows, request.budget_s)
        except Spent as spent:
            if history.pilot is None:
                history.rows = [Row(each) for each in request.candidates or ()]
                for row in history.rows:
                    row.why = "the budget ended within the first run"
                why = f"by then {spent}" if spent.args else "give more, or fewer --steps"
                history.notes.append(
                    f"the first run took longer than the budget, and was ended after "
                    f"{self._spent():.0f} s; {why}"
                )
        except KeyboardInterrupt:
            interrupted = True
        outcome = conclude(history, analysis, self._runs, self._spent(), interrupted)
        try:
            ledger.append(path, outcome.rows)
        except InputError as error:
            notes = (*outcome.notes, f"the answers were not saved: {error}")
            outcome = replace(outcome, notes=notes)
        return outcome

    def _begin(self) -> Analysis | None:
        """Run the program once, recorded where no trace was given, for the predictions.

        That run measures nothing: it pays for files and compilations that later ones have ready.
        """
        request, candidate = self._history.request, Candidate()
        enough_s = math.inf if request.steps else _PILOT_PART * request.budget_s
        failed: BaseException | None = None
        if request.recording is None:
            with tempfile.TemporaryDirectory(prefix="gputrace-try-") as folder:
                # Absolute, as the program may run in a copy of its folder.
                trace = (request.keep_recording or Path(folder) / "first.sqlite").absolute()
                try:
                    self._history.pilot = self._go(candidate, "recording", trace, enough_s=enough_s)
                    if not trace.exists():
                        raise UsageError(f"{trace}: the recording left no trace")
                    return _analyze(trace, self._few())
                except GputraceError as error:
                    failed = error
                    # Cures that were named need no recording.
                    if request.candidates is None or request.keep_recording is not None:
                        raise
        analysis = None if request.recording is None else _analyze(request.recording)
        if self._history.pilot is None:
            try:
                self._history.pilot = self._go(candidate, "without recording", enough_s=enough_s)
            except Spent as spent:
                raise failed or spent from None
        return analysis

    def _few(self) -> tuple[int, int] | None:
        """Return the steps to analyze of a first run that was ended early; None for any other.

        Of few steps, half may seem to be a start that is over: all but the first are what it is.
        """
        history, pilot = self._history, self._history.pilot
        assert pilot is not None
        is_early = pilot.code is None and pilot.made < history.warmup + history.steps
        return (1, pilot.made) if is_early and pilot.made > 1 else None

    def _race(self, rows: Sequence[Row], until_s: float) -> None:
        """Make the runs that `next_run` asks for until it asks for none."""
        history = self._history
        while lot := race.next_run(history, rows, until_s - self._spent()):
            begun = any(row.cured for row in history.rows)
            try:
                if lot[0].within:
                    self._switch(lot, rows, until_s)
                elif race.has_one_run(history, lot[0], until_s - self._spent()):
                    self._run_once(lot[0], rows)
                else:
                    self._round(lot, rows, until_s)
            except InputError as error:
                if not begun:
                    raise
                # It ran before: what is known so far is the answer.
                history.notes.append(f"no more rounds were made: {error}")
                return

    def _switch(self, lot: Sequence[Row], rows: Sequence[Row], until_s: float) -> None:
        """Make a run in which cures take turns: slow changes of the machine affect all alike.

        If it fails, the cure with which the program fails is found by a run for each.
        """
        history = self._history
        turns = history.turns(lot)
        steps = MOST * (len(lot) + 1) * turns.stretch
        settings = dict.fromkeys(setting for row in lot for setting in row.candidate.settings)
        label = f"{', '.join(str(row.candidate) for row in lot)} by turns"
        others, costs = [row for row in rows if row not in lot], race.costs_of(history)
        kept_s = race.kept(others, until_s - self._spent() - costs.answer(lot), costs)
        began_s, trial_s = self._spent(), history.trial_s(lot)
        so_far: list[Measured] = []

        def going(run: Measured) -> list[int]:
            so_far[:] = [run]
            later, spent_s = race.after(lot, run), self._spent()
            self._note([*later, *others])
            trial_left_s = trial_s - (spent_s - began_s)
            return race.next_turns(later, others, until_s - spent_s, kept_s, trial_left_s, costs)

        try:
            candidate = Candidate(tuple(settings))
            run = self._go(candidate, label, None, steps, turns, going, lot)
        except Failed as error:
            if lot[0].over:
                return
            if len(lot) == 1:
                history.add_failure(lot[0], rows, error)
            else:
                # A capture is the likely cause; else half of them may still share a run.
                captured = [row for row in lot if row.candidate.captures]
                rest = [row for row in lot if row not in captured]
                half = len(lot) // 2
                for part in (rest, captured) if captured and rest else (lot[:half], lot[half:]):
                    self._switch(part, rows, until_s)
        except KeyboardInterrupt:
            for each in so_far:
                history.add_turns(lot, each, turns, others)
            raise
        else:
            history.add_turns(lot, run, turns, others)

    def _round(self, lot: Sequence[Row], rows: Sequence[Row], until_s: float) -> None:
        """Run the program once without cures and once with each, alternately in reverse order."""
        history = self._history
        bare: Measured | None = None
        cured: list[tuple[Row, Measured]] = []
        try:
            for row in race.order([None, *lot], len(history.bare)):
                if row is None:
                    bare = self._go(Candidate(), "as it is")
                    history.bare.append(bare)
                    continue
                if bare is not None and cured and not row.cured:
                    # A start with all would leave too little time for any answer, or for others.
                    left_s = until_s - self._spent() - (2 * FEWEST - 1) * bare.seconds
                    others = [other for other in rows if other.within]
                    if left_s < race.kept(others, max(left_s, 0.0), race.costs_of(history)):
                        continue
                try:
                    cured.append((row, self._go(row.candidate, str(row.candidate), lot=[row])))
                except Failed as error:
                    if not row.over:
                        row.end(Verdict.FAILED, str(error))
        finally:
            # Also of a round that is interrupted, as far as it came.
            if bare is not None:
                for row, run in cured:
                    row.take(run, [Turn(bare.step_ns, run.step_ns)])
            self._note(rows)

    def _run_once(self, row: Row, rows: Sequence[Row]) -> None:
        """Run the program once with a cure, from the step on that was the first to be measured in
        the first run, and compare it with that.
        """
        history = self._history
        first = history.pilot
        assert first is not None
        try:
            run = self._go(
                row.candidate,
                str(row.candidate),
                steps=max(first.steps, PILOT_STEPS),
                lot=[row],
                enough_s=_ONE_RUN_PART * (history.request.budget_s - self._spent()),
                warmup=first.made - first.steps,
            )
        except Failed as error:
            if not row.over:
                row.end(Verdict.FAILED, str(error))
            return
        row.take(run, [Turn(first.step_ns, run.step_ns)])
        if row.over:
            return
        ratio = compare_with_first(first.lengths_ns, run.lengths_ns)
        if ratio is None:
            # The first run is recorded: their ratio would be no sign of anything.
            row.forget()
            row.end(Verdict.OPEN, "time for one run, which shows nothing")
            history.left_out[str(row.candidate)] = row.why
            return
        row.ratio, row.verdict = ratio, ratio.verdict
        history.notes.append(
            f"{row.candidate} had one run, compared with the first: a start takes "
            f"{run.start_s:.0f} s, too long for rounds in the budget"
        )
        self._note(rows)

    def _start_anew(self) -> None:
        """Measure the best in other starts of the program, if its answer is from a single one and
        there is time for all of them.
        """
        history = self._history
        best = next(iter(history.winners()), None)
        if best is None or not best.within:
            return
        others = [Row(best.candidate, period=best.period) for _ in range(_STARTS - 1)]
        left_s, costs = history.request.budget_s - self._spent(), race.costs_of(history)
        if sum(costs.answer([row]) for row in others) > left_s:
            return
        turns = history.turns([best])

        def going(run: Measured) -> list[int]:
            return [1] if len(run.turns[0]) < TURNS else []

        for row in others:
            label = f"{best.candidate} in another start"
            try:
                run = self._go(best.candidate, label, None, 2 * MOST * turns.stretch, turns, going)
            except Failed as error:
                history.notes.append(f"{best.candidate} failed in another start: {error}")
                return
            row.take(run, run.turns[0])
        best.repeat([row.ratio for row in others if row.ratio])

    def _go(
        self,
        candidate: Candidate,
        label: str,
        record: Path | None = None,
        steps: int = 0,
        turns: Turns | None = None,
        going: Callable[[Measured], Sequence[int]] | None = None,
        lot: Sequence[Row] = (),
        enough_s: float = math.inf,
        warmup: int = 0,
    ) -> Measured:
        """Make a run, for the rows of a lot; raises InputError where the program as it is fails,
        Spent for no budget, and Failed where it fails with cures but would not without them, or
        takes all the time that they may without having shown anything.
        """
        history, request = self._history, self._history.request
        left_s = (1 + _BEYOND_BUDGET) * request.budget_s - self._spent()
        if left_s <= 0:
            raise Spent
        trial_s = history.trial_s(lot) if lot else math.inf
        self._runs, self._label = self._runs + 1, label
        self._show()
        steps = steps or history.steps
        warmup = warmup or history.warmup
        try:
            run = self._program.run(
                candidate, warmup, steps, record, turns, going, left_s, trial_s, enough_s
            )
        except Spent:
            if trial_s > left_s:
                raise
            why = f"showed nothing in {trial_s:.0f} s, its part of the budget"
            for row in lot:
                row.end(Verdict.OPEN, why)
                history.left_out[str(row.candidate)] = why
            raise Failed(why) from None
        except Failed as error:
            if candidate.settings:
                raise
            raise InputError(request.name or shlex.join(request.command), str(error)) from None
        history.add_run(candidate, run)
        for row in lot:
            row.spent_s += run.seconds / len(lot)
        if not candidate.settings or not run.failure:
            return run
        if history.ends_alike(run) is None:
            try:
                self._go(Candidate(), "as it is, to its end", steps=run.made + 1 - history.warmup)
            except Spent:
                unknown = "the budget ended before it was known whether it does so unchanged"
                raise Failed(f"{run.failure}; {unknown}") from None
        if not history.ends_alike(run):
            raise Failed(run.failure)
        return run

    def _note(self, rows: Sequence[Row]) -> None:
        """Keep for the progress what the best of some rows gain so far."""
        measured = [row for row in rows if row.cured and not row.why]
        measured.sort(key=lambda row: row.so_far)
        best = measured[:_SHOWN]
        self._so_far = ", ".join(f"{row.candidate} {1 / row.so_far:.2f}x" for row in best)

    def _show(self) -> None:
        budget_s = self._history.request.budget_s
        self._progress(self._runs, self._label, self._spent(), budget_s, self._so_far)

    def _spent(self) -> float:
        return time.monotonic() - self._began


def _analyze(trace: Path, steps: tuple[int, int] | None = None) -> Analysis:
    from gputrace.api import open as open_trace

    with open_trace(trace) as opened:
        with suppress(UsageError):
            return opened.analyze(steps=steps)
        # The recorder may have met fewer.
        return opened.analyze()
