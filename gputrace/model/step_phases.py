"""Results about the phases of a training step, as the host goes through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
