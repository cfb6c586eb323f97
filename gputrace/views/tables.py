"""The tables of a report, as text cells that every view lays out in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.results import Analysis, Breakdown, Gap, Steps
from gputrace.cleaning import sentence
from gputrace.units import format_ns, format_ranges, format_share

CLASS_NAMES: Final = {
    "compute": "compute",
    "communication": "communication",
    "h2d": "host to device",
    "other_copy": "other copies",
    "memset": "memset",
    "recorder": "idle: recorder",
    "data_feeding": "idle: data feeding",
    "sync": "idle: sync",
    "alloc": "idle: allocation",
    "launch": "idle: launch",
    "other_idle": "idle: unexplained",
}
"""What people call the classes, in the order of the partition."""

_COLUMNS: Final = {
    "compute": ("compute",),
    "comm": ("communication",),
    "h2d": ("h2d",),
    "other": ("other_copy", "memset"),
    "rec.": ("recorder",),
    "data": ("data_feeding",),
    "sync": ("sync",),
    "alloc": ("alloc",),
    "launch": ("launch",),
    "idle?": ("other_idle",),
}
"""Columns of the table for many GPUs, and the classes that each adds up."""


_HIDDEN_SHARE: Final = 0.01
"""Part of the time from which hidden loading is worth a word."""


TEXT_COLUMNS: Final = ("evidence", "not done")
"""Names of columns that hold sentences."""


@dataclass(frozen=True, slots=True)
class Table:
    """A heading, column names, and rows of cells.

    The first column is text, and so are `TEXT_COLUMNS`; the rest are numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        """Whatever shows it, no cell holds what a terminal or a page would obey."""
        set_ = object.__setattr__
        set_(self, "title", sentence(self.title))
        set_(self, "header", tuple(map(sentence, self.header)))
        set_(self, "rows", tuple(tuple(map(sentence, row)) for row in self.rows))


def verdict(analysis: Analysis) -> str:
    """The first finding's message, as a sentence."""
    if not analysis.findings:
        return "Nothing stands out: no class of time is worth a change."
    message = analysis.findings[0].message
    return message[0].upper() + message[1:] + "."


def main_table(analysis: Analysis, most_across: int) -> Table:
    """Where the time goes: by rank where no GPU was seen, else in the form that fits the page."""
    if not analysis.gpus:
        return ranks_table(analysis)
    many = len(analysis.breakdown) > most_across
    return gpus_table(analysis) if many else classes_table(analysis)


def gpu_label(row: Breakdown | Gap, analysis: Analysis) -> str:
    """``gpu 3``; ``device 3`` for an unknown card; with the rank where that is another number."""
    if row.gpu is None:
        return f"rank {row.rank}"
    known = {(total.gpu, total.rank): total.gpu_known for total in analysis.gpus}
    word = "gpu" if known.get((row.gpu, row.rank), True) else "device"
    if row.gpu < 0:
        return "unknown device"
    ranks = {total.rank for total in analysis.gpus}
    told = all(total.gpu == total.rank for total in analysis.gpus)
    return f"{word} {row.gpu}" + (f" rank {row.rank}" if len(ranks) > 1 and not told else "")


def classes_table(analysis: Analysis) -> Table:
    """Classes down, GPUs across: time and share of each; for a few GPUs."""
    rows = analysis.breakdown
    body = [
        (label, *(cell for row in rows for cell in _cells(row, name)))
        for name, label in _present(rows).items()
    ]
    body.append(("total", *(cell for row in rows for cell in (format_ns(_mean(row)), ""))))
    header = ("", *(cell for row in rows for cell in (gpu_label(row, analysis), "")))
    return Table(_title(analysis), header, tuple(body))


def gpus_table(analysis: Analysis) -> Table:
    """GPUs down, classes across, shares only; for many GPUs."""
    rows = analysis.breakdown
    columns = {
        title: names
        for title, names in _COLUMNS.items()
        if title in ("compute", "idle?") or any(row.of(name) for row in rows for name in names)
    }
    body = tuple(
        (
            gpu_label(row, analysis),
            format_ns(_mean(row)),
            *(
                format_share(sum(row.of(name) for name in names), row.total_ns)
                for names in columns.values()
            ),
        )
        for row in rows
    )
    return Table(_title(analysis), ("", _unit(analysis), *columns), body)


def ranks_table(analysis: Analysis) -> Table:
    """Ranks down, of which no GPU was seen: the time that each waited for data, and the rest."""
    body = tuple(
        (
            gpu_label(row, analysis),
            format_ns(_mean(row)),
            *(_cells(row, "host_data") if row.host_data_ns is not None else ("unknown", "")),
            format_ns(_mean(row) - _mean(row, "host_data")),
        )
        for row in analysis.breakdown
    )
    return Table(_title(analysis), ("", _unit(analysis), "waits for data", "", "the rest"), body)


def gaps_table(analysis: Analysis, most: int) -> Table:
    """The largest gaps, of the measured steps where there are steps."""
    gaps = analysis.gaps
    shown = gaps.largest_in_steps or gaps.largest
    where = f" in these {_loop(analysis)[0]}s" if gaps.largest_in_steps else ""
    body = tuple(
        (
            gpu_label(gap, analysis),
            format_ns(gap.length_ns),
            f"{(gap.start_ns - analysis.origin_ns) / 1e9:.6f} s",
            "" if gap.step is None else str(gap.step),
            gap.cause.replace("_", " "),
            gap.evidence,
        )
        for gap in shown[:most]
    )
    title = f"Largest gaps{where} (in all {gaps.count:,} gaps, {format_ns(gaps.total_ns)})"
    return Table(title, ("", "length", "from", "step", "cause", "evidence"), body)


def notes(analysis: Analysis) -> Iterator[str]:
    """What a reader must know to trust the figures, a line each."""
    if len(analysis.paths) > 1:
        yield _parts_note(analysis)
    if any(not total.gpu_known for total in analysis.gpus):
        yield "The trace does not say which physical cards these are; CUDA ordinals are shown."
    yield from _loader_note(analysis)
    yield from _host_steps_note(analysis)
    for reason, rows in analysis.dropped_rows.items():
        yield f"{rows:,} row{'' if rows == 1 else 's'} left out: {reason}."
    yield from analysis.warnings


def _parts_note(analysis: Analysis) -> str:
    """How many files and hosts, and which ranks are on which host."""
    ranks: dict[str, set[int]] = {}
    for total in analysis.gpus:
        ranks.setdefault(total.host, set()).add(total.rank)
    hosts = "; ".join(f"{host} has {_ranks(sorted(found))}" for host, found in ranks.items())
    count = f"{len(ranks)} host{'' if len(ranks) == 1 else 's'}"
    return f"{len(analysis.paths)} files of {count}: {hosts}."


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranges(ranks)}"


def _loader_note(analysis: Analysis) -> Iterator[str]:
    """The loader's time that GPU work hides is not a loss, but the next thing to become one."""
    rows = [row for row in analysis.breakdown if row.host_data_ns is not None and row.steps]
    if not rows or not analysis.gpus:
        return
    steps = sum(row.steps for row in rows)
    host = sum(row.host_data_ns or 0 for row in rows)
    waited = sum(row.of("data_feeding") for row in rows)
    if host - waited > _HIDDEN_SHARE * sum(row.total_ns for row in rows):
        yield (
            f"The host spends {format_ns(host / steps)} {_loop(analysis)[1]} in the data loader; "
            f"{format_ns((host - waited) / steps)} of that is hidden under GPU work."
        )


def _host_steps_note(analysis: Analysis) -> Iterator[str]:
    """What a step is where no GPU shows it."""
    steps = analysis.steps
    if not analysis.gpus and steps.p50_ns is not None and steps.p95_ns is not None:
        p50, p95 = format_ns(steps.p50_ns), format_ns(steps.p95_ns)
        yield f"Steps are {steps.reason}: p50 {p50}, p95 {p95}."


def _title(analysis: Analysis) -> str:
    steps, count = analysis.steps, max(row.steps for row in analysis.breakdown)
    if not count:
        return (
            f"Where the time went (whole span, {format_ns(analysis.span_ns)}; {_no_steps(steps)})"
        )
    word, one = _loop(analysis)
    what = "" if steps.kind == "training" else ", not shown to be training"
    return f"Where the time of {one} goes (mean of {count} of {steps.count} {word}s{what})"


def _no_steps(steps: Steps) -> str:
    """Why the whole span is shown."""
    if steps.kind == "training":
        return "no whole step in it"
    if steps.kind == "iterations" and steps.mean_ns is not None:
        mean = format_ns(steps.mean_ns)
        return f"{steps.count} iterations of {mean}, not shown to be training"
    return "no steps found"


def _unit(analysis: Analysis) -> str:
    """What the mean is over."""
    return _loop(analysis)[1] if analysis.breakdown[0].steps else "span"


def _loop(analysis: Analysis) -> tuple[str, str]:
    """What to call one turn of the loop that was found."""
    training = analysis.steps.kind == "training"
    return ("step", "a step") if training else ("iteration", "an iteration")


def _present(rows: Sequence[Breakdown]) -> dict[str, str]:
    """Labels of the classes of which some GPU has some; compute and idle always."""
    always = ("compute", "h2d", "other_idle")
    return {
        name: label
        for name, label in CLASS_NAMES.items()
        if name in always or any(row.of(name) for row in rows)
    }


def _mean(row: Breakdown, name: str = "total") -> float:
    """Nanoseconds a step, or in all where there are no steps."""
    return (row.total_ns if name == "total" else row.of(name)) / max(row.steps, 1)


def _cells(row: Breakdown, name: str) -> tuple[str, str]:
    part = row.of(name)
    return (format_ns(_mean(row, name)), format_share(part, row.total_ns)) if part else ("–", "")
