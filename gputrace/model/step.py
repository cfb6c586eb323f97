"""One step against the median step: the result of ``gputrace analyze --step``."""

from __future__ import annotations

from typing import ClassVar

from gputrace.model.columns import Column, Columns
from gputrace.model.results import Gap
from gputrace.model.struct import Struct
from gputrace.units import format_change


class StepPart(Struct, frozen=True):
    """Time of a step that goes to one cause; the parts of a step sum to its length."""

    cause: str
    """``compute``, or the id of a cause of `LedgerRow`; without a GPU ``host_data`` or
    ``host_rest``."""
    label: str
    """Name of the cause in tables."""
    ns: int
    """Nanoseconds in the step."""
    usual_ns: int
    """Nanoseconds in the median step."""
    more_ns: int
    """Difference of the two."""

    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("this step", "ns"),
        Column("median step", "usual_ns"),
        Column("more", "more_ns", format_change),
    )


class StepKernel(Struct, frozen=True):
    """Kernel that takes longer or shorter in a step than in the median step."""

    name: str
    launches: int
    """Launches that start in the step."""
    usual_launches: int
    """Launches that start in the median step."""
    ns: int
    """Sum of their durations in the step."""
    usual_ns: int
    """Sum of their durations in the median step."""
    more_ns: int
    """Difference of the two."""

    COLUMNS: ClassVar[Columns] = (
        Column("launches", "launches"),
        Column("usually", "usual_launches"),
        *StepPart.COLUMNS[1:],
    )


class StepOnGpu(Struct, frozen=True):
    """Step on one GPU, or of one rank without a GPU, against the median step there."""

    gpu: int | None
    rank: int
    start_ns: int
    end_ns: int
    usual_step: int
    """Number of the median step: of the other measured steps there, the one of median length; of
    two in the middle the shorter."""
    usual_ns: int
    """Its length."""
    more_ns: int
    """Length of this step less that of the median step."""
    parts: tuple[StepPart, ...]
    """Causes, the one that grew most first."""
    longest_gap: Gap | None
    """Longest gap whose middle lies in the step; None without one."""
    line: str | None
    """Line of the program with most samples in that gap, or in the step without a GPU, and how
    many of them; None where nothing was sampled."""
    kernels: tuple[StepKernel, ...]
    """At most ten kernels that differ by 1 % of the median step, the largest difference first."""

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.start_ns

    COLUMNS: ClassVar[Columns] = (
        Column("this step", "total_ns"),
        *StepPart.COLUMNS[2:],
        Column("median is", "usual_step"),
    )


class StepExplanation(Struct, frozen=True):
    """Why a step took as long as it did."""

    schema_version: int
    path: str
    step: int
    phase: str
    """Phase of the step, as in `Step`."""
    message: str
    """Answer in a sentence without its full stop."""
    gpus: tuple[StepOnGpu, ...]
    """GPUs, first the one on which it grew most by something else than waiting for others."""
