"""A window of a trace that is too large to be read whole for it.

An analysis reads all of a trace, since steps are counted from its start. Of SQLite files beyond
some size, the window and what is around it is cut out first, and long text is decoded for it alone,
which needs no memory in proportion.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from gputrace.errors import UsageError
from gputrace.traces.cut import cut
from gputrace.traces.merged import MergedTrace
from gputrace.traces.sqlite import Database
from gputrace.traces.trace import Progress, Trace, Window
from gputrace.units import format_window

LARGE: Final = 1 << 29
"""Bytes of all such files, whose rows are as many bytes again in memory, and half as many more."""
_AROUND_NS: Final = 5_000_000_000
"""What is read before and after a window, at least: the steps around it tell which it cuts."""


@contextmanager
def within(trace: Trace, window: Window | None, progress: Progress | None) -> Iterator[Trace]:
    """The trace to read a window of its own clock from: itself, or a part that holds the window.

    Raises UsageError where the part would be empty, OSError where it cannot be written.
    """
    if window is None or not _is_large(trace):
        yield trace
        return
    around = max(_AROUND_NS, window.end - window.start)
    read = Window(window.start - around, window.end + around)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gputrace-")))
        part = _part(trace, read, folder, opened, progress)
        low, high = max(read.start - trace.origin, 0), read.end - trace.origin
        part.quality.notes.append(
            f"a large trace, of which only {format_window(low, high)} is read: steps are counted "
            "within it"
        )
        yield part


def _is_large(trace: Trace) -> bool:
    """Whether it has text that is not held, or its SQLite files are large."""
    traces = trace.traces if isinstance(trace, MergedTrace) else [trace]
    return sum(one.cut_bytes for one in traces) > LARGE or not all(one.held for one in traces)


def _part(
    trace: Trace, window: Window, folder: Path, opened: ExitStack, progress: Progress | None
) -> Trace:
    if isinstance(trace, MergedTrace):
        return _parts(trace, window, folder, opened, progress)
    return part_of(trace, window, folder, opened, progress)


def part_of(
    trace: Trace,
    window: Window,
    folder: Path,
    opened: ExitStack,
    progress: Progress | None = None,
) -> Trace:
    """A window of one file, cut into a folder where that is needed; ``opened`` closes it."""
    if trace.elsewhere or not trace.held:
        part = trace.part(window)
        opened.callback(part.close)
        part.logged = trace.logged
        return part
    tables = trace.tables
    if tables is None:
        return trace  # It is in memory already.
    path = folder / f"{len(list(folder.iterdir()))}.sqlite"
    cut(tables, path, window, progress=progress)
    database = Database(path)
    opened.callback(database.close)
    part = trace.on(database)
    part.quality = replace(trace.quality, notes=list(trace.quality.notes))
    return part


def _parts(
    trace: MergedTrace, window: Window, folder: Path, opened: ExitStack, progress: Progress | None
) -> Trace:
    """The files that have something in the window, which need not be all."""
    parts: dict[int, Trace] = {}
    empty = UsageError(f"{trace.title}: nothing was recorded in that window")
    for number, (one, shift) in enumerate(zip(trace.traces, trace.shifts, strict=True)):
        own = Window(window.start - shift, window.end - shift)
        try:
            parts[number] = _part(one, own, folder, opened, progress)
        except UsageError as error:
            empty = error
    if not parts:
        raise empty
    merged = MergedTrace(list(parts.values()), [trace.shifts[number] for number in parts])
    merged.origin, merged.logged = trace.origin, trace.logged
    merged.quality.notes[:] = trace.quality.notes
    merged.quality.left_out[:] = trace.quality.left_out
    return merged
