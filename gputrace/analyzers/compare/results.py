"""Results of a comparison. Field names are those of its JSON."""

from __future__ import annotations

from dataclasses import dataclass

from gputrace.model.results import Breakdown

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One of the runs."""

    label: str
    paths: tuple[str, ...]
    source: str
    gpus: int
    """Those that do the work."""
    ranks: int
    gpu_names: tuple[str, ...]
    """The models of the cards."""
    steps_kind: str
    """``training``, ``iterations`` or ``none``."""
    steps: int
    """How many are measured."""
    span_ns: int
    mean_ns: int | None
    """Of the measured steps."""
    p50_ns: int | None
    p95_ns: int | None
    kernels: float | None
    """A step and GPU."""
    kernel_ns: int | None
    """Time of the kernels that compute, a step and GPU."""
    input_bytes: int | None
    """Of the input copies of a step, on all GPUs; None where none can be told."""
    samples: float | None
    """A step, on all GPUs; None where nobody said."""
    throughput: float | None
    """Samples a second."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs, and bounds of the difference."""

    a_ns: int
    b_ns: int
    difference_ns: int
    low_ns: int | None
    high_ns: int | None
    """Bounds of the difference; None where they can't be told."""
    changed: bool | None
    """Whether it differs by more than noise and by enough to matter; None if that is unknown."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The GPU that has most of a class."""

    gpu: int | None
    rank: int
    ns: int


@dataclass(frozen=True, slots=True)
class ClassChange(Change):
    """A class of time, mean over the GPUs."""

    name: str
    """One of the classes of ``breakdown``, or ``host_data``, ``communication_wait``."""
    a_share: float
    b_share: float
    """Of the step, or of the span."""
    a_worst: Worst | None
    b_worst: Worst | None


@dataclass(frozen=True, slots=True)
class KernelChange(Change):
    """All kernels of one name."""

    name: str
    communication: bool
    status: str
    """``both``, ``new`` (only in B) or ``gone`` (only in A)."""
    a_count: float
    b_count: float
    """A step and GPU."""
    a_median_ns: int | None
    b_median_ns: int | None
    """How long one takes; None where there is none."""


@dataclass(frozen=True, slots=True)
class GpuPair:
    """A GPU's row of ``breakdown`` in each run; None where a run has none of it."""

    gpu: int | None
    rank: int
    a: Breakdown | None
    b: Breakdown | None


@dataclass(frozen=True, slots=True)
class FindingChange:
    """A finding in one run or both."""

    id: str
    status: str
    """``appeared``, ``gone`` or ``stayed``."""
    a_severity: str | None
    b_severity: str | None
    a_impact_ns: int | None
    b_impact_ns: int | None
    message: str
    """Of B where it has the finding, else of A."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs side by side: A, then B."""

    step: Change | None
    """The mean step, or iteration; None where the runs have none in common."""
    speed_up: float | None
    """Work in the same time, B against A; over 1 is faster."""
    speed_up_low: float | None
    speed_up_high: float | None
    work_ratio: float
    """Samples in a step of B for each in one of A."""
    work_source: str
    """What tells: ``batch`` (given), ``input_bytes``, or ``assumed`` to be equal."""
    classes: tuple[ClassChange, ...]
    kernels: tuple[KernelChange, ...]
    """Those that differ most first."""
    gpus: tuple[GpuPair, ...]
    findings: tuple[FindingChange, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a class adds to the ideal step."""

    name: str
    ns: int
    low_ns: int | None
    high_ns: int | None
    changed: bool | None


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A run beside the one with the fewest GPUs."""

    label: str
    gpus: int
    mean_ns: int
    throughput: float | None
    speed_up: float | None
    speed_up_low: float | None
    speed_up_high: float | None
    efficiency: float | None
    """Speed-up for each GPU more; 1 is ideal."""
    ideal_ns: int | None
    """A step if the GPUs were used as well as those of the first run."""
    losses: tuple[Loss, ...]
    """They sum to ``mean_ns - ideal_ns``; largest first."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Runs by their number of GPUs."""

    kind: str
    """``weak`` (the work of a GPU stays), ``strong`` (the work of a step does), ``same`` (so does
    the number of GPUs) or ``unknown``."""
    source: str
    """What tells the kind: ``batch``, ``input_bytes``, ``kernels`` or ``none``."""
    rows: tuple[ScalingRow, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer to what differs between runs."""

    schema_version: int
    verdict: str
    """``faster``, ``slower``, ``same``, ``unclear`` (the noise hides it), ``unknown`` (nothing to
    compare), or ``scaling``."""
    message: str
    unit: str
    """What times are of: ``step``, ``iteration`` or ``span``."""
    unit_reason: str
    """Why not steps; nothing where they are."""
    runs: tuple[RunSummary, ...]
    """As named; of scaling, in order of GPUs."""
    pair: Pair | None
    """Of two runs."""
    scaling: Scaling | None
    """Of more than two, or of two with different numbers of GPUs."""
    warnings: tuple[str, ...]
    """What limits the comparison."""
