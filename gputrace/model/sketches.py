"""Result of watching a run, or of analyzing a folder of sketches of its steps.

Times are integer nanoseconds; field names are those of the JSON.
"""

from __future__ import annotations

from typing import ClassVar

from gputrace.model.struct import Column, Columns, Struct
from gputrace.units import format_bytes, format_ns


class RankSummary(Struct, frozen=True):
    """Steps of one rank so far, without the first ones."""

    job: str
    rank: int
    host: str
    pid: int
    steps: int
    """Steps that have ended."""
    median_ns: int
    """Median step."""
    p95_ns: int
    """95th percentile of the steps."""
    mean_ns: int
    """Mean step."""
    data_ns: int
    """Mean part of a step for which it waited for its loader."""
    gc_ns: int
    """Mean part of a step in which it collected garbage."""
    compilation_ns: int
    """Mean part of a step in which it compiled."""
    checkpoint_ns: int
    """Mean part of a step in which it saved checkpoints."""
    queued_ns: int
    """Mean part of a step for which its thread waited for a core."""
    resident_bytes: int
    """Memory of the process at its last step; 0 if unknown."""

    COLUMNS: ClassVar[Columns] = (
        Column("rank", "rank"),
        Column("host", "host"),
        Column("steps", "steps"),
        Column("median", "median_ns"),
        Column("p95", "p95_ns"),
        Column("data", lambda row: row.data_ns or None, format_ns),
        Column("collecting", lambda row: row.gc_ns or None, format_ns),
        Column("compiling", lambda row: row.compilation_ns or None, format_ns),
        Column("saving", lambda row: row.checkpoint_ns or None, format_ns),
        Column("queued", lambda row: row.queued_ns or None, format_ns),
        Column("memory", lambda row: row.resident_bytes or None, format_bytes),
    )


class Slowdown(Struct, frozen=True):
    """A rank that others wait for, or steps that became slower."""

    kind: str
    """``late-rank``; ``shift``, from a step on; ``drift``, little by little; ``slow-card``: the
    same kernels take longer on it; or ``kernels``: a family or a collective takes longer."""
    job: str
    rank: int | None
    """The rank; None where all have become slower."""
    since_step: int
    """Step from which it is seen."""
    ns: int
    """Nanoseconds of a step by which the rank is late, or a step or its kernels are longer."""
    step_ns: int
    """A step now."""
    part: str
    """Part of the step that is longer: ``data``, ``gc``, ``compilation``, ``checkpoint``,
    ``forward``, ``backward``, ``optimizer``, ``queued`` or ``rest``; of kernels, ``kernels``, a
    family or a collective."""
    line: str
    """Line of the program that has more of the samples; empty where none stands out."""
    message: str


class KernelTime(Struct, frozen=True):
    """Kernels of a family, or of a collective, in windows of a job; nanoseconds of a step."""

    job: str
    name: str
    kind: str
    """``family`` or ``collective``; the times of collectives are part of ``communication``."""
    count: int
    """Number in a step of the median rank."""
    first_ns: int
    """Median over the ranks in the first quarter of the windows."""
    ns: int
    """Median over the ranks in the last quarter."""
    most_ns: int
    """Most of a rank in the last quarter."""
    most_rank: int
    """The rank that has most."""

    COLUMNS: ClassVar[Columns] = (
        Column("", "name"),
        Column("count", "count"),
        Column("at first", "first_ns"),
        Column("now", "ns"),
        Column("most", lambda row: f"{format_ns(row.most_ns)} (rank {row.most_rank})"),
    )


class CardSpeed(Struct, frozen=True):
    """Card in several runs, compared with others of its model by the kernels that both ran."""

    host: str
    gpu: str
    """UUID."""
    card: str
    """Model."""
    runs: int
    """Runs in which it was compared."""
    slow_runs: int
    """Runs in which its kernels took 3 % longer."""
    ratio: float
    """Median over the runs of its kernel times to the others'."""
    message: str
    """Sentence about a card that is slow in most of three runs or more; empty for the others."""

    COLUMNS: ClassVar[Columns] = (
        Column("host", "host"),
        Column("card", "gpu"),
        Column("model", "card"),
        Column("runs", "runs"),
        Column("slow in", "slow_runs"),
        Column("kernel times", "ratio", "{:.3f}"),
    )


class SketchReport(Struct, frozen=True):
    """All ranks, and what changed, the worst first."""

    schema_version: int
    source: str
    """``sketches``."""
    ranks: tuple[RankSummary, ...]
    """A row for each rank of each job."""
    changes: tuple[Slowdown, ...]
    """Late ranks and changes, the worst of each job first."""
    kernels: tuple[KernelTime, ...] = ()
    """Families and collectives of each job, where windows of kernels were opened."""
    cards: tuple[CardSpeed, ...] = ()
    """Cards of several runs, the slowest first."""
