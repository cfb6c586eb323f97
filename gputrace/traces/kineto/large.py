"""A file of the profiler that is too long to be held for a window of it: read again for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gputrace.errors import UsageError
from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.events import Column, Events, Kind
from gputrace.traces.kineto.reader import BEFORE, decode, open_kineto
from gputrace.traces.trace import Device, Progress, Session, Trace, Window

if TYPE_CHECKING:
    from gputrace.traces.memory import MemoryTrace


class LargeKineto(Trace):
    """What opening keeps of a file is what it says of the run, and where its times begin.

    Read without a window it is held like any other.

    Attributes:
        look: what opening keeps.
        allowed: whether a broken file is read as far as it is whole.
        first: the moment of the first event, as the file tells it.
    """

    held = False

    def __init__(self, path: Path, breaks: Breaks = STOP) -> None:
        """Goes through the file once; raises InputError where it is broken."""
        from gputrace.traces.kineto.kept import Kept

        look, rows = decode(path, breaks, Kept())
        look.no_gpu = None if rows.has_gpu else look.no_gpu
        self._take(look, breaks.allowed, rows.first)

    @classmethod
    def of(cls, look: MemoryTrace, allowed: bool, first: int) -> Self:
        """The trace of which another process has `look`, `allowed` and `first`."""
        trace = cls.__new__(cls)
        trace._take(look, allowed, first)
        return trace

    def _take(self, look: MemoryTrace, allowed: bool, first: int) -> None:
        super().__init__(look.path)
        self.allowed, self.first, self.look = allowed, first, look
        self.source, self.origin, self.quality = look.source, look.origin, look.quality
        self.processes, self.no_gpu = look.processes, look.no_gpu

    @property
    def session(self) -> Session:
        return self.look.session

    def part(self, window: Window) -> MemoryTrace:
        """The rows that touch a window, and their neighbours; reads the file once more.

        Raises UsageError where nothing touches it.
        """
        from gputrace.traces.kineto.kept import Kept

        shift = BEFORE - self.first
        own = Window(window.start - shift, window.end - shift)
        kept = Kept(own, self.first)
        trace, _ = decode(self.path, Breaks(self.allowed), kept)
        if not kept.touched:
            raise UsageError(f"{self.path}: nothing was recorded in that window")
        trace.no_gpu = self.no_gpu
        trace.quality.notes += self.quality.notes
        trace.quality.left_out += self.quality.left_out
        return trace

    @cached_property
    def _whole(self) -> Trace:
        return open_kineto(self.path, Breaks(self.allowed))

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
