"""What travels between the analysis and a worker, as MessagePack: nothing in it is run."""

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
from gputrace.traces.events import Events
from gputrace.traces.nvml.model import Card, Link, Nvml, Samples
from gputrace.traces.quality import LeftOut
from gputrace.traces.trace import Device, NoGpu, Process, Session, Window


class File(msgspec.Struct, frozen=True):
    """One file of a run, as it is to be opened; ``run`` tells runs of one cluster apart."""

    run: str
    path: str
    keep_going: bool = False
    windows: bool = False
    part: Window | None = None
    """Of a large file, what is cut out of it and read."""


class Order(msgspec.Struct, array_like=True, frozen=True):
    """One thing to be done with the shard of a file."""

    work: str
    """Of `records.name_of`."""
    gpu: bytes
    given: list[bytes]
    """The GPU that it is of, and arguments; each as `records.to_bytes` makes it."""


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """Things to be done one after the other, and whether they change the shard."""

    changes: bool
    orders: list[Order]


class Work(msgspec.Struct, frozen=True):
    """What is to be done with the shard of a file."""

    batches: list[Batch]
    """The answer is what the last one finds; without any, the shard is given back."""
    past: int
    """How many batches have changed the shard before."""
    large: bool = False
    """Whether its columns are to be on disk."""
    anew: bool = False
    """Whether it starts from nothing."""


class Request(msgspec.Struct, frozen=True):
    """What is asked of a file: any of these."""

    file: File
    about: bool = False
    kinds: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    window: Window | None = None
    with_names: bool = False
    """Whether the rows' names are to come with them, where they are few."""
    names: tuple[int, ...] = ()
    pattern: str = ""
    """Of the names, only those in which this is found; with ``flags`` of `re`."""
    flags: int = 0
    device: tuple[Process, int] | None = None
    """The process itself: workers number them as they meet them."""
    nvml: bool = False
    work: Work | None = None


class About(msgspec.Struct, frozen=True):
    """What is known of a file once it is open."""

    source: str
    origin: int
    session: Session
    kinds: tuple[int, ...]
    no_gpu: NoGpu | None
    held: bool
    cut_bytes: int


class Recorded(msgspec.Struct, frozen=True):
    """When a process was recorded, and when its calls were where that was not all the time."""

    windows: tuple[Window, ...]
    calls: tuple[Window, ...] | None


class Told(msgspec.Struct, frozen=True):
    """What reading found wrong while it answered."""

    warnings: list[str] = []
    notes: list[str] = []
    left_out: list[LeftOut] = []
    dropped: list[tuple[str, str, int]] = []


class PackedSamples(msgspec.Struct, frozen=True):
    """The samples of NVML; integers and floats as their bytes."""

    time: bytes
    host: bytes
    gpu: bytes
    values: dict[str, bytes]


class Problem(msgspec.Struct, frozen=True):
    """An error that a person may see."""

    kind: str
    path: str
    problem: str


class Reply(msgspec.Struct):
    """The answer to a `Request`: what was asked, and what there is to know with it."""

    version: str
    worker: str = ""
    """The address of who answers."""
    again: bool = False
    """Whether the file had to be opened for this answer."""
    problem: Problem | None = None
    about: About | None = None
    events: PackedEvents | None = None
    processes: list[Process] = []
    recorded: list[Recorded] = []
    """Of each of these."""
    devices: list[Device] = []
    names: dict[int, str] = {}
    cards: tuple[Card, ...] = ()
    links: tuple[Link, ...] = ()
    samples: PackedSamples | None = None
    told: Told = Told()
    found: bytes = b""
    """By the `Work` that was asked for."""
    lost: bool = False
    """Whether that could not be done, since the shard is not as it is thought to be."""


def problem_of(error: GputraceError) -> Problem:
    """An error as it travels."""
    if isinstance(error, InputError):
        return Problem("input", str(error.path), error.problem)
    return Problem("usage" if isinstance(error, UsageError) else "", "", str(error))


def error_of(problem: Problem) -> GputraceError:
    """The error that it was."""
    if problem.kind == "input":
        return InputError(problem.path, problem.problem)
    return (UsageError if problem.kind == "usage" else GputraceError)(problem.problem)


def pack_samples(samples: Samples) -> PackedSamples:
    """Samples as they travel."""
    values = {name: _bytes(column, np.float64) for name, column in samples.values.items()}
    time, host, gpu = (_bytes(own, np.int64) for own in (samples.time, samples.host, samples.gpu))
    return PackedSamples(time, host, gpu, values)


def nvml_of(reply: Reply) -> Nvml:
    """What NVML said, of a reply that was asked for it; raises MissingError as `read_reply`."""
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
    """The rows of a reply; raises MissingError as `read_reply`."""
    with understood():
        return unpack(packed)


def read_reply(raw: bytes) -> Reply:
    """The answer of a worker; raises MissingError for what no worker of this version sends."""
    with understood():
        reply: Reply = msgspec.msgpack.decode(raw, type=Reply)
    return reply


@contextmanager
def understood() -> Iterator[None]:
    """Raises MissingError, as `read_reply`, for what nobody of this version sends."""
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
