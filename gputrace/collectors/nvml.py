"""NVML sampling from the recording process, and reading back what it wrote.

`<folder>/<hostname>.nvml.jsonl`: the first line says what the cards are, each further one what they
did at one tick, the last one how the sampling went. A line is one write, so a kill costs the last
line at most. What is not supported is null and is not asked again.

nvmlDeviceGetPcieThroughput (21 ms a direction) is never called: its byte counters are read instead.
The sample ring and the counters lose nothing by being read seldom; where that is slow (3 ms a card
on an H200) they are read at every n-th tick only, and take half a percent of a core at most.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from io import FileIO
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.topology import (
    DEVICE,
    LOST,
    MAX_LINKS,
    REFUSED,
    TOPOLOGY,
    ask,
    describe,
    ranges,
    relate,
)

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

_COLUMNS: Final = ["gpu", *SAMPLE]

Value = float | int | None
Row = list[Value]
Table = tuple[list[str], list[tuple[Any, ...]]]

_NVLINK_FIELDS: Final = range(138, 142)
_MEMORY_V2: Final = 0x0200_0028  # tells what is in use from what the driver reserves
_ALL_LINKS: Final = 0xFFFF_FFFF
_RING_UTILIZATION: Final = 1
_NOTHING_NEW: Final = frozenset({6, 21})  # NotFound, NoData
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_SELDOM: Final = 8.0  # seconds; the ring holds 14 s and more
_NO_NVML: Final = {
    9: "the NVIDIA driver is not loaded",
    12: "libnvidia-ml.so.1 was not found; is the NVIDIA driver installed, and in this container?",
    18: "the NVIDIA driver was replaced while loaded; restart the machine",
}


class _Lost(Exception):
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
                    raise _Lost(str(error)) from error
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
            raise _Lost("GPU is lost")
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


class _Gpu:
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


class Sampler:
    """Samples every GPU of this machine in a thread of the recording process.

    Attributes:
        notice: one line for the user where something is missing, else empty.
    """

    def __init__(self, share: float = 0.005) -> None:
        """`share` of a core is what the rings and counters of all cards may take at most."""
        self.notice = ""
        self._share = share
        self._end = Event()
        self._thread: Thread | None = None

    def start(self, folder: Path, hz: float = 4.0) -> Sampler | None:
        """Begins; None, and a `notice`, where there is no NVML or no place to write.

        The cards are described in the thread, so that the program need not wait for that.
        """
        try:
            nv = _open_nvml()
            file = FileIO(folder / f"{socket.gethostname()}.nvml.jsonl", "x")
        except Exception as error:
            self.notice = f"no GPU sampling: {error}"
            return None
        interval = round(1e9 / hz)
        self._thread = Thread(
            target=self._run, args=(nv, file, interval), name="gputrace-nvml", daemon=True
        )
        self._thread.start()
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Takes a last sample and ends; a driver that hangs is left alone after `timeout` s."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self.notice = "GPU sampling did not end: the driver does not answer"

    def _run(self, nv: Any, file: FileIO, interval: int) -> None:
        writer = _Writer(file)
        try:
            _Ticks(nv, writer, interval, self._share).run(self._end)
        except Exception as error:
            self.notice = f"GPU sampling ended early: {error}"
        finally:
            self.notice = self.notice or writer.problem
            with suppress(Exception):
                file.close()
                nv.nvmlShutdown()


def _open_nvml() -> Any:
    """The module pynvml, ready to be asked; it carries no types."""
    try:
        nv: Any = import_module("pynvml")
    except ImportError:
        raise RuntimeError("the package nvidia-ml-py is not installed") from None
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except nv.NVMLError as error:
        raise RuntimeError(_NO_NVML.get(error.value, f"NVML says {error}")) from None
    if not count:
        raise RuntimeError("the NVIDIA driver shows no GPU here")
    return nv


class _Writer:
    """Lines of JSON, each in one write; a full disk is told once and does not end the sampling."""

    def __init__(self, file: FileIO) -> None:
        self._file, self._torn, self._lost = file, False, 0
        self.problem = ""

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            whole = b"\n" * self._torn + data
            written = self._file.write(whole) or 0
            self._torn = self._torn if not written else written < len(whole)
            why = "" if written == len(whole) else "the disk is full"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            self._lost += 1
            self.problem = f"{self._lost} GPU samples were not written: {why}"


class _Ticks:
    """The cards of this machine, asked at a steady beat."""

    def __init__(self, nv: Any, writer: _Writer, interval: int, share: float) -> None:
        self._nv, self._writer, self._interval = nv, writer, interval
        self._allowed = share * interval
        self._gpus: list[_Gpu | None] = []
        self._gone: dict[int, str] = {}
        self._ticks = self._slow_reads = self._slow_ns = 0

    def run(self, end: Event) -> None:
        """Until `end`; a tick that is missed is left out, and the later ones come when due."""
        self._describe()
        start, tick = time.monotonic_ns(), 0
        while True:
            last = end.is_set()
            self._sample(tick, last)
            if last:
                break
            tick = max(tick, (time.monotonic_ns() - start) // self._interval) + 1
            end.wait(max(0, start + tick * self._interval - time.monotonic_ns()) / 1e9)
        cost = {"time_ns": time.time_ns(), "ticks": self._ticks, "cpu_ns": time.thread_time_ns()}
        self._writer.write({"end": cost})

    def _describe(self) -> None:
        handles = [self._handle(gpu) for gpu in range(self._nv.nvmlDeviceGetCount())]
        devices = [describe(self._nv, gpu, handle) for gpu, handle in enumerate(handles)]
        pairs = relate(self._nv, handles, [device["pciBusId"] for device in devices])
        header = {
            "host": socket.gethostname(),
            "time_ns": time.time_ns(),
            "interval_ns": self._interval,
            "driver": ask(self._nv, "nvmlSystemGetDriverVersion"),
            "columns": list(SAMPLE),
            "devices": devices,
            "topology": pairs,
        }
        self._writer.write(header)
        self._gpus = [self._open(gpu, handle) for gpu, handle in enumerate(handles)]

    def _handle(self, gpu: int) -> Any:
        try:
            return self._nv.nvmlDeviceGetHandleByIndex(gpu)
        except self._nv.NVMLError as error:
            self._gone[gpu] = str(error)
            return None

    def _open(self, gpu: int, handle: Any) -> _Gpu | None:
        if handle is None:
            return None
        try:
            return _Gpu(self._nv, handle)
        except _Lost as lost:
            self._gone[gpu] = str(lost)
            return None

    def _sample(self, tick: int, last: bool) -> None:
        line: dict[str, Any] = {"time_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        every = self._every()
        # Not all cards at one tick: that would be a long one.
        line["gpus"] = [
            self._ask(gpu, last or (tick + gpu) % every == 0) for gpu in range(len(self._gpus))
        ]
        if self._gone:
            line["lost"], self._gone = self._gone, {}
        self._writer.write(line)
        self._ticks += 1

    def _ask(self, gpu: int, slow: bool) -> Row | None:
        card = self._gpus[gpu]
        if card is None:
            return None
        try:
            row = [time.time_ns(), *card.quick()]
            return row + (self._slow(card) if slow else [None] * (len(RING) + len(FIELDS)))
        except _Lost as lost:
            self._gpus[gpu], self._gone[gpu] = None, str(lost)
            return None

    def _slow(self, card: _Gpu) -> Row:
        start = time.perf_counter_ns()
        row = card.slow()
        self._slow_ns += time.perf_counter_ns() - start
        self._slow_reads += 1
        return row

    def _every(self) -> int:
        """Ticks from one slow read of a card to its next, by what they cost until now."""
        cost = self._slow_ns / max(1, self._slow_reads) * len(self._gpus)
        seldom = max(1, int(_SELDOM * 1e9 / self._interval))
        return min(seldom, max(1, math.ceil(cost / self._allowed)))


@dataclass(slots=True)
class NvmlLog:
    """What one machine's sampler wrote.

    Attributes:
        host: its name.
        driver: version of the NVIDIA driver, or nothing.
        interval_ns: from tick to tick, as was asked for.
        devices: the columns of DEVICE for each card; and `lostNs`, CLOCK_REALTIME, or None.
        topology: the columns of TOPOLOGY for each ordered pair of cards.
        samples: `gpu` and the columns of SAMPLE, a row for each card and tick, in the order of
            time; int64, `utilization` float64; NULL is -1.
        clocks: (CLOCK_REALTIME, CLOCK_MONOTONIC) in ns at each tick.
        cpu_ns: what the sampling thread cost; None where it was killed.
        skipped: lines that could not be understood, the cut last one among them.
    """

    host: str = ""
    driver: str = ""
    interval_ns: int = 0
    devices: list[dict[str, Any]] = field(default_factory=list)
    topology: list[tuple[Any, ...]] = field(default_factory=list)
    samples: dict[str, NDArray[Any]] = field(default_factory=dict)
    clocks: list[tuple[int, int]] = field(default_factory=list)
    cpu_ns: int | None = None
    skipped: int = 0


def read_nvml(path: Path) -> NvmlLog:
    """Reads a file, whatever of it is there; nothing is raised for what it holds."""
    log, columns, rows = NvmlLog(), list(SAMPLE), list[Row]()
    for line in path.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            said = json.loads(line)
            if "devices" in said:
                columns = _take_header(log, said)
            elif "gpus" in said:
                rows += _take_tick(log, said, columns)
            else:
                log.cpu_ns = int(said["end"]["cpu_ns"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            log.skipped += 1
    log.samples = {
        name: np.array([row[at] for row in rows], float if name == "utilization" else np.int64)
        for at, name in enumerate(_COLUMNS)
    }
    return log


def _take_header(log: NvmlLog, said: dict[str, Any]) -> list[str]:
    devices = [{name: device.get(name) for name in DEVICE} for device in said["devices"]]
    log.devices = [device | {"lostNs": None} for device in devices]
    log.topology = [tuple(pair) for pair in said["topology"] if len(pair) == len(TOPOLOGY)]
    log.host, log.driver = str(said["host"]), str(said["driver"] or "")
    log.interval_ns = int(said["interval_ns"])
    return [str(name) for name in said["columns"]]


def _take_tick(log: NvmlLog, said: dict[str, Any], columns: list[str]) -> list[Row]:
    now, monotonic = int(said["time_ns"]), int(said["monotonic_ns"])
    named = [
        {"timeNs": now} if row is None else dict(zip(columns, row, strict=True))
        for row in said["gpus"]
    ]
    rows: list[Row] = [
        [gpu, *(_checked(row.get(name)) for name in SAMPLE)] for gpu, row in enumerate(named)
    ]
    for gpu in said.get("lost", {}):
        log.devices[int(gpu)]["lostNs"] = now
    log.clocks.append((now, monotonic))
    return rows


def _checked(value: Any) -> float | int:
    if value is None:
        return NULL
    if not isinstance(value, int | float) or not abs(value) < 2**63:
        raise ValueError(value)
    return value


def tables(log: NvmlLog) -> dict[str, Table]:
    """Columns and rows by table of the trace file; NULL is None.

    GPUTRACE_NVML_DEVICE has the columns of DEVICE, driverVersion, and lostNs: CLOCK_REALTIME when
    the card was found gone. GPUTRACE_NVML_SAMPLE has gpu and the columns of SAMPLE,
    GPUTRACE_TOPOLOGY those of TOPOLOGY.
    """
    samples = [[None if v == NULL else v for v in log.samples[name].tolist()] for name in _COLUMNS]
    return {
        "GPUTRACE_NVML_DEVICE": (
            [*DEVICE, "driverVersion", "lostNs"],
            [_device_row(device, log.driver) for device in log.devices],
        ),
        "GPUTRACE_NVML_SAMPLE": (_COLUMNS, list(zip(*samples, strict=True))),
        "GPUTRACE_TOPOLOGY": (list(TOPOLOGY), log.topology),
    }


def _device_row(device: dict[str, Any], driver: str) -> tuple[Any, ...]:
    cpus = device["cpuAffinity"]
    shown = device | {"cpuAffinity": ranges(cpus) if cpus else None}
    return *(shown[name] for name in DEVICE), driver or None, device["lostNs"]
