"""Several files as the trace of one run, whole or without what cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gputrace.errors import GputraceError, InputError
from gputrace.traces.folders import files_of, is_log
from gputrace.traces.merged import MergedTrace, merge
from gputrace.traces.quality import LeftOut
from gputrace.traces.readers import open_trace
from gputrace.traces.runs import NotOneRun, check_paths, missing_ranks
from gputrace.traces.trace import Trace
from gputrace.traces.within import LARGE

if TYPE_CHECKING:
    from gputrace.traces.workers import Opened

    Opening = Callable[..., Iterator[Opened]]
    """As `gputrace.traces.workers.open_each`."""

_LOG_ALONE: Final = (
    "a log of nvidia-smi tells nothing alone; name the trace that it belongs to, too"
)


def open_traces(
    paths: Sequence[Path | str],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
    opening: Opening | None = None,
) -> Trace:
    """Opens the traces of one run as one; a folder stands for the traces in it.

    Logs of nvidia-smi among them say what the GPUs did meanwhile.

    Args:
        paths: files and folders.
        keep_going: whether to go on without what cannot be read, or is of another run than most;
            the trace's ``quality.left_out`` says what that is.
        workers: how many processes decode files; chosen by their sizes if not given.
        windows: whether only windows of it will be read: long text is not held then, unless there
            are logs, whose place in time the whole run tells.
        opening: what opens files of any number; this machine, if not given.

    Raises InputError where one cannot be read, or where they are not of one run; with
    ``keep_going`` only where none can be.
    """
    errors: list[GputraceError] = []
    files = list(_files(paths, errors if keep_going else None))
    logs = [file for file in files if is_log(file)] if len(files) > 1 else []
    traces = [file for file in files if file not in logs]
    if logs and not traces and not errors:
        raise InputError(logs[0], _LOG_ALONE)
    windows = windows and not logs and _is_long(traces)
    opening = partial(opening or _open_each, workers=workers)
    trace = _open_run(traces, errors, keep_going, opening, windows)
    return _with_logs(trace, logs, keep_going)


def _open_each(
    files: Sequence[Path], keep_going: bool, workers: int | None, windows: bool
) -> Iterator[Opened]:
    """As `gputrace.traces.workers.open_each`, which one file does not need."""
    if len(files) != 1:
        from gputrace.traces.workers import open_each

        yield from open_each(files, keep_going, workers, windows)
        return
    try:
        yield open_trace(files[0], keep_going, windows)
    except GputraceError as error:
        yield error


def _is_long(files: Sequence[Path]) -> bool:
    from gputrace.traces.workers import text_size

    there = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
    return text_size(there) > LARGE


def _open_run(
    files: list[Path],
    errors: list[GputraceError],
    keep_going: bool,
    opening: Opening,
    windows: bool,
) -> Trace:
    if not keep_going:
        check_paths(files)
    with ExitStack() as opened:
        traces: list[Trace] = []
        for found in opening(_once(files), keep_going, windows=windows):
            if isinstance(found, Trace):
                opened.callback(found.close)
                traces.append(found)
            elif keep_going and (errors or len(files) > 1):
                errors.append(found)
            else:
                raise found
        run = _one_run(traces, [_left_out(error) for error in errors], keep_going)
        opened.pop_all()
    return run


def _with_logs(trace: Trace, logs: Sequence[Path], keep_going: bool) -> Trace:
    with ExitStack() as opened:
        opened.callback(trace.close)
        try:
            if logs:
                from gputrace.traces.smi.join import join_logs

                join_logs(trace, logs)
        except InputError as error:
            if not keep_going:
                raise
            trace.quality.left_out.append(_left_out(error))
        opened.pop_all()
    return trace


def go_on_without(trace: Trace, error: InputError) -> Trace:
    """The run without the files that an error tells of; raises it where nothing would be left.

    The trace given must not be used any more.
    """
    if not isinstance(trace, MergedTrace):
        raise error
    left_out = [told for told in trace.quality.left_out if told not in _of_parts(trace)]
    traces, more = _without(trace.traces, error)
    run = _one_run(traces, left_out + more, True)
    run.logged = trace.logged
    return run


def _of_parts(trace: MergedTrace) -> list[LeftOut]:
    return [told for part in trace.traces for told in part.quality.left_out]


def _files(paths: Sequence[Path | str], errors: list[GputraceError] | None) -> Iterator[Path]:
    for path in paths:
        try:
            yield from files_of(Path(path))
        except InputError as error:
            if errors is None:
                raise
            errors.append(error)


def _once(files: Sequence[Path]) -> list[Path]:
    """Each file once, by whatever names it is given."""
    seen: dict[object, Path] = {}
    for file in files:
        try:
            status = file.stat()
        except (OSError, ValueError):
            seen[file] = file  # Its reader says what is wrong.
        else:
            seen.setdefault((status.st_dev, status.st_ino), file)
    return list(seen.values())


def _one_run(traces: list[Trace], left_out: list[LeftOut], keep_going: bool) -> Trace:
    while True:
        if not traces:
            raise _nothing(left_out)
        try:
            run = merge(traces) if len(traces) > 1 else traces[0]
        except InputError as error:
            if not keep_going:
                raise
            traces, more = _without(traces, error)
            left_out = left_out + more
            continue
        run.quality.left_out[:0] = left_out
        if left_out and len(traces) == 1:
            run.quality.notes += filter(None, [missing_ranks(traces)])
        return run


def _without(traces: Sequence[Trace], error: InputError) -> tuple[list[Trace], list[LeftOut]]:
    """The traces that an error is not about, and what to say of the others, which it closes."""
    if isinstance(error, NotOneRun):
        lost = {path for run in error.runs[1:] for path in run}
        problem = f"of another run than {error.runs[0][0]}"
        more = [LeftOut(str(path), problem) for path in sorted(lost)]
    else:
        lost, more = {error.path}, [_left_out(error)]
    kept = [trace for trace in traces if trace.path not in lost]
    if not kept or len(kept) == len(traces):
        raise error
    for trace in traces:
        if trace.path in lost:
            trace.close()
    return kept, more


def _left_out(error: GputraceError) -> LeftOut:
    if isinstance(error, InputError):
        return LeftOut(str(error.path), error.problem)
    path, _, problem = str(error).partition(": ")
    return LeftOut(path, problem)


def _nothing(left_out: Sequence[LeftOut]) -> InputError:
    first, *others = left_out
    more = f" (and {len(others)} more cannot be read)" if others else ""
    return InputError(first.path, first.problem + more)
