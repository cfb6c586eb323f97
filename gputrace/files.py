"""The files of a run as `gputrace.open` has them: answers are kept, so not all must be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gputrace.analyzers.earlier import Earlier
from gputrace.analyzers.options import Options
from gputrace.errors import InputError, UsageError
from gputrace.traces.fetched import here_of
from gputrace.traces.opening import go_on_without, open_traces
from gputrace.traces.quality import LeftOut
from gputrace.traces.trace import Progress, Trace, Window
from gputrace.traces.within import within

if TYPE_CHECKING:
    from gputrace.analyzers.analysis import Spread
    from gputrace.traces.opening import Opening

_Result = TypeVar("_Result")


class Files:
    """Files that can be read, opened at the first question that nobody asked of them before."""

    def __init__(
        self,
        paths: Sequence[str],
        keep_going: bool,
        workers: int | None,
        windows: bool,
        scheduler: str | None,
        progress: Progress | None,
    ) -> None:
        """Takes what `gputrace.open` takes, and raises what it raises."""
        self._paths = here = here_of(paths, progress)
        self._keep_going, self._scheduler = keep_going, scheduler
        self._open = partial(self._opened, here, workers, windows, scheduler)
        self._earlier = Earlier(here, windows)
        self._trace: Trace | None = None
        self._closing = ExitStack()
        self._closed = False
        if not self._earlier.any:
            # What cannot be read is told at once.
            self._trace = self._open()

    def _opened(
        self, here: list[str], workers: int | None, windows: bool, scheduler: str | None
    ) -> Trace:
        with ExitStack() as opened:
            opening = _opening(scheduler, opened)
            trace = open_traces(here, self._keep_going, workers, windows, opening)
            self._closing = opened.pop_all()
        return trace

    @property
    def trace(self) -> Trace:
        """All of them as one; raises UsageError once they are closed."""
        if self._closed:
            raise UsageError("the trace is closed; open it again")
        if self._trace is None:
            self._trace = self._open()
        return self._trace

    @property
    def title(self) -> str:
        """What a message calls them, also once they are closed."""
        if self._trace is not None:
            return self._trace.title
        first, *others = self._paths
        return f"{first} and {len(others)} more" if others else first

    @property
    def spread(self) -> Spread | None:
        """What has them analyzed where they are, if that is not here."""
        if self._scheduler is None:
            return None
        from gputrace.cluster.shards import spread

        return spread

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What could not be read; nothing of what need not be."""
        return () if self._trace is None else tuple(self._trace.quality.left_out)

    def absolute(self, window: Window | None) -> Window | None:
        """A window after the trace's origin as one of its clock."""
        if window is None:
            return None
        return Window(window.start + self.trace.origin, window.end + self.trace.origin)

    def reading(
        self, window: Window | None, progress: Progress | None
    ) -> AbstractContextManager[Trace]:
        """The trace to read a window after its origin from, or all of it."""
        return within(self.trace, self.absolute(window), progress)

    def answer(self, kind: type[_Result], options: Options, work: Callable[[], _Result]) -> _Result:
        """What the cache has of it, else the work's, which it then has."""
        if not self._closed and (known := self._earlier.find(kind, options)) is not None:
            return known
        found = self.going_on(work)
        if not self.left_out:
            self._earlier.keep(found, options)
        return found

    def going_on(self, work: Callable[[], _Result]) -> _Result:
        """Does the work; without a file that turns out to be broken meanwhile, if it may."""
        while True:
            try:
                return work()
            except InputError as error:
                if not self._keep_going:
                    raise
                self._trace = go_on_without(self.trace, error)

    def close(self) -> None:
        """Gives them back; may be repeated."""
        self._closed = True
        with self._closing:
            if self._trace is not None:
                self._trace.close()


def _opening(scheduler: str | None, opened: ExitStack) -> Opening | None:
    """What opens files, if not this machine: a cluster that is closed with ``opened``."""
    if scheduler is None:
        return None
    from gputrace.cluster.requests import Cluster

    return opened.enter_context(Cluster(scheduler)).open_each
