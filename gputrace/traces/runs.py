"""Whether traces are parts of one run, and which parts of it are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gputrace.errors import InputError
from gputrace.traces.trace import Trace
from gputrace.units import format_ranges

_NOT_ONE_RUN = "the files must be of one run"


def check_paths(paths: Sequence[Path]) -> None:
    """Raises InputError for a file that is named twice, by whatever name."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            found = path.stat()
        except (OSError, ValueError):
            continue  # Its reader says that better.
        file = found.st_dev, found.st_ino
        if file in seen:
            raise InputError(path, f"given twice{_also(seen[file], path)}; name each file once")
        seen[file] = path


def check_parts(traces: Sequence[Trace]) -> None:
    """Raises InputError where traces cannot be parts of one run."""
    _check_sizes(traces)
    owner: dict[int, Trace] = {}
    began: dict[int, Trace] = {}
    for trace in traces:
        session = trace.session
        # To the nanosecond: no two recordings begin so.
        if session.epoch_ns is not None and not session.ranks and session.epoch_ns in began:
            other = began[session.epoch_ns].path
            raise InputError(trace.path, f"a copy of {other}; name each file once")
        for rank in sorted(session.ranks & owner.keys()):
            problem = f"has rank {rank}, as {owner[rank].path} has; {_NOT_ONE_RUN}, each rank once"
            raise InputError(trace.path, problem)
        owner |= dict.fromkeys(session.ranks, trace)
        began |= {session.epoch_ns: trace} if session.epoch_ns is not None else {}


def check_overlap(paths: Sequence[Path], spans: Sequence[tuple[int, int] | None]) -> None:
    """Raises InputError where some files had ended before others began; a span is of one clock.

    A file without anything on a GPU has no span, and fits.
    """
    known = [(span, path) for span, path in zip(spans, paths, strict=True) if span is not None]
    known.sort(key=lambda pair: pair[0])
    for number in range(1, len(known)):
        (start, _), path = known[number]
        (_, end), last = max(known[:number], key=lambda pair: pair[0][1])
        if start > end:
            problem = (
                f"begins {(start - end) / 1e9:,.1f} s after the end of {last}: not one run, or a "
                f"host's clock is wrong; analyze them apart"
            )
            raise InputError(path, problem)


def machines(traces: Sequence[Trace]) -> list[int]:
    """For each trace, the first of the same machine, by the cards that their processes saw."""
    cards = [trace.session.cards for trace in traces]
    return [
        next(first for first in range(number + 1) if first == number or own & cards[first])
        for number, own in enumerate(cards)
    ]


def missing_ranks(traces: Iterable[Trace]) -> str:
    """A line that names the ranks that the run has and no trace is of; nothing where none is."""
    sessions = [trace.session for trace in traces]
    size = max((session.world_size or 0 for session in sessions), default=0)
    there = frozenset[int]().union(*(session.ranks for session in sessions))
    if not there or not (missing := sorted(set(range(size)) - there)):
        return ""
    ranks = "rank" if len(missing) == 1 else "ranks"
    return f"{ranks} {format_ranges(missing)} of {size} are missing: no file of theirs was given"


def several_jobs(traces: Iterable[Trace]) -> str:
    """A line that names the jobs of the traces where there are several: steps of one, it may be."""
    jobs = sorted({trace.session.job for trace in traces} - {""})
    return f"of several jobs ({', '.join(jobs)}): see that they are one run" if jobs[1:] else ""


def _check_sizes(traces: Sequence[Trace]) -> None:
    known = [(trace.session.world_size, trace.path) for trace in traces]
    sizes = [(size, path) for size, path in known if size]
    for size, path in sizes:
        if size != sizes[0][0]:
            problem = f"is of a run of {size} ranks, and {sizes[0][1]} of one of {sizes[0][0]}"
            raise InputError(path, f"{problem}; {_NOT_ONE_RUN}")


def _also(first: Path, second: Path) -> str:
    return "" if first == second else f" (it is {first} too)"
