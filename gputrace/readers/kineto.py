"""Traces of PyTorch's profiler (Kineto): opened whole, or a window at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gputrace.errors import InputError, UsageError
from gputrace.model.events import GPU_KINDS, UNKNOWN, Column, Events, Kind
from gputrace.model.trace import Device, NoGpu, Process, Progress, Session, Trace, Window
from gputrace.readers.error_policy import STOP, ErrorPolicy
from gputrace.readers.gzip_io import Content, peek
from gputrace.readers.in_memory import MemoryTrace

if TYPE_CHECKING:
    from gputrace.readers.kineto_events import Properties, Rows, RowSelection


_OWN: Final = re.compile(
    rb'"(?:schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:'
    rb'|"cat"\s*:\s*"(?:kernel|Kernel|gpu_mem\w+|cuda_runtime|cpu_op|Operator|python_function)"'
)
"""Key that no other writer of such JSON has."""

_LOOKED_AT: Final = 1 << 20
"""Bytes of text at the beginning; others' properties may come first."""

BEFORE: Final = 1_000_000_000
"""Nanoseconds of the columns' clock before the first event: a time of 0 would seem lost."""

_WALL_CLOCK: Final = range(10**18, 4 * 10**18)
"""Nanoseconds since 1970, of the years 2001 to 2096."""


def is_kineto(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes is a trace of PyTorch's profiler."""
    text = peek(head)
    if text.lstrip()[:1] not in (b"{", b"["):
        return False
    if _OWN.search(text) is None:
        try:
            with Content(path) as content:
                text = content.read()[:_LOOKED_AT]
        except InputError:
            return False
    return _OWN.search(text) is not None


def open_kineto(path: Path, breaks: ErrorPolicy = STOP) -> Trace:
    """Reads a file whole; raises InputError where it is broken or holds nothing to analyze."""
    return decode(path, breaks)[0]


def decode(
    path: Path, breaks: ErrorPolicy = STOP, kept: RowSelection | None = None
) -> tuple[MemoryTrace, Rows]:
    """The trace of a file, of whose rows some are kept, and what was told of all of them."""
    from gputrace.readers.chrome_json import BadJson, Document
    from gputrace.readers.kineto_events import DecodedEvents as Decoder
    from gputrace.readers.kineto_events import Pairs, Properties, Rows, properties

    rows, pairs, decoder = Rows(kept), Pairs(), Decoder()
    with Content(path) as text:
        document = Document(text, decoder.decode, breaks)
        for part in document.parts():
            rows.add(pairs.whole(part))
    try:
        found = properties(document.around)
    except BadJson as error:
        breaks.meet(document.broken_around(error))
        found = Properties()
        with suppress(BadJson):
            found = properties(document.beginning)
    trace = _trace(path, rows, found)
    trace.quality.drop("not an event of the profiler", decoder.odd)
    trace.quality.drop("an end without a beginning, or the other way round", pairs.odd)
    if not document.closed:
        trace.quality.warnings.append("the file ends without an end of its list: it was cut off")
    return trace, rows


def _trace(path: Path, rows: Rows, found: Properties) -> MemoryTrace:
    from gputrace.readers.kineto_events import integer

    shift = BEFORE - rows.first
    rank, size = UNKNOWN, UNKNOWN
    if found.distributed is not None:
        rank, size = integer(found.distributed.rank), integer(found.distributed.world_size)
    host = str(found.host or "")
    pids = list(rows.pids) or [0]
    processes = [Process(max(integer(pid), 0), 0, rank, host_name=host) for pid in pids]
    # Times without a base may be of the wall clock themselves.
    epoch = max(integer(found.base), 0) + rows.first
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
            epoch_ns=epoch - BEFORE if epoch in _WALL_CLOCK else None,
            hosts=frozenset({host} - {""}),
            ranks=frozenset({rank} - {UNKNOWN}),
            world_size=size if size > 0 else None,
        ),
        no_gpu=_no_gpu(parts),
    )
    trace.origin = BEFORE
    return trace


def _no_gpu(parts: list[Events]) -> NoGpu | None:
    """Return why there is no GPU, if steps or waits for data are there to report."""
    kinds = {Kind(kind) for part in parts for kind in set(part.kind.tolist())}
    if kinds & set(GPU_KINDS):
        return None
    return NoGpu(
        "PyTorch's profiler recorded none",
        "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], where a GPU is",
    )


class LargeKineto(Trace):
    """Large trace of which opening keeps only what describes the run, and the origin of its times.

    Read without a window it is held like any other.

    Attributes:
        look: what opening keeps.
        allowed: whether a broken file is read as far as it is whole.
        first: the moment of the first event, as the file tells it.
    """

    held = False

    def __init__(
        self,
        path: Path,
        breaks: ErrorPolicy = STOP,
        look: MemoryTrace | None = None,
        first: int = 0,
    ) -> None:
        """Scan the file, unless another process has and gives `look` and `first`.

        Raises InputError if the file is broken.
        """
        super().__init__(path)
        if look is None:
            from gputrace.readers.kineto_events import RowSelection

            look, rows = decode(path, breaks, RowSelection())
            look.no_gpu = None if rows.has_gpu else look.no_gpu
            first = rows.first
        self.allowed, self.first, self.look = breaks.allowed, first, look
        self.source, self.origin, self.quality = look.source, look.origin, look.quality
        self.processes, self.no_gpu = look.processes, look.no_gpu

    @property
    def session(self) -> Session:
        return self.look.session

    def part(self, window: Window) -> MemoryTrace:
        """The rows that touch a window, and their neighbours; reads the file once more.

        Raises UsageError where nothing touches it.
        """
        from gputrace.readers.kineto_events import RowSelection

        shift = BEFORE - self.first
        own = Window(window.start - shift, window.end - shift)
        kept = RowSelection(own, self.first)
        trace, _ = decode(self.path, ErrorPolicy(self.allowed), kept)
        if not kept.touched:
            raise UsageError(f"{self.path}: nothing was recorded in that window")
        trace.no_gpu = self.no_gpu
        trace.quality.notes += self.quality.notes
        trace.quality.left_out += self.quality.left_out
        return trace

    @cached_property
    def _whole(self) -> Trace:
        return open_kineto(self.path, ErrorPolicy(self.allowed))

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._whole.kinds

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        return self._whole.names(ids)

    def device(self, process: int, device: int) -> Device:
        return self.look.device(process, device)

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        return self._whole.read(kinds, columns, window, progress)

    def close(self) -> None:
        self.look.close()
        self.__dict__.pop("_whole", self.look).close()
