"""Training steps, found without being told."""

from gputrace.analyzers.steps.find import FoundSteps, find_input_copies, find_steps
from gputrace.analyzers.steps.windows import Interlude, StepWindows

__all__ = ["FoundSteps", "Interlude", "StepWindows", "find_input_copies", "find_steps"]
