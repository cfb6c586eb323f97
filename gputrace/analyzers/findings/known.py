"""What has been found out about a trace, each thing when it is first asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from gputrace.analyzers.balance import compare_loads, most_memory
from gputrace.analyzers.cards import find_cards
from gputrace.analyzers.collectives.matched import Collectives
from gputrace.analyzers.kernel_ratios import KernelRatio, kernel_ratios
from gputrace.analyzers.kernels import Kernels
from gputrace.analyzers.lanes import Lane, LaneSummary
from gputrace.analyzers.late.lateness import Lateness, find_lateness
from gputrace.analyzers.late.ranks import Late, find_late
from gputrace.analyzers.lines import Lines
from gputrace.analyzers.links import Links, measure_links
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.pageable import Pageable, find_pageable
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Breakdown, Phase, Step
from gputrace.analyzers.results.balance import Load
from gputrace.analyzers.results.cards import CardUse
from gputrace.analyzers.shard import Shard
from gputrace.analyzers.steps import FoundSteps
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.nvml.model import Nvml
from gputrace.traces.trace import Trace

_STRAY: Final = 0.01
"""Part of the operations of its rank's busiest GPU below which a GPU does not count."""

_FRAMEWORKS: Final = (
    ("pytorch", ("at::native", "c10::", "triton_", "torch.")),
    ("tensorflow", ("tensorflow::", "Eigen::", "tensorflow.", "keras.")),
    ("jax", ("loop_fusion", "input_fusion", "wrapped_", "dali.plugin.jax")),
    ("mxnet", ("mxnet",)),
    ("chainer", ("cupy_", "chainer")),
)
"""Parts of names of kernels, marks and recorded waits that only one framework's have."""


@dataclass(frozen=True)
class Known:
    """Everything that has been found out about a trace.

    Where nothing was recorded of a GPU, there are no GPUs.
    """

    per_gpu: PerGpu
    found: FoundSteps
    steps: Sequence[Step]
    """All steps on all GPUs."""
    measured: Sequence[Step]
    """Those of them that the breakdown is over: with all CUDA calls, where not all have them."""
    breakdown: tuple[Breakdown, ...]
    lines: Lines | None
    """Where the host threads were, where that was sampled."""
    collectives: Collectives
    """Matched among the operations."""
    kernels: Kernels | None = None
    """Those of the measured steps."""
    phases: tuple[Phase, ...] = ()
    """Stretches that are not steady training, and the starts of epochs."""
    timed: Sequence[Step] = ()
    """The measured steps, and those that would be if they had all CUDA calls."""

    @property
    def trace(self) -> Trace:
        """The run."""
        return self.per_gpu.trace

    @property
    def operations(self) -> Sequence[GpuOperations]:
        """The rows of each GPU; raises LookupError where they are not here."""
        return self._rows_here.operations

    @property
    def lanes(self) -> Sequence[Lane]:
        """What was found of the time of each; raises LookupError where its rows are not here."""
        return [lane for lane in self._rows_here.lanes if isinstance(lane, Lane)]

    @property
    def _rows_here(self) -> Shard:
        found = self.per_gpu.whole
        if len(found.operations) < len(self.per_gpu.operations):
            raise LookupError("the rows are on the workers of a cluster")
        return found

    @cached_property
    def lateness(self) -> Lateness | None:
        """What GPUs that meet in collectives lose by each other; None where none meet."""
        return find_lateness(self.per_gpu, self.collectives, self.measured)

    @cached_property
    def late(self) -> tuple[Late, ...]:
        """The GPUs for which others wait at collectives, the costliest first."""
        return () if self.lateness is None else find_late(self.lateness, self.measured)

    @cached_property
    def framework(self) -> str:
        """The framework by its kernels' names and what its hooks recorded, or nothing."""
        recorded = self.trace.events([Kind.DATA_WAIT, Kind.STEP], ["name"]).name
        kernels = [own.kernels for own in self.per_gpu.operations]
        text = self.trace.names(distinct_ids(np.concatenate([recorded, *kernels]))).values()
        for framework, parts in _FRAMEWORKS:
            if any(part in name for name in text for part in parts):
                return framework
        return ""

    @cached_property
    def nvml(self) -> Nvml:
        """What NVML told of the cards."""
        return self.trace.nvml

    @cached_property
    def cards(self) -> tuple[CardUse, ...]:
        """The cards while they were busy, of those that were sampled."""
        return find_cards(self.nvml, self.per_gpu, self.measured)

    @cached_property
    def ratios(self) -> tuple[KernelRatio, ...]:
        """How fast the GPUs run what several of them run, in the measured steps."""
        return self.ratios_in({step.step for step in self.measured})

    def ratios_in(self, numbers: Collection[int]) -> tuple[KernelRatio, ...]:
        """The same in some of the measured steps; each choice is compared once."""
        wanted = set(numbers)
        chosen = [step for step in self.measured if step.step in wanted]
        key = frozenset(step.step for step in chosen)
        if key not in self._ratios:
            self._ratios[key] = kernel_ratios(self.per_gpu, chosen)
        return self._ratios[key]

    @cached_property
    def _ratios(self) -> dict[frozenset[int], tuple[KernelRatio, ...]]:
        return {}

    @cached_property
    def rows(self) -> tuple[Breakdown, ...]:
        """The rows of the breakdown that count: of the GPUs that do the work.

        Where some have steps, those; and none that does next to nothing beside the others of its
        rank, as a GPU does on which a process only has a context.
        """
        busiest: dict[int, int] = {}
        for lane in self.per_gpu.lanes:
            busiest[lane.gpu.rank] = max(busiest.get(lane.gpu.rank, 0), lane.operations)
        stray = {
            (lane.gpu.gpu, lane.gpu.rank)
            for lane in self.per_gpu.lanes
            if lane.operations < _STRAY * busiest[lane.gpu.rank]
        }
        rows = [row for row in self.breakdown if (row.gpu, row.rank) not in stray]
        return tuple([row for row in rows if row.steps] or rows)

    @cached_property
    def working(self) -> list[LaneSummary]:
        """The GPUs that count."""
        pairs = (
            zip(self.per_gpu.lanes, self.breakdown, strict=True) if self.per_gpu.operations else ()
        )
        return [lane for lane, row in pairs if row in self.rows]

    @cached_property
    def pageable(self) -> Pageable:
        """The input copies from pageable memory."""
        return find_pageable(self.per_gpu, self.working, self.measured)

    @cached_property
    def balance(self) -> tuple[Load, ...]:
        """The GPUs that count side by side; nothing where there is one."""
        lanes = self.working
        memory = most_memory(self.trace.nvml, lanes) if len(lanes) > 1 else {}
        return compare_loads(self.per_gpu, lanes, self.measured, memory)

    @cached_property
    def links(self) -> Links | None:
        """What joins the GPUs and went over it; None where there is one GPU."""
        return measure_links(self.per_gpu, self.collectives)
