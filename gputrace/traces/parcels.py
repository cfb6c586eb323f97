"""What a worker process sends of a file that it read: MessagePack, in which nothing can be run.

The worker has read a file of a stranger. Should that ever get the better of it, what it sends is
still columns and texts of known types to the process that asked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from gputrace.errors import GputraceError, InputError, MissingError, UsageError
from gputrace.traces.events import COLUMN_TYPES, Events
from gputrace.traces.kineto.large import LargeKineto
from gputrace.traces.memory import MemoryTrace
from gputrace.traces.quality import LeftOut, Quality
from gputrace.traces.trace import Device, NoGpu, Process, Session, Trace

_ERRORS: dict[str, type[GputraceError]] = {
    kind.__name__: kind for kind in (GputraceError, UsageError, MissingError)
}
_LENGTH = 8
"""Bytes that say how long a message is."""


class Order(msgspec.Struct, frozen=True):
    """A file to open."""

    path: bytes
    keep_going: bool
    windows: bool


class Large(msgspec.Struct, frozen=True):
    """What `LargeKineto` knows besides."""

    allowed: bool
    first: int


class Parcel(msgspec.Struct, frozen=True):
    """A trace whose columns are in memory."""

    path: bytes
    source: str
    origin: int
    parts: list[dict[str, bytes]]
    names: list[str]
    processes: list[Process]
    devices: list[Device]
    session: Session
    no_gpu: NoGpu | None
    warnings: list[str]
    notes: list[str]
    left_out: list[LeftOut]
    dropped: list[tuple[str, str, int]]
    large: Large | None = None


class Answer(msgspec.Struct, frozen=True):
    """The trace, or why there is none; neither of what cannot travel."""

    parcel: Parcel | None = None
    kind: str = ""
    path: bytes = b""
    problem: str = ""
    bug: str = ""
    """The traceback of an error that is nobody's but ours."""


def ask(file: Path, keep_going: bool, windows: bool, pipe: IO[bytes]) -> None:
    """Sends an order."""
    send(msgspec.msgpack.encode(Order(os.fsencode(file), keep_going, windows)), pipe)


def pack(found: Trace | GputraceError) -> bytes:
    """What was found of a file, as it travels."""
    try:
        return msgspec.msgpack.encode(_answer(found))
    except (TypeError, UnicodeEncodeError, OverflowError):
        return msgspec.msgpack.encode(Answer())


def unpack(raw: bytes) -> Trace | GputraceError | None:
    """What `pack` made; None where the file must be read here. Raises ValueError for no such."""
    answer = msgspec.msgpack.decode(raw, type=Answer)
    if answer.bug:
        raise RuntimeError(f"in the process that read it:\n{answer.bug}")
    if answer.kind == InputError.__name__:
        return InputError(Path(os.fsdecode(answer.path)), answer.problem)
    if answer.kind:
        return _ERRORS.get(answer.kind, GputraceError)(answer.problem)
    return None if answer.parcel is None else _trace(answer.parcel)


def _answer(found: Trace | GputraceError) -> Answer:
    if isinstance(found, InputError):
        return Answer(kind="InputError", path=os.fsencode(found.path), problem=found.problem)
    if isinstance(found, GputraceError):
        return Answer(kind=type(found).__name__, problem=str(found))
    if isinstance(found, LargeKineto):
        parcel = _parcel(found.look, found.quality)
        large = Large(found.allowed, found.first)
        return Answer(msgspec.structs.replace(parcel, large=large, no_gpu=found.no_gpu))
    return Answer(_parcel(found, found.quality) if isinstance(found, MemoryTrace) else None)


def _parcel(trace: MemoryTrace, quality: Quality) -> Parcel:
    held = trace.held_columns()
    return Parcel(
        path=os.fsencode(trace.path),
        source=trace.source,
        origin=trace.origin,
        parts=[_columns(part) for part in held.parts],
        names=list(held.names),
        processes=trace.processes,
        devices=list(held.devices),
        session=trace.session,
        no_gpu=trace.no_gpu,
        warnings=quality.warnings,
        notes=quality.notes,
        left_out=quality.left_out,
        dropped=[(reason, where, rows) for (reason, where), rows in quality.places.items()],
    )


def _columns(part: Events) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(getattr(part, name)).tobytes() for name in part.columns}


def _events(columns: dict[str, bytes]) -> Events:
    return Events(
        {name: np.frombuffer(raw, COLUMN_TYPES[name]).copy() for name, raw in columns.items()}
    )


def _trace(parcel: Parcel) -> Trace:
    trace = MemoryTrace(
        Path(os.fsdecode(parcel.path)),
        parcel.source,
        [_events(columns) for columns in parcel.parts],
        parcel.names,
        parcel.processes,
        parcel.devices,
        parcel.session,
        parcel.no_gpu or NoGpu("", ""),
    )
    trace.origin, trace.no_gpu = parcel.origin, parcel.no_gpu
    trace.quality = _quality(parcel)
    if parcel.large is None:
        return trace
    return LargeKineto.of(trace, parcel.large.allowed, parcel.large.first)


def _quality(parcel: Parcel) -> Quality:
    quality = Quality(parcel.warnings, parcel.notes, parcel.left_out)
    for reason, where, rows in parcel.dropped:
        quality.drop(reason, rows, where)
    return quality


def send(message: bytes, pipe: IO[bytes]) -> None:
    """Writes a message of any length."""
    pipe.write(len(message).to_bytes(_LENGTH, "little"))
    pipe.write(message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """The next message; raises EOFError where there is none, or not all of it."""
    return _exactly(pipe, int.from_bytes(_exactly(pipe, _LENGTH), "little"))


def _exactly(pipe: IO[Any], length: int) -> bytes:
    read: bytes = pipe.read(length)
    if len(read) < length:
        raise EOFError
    return read
