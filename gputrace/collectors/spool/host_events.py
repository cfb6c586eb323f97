"""Host files: data waits, steps, annotations and other events recorded by a process's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.spool import (
    Format,
    Loss,
    read_all,
    read_chunk_file,
    read_numbered,
    read_stop,
)
from gputrace.errors import InputError
from gputrace.model.host import BACKWARD

Records = NDArray[np.void]

CLOCKS: Final = np.dtype([("realtime", "<u8"), ("monotonic", "<u8"), ("raw", "<u8")])
"""Records of CLOK in both kinds of files: readings of three clocks at one moment, nanoseconds."""


def read_records(body: memoryview, kind: np.dtype[Any]) -> Records:
    """Return the complete records of a chunk."""
    return np.frombuffer(body[: len(body) - len(body) % kind.itemsize], kind)


HOST: Final = Format(b"GPUTRHST", 1, "a host file", "a file of gputrace's hooks")
_KINDS: Final = (
    *("data_wait", "step", "annotation", "note", "sample", "gc", "phase", "loader"),
    *("counter", "compilation", "module", "source"),
)
KINDS: Final = {name: number for number, name in enumerate(_KINDS, 1)}
"""Number of each kind of event in its records."""

_UNSEEN: Final = 2

EVENT: Final = np.dtype(
    [
        *(("start", "<u8"), ("end", "<u8"), ("thread", "<u4"), ("name", "<u4")),
        *(("kind", "<u2"), ("rank", "<u2"), ("number", "<u4")),
    ]
)


@dataclass(slots=True)
class HostEvents:
    """Recorded host events of one process.

    Attributes:
        pid: its process id.
        host: the machine.
        started: nanoseconds of CLOCK_REALTIME when the process began or was forked; ``began`` is
            the same moment on CLOCK_MONOTONIC, 0 if unknown.
        records: events by kind (``KINDS``) in the order of their ends, with the fields start, end
            (nanoseconds of CLOCK_REALTIME), thread (system id), name (see ``names``), kind, rank
            and number. Data waits: without nested ones; number is 1 if the wait ended with an
            exception, mostly StopIteration; none if those of the steps were not seen, which a
            record with 2 says. Steps: those of the best source (the user's marks, else a
            framework's loop, else an optimizer), numbered from 0; each starts at the end of the one
            before, the first with its first data wait or at ``started``; it is left out if that is
            later than its end. Samples: at start; name is the user's line, number the name of the
            innermost line. Garbage collections (``gc``): by generation. Compilations: of what, and
            why again. Phases: parts of a step, which may be nested. Counters: see ``counts``.
            Modules: stretches of a thread in one and none of its parts; rank is 1 in a backward
            pass. Sources: of what, `AT`, and a line.
        events: all events, in the order written.
        names: text by id.
        info: key-value pairs that the process wrote.
        clocks: readings of three clocks at one moment each: realtime, monotonic, raw.
        after: number of ``clocks`` before each of ``events`` in the file.
        stopped: end of writing, if it failed before the process ended.
        whole: True if the file ends with a complete chunk.
    """

    pid: int
    host: str
    started: int
    records: dict[str, Records] = field(default_factory=dict)
    events: Records = field(default_factory=lambda: np.empty(0, EVENT))
    names: dict[int, str] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    clocks: Records = field(default_factory=lambda: np.empty(0, CLOCKS))
    after: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    began: int = 0
    stopped: Loss | None = None
    whole: bool = True


def read_host_file(path: Path) -> HostEvents:
    """Read a file without sorting its events by kind, since other files may precede it."""
    file = read_chunk_file(path, HOST)
    host = HostEvents(file.pid, file.host, file.started, began=file.began)
    events, clocks, after, looks = [host.events], [host.clocks], [0], 0
    for tag, body, whole in file.chunks():
        host.whole = whole
        if tag == b"EVNT":
            events.append(read_records(body, EVENT))
            after.append(looks)
        elif tag == b"CLOK":
            clocks.append(read_records(body, CLOCKS))
            looks += len(clocks[-1])
        elif whole:
            take_text(host, tag, bytes(body))
    host.host = host.info.get("host", host.host)
    host.events, host.clocks = np.concatenate(events), np.concatenate(clocks)
    host.after = np.repeat(after, [len(part) for part in events])
    return host


def join_hosts(parts: Sequence[HostEvents]) -> HostEvents:
    """Join the files of one process, in their order; names keep their numbers from file to file."""
    host = parts[0]
    for part in parts[1:]:
        host.names |= part.names
        host.info |= part.info
        host.whole, host.stopped = part.whole, host.stopped or part.stopped
    looks = np.cumsum([0, *(len(part.clocks) for part in parts)]).tolist()
    events = np.concatenate([part.events for part in parts])
    after = np.concatenate([part.after + n for part, n in zip(parts, looks, strict=False)])
    # Each file repeats notes, and that waits were not seen.
    known = np.flatnonzero((events["kind"] == KINDS["note"]) | _is_unseen(events))
    _, first_of_each = np.unique(events[known], return_index=True)
    repeated = np.delete(known, first_of_each)
    host.events, host.after = np.delete(events, repeated), np.delete(after, repeated)
    host.clocks = np.concatenate([part.clocks for part in parts])
    host.records = by_kind(host.events, host.started)
    return host


def read_hosts(folder: Path, problems: list[InputError]) -> list[HostEvents]:
    """Read the host files of a folder; append errors of unreadable ones to ``problems``."""
    return read_all(folder, "*.host", read_host_file, join_hosts, problems)


def take_text(host: HostEvents, tag: bytes, body: bytes) -> None:
    """Parse a chunk without records."""
    if tag == b"NAME" and (named := read_numbered(body)):
        host.names[named[0]] = named[1].decode("utf-8", "replace")
    elif tag == b"INFO":
        key, _, value = body.decode("utf-8", "replace").partition("=")
        host.info[key] = value
    elif tag == b"FULL":
        host.stopped = read_stop(body)


def by_kind(events: Records, since: int) -> dict[str, Records]:
    """Group events as in `HostEvents.records`; ``since`` is when the process began."""
    events = events[np.argsort(events["end"], kind="stable")]
    kinds = {name: events[events["kind"] == number] for name, number in KINDS.items()}
    waits, steps = kinds["data_wait"], kinds["step"]
    # If those of the steps were not seen, the rest must not pass for all.
    kinds["data_wait"] = waits = waits[:0] if _is_unseen(waits).any() else _outermost(waits)
    if len(steps):
        steps = steps[steps["rank"] == steps["rank"].max()]
        first = steps[0]
        if not first["start"]:
            before = waits[(waits["thread"] == first["thread"]) & (waits["end"] <= first["end"])]
            first["start"] = before["start"].min() if len(before) else since
        kinds["step"] = steps[1:] if first["start"] > first["end"] else steps
    return kinds


def take_backward_passes(hosts: Sequence[HostEvents]) -> None:
    """Take backward passes for the ends of steps, if no process has marked any.

    A program that updates its parameters by itself calls no optimizer.
    """
    if any(len(host.records["step"]) for host in hosts):
        return
    for host in hosts:
        passes = host.records["phase"]
        ids = [id for id, name in host.names.items() if name == BACKWARD]
        steps = _outermost(passes[np.isin(passes["name"], ids)])
        steps["start"], steps["number"] = 0, np.arange(len(steps))
        steps["start"][1:] = steps["end"][:-1]
        steps["kind"], steps["rank"] = KINDS["step"], 1
        events = np.concatenate([steps, host.records["data_wait"]])
        host.records["step"] = by_kind(events, host.started)["step"]


def counts(counters: Records) -> NDArray[np.int64]:
    """Return the values of counters: 48 bits, in the place of a rank and a number."""
    values: NDArray[np.int64] = counters["rank"].astype(np.int64) << 32 | counters["number"]
    return values


def _is_unseen(events: Records) -> NDArray[np.bool_]:
    unseen: NDArray[np.bool_] = events["number"] == _UNSEEN
    unseen &= events["kind"] == KINDS["data_wait"]
    return unseen


def _outermost(waits: Records) -> Records:
    """Drop waits nested in another one of the same thread, as of an iterator that uses another."""
    kept = np.ones(len(waits), dtype=bool)
    for thread in np.unique(waits["thread"]):
        # Later ends last: of two, the outer one comes after the inner one.
        here = np.flatnonzero(waits["thread"] == thread)
        first_start_after = np.minimum.accumulate(waits["start"][here][::-1])[::-1]
        kept[here[:-1]] = waits["start"][here[:-1]] < first_start_after[1:]
    return waits[kept]
