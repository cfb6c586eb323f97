"""NVML sampling from the recording process.

`<folder>/<hostname>.nvml.jsonl` (`<hostname>.<pid>.nvml.jsonl` of a process that goes on where
another one was ended): the first line says what the cards are, each further one what they
did at one tick, the last one how the sampling went. A line is one write, so a kill costs the last
line at most. What is not supported is null and is not asked again.

nvmlDeviceGetPcieThroughput (21 ms a direction) is never called: its byte counters are read instead.
The sample ring and the counters lose nothing by being read seldom; where that is slow (3 ms a card
on an H200) they are read at every n-th tick only, and take half a percent of a core at most.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from contextlib import suppress
from importlib import import_module
from io import FileIO
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from gputrace.collectors.nvml.cards import FIELDS, RING, SAMPLE, Card, Lost, Row
from gputrace.collectors.nvml.topology import (
    ask,
    describe,
    relate,
)

_SELDOM: Final = 8.0  # seconds; the ring holds 14 s and more
_NO_NVML: Final = {
    9: "the NVIDIA driver is not loaded",
    12: "libnvidia-ml.so.1 was not found; is the NVIDIA driver installed, and in this container?",
    18: "the NVIDIA driver was replaced while loaded; restart the machine",
}


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
        """Begins, with `hz` ticks a second (0.1 to 1000) and one at the end.

        None, and a `notice`, where there is no NVML or no place to write.

        The cards are described in the thread, so that the program need not wait for that.
        """
        try:
            nv = _open_nvml()
            file = _new_file(folder)
        except Exception as error:
            self.notice = f"no GPU sampling: {error}"
            return None
        interval = round(1e9 / min(max(hz, 0.1), 1000.0))
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


def _new_file(folder: Path) -> FileIO:
    host = socket.gethostname()
    try:
        return FileIO(folder / f"{host}.nvml.jsonl", "x")
    except FileExistsError:
        return FileIO(folder / f"{host}.{os.getpid()}.nvml.jsonl", "x")


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
        self._gpus: list[Card | None] = []
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

    def _open(self, gpu: int, handle: Any) -> Card | None:
        if handle is None:
            return None
        try:
            return Card(self._nv, handle)
        except Lost as lost:
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
        except Lost as lost:
            self._gpus[gpu], self._gone[gpu] = None, str(lost)
            return None

    def _slow(self, card: Card) -> Row:
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
