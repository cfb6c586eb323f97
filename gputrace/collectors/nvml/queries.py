"""Queries of NVML: description, topology, samples and activity of the cards.

The activity of a card's parts over time is that of GPM, NVML's counters of Hopper and newer cards.
A card takes stock of its counters every 100 ms, and shows them up to 0.1 s later (H100 and H200,
driver 580), however often they are read. They are therefore read every few milliseconds around the
moment when they should change: what lies between two changes is the activity of whole stretches of
100 ms. Following the changes takes 1.4 % of a core: ten in turn are read, then none for as long as
the allowed share of a core asks for.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

NULL: Final = -1
"""NULL in the columns of NvmlLog.samples; NVML itself gives nothing below 0."""

QUICK: Final = {
    "timeNs": "ns of CLOCK_REALTIME just before the card was asked",
    "memoryUsed": "bytes in use; without what the driver reserves, where it tells them apart",
    "smClock": "MHz",
    "memoryClock": "MHz",
    "power": "mW; the mean of a second on Ampere (not GA100) and newer",
    "temperature": "°C of the chip",
    "clocksEventReasons": "bits, why the clocks are as they are: 0x1 idle, 0x2 application clocks, "
    "0x4 power cap, 0x8 hardware slowdown, 0x10 sync boost, 0x20 software thermal, "
    "0x40 hardware thermal, 0x80 power brake, 0x100 display",
    "pcieGen": "generation of the PCIe link now; an idle card lowers it",
    "pcieWidth": "lanes of the PCIe link now",
}
"""Columns read at every tick."""

RING: Final = {
    "utilization": "% of the time with a kernel running, the mean of the driver's own samples "
    "since the last row that has any",
    "utilizationSamples": "how many samples that were; NULL where the driver keeps none and "
    "`utilization` is its latest period (1/6 to 1 s)",
}
"""Columns read from the driver's ring of samples (100 or so, 6 a second and more)."""

FIELDS: Final = {
    "energy": (83, "mJ, counter"),
    "powerInstant": (186, "mW at this moment"),
    "powerCapTime": (74, "ns that the clocks were held down by the power cap, counter"),
    "thermalTime": (75, "ns, by temperature"),
    "syncBoostTime": (76, "ns, by another card of the same sync boost group"),
    "boardLimitTime": (77, "ns, by the board's limit"),
    "lowUtilizationTime": (78, "ns, by low utilization"),
    "reliabilityTime": (79, "ns, by the voltage's reliability limit"),
    "applicationClocksTime": (80, "ns below the application clocks, for any reason"),
    "baseClocksTime": (81, "ns below the base clocks, for any reason"),
    "swThermalTime": (269, "ns, software thermal slowdown"),
    "hwThermalTime": (270, "ns, hardware thermal slowdown"),
    "powerBrakeTime": (271, "ns, hardware power brake"),
    "pcieTx": (197, "bytes sent over PCIe, counter that may wrap"),
    "pcieRx": (198, "bytes received over PCIe, counter that may wrap"),
    "nvlinkTx": (138, "bytes of data sent over all NVLinks, counter"),
    "nvlinkRx": (139, "bytes of data received over all NVLinks, counter"),
    "nvlinkRawTx": (140, "the same with the protocol's own bytes"),
    "nvlinkRawRx": (141, "the same with the protocol's own bytes"),
}
"""Columns read with nvmlDeviceGetFieldValues, one call for all: number of the field, meaning."""

SAMPLE: Final = QUICK | RING | {name: meaning for name, (_, meaning) in FIELDS.items()}
"""Columns of a card at a tick, with their meaning; `gpu` comes before them in the table."""

COLUMNS: Final = ["gpu", *SAMPLE]

Value = float | int | None
Row = list[Value]

_NVLINK_FIELDS: Final = range(138, 142)
_MEMORY_V2: Final = 0x0200_0028  # separates memory in use from what the driver reserves
_ALL_LINKS: Final = 0xFFFF_FFFF
_RING_UTILIZATION: Final = 1
_NOTHING_NEW: Final = frozenset({6, 21})  # NotFound, NoData
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Lost(Exception):
    """Error for a card that is permanently gone."""


class _Question:
    """Columns with the calls that can fill them, the best first."""

    def __init__(self, nv: Any, columns: int, *calls: Callable[[], Sequence[Value]]) -> None:
        self._nv, self._columns, self._calls = nv, columns, list(calls)

    def ask(self) -> Sequence[Value]:
        """Return values, or nulls; the next call permanently replaces one that is refused."""
        while self._calls:
            try:
                return self._calls[0]()
            except AttributeError:  # this release of the binding has no such function
                del self._calls[0]
            except self._nv.NVMLError as error:
                if error.value in LOST:
                    raise Lost(str(error)) from error
                if error.value not in REFUSED:
                    break
                del self._calls[0]
        return (None,) * self._columns


class _Ring:
    """Reader of the driver's own samples of utilization, each once."""

    def __init__(self, nv: Any, handle: Any) -> None:
        self._nv, self._handle, self._last = nv, handle, 0
        self._primed = False

    def __call__(self) -> tuple[Value, Value]:
        try:
            answer = self._nv.nvmlDeviceGetSamples(self._handle, _RING_UTILIZATION, self._last)
        except self._nv.NVMLError as error:
            if error.value not in _NOTHING_NEW:
                raise
            answer = 0, []
        kind, samples = answer
        new = [sample for sample in samples if sample.timeStamp > self._last]
        self._last = max((sample.timeStamp for sample in new), default=self._last)
        # Skip samples from before the recording.
        known = [getattr(s.sampleValue, _MEMBERS[kind]) for s in new] if self._primed else []
        self._primed = True
        return (round(sum(known) / len(known), 2) if known else None), len(known)


class _Fields:
    """Reader of the counters: those that answer a single query first are then queried together."""

    def __init__(self, nv: Any, handle: Any) -> None:
        self._nv, self._handle = nv, handle
        # Newer drivers sum up the NVLinks; else each is queried.
        first, links = _NVLINK_FIELDS[0], [_ALL_LINKS]
        if not self._answers(first, _ALL_LINKS):
            links = [link for link in range(MAX_LINKS) if self._answers(first, link)]
        self._asked = [
            (column, number, scope)
            for column, (number, _) in FIELDS.items()
            for scope in (links if number in _NVLINK_FIELDS else [0])
            if self._answers(number, scope)
        ]

    def __call__(self) -> list[Value]:
        if not self._asked:
            return [None] * len(FIELDS)
        wanted = [(number, scope) for _, number, scope in self._asked]
        answers = self._nv.nvmlDeviceGetFieldValues(self._handle, wanted)
        if any(answer.nvmlReturn in LOST for answer in answers):
            raise Lost("GPU is lost")
        values: dict[str, list[Value]] = {column: [] for column in FIELDS}
        for (column, _, _), answer in zip(self._asked, answers, strict=True):
            values[column].append(_number(answer))
        # A sum over links is unknown if one of them is.
        known = ([part for part in parts if part is not None] for parts in values.values())
        return [
            sum(numbers) if numbers and len(numbers) == len(parts) else None
            for numbers, parts in zip(known, values.values(), strict=True)
        ]

    def _answers(self, number: int, scope: int) -> bool:
        values = ask(self._nv, "nvmlDeviceGetFieldValues", self._handle, [(number, scope)])
        return values is not None and values[0].nvmlReturn not in REFUSED


def _number(value: Any) -> Value:
    if value.nvmlReturn != 0 or not 0 <= value.valueType < len(_MEMBERS):
        return None
    number = getattr(value.value, _MEMBERS[value.valueType])
    # All ones is NVML's "not available".
    if not 0 <= number < 2**63 - 1:
        return None
    return int(number) * (1024 if value.fieldId in _NVLINK_FIELDS else 1)


class CardQueries:
    """Queries of one card at each tick."""

    def __init__(self, nv: Any, handle: Any) -> None:
        def call(name: str, *arguments: Any) -> Callable[[], Sequence[Value]]:
            return lambda: (getattr(nv, name)(handle, *arguments),)

        def memory(*version: int) -> Callable[[], Sequence[Value]]:
            return lambda: (int(nv.nvmlDeviceGetMemoryInfo(handle, *version).used),)

        quick = (
            [memory(_MEMORY_V2), memory()],
            [call("nvmlDeviceGetClockInfo", 1)],
            [call("nvmlDeviceGetClockInfo", 2)],
            [call("nvmlDeviceGetPowerUsage")],
            [call("nvmlDeviceGetTemperature", 0)],
            # The second before driver 535.
            [
                call("nvmlDeviceGetCurrentClocksEventReasons"),
                call("nvmlDeviceGetCurrentClocksThrottleReasons"),
            ],
            [call("nvmlDeviceGetCurrPcieLinkGeneration")],
            [call("nvmlDeviceGetCurrPcieLinkWidth")],
        )
        self._quick = [_Question(nv, 1, *calls) for calls in quick]
        self._slow = [
            _Question(
                nv,
                len(RING),
                _Ring(nv, handle),
                lambda: (float(nv.nvmlDeviceGetUtilizationRates(handle).gpu), None),
            ),
            _Question(nv, len(FIELDS), _Fields(nv, handle)),
        ]
        self._slow[0].ask()

    def quick(self) -> Row:
        return [value for question in self._quick for value in question.ask()]

    def slow(self) -> Row:
        return [value for question in self._slow for value in question.ask()]


DEVICE: Final = {
    "gpu": "index of the card, as NVML counts",
    "uuid": "GPU-…, as CUDA_VISIBLE_DEVICES takes it",
    "name": "what the card is called",
    "pciBusId": "domain:bus:device.function, small letters: 0000:06:00.0",
    "memoryTotal": "bytes",
    "smClockMax": "MHz",
    "memoryClockMax": "MHz",
    "smClockApplication": "MHz that the card is set to run at under load",
    "memoryClockApplication": "MHz",
    "pcieGenMax": "generation that card and slot agree on at most",
    "pcieWidthMax": "lanes that card and slot agree on at most",
    "powerLimit": "mW that the driver enforces",
    "migMode": "1 where the card is partitioned (MIG), else 0",
    "cpuAffinity": "CPUs near the card: 0-31,64-95",
    "numaNode": "node of the host's memory that is nearest",
}
"""Columns of a card's description. In the .jsonl file `cpuAffinity` is a list of CPU numbers."""

TOPOLOGY: Final = {
    "gpu": "index of the one card",
    "peer": "index of the other; every ordered pair has a row, a card with itself too",
    "link": "X (itself), NV# (so many NVLinks), or the ancestor: what nvidia-smi topo -m shows",
    "ancestor": "X, INT (one board), PIX (one PCIe switch), PXB (several), PHB (host bridge), "
    "NODE (one NUMA node), SYS (across NUMA nodes)",
    "nvlinks": "active NVLinks to the peer, straight or through NVSwitch",
    "p2pRead": "OK, or why not: CNS chipset, GNS card, TNS topology, DR turned off, NS, U unknown",
    "p2pWrite": "the same for writing",
    "p2pNvlink": "the same for access through NVLink",
}
"""Columns of a pair of cards."""

REFUSED: Final = frozenset({2, 3, 4, 13, 25, 26})
"""InvalidArgument, NotSupported, NoPermission, FunctionNotFound, ArgumentVersionMismatch and
Deprecated, which are permanent."""

LOST: Final = frozenset({15, 16, 28})
"""GpuIsLost, ResetRequired, GpuNotFound: no more data will come from that card."""

_ANCESTORS: Final = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P: Final = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
# The binding's own READ is a tuple, by a stray comma.
_READ, _WRITE, _NVLINK = 0, 1, 2
_SM, _MEMORY = 1, 2
_NODE_SCOPE: Final = 0
_CPU_WORDS: Final = 64  # 4096 CPUs; the driver fills this many words.
_NODE_WORDS: Final = 16
_SWITCH: Final = "switch"
_SWITCH_TYPE: Final = 2
MAX_LINKS: Final = 36
"""Maximum NVLinks of a card."""


def ask(nv: Any, name: str, *arguments: Any) -> Any:
    """Call a function of pynvml (`nv`); None if it has no answer, or the card is None."""
    if any(argument is None for argument in arguments):
        return None
    try:
        return getattr(nv, name)(*arguments)
    except (nv.NVMLError, AttributeError):
        return None


def describe(nv: Any, gpu: int, handle: Any) -> dict[str, Any]:
    """Return the columns of DEVICE for one card."""
    of_pci = ask(nv, "nvmlDeviceGetPciInfo", handle)
    bus = None if of_pci is None else address(of_pci)
    memory = ask(nv, "nvmlDeviceGetMemoryInfo", handle)
    mig = ask(nv, "nvmlDeviceGetMigMode", handle)
    return {
        "gpu": gpu,
        "uuid": ask(nv, "nvmlDeviceGetUUID", handle),
        "name": ask(nv, "nvmlDeviceGetName", handle),
        "pciBusId": bus,
        "memoryTotal": None if memory is None else int(memory.total),
        "smClockMax": ask(nv, "nvmlDeviceGetMaxClockInfo", handle, _SM),
        "memoryClockMax": ask(nv, "nvmlDeviceGetMaxClockInfo", handle, _MEMORY),
        "smClockApplication": ask(nv, "nvmlDeviceGetApplicationsClock", handle, _SM),
        "memoryClockApplication": ask(nv, "nvmlDeviceGetApplicationsClock", handle, _MEMORY),
        "pcieGenMax": ask(nv, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcieWidthMax": ask(nv, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        "powerLimit": ask(nv, "nvmlDeviceGetEnforcedPowerLimit", handle),
        "migMode": None if mig is None else mig[0],
        "cpuAffinity": _bits(ask(nv, "nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)) or None,
        "numaNode": _numa_node(nv, handle, bus),
    }


def address(of_pci: Any) -> str:
    """Return the PCI address as Linux writes it; NVML gives the domain eight digits."""
    raw = of_pci.busId
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    domain, _, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return text.lower()


def relate(
    nv: Any, handles: Sequence[Any], buses: Sequence[str | None]
) -> list[tuple[int | str | None, ...]]:
    """Return the columns of TOPOLOGY for every ordered pair of cards."""
    ends = [_link_ends(nv, handle) for handle in handles]
    pairs: list[tuple[int | str | None, ...]] = []
    for a, from_a in enumerate(ends):
        for b, (from_b, bus) in enumerate(zip(ends, buses, strict=True)):
            if a == b:
                pairs.append((a, b, "X", "X", None, None, None, None))
                continue
            nvlinks = None
            if from_a is not None and from_b is not None:
                # Straight links, else those that both have to NVSwitch.
                straight = from_a[bus] if bus else 0
                nvlinks = straight or min(from_a[_SWITCH], from_b[_SWITCH])
            cards = handles[a], handles[b]
            ancestor = _ANCESTORS.get(ask(nv, "nvmlDeviceGetTopologyCommonAncestor", *cards))
            access = [_p2p_status(nv, *cards, kind) for kind in (_READ, _WRITE, _NVLINK)]
            link = f"NV{nvlinks}" if nvlinks else ancestor
            pairs.append((a, b, link, ancestor, nvlinks, *access))
    return pairs


def _p2p_status(nv: Any, card: Any, peer: Any, kind: int) -> str | None:
    try:
        status = ask(nv, "nvmlDeviceGetP2PStatus", card, peer, kind)
    except TypeError:
        # Some releases of the binding take a pointer for the answer.
        answer = ctypes.c_uint(len(_P2P))
        ask(nv, "nvmlDeviceGetP2PStatus", card, peer, kind, ctypes.byref(answer))
        status = answer.value
    return _P2P[status] if isinstance(status, int) and status < len(_P2P) else None


def _link_ends(nv: Any, handle: Any) -> Counter[str] | None:
    """Count active NVLinks by their other end: a PCI address, or NVSwitch."""
    states = [ask(nv, "nvmlDeviceGetNvLinkState", handle, link) for link in range(MAX_LINKS)]
    if all(state is None for state in states):
        return None
    ends: Counter[str] = Counter()
    for link in (link for link, state in enumerate(states) if state):
        if ask(nv, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH_TYPE:
            ends[_SWITCH] += 1
        else:
            pci = ask(nv, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            ends["" if pci is None else address(pci)] += 1
    return ends


def _bits(words: Iterable[int] | None) -> list[int]:
    """Return the indices of the bits set in words of 64 bits."""
    return [
        64 * at + bit for at, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1
    ]


def _numa_node(nv: Any, handle: Any, bus: str | None) -> int | None:
    """Return the nearest node; nvmlDeviceGetNumaNodeId is that of the card's memory (Grace)."""
    nodes = _bits(ask(nv, "nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _NODE_SCOPE))
    if len(nodes) == 1:
        return nodes[0]
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


_MIB: Final = 2**20
METRICS: Final = {
    "smActive": (2, 1, "% of the SMs' time with a warp on them, mean of all SMs"),
    "smOccupancy": (3, 1, "% of the warps that the SMs have room for"),
    "integerActive": (4, 1, "% of the time that the integer pipe works"),
    "tensorActive": (5, 1, "% of the time that the tensor cores work, in any precision"),
    "dramActive": (10, 1, "% of the bandwidth of the card's memory"),
    "fp64Active": (11, 1, "% of the time that the fp64 pipe works"),
    "fp32Active": (12, 1, "% of the time that the fp32 pipe works"),
    "fp16Active": (13, 1, "% of the time that the fp16 pipe works"),
    "pcieTxRate": (20, _MIB, "bytes a second sent over PCIe"),
    "pcieRxRate": (21, _MIB, "bytes a second received over PCIe"),
    "nvlinkRxRate": (60, _MIB, "bytes a second received over all NVLinks"),
    "nvlinkTxRate": (61, _MIB, "bytes a second sent over all NVLinks"),
}
"""Number of each metric, what its unit is in ours, and its meaning."""
_UNITS: Final = {number: unit for number, unit, _ in METRICS.values()}
ACTIVITY: Final = {
    "timeNs": "ns of CLOCK_REALTIME at the end of the time that the row is of",
    "periodNs": "ns since its start",
} | {name: meaning for name, (*_, meaning) in METRICS.items()}
"""Columns of a row; `gpu` comes before them in the table."""

ActivityRow = tuple[int, int, list[float | None]]

_CHANGE: Final = METRICS["dramActive"][0]
"""The metric that is not a number if the counters did not change between two samples."""
_EARLIEST_NS: Final = 94_000_000
"""Time from a change to the first look for the next one, 100 ms later."""
_POLL_S: Final = 0.003
_SEEN_NS: Final = 12_000_000
"""Maximum time between two readings for a change between them to be known well enough."""
_LONGEST_NS: Final = 500_000_000
_CHANGES: Final = 10
"""Changes that are read in turn."""


class ActivityReader(Thread):
    """Reader of one card's counters on a thread of its own, at the pace of the card.

    Attributes:
        rows: end on CLOCK_MONOTONIC, nanoseconds since the start, and the values of `METRICS`.
        ending: set when no more is wanted.
    """

    def __init__(self, nv: Any, handle: Any, share: float) -> None:
        """``share`` is the maximum part of a core that the reading takes."""
        super().__init__(daemon=True)
        self.rows: deque[ActivityRow] = deque()
        self.ending = Event()
        self._nv, self._handle, self._share = nv, handle, share

    def run(self) -> None:
        """Read until the end; at once nothing where the card, the driver or the binding cannot."""
        with suppress(self._nv.NVMLError, AttributeError):
            if not self._nv.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return
            self._held, self._fresh = (self._nv.nvmlGpmSampleAlloc() for _ in range(2))
            self._change = self._question([_CHANGE])
            self._all = self._question([number for number, *_ in METRICS.values()])
            self._nv.nvmlGpmSampleGet(self._handle, self._held)
            last = math.inf
            while not self.ending.is_set():
                began, cost = time.monotonic_ns(), time.thread_time_ns()
                self._read_changes()
                cost = time.thread_time_ns() - cost
                # One burst may be slow, as while CUDA starts: then the one before it counts.
                pause = min(cost, last) / self._share - (time.monotonic_ns() - began)
                last = cost
                self.ending.wait(max(0, pause) / 1e9)

    def _read_changes(self) -> None:
        """Read a few changes in turn; what is between two that were seen is a row."""
        polled = 0
        changed: int | None = None
        for _ in range(_CHANGES):
            began = time.monotonic_ns()
            wait_s = _POLL_S if changed is None else (changed + _EARLIEST_NS - began) / 1e9
            while not self.ending.wait(wait_s):
                self._nv.nvmlGpmSampleGet(self._handle, self._fresh)
                before, polled, wait_s = polled, time.monotonic_ns(), _POLL_S
                if self._answer(self._change) != [None]:
                    break
                if polled - began > _LONGEST_NS:
                    return
            else:
                return
            last = changed
            changed = (before + polled) // 2 if polled - before <= _SEEN_NS else None
            if changed is not None and last is not None:
                self.rows.append((changed, changed - last, self._answer(self._all)))
            self._held, self._fresh = self._fresh, self._held

    def _question(self, numbers: list[int]) -> Any:
        asked = self._nv.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = self._nv.NVML_GPM_METRICS_GET_VERSION, len(numbers)
        for at, number in enumerate(numbers):
            asked.metrics[at].metricId = number
        return asked

    def _answer(self, asked: Any) -> list[float | None]:
        """Compute metrics between the two samples, in our units; None where unknown."""
        asked.sample1, asked.sample2 = self._held, self._fresh
        self._nv.nvmlGpmMetricsGet(asked)
        return [
            round(metric.value * _UNITS[metric.metricId], 4)
            if metric.nvmlReturn == 0 and 0 <= metric.value < 2**40
            else None
            for metric in asked.metrics[: asked.numMetrics]
        ]
