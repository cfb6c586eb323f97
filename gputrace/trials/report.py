"""Report of a trial: its verdict, answers, remarks and changes, and what the ledger holds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Final

from gputrace.model.struct import UNKNOWN, Column
from gputrace.report import to_json
from gputrace.report.document import Document, Limits, Line, Records, Table, attributes, tabulate
from gputrace.trials.ledger import Entry, Record, shipped
from gputrace.trials.ledger import records as predicted
from gputrace.trials.outcome import Outcome
from gputrace.trials.statistics import WORTH
from gputrace.units import format_ns, format_number, format_times

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
    runs = f"{outcome.runs} run{'s' if outcome.runs != 1 else ''}"
    title = f"{runs} in {outcome.seconds:.0f} s{step}"
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
    nothing = f"Nothing to gain beyond {100 * (WORTH - 1):.0f}%"
    if tried and all(row.gains_little for row in tried):
        waiting = ", ".join(row.cure for row in outcome.rows if row not in tried)
        return f"{nothing} by what was tried{f'; not tried: {waiting}' if waiting else ''}."
    if not outcome.rows and outcome.findings and not outcome.interrupted:
        return f"{nothing}: no cure that its findings ask for would change the program."
    most = min(tried, key=lambda row: row.ratio or 1.0, default=None)
    if most is not None and (most.ratio or 1.0) < 1 / WORTH:
        return f"Nothing is proven yet; {most.cure}: {format_answer(most)}"
    if tried:
        return "Nothing that was tried is proven to be faster."
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
        rounds = f"{row.rounds} round{'s' if row.rounds != 1 else ''}"
        return f"{steps}{gain} in {rounds}, too few to tell"
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
