"""Training steps, found without being told."""

from gputrace.analyzers.steps.find import FoundSteps, agree, find_input_copies, steps_by_rank
from gputrace.analyzers.steps.held_up import HeldUp, held_up
from gputrace.analyzers.steps.windows import Interlude, StepWindows

__all__ = [
    "FoundSteps",
    "HeldUp",
    "Interlude",
    "StepWindows",
    "agree",
    "find_input_copies",
    "held_up",
    "steps_by_rank",
]
