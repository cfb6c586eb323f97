"""Results about the hosts: how their threads came by their time, and the phases of their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HostLoad:
    """How the host thread of a rank that marks the steps came by its time, in the measured steps.

    The times sum to ``covered_ns``, the part of the steps that was counted.
    """

    rank: int
    steps: int
    covered_ns: int
    on_core_ns: int
    queued_ns: int
    """Time in which the thread was ready to run, and others had the cores."""
    blocked_ns: int
    """Time in which it waited for something else: data, a GPU, a lock, a disk, a clock."""
    others_queued: float
    """Share of the time for which the longest-queued other thread of the process was so."""
    process_cores: float
    """Cores that the process used, on average."""
    threads: int
    """Threads of the process that wanted a core for a third of the time or more."""
    wanted_cores: float
    """Cores that these would use if they never queued."""
    cores: int
    """Cores that the process may use."""
    quota_cores: float | None
    """Cores' worth of time that its control group allows; None without a limit."""
    runnable: float | None
    """Threads of the machine that were on a core or queued for one, on average."""
    openmp: str | None
    """OpenMP's library, where threads of the process spin: ``libgomp``, ``libiomp5``, ``libomp``."""
    spinning: int
    """Threads, with the one that marks steps, that want a core all the time and have it for as
    long: those that wait for the others spin; 0 if there are none, or no such library."""
    at_once: float
    """Share of the time in which all of these have a core, if their turns are independent."""
    throttled: float
    """Share of the time for which the control group's quota stopped it, summed over cores."""
    pressure: float
    """Share of the time for which some thread of the machine was queued."""
    minor_faults: int
    major_faults: int
    preemptions: int
    """Page faults without and with a read of a disk, and involuntary switches, of that thread."""

    def of(self, share_ns: int, step_ns: int) -> int:
        """Return a time as nanoseconds of a step of the given length."""
        return round(share_ns / max(self.covered_ns, 1) * step_ns)


@dataclass(frozen=True, slots=True)
class Allocator:
    """torch's caching allocator on the device of a rank, as it counts, in the measured steps."""

    rank: int
    steps: int
    retries: int
    """Times that the GPU had no memory left: torch gave its cache back, and asked again."""
    segments: int
    """Segments taken from the GPU (cudaMalloc); with ``expandable_segments``, new or longer."""
    segment_bytes: int
    """Bytes of a mean one of these."""
    segments_freed: int
    """Segments given back (cudaFree)."""
    emptied: int
    """Calls of `torch.cuda.empty_cache`."""
    emptying_ns: int
    """Time of these in a mean step."""
    allocated_bytes: int
    """Bytes of tensors at the ends of steps, at most."""
    reserved_bytes: int
    """Bytes that are held of the GPU at the ends of steps, at most."""
    split_bytes: int
    """Unused bytes of these in segments that are in use, which cannot be given back, at most."""
    peak_bytes: int | None
    """Largest peak that was seen to be reached in these steps or before; None if it was before the
    first."""
    peak_phase: str | None
    """The one of `PHASES` in which it was reached; None where that is unknown."""


DATA: Final = "data"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
UNSCALING: Final = "gradient unscaling"
CLIPPING: Final = "gradient clipping"
OPTIMIZER: Final = "optimizer"
OTHER: Final = "other"

PHASES: Final = {
    DATA: "the wait for data",
    FORWARD: "the forward pass",
    BACKWARD: "the backward pass",
    UNSCALING: "gradient unscaling",
    CLIPPING: "gradient clipping",
    OPTIMIZER: "the optimizer's step",
    OTHER: "none of the phases",
}
"""Each phase in its order in a step, and its name in a sentence."""


@dataclass(frozen=True, slots=True)
class StepPhase:
    """One phase of the steps of a rank, in mean nanoseconds of a step."""

    name: str
    """One of `PHASES`."""
    host_ns: int
    """Time for which the thread that trains was in it."""
    idle_ns: int | None
    """Time in which a GPU of the rank ran nothing meanwhile; None where no GPU was seen."""
    launch_ns: int | None
    """Part of it in which the GPU waited for a launch; None where calls were not recorded."""


@dataclass(frozen=True, slots=True)
class StepPhases:
    """The measured steps of a rank by phase.

    Times of the host sum to ``step_ns``, idle times to the idle time of the breakdown, both exactly
    but for the remainder of a mean.
    """

    rank: int
    steps: int
    step_ns: int
    """Mean step."""
    phases: tuple[StepPhase, ...]
    """All of them, in the order of `PHASES`; of those that were not met, the times are 0."""

    def of(self, name: str) -> StepPhase:
        """Return a phase by name."""
        return next(phase for phase in self.phases if phase.name == name)
