"""The tables on classes of time: speed-up and what eats it, and where a step goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gputrace.analyzers.results import CLASSES
from gputrace.bench.answer import Row, Summary
from gputrace.bench.groups import device_word
from gputrace.bench.views.cells import (
    amount,
    lay_out,
    percent,
    rate,
    signed_time,
    time,
    times,
    times_range,
)
from gputrace.views.tables import CLASS_NAMES, Table

_MOST_ACROSS: Final = 5
"""Configurations beside each other in a table of classes; of more, they are rows."""
_SHORT: Final = {
    "communication": "comm",
    "other_copy": "copies",
    "recorder": "rec.",
    "data_feeding": "data",
    "other_idle": "idle?",
}


def efficiency_table(summary: Summary) -> Iterator[Table]:
    """Speed-up and efficiency beside the fewest GPUs."""
    body = tuple(
        (
            row.label,
            rate(row.rate),
            times(row.speed_up),
            times_range(row.bounds),
            f"{row.efficiency:.0%}",
        )
        for row in summary.efficiency
    )
    header = ("", "samples/s", "speed-up", "(range)", "efficiency")
    word = device_word(summary.same)
    yield lay_out(f"Speed-up and efficiency; the batch of a {word} stays", header, body)


def losses_table(summary: Summary) -> Iterator[Table]:
    """Classes down, configurations across: what each adds to the base's step."""
    every = [row for row in summary.efficiency if row.losses]
    for start in range(0, len(every), _MOST_ACROSS):
        rows = every[start : start + _MOST_ACROSS]
        lost = [{loss.name: loss for loss in row.losses} for row in rows]
        shown = [name for name in CLASSES if any(name in of and of[name].ns for of in lost)]
        body = [
            (
                CLASS_NAMES[name],
                *(amount(of.get(name), row) for of, row in zip(lost, rows, strict=True)),
            )
            for name in shown
        ]
        total = [(row.step_ns or 0) - (row.base_step_ns or 0) for row in rows]
        body.append(("total", *(signed_time(ns) for ns in total)))
        title = "Where the efficiency goes: what a step has more of than that of the fewest GPUs"
        yield lay_out(title, ("", *(row.label for row in rows)), tuple(body))


def verdicts_table(summary: Summary) -> Iterator[Table]:
    """What the report of a recording says first."""
    body = [(row.label, row.finding) for row in summary.rows if row.finding and row.classes]
    yield lay_out("What each recording says first (`gputrace analyze`)", ("", "evidence"), body)


def classes_table(summary: Summary) -> Iterator[Table]:
    """Where a step goes in each configuration."""
    rows = [row for row in summary.rows if row.classes is not None]
    shown = [name for name in CLASSES if any((row.classes or {}).get(name) for row in rows)]
    if len(rows) <= _MOST_ACROSS:
        body = list(_classes_down(rows, shown))
        body.append(("total", *(time(row.recorded_step_ns) for row in rows)))
        header: tuple[str, ...] = ("", *(row.label for row in rows))
    else:
        body = [
            (
                row.label,
                time(row.recorded_step_ns),
                *(percent(_share(row, name)) for name in shown),
            )
            for row in rows
        ]
        header = ("", "step", *(_SHORT.get(name, name) for name in shown))
    if rows:
        over = "steps and GPUs" if any(row.gpus > 1 for row in rows) else "steps"
        yield lay_out(f"Where the time of a step goes (mean over {over})", header, tuple(body))


def _classes_down(rows: Sequence[Row], shown: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A line for each class; that of communication is followed by what of it is waiting."""
    for name in shown:
        yield (CLASS_NAMES[name], *(time((row.classes or {}).get(name)) for row in rows))
        if name == "communication" and any(row.wait_ns for row in rows):
            yield ("of that waiting", *(time(row.wait_ns) for row in rows))


def _share(row: Row, name: str) -> float | None:
    return (row.classes or {}).get(name, 0) / (row.recorded_step_ns or 1) or None
