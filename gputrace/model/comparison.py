"""Results of comparing runs, or a step with the median one. Field names are those of the JSON."""

from __future__ import annotations

from typing import ClassVar

from gputrace.model.results import Breakdown, Gap
from gputrace.model.struct import Column, Columns, Struct
from gputrace.units import format_change, format_number

SCHEMA_VERSION = 1


class RunSummary(Struct, frozen=True):
    """Summary of a run."""

    label: str
    """Name of the run."""
    paths: tuple[str, ...]
    source: str
    """Recorder."""
    gpus: int
    """Number of GPUs that do the work."""
    ranks: int
    gpu_names: tuple[str, ...]
    """Models of the cards."""
    steps_kind: str
    """``training``, ``iterations`` or ``none``."""
    steps: int
    """Number of measured steps."""
    span_ns: int
    mean_ns: int | None
    """Mean of the measured steps."""
    p50_ns: int | None
    p95_ns: int | None
    """Median and 95th percentile of the measured steps."""
    kernels: float | None
    """Number per step and GPU."""
    kernel_ns: int | None
    """Time of compute kernels, per step and GPU."""
    input_bytes: int | None
    """Bytes of the input copies of a step, on all GPUs; None if unknown."""
    samples: float | None
    """Samples per step, on all GPUs; None if not given."""
    throughput: float | None
    """Samples per second."""
    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("GPUs", "gpus", "{}"),
        Column("measured", "measured"),
        Column("mean", "mean_ns"),
        Column("p50", "p50_ns"),
        Column("p95", "p95_ns"),
        Column("samples/s", "throughput", format_number),
    )

    @property
    def measured(self) -> str:
        """Number of measured steps, with its noun."""
        return f"{self.steps} {'iterations' if self.steps_kind == 'iterations' else 'steps'}"


class Change(Struct, frozen=True):
    """Figure in both runs, with bounds of the difference."""

    a_ns: int
    """Figure of the first run."""
    b_ns: int
    """Figure of the second run."""
    difference_ns: int
    """The second less the first."""
    low_ns: int | None
    high_ns: int | None
    """Bounds of the difference; None if unknown."""
    changed: bool | None
    """True if it differs by more than noise and by enough to matter; None if unknown."""


class Worst(Struct, frozen=True):
    """GPU that has most of a class."""

    gpu: int | None
    rank: int
    ns: int


class ClassChange(Change, frozen=True):
    """Class of time, mean over the GPUs."""

    name: str
    """Class of ``breakdown``, or ``host_data``, ``communication_wait``."""
    a_share: float
    b_share: float
    """Share of the step, or of the span."""
    a_worst: Worst | None
    b_worst: Worst | None


class KernelChange(Change, frozen=True):
    """All kernels of one name."""

    name: str
    communication: bool
    """True if it communicates."""
    status: str
    """``both``, ``new`` (only in B) or ``gone`` (only in A)."""
    a_count: float
    b_count: float
    """Number per step and GPU."""
    a_median_ns: int | None
    b_median_ns: int | None
    """Duration of one kernel; None where there is none."""


class GpuPair(Struct, frozen=True):
    """Rows of ``breakdown`` of a GPU in each run; None where a run lacks it."""

    gpu: int | None
    rank: int
    a: Breakdown | None
    b: Breakdown | None


class FindingChange(Struct, frozen=True):
    """Finding in one run or both."""

    id: str
    status: str
    """``appeared``, ``gone`` or ``stayed``."""
    a_severity: str | None
    b_severity: str | None
    a_impact_ns: int | None
    b_impact_ns: int | None
    message: str
    """Message of B where it has the finding, else of A."""


class CauseChange(Struct, frozen=True):
    """Time that a cause of the ledger takes in both runs, per step, mean over the GPUs."""

    cause: str
    label: str
    a_ns: int
    b_ns: int
    difference_ns: int


class LineChange(Struct, frozen=True):
    """Time of a mean step that samples met the hosts in a function, mean over the ranks."""

    line: str
    """Most sampled line of the function, in B if it was met there."""
    a_ns: int
    b_ns: int
    difference_ns: int


class Pair(Struct, frozen=True):
    """Comparison of two runs: A, then B."""

    step: Change | None
    """Mean step, or iteration; None where the runs have no unit in common."""
    speed_up: float | None
    """Ratio of the work per time, B to A; above 1 is faster."""
    speed_up_low: float | None
    speed_up_high: float | None
    work_ratio: float
    """Samples in a step of B for each in one of A."""
    work_source: str
    """Source of the ratio: ``batch`` (given), ``input_bytes``, or ``assumed`` to be equal."""
    classes: tuple[ClassChange, ...]
    kernels: tuple[KernelChange, ...]
    """Kernels, largest difference first."""
    gpus: tuple[GpuPair, ...]
    findings: tuple[FindingChange, ...]
    """Findings of either run."""
    causes: tuple[CauseChange, ...] = ()
    """Causes of lost time, largest difference first; empty where there are no steps."""
    lines: tuple[LineChange, ...] = ()
    """Functions of the program whose time changed beyond the noise of the samples, largest
    difference first; empty where only one run was sampled."""


class Loss(Struct, frozen=True):
    """Time that a class adds to the ideal step."""

    name: str
    ns: int
    low_ns: int | None
    high_ns: int | None
    changed: bool | None


class ScalingRow(Struct, frozen=True):
    """Run compared with the one with the fewest GPUs."""

    label: str
    gpus: int
    mean_ns: int
    throughput: float | None
    speed_up: float | None
    speed_up_low: float | None
    speed_up_high: float | None
    efficiency: float | None
    """Speed-up divided by the ratio of GPU counts; 1 is ideal."""
    ideal_ns: int | None
    """Step if the GPUs were used as well as those of the first run."""
    losses: tuple[Loss, ...]
    """Losses by class, which sum to ``mean_ns - ideal_ns``; largest first."""


class Scaling(Struct, frozen=True):
    """Runs by their number of GPUs."""

    kind: str
    """``weak`` (constant work per GPU), ``strong`` (constant work per step), ``same``
    (constant work on the same number of GPUs) or ``unknown``."""
    source: str
    """Source of the kind: ``batch``, ``input_bytes``, ``kernels`` or ``none``."""
    rows: tuple[ScalingRow, ...]


class Comparison(Struct, frozen=True):
    """Comparison of two or more runs."""

    schema_version: int
    verdict: str
    """``faster``, ``slower``, ``same``, ``unclear`` (the noise hides it), ``unknown`` (nothing to
    compare), or ``scaling``."""
    message: str
    """Verdict in a sentence."""
    unit: str
    """Unit of the times: ``step``, ``iteration`` or ``span``."""
    unit_reason: str
    """Reason if the unit is not the step, else empty."""
    runs: tuple[RunSummary, ...]
    """Runs in the order given; for scaling, in order of GPUs."""
    pair: Pair | None
    """Comparison of two runs."""
    scaling: Scaling | None
    """Comparison of more than two runs, or of two with different numbers of GPUs."""
    warnings: tuple[str, ...]
    """Limits of the comparison."""


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
    advice: str = ""
    """Advice on the cause that grew most, where a finding of the trace says it."""
