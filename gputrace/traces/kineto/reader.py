"""Opens a trace of PyTorch's profiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gputrace.errors import InputError
from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.events import GPU_KINDS, UNKNOWN, Events, Kind
from gputrace.traces.memory import MemoryTrace
from gputrace.traces.packed import Content, peek
from gputrace.traces.trace import Device, NoGpu, Process, Session, Trace

if TYPE_CHECKING:
    from gputrace.traces.kineto.decode import Properties
    from gputrace.traces.kineto.kept import Kept
    from gputrace.traces.kineto.rows import Rows

_OWN: Final = re.compile(
    rb'"(?:schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:'
    rb'|"cat"\s*:\s*"(?:kernel|Kernel|gpu_mem\w+|cuda_runtime|cpu_op|Operator|python_function)"'
)
"""What no other writer of such JSON has."""

_LOOKED_AT: Final = 1 << 20
"""Bytes of text at the beginning; others' properties may come first."""

BEFORE: Final = 1_000_000_000
"""Nanoseconds of the columns' clock before the first event: a time of 0 would seem lost."""

_WALL_CLOCK: Final = range(10**18, 4 * 10**18)
"""Nanoseconds since 1970, of the years 2001 to 2096."""


def is_kineto(path: Path, head: bytes) -> bool:
    """Whether a file, of which these are the first bytes, is a trace of PyTorch's profiler."""
    text = peek(head)
    if text.lstrip()[:1] not in (b"{", b"["):
        return False
    return bool(_OWN.search(text) or _OWN.search(_beginning(path)))


def _beginning(path: Path) -> bytes:
    try:
        with Content(path) as text:
            return text.read()[:_LOOKED_AT]
    except InputError:
        return b""


def open_kineto(path: Path, breaks: Breaks = STOP) -> Trace:
    """Reads a file whole; raises InputError where it is broken or holds nothing to analyze."""
    return decode(path, breaks)[0]


def decode(path: Path, breaks: Breaks = STOP, kept: Kept | None = None) -> tuple[MemoryTrace, Rows]:
    """The trace of a file, of whose rows some are kept, and what was told of all of them."""
    from gputrace.traces.kineto.decode import Events as Decoder
    from gputrace.traces.kineto.decode import properties
    from gputrace.traces.kineto.document import BadJson, Document
    from gputrace.traces.kineto.pairs import Pairs
    from gputrace.traces.kineto.rows import Rows

    rows, pairs, decoder = Rows(kept), Pairs(), Decoder()
    with Content(path) as text:
        document = Document(text, decoder.decode, breaks)
        for part in document.parts():
            rows.add(pairs.whole(part))
    try:
        found = properties(document.around)
    except BadJson as error:
        breaks.meet(document.broken_around(error))
        found = _beginning_of(document.beginning)
    trace = _trace(path, rows, found)
    trace.quality.drop("not an event of the profiler", decoder.odd)
    trace.quality.drop("an end without a beginning, or the other way round", pairs.odd)
    if not document.closed:
        trace.quality.warnings.append("the file ends without an end of its list: it was cut off")
    return trace, rows


def _beginning_of(text: bytes) -> Properties:
    """The properties of a document as far as it is not broken."""
    from gputrace.traces.kineto.decode import Properties, properties
    from gputrace.traces.kineto.document import BadJson

    try:
        return properties(text)
    except BadJson:
        return Properties()


def _trace(path: Path, rows: Rows, found: Properties) -> MemoryTrace:
    from gputrace.traces.kineto.decode import integer

    shift = BEFORE - rows.first
    rank, size = UNKNOWN, UNKNOWN
    if found.distributed is not None:
        rank, size = integer(found.distributed.rank), integer(found.distributed.world_size)
    host = str(found.host or "")
    pids = list(rows.pids) or [0]
    processes = [Process(max(integer(pid), 0), 0, rank, host_name=host) for pid in pids]
    base = integer(found.base)
    trace = MemoryTrace(
        path,
        "kineto",
        parts := rows.parts(shift),
        rows.names.texts,
        processes,
        [
            Device(process, integer(card.id), name=str(card.name))
            for process in range(len(processes))
            for card in found.cards
        ],
        Session(
            epoch_ns=_epoch(base, rows.first),
            hosts=frozenset({host} - {""}),
            ranks=frozenset({rank} - {UNKNOWN}),
            world_size=size if size > 0 else None,
        ),
        no_gpu=_no_gpu(parts),
    )
    trace.origin = BEFORE
    return trace


def _epoch(base: int, first: int) -> int | None:
    """The wall clock at 0 of the columns; times without a base may be that clock themselves."""
    epoch = max(base, 0) + first
    return epoch - BEFORE if epoch in _WALL_CLOCK else None


def _no_gpu(parts: list[Events]) -> NoGpu | None:
    """Where steps or waits for data are there without a GPU, they are worth telling."""
    kinds = {Kind(kind) for part in parts for kind in set(part.kind.tolist())}
    if kinds & set(GPU_KINDS):
        return None
    return NoGpu(
        "PyTorch's profiler recorded none",
        "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], where a GPU is",
    )
