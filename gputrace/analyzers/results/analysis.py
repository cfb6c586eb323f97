"""The answer to one trace, put together of what all analyzers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gputrace.analyzers.results.balance import Load
from gputrace.analyzers.results.cards import CardUse, Utilization
from gputrace.analyzers.results.collectives import CollectiveTotals
from gputrace.analyzers.results.extra import ExtraTable
from gputrace.analyzers.results.kernels import Kernels
from gputrace.analyzers.results.links import GpuLink
from gputrace.analyzers.results.run import (
    Breakdown,
    Finding,
    Gaps,
    GpuTotals,
    Phase,
    RecordedCalls,
    Step,
    Steps,
)
from gputrace.analyzers.results.whatif import WhatIf
from gputrace.traces.quality import LeftOut


@dataclass(frozen=True, slots=True)
class Analysis:
    """The answer to one trace."""

    schema_version: int
    """Grows when the meaning of a name changes."""
    source: str
    """The recorder; of several, their names joined by ``+``."""
    path: str
    """The file; of several, the first in order of rank."""
    paths: tuple[str, ...]
    """All files."""
    origin_ns: int
    """The moment that texts call 0, on the clock of all other moments."""
    span_ns: int
    """From the first start to the last end on any GPU; else of any step or wait for data."""
    gpus: tuple[GpuTotals, ...]
    """Each GPU over the whole span; nothing where no GPU activity was recorded."""
    steps: Steps
    """How steps were found, and how long they take."""
    step_list: tuple[Step, ...]
    """Each step of each GPU."""
    phases: tuple[Phase, ...]
    """Warm-up, validation, checkpoints, and what begins epochs."""
    breakdown: tuple[Breakdown, ...]
    """Each GPU over the measured steps."""
    gaps: Gaps
    """Stretches in which a GPU runs nothing."""
    collectives: tuple[CollectiveTotals, ...]
    """Of the measured steps, by operation; those that take most time first."""
    balance: tuple[Load, ...]
    """The GPUs that work side by side; nothing where there is one."""
    links: tuple[GpuLink, ...]
    """Both directions of every two GPUs of a host of which anything is known."""
    findings: tuple[Finding, ...]
    """The most important first; the first is the verdict's reason."""
    what_if: tuple[WhatIf, ...]
    """What a step would take without one cause, the greatest gain first."""
    dropped_rows: Mapping[str, int]
    """Rows of the file that could not be used, by reason."""
    kernels: Kernels | None
    """Those of the measured steps; None where none ran."""
    warnings: tuple[str, ...]
    """What the recorder complained of, and what limits the figures of merged traces."""
    cards: tuple[CardUse, ...] = ()
    """The cards in the measured steps, of those that NVML was asked about."""
    utilization: Utilization | None = None
    """The cards over the whole run; None where no GPU was seen."""
    recorded_calls: RecordedCalls | None = None
    """How much of the CUDA calls was recorded; None where all were, or none."""
    left_out: tuple[LeftOut, ...] = ()
    """Files of the run that could not be read, or not to their end (``--keep-going``)."""
    tables: tuple[ExtraTable, ...] = ()
    """Of plugins' analyzers."""
