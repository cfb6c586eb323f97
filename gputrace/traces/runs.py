"""Whether traces are parts of one run, and which parts of it are missing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from gputrace.errors import InputError
from gputrace.traces.trace import Session, Trace
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


class NotOneRun(InputError):
    """Files of several runs.

    Attributes:
        runs: the files of each, the most first.
    """

    def __init__(self, path: Path, problem: str, runs: Sequence[Sequence[Path]]) -> None:
        self.runs = sorted(runs, key=len, reverse=True)
        if len(self.runs[1]) > 1:
            folders = {file.absolute().parent for run in runs for file in run}
            path = Path(os.path.commonpath(folders))
            each = "; ".join(", ".join(file.name for file in run) for run in self.runs)
            problem = f"files of {len(runs)} runs ({each}); name those of one"
        super().__init__(path, problem)


def check_parts(traces: Sequence[Trace]) -> None:
    """Raises NotOneRun where traces cannot be parts of one run."""
    parts = [_Part(trace, trace.session) for trace in traces]
    if _fit(parts):
        return
    for number, part in enumerate(parts):
        for other in parts[:number]:
            if problem := _conflict(part, other):
                runs = [[part.trace.path for part in run] for run in _runs(parts)]
                raise NotOneRun(part.trace.path, problem, runs)


class _Part(NamedTuple):
    """A trace, and what it says of its run, which it reads each time that it is asked."""

    trace: Trace
    session: Session


def _fit(parts: Sequence[_Part]) -> bool:
    """Whether no two of them can be in conflict, told without looking at each pair."""
    sessions = [part.session for part in parts]
    sizes = {own.world_size for own in sessions if own.world_size}
    ranks = Counter(rank for own in sessions for rank in own.ranks)
    epochs = Counter(own.epoch_ns for own in sessions if own.epoch_ns is not None)
    return len(sizes) < 2 and all(n == 1 for n in (*ranks.values(), *epochs.values()))


def _conflict(part: _Part, another: _Part) -> str:
    """Why two traces are not parts of one run; nothing where they may be."""
    own, others, other = part.session, another.session, another.trace
    if own.world_size and others.world_size and own.world_size != others.world_size:
        problem = f"is of a run of {own.world_size} ranks, and {other.path} of one of"
        return f"{problem} {others.world_size}; {_NOT_ONE_RUN}"
    # To the nanosecond: no two recordings begin so.
    if own.epoch_ns is not None and not own.ranks and own.epoch_ns == others.epoch_ns:
        return f"a copy of {other.path}; name each file once"
    if both := sorted(own.ranks & others.ranks):
        return f"has rank {both[0]}, as {other.path} has; {_NOT_ONE_RUN}, each rank once"
    return ""


def _runs(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The traces run by run: those that began nearest to each other go together, if they may."""
    run_of = {id(part): [part] for part in parts}
    for first, second in sorted(combinations(parts, 2), key=_apart):
        one, other = run_of[id(first)], run_of[id(second)]
        if one is not other and not any(_conflict(a, b) for a in one for b in other):
            one += other
            run_of |= {id(part): one for part in other}
    distinct = {id(run): run for run in run_of.values()}
    place = {id(part): number for number, part in enumerate(parts)}
    return [sorted(run, key=lambda part: place[id(part)]) for run in distinct.values()]


def _apart(pair: tuple[_Part, _Part]) -> tuple[bool, int]:
    one, other = (part.session for part in pair)
    return one.job != other.job, abs((one.epoch_ns or 0) - (other.epoch_ns or 0))


def check_overlap(paths: Sequence[Path], spans: Sequence[tuple[int, int] | None]) -> None:
    """Raises NotOneRun where some files had ended before others began; a span is of one clock.

    A file without anything on a GPU has no span, and fits.
    """
    known = [(span, path) for span, path in zip(spans, paths, strict=True) if span is not None]
    runs: list[list[Path]] = []
    ends: list[tuple[int, Path]] = []
    """Of each run, the last end and the file that has it."""
    problem, late = "", Path()
    for (start, end), path in sorted(known):
        if ends and start <= ends[-1][0]:
            runs[-1].append(path)
            ends[-1] = max(ends[-1], (end, path))
            continue
        if ends and not problem:
            late, (before, last) = path, ends[-1]
            problem = (
                f"begins {(start - before) / 1e9:,.1f} s after the end of {last}: not one run, "
                "or a host's clock is wrong; analyze them apart"
            )
        runs.append([path])
        ends.append((end, path))
    if problem:
        raise NotOneRun(late, problem, runs)


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
    which = format_ranges(missing)
    if len(missing) == 1:
        return f"rank {which} of {size} is missing: no file of its own was given"
    return f"ranks {which} of {size} are missing: no file of theirs was given"


def several_jobs(traces: Iterable[Trace]) -> str:
    """A line that names the jobs of the traces where there are several: steps of one, it may be."""
    jobs = sorted({trace.session.job for trace in traces} - {""})
    return f"of several jobs ({', '.join(jobs)}): see that they are one run" if jobs[1:] else ""


def _also(first: Path, second: Path) -> str:
    return "" if first == second else f" (it is {first} too)"
