"""Timelines of frameworks for the trace viewer: a GPU's operators from MXNet's profiler, and from
Horovod when tensors were negotiated and reduced, as ranges, and nothing of a GPU.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.model.events import Events, Kind
from gputrace.model.trace import NoGpu, Process, Session
from gputrace.readers import chrome_json as chrome
from gputrace.readers.in_memory import MemoryTrace, Names

_DEVICES: Final = re.compile(rb'"name"\s*:\s*"[cg]pu/\d+"')
"""In the first events, which name the devices."""
_GPU: Final = re.compile(r"gpu/(\d{1,4})")
_COPIES: Final = {
    "CopyCPU2GPU": Kind.COPY_H2D,
    "CopyGPU2CPU": Kind.COPY_D2H,
    "CopyGPU2GPU": Kind.COPY_D2D,
}
_NOT_RUN: Final = {"DeleteVariable", "WaitForVar", "SetupExec"}
"""Names of the engine itself, which does not run on the GPU."""
_OPERATORS: Final = (
    "MXNet's profiler times operators, not kernels: what a GPU does within one, and which thread "
    "waits for it, is unknown; `gputrace record -- python train.py` records that"
)
_MXNET_NO_GPU: Final = (
    "an MXNet profile of a run on CPUs: no operator in it ran on a GPU; run the program on "
    "mx.gpu(), preferably under `gputrace record -- python train.py`"
)


def is_mxnet(content: bytes) -> bool:
    """Return True if uncompressed content begins as a file of MXNet's profiler."""
    return b'"traceEvents"' in content and _DEVICES.search(content) is not None


_COLUMNS: Final = ("start", "end", "kind", "name", "device", "stream")


class MxnetTrace(MemoryTrace):
    """Operators of GPUs as kernels; its clock is 0 at the first of them."""

    def __init__(self, path: Path, breaks: ErrorPolicy = STOP) -> None:
        events, skipped = chrome.read_events(path, breaks)
        processes, _ = chrome.read_names(events)
        gpus = {
            pid: int(gpu[1]) for pid, name in processes.items() if (gpu := _GPU.fullmatch(name))
        }
        names, rows = Names(), list[tuple[int, ...]]()
        begun: dict[tuple[int, chrome.Key, str], list[int]] = {}
        """Operators of one name on one thread of a GPU that have begun, and when."""
        threads: dict[chrome.Key, int] = {}
        for event in events:
            device, name = gpus.get(chrome.key(event, "pid")), str(event.get("name"))
            time = chrome.nanoseconds(event.get("ts"))
            if device is None or time is None or name in _NOT_RUN:
                continue
            tid = chrome.key(event, "tid")
            open_ = begun.setdefault((device, tid, name), [])
            if event.get("ph") == "B":
                open_.append(time)
            elif event.get("ph") == "E" and open_:
                stream = threads.setdefault(tid, len(threads))
                kind = _COPIES.get(name, Kind.KERNEL)
                rows.append((open_.pop(), time, kind, names.number(name), device, stream))
        if not rows:
            raise InputError(path, _MXNET_NO_GPU)
        columns = dict(zip(_COLUMNS, np.array(rows, np.int64).T, strict=True))
        epoch = int(columns["start"].min())
        columns |= {"start": columns["start"] - epoch, "end": columns["end"] - epoch}
        session = Session(epoch_ns=epoch)
        super().__init__(path, "mxnet", [Events(columns)], names.texts, [Process(0)], (), session)
        self.quality.notes.append(_OPERATORS)
        self.quality.drop(chrome.NOT_JSON, skipped)


_BEGIN: Final = "start_time_since_epoch_in_micros"
"""Argument of the first event; before Horovod 0.20 there was none."""
_EVENTS: Final = re.compile(
    rb'(?s)^\s*\[\s*\{.*("start_time_since_epoch_in_micros"|"NEGOTIATE_(ALL|BROADCAST|REDUCE))'
)
_HOROVOD_NO_GPU: Final = NoGpu(
    "a timeline of Horovod says when tensors were negotiated and reduced, not what a GPU ran",
    "record the program with `gputrace record -- python train.py`",
)


def is_horovod(content: bytes) -> bool:
    """Return True if uncompressed content begins as a timeline of Horovod."""
    return _EVENTS.match(content) is not None


class HorovodTrace(MemoryTrace):
    """Phases of each tensor, which has a thread of its own."""

    is_host_timeline = True

    def __init__(self, path: Path, breaks: ErrorPolicy = STOP) -> None:
        # Horovod never writes an end: what is cut off is the last event of a run.
        events, skipped = chrome.read_events(path, ErrorPolicy(True))
        names, rows, last = Names(), list[tuple[int, ...]](), 0
        begun: dict[chrome.Key, list[tuple[int, int, int]]] = {}
        """Open phases of each tensor, which is a process in the file, and nests them."""
        for event in events:
            if (time := chrome.nanoseconds(event.get("ts"))) is None:
                continue
            open_, last = begun.setdefault(chrome.key(event, "pid"), []), max(last, time)
            if event.get("ph") == "B":
                open_.append((time, names.number(str(event.get("name"))), len(begun)))
            elif event.get("ph") == "E" and open_:
                start, *more = open_.pop()
                rows.append((start, time, *more))
        # Phases without an end last until the end of the file.
        rows += [(start, last, *more) for start, *more in chain.from_iterable(begun.values())]
        if not rows:
            raise InputError(path, "a Horovod timeline without any phase of a tensor")
        columns = dict(zip(("start", "end", "name", "thread"), np.array(rows).T, strict=True))
        columns["kind"] = np.full(len(rows), Kind.RANGE)
        begins = (chrome.nanoseconds(chrome.arguments(event).get(_BEGIN)) for event in events)
        session = Session(epoch_ns=next(filter(None, begins), None))
        parts, processes = [Events(columns)], [Process(0)]
        super().__init__(
            path, "horovod", parts, names.texts, processes, (), session, _HOROVOD_NO_GPU
        )
        self.origin = int(columns["start"].min())
        self.quality.drop(chrome.NOT_JSON, skipped)
