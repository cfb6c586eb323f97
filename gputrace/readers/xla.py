"""Traces of the profiler that TensorFlow and JAX share, from either of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import STOP, ErrorPolicy
from gputrace.model.events import UNKNOWN, Column, Events, Kind, Mask, Memory
from gputrace.model.trace import Device, NoGpu, Process, Session
from gputrace.readers.chrome_json import (
    ChromeEvent,
    Key,
    arguments,
    key,
    nanoseconds,
    read_events,
    read_names,
)
from gputrace.readers.in_memory import MemoryTrace, Names


@dataclass(frozen=True, slots=True)
class Line:
    """One stream of a GPU, or one host thread; all columns have the same length."""

    plane: str
    """Device: ``/device:GPU:0``, ``/host:CPU``."""
    name: str
    """``Stream #13(Compute)``, ``python``; other lines of a GPU repeat its streams."""
    id: int
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    """Nanoseconds."""
    text: NDArray[np.int32]
    """Name of each event, by number in `Recording.names`."""
    correlation: NDArray[np.int64]
    """Joins a call and the operation that it issued; or `UNKNOWN`."""
    details: NDArray[np.int32]
    """Details of a copy or memset, by number in `Recording.names`; or `UNKNOWN`."""
    step: NDArray[np.bool_]
    """True if marked as a step, by a step number."""


@dataclass(slots=True)
class Recording:
    """Content of a file."""

    lines: list[Line] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    cards: dict[int, str] = field(default_factory=dict)
    """Name of the card by CUDA ordinal, if known."""
    host: str = ""
    epoch_ns: int | None = None
    """Wall clock at 0 of the lines' clock."""
    warnings: list[str] = field(default_factory=list)


_GPU: Final = re.compile(r"/device:GPU:(\d{1,4})\b")
_STREAM: Final = re.compile(r"Stream #(\d{1,9})\b", re.IGNORECASE)
"""Lines of a GPU plane that hold what ran; the others (XLA Ops, Steps…) repeat it by name."""
_KINDS: Final = {
    "MemcpyH2D": Kind.COPY_H2D,
    "MemcpyD2H": Kind.COPY_D2H,
    "MemcpyD2D": Kind.COPY_D2D,
    "MemcpyP2P": Kind.COPY_PEER,
    "MemcpyOther": Kind.COPY_OTHER,
    "Memset": Kind.MEMSET,
}
_NOT_RUN: Final = {
    *("MemoryAlloc", "MemoryFree", "MemoryResidency", "UnifiedMemory", "Overhead"),
    *("HostRegister", "HostUnregister"),
}
"""Events on streams that occupy no GPU."""
_CUDA_CALL: Final = re.compile(r"cu(da)?[A-Z]")
_CALLS: Final = {
    **dict.fromkeys(_KINDS, "cuMemcpyAsync"),
    "Memset": "cuMemset",
    "MemoryAlloc": "cuMemAlloc",
    "MemoryFree": "cuMemFree",
    "HostRegister": "cuMemHostRegister",
    "HostUnregister": "cuMemHostUnregister",
}
"""The call behind an event on a host thread, which bears the name of what it issued."""
_DATA_WAIT: Final = re.compile(r"IteratorGetNext(AsOptional|Sync)?(Op::DoCompute|$)|^InfeedEnqueue")
"""A program's wait for its next batch: from tf.data, or into an infeed."""
_STEP_NUMBER: Final = re.compile(r" \d+$")
"""The trace viewer's names of steps have it, besides the argument."""
_USERS_THREAD: Final = re.compile(r"python|main", re.IGNORECASE)
_JAX: Final = re.compile(r"PjitFunction\(|PythonRefManager::")

_SIZE: Final = re.compile(r"(?:size|num_bytes):(\d{1,18})\b")
_DESTINATION: Final = re.compile(r"\bdest:(\d{1,4})\b")
_MEMORIES: Final = {
    side: re.compile(rf"\b{side}:({'|'.join(m.name.lower() for m in Memory)})\b")
    for side in ("kind_src", "kind_dst")
}

_EPOCH_NS: Final = 10**17
"""Times past this are of the wall clock, not since the start of the profile."""
_REMEDY: Final = (
    "profile the program on a machine with a GPU, or use `gputrace record -- python train.py` there"
)


class XlaTrace(MemoryTrace):
    """One profile of one process."""

    def __init__(self, path: Path, recording: Recording) -> None:
        texts = recording.names.texts
        lines = [
            line for line in recording.lines
            if not _GPU.match(line.plane) or _STREAM.match(line.name) is not None
        ]  # fmt: skip
        base = min((int(line.start.min()) for line in lines if len(line.start)), default=0)
        base = base if base > _EPOCH_NS else 0
        super().__init__(
            path,
            "jax" if any(map(_JAX.match, texts)) else "tensorflow",
            list(_Columns(recording.names, lines, base).parts()),
            texts,
            [Process(0, host_name=recording.host)],
            [Device(0, device, name=name) for device, name in recording.cards.items()],
            Session(base or recording.epoch_ns, hosts=frozenset({recording.host} - {""})),
            NoGpu("the profile holds the host's side alone", _REMEDY),
        )
        self.quality.warnings += recording.warnings


class _Columns:
    """Event columns of lines; ``base`` is the moment that becomes 0."""

    def __init__(self, names: Names, lines: Sequence[Line], base: int) -> None:
        self._names, self._lines, self._base = names, lines, base

    def parts(self) -> Iterator[Events]:
        hosts, streams = [], []
        for line in self._lines:
            gpu, stream = _GPU.match(line.plane), _STREAM.match(line.name)
            if gpu and stream:
                streams.append(self._operations(line, int(gpu[1]), int(stream[1])))
            else:
                hosts.append(line)
        yield from streams
        for line in hosts:
            yield from self._of_thread(line)
        yield from self._waits(hosts, streams)

    def _per_name(self, ids: NDArray[np.int32], meaning: Callable[[str], int]) -> NDArray[np.int64]:
        """Map each row's text to its meaning; `UNKNOWN` for rows without."""
        ids, index = np.unique(ids, return_inverse=True)
        texts = self._names.texts
        meanings = [meaning(texts[id]) if id >= 0 else UNKNOWN for id in ids.tolist()]
        return np.array(meanings, np.int64)[index]

    def _events(self, line: Line, rows: Mask, **columns: Column | int) -> Events:
        whole = {"start": line.start - self._base, "end": line.end - self._base} | columns
        size = len(line.start)
        return Events(
            {
                name: (column if isinstance(column, np.ndarray) else np.full(size, column))[rows]
                for name, column in whole.items()
            }
        )

    def _operations(self, line: Line, gpu: int, stream: int) -> Events:
        kind = self._per_name(line.text, _kind)
        details = line.details
        peer = kind == Kind.COPY_PEER
        destination = self._per_name(details, lambda text: _number(_DESTINATION, text))
        return self._events(
            line,
            kind != UNKNOWN,
            kind=kind,
            name=line.text,
            device=gpu,
            stream=stream,
            correlation=line.correlation,
            bytes=self._per_name(details, lambda text: _number(_SIZE, text)),
            source_memory=self._per_name(details, lambda text: _memory("kind_src", text)),
            destination_memory=self._per_name(details, lambda text: _memory("kind_dst", text)),
            source_device=np.where(peer, gpu, UNKNOWN),
            destination_device=np.where(peer, destination, UNKNOWN),
        )

    def _of_thread(self, line: Line) -> Iterator[Events]:
        """Yield CUDA calls, steps, and annotations of the user's own thread."""
        number = self._names.number
        names = self._per_name(line.text, lambda text: number(_call(text)))
        known = self._per_name(line.text, lambda text: bool(_CUDA_CALL.match(text))) == 1
        call = known | (line.correlation > 0)
        thread = _thread(line.id)
        yield self._events(
            line, call, kind=Kind.API, name=names, thread=thread, correlation=line.correlation
        )
        if line.step.any():
            steps = self._per_name(line.text, lambda text: number(_STEP_NUMBER.sub("", text)))
            yield self._events(line, line.step & ~call, kind=Kind.STEP, name=steps, thread=thread)
        if line.step.any() or _USERS_THREAD.match(line.name):
            # The Python tracer records every call: too many for ranges of the user.
            other = self._per_name(line.text, lambda text: not text.startswith("$")) == 1
            rows = other & ~line.step & ~call
            yield self._events(line, rows, kind=Kind.RANGE, name=line.text, thread=thread)

    def _waits(self, hosts: Sequence[Line], streams: Sequence[Events]) -> Iterator[Events]:
        """Yield waits for data, on each thread that they hold up.

        tf.data produces the next batch on threads of its own, for which the threads that feed the
        GPU or mark the steps wait. With several GPUs, it is unknown which one waits: then a wait
        holds up its own thread only.
        """
        gpus = {gpu for events in streams for gpu in np.unique(events.device).tolist()}
        issuing = [line for line in hosts if line.step.any() or (line.correlation > 0).any()]
        held_up = {_thread(line.id) for line in issuing} if len(gpus) < 2 else set()
        for line in hosts:
            waits = self._per_name(line.text, lambda text: bool(_DATA_WAIT.search(text))) == 1
            if waits.any():
                for thread in sorted({_thread(line.id), *held_up}):
                    yield self._events(
                        line, waits, kind=Kind.DATA_WAIT, name=line.text, thread=thread
                    )


def _kind(name: str) -> int:
    if name in _NOT_RUN:
        return UNKNOWN
    return _KINDS.get(name, Kind.GRAPH if name.startswith("CudaGraphExec:") else Kind.KERNEL)


def _call(name: str) -> str:
    """Return the CUDA call of an event that a correlation joins with an operation."""
    if _CUDA_CALL.match(name):
        return name
    return _CALLS.get(name, "cuGraphLaunch" if name.startswith("CudaGraph") else "cuLaunchKernel")


def _number(pattern: re.Pattern[str], details: str) -> int:
    match = pattern.search(details)
    return int(match[1]) if match else UNKNOWN


def _memory(side: str, details: str) -> int:
    match = _MEMORIES[side].search(details)
    return Memory[match[1].upper()] if match else Memory.UNKNOWN


def _thread(id: int) -> int:
    """Return a thread id of 32 bits, signed, as the profiler shows it in the names of threads."""
    return (id + (1 << 31)) % (1 << 32) - (1 << 31)


_MARKS: Final = re.compile(rb'"(/host:CPU|/device:[A-Z]+:\d+)')
"""Names of planes, which the first event of the file tells."""
_MOST_EVENTS: Final = 1_000_000
"""Number of events beyond which the profiler leaves out the shortest."""
_LEFT_OUT: Final = (
    "the file holds 1,000,000 events, the most that the profiler puts into it: short kernels may "
    "be missing; analyze the .xplane.pb beside it"
)


def is_trace_viewer(content: bytes) -> bool:
    """Return True if uncompressed content begins as a file of this profiler."""
    return content.lstrip().startswith(b"{") and _MARKS.search(content) is not None


def open_trace_viewer(path: Path, breaks: ErrorPolicy = STOP) -> XlaTrace:
    """Open a file of the trace viewer; raise InputError if it is cut short or broken."""
    events = read_events(path, breaks)
    processes, threads = read_names(events)
    recording = Recording()
    rows: dict[tuple[Key, Key], list[ChromeEvent]] = {}
    complete = [event for event in events if event.get("ph") == "X"]
    for event in complete:
        rows.setdefault((key(event, "pid"), key(event, "tid")), []).append(event)
    for (pid, tid), of_line in rows.items():
        plane, name = processes.get(pid, ""), threads.get((pid, tid), "")
        if plane.startswith(("/host:", "/device:GPU:")):
            id = tid if isinstance(tid, int) else 0
            recording.lines.append(_line(recording.names, plane, name, id, of_line))
    if len(complete) >= _MOST_EVENTS:
        recording.warnings.append(_LEFT_OUT)
    return XlaTrace(path, recording)


def _line(names: Names, plane: str, name: str, id: int, events: Sequence[ChromeEvent]) -> Line:
    timed = [
        (start, end, event)
        for event in events
        if (start := nanoseconds(event.get("ts"))) is not None
        and (end := nanoseconds(event.get("ts"), event.get("dur", 0))) is not None
    ]
    more = [arguments(event) for _, _, event in timed]
    return Line(
        plane=plane,
        name=name,
        id=id,
        start=np.array([start for start, _, _ in timed], np.int64),
        end=np.array([end for _, end, _ in timed], np.int64),
        text=np.array([names.number(str(event.get("name"))) for _, _, event in timed], np.int32),
        correlation=np.array([_integer(of.get("correlation_id")) for of in more], np.int64),
        details=np.array([_details(names, of) for of in more], np.int32),
        step=np.array(["step_num" in of for of in more], bool),
    )


def _integer(value: Any) -> int:
    """Return a number of the file, which has them as text."""
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else UNKNOWN


def _details(names: Names, more: Any) -> int:
    text = more.get("memcpy_details", more.get("Memset_details"))
    return UNKNOWN if text is None else names.number(str(text))
