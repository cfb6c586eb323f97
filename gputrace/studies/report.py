"""Tables of a study's results, rendered as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from rich.cells import cell_len
from rich.text import Text

from gputrace.analyzers.compare.results import Loss
from gputrace.analyzers.compare.runs import Bounds
from gputrace.model.time_class import CLASSES
from gputrace.report import render_as
from gputrace.report.json import one_line, plain
from gputrace.report.markdown import escape, render_table
from gputrace.report.tables import CLASS_NAMES, Table
from gputrace.report.text import open_console, print_table
from gputrace.sanitize import cell, clean
from gputrace.studies.configurations import device_word, label
from gputrace.studies.database import Database
from gputrace.studies.results import Check, Efficiency, PairOfGpus, Placement, Row, Spread, Summary
from gputrace.units import format_bytes, format_ns

FORMATS: Final = {
    "text": "gputrace.studies.report.render_text",
    "json": "gputrace.studies.report.render_json",
    "markdown": "gputrace.studies.report.render_markdown",
    "csv": "gputrace.studies.report.render_csv",
}


def render(summary: Summary, database: Database, form: str) -> str:
    """Render the results in one of `FORMATS`; the JSON also has the single runs."""
    if form == "json":
        return render_json(summary, database)
    return render_as(summary, form, FORMATS)


_WRAPPED: Final = 16
"""Width of a column that `print_table` wraps."""


def render_text(summary: Summary, width: int = 80, color: bool = False) -> str:
    """Render the results, at most ``width`` columns wide; with ``color``, escape sequences."""
    out = io.StringIO()
    console = open_console(out, width, color)
    console.print(Text(clean(summary.title), style="bold"))
    if summary.question:
        console.print(Text(clean(summary.question, 1000)))
    console.print(Text(headline(summary), style="green" if _all_well(summary) else "yellow"))
    if summary.same:
        console.print(Text(f"The same in all runs: {clean(same(summary))}.", style="dim"))
    console.print()
    for table in tables(summary):
        print_table(console, fitted(table, width - 2))
    for note in summary.notes:
        console.print(Text(f"note: {clean(note, 1000)}", style="dim"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _all_well(summary: Summary) -> bool:
    done = all(row.done and not row.failed for row in summary.rows)
    return done and all(check.ok is not False for check in summary.checks)


def fitted(table: Table, width: int) -> Table:
    """Truncate the longest columns of a table, and if need be drop the last ones, until it fits."""
    while (over := sum(widths := _widths(table)) - width) > 0 and len(table.header) > 2:
        longest = max(range(len(widths)), key=widths.__getitem__)
        least = max(width // 3, 12)
        if widths[longest] > least:
            table = _cut(table, longest, max(widths[longest] - over, least) - 1)
        else:
            table = Table(table.title, table.header[:-1], tuple(row[:-1] for row in table.rows))
    return table


def _widths(table: Table) -> list[int]:
    """Return the width of each column, with its spacing; some columns wrap."""
    return [
        1 + min(max(map(cell_len, column)), _WRAPPED if column[0] == "evidence" else 1 << 16)
        for column in zip(table.header, *table.rows, strict=True)
    ]


def _cut(table: Table, column: int, most: int) -> Table:
    """Truncate the cells of one column."""
    rows = (
        tuple(clean(cell, most) if at == column else cell for at, cell in enumerate(row))
        for row in table.rows
    )
    header = tuple(
        clean(cell, most) if at == column else cell for at, cell in enumerate(table.header)
    )
    return Table(table.title, header, tuple(rows))


def render_markdown(summary: Summary) -> str:
    """Render GitHub Markdown; text from scripts is escaped."""
    parts = [f"**{escape(summary.title)}**"]
    if summary.question:
        parts.append(escape(summary.question))
    parts.append(escape(headline(summary)))
    if summary.same:
        parts.append(f"The same in all runs: {escape(same(summary))}.")
    parts += [render_table(table) for table in tables(summary)]
    if summary.notes:
        parts.append("\n".join(f"- {escape(note)}" for note in summary.notes))
    return "\n\n".join(parts) + "\n"


_SPREADS: Final = ("rate", "rate_of_median", "step_ns", "target_s")
_LEFT_OUT: Final = ("label", "settings", "gpus", "classes", *_SPREADS)
_PLAIN: Final = tuple(field.name for field in fields(Row) if field.name not in _LEFT_OUT)


def render_csv(summary: Summary) -> str:
    """Render CSV (RFC 4180) with a header line; times in nanoseconds, unknown values empty."""
    settings = tuple(dict.fromkeys(name for row in summary.rows for name in row.settings))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    spreads = [f"{name}{end}" for name in _SPREADS for end in ("", "_low", "_high")]
    writer.writerow([*map(cell, settings), *spreads, *_PLAIN, *(f"{name}_ns" for name in CLASSES)])
    for row in summary.rows:
        values = (
            *(row.settings.get(name) for name in settings),
            *(value for name in _SPREADS for value in _spread(getattr(row, name))),
            *(getattr(row, name) for name in _PLAIN),
            *((row.classes or {}).get(name) for name in CLASSES),
        )
        writer.writerow(map(cell, values))
    return out.getvalue()


def _spread(figure: Spread | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if figure is None else (figure.median, figure.low, figure.high)


def render_json(summary: Summary, database: Database | None = None) -> str:
    """Render one line of JSON; with a database, including its study, configurations and runs."""
    answer = plain(summary)
    assert isinstance(answer, dict)
    return one_line(answer if database is None else answer | _kept(database))


def _kept(database: Database) -> dict[str, object]:
    return {
        "study": plain(database.study()),
        "configurations": plain(database.configurations()),
        "runs": plain(database.runs()),
    }


_MOST_ACROSS: Final = 5
"""Maximum configurations as columns of a table of classes; more of them are rows."""
_SHORT: Final = {
    "communication": "comm",
    "other_copy": "copies",
    "recorder": "rec.",
    "data_feeding": "data",
    "other_idle": "idle?",
}


def efficiency_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of speed-up and efficiency relative to the fewest GPUs."""
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
    """Yield tables of what each class (row) adds to the base's step, a configuration a column."""
    every = [row for row in summary.efficiency if row.losses]
    for start in range(0, len(every), _MOST_ACROSS):
        rows = every[start : start + _MOST_ACROSS]
        lost = [{loss.name: loss for loss in row.losses} for row in rows]
        shown = [name for name in CLASSES if any(name in row and row[name].ns for row in lost)]
        body = [
            (
                CLASS_NAMES[name],
                *(amount(loss.get(name), row) for loss, row in zip(lost, rows, strict=True)),
            )
            for name in shown
        ]
        total = [(row.step_ns or 0) - (row.base_step_ns or 0) for row in rows]
        body.append(("total", *(signed_time(ns) for ns in total)))
        title = "Where the efficiency goes: what a step has more of than that of the fewest GPUs"
        yield lay_out(title, ("", *(row.label for row in rows)), tuple(body))


def verdicts_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of the first finding of each recording."""
    body = [(row.label, row.finding) for row in summary.rows if row.finding and row.classes]
    yield lay_out("What each recording says first (`gputrace analyze`)", ("", "evidence"), body)


def classes_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of where a step's time goes in each configuration."""
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
    """Yield a row for each class; that of communication is followed by its waiting part."""
    for name in shown:
        yield (CLASS_NAMES[name], *(time((row.classes or {}).get(name)) for row in rows))
        if name == "communication" and any(row.wait_ns for row in rows):
            yield ("of that waiting", *(time(row.wait_ns) for row in rows))


def _share(row: Row, name: str) -> float | None:
    return (row.classes or {}).get(name, 0) / (row.recorded_step_ns or 1) or None


_CURES: Final = {"pinned": "pinned, own stream"}
"""Labels of cures whose id is also a setting but which change more than that."""
_EVEN: Final = 0.02
"""Relative difference below which cards count as equally fast."""


def effects_table(summary: Summary) -> Iterator[Table]:
    """Yield a table per setting: its effect with all other settings equal."""
    for name in dict.fromkeys(row.setting for row in summary.effects):
        body = [
            (
                f"{row.value} beside {row.base}" + (f" ({row.others})" if row.others else ""),
                times(row.speed_up),
                times_range(row.bounds),
                signed_time(row.gap_ns),
            )
            for row in summary.effects
            if row.setting == name
        ]
        yield lay_out(
            f"What changes with {name}", ("", "samples/s", "(range)", "idle a step"), body
        )


def predictions_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of predicted and measured steps."""
    some = any(row.made < row.recordings for row in summary.predictions)
    body = [
        (
            row.change + (f" ({row.label})" if row.label != "all" else ""),
            _CURES.get(row.cure, row.cure),
            time(row.before_ns),
            time(row.predicted_ns),
            time(row.measured_ns),
            signed_percent(row.error),
            f"{row.made} of {row.recordings}" if some else "",
            f"{time(row.low_ns)}–{time(row.high_ns)}",
            " → ".join(filter(None, (time(row.gap_before_ns), time(row.gap_after_ns)))),
        )
        for row in summary.predictions
    ]
    header = (
        *("", "cure", "step", "predicted", "measured", "error"),
        *("foretold by", "(range)", "idle a step"),
    )
    yield lay_out("What the recording without it foretold, and what came", header, body)


def placements_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of compute time and memory, with a column for each GPU."""
    most = max((len(row.shares) for row in summary.placements), default=0)
    body = tuple(_placement(row, most) for row in summary.placements)
    header = ("", "gpu 0 / others", *(f"gpu {number}" for number in range(most)))
    yield lay_out("Compute time a step, and memory, of each GPU", header, body)


def _placement(row: Placement, most: int) -> tuple[str, ...]:
    cells = [
        ", ".join(filter(None, (time(s.compute_ns), memory(s.memory_bytes)))) for s in row.shares
    ]
    return (row.label, times(row.skew), *cells, *[""] * (most - len(cells)))


def pairs_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of pairs of GPUs, the fastest first."""
    body = [
        (
            row.label,
            row.link or "unknown",
            bandwidth(row.bandwidth),
            time(row.step_ns),
            time(row.communication_ns),
            rate(row.rate),
        )
        for row in summary.pairs
    ]
    header = ("", "link", "bandwidth", "step", "communication", "samples/s")
    yield lay_out(f"Pairs of GPUs{links_told(summary.pairs)}", header, body)


def links_told(pairs: tuple[PairOfGpus, ...]) -> str:
    """Return the end of the title: what the kinds of links allow to conclude."""
    kinds = {pair.link for pair in pairs}
    if kinds == {""}:
        return ": what links them is not known"
    if len(kinds) == 1:
        return f": all are linked by {kinds.pop()}, so none can be told from another by its link"
    return ""


def cards_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of cards with their clocks and speeds."""
    body = [
        (
            row.label,
            row.name,
            clock(row.sm_clock_mhz),
            clock(row.sm_clock_max_mhz),
            time(row.step_ns),
            rate(row.rate),
            times(row.beside),
        )
        for row in summary.cards
    ]
    apart = [abs(row.beside - 1) for row in summary.cards if row.beside is not None]
    spread = f": all within {_EVEN:.0%}" if apart and max(apart) <= _EVEN else ""
    header = ("", "card", "SM clock", "at most", "step", "samples/s", "beside the middle")
    yield lay_out(f"Cards, each beside the middle one{spread}", header, body)


NOTHING = "–"


def lay_out(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table without empty columns, and with a dash in empty cells."""
    body = list(rows)
    kept = [at for at in range(len(header)) if not at or any(row[at] for row in body)]
    return Table(
        title,
        tuple(header[at] for at in kept),
        tuple(tuple(row[at] or NOTHING for at in kept) for row in body),
    )


def time(ns: float | None) -> str:
    """Format as ``12.3 ms``."""
    return "" if ns is None else format_ns(ns) if ns else "0"


def seconds(value: float | None) -> str:
    """Format seconds like `time`."""
    return "" if value is None else time(value * 1e9)


def rate(value: float | None) -> str:
    """Format samples per second as ``12,345``, ``812``, ``7.24``."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def range_of(figure: Spread, show: Callable[[float], str]) -> str:
    """Format as ``801–823``."""
    low, high = show(figure.low), show(figure.high)
    return low if low == high else f"{low}–{high}"


def number(value: float) -> str:
    """Format with three digits."""
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    """Format as ``12.3%``."""
    return "" if share is None else f"{share:.1%}"


def signed_percent(share: float | None) -> str:
    """Format as ``+1.2%``."""
    return "" if share is None else f"{share:+.1%}"


def bandwidth(a_second: int | None) -> str:
    """Format as ``21.3 GB/s``."""
    return "" if a_second is None else f"{format_bytes(a_second)}/s"


def memory(count: int | None) -> str:
    """Format as ``1.29 GiB``, binary like nvidia-smi."""
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def clock(mhz: float | None) -> str:
    """Format as ``1,980 MHz``."""
    return "" if mhz is None else f"{mhz:,.0f} MHz"


def times_range(bounds: Bounds | None) -> str:
    """Format as ``1.21x–1.25x``."""
    return "" if bounds is None else f"{times(bounds.low)}–{times(bounds.high)}"


def times(ratio: float | None) -> str:
    """Format as ``1.23x``."""
    return "" if ratio is None else f"{ratio:.2f}x"


def signed_time(ns: int | None) -> str:
    """Format as ``+1.2 ms``, ``-310 us``, ``0``."""
    return "" if ns is None else f"+{format_ns(ns)}" if ns > 0 else time(ns)


def amount(loss: Loss | None, row: Efficiency) -> str:
    """Format what a class adds, and its share of the base's step."""
    if loss is None or not loss.ns:
        return ""
    share = loss.ns / row.base_step_ns if row.base_step_ns else 0.0
    return f"{signed_time(loss.ns)} ({share:+.1%})"


def headline(summary: Summary) -> str:
    """Return a sentence on how many runs of how many configurations are done, failed, etc."""
    done, failed, skipped = (
        sum(getattr(row, name) for row in summary.rows) for name in ("done", "failed", "skipped")
    )
    are, end = "are" if done != 1 else "is", "s" * (len(summary.rows) != 1)
    parts = [f"{done} run{'s' * (done != 1)} of {len(summary.rows)} configuration{end} {are} done"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{skipped} skipped"] if skipped else []
    parts += [f"{summary.left} still to be run"] if summary.left else []
    wrong = sum(check.ok is False for check in _compared(summary))
    parts += [f"in {wrong} the recording does not hold"] if wrong else []
    return ", ".join(parts) + "."


def same(summary: Summary) -> str:
    """Format the settings that do not vary."""
    return label(summary.same, summary.same)


def tables(summary: Summary) -> list[Table]:
    """Return all tables that have rows."""
    made = (table for make in _TABLES for table in make(summary))
    return [table for table in made if table.rows]


def runs_table(summary: Summary) -> Iterator[Table]:
    """Yield the table of configurations with their speeds."""
    body = [
        (row.label, _state(row), *(cell(row) for _, cell in _RUN_COLUMNS)) for row in summary.rows
    ]
    header = ("", "not done", *(head for head, _ in _RUN_COLUMNS))
    yield lay_out("The runs", header, body)


def _state(row: Row) -> str:
    """Return the number of failed and skipped runs; empty if all are done."""
    counts = (("failed", row.failed), ("skipped", row.skipped))
    return ", ".join(f"{count} {word}" for word, count in counts if count)


def _spread_cell(get: Callable[[Row], Spread | None], show: Callable[[float], str]) -> _Cell:
    """Return a formatter of the median."""

    def cell(row: Row) -> str:
        figure = get(row)
        return "" if figure is None else show(figure.median)

    return cell


def _range(get: Callable[[Row], Spread | None], show: Callable[[float], str]) -> _Cell:
    """Return a formatter of the range of several repeats."""

    def cell(row: Row) -> str:
        figure = get(row)
        return "" if figure is None or figure.count < 2 else range_of(figure, show)

    return cell


_Cell = Callable[[Row], str]
_RUN_COLUMNS: Final[tuple[tuple[str, _Cell], ...]] = (
    ("samples/s", _spread_cell(lambda row: row.rate, rate)),
    ("(range)", _range(lambda row: row.rate, rate)),
    ("step", _spread_cell(lambda row: row.step_ns, time)),
    ("overhead", lambda row: signed_percent(row.overhead)),
    ("to target", _spread_cell(lambda row: row.target_s, seconds)),
    ("accuracy", lambda row: percent(row.accuracy)),
    ("data wait a step", lambda row: time(row.data_wait_ns)),
    ("by median step", _spread_cell(lambda row: row.rate_of_median, rate)),
    ("loss", lambda row: _losses(row)),
)


def _losses(row: Row) -> str:
    if row.loss_first is None or row.loss_last is None:
        return ""
    return f"{number(row.loss_first)} → {number(row.loss_last)}"


def checks_table(summary: Summary) -> Iterator[Table]:
    """Yield the table that compares recorded steps and waits with the scripts' own."""
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
    """Return the checks of completed scripts; the notes say why others failed."""
    return [check for check in summary.checks if check.steps_run is not None]


def range_of_counts(counts: Sequence[int]) -> str:
    """Format as ``20`` or ``19 to 20``; with the number of ranks if there are several."""
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
