"""What an analysis says. Field names are those of the JSON that other programs rely on.

Times are integer nanoseconds; moments are on the trace's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Evidence = Mapping[str, float | int | str | None]

SCHEMA_VERSION = 1

IDLE_CAUSES = ("recorder", "data_feeding", "sync", "alloc", "launch", "other_idle")
"""Causes of idle time in order of precedence: the first that is proven counts."""

CLASSES = ("compute", "communication", "h2d", "other_copy", "memset", *IDLE_CAUSES)
"""Everything that a nanosecond of a GPU can be."""


@dataclass(frozen=True, slots=True)
class GpuTotals:
    """One GPU over the whole span; the six classes sum to ``span_ns``."""

    gpu: int
    """Physical index where ``gpu_known``, else the CUDA ordinal."""
    gpu_known: bool
    """Whether ``gpu`` is the index of a physical card, as NVML counts."""
    device: int
    """The CUDA ordinal in its process."""
    rank: int
    """The process that feeds it."""
    rank_known: bool
    """Whether ``rank`` was recorded; else processes are numbered by their GPUs."""
    host: str
    """The machine's name; nothing where it is not known."""
    name: str
    """The card's model."""
    kernels: int
    copies: int
    start_ns: int
    """When its first operation began."""
    span_ns: int
    """What of it was recorded."""
    compute_ns: int
    communication_ns: int
    h2d_ns: int
    other_copy_ns: int
    memset_ns: int
    idle_ns: int


@dataclass(frozen=True, slots=True)
class Steps:
    """How steps were found; times are over the steady ones of all ranks."""

    source: str
    """``markers``, ``profiler``, ``nvtx``, ``inferred`` or ``none``."""
    kind: str
    """``training``, ``iterations`` (not shown to be training) or ``none``."""
    confidence: float
    """From 0 to 1."""
    count: int
    """Of the rank that has most."""
    warmup_count: int
    steady_count: int
    mean_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    reason: str
    """Why these are the steps, or why there are none."""


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """How much of the CUDA calls was recorded, where that is not all."""

    share: float
    """Part of the GPUs' time in which they were, 0 to 1."""
    steps: int
    """Measured steps that have all of theirs; the breakdown is over these, if there are any."""
    of_steps: int
    """All measured steps."""

    def __str__(self) -> str:
        if not self.of_steps:
            return (
                f"host calls were recorded in {self.share:.0%} of the time: what the host did, and "
                "why GPUs idle, is told of that"
            )
        if not self.steps:
            return "host calls were recorded in none of these steps: why GPUs idle is not known"
        return (
            f"host calls were recorded in {self.steps / self.of_steps:.0%} of the steps "
            f"({self.steps:,} of {self.of_steps:,}): classes of time, and what the host did, are "
            "told of these"
        )


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One GPU over its steady steps, or over the whole span with ``steps`` 0.

    The classes sum to ``total_ns``. Of a rank of which no GPU was seen, they are None.
    """

    gpu: int | None
    """None where no GPU was seen."""
    gpu_known: bool
    device: int | None
    rank: int
    steps: int
    total_ns: int
    compute_ns: int | None
    communication_ns: int | None
    communication_wait_ns: int | None
    """The part of ``communication_ns`` spent waiting for other ranks; None if it can't be known."""
    h2d_ns: int | None
    other_copy_ns: int | None
    memset_ns: int | None
    recorder_ns: int | None
    data_feeding_ns: int | None
    sync_ns: int | None
    alloc_ns: int | None
    launch_ns: int | None
    other_idle_ns: int | None
    host_data_ns: int | None
    """The host's own time in the data loader, hidden under GPU work or not; None if unknown."""

    def of(self, name: str) -> int:
        """Nanoseconds of one of `CLASSES`, or of ``host_data``; 0 where they are not known."""
        return int(getattr(self, f"{name}_ns") or 0)

    def share(self, name: str) -> float:
        """Share of the total, 0 to 1, of what `of` takes."""
        return self.of(name) / self.total_ns if self.total_ns else 0.0

    @property
    def idle_ns(self) -> int:
        """All idle time, whatever its cause."""
        return sum(self.of(cause) for cause in IDLE_CAUSES)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one GPU; the classes sum to ``end_ns - start_ns``.

    They are None where no GPU was seen.
    """

    step: int
    rank: int
    gpu: int | None
    start_ns: int
    end_ns: int
    phase: str
    """``warmup`` or ``steady``; ``validation`` or ``checkpoint`` of a step in which the rank waits
    for others that validate or save."""
    compute_ns: int | None
    communication_ns: int | None
    communication_wait_ns: int | None
    h2d_ns: int | None
    other_copy_ns: int | None
    memset_ns: int | None
    recorder_ns: int | None
    data_feeding_ns: int | None
    sync_ns: int | None
    alloc_ns: int | None
    launch_ns: int | None
    other_idle_ns: int | None
    host_data_ns: int | None
    """As of `Breakdown`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of one rank that is not steady training, or the wait that begins an epoch."""

    phase: str
    """``warmup``, ``validation``, ``checkpoint`` or ``epoch``."""
    rank: int
    start_ns: int
    end_ns: int
    idle_ns: int | None
    evidence: str
    step: int | None = None
    """The step that it follows; of an epoch, the one that it begins; None of warm-up."""
    cost_ns: int = 0
    """What it adds to the run: all of it; of warm-up and epochs, what is beyond the usual."""
    before_ns: int | None = None
    after_ns: int | None = None
    """Idle time at the edges: before its first operation, and from its last one to the next step's
    first; None where no GPU was seen or there is no such edge."""
    communication_ns: int | None = None
    """Communication with nothing beside it, as a rank has that waits in a collective."""
    waits_for: tuple[int, ...] = ()
    """The ranks that work meanwhile, where this one only waits for them."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Of warm-up: what it has more of than as many steady steps, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which a GPU runs nothing."""

    gpu: int
    rank: int
    step: int | None
    start_ns: int
    end_ns: int
    cause: str
    """The one of `IDLE_CAUSES` that covers most of it."""
    evidence: str

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Gaps:
    """All gaps of all GPUs in the span, and the largest of them."""

    count: int
    total_ns: int
    by_cause: Mapping[str, int]
    """Nanoseconds by cause; they sum to ``total_ns``."""
    largest: tuple[Gap, ...]
    largest_in_steps: tuple[Gap, ...]
    """The largest of those that lie in the measured steps."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs time, or that one must know to trust the figures."""

    id: str
    severity: str
    """``high``, ``medium``, ``low`` or ``info``."""
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    impact_ns: int
    """What it costs per step, or over the whole span where there are no steps."""
    message: str
    advice: str
    evidence: Evidence = field(default_factory=dict)
