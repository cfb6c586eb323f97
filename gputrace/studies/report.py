"""Tables of a study's results, as text, Markdown, CSV and JSON, and its HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Final, TypeVar

from rich.text import Text

from gputrace.model.comparison import Loss
from gputrace.model.time_class import CLASSES
from gputrace.report import plain, to_json
from gputrace.report.html.charts import plain_text
from gputrace.report.html.page import common_variables, render_page
from gputrace.report.markdown_html import escape, render_table
from gputrace.report.tables import CLASS_NAMES, Columns, Table
from gputrace.report.text import open_console, print_table, without_blanks
from gputrace.sanitize import cell, clean
from gputrace.studies.charts import all_scale, find_charts
from gputrace.studies.database import Database
from gputrace.studies.results import (
    CardResult,
    ConfigurationResult,
    Effect,
    Efficiency,
    PairOfGpus,
    Predicted,
    RecordingCheck,
    Spread,
    Summary,
)
from gputrace.studies.summary import count_range, device_word, label
from gputrace.units import format_bytes, format_change, format_ns, format_number


def render_text(summary: Summary, width: int = 80, color: bool = False) -> str:
    """Render the results, at most ``width`` columns wide; with ``color``, escape sequences."""
    console = open_console(width, color)
    console.print(Text(clean(summary.title), style="bold"))
    if summary.question:
        console.print(Text(clean(summary.question, 1000)))
    well = all(row.done and not row.failed for row in summary.rows) and summary.holds
    console.print(Text(headline(summary), style="green" if well else "yellow"))
    if summary.same:
        console.print(Text(f"The same in all runs: {clean(same(summary))}.", style="dim"))
    console.print()
    for table in tables(summary):
        print_table(console, table)
    for note in summary.notes:
        console.print(Text(f"note: {clean(note, 1000)}", style="dim"))
    return without_blanks(console)


def render_html(summary: Summary) -> str:
    """Render one HTML page with charts, without external resources: it opens offline."""
    charts = find_charts(summary)
    failed = any(row.failed for row in summary.rows)
    rates = "; ".join(f"{row.label}: {rate(row.rate.median)}" for row in summary.rows if row.rate)
    scaled = " The dashed line is what as many GPUs would do at the efficiency of the fewest."
    shares = (f"{row.label}: {row.efficiency:.0%}" for row in summary.efficiency)
    content = SimpleNamespace(
        title=plain_text(summary.title, 300),
        question=plain_text(summary.question, 1000),
        headline=headline(summary),
        severity="high" if failed or not summary.holds else "info",
        same=plain_text(same(summary), 1000) if summary.same else "",
        tables=tables(summary),
        notes=[plain_text(note, 1000) for note in summary.notes],
        # Each chart in words.
        summary={
            "rates": plain_text(f"{rates}.{scaled if all_scale(summary) else ''}", 1000),
            "efficiency": plain_text(f"{'; '.join(shares)}.", 1000),
            "losses": "What a step has more of than that of the fewest GPUs, to the right, and "
            "what it has less of, to the left. Both sides together are the loss.",
            "classes": "The mean steady step of each configuration, by what its GPUs do.",
            "compute": "A step's kernels that compute, GPU by GPU.",
            "memory": "The most that was in use on each card, of all processes.",
        },
    )
    return render_page("study.html", charts, common_variables(charts) | {"content": content})


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
_PLAIN: Final = tuple(
    field.name for field in fields(ConfigurationResult) if field.name not in _LEFT_OUT
)


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
            *(
                getattr(getattr(row, name), part, None)
                for name in _SPREADS
                for part in ("median", "low", "high")
            ),
            *(getattr(row, name) for name in _PLAIN),
            *((row.classes or {}).get(name) for name in CLASSES),
        )
        writer.writerow(map(cell, values))
    return out.getvalue()


def render_json(summary: Summary, database: Database | None = None) -> str:
    """Render one line of JSON; with a database, including its study, configurations and runs."""
    answer = plain(summary)
    assert isinstance(answer, dict)
    if database is not None:
        plan = database.plan()
        answer |= {"study": plain(plan.study), "configurations": plain(plan.configurations)}
        answer["runs"] = plain(database.runs())
    return to_json(answer)


FORMATS: Final[Mapping[str, Callable[..., str]]] = {
    "text": render_text,
    "json": render_json,
    "markdown": render_markdown,
    "csv": render_csv,
}


def render(summary: Summary, database: Database, form: str) -> str:
    """Render the results in one of `FORMATS`; the JSON also has the single runs."""
    return FORMATS[form](summary, *([database] if form == "json" else []))


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
    settings = dict.fromkeys(row.setting for row in summary.effects)
    apart = [abs(row.beside - 1) for row in summary.cards if row.beside is not None]
    even = f": all within {_EVEN:.0%}" if apart and max(apart) <= _EVEN else ""
    made = [
        _table("The runs", _RUNS, summary.rows),
        _checks_table(summary),
        _table(
            f"Speed-up and efficiency; the batch of a {device_word(summary.same)} stays",
            _EFFICIENCY,
            summary.efficiency,
        ),
        *_losses_tables(summary),
        *(
            _table(
                f"What changes with {name}",
                _EFFECTS,
                [row for row in summary.effects if row.setting == name],
            )
            for name in settings
        ),
        _predictions_table(summary),
        _placements_table(summary),
        _table(f"Pairs of GPUs{_links_note(summary.pairs)}", _PAIRS, summary.pairs),
        _table(f"Cards, each beside the middle one{even}", _CARDS, summary.cards),
        _classes_table(summary),
        _table(
            "What each recording says first (`gputrace analyze`)",
            (("", lambda row: row.label), ("evidence", lambda row: row.finding)),
            [row for row in summary.rows if row.finding and row.classes],
        ),
    ]
    return [table for table in made if table.rows]


_T = TypeVar("_T")


def _table(title: str, columns: Columns[_T], rows: Iterable[_T]) -> Table:
    """Build a table with a row for each object."""
    header, cells = zip(*columns, strict=True)
    return _fill(title, header, ([show(row) for show in cells] for row in rows))


def _fill(title: str, header: Sequence[str], body: Iterable[Sequence[str]]) -> Table:
    """Build a table with a dash in empty cells."""
    return Table(title, tuple(header), tuple(tuple(cell or "–" for cell in row) for row in body))


def _formatter(template: str) -> Callable[[float | None], str]:
    """Return a formatter that leaves unknown values empty."""
    return lambda value: "" if value is None else template.format(value)


_percent: Final = _formatter("{:.1%}")
_signed_percent: Final = _formatter("{:+.1%}")
_times: Final = _formatter("{:.2f}x")
_clock: Final = _formatter("{:,.0f} MHz")


def _memory(count: int | None) -> str:
    """Format as ``1.29 GiB``, binary like nvidia-smi."""
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def _time(ns: float | None) -> str:
    """Format as ``12.3 ms``."""
    return "" if ns is None else format_ns(ns) if ns else "0"


def _seconds(value: float | None) -> str:
    return "" if value is None else _time(value * 1e9)


def rate(value: float | None) -> str:
    """Format samples per second as ``12,345``, ``812``, ``7.24``."""
    return "" if value is None else format_number(value)


def _bounds(row: Effect | Efficiency) -> str:
    """Format the bounds of a speed-up as ``1.21x–1.25x``."""
    return "" if row.bounds is None else f"{_times(row.bounds.low)}–{_times(row.bounds.high)}"


def _state(row: ConfigurationResult) -> str:
    """Return the number of failed and skipped runs; empty if all are done."""
    counts = (("failed", row.failed), ("skipped", row.skipped))
    return ", ".join(f"{count} {word}" for word, count in counts if count)


def _median(name: str, show: Callable[[float], str]) -> Callable[[ConfigurationResult], str]:
    """Return a formatter of the median of a `Spread`."""

    def cell(row: ConfigurationResult) -> str:
        spread: Spread | None = getattr(row, name)
        return "" if spread is None else show(spread.median)

    return cell


def _rates(row: ConfigurationResult) -> str:
    """Format the range of several repeats as ``801–823``."""
    if row.rate is None or row.rate.count < 2:
        return ""
    return "–".join(dict.fromkeys((rate(row.rate.low), rate(row.rate.high))))


def _losses(row: ConfigurationResult) -> str:
    if row.loss_first is None or row.loss_last is None:
        return ""
    return f"{format_number(row.loss_first)} → {format_number(row.loss_last)}"


_RUNS: Final[Columns[ConfigurationResult]] = (
    ("", lambda row: row.label),
    ("not done", _state),
    ("samples/s", _median("rate", rate)),
    ("(range)", _rates),
    ("step", _median("step_ns", _time)),
    ("overhead", lambda row: _signed_percent(row.overhead)),
    ("to target", _median("target_s", _seconds)),
    ("accuracy", lambda row: _percent(row.accuracy)),
    ("data wait a step", lambda row: _time(row.data_wait_ns)),
    ("by median step", _median("rate_of_median", rate)),
    ("loss", _losses),
)


def _steps_found(check: RecordingCheck) -> str:
    """Format as ``20`` or ``19 to 20``; with the number of ranks if there are several."""
    counts = check.steps_found.values()
    return f"{len(counts)} × {count_range(counts)}" if len(counts) > 1 else count_range(counts)


_CHECKS: Final[Columns[RecordingCheck]] = (
    ("", lambda check: check.label),
    ("steps run", lambda check: str(check.steps_run)),
    ("found", _steps_found),
    ("data waits", lambda check: _seconds(check.wait_script_s)),
    ("waits recorded", lambda check: _seconds(check.wait_recorded_s)),
    ("differ", lambda check: _signed_percent(check.difference)),
    ("ok", lambda check: "yes" if check.ok else "NO"),
)


def _checks_table(summary: Summary) -> Table:
    """Return the table that compares recorded steps and waits with the scripts' own.

    Empty if all agree, unless only hosts were recorded.
    """
    host, checks = all(row.classes is None for row in summary.rows), _compared(summary)
    shown = checks if host or any(check.ok is False for check in checks) else []
    return _table("The recordings beside what the scripts say of themselves", _CHECKS, shown)


def _compared(summary: Summary) -> list[RecordingCheck]:
    """Return the checks of completed scripts; the notes say why others failed."""
    return [check for check in summary.checks if check.steps_run is not None]


_EFFICIENCY: Final[Columns[Efficiency]] = (
    ("", lambda row: row.label),
    ("samples/s", lambda row: rate(row.rate)),
    ("speed-up", lambda row: _times(row.speed_up)),
    ("(range)", _bounds),
    ("efficiency", lambda row: f"{row.efficiency:.0%}"),
)
_EFFECTS: Final[Columns[Effect]] = (
    ("", lambda row: f"{row.value} beside {row.base}" + (f" ({row.others})" * bool(row.others))),
    ("samples/s", lambda row: _times(row.speed_up)),
    ("(range)", _bounds),
    ("idle a step", lambda row: "" if row.gap_ns is None else format_change(row.gap_ns)),
)

_MOST_ACROSS: Final = 5
"""Maximum configurations as columns of a table of classes; more of them are rows."""


def _losses_tables(summary: Summary) -> Iterator[Table]:
    """Yield tables of what each class (row) adds to the base's step, a configuration a column."""
    every = [row for row in summary.efficiency if row.losses]
    for start in range(0, len(every), _MOST_ACROSS):
        rows = every[start : start + _MOST_ACROSS]
        lost = [{loss.name: loss for loss in row.losses} for row in rows]
        shown = [name for name in CLASSES if any(name in row and row[name].ns for row in lost)]
        body = [
            [
                CLASS_NAMES[name],
                *(_amount(loss.get(name), row) for loss, row in zip(lost, rows, strict=True)),
            ]
            for name in shown
        ]
        total = [(row.step_ns or 0) - (row.base_step_ns or 0) for row in rows]
        body.append(["total", *map(format_change, total)])
        title = "Where the efficiency goes: what a step has more of than that of the fewest GPUs"
        yield _fill(title, ["", *(row.label for row in rows)], body)


def _amount(loss: Loss | None, row: Efficiency) -> str:
    """Format what a class adds, and its share of the base's step."""
    if loss is None or not loss.ns:
        return ""
    share = loss.ns / row.base_step_ns if row.base_step_ns else 0.0
    return f"{format_change(loss.ns)} ({share:+.1%})"


_CURES: Final = {"pinned": "pinned, own stream"}
"""Labels of cures whose id is also a setting but which change more than that."""
_PREDICTIONS: Final[Columns[Predicted]] = (
    ("", lambda row: row.change + (f" ({row.label})" if row.label != "all" else "")),
    ("cure", lambda row: _CURES.get(row.cure, row.cure)),
    ("step", lambda row: _time(row.before_ns)),
    ("predicted", lambda row: _time(row.predicted_ns)),
    ("measured", lambda row: _time(row.measured_ns)),
    ("error", lambda row: _signed_percent(row.error)),
    ("predicted by", lambda row: f"{row.made} of {row.recordings}"),
    ("(range)", lambda row: f"{_time(row.low_ns)}–{_time(row.high_ns)}"),
    (
        "idle a step",
        lambda row: " → ".join(filter(None, map(_time, (row.gap_before_ns, row.gap_after_ns)))),
    ),
)


def _predictions_table(summary: Summary) -> Table:
    """Return the table of predicted and measured steps."""
    some = any(row.made < row.recordings for row in summary.predictions)
    columns = [each for each in _PREDICTIONS if some or each[0] != "predicted by"]
    title = "What the recording without it predicted, and what was measured"
    return _table(title, columns, summary.predictions)


def _placements_table(summary: Summary) -> Table:
    """Return the table of compute time and memory, with a column for each GPU."""
    most = max((len(row.shares) for row in summary.placements), default=0)
    header = ["", "gpu 0 / others", *(f"gpu {number}" for number in range(most))]
    body = []
    for row in summary.placements:
        cells = [
            ", ".join(filter(None, (_time(share.compute_ns), _memory(share.memory_bytes))))
            for share in row.shares
        ]
        body.append([row.label, _times(row.skew), *cells, *[""] * (most - len(cells))])
    return _fill("Compute time a step, and memory, of each GPU", header, body)


_PAIRS: Final[Columns[PairOfGpus]] = (
    ("", lambda row: row.label),
    ("link", lambda row: row.link or "unknown"),
    ("bandwidth", lambda row: "" if row.bandwidth is None else f"{format_bytes(row.bandwidth)}/s"),
    ("step", lambda row: _time(row.step_ns)),
    ("communication", lambda row: _time(row.communication_ns)),
    ("samples/s", lambda row: rate(row.rate)),
)


def _links_note(pairs: tuple[PairOfGpus, ...]) -> str:
    """Return the end of the title: what the kinds of links allow to conclude."""
    kinds = {pair.link for pair in pairs}
    if kinds == {""}:
        return ": their link is unknown"
    if len(kinds) == 1:
        return f": all are linked by {kinds.pop()}, so links explain no difference"
    return ""


_EVEN: Final = 0.02
"""Relative difference below which cards count as equally fast."""
_CARDS: Final[Columns[CardResult]] = (
    ("", lambda row: row.label),
    ("card", lambda row: row.name),
    ("SM clock", lambda row: _clock(row.sm_clock_mhz)),
    ("at most", lambda row: _clock(row.sm_clock_max_mhz)),
    ("step", lambda row: _time(row.step_ns)),
    ("samples/s", lambda row: rate(row.rate)),
    ("beside the middle", lambda row: _times(row.beside)),
)


_SHORT: Final = {
    "communication": "comm",
    "other_copy": "copies",
    "recorder": "rec.",
    "data_feeding": "data",
    "other_idle": "idle?",
}


def _classes_table(summary: Summary) -> Table:
    """Return the table of where a step's time goes in each configuration."""
    known = [(row, row.classes) for row in summary.rows if row.classes is not None]
    rows = [row for row, _ in known]
    shown = [name for name in CLASSES if any(classes.get(name) for _, classes in known)]
    if len(rows) <= _MOST_ACROSS:
        header, body = ["", *(row.label for row in rows)], []
        for name in shown:
            body.append([CLASS_NAMES[name], *(_time(classes.get(name)) for _, classes in known)])
            if name == "communication" and any(row.wait_ns for row in rows):
                body.append(["of that waiting", *(_time(row.wait_ns) for row in rows)])
        body += [["total", *(_time(row.recorded_step_ns) for row in rows)]] if rows else []
    else:
        header = ["", "step", *(_SHORT.get(name, name) for name in shown)]
        body = [
            [
                row.label,
                _time(row.recorded_step_ns),
                *(_percent(classes.get(n, 0) / (row.recorded_step_ns or 1) or None) for n in shown),
            ]
            for row, classes in known
        ]
    over = "steps and GPUs" if any(row.gpus > 1 for row in rows) else "steps"
    return _fill(f"Where the time of a step goes (mean over {over})", header, body)
