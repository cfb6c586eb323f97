"""Python's stacks in profiles of PyTorch (``with_stack=True``), read at a clock's ticks as samples.

The profiler notes each call of a function by file, first line and name. At a tick, the innermost
call of the program's own code gives the line, as in the samples that gputrace records. Paths lack
what is on ``sys.path``, so libraries are known by their names; those that are not count as the
program's.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final

import numpy as np

from gputrace.model.events import UNKNOWN, Kind, Mask
from gputrace.readers.in_memory import Names
from gputrace.readers.kineto_events import EventBatch, Ints, Value

TICK_NS: Final = 200_000
"""Time from one sample to the next, or a multiple of it where there would be too many."""
_MOST_MEETINGS: Final = 1_000_000
"""Calls met by samples of a thread, outer ones included."""

_CALL: Final = re.compile(r"(.+)\((\d+)\): (.+)")
_BUILT_IN: Final = "<built-in "
_INSTALLED: Final = r"[/\\](?:site|dist)-packages[/\\]|torchinductor_"
_STANDARD: Final = r"[/\\]python3\.\d+[/\\]|<(?!string>|stdin>|ipython)"
_LIBRARIES: Final = (
    r"(torch|functorch|torchvision|torchaudio|triton|numpy|scipy|pandas|PIL|cv2|tqdm)[/\\.]"
)
_WRAPPERS: Final = r"(_?inner|_?wrap(per|ped)?(_fn|_func\w*)?|__torch_\w+__)$"
"""Packages and functions whose calls say less than their callers do."""


class _Side(IntEnum):
    """Whose code a call is of."""

    OTHERS, BUILT_IN, LIBRARY, PROGRAM = range(4)


def _called(name: Value) -> re.Match[str] | None:
    """Return the file, line and function of a call; None for those of C and of modules, and for
    functions that are in between.
    """
    call = _CALL.fullmatch(str(name))
    return call if call and not re.match(_WRAPPERS, call[3]) else None


def _side_of(name: Value) -> _Side:
    """Return whose code a call is of."""
    if (call := _called(name)) is None:
        return _Side.BUILT_IN if str(name).startswith(_BUILT_IN) else _Side.OTHERS
    if re.match(_LIBRARIES, call[1]) or re.search(_INSTALLED, call[1]):
        return _Side.LIBRARY
    top = re.split(r"[/\\.]", call[1], maxsplit=1)[0]
    is_standard = top in sys.stdlib_module_names or re.search(_STANDARD, call[1])
    return _Side.OTHERS if is_standard else _Side.PROGRAM


class Stacks:
    """Calls of Python that are under way at a tick, of a file that is decoded."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._parts: list[Ints] = []
        self._pids: dict[Value, int] = {}
        self._calls: Counter[tuple[int, int]] = Counter()
        """Number of calls of each thread of a process."""

    def add(self, events: EventBatch, thread: Callable[[Value], int]) -> None:
        """Add calls, of threads that a function numbers."""
        pids = events.map("pid", lambda pid: self._pids.setdefault(pid, len(self._pids)))
        of = np.column_stack([pids, events.map("tid", thread)])
        threads, counts = np.unique(of, axis=0, return_counts=True)
        self._calls.update(dict(zip(map(tuple, threads.tolist()), counts.tolist(), strict=True)))
        start, end = events["start"], events["start"] + events["length"]
        rows = np.flatnonzero((start != UNKNOWN) & (-(-start // TICK_NS) * TICK_NS < end))
        met = events.select(rows)
        names, sides = met.map("name", self._number), met.map("name", _side_of)
        self._parts.append(np.column_stack([of[rows], start[rows], end[rows], names, sides]))

    def _number(self, name: Value) -> int:
        call = _called(name)
        return self._names.number(f"{call[1]}:{call[2]} {call[3]}") if call else UNKNOWN

    def columns(self, processes: Mapping[Value, int]) -> list[dict[str, Ints]]:
        """Return the samples of the thread with most calls of each of some processes, numbered by
        process id.
        """
        busiest = {pid: (pid, thread) for (pid, thread), _ in self._calls.most_common()[::-1]}
        calls = np.concatenate(self._parts) if self._parts else np.empty((0, 6), np.int64)
        samples = []
        for pid, number in self._pids.items():
            mine = calls[(calls[:, :2] == busiest[number]).all(axis=1)]
            if pid in processes and len(mine):
                samples.append(_sampled(processes[pid], *mine.T[1:]))
        return samples


def _sampled(
    process: int, thread: Ints, start: Ints, end: Ints, name: Ints, side: Ints
) -> dict[str, Ints]:
    """Return the samples of a thread, given its calls."""
    period = TICK_NS * (1 + int((end - start).sum(dtype=np.float64) / TICK_NS / _MOST_MEETINGS))
    first = -(-start // period)
    times = -(-end // period) - first
    call = np.repeat(np.arange(len(start)), times)
    tick = first[call] + np.arange(len(call)) - np.repeat(np.cumsum(times) - times, times)
    # Outer calls first: they begin earlier, and end later.
    order = np.lexsort((-end[call], start[call], tick))
    call, tick = call[order], tick[order]
    ticks, place = np.unique(tick, return_inverse=True)

    def last(mask: Mask) -> Ints:
        """Return the innermost of some calls at each tick; -1 where there is none."""
        found = np.full(len(ticks), -1)
        found[place[mask]] = call[mask]
        return found

    line = last(side[call] == _Side.PROGRAM)
    # Of a program that is itself an installed package, the outermost call of such.
    outer = np.full(len(ticks), -1)
    installed = np.flatnonzero(side[call] == _Side.LIBRARY)[::-1]
    outer[place[installed]] = call[installed]
    line = np.where(line >= 0, line, outer)
    shown = line >= 0
    line, inner = line[shown], last(name[call] != UNKNOWN)[shown]
    innermost, at = last(np.ones(len(call), np.bool_))[shown], ticks[shown] * period
    stays = side[innermost] == _Side.BUILT_IN
    return {
        "start": at,
        "end": at,
        "kind": np.full(len(at), Kind.SAMPLE),
        "name": name[line],
        "process": np.full(len(at), process),
        "thread": thread[line],
        "bytes": np.where(stays, end[innermost] - at, 0),
        "correlation": name[inner],
    }
