"""Horovod's timeline: when tensors were negotiated and reduced, as ranges, and nothing of a GPU."""

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

_BEGIN: Final = "start_time_since_epoch_in_micros"
"""Argument of the first event; before Horovod 0.20 there was none."""
_EVENTS: Final = re.compile(
    rb'(?s)^\s*\[\s*\{.*("start_time_since_epoch_in_micros"|"NEGOTIATE_(ALL|BROADCAST|REDUCE))'
)
_NO_GPU: Final = NoGpu(
    "a timeline of Horovod: when tensors were negotiated and reduced, not what a GPU ran",
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
        super().__init__(path, "horovod", parts, names.texts, processes, (), session, _NO_GPU)
        self.origin = int(columns["start"].min())
        self.quality.drop(chrome.NOT_JSON, skipped)
