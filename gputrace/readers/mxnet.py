"""MXNet's own profiler: JSON for the trace viewer, of which a GPU's operators are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.model.events import Events, Kind
from gputrace.model.trace import Process, Session
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
_NO_GPU: Final = (
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
            raise InputError(path, _NO_GPU)
        columns = dict(zip(_COLUMNS, np.array(rows, np.int64).T, strict=True))
        epoch = int(columns["start"].min())
        columns |= {"start": columns["start"] - epoch, "end": columns["end"] - epoch}
        session = Session(epoch_ns=epoch)
        super().__init__(path, "mxnet", [Events(columns)], names.texts, [Process(0)], (), session)
        self.quality.notes.append(_OPERATORS)
        self.quality.drop(chrome.NOT_JSON, skipped)
