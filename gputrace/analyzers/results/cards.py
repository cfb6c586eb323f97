"""What NVML tells of the cards, as results; field names are those of the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CardUse:
    """One GPU in the measured steps, as NVML saw it while it was busy; None is what is not known.

    Without steps, over the whole span.
    """

    gpu: int
    rank: int
    host: str
    name: str
    samples: int
    """Those while it was busy, on which clocks, shares and the link rest."""
    sm_clock_mhz: float | None
    """The median, as of the other clock."""
    sm_clock_max_mhz: int | None
    sm_clock_application_mhz: int | None
    """What the card is set to run at under load."""
    sm_below_max: float | None
    """Share of the samples with the clock below its maximum."""
    memory_clock_mhz: float | None
    memory_clock_max_mhz: int | None
    memory_clock_application_mhz: int | None
    memory_below_max: float | None
    throttled: Mapping[str, float] = field(hash=False)
    """Share of the time, 0 to 1, by reason; those that occur."""
    power_mw: float | None
    """The mean."""
    power_limit_mw: int | None
    temperature_c: float | None
    """The highest."""
    pcie_gen: int | None
    """The median, as of the width."""
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    utilization_percent: float | None
    """The driver's own figure: time with a kernel running, busy or not in between."""
    memory_used_bytes: int | None
    """The most, of all processes."""
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity over time; where there are more samples than points, each point has several."""

    name: str
    """``busy``, ``utilization``, ``memory``, ``power``, ``sm_clock``, ``memory_clock`` or
    ``temperature``."""
    unit: str
    time_ns: tuple[int, ...]
    """When: the sample's moment, or the middle of the stretch that the point stands for."""
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GpuCurves:
    """All that is known of one card over the whole run."""

    gpu: int
    rank: int | None
    """None for a card of the machine that the run did not use."""
    host: str
    name: str
    memory_bytes: int | None
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Utilization:
    """The cards over the whole run; moments are on the clock of `phases`."""

    start_ns: int
    end_ns: int
    gpus: tuple[GpuCurves, ...]
