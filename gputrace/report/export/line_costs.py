"""Export of the samples of Python's lines, for speedscope.app and as a .cpuprofile.

A sample counts for the time to the next one of its thread; what is longer than two usual intervals
was not sampled, and counts for nothing. A stack is the line of the program and, where it was met
elsewhere, the innermost frame.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from gputrace.errors import UsageError
from gputrace.model.events import UNKNOWN, Kind, distinct_ids
from gputrace.report import unfinished_file
from gputrace.report.export import Job
from gputrace.version import __version__

_PLACE: Final = re.compile(r"(.*):(\d+) (\S+)")
_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_NOT_SAMPLED: Final = 2
"""Usual intervals between two samples, beyond which the thread was not sampled."""
_ROOT, _IDLE, _FIRST = 1, 2, 3
"""Ids of the nodes that hold all others, of the time without samples, and of the first line."""


class _Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """Frame as speedscope has it."""

    name: str
    file: str | None = None
    line: int | None = None


class _Thread(msgspec.Struct):
    """Samples of a thread: stacks of indices of frames, nanoseconds, the outermost frame first."""

    name: str
    start: int
    stacks: list[list[int]]
    weights: list[int]


def write_speedscope(job: Job) -> None:
    """Write a profile of each sampled thread; raise UsageError without samples.

    Format: the file format's schema of speedscope, version 1.
    """
    frames, threads = _read(job)
    profiles = [
        {
            "type": "sampled",
            "name": thread.name,
            "unit": "nanoseconds",
            "startValue": thread.start,
            "endValue": thread.start + sum(thread.weights),
            "samples": thread.stacks,
            "weights": thread.weights,
        }
        for thread in threads
    ]
    content = {"$schema": _SCHEMA, "name": job.trace.title, "exporter": f"gputrace {__version__}"}
    shared = {"frames": [msgspec.to_builtins(frame) for frame in frames]}
    _write(job.target, content | {"shared": shared, "profiles": profiles})


def write_cpuprofile(job: Job) -> None:
    """Write the samples of the most sampled thread; raise UsageError without samples.

    Format: ``Profiler.Profile`` of the Chrome DevTools Protocol, which VS Code opens.
    """
    frames, threads = _read(job)
    thread = threads[0]
    ids: dict[tuple[int, ...], int] = {}
    for stack in thread.stacks:
        for length in range(1, len(stack) + 1):
            ids.setdefault(tuple(stack[:length]), _FIRST + len(ids))
    samples = [ids[tuple(stack)] if stack else _IDLE for stack in thread.stacks]
    children: dict[int, list[int]] = {_ROOT: [_IDLE]}
    for path, id in ids.items():
        children.setdefault(ids.get(path[:-1], _ROOT), []).append(id)
    nodes = [_node(_ROOT, _Frame("(root)"), 0), _node(_IDLE, _Frame("(idle)"), 0)]
    nodes += [_node(id, frames[path[-1]], samples.count(id)) for path, id in ids.items()]
    for node in nodes:
        node["children"] = children.get(node["id"], [])
    # Each sample has the microseconds since the one before; the first, since the start.
    ends = np.cumsum([0, *thread.weights[:-1]]) // 1000
    profile = {
        "nodes": nodes,
        "startTime": thread.start // 1000,
        "endTime": (thread.start + sum(thread.weights)) // 1000,
        "samples": samples,
        "timeDeltas": np.diff(ends, prepend=0).tolist(),
    }
    _write(job.target, profile)


def _node(id: int, frame: _Frame, ticks: int) -> dict[str, Any]:
    line = frame.line or 0
    place = {"url": frame.file or "", "lineNumber": line - 1, "columnNumber": 0, "scriptId": "0"}
    at_line = [{"line": line, "ticks": ticks}] if line and ticks else []
    frame_of = {"functionName": frame.name, **place}
    return {"id": id, "callFrame": frame_of, "hitCount": ticks, "positionTicks": at_line}


def _write(target: Path, content: dict[str, Any]) -> None:
    with (
        unfinished_file(target) as path,
        path.open("w", encoding="utf-8", errors="replace") as file,
    ):
        json.dump(content, file, separators=(",", ":"))


def _read(job: Job) -> tuple[list[_Frame], list[_Thread]]:
    """Read the frames, and the samples of each thread, the most sampled one first."""
    trace = job.trace
    columns = ("start", "name", "process", "thread", "bytes", "correlation")
    samples = trace.events({Kind.SAMPLE} & trace.kinds, columns, job.window)
    if not len(samples):
        raise UsageError(
            f"{trace.title}: no lines of Python were sampled"
            f"{' in this part' if job.window else ''}; record with --python"
        )
    samples = samples.select(np.lexsort((samples.start, samples.thread, samples.process)))
    # Merged files have numbers of their own for names.
    inner = samples.correlation if len(trace.paths) == 1 else np.full(len(samples), UNKNOWN)
    texts = trace.names(distinct_ids(np.concatenate([samples.name, inner]).astype(np.int64)))
    numbers = {id: number for number, id in enumerate(texts)}
    frames = [
        _Frame(at[3], at[1], int(at[2])) if (at := _PLACE.fullmatch(text)) else _Frame(text)
        for text in texts.values()
    ]
    ends = np.flatnonzero(np.diff(samples.thread) | np.diff(samples.process)) + 1
    threads = []
    for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(samples)], strict=True):
        process = trace.processes[int(samples.process[first])]
        rank = f"rank {process.rank}, " if process.rank >= 0 else ""
        name = f"{rank}process {process.pid}, thread {samples.thread[first]}"
        outer, innermost = samples.name[first:end].tolist(), inner[first:end].tolist()
        stacks = (
            [numbers[id] for id in dict.fromkeys(pair) if id in numbers]
            for pair in zip(outer, innermost, strict=True)
        )
        start = samples.start[first:end]
        timed = list(_timed(stacks, start, samples.bytes[first:end]))
        began = int(start[0]) - trace.origin
        threads.append(_Thread(name, began, *map(list, zip(*timed, strict=True))))
    return frames, sorted(threads, key=lambda thread: -len(thread.stacks))


def _timed(stacks: Iterable[list[int]], start: Any, waited: Any) -> Iterator[tuple[list[int], int]]:
    """Yield stacks and nanoseconds, with an empty stack for the time without samples."""
    between = np.diff(start)
    usual = int(np.median(between)) if len(between) else 1
    for stack, until, stayed in zip(stacks, [*between.tolist(), usual], waited, strict=True):
        own = min(until, max(_NOT_SAMPLED * usual, int(stayed)))
        yield stack, own
        if until > own:
            yield [], until - own
