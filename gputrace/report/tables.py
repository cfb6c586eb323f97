"""Tables of an analysis report: text cells that each format lays out in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from msgspec.structs import force_setattr

from gputrace.model.communication import (
    CollectiveTotals,
    ExpertRank,
    Experts,
    GpuLink,
    Pipeline,
    PipelineStage,
    ShardedData,
    TensorParallel,
)
from gputrace.model.host import PHASES
from gputrace.model.kernels import Roofline
from gputrace.model.results import (
    Analysis,
    Breakdown,
    CardUse,
    CopyUse,
    ExtraTable,
    Gap,
    LedgerRow,
)
from gputrace.model.struct import Struct
from gputrace.model.time_class import TIME_CLASSES
from gputrace.report.wording import cut_middle, gpu_label, kernel_labels, loop_name
from gputrace.sanitize import sentence
from gputrace.units import (
    format_bytes,
    format_count,
    format_ids,
    format_ns,
    format_number,
    format_ranges,
    format_share,
)

CLASS_NAMES: Final = {row.id: row.label for row in TIME_CLASSES}
"""Display names of the classes of time, in the order of the partition."""

_COLUMNS: Final[dict[str, list[str]]] = {}
for _row in TIME_CLASSES:
    _COLUMNS.setdefault(_row.column, []).append(_row.id)
"""Columns of the table for many GPUs, each with the classes that it sums."""
TEXT_COLUMNS: Final = ("evidence", "not done")
"""Columns that hold sentences."""

_UNKNOWN: Final = "–"
_SILENT: Final = frozenset(("", "?", _UNKNOWN))


class Table(Struct, frozen=True):
    """Title, column names, and rows of cells.

    The first column and `TEXT_COLUMNS` hold text, all others numbers. Columns that say nothing in
    any row are left out.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] = ()
    """Full names of the rows, whose first cells are short ones; empty where they are not."""

    def __post_init__(self) -> None:
        """Sanitize all cells: they never contain control sequences."""
        force_setattr(self, "title", sentence(self.title))
        first, *others = zip(self.header, *self.rows, strict=True)
        kept = [first, *(c for c in others if not self.rows or not _SILENT.issuperset(c[1:]))]
        header, *rows = zip(*(map(sentence, column) for column in kept), strict=True)
        force_setattr(self, "header", header)
        force_setattr(self, "rows", tuple(rows))


_T = TypeVar("_T")
Columns = Sequence[tuple[str, Callable[[_T], str]]]
"""Name of each column, and the formatter of its cell for the object that a row is of."""


def tabulate(title: str, columns: Columns[_T], rows: Iterable[_T]) -> Table:
    """Return a table with a row for each object."""
    header, cells = zip(*columns, strict=True)
    return Table(title, header, tuple(tuple(cell(row) for cell in cells) for row in rows))


def main_table(analysis: Analysis, most_across: int) -> Table:
    """Break the time down by rank for host-only traces, else in the layout that fits the page."""
    rows = analysis.breakdown
    if not analysis.gpus:
        return _ranks_table(analysis)
    if len(rows) > most_across:
        return _gpus_table(analysis)
    # Few GPUs: a row per class, for each GPU its time and share.
    always = ("compute", "h2d", "other_idle")
    body = [
        (label, *(cell for row in rows for cell in _cells(row, name)))
        for name, label in CLASS_NAMES.items()
        if name in always or any(row.of(name) for row in rows)
    ]
    body.append(("total", *(cell for row in rows for cell in (format_ns(_mean(row)), ""))))
    header = ("", *(cell for row in rows for cell in (gpu_label(row, analysis), "")))
    return Table(_title(analysis), header, tuple(body))


def _gpus_table(analysis: Analysis) -> Table:
    """Lay out many GPUs: a row per GPU, a column per class, shares only."""
    rows = analysis.breakdown
    columns = {
        title: names
        for title, names in _COLUMNS.items()
        if title in ("compute", "idle?") or any(row.of(name) for row in rows for name in names)
    }

    def shares(row: Breakdown) -> list[str]:
        return [format_share(sum(map(row.of, names)), row.total_ns) for names in columns.values()]

    body = tuple((gpu_label(row, analysis), format_ns(_mean(row)), *shares(row)) for row in rows)
    return Table(_title(analysis), ("", _unit(analysis), *columns), body)


def _ranks_table(analysis: Analysis) -> Table:
    """Lay out host-only ranks: the time that each waited for data, and the rest."""
    body = []
    for row in analysis.breakdown:
        waits = _UNKNOWN, "", _UNKNOWN
        if row.host_data_ns is not None:
            waits = (*_cells(row, "host_data"), format_ns(_mean(row) - _mean(row, "host_data")))
        body.append((gpu_label(row, analysis), format_ns(_mean(row)), *waits))
    header = ("", _unit(analysis), "waits for data", "", "the rest")
    return Table(_title(analysis), header, tuple(body))


_LEAST_CAUSE: Final = 0.005
"""Share of the time from which a cause has a row of its own."""
_LEAST_EXPLAINED: Final = 0.05
"""Share of the time from which its evidence is shown."""
_MANY_RANKS: Final = 0.2
"""Part of the largest row of a cause from which the rank of another is named, too."""


def causes_table(analysis: Analysis, most_across: int, most: int) -> Table | None:
    """Say why the GPUs lose time: a row per cause, and per rank that others wait for if the GPUs
    are columns; the total is all of the main table but the computing.

    Return None where no cause is worth a row.
    """
    gpus, few = analysis.breakdown, len(analysis.breakdown) <= most_across
    columns = [[gpu] for gpu in gpus] if few else [gpus]
    every = [row for row in analysis.ledger if row.of != "compute"]
    whole = sum(gpu.total_ns for gpu in gpus)
    causes: dict[tuple[str, bool, int | None], list[LedgerRow]] = {}
    for row in every:
        apart = row.rank if row.waits and few else None
        causes.setdefault((row.cause, row.waits, apart), []).append(row)
    ranked = sorted(causes.values(), key=_ns, reverse=True)
    shown = [rows for rows in ranked[:most] if _ns(rows) >= _LEAST_CAUSE * whole]
    if not shown:
        return None
    other = [row for rows in ranked[len(shown) :] for row in rows]

    def cells(rows: Sequence[LedgerRow]) -> Iterator[str]:
        for column in columns:
            keys = {(gpu.gpu, gpu.rank) for gpu in column}
            lost = sum(row.ns for row in rows if (row.gpu, row.paid_by) in keys)
            share = format_share(lost, sum(gpu.total_ns for gpu in column))
            mean = format_ns(lost / sum(max(gpu.steps, 1) for gpu in column))
            yield from (mean, share) if lost else (_UNKNOWN, "")

    def more(rows: Sequence[LedgerRow]) -> tuple[str, str]:
        ranks = {row.rank for row in rows if row.ns >= _MANY_RANKS * rows[0].ns}
        at = f"{rows[0].line} ({rows[0].evidence})" if rows[0].line else rows[0].evidence
        is_large = _ns(rows) >= _LEAST_EXPLAINED * whole
        return "" if few else format_ranges(sorted(ranks)), at if is_large else ""

    body = [(_cause_label(rows[0], analysis, few), *cells(rows), *more(rows)) for rows in shown]
    body += [("other", *cells(other), "", "")] if other else []
    body.append(("total", *cells(every), "", ""))
    heads = [gpu_label(gpu, analysis) for gpu in gpus] if few else ["mean"]
    header = ("", *(cell for head in heads for cell in (head, "")), "ranks", "evidence")
    unit = _unit(analysis).replace("span", "whole span")
    return Table(f"Why ({unit}, per GPU)", header, tuple(body))


def _cause_label(row: LedgerRow, analysis: Analysis, by_rank: bool) -> str:
    """Return the label of a row's cause, with the rank that the GPU waits for if ``by_rank``."""
    by_rank = by_rank and row.rank != row.paid_by
    waits = f"waiting for rank {row.rank}" if by_rank else "waiting for another rank"
    return analysis.cause_label(row.cause, waits if row.waits else "")


def _ns(rows: Iterable[LedgerRow]) -> int:
    return sum(row.ns for row in rows)


_LEAST_GAP: Final = 0.005
"""Share of a step from which a gap is listed."""


def gaps_table(analysis: Analysis, most: int) -> Table | None:
    """List the largest gaps; only those in measured steps where steps were found.

    Return None where none is long enough to matter.
    """
    gaps = analysis.gaps
    least = _LEAST_GAP * (analysis.steps.mean_ns or 0)
    shown = [gap for gap in gaps.largest_in_steps or gaps.largest if gap.length_ns >= least]
    if not shown:
        return None
    columns: Columns[Gap] = (
        ("", lambda gap: gpu_label(gap, analysis)),
        ("length", lambda gap: format_ns(gap.length_ns)),
        ("from", lambda gap: f"{(gap.start_ns - analysis.origin_ns) / 1e9:.6f} s"),
        ("step", lambda gap: "" if gap.step is None else str(gap.step)),
        ("cause", lambda gap: CLASS_NAMES[gap.cause].removeprefix("idle: ")),
        ("evidence", lambda gap: gap.evidence),
    )
    turn = loop_name(analysis)[0]
    where = " in it" if turn == "pass" else f" in these {turn}s"
    where *= bool(gaps.largest_in_steps)
    on = " on all GPUs" if len(analysis.breakdown) > 1 else ""
    every = f"the whole trace has {gaps.count:,}, {format_ns(gaps.total_ns)}{on}"
    return tabulate(f"Largest gaps{where} ({every})", columns, shown[:most])


def _title(analysis: Analysis) -> str:
    steps, count = analysis.steps, max(row.steps for row in analysis.breakdown)
    if not count:
        why = "no steps found"
        if steps.kind == "training":
            why = "no whole step in it"
        elif steps.p50_ns is not None:
            # The mean may be that of a first one, in which all else begins too.
            median = format_ns(steps.p50_ns)
            why = f"{steps.count} iterations{_of_kind(steps.kind)}, median {median}"
        totals = [row.total_ns for row in analysis.breakdown]
        span = f"whole span, {format_ns(analysis.span_ns)}"
        if len(set(map(format_ns, totals))) > 1:
            mean = format_ns(sum(totals) / len(totals))
            span = f"each GPU from its first to its last operation, {mean} on average"
        return f"Where the time went ({span}; {why})"
    word, a_turn = loop_name(analysis)
    what = _of_kind(steps.kind)
    if analysis.recorder is not None and analysis.recorder.added_ns:
        what += "; includes recording overhead"
    many = "one in the recording" if word == "pass" else f"mean of {count} of {steps.count} {word}s"
    return f"Where the time of {a_turn} goes ({many}{what})"


def _of_kind(kind: str) -> str:
    """Return what follows the number of turns of a loop to say of which kind it is."""
    known = {"training": "", "pass": "", "iterations": ", not shown to be training"}
    return known.get(kind, f" of {kind}")


def _unit(analysis: Analysis) -> str:
    """Return the unit that the mean is per: a step, an iteration or the span."""
    return loop_name(analysis)[1] if analysis.breakdown[0].steps else "span"


def _mean(row: Breakdown, name: str = "total") -> float:
    """Return nanoseconds per step, or the total where there are no steps."""
    return row.of(name) / max(row.steps, 1)


def _cells(row: Breakdown, name: str) -> tuple[str, str]:
    part = row.of(name)
    return (format_ns(_mean(row, name)), format_share(part, row.total_ns)) if part else ("–", "")


class ShownLimits(Struct, frozen=True):
    """Limits on what a format shows."""

    gpus_across: int
    """Largest number of GPUs shown as columns of the first tables; more are shown as rows, or as
    their mean."""
    gaps: int
    links: int
    kernels: int
    kernel_name: int = 80
    """Longest name of a kernel, in characters."""
    longest_launches: bool = True
    """True to show the longest launch of each kernel."""
    causes: int = 12
    """Causes of lost time with a row of their own."""


def tables_before(analysis: Analysis, limits: ShownLimits) -> list[Table]:
    """Return the tables between the verdict and the other findings."""
    if not analysis.breakdown:
        return []
    made = (
        main_table(analysis, limits.gpus_across),
        causes_table(analysis, limits.gpus_across, limits.causes),
        gaps_table(analysis, limits.gaps),
    )
    return [table for table in made if table is not None]


def tables_after(analysis: Analysis, limits: ShownLimits) -> list[Table]:
    """Return the tables after the findings."""
    made = (
        phases_table(analysis),
        *loader_tables(analysis),
        collectives_table(analysis),
        *parallel_tables(analysis, _MOST_PIPELINES),
        links_table(analysis, limits.links),
        copies_table(analysis),
        cards_table(analysis),
        throughput_table(analysis),
        energy_table(analysis),
        kernels_table(
            analysis, limits.kernels, limits.kernel_name, longest_launches=limits.longest_launches
        ),
        modules_table(analysis),
        *map(extra_table, analysis.tables),
    )
    return [table for table in made if table is not None]


_LEAST_SHARE: Final = 0.005
"""Share of a loader's time from which a part is listed."""


def phases_table(analysis: Analysis) -> Table | None:
    """Tabulate the phases of a step on the rank whose GPUs idle most; None if none were recorded.

    Phases that were not met are left out.
    """
    most = max(
        analysis.step_phases,
        key=lambda row: sum(phase.idle_ns or 0 for phase in row.phases),
        default=None,
    )
    if most is None:
        return None
    of = f" of rank {most.rank}" if len(analysis.step_phases) > 1 else ""
    a_turn = loop_name(analysis)[1]
    rows = [phase for phase in most.phases if phase.host_ns or phase.idle_ns]
    body: list[tuple[str, ...]] = [
        (phase.name, format_ns(phase.host_ns), format_share(phase.host_ns, most.step_ns))
        for phase in rows
    ]
    body.append(("all", format_ns(most.step_ns), ""))
    header: tuple[str, ...] = ("", "host", "share")
    if any(phase.idle_ns is not None for phase in rows):
        idle = [phase.idle_ns or 0 for phase in rows]
        idle.append(sum(idle))
        body = [(*row, format_ns(ns)) for row, ns in zip(body, idle, strict=True)]
        header = (*header, "GPU idle meanwhile")
    title = f"What the host does in {a_turn}{of} (mean of {most.steps})"
    for row in analysis.allocators:
        if row.rank == most.rank and row.peak_bytes is not None and row.peak_phase is not None:
            title += f"; its memory peaks at {format_bytes(row.peak_bytes)} in "
            title += PHASES[row.peak_phase]
    return Table(title, header, tuple(body))


def loader_tables(analysis: Analysis) -> tuple[Table, ...]:
    """Tabulate the loader that makes its rank wait most: its parts, and other numbers of workers.

    Return none where no loader was recorded.
    """
    loader = max(analysis.loader, key=lambda loader: loader.wait_ns, default=None)
    if loader is None:
        return ()
    of = f" of rank {loader.rank}" if len(analysis.loader) > 1 else ""
    workers = format_count(loader.workers, "worker")
    queue = "in the process that trains"
    if loader.queue_median is not None and loader.queue_empty is not None:
        queue = f"{loader.queue_median:g} ready when asked, none in {loader.queue_empty:.0%}"
    title = f"A batch in the data loader{of} ({workers}, {loader.batches:,} batches; {queue})"
    parts = [part for part in loader.parts if part.share >= _LEAST_SHARE]
    body = [
        (cut_middle(part.name, _LONGEST_PART), format_ns(part.batch_ns), f"{part.share:.1%}")
        for part in parts
    ]
    body.append(("all", format_ns(loader.batch_ns), ""))
    if loader.workers:
        body.append(("receive", format_ns(loader.receive_ns), ""))
    if loader.pin_ns is not None:
        body.append(("pin", format_ns(loader.pin_ns), ""))
    others = tuple(
        (
            f"{choice.workers}{' (now)' if choice.workers == loader.workers else ''}",
            format_ns(choice.step_ns),
            format_ns(choice.wait_ns),
        )
        for choice in loader.predictions
    )
    tables = [Table(title, ("", "time", "share"), tuple(body))]
    if others:
        predicted = f"Predicted with other numbers of workers{of} ({loader.cores} cores)"
        tables.append(Table(predicted, ("workers", "a step", "waits"), others))
    return tuple(tables)


_LONGEST_PART: Final = 40


def cards_table(analysis: Analysis) -> Table | None:
    """Tabulate NVML samples by card; return None where no card was sampled then."""
    if not analysis.cards:
        return None
    hosts = len({card.host for card in analysis.cards}) > 1
    columns: Columns[CardUse] = (
        ("", lambda card: f"gpu {card.gpu}" + (f" rank {card.rank}" if hosts else "")),
        ("utilized", lambda card: _measured(card.utilization_percent, "%")),
        ("memory", lambda c: _measured(c.memory_used_bytes, " GiB", c.memory_bytes, 2**30)),
        ("power", lambda card: _measured(card.power_mw, " W", card.power_limit_mw, 1000)),
        ("SM clock", lambda card: _measured(card.sm_clock_mhz, " MHz", card.sm_clock_max_mhz)),
        ("memory clock", lambda c: _measured(c.memory_clock_mhz, " MHz", c.memory_clock_max_mhz)),
        ("hottest", lambda card: _measured(card.temperature_c, " °C")),
    )
    counts = [card.samples for card in analysis.cards]
    count = " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
    samples = "sample" if max(counts) == 1 else "samples"
    where = "in these steps" if any(row.steps for row in analysis.breakdown) else "while they work"
    title = f"The cards {where} (NVML, {count} {samples} of each at work)"
    table = tabulate(title, columns, analysis.cards)
    return table if len(table.header) > 1 else None


def throughput_table(analysis: Analysis) -> Table | None:
    """Tabulate samples and tokens by rank; None where the program gave none."""
    rows = analysis.throughput
    columns = {
        f"{name} a {unit}": [getattr(row, f"{name}_per_{field}") for row in rows]
        for unit, field in (("step", "step"), ("second", "s"))
        for name in ("samples", "tokens")
    }
    columns["TFLOP/s"] = [row.flop_per_s and row.flop_per_s / 1e12 for row in rows]
    columns["MFU"] = [row.mfu and 100 * row.mfu for row in rows]
    known = {name: values for name, values in columns.items() if None not in values}
    if not rows or not known:
        return None
    formats = {"TFLOP/s": "{:,.1f}", "MFU": "{:,.1f}%"}
    cells = [map(formats.get(name, "{:,.0f}").format, values) for name, values in known.items()]
    body = tuple(zip((f"rank {row.rank}" for row in rows), *cells, strict=True))
    peak = rows[0].peak_flop_per_s
    of = f"; MFU of {peak / 1e12:,.0f} TFLOP/s in {rows[0].precision}" if peak else ""
    by_shapes = rows[0].flop_source == "shapes"
    sources = ["as passed to gputrace.step"] if known.keys() - {"TFLOP/s", "MFU"} else []
    source = " and ".join([*sources, *(["by the shapes of operators"] if by_shapes else [])])
    return Table(f"Work, {source}{of}", ("", *known), body)


_LEAST_ENERGY: Final = 0.005
"""Share of the energy from which a class has a column."""


def energy_table(analysis: Analysis) -> Table | None:
    """Tabulate energy by class, of the GPUs whose counter was read; None without any."""
    rows = analysis.energy
    total = sum(row.total_mj for row in rows)
    if not total:
        return None
    by_class = {name: sum(row.classes_mj[name] for row in rows) for name in CLASS_NAMES}
    shown = [name for name, spent in by_class.items() if spent >= _LEAST_ENERGY * total]
    what = "energy" if any(row.step_mj is None for row in rows) else "a step"
    header = ("", what, *(CLASS_NAMES[name] for name in shown))
    body = []
    for row in rows:
        scale = row.total_mj if row.step_mj is None else row.step_mj
        parts = (scale * row.classes_mj[name] / max(row.total_mj, 1) for name in shown)
        cells = (f"{part / 1e3:,.1f} J" for part in (scale, *parts))
        body.append((f"gpu {row.gpu} rank {row.rank}", *cells))
    extra = []
    for what, value in (("sample", rows[0].sample_mj), ("token", rows[0].token_mj)):
        if value is not None:
            mean = sum(getattr(row, f"{what}_mj") or 0 for row in rows) / len(rows)
            extra.append(f"{format_number(mean / 1e3)} J a {what}")
    title = "Energy by class (NVML's counter" + "".join(f"; {text}" for text in extra) + ")"
    return Table(title, header, tuple(body))


def _measured(value: float | None, unit: str, most: float | None = None, scale: int = 1) -> str:
    """Format a value, and its limit where it is known."""
    if value is None:
        return _UNKNOWN
    value /= scale
    digits = 1 if unit == " GiB" and value < 100 else 0
    limit = "" if most is None else f"/{most / scale:,.0f}"
    return f"{value:,.{digits}f}{limit}{unit}"


_MOST: Final = 6
"""Maximum number of operations shown."""


def collectives_table(analysis: Analysis) -> Table | None:
    """Tabulate collectives, a row per operation; return None where GPUs do not communicate."""
    shown = analysis.collectives[:_MOST]
    if not shown:
        return None
    unit = "a GPU and step" if shown[0].steps else "a GPU"
    where = " within one process" if all(total.one_process for total in shown) else ""
    title = f"Communication{where} ({unit}; exposed: with no computation beside it)"
    return tabulate(title, _COLLECTIVES, shown)


def _members(total: CollectiveTotals) -> str:
    """Return who takes part, and what the group is for: ``tensor, gpus 0–3``."""
    gpus, ranks = sorted(set(total.gpus)), sorted(set(total.ranks))
    # Cards of several hosts have the same indices.
    many = len(gpus) < len(total.gpus)
    who = format_ids("rank", ranks) if many else format_ids("gpu", gpus)
    unseen = (total.group_size or 0) - len(total.gpus)
    who += f" of {total.group_size}" if unseen > 0 else ""
    who += f" on {total.hosts} hosts" if total.hosts > 1 else ""
    name = f" ({total.group})" if total.group and total.group != "default_pg" else ""
    return f"{total.role}{name}, {who}" if total.role or name else who


def _time(nanoseconds: int | None) -> str:
    return "?" if nanoseconds is None else format_ns(nanoseconds)


_COLLECTIVES: Final[Columns[CollectiveTotals]] = (
    ("", lambda row: f"{row.operation}, {_members(row)}"),
    ("count", lambda row: format_number(row.count / row.steps) if row.steps else f"{row.count:,}"),
    ("size", lambda row: "?" if row.bytes is None else format_bytes(row.bytes)),
    ("time", lambda row: format_ns(row.total_ns)),
    ("exposed", lambda row: format_share(row.exposed_ns, row.total_ns)),
    ("wait", lambda row: _time(row.wait_total_ns)),
    ("transfer", lambda row: _time(row.transfer_total_ns)),
    ("bus", lambda row: "?" if row.bus_bandwidth is None else f"{_rate(row.bus_bandwidth)} GB/s"),
)
_MOST_PIPELINES: Final = 2
_MOST_STAGES: Final = 16


def parallel_tables(analysis: Analysis, most: int | None = None) -> list[Table]:
    """Tabulate what forms of parallel training cost: pipelines, experts (so many of each at most),
    sharded parameters, tensor-parallel groups.
    """
    tables = [
        *map(_pipeline_table, analysis.pipelines[:most]),
        *map(_experts_table, analysis.experts[:most]),
    ]
    if shown := analysis.sharded[:_MOST]:
        title = "Sharded parameters (a step; prefetched: gathered beside kernels)"
        tables.append(tabulate(title, _SHARDED, shown))
    if groups := analysis.tensor[:_MOST]:
        title = "Tensor parallel (a step; beside products: matrix products run, too)"
        tables.append(tabulate(title, _TENSOR, groups))
    return tables


def _pipeline_table(pipeline: Pipeline) -> Table:
    columns: Columns[PipelineStage] = (
        ("", lambda stage: f"stage {stage.stage}, rank {stage.rank}"),
        ("work", lambda stage: format_ns(stage.work_ns)),
        ("bubble", lambda stage: format_share(stage.bubble_ns, pipeline.step_ns)),
        ("schedule", lambda stage: format_ns(stage.schedule_ns)),
        ("imbalance", lambda stage: format_ns(stage.imbalance_ns)),
        ("transfer", lambda stage: format_ns(stage.transfer_ns)),
        ("host", lambda stage: format_ns(stage.host_ns)),
    )
    schedule = "" if pipeline.schedule == "unknown" else f"{pipeline.schedule}, "
    batches = f"{pipeline.micro_batches} micro-batches"
    title = f"Pipeline ({schedule}{batches}; a step, and why stages idle)"
    return tabulate(title, columns, pipeline.stages[:_MOST_STAGES])


def _experts_table(experts: Experts) -> Table:
    whole = experts.work_ns
    columns: Columns[ExpertRank] = (
        ("", lambda rank: f"rank {rank.rank}"),
        ("work", lambda rank: format_ns(rank.work_ns)),
        ("of the mean", lambda rank: f"{rank.ratio:.2f}"),
        ("busiest", lambda rank: format_share(round(rank.busiest * whole), whole)),
    )
    title = f"Experts (a step; {experts.exchanges} exchanges of tokens, and back)"
    return tabulate(title, columns, experts.ranks[:_MOST_STAGES])


_SHARDED: Final[Columns[ShardedData]] = (
    ("", lambda group: format_ids("rank", group.ranks)),
    ("gathers", lambda group: f"{group.gathers:,}"),
    ("exposed", lambda group: format_ns(group.gather_exposed_ns)),
    ("wait", lambda group: _time(group.gather_wait_ns)),
    ("prefetched", lambda group: f"{group.prefetched:.0%}"),
    ("could hide", lambda group: format_ns(group.hideable_ns)),
    ("again", lambda group: f"{group.gathered_again:,}"),
    ("scatters", lambda group: f"{group.scatters:,}"),
)
_TENSOR: Final[Columns[TensorParallel]] = (
    ("", lambda group: format_ids("rank", group.ranks)),
    ("times", lambda group: f"{group.collectives:,}"),
    ("time", lambda group: format_ns(group.total_ns)),
    ("exposed each", lambda group: format_ns(group.exposed_ns // max(group.collectives, 1))),
    ("exposed", lambda group: format_share(group.exposed_ns, group.total_ns)),
    ("beside products", lambda group: format_share(group.beside_products_ns, group.total_ns)),
    ("wait", lambda group: _time(group.wait_ns)),
)


_WORTH: Final = 0.001
"""Share of the time below which a kernel is not shown."""


def kernels_table(
    analysis: Analysis, most: int, longest: int = 80, *, longest_launches: bool = True
) -> Table | None:
    """Tabulate the kernels with most time over all GPUs, and that of the longest launch if those
    are shown; return None where all are negligible.
    """
    kernels = analysis.kernels
    shown = [use for use in kernels.top[:most] if use.share >= _WORTH] if kernels else []
    if kernels is None or not shown:
        return None
    rows = []
    head = ["", "family", "tc", "times", "median", "longest", "time", "share"]
    if longest_launches:
        peak = max(kernels.top, key=lambda use: use.max_ns)
        shown += [] if peak in shown else [peak]
    else:
        head.remove("longest")
    labels = kernel_labels([use.name for use in shown], longest)
    for use, label in zip(shown, labels, strict=True):
        each = kernels.steps or max(len(use.by_gpu), 1)
        count, cores = use.count / each, use.tensor_cores or ""
        cells = (
            label,
            use.family,
            "?" if cores == "unknown" else cores,
            f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}",
            format_ns(use.median_ns),
            *([format_ns(use.max_ns)] if longest_launches else []),
            format_ns(use.total_ns / each),
            format_share(use.total_ns, kernels.total_ns),
            *_speed_cells(use.roofline),
        )
        rows.append(cells)
    where = loop_name(analysis)[1] if kernels.steps else "in all"
    of = f"{len(shown)} of {kernels.distinct}, {where} on a GPU"
    if {row[2] for row in rows} & {"yes", "no"}:
        of += "; tc: on tensor cores"
    title = f"Kernels that take most time ({of})"
    return Table(
        title, (*head, "achieved", "of limit"), tuple(rows), tuple(use.name for use in shown)
    )


_MOST_MODULES: Final = 16


def modules_table(analysis: Analysis) -> Table | None:
    """Tabulate the modules of the rank whose kernels take most time; None without any.

    Of a tree with many, those that take most time are shown.
    """
    time = {row: row.forward_ns + row.backward_ns for row in analysis.modules}
    total: dict[int, int] = {}
    for row, spent in time.items():
        total[row.rank] = total.get(row.rank, 0) + ("/" not in row.path) * spent
    if not total:
        return None
    rank = max(total, key=lambda rank: total[rank])
    rows = [row for row in analysis.modules if row.rank == rank]
    worth = [row for row in rows if time[row] >= _WORTH * total[rank]]
    shown = set(sorted(worth, key=lambda row: -time[row])[:_MOST_MODULES])
    body = tuple(
        (
            "· " * row.path.count("/") + (row.path.rpartition("/")[2] or "outside of modules"),
            f"{row.instances}" if row.instances else "",
            f"{row.launches:,.0f}",
            format_ns(row.forward_ns) if row.forward_ns else "",
            format_ns(row.backward_ns) if row.backward_ns else "",
            format_share(time[row], total[rank]),
            format_ns(row.exposed_communication_ns) if row.exposed_communication_ns else "",
        )
        for row in rows
        if row in shown
    )
    of = f" of rank {rank}" if len(total) > 1 else ""
    loop = "a step" if any(row.steps for row in analysis.breakdown) else "in all"
    header = ("", "modules", "launches", "forward", "backward", "share", "exposed comm.")
    return Table(f"Modules{of} by the kernels that they launch ({loop})", header, body)


def _speed_cells(line: Roofline | None) -> tuple[str, str]:
    """Return the speed of a kernel, and its share of what the cards can do."""
    if line is None:
        return "", ""
    speed = f"{format_number(line.flop_per_s / 1e12)} TFLOP/s"
    if not line.flop_per_s:
        speed = f"{(line.bytes_per_s or 0) / 1e9:,.4g} GB/s"
    return speed, "" if line.of_limit is None else f"{line.of_limit:.0%} {line.limit}"


def copies_table(analysis: Analysis) -> Table | None:
    """Tabulate the copies of all GPUs by direction; None where they take next to no time."""
    total = sum(row.total_ns for row in analysis.breakdown)
    sums: dict[tuple[str, str], list[CopyUse]] = {}
    for row in analysis.copies:
        sums.setdefault((row.kind, row.memory), []).append(row)
    each = sum(row.steps for row in analysis.breakdown) or max(len(analysis.breakdown), 1)
    body = []
    for (kind, memory), rows in sums.items():
        spent, moved = sum(row.total_ns for row in rows), sum(row.bytes for row in rows)
        limits = {row.limit_bytes_per_s for row in rows}
        limit, rate = limits.pop() if len(limits) == 1 else None, moved * 1e9 / spent
        if spent >= _WORTH * total:
            body.append(
                (
                    f"{_COPIES[kind]}{f', {memory}' if memory else ''}",
                    f"{sum(row.count for row in rows) / each:,.1f}".removesuffix(".0"),
                    format_bytes(round(moved / each)),
                    format_ns(round(spent / each)),
                    f"{rate / 1e9:,.4g}",
                    "" if limit is None else f"{limit / 1e9:,.4g}",
                    "" if limit is None else f"{rate / limit:.0%}",
                )
            )
    if not body:
        return None
    loop = "a step" if any(row.steps for row in analysis.breakdown) else "in all"
    head = ("", "copies", "bytes", "time", "GB/s", "limit", "of limit")
    return Table(f"Copies ({loop}, on a GPU)", head, tuple(body))


_COPIES: Final = {
    "h2d": "host to device",
    "d2h": "device to host",
    "d2d": "within the device",
    "peer": "between GPUs",
}


def links_table(analysis: Analysis, most: int) -> Table | None:
    """Tabulate the directions with most bytes copied; return None where there are no copies."""
    used = [row for row in analysis.links if row.bytes or row.staged_bytes]
    used.sort(key=lambda row: -(row.bytes + row.staged_bytes))
    if not used:
        return None
    several = len({row.host for row in used}) > 1
    labels = {(gpu.gpu, gpu.rank): gpu_label(gpu, analysis) for gpu in analysis.gpus}

    def ends(row: GpuLink) -> str:
        pairs = ((row.from_, row.from_rank), (row.to, row.to_rank))
        direction = " to ".join(labels.get(pair, f"gpu {pair[0]}") for pair in pairs)
        return direction + (f" on {row.host}" if several else "")

    def staged(row: GpuLink) -> str:
        size = format_bytes(row.staged_bytes)
        return f"{row.staged_copies:,} copies, {size}" if row.staged_copies else _UNKNOWN

    columns: Columns[GpuLink] = (
        ("", ends),
        ("link", lambda row: row.link or "?"),
        ("copies", lambda row: f"{row.copies:,}"),
        ("bytes", lambda row: format_bytes(row.bytes)),
        ("GB/s", lambda row: _rate(row.bandwidth)),
        ("link carries", lambda row: _rate(row.able)),
        ("through the host", staged),
    )
    more = f" (the {most} of {len(used)} directions with most)" if len(used) > most else ""
    return tabulate(f"Copies between GPUs{more}", columns, used[:most])


def _rate(bytes_per_second: float | None) -> str:
    """Format a bandwidth in GB/s; a dash where it is unknown."""
    return _UNKNOWN if bytes_per_second is None else format_number(bytes_per_second / 1e9)


def extra_table(table: ExtraTable) -> Table:
    """Convert a plugin's table: floats with four significant digits, unknown values as a dash."""

    def cell(value: object) -> str:
        if value is None:
            return _UNKNOWN
        return f"{value:,.4g}" if isinstance(value, float) else str(value)

    return Table(table.title, table.header, tuple(tuple(map(cell, row)) for row in table.rows))
