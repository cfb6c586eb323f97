"""What analyses say, as plain dataclasses; a module for each subject."""

from gputrace.analyzers.results.analysis import Analysis
from gputrace.analyzers.results.extra import ExtraTable
from gputrace.analyzers.results.run import (
    CLASSES,
    IDLE_CAUSES,
    SCHEMA_VERSION,
    Breakdown,
    Evidence,
    Finding,
    Gap,
    Gaps,
    GpuTotals,
    Phase,
    RecordedCalls,
    Step,
    Steps,
)

__all__ = [
    "CLASSES",
    "IDLE_CAUSES",
    "SCHEMA_VERSION",
    "Analysis",
    "Breakdown",
    "Evidence",
    "ExtraTable",
    "Finding",
    "Gap",
    "Gaps",
    "GpuTotals",
    "Phase",
    "RecordedCalls",
    "Step",
    "Steps",
]
