"""Messages between the analysis and a worker, as MessagePack: plain data, no code."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputrace.cluster.packing import PackedEvents, unpack
from gputrace.errors import GputraceError, InputError, MissingError, UsageError
from gputrace.model.events import Events
from gputrace.model.nvml import Card, Link, Nvml, Samples
from gputrace.model.trace import Device, LeftOut, NoGpu, Process, Session, Window


class File(msgspec.Struct, frozen=True):
    """File of a run and how to open it; ``run`` distinguishes runs that share a cluster."""

    run: str
    path: str
    keep_going: bool = False
    windows: bool = False
    part: Window | None = None
    """Slice of a large file to read; None for all of it."""


class Order(msgspec.Struct, array_like=True, frozen=True):
    """Operation on the shard of a file."""

    work: str
    """Name of the operation, see `records.name_of`."""
    gpu: bytes
    given: list[bytes]
    """The GPU that it applies to, and its arguments, each encoded by `records.to_bytes`."""


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """Operations to run in order, and whether they change the shard."""

    changes: bool
    orders: list[Order]


class Work(msgspec.Struct, frozen=True):
    """Batches to run on the shard of a file."""

    batches: list[Batch]
    """The answer is the result of the last one; without any, the shard is released."""
    past: int
    """Number of earlier batches that changed the shard."""
    large: bool = False
    """Keep its columns on disk."""
    anew: bool = False
    """Start with a fresh shard."""


class Request(msgspec.Struct, frozen=True):
    """Query on a file: any combination of the following."""

    file: File
    about: bool = False
    kinds: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    window: Window | None = None
    with_names: bool = False
    """Send the rows' names along if they are few."""
    names: tuple[int, ...] = ()
    pattern: str = ""
    """Regular expression that filters ``names``; with ``flags`` of `re`."""
    flags: int = 0
    device: tuple[Process, int] | None = None
    """The process itself, since workers number processes in order of appearance."""
    nvml: bool = False
    work: Work | None = None


class About(msgspec.Struct, frozen=True):
    """Metadata of an opened file."""

    source: str
    origin: int
    session: Session
    kinds: tuple[int, ...]
    no_gpu: NoGpu | None
    held: bool
    cut_bytes: int


class Recorded(msgspec.Struct, frozen=True):
    """Windows in which a process, and its API calls if only sampled, were recorded."""

    windows: tuple[Window, ...]
    calls: tuple[Window, ...] | None


class Told(msgspec.Struct, frozen=True):
    """Problems that reading found while answering."""

    warnings: list[str] = []
    notes: list[str] = []
    left_out: list[LeftOut] = []
    dropped: list[tuple[str, str, int]] = []


class PackedSamples(msgspec.Struct, frozen=True):
    """NVML samples; each column as raw int64 or float64 bytes."""

    time: bytes
    host: bytes
    gpu: bytes
    values: dict[str, bytes]


class Problem(msgspec.Struct, frozen=True):
    """User-facing error."""

    kind: str
    path: str
    problem: str


class Reply(msgspec.Struct):
    """Answer to a `Request`: what was asked for, and the metadata that goes with it."""

    version: str
    worker: str = ""
    """Address of the answering worker."""
    again: bool = False
    """True if the file had to be opened for this request."""
    problem: Problem | None = None
    about: About | None = None
    events: PackedEvents | None = None
    processes: list[Process] = []
    recorded: list[Recorded] = []
    """Recorded windows of each of ``processes``."""
    devices: list[Device] = []
    names: dict[int, str] = {}
    cards: tuple[Card, ...] = ()
    links: tuple[Link, ...] = ()
    samples: PackedSamples | None = None
    told: Told = Told()
    found: bytes = b""
    """Encoded result of the requested `Work`."""
    lost: bool = False
    """True if the work was refused because the shard is not in the expected state."""


def problem_of(error: GputraceError) -> Problem:
    """Encode an error."""
    if isinstance(error, InputError):
        return Problem("input", str(error.path), error.problem)
    return Problem("usage" if isinstance(error, UsageError) else "", "", str(error))


def error_of(problem: Problem) -> GputraceError:
    """Decode an error."""
    if problem.kind == "input":
        return InputError(problem.path, problem.problem)
    return (UsageError if problem.kind == "usage" else GputraceError)(problem.problem)


def pack_samples(samples: Samples) -> PackedSamples:
    """Encode NVML samples."""
    values = {name: _bytes(column, np.float64) for name, column in samples.values.items()}
    time, host, gpu = (_bytes(ids, np.int64) for ids in (samples.time, samples.host, samples.gpu))
    return PackedSamples(time, host, gpu, values)


def nvml_of(reply: Reply) -> Nvml:
    """Decode the NVML data of a reply; raises MissingError like `read_reply`."""
    packed = reply.samples
    if packed is None:
        return Nvml()
    with understood():
        time, host, gpu = (
            np.frombuffer(raw, np.int64) for raw in (packed.time, packed.host, packed.gpu)
        )
        values = {name: np.frombuffer(raw, np.float64) for name, raw in packed.values.items()}
        if {len(column) for column in (time, host, gpu, *values.values())} != {len(time)}:
            raise ValueError("columns of several lengths")
    return Nvml(reply.cards, reply.links, Samples(time, host, gpu, values))


def events_of(packed: PackedEvents) -> Events:
    """Decode the rows of a reply; raises MissingError like `read_reply`."""
    with understood():
        return unpack(packed)


def read_reply(raw: bytes) -> Reply:
    """Decode a worker's answer; raises MissingError if no worker of this version sends such."""
    with understood():
        reply: Reply = msgspec.msgpack.decode(raw, type=Reply)
    return reply


@contextmanager
def understood() -> Iterator[None]:
    """Turn decoding errors into a MissingError that asks for one version on all machines."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise MissingError(
            f"an answer of a worker cannot be understood ({reason}): install one version of "
            "gputrace, and of what it needs, on all"
        ) from error


def _bytes(column: NDArray[Any], kind: type[np.generic]) -> bytes:
    return np.ascontiguousarray(column, kind).tobytes()


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
