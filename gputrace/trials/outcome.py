"""Outcome of a trial: an answer for each cure, the patch, and notes on what limits them; and the
report of it, and of what the ledger holds.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from statistics import stdev
from typing import Final

from gputrace.collectors.masking import masked
from gputrace.model.results import Analysis
from gputrace.model.struct import UNKNOWN, Column
from gputrace.report import Document, Limits, Line, Records, Table, attributes, tabulate, to_json
from gputrace.trials import statistics
from gputrace.trials.choice import describe, find_recipes
from gputrace.trials.history import History, Row
from gputrace.trials.ledger import Entry, Record, shipped
from gputrace.trials.ledger import records as predicted
from gputrace.trials.patch import Patch, make_patch
from gputrace.trials.race import settled, sharing, why_not_tried
from gputrace.trials.runs import Measured
from gputrace.units import format_count, format_ns, format_number, format_times

_RESTLESS: Final = 0.1
"""Minimum scatter of steps without cures, from round to round, for a note."""
_MOSTLY: Final = 0.9
"""Part of the steps' gain that a whole run has after the number of steps that the note names."""
_SHORT: Final = 500
"""Maximum number of steps that no note names: few trainings are shorter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers of a trial. Times are in nanoseconds; ratios are of steps with a cure to without."""

    command: tuple[str, ...]
    warmup: int
    steps: int
    """Steps measured in each run without turns."""
    runs: int
    seconds: float
    bare_ns: float | None
    """Mean step without cures."""
    findings: tuple[str, ...]
    """Ids of the recording's findings, the most important first; empty without a recording."""
    rows: tuple[Entry, ...]
    """Answer for each cure, in the order tried; the best ones together come last."""
    best: str | None
    """Fastest proven cure that changes no results, or was asked for."""
    patch: Patch | None
    """Changes that build it into the program."""
    notes: tuple[str, ...]
    interrupted: bool = False


def conclude(
    history: History,
    analysis: Analysis | None,
    runs: int,
    spent_s: float,
    interrupted: bool,
) -> Outcome:
    """Return the outcome of a trial that is over."""
    request, winners, pilot = history.request, history.winners(), history.pilot
    program = request.name or shlex.join(masked(request.command))
    last = history.bare[-1] if history.bare else pilot
    losses = [run.losses for run in history.bare]
    patch = None
    notes = list(dict.fromkeys(history.notes))
    if winners:
        main = next(run.main for run in (*history.bare, pilot) if run)
        best = winners[0]
        words = () if request.name else request.command
        patch = make_patch(best.candidate, best.changes, main, words)
        notes += describe_payoff(best, history.start_s)
    if analysis is not None and pilot is not None:
        cured = {id for row in winners for s in row.candidate.settings for id in s.cure.findings}
        notes += find_recipes(analysis, pilot.main, cured)
    for row in (row for row in history.rows if row.starts):
        gains = ", ".join(format_times(1 / ratio) for ratio in row.starts)
        notes.append(f"{row.candidate} gained {gains} in {len(row.starts)} starts of the program")
    has_begun = pilot is not None and not interrupted
    waiting = [row for row in history.rows if pilot and not row.over and not row.cured]
    whys = {str(row.candidate): why for row in waiting if (why := why_not_tried(history, row))}
    notes += describe(history.left_out | whys)
    if not history.rows and has_begun and not history.left_out:
        notes.append("no cause that a cure takes away takes 1% of a step")
    if not winners and has_begun and request.candidates is None:
        notes.append("more can be tried by name: `gputrace try --list` lists all")
    still_open = [row for row in history.rows if row.verdict == statistics.Verdict.OPEN]
    done = settled(history.rows)
    left = [row for row in still_open if not row.over and row not in done]
    left = [row for row in left if str(row.candidate) not in whys]
    if left and has_begun and not history.notes:
        notes.append(describe_rest(left, last, spent_s))
    notes += describe_scatter([row for row in still_open if row.ratio])
    failed = next((run for run in history.unchanged if run.failure), None)
    if failed is not None:
        notes.append(
            f"the program also fails without cures, after {failed.made} steps; those before "
            f"count: {failed.failure}"
        )
    if any(not run.ended for run in history.unchanged):
        notes.append("the program went on after its last step and was ended by a signal")
    bare = [run.step_ns for run in history.bare]
    bare = bare or [step for row in history.rows for step in row.bare]
    return Outcome(
        command=(request.name,) if request.name else request.command,
        warmup=history.warmup,
        steps=history.bare[-1].steps if history.bare else history.steps,
        runs=runs,
        seconds=spent_s,
        bare_ns=sum(bare) / len(bare) if bare else None,
        findings=tuple(finding.id for finding in analysis.findings) if analysis else (),
        rows=tuple(answer(row, program, last, losses) for row in history.rows),
        best=str(winners[0].candidate) if winners else None,
        patch=patch,
        notes=tuple(notes),
        interrupted=interrupted,
    )


def answer(
    row: Row, program: str, run: Measured | None, losses: Sequence[Sequence[float]]
) -> Entry:
    """Return the answer for a row.

    Args:
        row: cures, with what was measured of them.
        program: name of the program, or its command line.
        run: last run of the program as it is.
        losses: losses of each run of the program as it is.
    """
    ratio, prediction = row.ratio, row.prediction
    so_far = row.so_far if row.cured and row.bare and not row.why else None
    few = f"fewer than {statistics.FEWEST} rounds in the budget"
    return Entry(
        time_ns=time.time_ns(),
        program=program,
        host=socket.gethostname(),
        gpu=run.gpu if run else "",
        ranks=run.ranks if run else 0,
        versions=", ".join(f"{k} {v}" for k, v in run.versions.items()) if run else "",
        cure=str(row.candidate),
        verdict=str(row.verdict),
        why=row.why or ("" if ratio else few),
        ratio=ratio.ratio if ratio else so_far,
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
            statistics.turn_losses_differ(row.turn_losses)
            if row.turn_losses
            else statistics.losses_differ(losses, row.losses)
        ),
    )


def describe_payoff(row: Row, start_s: float) -> list[str]:
    """Say how long a run must be to gain about as much as its steps, if that is long."""
    cured_ns = sum(row.cured) / len(row.cured)
    steps = 1e9 * _MOSTLY * start_s / ((1 - _MOSTLY) * cured_ns)
    if steps <= _SHORT:
        return []
    least = f"{round(steps, -2):,.0f}"
    return [f"The {start_s:.1f} s start-up matters only for runs under {least} steps."]


def describe_rest(rows: Sequence[Row], last: Measured | None, spent_s: float) -> str:
    """Say how much more time the next answer would take."""
    run_s = last.seconds if last else 0.0
    runs = sharing([row for row in rows if row.within])
    within_s = sum(max(row.seconds or run_s for row in run) for run in runs)
    whole = [row for row in rows if not row.within]
    each, more = within_s, 1
    if whole:
        each = run_s + sum(row.seconds or run_s for row in whole)
        rounds = min(len(row.cured) for row in whole)
        more = next((look for look in statistics.LOOKS if look > rounds), statistics.MOST) - rounds
    more_s = each * more + (within_s if whole else 0.0)
    minutes = math.ceil((spent_s + more_s) / 60)
    names = ", ".join(str(row.candidate) for row in rows)
    return f"undecided: {names}. One round takes {each:.0f} s; try --budget {minutes}min."


def describe_scatter(rows: Sequence[Row]) -> list[str]:
    """Say by how much steps without cures vary, if that hides what cures do."""
    scatter = max((stdev(map(math.log, row.bare)) for row in rows), default=0.0)
    if scatter < _RESTLESS:
        return []
    return [
        f"steps without cures vary by {100 * scatter:.0f}% from round to round, which hides small "
        "differences: is the machine busy with other work?"
    ]


_WIDE: Final = 4
"""Gain at the upper bound of an interval beyond which an undecided one says nothing."""


def document(
    outcome: Outcome, limits: Limits, *, with_diff: bool = False, applied: bool = False
) -> Document:
    """Return the report of a trial: answers, and the changes that the best set needs.

    ``with_diff`` leaves the changed lines to a diff below it, ``applied`` is true where the changes
    are written.
    """
    del limits
    step = "" if outcome.bare_ns is None else f", unchanged step {format_ns(outcome.bare_ns)}"
    title = f"{format_count(outcome.runs, 'run')} in {outcome.seconds:.0f} s{step}"
    rows = _tried(outcome)
    notes = [*_remarks(outcome), *_changes(outcome, with_diff, applied)]
    return Document(
        head=(Line(_verdict(outcome), "bold green" if outcome.best else ""),),
        tables=(tabulate(title, _ANSWERS, rows),) if rows else (),
        notes=tuple(notes),
    )


def records(outcome: Outcome) -> Records:
    """Return the answers; ratios are of the step with a cure to the step without."""
    names = [field.name for field in fields(Entry)]
    return names, attributes(outcome.rows, names)


def render_json(outcome: Outcome) -> str:
    """Render one line of JSON."""
    shown = {name: getattr(outcome, name) for name in outcome.__slots__}
    if outcome.patch is not None:
        shown["patch"] = {"diff": outcome.patch.diff, "by_hand": outcome.patch.by_hand}
    return to_json(shown)


def _tried(outcome: Outcome) -> list[Entry]:
    """Return the answers, but for cures that had no run: a note has their names."""
    return [row for row in outcome.rows if row.rounds or row.verdict != "cannot tell yet"]


def _verdict(outcome: Outcome) -> str:
    if outcome.best is not None:
        best = next(row for row in reversed(outcome.rows) if row.cure == outcome.best)
        return f"{outcome.best}: {format_answer(best)}"
    fastest = _fastest(outcome)
    if fastest is not None:
        return f"{fastest.cure}: {format_answer(fastest)}, but it changes numerics"
    tried = _tried(outcome)
    if tried and all(row.verdict == "changes nothing" for row in tried):
        return "Nothing that was tried changes the program."
    nothing = f"Nothing to gain beyond {100 * (statistics.WORTH - 1):.0f}%"
    if tried and all(row.gains_little for row in tried):
        waiting = ", ".join(row.cure for row in outcome.rows if row not in tried)
        return f"{nothing} by what was tried{f'; not tried: {waiting}' if waiting else ''}."
    if not outcome.rows and outcome.findings and not outcome.interrupted:
        return f"{nothing}: no cure that its findings ask for would change the program."
    most = min(tried, key=lambda row: row.ratio or 1.0, default=None)
    if most is not None and (most.ratio or 1.0) < 1 / statistics.WORTH:
        return f"Nothing is proven yet; {most.cure}: {format_answer(most)}"
    if tried:
        return "Nothing that was tried is proven to be faster."
    if outcome.rows and not outcome.interrupted:
        return "Nothing that was tried has an answer yet: the budget is too small."
    return "Nothing was tried."


def _fastest(outcome: Outcome) -> Entry | None:
    proven = [row for row in outcome.rows if row.verdict == "faster" and row.ratio is not None]
    return min(proven, key=lambda row: row.ratio or 1.0, default=None)


def _remarks(outcome: Outcome) -> Iterator[Line]:
    fastest = _fastest(outcome)
    if fastest is not None and fastest.numerics and fastest.cure != outcome.best:
        words = ",".join(filter(None, (outcome.best, fastest.cure)))
        yield Line(
            f"{fastest.cure} is the fastest, but changes numerics; have it in the best set, with "
            f"its patch, by naming it: gputrace try {words}"
        )
    for row in outcome.rows:
        # Of what the budget did not pay for, a note has the names.
        if row.why and row.verdict != "cannot tell yet":
            yield Line(f"{row.verdict}: {row.why}", name=row.cure)
        if row.loss_differs:
            yield Line("its losses differ from those of the unchanged program", name=row.cure)
    if changing := [row.cure for row in outcome.rows if row.numerics and row.low is not None]:
        yield Line(", ".join(changing), name="change numerics")
    if outcome.findings:
        yield Line(", ".join(outcome.findings), name="findings of the recording")
    yield from (Line(note, "dim", "note") for note in outcome.notes)


def _changes(outcome: Outcome, with_diff: bool, applied: bool) -> Iterator[Line]:
    """Yield what is to be done to have the best set for good."""
    if outcome.patch is None:
        return
    yield Line(f"To have {outcome.best} for good:")
    for edit in outcome.patch.edits:
        hint = " (as below)" if with_diff else "" if applied else " (--apply writes it)"
        yield Line(f"  change {os.path.relpath(edit.path)}{hint}")
        if not with_diff:
            yield from (Line(f"    {line}") for line in edit.lines)
    yield from (Line(f"  {line}") for line in outcome.patch.by_hand)


def format_answer(row: Entry) -> str:
    """Return an answer as ``83.4 → 8.5 ms, 9.8x faster (8.8x to 10.9x)``; the interval is one of
    95%.
    """
    if row.ratio is None:
        return row.verdict
    steps = "" if row.bare_ns is None else f"{_steps(row.bare_ns, row.bare_ns * row.ratio)}, "
    gain = format_times(1 / row.ratio)
    if row.low is None or row.high is None:
        return f"{steps}{gain} in {format_count(row.rounds, 'round')}, too few to tell"
    low, high = 1 / row.high, 1 / row.low
    if row.verdict == "faster":
        return f"{steps}{gain} faster ({format_times(low)} to {format_times(high)})"
    if row.verdict == "slower":
        slower = (format_times(ratio) for ratio in (row.ratio, row.low, row.high))
        return f"{steps}{{}} slower ({{}} to {{}})".format(*slower)
    interval = f"({100 * (low - 1):+.1f}% to {100 * (high - 1):+.1f}%)"
    if row.gains_little and row.verdict != "no difference":
        return f"gains {100 * max(high - 1, 0.0):.1f}% at most {interval}"
    return f"{row.verdict} {f'({gain} so far)' if high > _WIDE else interval}"


def _steps(bare_ns: float, cured_ns: float) -> str:
    """Return two durations as ``83.4 → 8.5 ms``, in the unit of the first."""
    unit = format_ns(bare_ns).split()[1]
    scale = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    return f"{format_number(bare_ns / scale)} → {format_number(cured_ns / scale)} {unit}"


def _gain(ratio: float) -> str:
    return format_times(1 / max(ratio, 1e-3))


_ANSWERS: Final = (
    Column("", "cure"),
    Column("measured", format_answer),
    Column("predicted", lambda row: UNKNOWN if row.predicted is None else _gain(row.predicted)),
    Column("rounds", "rounds"),
)
_GAINS: Final = (
    Column("", "program"),
    Column("cure", "cure"),
    Column("trials", "trials"),
    Column("faster", "faster"),
    Column("median", "ratio", _gain),
)
_PREDICTIONS: Final = (
    Column("faster", "faster"),
    Column("predicted", "predicted"),
    Column("error", "mean_error", lambda error: f"{100 * error:+.1f}"),
    Column("size of error", "mean_size", lambda size: f"{100 * size:.1f}"),
    Column("in the range", lambda row: f"{row.within} of {row.ranged}" if row.ranged else ""),
)


def history(entries: Sequence[Entry]) -> Document:
    """Return what a ledger holds: each trial, what cures gained by program, and how far predictions
    were off, by cure.
    """

    def trial(entry: Entry) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.time_ns / 1e9))
        return f"{when} on {entry.host}: {entry.program}"

    def predictions(title: str, counted: str, rows: Sequence[Record]) -> Table:
        columns = (Column("", "cure"), Column(counted, "trials"), *_PREDICTIONS)
        return tabulate(f"{title}, in % of the unchanged step", columns, rows)

    tables = [tabulate(title, _ANSWERS[:3], rows) for title, rows in groupby(entries, trial)]
    if entries:
        rows = predicted(entries, by_program=True)
        tables.append(tabulate("What cures gained", _GAINS, rows))
        tables.append(predictions("Predictions", "trials", predicted(entries)))
    tables.append(predictions("Pairs that ship with gputrace, by prediction", "pairs", shipped()))
    return Document(head=(), tables=tuple(tables))
