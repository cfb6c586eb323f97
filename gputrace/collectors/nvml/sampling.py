"""The process that samples: `python -P -m gputrace.collectors.nvml.sampling FOLDER HZ SHARE ...`.

It ends with its standard input, that is, with the recorder, however that ends; its standard output
is a message for the user, of at most one line.

`<folder>/<hostname>.nvml.jsonl` (`<hostname>.<pid>.nvml.jsonl` of a process that continues after
another one): the first line describes the cards, each further one their activity at one tick, the
last one the cost of the sampling. A line is one write, so a kill loses at most the last one. In a
ring (the last arguments are `Limits`), each `<hostname>~<number>…` has the first line. Unsupported
values are null and are not queried again.

A line also has what the threads of `activity` read since the last one, at the cards' own pace.
nvmlDeviceGetPcieThroughput (21 ms a direction) is never called: its byte counters are read instead.
The sample ring and the counters lose nothing by being read rarely; where that is slow (3 ms a card
on an H200), they are read at every n-th tick only, for at most half a percent of a core.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import sys
import time
from importlib import import_module
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, Final

from gputrace.collectors.backend import NONE, Limits, bytes_in
from gputrace.collectors.neighbours import CardProcesses, RunProcesses
from gputrace.collectors.nvml import queries
from gputrace.collectors.nvml.queries import METRICS, ActivityReader

_SELDOM: Final = 8.0  # seconds; the ring holds 14 s and more
_ACTIVITY_SHARE: Final = 0.01
"""Maximum part of a core that reading the activity of all cards takes."""
_NO_NVML: Final = {
    9: "the NVIDIA driver is not loaded",
    12: "libnvidia-ml.so.1 was not found; is the NVIDIA driver installed, and in this container?",
    18: "the NVIDIA driver was replaced while loaded; restart the machine",
}


def sample(folder: Path, hz: float, share: float, limits: Limits = NONE) -> str:
    """Sample every GPU of this machine until standard input ends; return a message for the user."""
    try:
        nv = _open_nvml()
        writer = _Writer(folder, limits)
    except Exception as error:
        return f"no GPU sampling: {error}"
    try:
        run = RunProcesses(folder, os.getppid())
        _Ticks(nv, writer, round(1e9 / min(max(hz, 0.1), 1000.0)), share, run).run()
    except Exception as error:
        return f"GPU sampling ended early: {error}"
    finally:
        writer.file.close()
    return writer.problem


class OneAtATime:
    """NVML's binding, which has no types, for one thread at a time.

    NVML crashes where two threads read GPM's counters, even those of two cards: of 49 samplers of
    two H200s (driver 580.159), 15 died of SIGSEGV or SIGABRT, most of them in the first second.
    """

    def __init__(self, binding: Any) -> None:
        self._binding, self._lock = binding, Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._binding, name)
        if not name.startswith("nvml"):
            return found

        def call(*arguments: object) -> Any:
            with self._lock:
                return found(*arguments)

        setattr(self, name, call)
        return call


def _open_nvml() -> Any:
    """Return the initialized module pynvml."""
    try:
        nv: Any = OneAtATime(import_module("pynvml"))
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
    """Writer of lines of JSON, each in one write; a full disk does not end the sampling."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits, self._stem = folder, limits, socket.gethostname()
        try:
            self.file = FileIO(self._path(0), "x")
        except FileExistsError:
            self._stem += f".{os.getpid()}"
            self.file = FileIO(self._path(0), "x")
        self._torn, self._lost, self._segment = False, 0, 0
        self._next = time.monotonic_ns() + limits.segment_ns
        self.problem = ""

    def rotate(self, header: dict[str, Any]) -> bool:
        """Start a new file if it is time; return True if so."""
        if not self._limits.segment_ns or time.monotonic_ns() < self._next:
            return False
        self._next += self._limits.segment_ns
        if self._segment >= self._limits.keep:
            self._path(self._segment - self._limits.keep).unlink(missing_ok=True)
        self._segment += 1
        self.file.close()
        self.file = FileIO(self._path(self._segment), "x")
        self.write(header)
        return True

    def _path(self, segment: int) -> Path:
        part = f"~{segment:06d}" if segment else ""
        return self._folder / f"{self._stem}{part}.nvml.jsonl"

    @property
    def is_full(self) -> bool:
        """Return True if the recording has reached its size limit."""
        limit = self._limits.max_bytes
        return bool(limit) and bytes_in(self._folder) >= limit

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            whole = b"\n" * self._torn + data
            written = self.file.write(whole) or 0
            self._torn = self._torn if not written else written < len(whole)
            why = "" if written == len(whole) else "the disk is full"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            self._lost += 1
            self.problem = f"{self._lost} GPU samples were not written: {why}"


class _Ticks:
    """Cards of this machine, queried at regular ticks."""

    def __init__(
        self, nv: Any, writer: _Writer, interval: int, share: float, run: RunProcesses
    ) -> None:
        self._nv, self._writer, self._interval = nv, writer, interval
        self._allowed = share * interval
        self._gpus: list[queries.CardQueries | None] = []
        self._readers: dict[int, ActivityReader] = {}
        self._run = run
        self._gone: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._header: dict[str, Any] = {}
        self._ticks = self._slow_reads = self._slow_ns = 0

    def run(self) -> None:
        """Sample until standard input ends; a missed tick is skipped."""
        self._describe()
        start, tick, last = time.monotonic_ns(), 0, False
        self._sample(tick, last)
        while not last:
            tick = max(tick, (time.monotonic_ns() - start) // self._interval) + 1
            wait_s = (start + tick * self._interval - time.monotonic_ns()) / 1e9
            # Standard input ends with the recording.
            last = bool(select.select([0], [], [], max(0.0, wait_s))[0])
            if last:
                for reader in self._readers.values():
                    reader.ending.set()
            self._sample(tick, last)
        cost = {"time_ns": time.time_ns(), "ticks": self._ticks, "cpu_ns": time.process_time_ns()}
        self._writer.write({"end": cost})

    def _describe(self) -> None:
        handles = []
        for gpu in range(self._nv.nvmlDeviceGetCount()):
            try:
                handles.append(self._nv.nvmlDeviceGetHandleByIndex(gpu))
            except self._nv.NVMLError as error:
                self._gone[gpu] = str(error)
                handles.append(None)
        devices = [queries.describe(self._nv, gpu, handle) for gpu, handle in enumerate(handles)]
        self._header = {
            "host": socket.gethostname(),
            "time_ns": time.time_ns(),
            "interval_ns": self._interval,
            "driver": queries.ask(self._nv, "nvmlSystemGetDriverVersion"),
            "columns": list(queries.SAMPLE),
            "metrics": list(METRICS),
            "devices": devices,
            "topology": queries.relate(
                self._nv, handles, [device["pciBusId"] for device in devices]
            ),
        }
        self._writer.write(self._header)
        self._processes = CardProcesses(self._nv, handles, self._run)
        for gpu, handle in enumerate(handles):
            try:
                self._gpus.append(None if handle is None else queries.CardQueries(self._nv, handle))
            except queries.Lost as lost:
                self._gone[gpu] = str(lost)
                self._gpus.append(None)
        for gpu, handle in enumerate(handles):
            if self._gpus[gpu] is not None:
                share = _ACTIVITY_SHARE / len(handles)
                self._readers[gpu] = ActivityReader(self._nv, handle, share)
                self._readers[gpu].start()

    def _sample(self, tick: int, last: bool) -> None:
        if self._writer.is_full:
            return
        is_new = self._writer.rotate(self._header | {"time_ns": time.time_ns()})
        if is_new:
            self._gone |= self._lost
        line: dict[str, Any] = {"time_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        # Ticks from one slow read of a card to its next, by what they cost until now.
        cost = self._slow_ns / max(1, self._slow_reads) * len(self._gpus)
        seldom = max(1, int(_SELDOM * 1e9 / self._interval))
        every = min(seldom, max(1, math.ceil(cost / self._allowed)))
        # Slow reads of different cards are spread over ticks.
        line["gpus"] = [
            self._ask(gpu, last or (tick + gpu) % every == 0) for gpu in range(len(self._gpus))
        ]
        line["activity"] = [
            [gpu, *reader.rows.popleft()]
            for gpu, reader in self._readers.items()
            for _ in range(len(reader.rows))
        ]
        if self._gone:
            line["lost"], self._gone = self._gone, {}
            self._lost |= line["lost"]
        if rows := self._processes.look(anew=is_new, last=last):
            line["processes"] = rows
        self._writer.write(line)
        self._ticks += 1

    def _ask(self, gpu: int, slow: bool) -> queries.Row | None:
        card = self._gpus[gpu]
        if card is None:
            return None
        try:
            row = [time.time_ns(), *card.quick()]
            if not slow:
                return row + [None] * (len(queries.RING) + len(queries.FIELDS))
            start = time.perf_counter_ns()
            row += card.slow()
        except queries.Lost as lost:
            self._gpus[gpu], self._gone[gpu] = None, str(lost)
            return None
        self._slow_ns += time.perf_counter_ns() - start
        self._slow_reads += 1
        return row


if __name__ == "__main__":
    limits = Limits(*map(int, sys.argv[4:]))
    sys.stdout.write(sample(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), limits))
    sys.stdout.flush()
    # Skip nvmlShutdown and Python's exit: on H200s with driver 580.159.04, glibc has aborted there
    # for a corrupted heap, after all was written.
    os._exit(0)
