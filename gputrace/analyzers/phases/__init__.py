"""Stretches of a run that are not steady training, what they cost and who waits in them."""

from gputrace.analyzers.phases.listed import list_phases
from gputrace.analyzers.phases.warmup import WARMUP_CAUSES, find_warmup_causes

__all__ = ["WARMUP_CAUSES", "find_warmup_causes", "list_phases"]
