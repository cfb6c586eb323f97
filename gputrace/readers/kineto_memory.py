"""Events of memory in a trace of PyTorch's profiler (``profile_memory=True``), as a snapshot.

Each allocation has the frames that its thread was in then: operators, modules, and lines of Python
with ``with_stack=True``. Paths are relative to the folders that Python imports from. What was held
before the recording is one block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.errors import ErrorPolicy
from gputrace.readers.chrome_json import Document
from gputrace.readers.compressed import Content
from gputrace.readers.kineto_events import (
    DecodedEvents,
    EventBatch,
    Ints,
    MemoryEvent,
    Pairs,
    Value,
    integer,
    nanoseconds,
    tabulate,
)
from gputrace.readers.memory_snapshot import DeviceSnapshot, Event, SnapshotReading, Stack

_FRAMES: Final = frozenset(("python_function", "cpu_op", "user_annotation", "Operator"))
_LINE: Final = re.compile(r"(.+\.py)\((\d+)\): (.+)")
_LIBRARY: Final = "/site-packages/"
_STANDS_FOR: Final = (
    ("autograd::engine::", ("", "torch::autograd::Engine::")),
    ("Optimizer.step", (f"{_LIBRARY}torch/optim/optimizer.py", "step")),
    ("nn.Module: ", (f"{_LIBRARY}torch/nn/modules/module.py", "_call_impl")),
)
"""Frames of snapshots that frames of other names stand for, by their beginnings."""
_BEFORE: Final = -1
"""Address of what was held before the recording."""
_MOST_THREADS: Final = 256
"""Threads whose frames are looked for: those that allocate most."""
_MOST_FRAMES: Final = 128
"""Innermost frames of a stack."""
_ANY_SIZE: Final = 1 << 40
"""Size of a file whose frames were read before their texts are looked at."""

Place = tuple[Value, Value]
"""Process and thread."""


def read_kineto_memory(path: Path) -> list[DeviceSnapshot]:
    """Read the memory of each GPU in a trace: the events, and what allocated it.

    The file is read twice: frames may come before the allocations in them.
    """
    decoder = DecodedEvents()
    for _ in _parts(path, decoder):
        pass
    events = decoder.memory
    time = nanoseconds([event.ts for event in events])
    order = [row for row in np.argsort(time, kind="stable").tolist() if time[row] >= 0]
    moments: dict[Place, list[int]] = defaultdict(list)
    takes = [integer(event.args.bytes) > 0 for event in events]
    for row in order:
        if takes[row]:
            moments[events[row].pid, events[row].tid].append(int(time[row]))
    frames: dict[Place, list[tuple[int, int, str]]] = {place: [] for place in moments}
    busiest = sorted(moments, key=lambda place: -len(moments[place]))[:_MOST_THREADS]
    for part in _parts(path, DecodedEvents()):
        for place in busiest:
            frames[place] += _around(part, place, np.array(moments[place]))
    reading, alive = SnapshotReading(_ANY_SIZE), dict[Any, Any]()
    stacks = {place: _stacks(moments[place], frames[place], reading, alive) for place in moments}
    devices: dict[int, list[tuple[MemoryEvent, Stack]]] = defaultdict(list)
    for row in order:
        event = events[row]
        stack = next(stacks[event.pid, event.tid]) if takes[row] else Stack()
        devices[integer(event.args.device)].append((event, stack))
    return [_snapshot(device, rows) for device, rows in sorted(devices.items())]


def _parts(path: Path, decoder: DecodedEvents) -> Iterator[EventBatch]:
    pairs = Pairs()
    with Content(path) as text:
        for part in Document(text, decoder.decode, ErrorPolicy(allowed=True)).parts():
            yield tabulate(pairs.whole(part)) if isinstance(part, list) else part


def _around(part: EventBatch, place: Place, at: Ints) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and name of the frames of a thread that some moment is in."""
    wanted: tuple[tuple[str, Callable[[Value], int]], ...] = (
        ("pid", lambda pid: pid == place[0]),
        ("tid", lambda tid: tid == place[1]),
        ("cat", lambda cat: cat in _FRAMES),
    )
    start, end = part["start"], part["start"] + part["length"]
    rows = np.searchsorted(at, start) < np.searchsorted(at, end)
    for column, is_wanted in wanted:
        rows &= part.map(column, is_wanted) == 1
    for row in np.flatnonzero(rows).tolist():
        yield int(start[row]), int(end[row]), str(part.value("name", row))


def _stacks(
    moments: list[int],
    frames: list[tuple[int, int, str]],
    reading: SnapshotReading,
    alive: dict[Any, Any],
) -> Iterator[Stack]:
    """Yield the stack at each moment, which are in order; ``alive`` keeps frames, and lists."""
    frames.sort(key=lambda frame: (frame[0], -frame[1]))
    begun, inside = 0, list[tuple[int, int, str]]()
    for moment, same in groupby(moments):
        while begun < len(frames) and frames[begun][0] <= moment:
            inside.append(frames[begun])
            begun += 1
        inside = [frame for frame in inside if frame[1] > moment][-_MOST_FRAMES:]
        names = tuple(name for _, _, name in inside)
        if names not in alive:
            alive |= {name: _frame(name) for name in names if name not in alive}
            alive[names] = [alive[name] for name in reversed(names)]
        stack = reading.stack(alive[names])
        if not stack.line:
            stack = stack._replace(line=next((n for n in names if n.startswith("aten::")), ""))
        yield from (stack for _ in same)


def _frame(name: str) -> dict[str, Any]:
    """Return a frame as snapshots have them."""
    if line := _LINE.fullmatch(name):
        path, number, function = line[1].replace("\\", "/"), int(line[2][:9]), line[3]
        path = f"{_LIBRARY}{path}" if path.startswith("torch/") else path
        return {"filename": path, "line": number, "name": function}
    for beginning, (path, function) in _STANDS_FOR:
        if name.startswith(beginning):
            rest = "" if path else name.removeprefix(beginning)
            return {"filename": path, "line": 0, "name": function + rest}
    return {"filename": "", "line": 0, "name": name}


def _snapshot(device: int, rows: list[tuple[MemoryEvent, Stack]]) -> DeviceSnapshot:
    events, reserved, held, freed = [], [], set[int](), 0
    for event, stack in rows:
        size, address = integer(event.args.bytes), integer(event.args.address)
        freed += 0 if size >= 0 or address in held else -size
        if size >= 0:
            held.add(address)
            events.append(Event("alloc", address, size, stack, 0, 0))
        else:
            held.discard(address)
            events.append(Event("free_completed", address, -size, Stack(), 0, 0))
        reserved.append(max(integer(event.args.reserved), 0))
    before = integer(rows[0][0].args.held) - integer(rows[0][0].args.bytes) - freed
    blocks = ((_BEFORE, before, before, Stack()),) if before > 0 else ()
    return DeviceSnapshot(device, (), blocks, tuple(events), "", tuple(reserved))
