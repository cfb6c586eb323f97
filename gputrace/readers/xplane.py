"""Traces of the profiler that TensorFlow and JAX share, from either of its files: ``.xplane.pb``,
an XSpace message (tsl/profiler/protobuf/xplane.proto) decoded without protobuf's library, and
``.trace.json``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.model.events import UNKNOWN, Column, Events, Kind, Mask, Memory
from gputrace.model.struct import Struct
from gputrace.model.trace import Device, NoGpu, Process, Session
from gputrace.readers import chrome_json as chrome
from gputrace.readers.compressed import read_content
from gputrace.readers.in_memory import MemoryTrace, Names
from gputrace.readers.protobuf import BYTES, VARINT, Field, Positions, Wire, WireError

_START: Final = re.compile(
    rb"\x0a[\x80-\xff]{0,9}[\x00-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12"
)
"""An XSpace whose first field is a plane, of which the first is a name, or an id and a name."""
_NAME: Final = re.compile(rb"(/host:|/device:|/virtualdevice:|Task Env|Host CPUs|Syscalls|#Chip)")
MOST_BYTES: Final = 1 << 31
"""Protobuf writes no larger message."""
_AT_ONCE: Final = 1 << 18
"""Events that are decoded together: bounds the memory for their stats."""

_WANTED: Final = {"correlation_id", "step_num", "memcpy_details", "Memset_details"}
_STAT_NUMBERS: Final = (3, 4)
_STAT_TEXT, _STAT_BYTES, _STAT_REFERENCE = 5, 6, 7


def is_xspace(content: bytes) -> bool:
    """Return True if uncompressed content begins as an XSpace."""
    start = _START.match(content)
    return start is not None and _NAME.match(content, start.end() + 1) is not None


def open_xspace(path: Path, breaks: ErrorPolicy = STOP) -> XlaTrace:
    """Open an XSpace file; if breaks are allowed, without incomplete planes."""
    wire = Wire(read_content(path, MOST_BYTES, breaks))
    return XlaTrace(path, _Reader(path, wire, breaks).read())


class _Plane(Struct, frozen=True):
    name: str
    events: Mapping[int, str]
    """Names by id."""
    stats: Mapping[int, str]


class _Reader:
    def __init__(self, path: Path, wire: Wire, breaks: ErrorPolicy) -> None:
        self._path, self._wire, self._breaks = path, wire, breaks
        self._recording = Recording(Names())

    @contextmanager
    def _attributed(self) -> Iterator[None]:
        """Treat an error in the protobuf as one in the file."""
        try:
            yield
        except WireError as error:
            problem = f"broken XSpace protobuf ({error}); copy it or record it again"
            self._breaks.meet(InputError(self._path, problem))

    def read(self) -> Recording:
        top: list[Field] = []
        with self._attributed():
            top.extend(self._wire.fields(0, self._wire.size))
        fields = _by_key(top)
        texts = [of for of in top if of[:2] in ((2, BYTES), (3, BYTES))]
        self._recording.warnings = list(map(self._text, texts))
        self._recording.host = next(map(self._text, fields.get((4, BYTES), [])), "")
        for plane in fields.get((1, BYTES), []):
            with self._attributed():
                self._read_plane(self._message(plane))
        return self._recording

    def _message(self, of: Field) -> dict[tuple[int, int], list[Field]]:
        return _by_key(self._wire.fields(of.value, of.end))

    def _text(self, of: Field) -> str:
        return self._wire.text(of.value, of.end)

    def _name(self, fields: Mapping[tuple[int, int], list[Field]], number: int) -> str:
        values = fields.get((number, BYTES))
        return self._text(values[-1]) if values else ""

    def _read_plane(self, fields: Mapping[tuple[int, int], list[Field]]) -> None:
        name = self._name(fields, 2)
        plane = _Plane(
            name, self._map(fields.get((4, BYTES), [])), self._map(fields.get((5, BYTES), []))
        )
        stats = dict(self._stats(plane, fields.get((6, BYTES), [])))
        if gpu := re.match(r"/device:GPU:(\d{1,4})\b", name):
            self._recording.cards[int(gpu[1])] = str(stats.get("gpu_device_name", ""))
        if isinstance(began := stats.get("profile_start_time"), int):
            self._recording.epoch_ns = began
        if gpu or name.startswith("/host:"):
            for line in fields.get((3, BYTES), []):
                self._read_line(plane, line)

    def _map(self, entries: list[Field]) -> dict[int, str]:
        """Return the names in a map of ids to metadata."""
        names = {}
        for entry in entries:
            fields = self._message(entry)
            for metadata in fields.get((2, BYTES), [])[-1:]:
                key = fields.get((1, VARINT))
                names[key[-1].value if key else 0] = self._name(self._message(metadata), 2)
        return names

    def _stats(self, plane: _Plane, stats: list[Field]) -> Iterator[tuple[str, str | int]]:
        for stat in stats:
            fields = list(self._wire.fields(stat.value, stat.end))
            id = next((of.value for of in fields if of[:2] == (1, VARINT)), 0)
            for of in fields:
                if of.number in _STAT_NUMBERS and of.wire == VARINT:
                    yield plane.stats.get(id, ""), of.value
                elif of[:2] == (_STAT_TEXT, BYTES):
                    yield plane.stats.get(id, ""), self._text(of)
                elif of[:2] == (_STAT_REFERENCE, VARINT):
                    yield plane.stats.get(id, ""), plane.stats.get(of.value, "")

    def _read_line(self, plane: _Plane, line: Field) -> None:
        starts, ends, others = self._wire.messages(line.value, line.end, 4)
        fields = _by_key(others)
        numbers = {
            number: (fields[number, VARINT][-1].value ^ 1 << 63) - (1 << 63)
            for number in (1, 3)
            if (number, VARINT) in fields
        }
        name = self._name(fields, 11) or self._name(fields, 2)
        for first in range(0, len(starts), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            began, id = numbers.get(3, 0), numbers.get(1, 0)
            events = self._events(plane, name, id, began, starts[part], ends[part])
            self._recording.lines.append(events)

    def _events(
        self, plane: _Plane, name: str, id: int, began: int, starts: Positions, ends: Positions
    ) -> Line:
        """Decode events of a line together."""
        columns = {number: np.zeros(len(starts), np.int64) for number in (1, 2, 3)}
        stats: list[tuple[Positions, Positions, Positions]] = []
        """Rows of events, and starts and ends of stats of them."""
        for fields in self._wire.fields_of_all(starts, ends):
            for number, column in columns.items():
                of = (fields.number == number) & (fields.wire == VARINT)
                column[fields.row[of]] = fields.value[of].view(np.int64)
            of = (fields.number == 4) & (fields.wire == BYTES)
            if of.any():
                start = fields.value[of].astype(np.int64)
                stats.append((fields.row[of], start, fields.end[of]))
        kinds, offset, duration = columns.values()
        ids, row = np.unique(kinds, return_inverse=True)
        texts = [plane.events.get(id, f"<event {id}>") for id in ids.tolist()]
        numbers = list(map(self._recording.names.number, texts))
        line = Line(
            plane=plane.name,
            name=name,
            id=id,
            start=began + offset // 1000,
            end=began + (offset + duration) // 1000,
            text=np.array(numbers, np.int32)[row],
            correlation=np.full(len(kinds), UNKNOWN, np.int64),
            details=np.full(len(kinds), UNKNOWN, np.int32),
            step=np.zeros(len(kinds), bool),
        )
        for rows in stats:
            self._add_stats(plane, line, *rows)
        return line

    def _add_stats(
        self, plane: _Plane, line: Line, event: Positions, start: Positions, end: Positions
    ) -> None:
        ids, values = np.zeros(len(event), np.int64), np.zeros(len(event), np.int64)
        numbers, ends = np.zeros(len(event), np.int64), np.zeros(len(event), np.int64)
        for fields in self._wire.fields_of_all(start, end):
            is_id = (fields.number == 1) & (fields.wire == VARINT)
            ids[fields.row[is_id]] = fields.value[is_id].view(np.int64)
            row, value = fields.row[~is_id], fields.value[~is_id].view(np.int64)
            numbers[row], values[row], ends[row] = fields.number[~is_id], value, fields.end[~is_id]
        for id, name in plane.stats.items():
            if name not in _WANTED:
                continue
            of = np.flatnonzero(ids == id)
            if name == "step_num":
                line.step[event[of]] = True
            elif name == "correlation_id":
                of = of[np.isin(numbers[of], _STAT_NUMBERS)]
                line.correlation[event[of]] = values[of]
            else:
                texts = zip(numbers[of], values[of], ends[of], strict=True)
                line.details[event[of]] = [self._detail(plane, *map(int, text)) for text in texts]

    def _detail(self, plane: _Plane, number: int, value: int, end: int) -> int:
        if number == _STAT_REFERENCE:
            return self._recording.names.number(plane.stats.get(value, ""))
        if number in (_STAT_TEXT, _STAT_BYTES):
            return self._recording.names.number(self._wire.text(value, end))
        return UNKNOWN


def _by_key(fields: Iterator[Field] | list[Field]) -> dict[tuple[int, int], list[Field]]:
    """Group fields by number and wire type."""
    groups: dict[tuple[int, int], list[Field]] = {}
    for of in fields:
        groups.setdefault((of.number, of.wire), []).append(of)
    return groups


class Line(Struct, frozen=True):
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


class Recording(msgspec.Struct):
    """Content of a file."""

    names: Names
    lines: list[Line] = []
    cards: dict[int, str] = {}
    """Name of the card by CUDA ordinal, if known."""
    host: str = ""
    epoch_ns: int | None = None
    """Wall clock at 0 of the lines' clock."""
    warnings: list[str] = []


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
            NoGpu("the profile holds only the host's side", _REMEDY),
        )
        self.quality.warnings += recording.warnings


class _Columns(Struct, frozen=True):
    """Event columns of lines."""

    names: Names
    lines: Sequence[Line]
    base: int
    """The moment that becomes 0."""

    def parts(self) -> Iterator[Events]:
        hosts, streams = [], []
        for line in self.lines:
            gpu, stream = _GPU.match(line.plane), _STREAM.match(line.name)
            if gpu and stream:
                streams.append(self._operations(line, int(gpu[1]), int(stream[1])))
            else:
                hosts.append(line)
        yield from streams
        for line in hosts:
            yield from self._of_thread(line)
        # Waits for data, on each thread that they hold up. tf.data produces the next batch on
        # threads of its own, for which the threads that feed the GPU or mark the steps wait. With
        # several GPUs, it is unknown which one waits: then a wait holds up its own thread only.
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

    def _per_name(self, ids: NDArray[np.int32], meaning: Callable[[str], int]) -> NDArray[np.int64]:
        """Map each row's text to its meaning; `UNKNOWN` for rows without."""
        ids, index = np.unique(ids, return_inverse=True)
        texts = self.names.texts
        meanings = [meaning(texts[id]) if id >= 0 else UNKNOWN for id in ids.tolist()]
        return np.array(meanings, np.int64)[index]

    def _events(self, line: Line, rows: Mask, **columns: Column | int) -> Events:
        whole = {"start": line.start - self.base, "end": line.end - self.base} | columns
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
        number = self.names.number
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


_MARKS: Final = re.compile(rb'"(/host:CPU|/device:[A-Z]+:\d+)(?![^"]* (Compute|Tensors)")')
"""Names of planes, which the first event of the file tells; RunMetadata's add what they hold."""
_MOST_EVENTS: Final = 1_000_000
"""Number of events beyond which the profiler leaves out the shortest."""
_LEFT_OUT: Final = (
    "the file holds 1,000,000 events, the most that the profiler puts into it: short kernels may "
    "be missing; analyze the .xplane.pb next to it"
)


def is_trace_viewer(content: bytes) -> bool:
    """Return True if uncompressed content begins as a file of this profiler."""
    return content.lstrip().startswith(b"{") and _MARKS.search(content) is not None


def open_trace_viewer(path: Path, breaks: ErrorPolicy = STOP) -> XlaTrace:
    """Open a file of the trace viewer; raise InputError if it is cut short or broken."""
    events, skipped = chrome.read_events(path, breaks)
    processes, threads = chrome.read_names(events)
    recording = Recording(Names())
    rows: dict[tuple[chrome.Key, chrome.Key], list[chrome.ChromeEvent]] = {}
    complete = [event for event in events if event.get("ph") == "X"]
    for event in complete:
        rows.setdefault((chrome.key(event, "pid"), chrome.key(event, "tid")), []).append(event)
    for (pid, tid), of_line in rows.items():
        plane, name = processes.get(pid, ""), threads.get((pid, tid), "")
        if plane.startswith(("/host:", "/device:GPU:")):
            id = tid if isinstance(tid, int) else 0
            recording.lines.append(_line(recording.names, plane, name, id, of_line))
    if len(complete) >= _MOST_EVENTS:
        recording.warnings.append(_LEFT_OUT)
    trace = XlaTrace(path, recording)
    trace.quality.drop(chrome.NOT_JSON, skipped)
    return trace


def _line(
    names: Names, plane: str, name: str, id: int, events: Sequence[chrome.ChromeEvent]
) -> Line:
    timed = [
        (start, end, event)
        for event in events
        if (start := chrome.nanoseconds(event.get("ts"))) is not None
        and (end := chrome.nanoseconds(event.get("ts"), event.get("dur", 0))) is not None
    ]
    texts = [names.number(str(event.get("name"))) for _, _, event in timed]
    more = [chrome.arguments(event) for _, _, event in timed]
    correlations, details = [], []
    for of in more:
        number = str(of.get("correlation_id"))  # Numbers are texts in this file.
        is_number = re.fullmatch(r"\d{1,18}", number, re.ASCII)
        correlations.append(int(number) if is_number else UNKNOWN)
        detail = of.get("memcpy_details", of.get("Memset_details"))
        details.append(UNKNOWN if detail is None else names.number(str(detail)))
    return Line(
        plane=plane,
        name=name,
        id=id,
        start=np.array([start for start, _, _ in timed], np.int64),
        end=np.array([end for _, end, _ in timed], np.int64),
        text=np.array(texts, np.int32),
        correlation=np.array(correlations, np.int64),
        details=np.array(details, np.int32),
        step=np.array(["step_num" in of for of in more], bool),
    )
