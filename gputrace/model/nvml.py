"""Cards, samples and links as NVML reports them, whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import field
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from gputrace.model.struct import Struct

Floats = NDArray[np.float64]

VALUES: Final = (
    "memoryUsed", "smClock", "memoryClock", "power", "temperature", "clocksEventReasons",
    "pcieGen", "pcieWidth", "utilization", "utilizationSamples", "energy", "powerInstant",
    "powerCapTime", "thermalTime", "syncBoostTime", "boardLimitTime", "lowUtilizationTime",
    "reliabilityTime", "applicationClocksTime", "baseClocksTime", "swThermalTime",
    "hwThermalTime", "powerBrakeTime", "pcieTx", "pcieRx", "nvlinkTx", "nvlinkRx", "nvlinkRawTx",
    "nvlinkRawRx",
)  # fmt: skip
"""Columns of GPUTRACE_NVML_SAMPLE, whose meaning `collectors.nvml.queries.SAMPLE` has."""


ACTIVITY: Final = (
    "periodNs", "smActive", "smOccupancy", "integerActive", "tensorActive", "dramActive",
    "fp64Active", "fp32Active", "fp16Active", "pcieTxRate", "pcieRxRate", "nvlinkRxRate",
    "nvlinkTxRate",
)  # fmt: skip
"""Columns of GPUTRACE_NVML_ACTIVITY, whose meaning `collectors.nvml.queries.ACTIVITY` has."""


class Card(Struct, frozen=True):
    """A card, as NVML describes it; None is what the driver or the log does not say."""

    gpu: int
    host: int = 0
    uuid: str = ""
    name: str = ""
    pci: str = ""
    """The address, ``0000:06:00.0``."""
    memory_bytes: int | None = None
    sm_clock_max: int | None = None
    """MHz, as all clocks are."""
    memory_clock_max: int | None = None
    sm_clock_application: int | None = None
    """Clock that the card is set to run at under load, if it has such a setting."""
    memory_clock_application: int | None = None
    pcie_gen_max: int | None = None
    """Generation that card and slot agree on at most; a slot's, where a riser limits it."""
    pcie_width_max: int | None = None
    power_limit_mw: int | None = None
    mig: str = ""
    """``Enabled`` in MIG mode, in which the driver gives no utilization."""
    lost_ns: int | None = None
    """When the card was found gone, on the trace's clock."""


class Link(Struct, frozen=True):
    """Connection between two cards of a host, from one to the other."""

    gpu: int
    peer: int
    host: int = 0
    link: str = ""
    """``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``; ``X`` of a card with itself."""
    ancestor: str = ""
    """Connection without NVLink; ``INT`` on one board."""
    nvlinks: int | None = None
    p2p_read: str = ""
    """``OK``, or why there is no peer access: CNS, GNS, TNS, DR, NS, U."""
    p2p_write: str = ""
    p2p_nvlink: str = ""


class ProcessUse(Struct, frozen=True):
    """Use of a card, or of the cores of a recording, by one process in a stretch of time."""

    time_ns: int
    """End of the stretch, on the trace's clock."""
    duration_ns: int = 0
    host: int = 0
    gpu: int | None = None
    """None: the cores."""
    pid: int | None = None
    """None of programs that cannot be seen; of a card, where no process is listed."""
    name: str = ""
    """Name of the command; empty for other users' processes."""
    is_recorded: bool = False
    use: float | None = None
    """Part of the time in which its kernels ran; of the cores, how many it used."""
    memory_bytes: int | None = None
    sharing: str = ""
    """``MPS``, ``MIG 1/0`` or ``SMT``; else it takes turns with others."""
    cpus: str = ""
    numa_node: int | None = None


def _no_times() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


class Samples(Struct, frozen=True, eq=False):
    """Rows of one card at one moment each, in order of time.

    ``samples["smClock"]`` is a column of `VALUES`, or of `ACTIVITY`; float64, NaN where nothing was
    said.
    """

    time: NDArray[np.int64] = field(default_factory=_no_times)
    """Nanoseconds on the trace's clock."""
    host: NDArray[np.int64] = field(default_factory=_no_times)
    gpu: NDArray[np.int64] = field(default_factory=_no_times)
    values: Mapping[str, Floats] = field(default_factory=dict)
    """The columns of which any value is known."""

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, name: str) -> Floats:
        """Return a column; raise KeyError for a name that is in neither."""
        if name not in VALUES and name not in ACTIVITY:
            raise KeyError(name)
        column = self.values.get(name)
        return np.full(len(self), np.nan) if column is None else column

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Samples:
        """Return the rows selected by a mask or indices."""
        values = {name: column[rows] for name, column in self.values.items()}
        return Samples(self.time[rows], self.host[rows], self.gpu[rows], values)

    def moved(self, shift: int, hosts: Mapping[int, int]) -> Samples:
        """With nanoseconds added to all times, and hosts under other numbers."""
        host = self.host.copy()
        for old, new in hosts.items():
            host[self.host == old] = new
        return Samples(self.time + shift, host, self.gpu, self.values)

    def of(self, host: int, gpu: int) -> Samples:
        """Return the samples of one card."""
        return self.select((self.host == host) & (self.gpu == gpu))


class Nvml(Struct, frozen=True, eq=False):
    """All that NVML said of a run; false where it said nothing."""

    cards: tuple[Card, ...] = ()
    links: tuple[Link, ...] = ()
    """Every ordered pair of cards of a host, a card with itself too."""
    samples: Samples = field(default_factory=Samples)
    activity: Samples = field(default_factory=Samples)
    """Activity of cards, each row in the nanoseconds ``periodNs`` before its time."""
    processes: tuple[ProcessUse, ...] = ()
    """In order of time."""

    def __bool__(self) -> bool:
        parts = self.cards, self.links, len(self.samples), len(self.activity), self.processes
        return any(parts)

    def card(self, host: int, gpu: int) -> Card | None:
        return next((card for card in self.cards if (card.host, card.gpu) == (host, gpu)), None)

    @property
    def places(self) -> frozenset[tuple[int, int]]:
        """Host and index of every card that anything is said of."""
        sampled = zip(self.samples.host.tolist(), self.samples.gpu.tolist(), strict=True)
        linked = ((link.host, link.gpu) for link in self.links)
        return frozenset([*((card.host, card.gpu) for card in self.cards), *linked, *sampled])

    def moved(self, shift: int, hosts: Mapping[int, int]) -> Nvml:
        """With nanoseconds added to all times, and hosts under other numbers."""
        return Nvml(
            tuple(
                replace(
                    card,
                    host=hosts.get(card.host, card.host),
                    lost_ns=None if card.lost_ns is None else card.lost_ns + shift,
                )
                for card in self.cards
            ),
            tuple(replace(link, host=hosts.get(link.host, link.host)) for link in self.links),
            self.samples.moved(shift, hosts),
            self.activity.moved(shift, hosts),
            tuple(
                replace(use, time_ns=use.time_ns + shift, host=hosts.get(use.host, use.host))
                for use in self.processes
            ),
        )


def plain_uuid(uuid: str) -> str:
    """Return the digits of a card's uuid, which NVML, CUDA and nsys write differently."""
    return uuid.lower().removeprefix("gpu-").replace("-", "")


def merge_nvml(parts: Sequence[Nvml]) -> Nvml:
    """Merge what several sources say of a run, on one clock.

    Of a card, what the first source that knows it says, completed by the others.
    """
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else Nvml()
    links = {(link.host, link.gpu, link.peer): link for part in parts[::-1] for link in part.links}
    cards: dict[tuple[int, int], Card] = {}
    for other in (card for part in parts for card in part.cards):
        card = cards.get((other.host, other.gpu), other)
        lacking = [name for name, value in asdict(card).items() if value in (None, "")]
        card = replace(card, **{name: getattr(other, name) for name in lacking})
        cards[other.host, other.gpu] = card
    return Nvml(
        tuple(cards[key] for key in sorted(cards)),
        tuple(links[key] for key in sorted(links)),
        _merged([part.samples for part in parts]),
        _merged([part.activity for part in parts]),
        tuple(sorted((use for part in parts for use in part.processes), key=lambda u: u.time_ns)),
    )


def _merged(samples: Sequence[Samples]) -> Samples:
    """Return the rows of several sources in order of time."""
    names = dict.fromkeys(name for part in samples for name in part.values)
    time = np.concatenate([part.time for part in samples])
    order = np.argsort(time, kind="stable")
    return Samples(
        time[order],
        np.concatenate([part.host for part in samples])[order],
        np.concatenate([part.gpu for part in samples])[order],
        {name: np.concatenate([part[name] for part in samples])[order] for name in names},
    )
