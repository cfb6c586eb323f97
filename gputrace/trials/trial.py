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
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from gputrace.errors import GputraceError, InputError, UsageError
from gputrace.model.results import Analysis
from gputrace.studies.runner import Failed
from gputrace.trials import ledger
from gputrace.trials.cures import Candidate, combine, cost_of, cures_for, predict, read_candidates
from gputrace.trials.outcome import (
    Outcome,
    answer,
    describe_payoff,
    describe_rest,
    describe_scatter,
    describe_starts,
)
from gputrace.trials.patch import make_patch
from gputrace.trials.race import TURNS, Costs, Row, contenders, kept, lots, next_lot
from gputrace.trials.runs import Measured, Program, Spent, Turn, Turns, call_command
from gputrace.trials.statistics import FEWEST, MOST, Verdict
from gputrace.units import parse_duration

T = TypeVar("T")

WARMUP: Final = 10
_PILOT_STEPS: Final = 40
_RUN_NS: Final = (7 * 10**8, 3 * 10**9)
"""Minimum and maximum time to measure in a run; in between, as long as the program takes to start:
longer measuring costs rounds, which make the answer sure; shorter saves little."""
_RUN_PART: Final = 0.02
"""Maximum part of the budget to measure in a run: an answer takes six, each with its start."""
_STEPS: Final = (20, 200)
_LEAST_TIMEOUT_S: Final = 600.0
_BEYOND: Final = 5
"""Steps of warm-up after those whose batches were ready before the first one."""
_TURN_NS: Final = 400_000_000
_BUFFERS: Final = 3
"""Minimum steps of a loader's turn for each batch it may have ready: fewer hide its speed."""
_TURN: Final = (5, 80)
"""Minimum and maximum steps of a turn within a run."""
_BEYOND_BUDGET: Final = 0.03
"""Part of the budget by which the last run may exceed it."""
_VARIES: Final = 1.25
"""Ratio of the predicted length of a run to the shortest, as starts vary."""
_AS_FAR: Final = 1.1
"""Maximum ratio of steps without a cure to with it, if both ended at the same place: a program that
trains for a given time does not end at the same step."""
_STARTS: Final = 3
"""Starts of the program in which the best is measured, if there is time for all of them."""
_TOGETHER: Final = 0.3
"""Maximum part of the budget that is kept for the best cures together."""


Progress = Callable[[int, str, float, float], None]
"""Callback during each run: its number, from 1, its label, the seconds spent, and the budget."""


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
        self._request, self._progress = request, progress
        self._program = Program(
            request.command,
            request.workdir,
            request.keep_trackers,
            max(request.budget_s, _LEAST_TIMEOUT_S),
            self._show,
        )
        self._began = time.monotonic()
        self._warmup = request.warmup or WARMUP
        self._steps = request.steps or _PILOT_STEPS
        self._bare: list[Measured] = []
        self._rows: list[Row] = []
        self._runs, self._label = 0, ""
        self._start_s = math.inf
        """Shortest time to the end of the first step."""
        self._notes: list[str] = []
        self._pilot: Measured | None = None
        self._as_it_is: list[Measured] = []
        """All runs without cures, measured or not."""
        self._made: int | None = None
        """Fewest steps after which the program ended by itself."""

    def run(self) -> Outcome:
        """Record or run the program once, then try each cure, and the best together, until all is
        decided or the budget is spent.

        After a KeyboardInterrupt, the outcome says what is known by then. Raises InputError if the
        program as it is cannot be measured.
        """
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
            self._rows = [
                Row(each, predict(each, analysis), cost_of(each, analysis))
                if analysis
                else Row(each)
                for each in candidates
            ]
            self._skip_what_is_so()
            self._race(self._rows, request.budget_s - self._kept_for_best())
            together = combine([row.candidate for row in self._winners()])
            if len(together.settings) > 1 and str(together) not in map(str, candidates):
                self._rows.append(Row(together))
                self._race(self._rows[-1:], request.budget_s)
            self._start_anew()
            self._race(self._rows, request.budget_s)
        except Spent as spent:
            if self._pilot is None:
                self._rows = [Row(each) for each in request.candidates or ()]
                for row in self._rows:
                    row.why = "the budget ended within the first run"
                why = f"by then {spent}" if spent.args else "give more, or fewer --steps"
                self._notes.append(
                    f"the first run took longer than the budget, and was ended after "
                    f"{self._spent():.0f} s; {why}"
                )
        except KeyboardInterrupt:
            interrupted = True
        return self._outcome(analysis, interrupted)

    def _begin(self) -> Analysis | None:
        """Run the program once, recorded where no trace was given, for the predictions.

        That run measures nothing: it pays for files and compilations that later ones have ready.
        """
        request, candidate = self._request, Candidate()
        failed: BaseException | None = None
        if request.recording is None:
            with tempfile.TemporaryDirectory(prefix="gputrace-try-") as folder:
                # Absolute, as the program may run in a copy of its folder.
                trace = (request.keep_recording or Path(folder) / "first.sqlite").absolute()
                try:
                    self._pilot = self._go(candidate, "recording", trace)
                    if not trace.exists():
                        raise UsageError(f"{trace}: the recording left no trace")
                    return _analyze(trace)
                except GputraceError as error:
                    failed = error
                    # Cures that were named need no recording.
                    if request.candidates is None or request.keep_recording is not None:
                        raise
        analysis = None if request.recording is None else _analyze(request.recording)
        if self._pilot is None:
            try:
                self._pilot = self._go(candidate, "without recording")
            except Spent as spent:
                raise failed or spent from None
        return analysis

    def _go(
        self,
        candidate: Candidate,
        label: str,
        record: Path | None = None,
        steps: int = 0,
        turns: Turns | None = None,
        going: Callable[[Measured], Sequence[int]] | None = None,
    ) -> Measured:
        """Make a run; raises InputError where the program as it is fails, Spent for no budget."""
        left_s = (1 + _BEYOND_BUDGET) * self._request.budget_s - self._spent()
        if left_s <= 0:
            raise Spent
        self._runs, self._label = self._runs + 1, label
        self._show()
        steps = steps or self._steps
        try:
            run = self._program.run(candidate, self._warmup, steps, record, turns, going, left_s)
        except Failed as error:
            if candidate.settings:
                raise
            name = self._request.name or shlex.join(self._request.command)
            raise InputError(name, str(error)) from None
        self._start_s = min(run.start_s, self._start_s)
        if run.code is not None:
            self._made = min(run.made, self._made or run.made)
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
                unknown = "the budget ended before it was known whether it does so unchanged"
                raise Failed(f"{run.failure}; {unknown}") from None
        if not any(each.code == run.code and each.made <= _AS_FAR * run.made for each in bare):
            raise Failed(run.failure)

    def _show(self) -> None:
        self._progress(self._runs, self._label, self._spent(), self._request.budget_s)

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

    def _skip_what_is_so(self) -> None:
        """Try no number of threads that torch has as it is: no run with the cure would tell."""
        assert self._pilot is not None
        for row in self._rows:
            if str(row.candidate) == f"threads={self._pilot.threads}":
                row.skip("torch has as many already")

    def _set_lengths(self, candidates: Sequence[Candidate]) -> None:
        """Choose how many steps to pass and to measure, the same in all runs."""
        assert self._pilot is not None
        if self._request.warmup is None:
            ready = max(_ready(each, self._pilot.buffered) for each in (Candidate(), *candidates))
            self._warmup = max(WARMUP, ready + _BEYOND)
        if self._request.steps is None:
            (least, most), (shortest, longest), step_ns = _STEPS, _RUN_NS, self._pilot.step_ns
            most_s = min(self._pilot.start_s, _RUN_PART * self._request.budget_s)
            steps = round(min(max(1e9 * most_s, shortest), longest) / step_ns)
            self._steps = min(max(steps, least), most)

    def _race(self, rows: Sequence[Row], until_s: float) -> None:
        """Run rounds of what is undecided until the time is spent: see `race`.

        A round is a run without cures and one with each; or one run in which cures take turns.
        """
        while True:
            begun = any(row.cured for row in self._rows)
            left_s, costs = until_s - self._spent(), self._costs()
            lot = next_lot(rows, left_s, costs)
            if not lot and not any(row.over or row.ratio for row in self._rows):
                # A run that may be cut off is better than no answer at all.
                lot = next_lot(rows, _VARIES * left_s, costs)[:1]
            if not lot and not begun:
                # What a run takes is a guess as yet.
                lot = [row for first in lots(rows)[:1] for row in first[:1]]
            if not lot:
                return
            try:
                if lot[0].within:
                    self._switch(lot, rows, until_s)
                else:
                    self._round(lot, rows, until_s)
            except InputError as error:
                if not begun:
                    raise
                # It ran before: what is known so far is the answer.
                self._notes.append(f"no more rounds were made: {error}")
                return

    def _kept_for_best(self) -> float:
        """Return the seconds kept for an answer on the best cures together; 0 if time is too short.

        First answers for all cures that start as fast come first.
        """
        request, costs = self._request, self._costs()
        fast = [row for row in self._rows if not row.slow]
        left_s = request.budget_s - self._spent() - kept(fast, (), math.inf, costs)
        allowed = [row.candidate for row in self._rows if self._may_join(row)]
        for some in ([each for each in allowed if each.switched], allowed):
            together = combine(some)
            answer_s = costs.answer([Row(together)])
            if len(together.settings) > 1 and answer_s <= min(_TOGETHER * request.budget_s, left_s):
                return answer_s
        return 0.0

    def _may_join(self, row: Row) -> bool:
        """Return whether a row's cures may be in the best set."""
        return self._request.candidates is not None or not row.candidate.numerics

    def _costs(self) -> Costs:
        """Return the durations of runs, by the last one."""
        assert self._pilot is not None
        step_s = self._pilot.step_ns / 1e9
        measured_s = self._steps * step_s
        run_s = (
            self._bare[-1].seconds
            if self._bare
            else self._pilot.start_s + self._warmup * step_s + measured_s
        )
        return Costs(run_s - measured_s, run_s, lambda lot: self._turns(lot).stretch * step_s)

    def _turns(self, lot: Sequence[Row]) -> Turns:
        """Return the turns of a run in which cures are switched."""
        assert self._pilot is not None
        least, most = _TURN
        steps = min(max(round(_TURN_NS / self._pilot.step_ns), least), most)
        passed, period = 1, 1
        for row in lot:
            if row.ahead:
                # What is ready when a turn begins was made in others; and batches of several
                # workers come in bursts.
                ready = _ready(row.candidate, self._pilot.buffered)
                passed, steps = max(passed, 1 + ready), max(steps, _BUFFERS * ready)
                period = max(period, _workers(row.candidate), self._pilot.buffered)
        if self._made is not None:
            room = (self._made - self._warmup) // (TURNS * (len(lot) + 1)) - passed
            steps = min(steps, max(room, least))
        steps = math.ceil(steps / period) * period
        return Turns(tuple(row.candidate for row in lot), passed + steps, passed)

    def _switch(self, lot: Sequence[Row], rows: Sequence[Row], until_s: float) -> None:
        """Make a run in which cures take turns, until all are decided.

        Differences between runs, and slow changes, then affect all alike. Decided cures get no more
        turns, nor do those that cannot be the best while others can; the run ends when the time
        left is needed for the first answers of others.
        """
        turns = self._turns(lot)
        steps = MOST * (len(lot) + 1) * turns.stretch
        settings = dict.fromkeys(setting for row in lot for setting in row.candidate.settings)
        label = f"{', '.join(str(row.candidate) for row in lot)} by turns"
        others, costs = [row for row in rows if row not in lot], self._costs()
        beyond_s = until_s - self._spent() - costs.answer(lot)
        kept_s = kept(others, (), beyond_s, costs)
        so_far: list[Measured] = []

        def going(run: Measured) -> list[int]:
            so_far[:] = [run]
            later = [copy(row) for row in lot]
            for row, pairs in zip(later, run.turns, strict=True):
                row.take(run, pairs)
            further = contenders(later, others)
            left_s = until_s - self._spent() - (1 + len(further)) * costs.turn(lot)
            answered = all(row.over or len(row.cured) >= TURNS for row in later)
            if left_s <= 0 or (answered and left_s <= kept_s):
                return []
            return [1 + later.index(row) for row in further]

        try:
            run = self._go(Candidate(tuple(settings)), label, None, steps, turns, going)
        except Failed as error:
            self._switch_apart(lot, rows, until_s, error)
        except KeyboardInterrupt:
            for each in so_far:
                self._take(lot, each, turns, others)
            raise
        else:
            self._take(lot, run, turns, others)

    def _take(self, lot: Sequence[Row], run: Measured, turns: Turns, others: Sequence[Row]) -> None:
        """Add the rounds of a run to its rows.

        A row that got too few before the program ended by itself starts again; one that got too few
        before the time was over keeps them.
        """
        for row, pairs in zip(lot, run.turns, strict=True):
            row.take(run, pairs)
            if not row.within:
                _have_whole_runs(others)
            elif run.code is not None and not row.over and len(row.cured) < FEWEST:
                row.forget()
                # A program of few steps has shorter turns, then those for one cure, or whole runs.
                if self._turns(lot).stretch >= turns.stretch:
                    row.apart, row.within = True, len(lot) > 1

    def _switch_apart(
        self, lot: Sequence[Row], rows: Sequence[Row], until_s: float, error: Failed
    ) -> None:
        """Find the cure with which the program fails, by a run for each."""
        if len(lot) == 1:
            if lot[0].ahead:
                # Two loaders may be too many.
                lot[0].forget()
                _have_whole_runs([*lot, *rows])
            else:
                lot[0].fail(error)
            return
        for row in lot:
            row.apart = True
            self._switch([row], rows, until_s)

    def _start_anew(self) -> None:
        """Measure the best in other starts of the program, if its answer is from a single one and
        there is time for all of them.
        """
        best = next(iter(self._winners()), None)
        if best is None or not best.within:
            return
        others = [Row(best.candidate) for _ in range(_STARTS - 1)]
        left_s, costs = self._request.budget_s - self._spent(), self._costs()
        if sum(costs.answer([row]) for row in others) > left_s:
            return
        turns = self._turns([best])

        def going(run: Measured) -> list[int]:
            return [1] if len(run.turns[0]) < TURNS else []

        for row in others:
            label = f"{best.candidate} in another start"
            try:
                run = self._go(best.candidate, label, None, 2 * MOST * turns.stretch, turns, going)
            except Failed as error:
                self._notes.append(f"{best.candidate} failed in another start: {error}")
                return
            row.take(run, run.turns[0])
        best.repeat([row.ratio for row in others if row.ratio])

    def _round(self, lot: Sequence[Row], rows: Sequence[Row], until_s: float) -> None:
        """Run the program once without cures and once with each, alternately in reverse order."""
        bare: Measured | None = None
        cured: list[tuple[Row, Measured]] = []
        for row in order([None, *lot], len(self._bare)):
            if row is None:
                bare = self._go(Candidate(), "as it is")
                self._bare.append(bare)
                continue
            if bare is not None and cured and not row.cured:
                # A start with all would leave too little time for any answer, or for others.
                left_s = until_s - self._spent() - (2 * FEWEST - 1) * bare.seconds
                others = [other for other in rows if other.within]
                if left_s < kept(others, (), max(left_s, 0.0), self._costs()):
                    continue
            try:
                cured.append((row, self._go(row.candidate, str(row.candidate))))
            except Failed as error:
                row.fail(error)
        assert bare is not None
        for row, run in cured:
            row.take(run, [Turn(bare.step_ns, run.step_ns)])

    def _winners(self) -> list[Row]:
        """Return the rows that are faster and may be in the best set, the fastest first."""
        faster = [
            row for row in self._rows if row.verdict == Verdict.FASTER and self._may_join(row)
        ]
        return sorted(faster, key=lambda row: row.ratio.ratio if row.ratio else 1.0)

    def _outcome(self, analysis: Analysis | None, interrupted: bool) -> Outcome:
        from gputrace.collectors.masking import masked

        request, winners = self._request, self._winners()
        program = request.name or shlex.join(masked(request.command))
        last = self._bare[-1] if self._bare else self._pilot
        losses = [run.losses for run in self._bare]
        entries = [answer(row, program, last, losses) for row in self._rows]
        patch = None
        notes = list(dict.fromkeys(self._notes))
        if winners:
            main = next(run.main for run in (*self._bare, self._pilot) if run)
            best = winners[0]
            words = () if request.name else request.command
            patch = make_patch(best.candidate, best.changes, main, words)
            notes += describe_payoff(best, self._start_s)
        notes += [describe_starts(row) for row in self._rows if row.starts]
        has_begun = self._pilot is not None and not interrupted
        if not self._rows and has_begun:
            notes.append("no cure fits the findings; `gputrace try --list` lists all")
        elif not winners and has_begun and request.candidates is None:
            notes.append("more can be tried by name: `gputrace try --list` lists all")
        left = [row for row in self._rows if row.verdict == Verdict.OPEN and not row.over]
        if left and has_begun and not self._notes:
            notes.append(describe_rest(left, last, self._spent()))
        notes += describe_scatter(
            [row for row in self._rows if row.verdict == Verdict.OPEN and row.ratio]
        )
        failed = next((run for run in self._as_it_is if run.failure), None)
        if failed is not None:
            notes.append(
                f"the program also fails without cures, after {failed.made} steps; those before "
                f"count: {failed.failure}"
            )
        if any(not run.ended for run in self._as_it_is):
            notes.append("the program went on after its last step and was ended by a signal")
        try:
            ledger.append(request.ledger or ledger.default_ledger(), entries)
        except InputError as error:
            notes.append(f"the answers were not saved: {error}")
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


def _have_whole_runs(rows: Sequence[Row]) -> None:
    """Give whole runs to the rows that change a loader and have no rounds yet."""
    for row in rows:
        row.within &= not row.ahead or bool(row.cured)


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


def _analyze(trace: Path) -> Analysis:
    from gputrace.api import open as open_trace

    with open_trace(trace) as opened:
        return opened.analyze()


def order(names: Sequence[T], round_number: int) -> list[T]:
    """Return the order of a round: every second one is reversed."""
    return list(names) if round_number % 2 == 0 else list(reversed(names))
