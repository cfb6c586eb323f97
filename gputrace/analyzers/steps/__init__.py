"""Training steps, found without being told."""

from gputrace.analyzers.steps.find import FoundSteps, find_input_copies, find_steps
from gputrace.analyzers.steps.held_up import HeldUp, held_up
from gputrace.analyzers.steps.windows import Interlude, StepWindows

__all__ = [
    "FoundSteps",
    "HeldUp",
    "Interlude",
    "StepWindows",
    "find_input_copies",
    "find_steps",
    "held_up",
]
