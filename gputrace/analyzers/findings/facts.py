"""What the rules of findings look at, and how a finding is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gputrace.analyzers.findings.known import Known
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.lines import Place, dominating
from gputrace.analyzers.results import Evidence, Finding
from gputrace.units import format_ns

HIGH: Final = 0.20
MEDIUM: Final = 0.05
"""Shares of the time from which a cost is called high and medium, as xprof calls input-bound."""

_OF_THE_HOST: Final = ("data_feeding", "sync", "alloc", "launch")
"""Causes of idle time in which what the host does is what the GPUs wait for."""

_FEWEST_SAMPLES: Final = 5
_DOMINATES: Final = 0.5
"""Samples, and the part of them, that a line needs to be named."""


@dataclass(frozen=True)
class Facts(Known):
    """Everything that has been found out about a trace, and how findings are made of it."""

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

    @cached_property
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
        return self._place(self.working, [self.time_of(lane) for lane in self.working], cause)

    def place_of(self, lane: LaneSummary, cause: str, steps: Sequence[int]) -> Place | None:
        """The same of one GPU in some of the measured steps."""
        return self._place([lane], [self.time_of(lane, steps)], cause)

    def _place(
        self, lanes: Sequence[LaneSummary], time: Sequence[Intervals], cause: str
    ) -> Place | None:
        if not self.per_gpu.has_calls or self.lines is None or cause not in _OF_THE_HOST:
            return None
        place = dominating(self.per_gpu, self.lines, lanes, time, cause)
        if place is None or place.samples < _FEWEST_SAMPLES or place.share < _DOMINATES:
            return None
        return place

    @cached_property
    def measured_of(self) -> StepsOf:
        """The measured steps of one GPU."""
        return StepsOf(self.measured)

    def time_of(self, lane: LaneSummary, steps: Sequence[int] | None = None) -> Intervals:
        """The measured steps of a GPU, or some of them; its window where there are none."""
        own = self.measured_of(lane.gpu)
        own = own if steps is None else [step for step in own if step.step in steps]
        return stretches(own, lane.window)


Rule = Callable[[Facts], Iterator[Finding]]
"""Yields what it finds, or nothing."""


def severity_of(share: float, medium: float = MEDIUM, high: float = HIGH) -> str | None:
    """How severe a cost is by its share of the time; None for one not worth telling."""
    if share >= high:
        return "high"
    return "medium" if share >= medium else None
