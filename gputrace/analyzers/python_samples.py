"""Python lines of the user's program, from samples of its stacks; where modules are called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import PurePath
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import Shard
from gputrace.model.events import AT, Events, Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

_LINE: Final = r"(.*):(\d+) (\S+)"
"""Name of a sample: file, line, function."""

_NO_FUNCTION: Final = "<module>"
_HELD: Final = "lock held"
_ASLEEP: Final = "asleep"
_LONG_STAY_NS: Final = 2_000_000
"""Time at a line from which a thread is taken to wait there."""

Thread = tuple[int, int]
"""(process index, system thread id)."""


class SampledLine(Struct, frozen=True):
    """Line with most samples in some intervals."""

    line: str
    """Text such as ``train.py:48 load_batch``, with as much of the path as makes it unique."""
    count: int
    """Number of samples at that line."""
    samples: int
    """Number of all samples."""
    frame: str | None = None
    """Innermost frame that most samples at the line are in; None where unknown."""
    of_function: int = 0
    """Number of samples at the lines of its function, where these were counted together."""

    def __str__(self) -> str:
        """Return the samples that show it, ``45% of 11 samples, 73% in EMA.update``."""
        text = f"{self.count / self.samples:.0%} of {self.samples:,} samples"
        if self.of_function <= self.count:
            return text
        return f"{text}, {self.of_function / self.samples:.0%} in {self.line.rpartition(' ')[2]}"

    @property
    def share(self) -> float:
        return max(self.count, self.of_function) / self.samples

    @property
    def host_is_at(self) -> str:
        """The line, and the samples that show it, as a clause."""
        return host_is_at(self.line, self)


def host_is_at(line: str, samples: SampledLine | str) -> str:
    """Return a clause that names a line, and the samples that show it."""
    return f"the host is at {line} in {samples}"


class PythonLines(Struct, frozen=True, dict=True):
    """Samples by (process, thread), in order of time."""

    times: Mapping[Thread, Times]
    names: Mapping[Thread, NDArray[np.int32]]
    blocked: Mapping[Thread, Mask]
    """Samples that met the thread asleep; of recordings that do not say, those at whose line it
    stayed for some time."""
    frames: Mapping[Thread, NDArray[np.int64]]
    """Innermost frame of each sample, as the id of a name; -1 where unknown."""
    text: Mapping[int, str]
    stand_ins: Mapping[int, Thread]
    """Thread that stands for those without samples, such as autograd's, by process."""
    locks: Events
    """Samples that met the main thread waiting for the interpreter's lock (GIL): the thread that
    had it and its line; their number in ``bytes``."""

    def teller(self, thread: Thread) -> Thread | None:
        """Return the thread whose samples show where the program was while a thread fed the GPU."""
        return thread if thread in self.times else self.stand_ins.get(thread[0])

    def within(self, thread: Thread, time: Intervals) -> NDArray[np.intp]:
        """Return the mask of a thread's samples that lie in some stretches of time."""
        return np.flatnonzero(time.contains(self.times[thread]))

    def count(self, process: int, time: Intervals) -> Counter[str]:
        """Return the number of samples by line that met the stepping thread of a process in some
        time.
        """
        thread = self.stand_ins.get(process)
        if thread is None:
            return Counter()
        names, counts = np.unique(self.names[thread][self.within(thread, time)], return_counts=True)
        met: Counter[str] = Counter()
        for name, times in zip(names.tolist(), counts.tolist(), strict=True):
            met[self.text[name]] += times
        return met

    def awake(self, process: int, time: Intervals) -> float:
        """Return the share of the samples of a process's stepping thread in some time that met it
        running; 1 where there are none.
        """
        thread = self.stand_ins.get(process)
        mine = np.empty(0, np.intp) if thread is None else self.within(thread, time)
        return 1.0 - float(self.blocked[thread][mine].mean()) if thread and len(mine) else 1.0

    def waits_for_lock(self, process: int, time: Intervals) -> tuple[int, int, SampledLine | None]:
        """Return how many of the samples of a process in some stretches of time met its main thread
        waiting for the interpreter's lock, how many there are, and where others had the lock.
        """
        rows = (self.locks.process == process) & time.contains(self.locks.start)
        all_samples = sum(len(self.within(key, time)) for key in self.times if key[0] == process)
        waits = int(self.locks.bytes[rows].sum())
        names = np.repeat(self.locks.name[rows], self.locks.bytes[rows])
        return waits, all_samples, self._most_of(names) if waits else None

    def place(
        self, samples: Mapping[Thread, NDArray[np.intp]], least: float = 0.0
    ) -> SampledLine | None:
        """Return the line with most of some samples of some threads; None without samples.

        Where no line has the share ``least`` of them, but the lines of one function together have,
        it is the first of these.
        """
        parts = [self.names[thread][mine] for thread, mine in samples.items()]
        if not any(len(part) for part in parts):
            return None
        names = np.concatenate(parts)
        most, lines = self._most_of(names), [self._most_of(names).line]
        if most.share < least:
            most, lines = self._most_of_function(names) or (most, lines)
        inner = np.concatenate([self.frames[thread][mine] for thread, mine in samples.items()])
        at_lines = [id for id, text in self.text.items() if text in lines]
        inner = inner[is_among(names, at_lines) & (inner >= 0)]
        if not len(inner):
            return most
        ids, counts = np.unique(inner, return_counts=True)
        frame = self.text.get(int(ids[np.argmax(counts)]))
        return replace(most, frame=frame if frame not in lines else None)

    def _most_of(self, samples: NDArray[np.int32]) -> SampledLine:
        names, counts = np.unique(samples, return_counts=True)
        most = int(np.argmax(counts))
        return SampledLine(self.text[int(names[most])], int(counts[most]), int(counts.sum()))

    def _most_of_function(self, samples: NDArray[np.int32]) -> tuple[SampledLine, list[str]] | None:
        """Return the function with most samples, by its most sampled line, and all its lines."""
        names, counts = np.unique(samples, return_counts=True)
        of: dict[tuple[str, str], dict[str, int]] = {}
        for id, times in zip(names.tolist(), counts.tolist(), strict=True):
            match = re.fullmatch(_LINE, self.text[id])
            if match and match[3] != _NO_FUNCTION:
                of.setdefault((match[1], match[3]), {})[self.text[id]] = times
        lines = max(of.values(), key=lambda lines: sum(lines.values()), default=None)
        if lines is None:
            return None
        line = max(lines, key=lambda line: lines[line])
        of_function, every = sum(lines.values()), int(counts.sum())
        return SampledLine(line, lines[line], every, None, of_function), list(lines)


def read_python_lines(shard: Shard) -> PythonLines | None:
    """Read the samples of a shard's Python programs; None if there are none."""
    trace = shard.trace
    if Kind.SAMPLE not in trace.kinds:
        return None
    columns = ("start", "end", "name", "process", "thread", "bytes", "correlation")
    samples = trace.events([Kind.SAMPLE], columns)
    samples = samples.select(np.argsort(samples.start, kind="stable"))
    # Merged files have numbers of their own for names.
    inner = samples.correlation if len(trace.paths) == 1 else np.full(len(samples), -1)
    counted, texts = _read_counters(trace)
    asleep = counted.select(is_among(counted.name, [id for id in texts if texts[id] == _ASLEEP]))
    times, names, blocked, frames = {}, {}, {}, {}
    for thread in sorted(_threads(samples.process, samples.thread)):
        rows = (samples.process == thread[0]) & (samples.thread == thread[1])
        times[thread], names[thread] = samples.start[rows], samples.name[rows]
        frames[thread] = inner[rows].astype(np.int64)
        blocked[thread] = samples.bytes[rows] >= _LONG_STAY_NS
        if len(asleep):
            mine = (asleep.process == thread[0]) & (asleep.thread == thread[1])
            blocked[thread] = union(asleep.start[mine], asleep.end[mine]).contains(times[thread])
    locks, held = read_locks(trace)
    known = distinct_ids(np.concatenate([samples.name, inner[inner >= 0]]).astype(np.int64))
    text = _shortened({**trace.names(known), **held})
    # The most sampled thread of each process, preferring those that mark steps or waits.
    marks = trace.events([Kind.STEP, Kind.DATA_WAIT], ("process", "thread"))
    marking = _threads(marks.process, marks.thread)
    elsewhere = {process for process, _ in marking - times.keys()}
    telling = [t for t in times if t in marking or t[0] not in elsewhere]
    stand_ins = {t[0]: t for t in sorted(telling, key=lambda t: len(times[t]))}
    return PythonLines(times, names, blocked, frames, text, stand_ins, locks)


def read_sources(shard: Shard) -> Mapping[str, str]:
    """Read the lines at which modules are called, by path, and Triton's kernels are defined, by
    name, with as much of their paths as makes them unique.
    """
    if Kind.SOURCE not in shard.trace.kinds:
        return {}
    ids = distinct_ids(shard.trace.events([Kind.SOURCE], ["name"]).name)
    texts = (text.partition(AT) for text in shard.trace.names(ids).values())
    lines = {what: line for what, _, line in texts if line}
    return dict(zip(lines, _shortened(dict(enumerate(lines.values()))).values(), strict=True))


def read_locks(trace: Trace) -> tuple[Events, Mapping[int, str]]:
    """Read the samples that met a wait for the interpreter's lock, and the lines that had it."""
    counted, names = _read_counters(trace)
    held = {id: text for id, text in names.items() if text.startswith(_HELD)}
    lines = {id: text.removeprefix(_HELD).removeprefix(": ") for id, text in held.items()}
    return counted.select(is_among(counted.name, list(held))), lines


def _read_counters(trace: Trace) -> tuple[Events, Mapping[int, str]]:
    columns = ("start", "end", "name", "process", "thread", "bytes")
    counted = trace.events({Kind.COUNTER} & trace.kinds, columns)
    return counted, trace.names(distinct_ids(counted.name))


def _threads(process: NDArray[np.int16], thread: NDArray[np.int32]) -> set[Thread]:
    return set(zip(process.tolist(), thread.tolist(), strict=True))


def _shortened(names: Mapping[int, str]) -> dict[int, str]:
    """Return the shortest ends of paths that distinguish them."""
    matches = {id: match for id, name in names.items() if (match := re.fullmatch(_LINE, name))}
    paths = {match[1] for match in matches.values()}
    short: dict[str, str] = {}
    for length in count(1):
        tails: dict[str, list[str]] = {}
        for path in paths:
            tails.setdefault("/".join(PurePath(path).parts[-length:]), []).append(path)
        for tail, same in tails.items():
            if len(same) == 1 or all(len(PurePath(path).parts) <= length for path in same):
                short.update({path: short.get(path, tail) for path in same})
        if len(short) == len(paths):
            break
    return dict(names) | {id: f"{short[m[1]]}:{m[2]} {m[3]}" for id, m in matches.items()}
