"""The tables of a study, as text cells that every view lays out in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gputrace.bench.answer import Check, Row, Spread, Summary
from gputrace.bench.groups import label
from gputrace.bench.views.cells import (
    lay_out,
    number,
    percent,
    range_of,
    rate,
    seconds,
    signed_percent,
    time,
)
from gputrace.bench.views.class_tables import (
    classes_table,
    efficiency_table,
    losses_table,
    verdicts_table,
)
from gputrace.bench.views.more_tables import (
    cards_table,
    effects_table,
    pairs_table,
    placements_table,
    predictions_table,
)
from gputrace.views.tables import Table


def headline(summary: Summary) -> str:
    """How many runs came of how many configurations, and what did not."""
    done, failed, skipped = (
        sum(getattr(row, name) for row in summary.rows) for name in ("done", "failed", "skipped")
    )
    are, end = "are" if done != 1 else "is", "s" * (len(summary.rows) != 1)
    told = [f"{done} run{'s' * (done != 1)} of {len(summary.rows)} configuration{end} {are} done"]
    told += [f"{failed} failed"] if failed else []
    told += [f"{skipped} skipped"] if skipped else []
    told += [f"{summary.left} still to be run"] if summary.left else []
    wrong = sum(check.ok is False for check in _compared(summary))
    told += [f"in {wrong} the recording does not hold"] if wrong else []
    return ", ".join(told) + "."


def same(summary: Summary) -> str:
    """The settings that do not vary."""
    return label(summary.same, summary.same)


def tables(summary: Summary) -> list[Table]:
    """All tables that there is something to say in."""
    made = (table for make in _TABLES for table in make(summary))
    return [table for table in made if table.rows]


def runs_table(summary: Summary) -> Iterator[Table]:
    """A row per configuration: what it did in a second."""
    body = [
        (row.label, _state(row), *(cell(row) for _, cell in _RUN_COLUMNS)) for row in summary.rows
    ]
    header = ("", "not done", *(head for head, _ in _RUN_COLUMNS))
    yield lay_out("The runs", header, body)


def _state(row: Row) -> str:
    """Nothing where all is done; the notes say why."""
    told = (("failed", row.failed), ("skipped", row.skipped))
    return ", ".join(f"{count} {word}" for word, count in told if count)


def _spread(get: Callable[[Row], Spread | None], show: Callable[[float], str]) -> _Cell:
    """The median."""

    def cell(row: Row) -> str:
        figure = get(row)
        return "" if figure is None else show(figure.median)

    return cell


def _range(get: Callable[[Row], Spread | None], show: Callable[[float], str]) -> _Cell:
    """The least and the greatest of several repeats."""

    def cell(row: Row) -> str:
        figure = get(row)
        return "" if figure is None or figure.count < 2 else range_of(figure, show)

    return cell


_Cell = Callable[[Row], str]
_RUN_COLUMNS: Final[tuple[tuple[str, _Cell], ...]] = (
    ("samples/s", _spread(lambda row: row.rate, rate)),
    ("(range)", _range(lambda row: row.rate, rate)),
    ("step", _spread(lambda row: row.step_ns, time)),
    ("overhead", lambda row: signed_percent(row.overhead)),
    ("to target", _spread(lambda row: row.target_s, seconds)),
    ("accuracy", lambda row: percent(row.accuracy)),
    ("data wait a step", lambda row: time(row.data_wait_ns)),
    ("by median step", _spread(lambda row: row.rate_of_median, rate)),
    ("loss", lambda row: _losses(row)),
)


def _losses(row: Row) -> str:
    if row.loss_first is None or row.loss_last is None:
        return ""
    return f"{number(row.loss_first)} → {number(row.loss_last)}"


def checks_table(summary: Summary) -> Iterator[Table]:
    """Steps and waits of host recordings beside what the scripts say."""
    host = all(row.classes is None for row in summary.rows)
    compared = _compared(summary)
    if not (host or any(check.ok is False for check in compared)):
        return
    body = [
        (
            check.label,
            "" if check.steps_run is None else str(check.steps_run),
            range_of_counts(list(check.steps_found.values())),
            seconds(check.wait_script_s),
            seconds(check.wait_recorded_s),
            signed_percent(check.difference),
            "yes" if check.ok else "NO",
        )
        for check in compared
    ]
    header = ("", "steps run", "found", "all data waits", "recorded", "differ", "ok")
    yield lay_out("The recordings beside what the scripts say of themselves", header, body)


def _compared(summary: Summary) -> list[Check]:
    """Those of scripts that came to their end; the notes say why others did not."""
    return [check for check in summary.checks if check.steps_run is not None]


def range_of_counts(counts: Sequence[int]) -> str:
    """``20``, ``19 to 20``; how many ranks, where there are several."""
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    text = str(least) if least == most else f"{least} to {most}"
    return text if len(counts) == 1 else f"{len(counts)} × {text}"


_TABLES: Final[tuple[Callable[[Summary], Iterator[Table]], ...]] = (
    runs_table,
    checks_table,
    efficiency_table,
    losses_table,
    effects_table,
    predictions_table,
    placements_table,
    pairs_table,
    cards_table,
    classes_table,
    verdicts_table,
)
