"""Results about cards, by what NVML saw of them: their use, energy, and time series.

Times are integer nanoseconds; moments are on the trace's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gputrace.model.struct import Column, Columns, Struct, limited


class CardUse(Struct, frozen=True):
    """One GPU in the measured steps, as NVML saw it while it was busy; None is unknown.

    Without steps, over the whole span.
    """

    gpu: int
    rank: int
    host: str
    name: str
    samples: int
    """Samples while it was busy, the basis of the clocks, shares and link figures."""
    sm_clock_mhz: float | None
    """Median, as for the memory clock."""
    sm_clock_max_mhz: int | None
    sm_clock_application_mhz: int | None
    """Clock that the card is set to run at under load."""
    sm_below_max: float | None
    """Share of the samples with the clock below its maximum."""
    memory_clock_mhz: float | None
    memory_clock_max_mhz: int | None
    memory_clock_application_mhz: int | None
    memory_below_max: float | None
    throttled: Mapping[str, float]
    """Share of the time, 0 to 1, by reason; only reasons that occur."""
    power_mw: float | None
    """Mean."""
    power_limit_mw: int | None
    temperature_c: float | None
    """Maximum."""
    pcie_gen: int | None
    """Median, as for the width."""
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    utilization_percent: float | None
    """Driver's own figure: time with a kernel running, over busy and idle time alike."""
    memory_used_bytes: int | None
    """Maximum, of all processes together."""
    memory_bytes: int | None
    COLUMNS: ClassVar[Columns] = (
        Column("utilized", "utilization_percent", "{:,.0f}%"),
        Column("memory", limited("memory_used_bytes", "memory_bytes", "GiB", 2**30)),
        Column("power", limited("power_mw", "power_limit_mw", "W", 1000)),
        Column("SM clock", limited("sm_clock_mhz", "sm_clock_max_mhz", "MHz")),
        Column("memory clock", limited("memory_clock_mhz", "memory_clock_max_mhz", "MHz")),
        Column("hottest", "temperature_c", "{:,.0f} °C"),
    )

    def __hash__(self) -> int:
        return hash((self.host, self.gpu))


class Energy(Struct, frozen=True):
    """Energy of one GPU in the measured steps, from NVML's counter; over its whole span without
    steps.

    Power is taken as even between two readings of the counter, which are longer apart than most
    classes last.
    """

    gpu: int
    rank: int
    host: str
    measured_ns: int
    """Time between readings that lies in measured steps."""
    total_mj: int
    """Millijoules that the counter grew by in that time."""
    classes_mj: Mapping[str, int]
    """Millijoules by class of time; they sum to ``total_mj``."""
    communication_wait_mj: int | None
    """Part of the communication's spent waiting for other ranks; None where unknown."""
    step_mj: int | None
    """Millijoules of a mean measured step; None without steps."""
    sample_mj: float | None
    token_mj: float | None
    """Millijoules of a sample and of a token, where ``gputrace.step`` was given their number."""


class Curve(Struct, frozen=True):
    """Time series of one quantity; with more samples than points, a point covers several."""

    name: str
    """``busy``, ``utilization``, ``memory``, ``power``, ``sm_clock``, ``memory_clock``,
    ``temperature``; of Hopper and newer cards ``sm_active``, ``tensor_active``, ``dram_active``,
    ``nvlink_sent`` and ``pcie_received``."""
    unit: str
    """Unit of the values."""
    time_ns: tuple[int, ...]
    """Moment of the sample, or the middle of the interval that the point covers."""
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]


class GpuCurves(Struct, frozen=True):
    """Time series of one card over the whole run."""

    gpu: int
    rank: int | None
    """None for a card of the host that the run did not use."""
    host: str
    name: str
    memory_bytes: int | None
    curves: tuple[Curve, ...]


class Utilization(Struct, frozen=True):
    """Cards over the whole run; moments are on the clock of `phases`."""

    start_ns: int
    end_ns: int
    gpus: tuple[GpuCurves, ...]
