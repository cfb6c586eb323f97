"""The rows of what a recording lacks, and why."""

from __future__ import annotations

from collections.abc import Sequence

from gputrace.collectors.files.chunks import Loss
from gputrace.collectors.rows.clock import LARGEST
from gputrace.errors import InputError
from gputrace.traces.writer import TraceWriter


def write_losses(writer: TraceWriter, process: int, losses: Sequence[Loss], start: int) -> None:
    """Writes what a process lost; ``process`` is its globalPid."""
    rows = [
        (process, (at - start) % LARGEST, count % LARGEST or None, why) for at, count, why in losses
    ]
    writer.add_rows("GPUTRACE_LOSS", ["globalPid", "timeNs", "records", "reason"], rows)


def write_unreadable(writer: TraceWriter, problems: Sequence[InputError]) -> list[str]:
    """Writes which files of a recording could not be read, and why; a line each."""
    lost = [f"{problem.path.name}: {problem.problem}" for problem in problems]
    if lost:
        writer.add_rows("GPUTRACE_LOSS", ["reason"], [(line,) for line in lost])
    return lost


def hold_something(problems: Sequence[InputError]) -> bool:
    """Whether any file that could not be read is worth keeping: an empty one is not."""
    return any(problem.path.stat().st_size for problem in problems)
