"""What the runs of a study left, read back, and what is kept of each recording.

Times are integer nanoseconds; those a script measured by its own clock are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gputrace.bench.rows import Settings


@dataclass(frozen=True, slots=True)
class GpuMeasure:
    """One GPU over the steady steps of a run; None is what is not known."""

    gpu: int
    rank: int
    name: str
    compute_ns: int
    """A step."""
    memory_bytes: int | None = None
    """The most in use on the card."""
    sm_clock_mhz: float | None = None
    """The median while it was busy."""
    sm_clock_max_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """What lies between two GPUs, and what went over it; bandwidths are bytes a second."""

    a: int
    b: int
    link: str
    """``NV18``, ``PIX``, ``SYS``; nothing where it is not known."""
    bandwidth: int | None = None
    """Of large copies, the slower direction."""


@dataclass(frozen=True, slots=True)
class FindingMeasure:
    """A finding of a run."""

    id: str
    severity: str
    impact_ns: int
    message: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step would take with a cure, as the recording of the run without it tells."""

    id: str
    now_ns: int
    step_ns: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class Measure:
    """What is kept of the recording of one run; a step is the mean over the steady ones."""

    problem: str = ""
    """Why the trace cannot be read; nothing where it can."""
    source: str = ""
    """How steps were found: ``markers``, ``profiler``, ``nvtx``, ``inferred`` or ``none``."""
    kind: str = "none"
    """``training``, ``iterations`` or ``none``."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Steps found, by rank."""
    steady: int = 0
    step_ns: int | None = None
    p50_ns: int | None = None
    classes: Mapping[str, int] | None = None
    """Nanoseconds a step and GPU by class, which sum to ``step_ns``; None where no GPU was seen."""
    wait_ns: int | None = None
    """The part of communication spent waiting for other ranks, a step and GPU."""
    host_data_ns: int | None = None
    """The host's time in the data loader, a step, hidden or not."""
    data_waits_ns: int | None = None
    """All recorded waits for data of the first rank together; None where none was recorded."""
    data_waits: int = 0
    gap_ns: int | None = None
    """Idle time, a step and GPU."""
    findings: tuple[FindingMeasure, ...] = ()
    gpus: tuple[GpuMeasure, ...] = ()
    links: tuple[LinkMeasure, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    bus_bandwidth: int | None = None
    """Bytes a second, of the collective that takes most time of those of which it is known."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of a study: a configuration, and which of its repeats."""

    settings: Settings
    repeat: int = 0
    recorded: bool = True
    state: str = "done"
    """``done``, ``failed`` or ``skipped``."""
    reason: str = ""
    """Why it failed or was skipped, on one line."""
    told: Mapping[str, Any] | None = None
    """The last line of its script, as JSON."""
    measure: Measure | None = None
    """Of its recording; None of a bare run."""


@dataclass(frozen=True, slots=True)
class Results:
    """All runs of a study."""

    title: str
    question: str
    runs: tuple[RunResult, ...]
    left: int = 0
    """Runs that the study asks for and that are not over."""
