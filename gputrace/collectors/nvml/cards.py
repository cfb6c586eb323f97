"""What one GPU says of itself through NVML: the questions, and the columns of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gputrace.collectors.nvml.topology import LOST, MAX_LINKS, REFUSED, ask

NULL: Final = -1
"""Stands for NULL in the columns of NvmlLog.samples; NVML itself gives nothing below 0."""

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
_MEMORY_V2: Final = 0x0200_0028  # tells what is in use from what the driver reserves
_ALL_LINKS: Final = 0xFFFF_FFFF
_RING_UTILIZATION: Final = 1
_NOTHING_NEW: Final = frozenset({6, 21})  # NotFound, NoData
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Lost(Exception):
    """The card is gone for good."""


class _Question:
    """One or more columns with the calls that can fill them, the best first."""

    def __init__(self, nv: Any, columns: int, *calls: Callable[[], Sequence[Value]]) -> None:
        self._nv, self._columns, self._calls = nv, columns, list(calls)

    def ask(self) -> Sequence[Value]:
        """Values, or nulls; a call that is refused gives way to the next for good."""
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
    """The driver's own samples of utilization, each taken once."""

    def __init__(self, nv: Any, handle: Any) -> None:
        self._nv, self._handle, self._last = nv, handle, 0
        self._primed = False

    def __call__(self) -> tuple[Value, Value]:
        try:
            new = self._new()
        except self._nv.NVMLError as error:
            if error.value not in _NOTHING_NEW:
                raise
            new = []
        # What was sampled before the recording began says nothing of it.
        known, self._primed = new if self._primed else [], True
        return (round(sum(known) / len(known), 2) if known else None), len(known)

    def _new(self) -> list[float]:
        kind, samples = self._nv.nvmlDeviceGetSamples(self._handle, _RING_UTILIZATION, self._last)
        new = [sample for sample in samples if sample.timeStamp > self._last]
        self._last = max((sample.timeStamp for sample in new), default=self._last)
        return [getattr(sample.sampleValue, _MEMBERS[kind]) for sample in new]


class _Fields:
    """The counters: those that answer when asked alone at first are asked together later."""

    def __init__(self, nv: Any, handle: Any) -> None:
        self._nv, self._handle = nv, handle
        links = self._links()
        self._asked = [
            (column, number, scope)
            for column, (number, _) in FIELDS.items()
            for scope in (links if number in _NVLINK_FIELDS else [0])
            if self._answers(number, scope)
        ]

    def __call__(self) -> list[Value]:
        if not self._asked:
            return [None] * len(FIELDS)
        found: dict[str, list[Value]] = {column: [] for column in FIELDS}
        answers = self._read([(number, scope) for _, number, scope in self._asked])
        for (column, _, _), value in zip(self._asked, answers, strict=True):
            found[column].append(value)
        return [_sum(values) for values in found.values()]

    def _links(self) -> list[int]:
        """Newer drivers add the NVLinks up; else each is asked."""
        first = _NVLINK_FIELDS[0]
        if self._answers(first, _ALL_LINKS):
            return [_ALL_LINKS]
        return [link for link in range(MAX_LINKS) if self._answers(first, link)]

    def _answers(self, number: int, scope: int) -> bool:
        values = ask(self._nv, "nvmlDeviceGetFieldValues", self._handle, [(number, scope)])
        return values is not None and values[0].nvmlReturn not in REFUSED

    def _read(self, wanted: list[tuple[int, int]]) -> list[Value]:
        values = self._nv.nvmlDeviceGetFieldValues(self._handle, wanted)
        if any(value.nvmlReturn in LOST for value in values):
            raise Lost("GPU is lost")
        return [_number(value) for value in values]


def _number(value: Any) -> Value:
    if value.nvmlReturn != 0 or not 0 <= value.valueType < len(_MEMBERS):
        return None
    number = getattr(value.value, _MEMBERS[value.valueType])
    # All ones is NVML's "not available".
    if not 0 <= number < 2**63 - 1:
        return None
    return int(number) * (1024 if value.fieldId in _NVLINK_FIELDS else 1)


def _sum(values: list[Value]) -> Value:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


class Card:
    """What is asked of one card at each tick."""

    def __init__(self, nv: Any, handle: Any) -> None:
        def call(name: str, *arguments: Any) -> Callable[[], Sequence[Value]]:
            return lambda: (getattr(nv, name)(handle, *arguments),)

        def memory(*version: int) -> Callable[[], Sequence[Value]]:
            return lambda: (int(nv.nvmlDeviceGetMemoryInfo(handle, *version).used),)

        def rates() -> tuple[Value, Value]:
            return float(nv.nvmlDeviceGetUtilizationRates(handle).gpu), None

        self._quick = [
            _Question(nv, 1, memory(_MEMORY_V2), memory()),
            _Question(nv, 1, call("nvmlDeviceGetClockInfo", 1)),
            _Question(nv, 1, call("nvmlDeviceGetClockInfo", 2)),
            _Question(nv, 1, call("nvmlDeviceGetPowerUsage")),
            _Question(nv, 1, call("nvmlDeviceGetTemperature", 0)),
            _Question(
                nv,
                1,
                call("nvmlDeviceGetCurrentClocksEventReasons"),
                call("nvmlDeviceGetCurrentClocksThrottleReasons"),  # before driver 535
            ),
            _Question(nv, 1, call("nvmlDeviceGetCurrPcieLinkGeneration")),
            _Question(nv, 1, call("nvmlDeviceGetCurrPcieLinkWidth")),
        ]
        self._slow = [
            _Question(nv, len(RING), _Ring(nv, handle), rates),
            _Question(nv, len(FIELDS), _Fields(nv, handle)),
        ]
        self._slow[0].ask()

    def quick(self) -> Row:
        return [value for question in self._quick for value in question.ask()]

    def slow(self) -> Row:
        return [value for question in self._slow for value in question.ask()]
