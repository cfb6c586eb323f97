"""What the rules of findings look at, and how a finding is made of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from gputrace.analyzers.balance import compare_loads, most_memory
from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.cards import find_cards
from gputrace.analyzers.classes import distinct_ids
from gputrace.analyzers.collectives.matching import Collectives
from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.kernel_ratios import KernelRatio, kernel_ratios
from gputrace.analyzers.kernels import Kernels
from gputrace.analyzers.late.lateness import Lateness, find_lateness
from gputrace.analyzers.late.ranks import Late, find_late
from gputrace.analyzers.lines import Lines, Place, dominating
from gputrace.analyzers.links import Links, measure_links
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.pageable import Pageable, find_pageable
from gputrace.analyzers.results import Breakdown, Evidence, Finding, Phase, Step
from gputrace.analyzers.results.balance import Load
from gputrace.analyzers.results.cards import CardUse
from gputrace.analyzers.steps import FoundSteps
from gputrace.traces.events import Kind
from gputrace.traces.nvml.model import Nvml
from gputrace.traces.trace import Trace
from gputrace.units import format_ns

HIGH: Final = 0.20
MEDIUM: Final = 0.05
"""Shares of the time from which a cost is called high and medium, as xprof calls input-bound."""

_STRAY: Final = 0.01
"""Part of the operations of its rank's busiest GPU below which a GPU does not count."""

_OF_THE_HOST: Final = ("data_feeding", "sync", "alloc", "launch")
"""Causes of idle time in which what the host does is what the GPUs wait for."""

_FEWEST_SAMPLES: Final = 5
_DOMINATES: Final = 0.5
"""Samples, and the part of them, that a line needs to be named."""

_FRAMEWORKS: Final = (
    ("pytorch", ("at::native", "c10::", "triton_", "torch.")),
    ("tensorflow", ("tensorflow::", "Eigen::", "tensorflow.", "keras.")),
    ("jax", ("loop_fusion", "input_fusion", "wrapped_", "dali.plugin.jax")),
    ("mxnet", ("mxnet",)),
    ("chainer", ("cupy_", "chainer")),
)
"""Parts of names of kernels, marks and recorded waits that only one framework's have."""


@dataclass(frozen=True)
class Facts:
    """Everything that has been found out about a trace.

    Where nothing was recorded of a GPU, there are no operations, calls and lanes.
    """

    trace: Trace
    operations: Sequence[GpuOperations]
    calls: HostCalls | None
    lanes: Sequence[Lane]
    found: FoundSteps
    steps: Sequence[Step]
    """All steps on all GPUs."""
    measured: Sequence[Step]
    """Those of them that the breakdown is over."""
    breakdown: tuple[Breakdown, ...]
    lines: Lines | None
    """Where the host threads were, where that was sampled."""
    collectives: Collectives
    """Matched among the operations."""
    kernels: Kernels | None = None
    """Those of the measured steps."""
    phases: tuple[Phase, ...] = ()
    """Stretches that are not steady training, and the starts of epochs."""

    @cached_property
    def lateness(self) -> Lateness | None:
        """What GPUs that meet in collectives lose by each other; None where none meet."""
        return find_lateness(
            self.trace, self.lanes, self.operations, self.collectives, self.calls, self.measured
        )

    @cached_property
    def late(self) -> tuple[Late, ...]:
        """The GPUs for which others wait at collectives, the costliest first."""
        return () if self.lateness is None else find_late(self.lateness, self.measured)

    @cached_property
    def framework(self) -> str:
        """The framework by its kernels' names and what its hooks recorded, or nothing."""
        recorded = self.trace.events([Kind.DATA_WAIT, Kind.STEP], ["name"]).name
        kernels = [o.events.name[o.events.kind == Kind.KERNEL] for o in self.operations]
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
        return find_cards(self.nvml, self.lanes, self.measured)

    @property
    def ratios(self) -> tuple[KernelRatio, ...]:
        """How fast the GPUs run what several of them run, in the measured steps."""
        return self.ratios_in({step.step for step in self.measured})

    def ratios_in(self, numbers: Collection[int]) -> tuple[KernelRatio, ...]:
        """The same in some of the measured steps; each choice is compared once."""
        chosen = [step for step in self.measured if step.step in set(numbers)]
        key = frozenset(step.step for step in chosen)
        if key not in self._ratios:
            self._ratios[key] = kernel_ratios(self.trace, self.operations, chosen)
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
        for lane in self.lanes:
            busiest[lane.gpu.rank] = max(busiest.get(lane.gpu.rank, 0), lane.operations)
        stray = {
            (lane.gpu.gpu, lane.gpu.rank)
            for lane in self.lanes
            if lane.operations < _STRAY * busiest[lane.gpu.rank]
        }
        rows = [row for row in self.breakdown if (row.gpu, row.rank) not in stray]
        return tuple([row for row in rows if row.steps] or rows)

    @cached_property
    def working(self) -> list[Lane]:
        """The GPUs that count."""
        pairs = zip(self.lanes, self.breakdown, strict=True) if self.operations else ()
        return [lane for lane, row in pairs if row in self.rows]

    @cached_property
    def pageable(self) -> Pageable:
        """The input copies from pageable memory."""
        return find_pageable(self.trace, self.working, self.measured)

    @cached_property
    def balance(self) -> tuple[Load, ...]:
        """The GPUs that count side by side; nothing where there is one."""
        lanes = self.working
        memory = most_memory(self.trace.nvml, lanes) if len(lanes) > 1 else {}
        return compare_loads(self.trace, self.operations, lanes, self.measured, memory)

    @cached_property
    def links(self) -> Links | None:
        """What joins the GPUs and went over it; None where there is one GPU."""
        return measure_links(self.trace, self.operations, self.collectives)

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(row.gpu for row in self.rows if row.gpu is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({row.rank for row in self.rows}))

    @property
    def trains(self) -> bool:
        """Whether training steps were found."""
        return self.found.kind == "training"

    @property
    def per(self) -> str:
        """``a step of 62.8 ms``, or ``969 ms`` where there are no steps."""
        if not self.measured:
            return format_ns(self.mean_ns)
        return f"{'a step' if self.trains else 'an iteration'} of {format_ns(self.mean_ns)}"

    @property
    def mean_ns(self) -> int:
        """Mean length of a measured step, or of a GPU's span."""
        return self.mean("total")

    def mean(self, name: str) -> int:
        """Mean nanoseconds of a class on one GPU, a step where there are steps."""
        rows = self.rows
        each = sum(row.of(name) for row in rows)
        return each // max(1, sum(max(row.steps, 1) for row in rows))

    def share(self, *names: str) -> float:
        """Share of the time that classes have, over all GPUs."""
        total = sum(row.total_ns for row in self.rows)
        return sum(row.of(name) for row in self.rows for name in names) / max(total, 1)

    def finding(
        self,
        id: str,
        severity: str,
        impact_ns: int,
        message: str,
        advice: str,
        evidence: Evidence | None = None,
    ) -> Finding:
        """A finding about all GPUs and ranks that count."""
        return Finding(
            id, severity, self.gpus, self.ranks, impact_ns, message, advice, evidence or {}
        )

    def costly(
        self,
        id: str,
        name: str,
        message: str,
        advice: str,
        *,
        medium: float = MEDIUM,
        high: float = HIGH,
    ) -> Iterator[Finding]:
        """A finding where a class of time has more than a little share.

        In the message, ``{cost}`` stands for what it costs a step: ``25.1 ms of a step of 62.8 ms
        (40%)``.
        """
        share, cost = self.share(name), self.mean(name)
        severity = severity_of(share, medium, high)
        if severity is None:
            return
        told = message.format(cost=f"{format_ns(cost)} of {self.per} ({share:.0%})")
        evidence: dict[str, float | int | str | None] = {
            "share": round(share, 4),
            f"{name}_ns": cost,
            "total_ns": self.mean_ns,
        }
        place = self.place_in(name)
        if place is not None:
            part = f"{place.share:.0%} of {place.samples:,} samples"
            told += f"; the host is at {place.line} in {part}"
            evidence |= {"line": place.line, "line_share": round(place.share, 4)}
        yield self.finding(id, severity, cost, told, advice, evidence)

    def place_in(self, cause: str) -> Place | None:
        """The line that dominates while GPUs that count are idle for a cause; None if none does."""
        if self.calls is None or self.lines is None or cause not in _OF_THE_HOST:
            return None
        stretches = [
            (lane, self._measured_part(lane, lane.causes.of[cause]))
            for lane, row in zip(self.lanes, self.breakdown, strict=True)
            if row in self.rows
        ]
        return _telling(dominating(self.lines, self.calls, stretches))

    def place_of(self, lane: Lane, cause: str, steps: Sequence[int]) -> Place | None:
        """The same of one GPU in some of the measured steps."""
        if self.calls is None or self.lines is None or cause not in _OF_THE_HOST:
            return None
        idle = self._measured_part(lane, lane.causes.of[cause], steps)
        return _telling(dominating(self.lines, self.calls, [(lane, idle)]))

    def _measured_part(
        self, lane: Lane, idle: Intervals, steps: Sequence[int] | None = None
    ) -> Intervals:
        own = [s for s in self.measured if (s.gpu, s.rank) == (lane.gpu.gpu, lane.gpu.rank)]
        own = own if steps is None else [step for step in own if step.step in steps]
        if not own:
            return idle.clip(*lane.timeline.window)
        return idle.intersection(union([s.start_ns for s in own], [s.end_ns for s in own]))


def _telling(place: Place | None) -> Place | None:
    """The place, if enough samples are at it."""
    if place is None or place.samples < _FEWEST_SAMPLES or place.share < _DOMINATES:
        return None
    return place


Rule = Callable[[Facts], Iterator[Finding]]
"""Yields what it finds, or nothing."""


def severity_of(share: float, medium: float = MEDIUM, high: float = HIGH) -> str | None:
    """How severe a cost is by its share of the time; None for one not worth telling."""
    if share >= high:
        return "high"
    return "medium" if share >= medium else None
