"""Report of an analysis: its tables, and the document that every format lays out in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Final

from msgspec.structs import replace

from gputrace.model.cards import Energy
from gputrace.model.communication import CollectiveTotals, GpuLink
from gputrace.model.host import PHASES, LoaderChoice
from gputrace.model.kernels import KernelUse
from gputrace.model.memory import DeviceMemory
from gputrace.model.results import (
    Analysis,
    Breakdown,
    CopyUse,
    ExtraTable,
    Gap,
    LedgerRow,
    ModuleUse,
)
from gputrace.model.struct import UNKNOWN, Column
from gputrace.model.time_class import TIME_CLASSES
from gputrace.report import (
    STYLES,
    Document,
    Limits,
    Line,
    Records,
    Table,
    attributes,
    declared,
    present,
    room_for_names,
    tabulate,
    wording,
)
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


def main_table(analysis: Analysis, most_across: int) -> Table:
    """Break the time down by class: few GPUs are columns, many are rows, with shares only.

    Ranks without GPUs are rows, with the time that each waited for data.
    """
    rows, title = analysis.breakdown, _title(analysis)
    columns = [
        Column("", lambda row: wording.gpu_label(row, analysis)),
        Column(_unit(analysis), _mean, format_ns),
    ]
    if not analysis.gpus:

        def rest(row: Breakdown) -> float | None:
            known = row.host_data_ns
            return None if known is None else (row.total_ns - known) / max(row.steps, 1)

        columns += (
            Column("waits for data", lambda row: _mean(row, "host_data"), format_ns),
            Column("", lambda row: _share(row, "host_data"), unknown=""),
            Column("the rest", rest, format_ns),
        )
        return tabulate(title, columns, rows)
    if len(rows) > most_across:

        def shares(names: Sequence[str]) -> Callable[[Breakdown], str]:
            return lambda row: _share(row, *names)

        columns += (
            Column(name, shares(of))
            for name, of in _COLUMNS.items()
            if name in ("compute", "idle?") or any(row.of(each) for row in rows for each in of)
        )
        return tabulate(title, columns, rows)
    names = {**CLASS_NAMES, "total": "total"}
    always = ("compute", "h2d", "other_idle", "total")
    columns = [Column("", names.__getitem__)]
    for gpu in rows:
        columns.append(Column(wording.gpu_label(gpu, analysis), partial(_mean, gpu), format_ns))
        columns.append(Column("", partial(_share, gpu), unknown=""))
    shown = [name for name in names if name in always or any(row.of(name) for row in rows)]
    return tabulate(title, columns, shown)


def _mean(row: Breakdown, name: str = "total") -> float | None:
    """Return nanoseconds per step, or in all where there are no steps; None for nothing."""
    return row.of(name) / max(row.steps, 1) or None


def _share(row: Breakdown, *names: str) -> str:
    """Return the share that classes have of the total, which has none; empty for nothing."""
    part = sum(map(row.of, names))
    return format_share(part, row.total_ns) if part and names != ("total",) else ""


def _title(analysis: Analysis) -> str:
    steps, count = analysis.steps, max(row.steps for row in analysis.breakdown)
    known = {"training": "", "pass": "", "iterations": ", not shown to be training"}
    what = known.get(steps.kind, f" of {steps.kind}")
    if not count:
        why = "no steps found"
        if steps.kind == "training":
            why = "no whole step in it"
        elif steps.p50_ns is not None:
            # The mean may be that of a first one, in which all else begins too.
            median = format_ns(steps.p50_ns)
            why = f"{steps.count} iterations{what}, median {median}"
        totals = [row.total_ns for row in analysis.breakdown]
        span = f"whole span, {format_ns(analysis.span_ns)}"
        if len(set(map(format_ns, totals))) > 1:
            mean = format_ns(sum(totals) / len(totals))
            span = f"each GPU from its first to its last operation, {mean} on average"
        return f"Where the time went ({span}; {why})"
    word, a_turn = wording.loop_name(analysis)
    if analysis.recorder is not None and analysis.recorder.added_ns:
        what += "; includes recording overhead"
    many = "one in the recording" if word == "pass" else f"mean of {count} of {steps.count} {word}s"
    return f"Where the time of {a_turn} goes ({many}{what})"


def _unit(analysis: Analysis) -> str:
    """Return the unit that the mean is per: a step, an iteration or the span."""
    return wording.loop_name(analysis)[1] if analysis.breakdown[0].steps else "span"


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

    def label(row: LedgerRow) -> str:
        named = few and row.rank != row.paid_by
        waits = f"waiting for rank {row.rank}" if named else "waiting for another rank"
        return analysis.cause_label(row.cause, waits if row.waits else "")

    def cells(rows: Sequence[LedgerRow]) -> Iterator[str]:
        for column in columns:
            keys = {(gpu.gpu, gpu.rank) for gpu in column}
            lost = sum(row.ns for row in rows if (row.gpu, row.paid_by) in keys)
            share = format_share(lost, sum(gpu.total_ns for gpu in column))
            mean = format_ns(lost / sum(max(gpu.steps, 1) for gpu in column))
            yield from (mean, share) if lost else (UNKNOWN, "")

    def more(rows: Sequence[LedgerRow]) -> tuple[str, str]:
        ranks = {row.rank for row in rows if row.ns >= _MANY_RANKS * rows[0].ns}
        at = f"{rows[0].line} ({rows[0].evidence})" if rows[0].line else rows[0].evidence
        is_large = _ns(rows) >= _LEAST_EXPLAINED * whole
        return "" if few else format_ranges(sorted(ranks)), at if is_large else ""

    body = [(label(rows[0]), *cells(rows), *more(rows)) for rows in shown]
    body += [("other", *cells(other), "", "")] if other else []
    body.append(("total", *cells(every), "", ""))
    heads = [wording.gpu_label(gpu, analysis) for gpu in gpus] if few else ["mean"]
    header = ("", *(cell for head in heads for cell in (head, "")), "ranks", "evidence")
    unit = _unit(analysis).replace("span", "whole span")
    return Table(f"Why ({unit}, per GPU)", header, tuple(body))


def _ns(rows: Iterable[LedgerRow]) -> int:
    return sum(row.ns for row in rows)


_LEAST_GAP: Final = 0.005
"""Share of a step from which a gap is listed."""
_ALIKE: Final = 0.9
"""Ratio to the length of a listed gap from which one of the same cause is not listed again."""


def gaps_table(analysis: Analysis, most: int) -> Table:
    """List the largest gaps; only those in measured steps where steps were found. Gaps of one cause
    and similar length have one row, that of the largest, with their number.
    """
    gaps, turn = analysis.gaps, wording.loop_name(analysis)[0]
    least = _LEAST_GAP * (analysis.steps.mean_ns or 0)
    alike: dict[Gap, int] = {}
    listed = gaps.largest_in_steps or gaps.largest
    cause_of = {gap: wording.gap_cause(gap, analysis) for gap in listed}
    # There are more than are known, of the last one's kind.
    cut = listed[-1] if 0 < len(listed) == len(gaps.largest) < gaps.count else None
    more = None
    for gap in listed:
        if gap.length_ns >= least:
            same = (g for g in alike if cause_of[g] == cause_of[gap])
            first = next((g for g in same if gap.length_ns >= _ALIKE * g.length_ns), gap)
            alike[first] = alike.get(first, 0) + 1
            more = first if gap is cut else None
    many = any(count > 1 for count in alike.values())
    columns = (
        Column("", lambda gap: wording.gpu_label(gap, analysis)),
        Column("longest" if many else "length", "length_ns"),
        *([Column("alike", lambda gap: f"{'≥' * (gap is more)}{alike[gap]}")] if many else []),
        Column("from", lambda gap: f"{(gap.start_ns - analysis.origin_ns) / 1e9:.6f} s"),
        Column("step", "step", "{}", ""),
        Column("cause", lambda gap: cause_of[gap]),
        Column("evidence", "evidence", unknown=""),
    )
    where = " in it" if turn == "pass" else f" in these {turn}s"
    where *= bool(gaps.largest_in_steps)
    on = " on all GPUs" if len(analysis.breakdown) > 1 else ""
    every = f"the whole trace has {gaps.count:,}, {format_ns(gaps.total_ns)}{on}"
    every += f"; alike: of one cause and about as long{on}" if many else ""
    return tabulate(f"Largest gaps{where} ({every})", columns, list(alike)[:most])


def phases_table(analysis: Analysis) -> Table | None:
    """Tabulate the phases of a step on the rank whose GPUs idle most; None if none were recorded.

    Phases that were not met are left out.
    """
    ranks = analysis.step_phases
    if not ranks:
        return None
    most = max(ranks, key=lambda row: sum(phase.idle_ns or 0 for phase in row.phases))
    rows = [phase for phase in most.phases if phase.host_ns or phase.idle_ns]
    known = [phase.idle_ns for phase in rows if phase.idle_ns is not None]
    columns = (
        Column("", "name"),
        Column("host", "host_ns"),
        Column("share", lambda row: format_share(row.host_ns, most.step_ns)),
        Column("GPU idle meanwhile", "idle_ns"),
    )
    of = f" of rank {most.rank}" if len(ranks) > 1 else ""
    title = f"What the host does in {wording.loop_name(analysis)[1]}{of} (mean of {most.steps})"
    for row in analysis.allocators:
        if row.rank == most.rank and row.peak_bytes is not None and row.peak_phase is not None:
            title += f"; its memory peaks at {format_bytes(row.peak_bytes)} in "
            title += PHASES[row.peak_phase]
    total = ("all", format_ns(most.step_ns), "", format_ns(sum(known)) if known else "")
    return tabulate(title, columns, rows, [total])


_FEWEST_SAMPLES: Final = 20
_LEAST_OF_LINE: Final = 0.02
"""Share of the samples from which a line is listed."""
_MOST_LINES: Final = 8


def lines_table(analysis: Analysis) -> Table | None:
    """Tabulate the lines at which samples met the host, of the rank with most samples; None where
    there are few.
    """
    samples: dict[int, int] = {}
    for row in analysis.host_lines:
        samples[row.rank] = samples.get(row.rank, 0) + row.samples
    rank = max(samples, key=lambda rank: samples[rank], default=0)
    if samples.get(rank, 0) < _FEWEST_SAMPLES:
        return None
    mine = [row for row in analysis.host_lines if row.rank == rank and row.share >= _LEAST_OF_LINE]
    of = f" of rank {rank}" if len(samples) > 1 else ""
    has_steps = any(row.steps for row in analysis.breakdown)
    unit = wording.loop_name(analysis)[1] if has_steps else "whole span"
    title = f"Where the host{of} is, by line ({unit}, {samples[rank]:,} samples)"
    return declared(title, mine[:_MOST_LINES])


_LEAST_SHARE: Final = 0.005
"""Share of a loader's time from which a part is listed."""
_LONGEST_PART: Final = 40


def loader_tables(analysis: Analysis) -> tuple[Table, ...]:
    """Tabulate the loader that makes its rank wait most: its parts, and other numbers of workers.

    Return none where no loader was recorded.
    """
    if not analysis.loader:
        return ()
    loader = max(analysis.loader, key=lambda loader: loader.wait_ns)
    of = f" of rank {loader.rank}" if len(analysis.loader) > 1 else ""
    workers = format_count(loader.workers, "worker")
    queue = "in the process that trains"
    if loader.queue_median is not None and loader.queue_empty is not None:
        queue = f"{loader.queue_median:g} ready when asked, none in {loader.queue_empty:.0%}"
    title = f"A batch in the data loader{of} ({workers}, {loader.batches:,} batches; {queue})"
    labels = wording.labels_of({part.name: part.name for part in loader.parts}, _LONGEST_PART)
    columns = (
        Column("", lambda part: labels[part.name]),
        Column("time", "batch_ns"),
        Column("share", "share", "{:.1%}"),
    )
    whole = [("all", format_ns(loader.batch_ns), "")]
    whole += [("receive", format_ns(loader.receive_ns), "")] if loader.workers else []
    whole += [("pin", format_ns(loader.pin_ns), "")] if loader.pin_ns is not None else []
    parts = [part for part in loader.parts if part.share >= _LEAST_SHARE]

    def count(choice: LoaderChoice) -> str:
        return f"{choice.workers}{' (now)' if choice.workers == loader.workers else ''}"

    predicted = f"Predicted with other numbers of workers{of} ({loader.cores} cores)"
    return (
        tabulate(title, columns, parts, whole),
        declared(predicted, loader.predictions, Column("workers", count)),
    )


_MOST: Final = 6
"""Maximum number of operations, and of groups of ranks, shown."""


def collectives_table(analysis: Analysis) -> Table | None:
    """Tabulate collectives, a row per operation; return None where GPUs do not communicate."""
    shown = analysis.collectives[:_MOST]
    if not shown:
        return None

    def members(total: CollectiveTotals) -> str:
        """Name the operation, what its group is for, and who: ``AllReduce, tensor, gpus 0-3``."""
        gpus, ranks = sorted(set(total.gpus)), sorted(set(total.ranks))
        # Cards of several hosts have the same indices.
        many = len(gpus) < len(total.gpus)
        who = format_ids("rank", ranks) if many else format_ids("gpu", gpus)
        unseen = (total.group_size or 0) - len(total.gpus)
        who += f" of {total.group_size}" if unseen > 0 else ""
        who += f" on {total.hosts} hosts" if total.hosts > 1 else ""
        name = f" ({total.group})" if total.group and total.group != "default_pg" else ""
        role = f"{total.role}{name}, " if total.role or name else ""
        return f"{total.operation}, {role}{who}"

    unit = f"per GPU and {wording.loop_name(analysis)[0]}" if shown[0].steps else "per GPU"
    where = " within one process" if all(total.one_process for total in shown) else ""
    title = f"Communication{where} {unit} (exposed = not hidden by compute)"
    return declared(title, shown, Column("", members))


_MOST_STAGES: Final = 16


def parallel_tables(analysis: Analysis, most: int | None = None) -> Iterator[Table]:
    """Tabulate what forms of parallel training cost: pipelines, experts (so many of each at most),
    sharded parameters, tensor-parallel groups.
    """
    a_turn = wording.loop_name(analysis)[1]
    for pipeline in analysis.pipelines[:most]:
        schedule = "" if pipeline.schedule == "unknown" else f"{pipeline.schedule}, "
        batches = f"{pipeline.micro_batches} micro-batches"
        title = f"Pipeline ({schedule}{batches}; {a_turn}, and why stages idle)"
        yield declared(title, pipeline.stages[:_MOST_STAGES])
    for experts in analysis.experts[:most]:
        title = f"Experts ({a_turn}; {experts.exchanges} exchanges of tokens, and back)"
        yield declared(title, experts.ranks[:_MOST_STAGES])
    title = f"Sharded parameters ({a_turn}; prefetched: gathered beside kernels)"
    yield declared(title, analysis.sharded[:_MOST])
    title = f"Tensor parallel ({a_turn}; beside products: matrix products run, too)"
    yield declared(title, analysis.tensor[:_MOST])


def links_table(analysis: Analysis, most: int) -> Table:
    """Tabulate the directions with most bytes copied."""
    used = [row for row in analysis.links if row.bytes or row.staged_bytes]
    used.sort(key=lambda row: -(row.bytes + row.staged_bytes))
    several = len({row.host for row in used}) > 1
    labels = {(gpu.gpu, gpu.rank): wording.gpu_label(gpu, analysis) for gpu in analysis.gpus}

    def ends(row: GpuLink) -> str:
        pairs = ((row.from_, row.from_rank), (row.to, row.to_rank))
        direction = " to ".join(labels.get(pair, f"gpu {pair[0]}") for pair in pairs)
        return direction + (f" on {row.host}" if several else "")

    more = f" (the {most} of {len(used)} directions with most)" if len(used) > most else ""
    title = f"Copies between GPUs{more}"
    return declared(title, used[:most], Column("", ends))


_COPIES: Final = {
    "h2d": "host to device",
    "d2h": "device to host",
    "d2d": "within the device",
    "peer": "between GPUs",
}


def copies_table(analysis: Analysis) -> Table:
    """Tabulate the copies of all GPUs by direction, unless they take next to no time."""
    sums: dict[tuple[str, str], list[CopyUse]] = {}
    for row in analysis.copies:
        sums.setdefault((row.kind, row.memory), []).append(row)
    steps = sum(row.steps for row in analysis.breakdown)
    each = steps or max(len(analysis.breakdown), 1)
    least = _WORTH * sum(row.total_ns for row in analysis.breakdown)
    body = []
    for (kind, memory), rows in sums.items():
        spent, moved = sum(row.total_ns for row in rows), sum(row.bytes for row in rows)
        limits = {row.limit_bytes_per_s for row in rows}
        limit, rate = limits.pop() if len(limits) == 1 else None, moved * 1e9 / spent
        cells = (
            f"{_COPIES[kind]}{f', {memory}' if memory else ''}",
            f"{sum(row.count for row in rows) / each:,.1f}".removesuffix(".0"),
            format_bytes(round(moved / each)),
            format_ns(round(spent / each)),
            f"{rate / 1e9:,.4g}",
            "" if limit is None else f"{limit / 1e9:,.4g}",
            "" if limit is None else f"{rate / limit:.0%}",
        )
        body += [cells] if spent >= least else []
    head = ("", "copies", "bytes", "time", "GB/s", "limit", "of limit")
    loop = wording.loop_name(analysis)[1] if steps else "in all"
    return Table(f"Copies ({loop}, on a GPU)", head, tuple(body))


def cards_table(analysis: Analysis) -> Table | None:
    """Tabulate NVML samples by card; return None where no card was sampled then."""
    cards = analysis.cards
    if not cards:
        return None
    hosts = len({card.host for card in cards}) > 1
    label = Column("", lambda card: f"gpu {card.gpu}" + (f" rank {card.rank}" if hosts else ""))
    counts = sorted({min(card.samples for card in cards), max(card.samples for card in cards)})
    samples = "sample" if counts[-1] == 1 else "samples"
    where = "in these steps" if any(row.steps for row in analysis.breakdown) else "while they work"
    count = " to ".join(f"{count:,}" for count in counts)
    title = f"The cards {where} (NVML, {count} {samples} of each at work)"
    if any(row.gpu is not None for row in analysis.breakdown):
        # The trace knows when the cards work; NVML averages over more.
        cards = tuple(replace(card, utilization_percent=None) for card in cards)
    return declared(title, cards, label)


def throughput_table(analysis: Analysis) -> Table | None:
    """Tabulate samples and tokens by rank; None where the program gave none."""
    rows = analysis.throughput
    if not rows:
        return None
    first = rows[0]
    given = any(row.samples_per_step or row.tokens_per_step for row in rows)
    of = ""
    if first.peak_flop_per_s:
        of = f"; MFU of {first.peak_flop_per_s / 1e12:,.0f} TFLOP/s in {first.precision}"
    sources = ["as passed to gputrace.step"] * given
    sources += ["by the shapes of operators"] * (first.flop_source == "shapes")
    return declared(f"Work, {' and '.join(sources)}{of}", rows)


_LEAST_ENERGY: Final = 0.005
"""Share of the energy from which a class has a column."""


def energy_table(analysis: Analysis) -> Table | None:
    """Tabulate energy by class, of the GPUs whose counter was read; None without any."""
    rows = analysis.energy
    least = _LEAST_ENERGY * sum(row.total_mj for row in rows)
    if not least:
        return None

    def column(title: str, *names: str) -> Column:
        """Show what classes take together, of a step where there are steps."""

        def joules(row: Energy) -> float:
            whole = row.total_mj if row.step_mj is None else row.step_mj
            part = sum(row.classes_mj[name] for name in names)
            return whole * part / max(row.total_mj, 1) / 1e3

        return Column(title, joules, "{:,.1f} J")

    whole = "energy" if any(row.step_mj is None for row in rows) else "a step"
    label = Column("", lambda row: f"gpu {row.gpu} rank {row.rank}")
    columns = [label, column(whole, *CLASS_NAMES)]
    for name, title in CLASS_NAMES.items():
        if sum(row.classes_mj[name] for row in rows) >= least:
            columns.append(column(title, name))
    title = "Energy by class (NVML's counter"
    for what, value in (("sample", rows[0].sample_mj), ("token", rows[0].token_mj)):
        if value is not None:
            mean = sum(getattr(row, f"{what}_mj") or 0 for row in rows) / len(rows)
            title += f"; {format_number(mean / 1e3)} J a {what}"
    return tabulate(f"{title})", columns, rows)


BESIDE_KERNELS: Final = 49
"""Terminal columns that the figures of a kernel take."""
_WORTH: Final = 0.001
"""Share of the time below which a kernel, a module or a direction of copies is not shown."""


def kernels_table(
    analysis: Analysis, most: int, longest: int = 80, *, longest_launches: bool = True
) -> Table | None:
    """Tabulate the kernels with most time over all GPUs, and those of the longest launches if these
    are shown; return None where all are negligible.
    """
    kernels = analysis.kernels
    shown = [use for use in kernels.top[:most] if use.share >= _WORTH] if kernels else []
    if kernels is None or not shown:
        return None
    launches = [kernels.longest]
    if kernels.longest_compute not in (None, kernels.longest):
        launches.append(kernels.longest_compute)
    peaks = {launch.name for launch in launches}
    if longest_launches:
        shown += [use for use in kernels.top if use.name in peaks and use not in shown]
    names = [use.name for use in shown]
    named = list(dict.fromkeys([*names, *(launch.name for launch in launches)]))
    labels = dict(zip(named, wording.kernel_labels(named, longest), strict=True))

    def each(use: KernelUse) -> int:
        return kernels.steps or max(len(use.by_gpu), 1)

    def count(use: KernelUse) -> str:
        mean = use.count / each(use)
        return f"{mean:,.0f}" if mean >= 10 or mean == int(mean) else f"{mean:.1f}"

    columns = (
        Column("", lambda use: labels[use.name]),
        Column("family", "family"),
        Column("tc", "tensor_cores", lambda known: known.replace("unknown", "?"), ""),
        Column("times", count),
        Column("median", "median_ns"),
        *([Column("longest", "max_ns")] if longest_launches else []),
        Column("time", lambda use: use.total_ns / each(use), format_ns),
        Column("share", lambda use: format_share(use.total_ns, kernels.total_ns)),
        Column("achieved", lambda use: use.roofline and use.roofline.speed, unknown=""),
        Column("of limit", lambda use: use.roofline and use.roofline.reached, unknown=""),
        Column("SMs", lambda use: use.activity and use.activity.sms, "{:.0%}", ""),
        Column("math", lambda use: use.activity and use.activity.arithmetic, "{:.0%}", ""),
        Column("memory", lambda use: use.activity and use.activity.memory, "{:.0%}", ""),
        Column("does", lambda use: use.activity and use.activity.does, unknown=""),
        *([Column("defined at", "line", unknown="")] if longest_launches else []),
    )
    where = wording.loop_name(analysis)[1] if kernels.steps else "in all"
    of = f"{len(shown)} of {kernels.distinct}, {where} on a GPU"
    if {use.tensor_cores for use in shown} & {"yes", "no"}:
        of += "; tc: on tensor cores"
    turn = wording.loop_name(analysis)[0]
    for launch, which in zip(launches, ("longest launch", "longest that computes"), strict=False):
        at = f"{(launch.start_ns - analysis.origin_ns) / 1e9:.6f} s"
        at += "" if launch.step is None or turn == "pass" else f" in {turn} {launch.step}"
        at += f" on {wording.gpu_label(launch, analysis)}" if len(analysis.gpus) > 1 else ""
        of += f"; {which}: {labels[launch.name]}, {format_ns(launch.duration_ns)} at {at}"
    if any(use.activity for use in shown):
        of += "; SMs, math, memory: how busy the card's parts are meanwhile"
    return tabulate(f"Kernels that take most time ({of})", columns, shown, names=tuple(names))


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

    def label(row: ModuleUse) -> str:
        last = row.path.rpartition("/")[2] or "outside of modules"
        return "· " * row.path.count("/") + last

    *before, exposed, line = ModuleUse.COLUMNS
    share = Column("share", lambda row: format_share(time[row], total[rank]))
    of = f" of rank {rank}" if len(total) > 1 else ""
    has_steps = any(row.steps for row in analysis.breakdown)
    loop = wording.loop_name(analysis)[1] if has_steps else "in all"
    title = f"Modules{of} by the kernels that they launch ({loop})"
    columns = (Column("", label), *before, share, exposed, line)
    return tabulate(title, columns, [row for row in rows if row in shown])


def extra_table(table: ExtraTable) -> Table:
    """Convert a plugin's table: floats with four significant digits, unknown values as a dash."""

    def cell(value: object) -> str:
        if value is None:
            return UNKNOWN
        return f"{value:,.4g}" if isinstance(value, float) else str(value)

    return Table(table.title, table.header, tuple(tuple(map(cell, row)) for row in table.rows))


def _memory_tables(devices: Sequence[DeviceMemory], limits: Limits) -> tuple[Table, ...]:
    """Tabulate the memory of the GPU that holds most; importing the tables takes a while."""
    if not devices:
        return ()
    from gputrace.report.memory import memory_tables

    fullest = max(devices, key=lambda device: device.moments[0].allocated_bytes)
    return memory_tables([fullest], limits)


def document(analysis: Analysis, limits: Limits) -> Document:
    """Return the report of an analysis."""
    width = limits.width
    names = room_for_names(width, BESIDE_KERNELS) if width else 80
    kernels = kernels_table(analysis, limits.kernels, names, longest_launches=not width)
    sections = {
        "host": (phases_table(analysis), lines_table(analysis), *loader_tables(analysis)),
        "links": (
            collectives_table(analysis),
            *parallel_tables(analysis, limits.parallel),
            links_table(analysis, limits.links),
        ),
        "cards": (
            copies_table(analysis),
            cards_table(analysis),
            throughput_table(analysis),
            energy_table(analysis),
        ),
        "kernels": (kernels,),
        "modules": (modules_table(analysis),),
        "memory": _memory_tables(analysis.memory, limits),
        "extra": map(extra_table, analysis.tables),
    }
    first: list[Table | None] = []
    if analysis.breakdown:
        first.append(main_table(analysis, limits.gpus_across))
        first.append(causes_table(analysis, limits.gpus_across, limits.causes))
        first.append(gaps_table(analysis, limits.gaps))
    findings = [
        Line(
            f"{wording.capital(each.message)}.",
            STYLES[each.severity],
            each.id,
            tuple(Line(text, name=name) for name, text in wording.explain(analysis, each)),
        )
        for each in wording.shown_findings(analysis)
    ]
    head = Line(wording.verdict(analysis), "" if wording.too_short(analysis) else "green")
    if findings and not wording.too_short(analysis):
        head = replace(findings.pop(0), name="")
    parts = wording.describe_parts(wording.run_parts(analysis))
    more = (f"The run: {parts}." if parts else "", wording.describe_numbers(analysis))
    return Document(
        head=(head, *(Line(text) for text in more if text)),
        tables=present(first),
        findings=tuple(findings),
        sections={name: present(tables) for name, tables in sections.items()},
        notes=tuple(Line(note, "dim", "note") for note in wording.notes(analysis)),
    )


def records(analysis: Analysis) -> Records:
    """Return the breakdown, a row per GPU; times in nanoseconds."""
    names = [field.name for field in fields(Breakdown)]
    return names, attributes(analysis.breakdown, names)
