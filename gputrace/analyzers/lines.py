"""Which line of the user's program the host was at, by the samples of its stacks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import PurePath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.host import NOBODY, HostCalls
from gputrace.analyzers.intervals import EMPTY, Intervals, Times, union
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace

_LINE: Final = re.compile(r"(.*):(\d+) (\S+)")
"""A name of a sample: file, line, function."""

Thread = tuple[int, int]
"""(process index, system thread id)."""


@dataclass(frozen=True, slots=True)
class Place:
    """The line that most samples of some stretches of time are at."""

    line: str
    """As ``train.py:48 load_batch``; of the file's path, what tells it from others."""
    count: int
    """Samples at that line."""
    samples: int
    """Samples in all."""

    @property
    def share(self) -> float:
        return self.count / self.samples


@dataclass(frozen=True)
class Lines:
    """Samples by (process, thread), in order of time."""

    times: Mapping[Thread, Times]
    names: Mapping[Thread, NDArray[np.int32]]
    text: Mapping[int, str]
    stand_ins: Mapping[int, Thread]
    """For each process, the thread that tells for those without samples, such as autograd's."""

    def teller(self, thread: Thread) -> Thread | None:
        """The thread whose samples say where the program was while a thread fed the GPU."""
        return thread if thread in self.times else self.stand_ins.get(thread[0])

    def place(self, within: Mapping[Thread, Intervals]) -> Place | None:
        """Where most samples are of those of some threads within some stretches of time."""
        parts = [self.names[t][i.contains(self.times[t])] for t, i in within.items()]
        if not any(len(part) for part in parts):
            return None
        names, counts = np.unique(np.concatenate(parts), return_counts=True)
        most = int(np.argmax(counts))
        return Place(self.text[int(names[most])], int(counts[most]), int(counts.sum()))


def read_lines(trace: Trace) -> Lines | None:
    """The samples of a trace; None where it has none."""
    if Kind.SAMPLE not in trace.kinds:
        return None
    samples = trace.events([Kind.SAMPLE], ("start", "end", "name", "process", "thread"))
    samples = samples.select(np.argsort(samples.start, kind="stable"))
    times, names = {}, {}
    for thread in _threads(samples.process, samples.thread):
        rows = (samples.process == thread[0]) & (samples.thread == thread[1])
        times[thread], names[thread] = samples.start[rows], samples.name[rows]
    text = _shortened(trace.names(distinct_ids(samples.name)))
    return Lines(times, names, text, _stand_ins(trace, list(times)))


def _threads(process: NDArray[np.int16], thread: NDArray[np.int32]) -> set[Thread]:
    return set(zip(process.tolist(), thread.tolist(), strict=True))


def _stand_ins(trace: Trace, sampled: Sequence[Thread]) -> dict[int, Thread]:
    """The sampled threads, but where it is another that steps and waits for data."""
    marks = trace.events([Kind.STEP, Kind.DATA_WAIT], ("process", "thread"))
    marking = _threads(marks.process, marks.thread)
    elsewhere = {process for process, _ in marking - set(sampled)}
    return {t[0]: t for t in sampled if t in marking or t[0] not in elsewhere}


def dominating(
    lines: Lines, calls: HostCalls, stretches: Sequence[tuple[Lane, Intervals]]
) -> Place | None:
    """Where the host was in parts of the gaps of some GPUs, each by its feeding thread."""
    within: dict[Thread, Intervals] = {}
    for lane, idle in stretches:
        gaps = lane.causes.ends
        feeders = np.full(len(idle), NOBODY)
        at = np.searchsorted(gaps, idle.end)
        feeders[at < len(gaps)] = lane.causes.feeder[at[at < len(gaps)]]
        for feeder in np.unique(feeders[feeders != NOBODY]).tolist():
            thread = lines.teller(calls.threads[feeder])
            if thread is not None:
                own = Intervals(idle.start[feeders == feeder], idle.end[feeders == feeder])
                within[thread] = _both(within.get(thread, EMPTY), own)
    return lines.place(within)


def _both(first: Intervals, second: Intervals) -> Intervals:
    starts, ends = (first.start, second.start), (first.end, second.end)
    return union(np.concatenate(starts), np.concatenate(ends))


def _shortened(names: Mapping[int, str]) -> dict[int, str]:
    """Names with as much of the end of each path as tells it from the others."""
    found = {id: match for id, name in names.items() if (match := _LINE.fullmatch(name))}
    short = _short_paths({match[1] for match in found.values()})
    return dict(names) | {id: f"{short[m[1]]}:{m[2]} {m[3]}" for id, m in found.items()}


def _short_paths(paths: set[str]) -> dict[str, str]:
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
    return short
