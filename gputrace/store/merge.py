"""Merging of the traces of one run, from one or several machines, into one trace on one clock.

Traces of any readers can be merged if they are parts of one run; processes, names and hosts are
renumbered. NTP keeps the wall clocks of machines, which align the traces, within about a
millisecond; the analysis later corrects these shifts by collectives, which end simultaneously on
all ranks.

An id is meaningful only within its trace, and may be any integer: a row of a table, or a text kept
elsewhere (below 0). Each (trace, id) gets the next number from 0 on, in order of appearance, so
that the numbers stay dense, which counting algorithms rely on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations, zip_longest
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.model.attempts import Life
from gputrace.model.events import (
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    concatenate,
    distinct_ids,
    number_ids,
)
from gputrace.model.nvml import Nvml, merge_nvml
from gputrace.model.options import Window
from gputrace.model.trace import (
    Coverage,
    Device,
    Process,
    Quality,
    Selection,
    Session,
    Trace,
    add_derived_columns,
    base_columns,
    moved,
)
from gputrace.units import format_ranges

_Span = tuple[int, int] | None
_AHEAD: Final = 8
"""Number of files that other processes read ahead."""


class MergedTrace(Trace):
    """Several traces behind the interface of one; closing it closes them."""

    def __init__(
        self, traces: Sequence[Trace], shifts: Sequence[int], have_clocks: bool = True
    ) -> None:
        """Merge traces; ``shifts`` are the nanoseconds to add to the times of each.

        Without ``have_clocks``, each counts as of a host of its own, as it has a clock of its own.
        """
        super().__init__(traces[0].path)
        self.source = "+".join(sorted({trace.source for trace in traces}))
        self._names = Numbering()
        self._hosts: dict[tuple[str, int], int] = {}
        self._part_of: dict[int, MergePart] = {}
        """Part by merged process number."""
        places = machines(traces)
        self._parts = [
            MergePart(number, trace, shift, machine, traces[machine].path.stem, have_clocks)
            for number, (trace, shift, machine) in enumerate(
                zip(traces, shifts, places, strict=True)
            )
        ]
        self._sharing = {machine for machine in places if places.count(machine) > 1}
        """Machines whose cards several traces saw."""
        self.origin = min(part.trace.origin + part.shift for part in self._parts)
        self._overlaps = False
        self.has_one_clock = have_clocks
        self.idle_unknown = next(filter(None, (trace.idle_unknown for trace in traces)), "")
        reasons = [trace.no_gpu for trace in traces]
        self.no_gpu = None if None in reasons else reasons[0]
        self.attempt = max(trace.attempt for trace in traces)
        self.take_over()

    @property
    def traces(self) -> list[Trace]:
        """The merged traces."""
        return [part.trace for part in self._parts]

    @property
    def cut_bytes(self) -> int:
        return sum(part.trace.cut_bytes for part in self._parts)

    @property
    def shifts(self) -> list[int]:
        """Nanoseconds added to the times of each trace."""
        return [part.shift for part in self._parts]

    def clock_of(self, process: int) -> int:
        part = self._part_of[process]
        alone = part.trace.source in _CLOCK_OF_ITS_OWN
        return ~part.number if alone else self.processes[process].host

    def shift_clocks(self, shifts: Mapping[int, int], how: str) -> None:
        for part in self._parts:
            clocks = {self.clock_of(number) for number in part.processes}
            part.shift += next((shifts[clock] for clock in clocks if clock in shifts), 0)
        self.origin = min(part.trace.origin + part.shift for part in self._parts)
        self.has_one_clock = True
        self._once.clear()
        notes = self.quality.notes
        replaced = MERGED_BY_WALL_CLOCK, MERGED_BY_BEGINNING
        notes[:] = [how, *(note for note in notes if note not in replaced)]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for part in self._parts for path in part.trace.paths)

    @property
    def lives(self) -> Sequence[Life]:
        return [
            life.moved(part.shift, part.number << 48 | life.process)
            for part in self._parts
            for life in part.trace.lives
        ]

    def cover(self, attempt: int) -> None:
        super().cover(attempt)
        for part in self._parts:
            part.trace.cover(attempt)

    @property
    def session(self) -> Session:
        sessions = [part.trace.session for part in self._parts]
        return Session(
            epoch_ns=min(session.epoch_ns or 0 for session in sessions),
            job=max(session.job for session in sessions),
            hosts=frozenset[str]().union(*(session.hosts for session in sessions)),
            ranks=frozenset[int]().union(*(session.ranks for session in sessions)),
            world_size=max(session.world_size or 0 for session in sessions) or None,
            utc_offset_ns=next(
                (s.utc_offset_ns for s in sessions if s.utc_offset_ns is not None), None
            ),
        )

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        return frozenset[Kind]().union(*(part.trace.kinds for part in self._parts))

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        texts = self._lookup(ids, lambda part, local_ids: part.trace.names(local_ids))
        return {int(id): texts.get(int(id), f"<name {id}>") for id in ids}

    def search(self, ids: Collection[int] | Column, pattern: str) -> dict[int, str]:
        return self._lookup(ids, lambda part, local_ids: part.trace.search(local_ids, pattern))

    def _lookup(
        self, ids: Collection[int] | Column, lookup: Callable[[MergePart, Column], dict[int, str]]
    ) -> dict[int, str]:
        """Look up texts in each trace by its own ids; return them by merged id."""
        merged_texts: dict[int, str] = {}
        for number, local_ids, merged in self._names.by_part(np.fromiter(ids, np.int64, len(ids))):
            texts = lookup(self._parts[number], local_ids)
            pairs = zip(local_ids.tolist(), merged.tolist(), strict=True)
            merged_texts |= {id: texts[local] for local, id in pairs if local in texts}
        return merged_texts

    def device(self, process: int, device: int) -> Device:
        part = self._part_of[process]
        local = part.trace.device(part.local_process[process], device)
        return Device(process, device, local.gpu, local.name, local.uuid)

    def read(self, wanted: Selection) -> Events:
        for part in self._parts:
            part.trace.ask(wanted.moved(-part.shift))
        parts = [self._read(part, wanted) for part in self._parts]
        everything = wanted.window is None and wanted.kinds == frozenset(GPU_KINDS)
        if everything and {"start", "end"} <= set(wanted.columns):
            self._check_overlap([_span(events) for events in parts])
        return concatenate(parts, wanted.columns)

    def _read(self, part: MergePart, wanted: Selection) -> Events:
        """Read rows of a part, on the merged clock and with merged numbers."""
        events = part.trace.read(wanted.moved(-part.shift))
        return self._translated(part, events, wanted.columns)

    def events_of(
        self, process: int, kinds: Iterable[Kind], columns: Sequence[str], window: Window
    ) -> Events:
        """Read the file of the process alone."""
        wanted = Selection(frozenset(kinds), base_columns(columns), window)
        return add_derived_columns(self, self._read(self._part_of[process], wanted), columns)

    def read_parts(self, wanted: Selection) -> Iterator[Events]:
        spans = []
        for part in self._parts[:_AHEAD]:
            part.trace.ask(wanted)
        for part, ahead in zip_longest(self._parts, self._parts[_AHEAD:]):
            if ahead is not None:
                ahead.trace.ask(wanted)
            edges: list[int] = []
            for events in part.trace.read_parts(wanted):
                yield (merged := self._translated(part, events, wanted.columns))
                if {"start", "end"} <= set(wanted.columns):
                    edges += _span(merged) or ()
            spans.append((min(edges), max(edges)) if edges else None)
        if wanted.kinds == frozenset(GPU_KINDS):
            self._check_overlap(spans)

    def check_spans(self, spans: Sequence[_Span]) -> None:
        """Raise NotOneRun if the GPU activity spans, on each trace's clock, show several runs."""
        pairs = zip(self._parts, spans, strict=True)
        self._check_overlap([s and (s[0] + part.shift, s[1] + part.shift) for part, s in pairs])

    def processes_of(self, number: int) -> Sequence[int]:
        """Return the merged numbers of the processes seen so far by one of the traces."""
        self._take_over(self._parts[number])
        return self._parts[number].processes

    def number_names(self, number: int, ids: Column) -> NDArray[np.int32]:
        """Return the merged numbers of name ids of one of the traces."""
        return self._names.number(number, ids)

    def _check_overlap(self, spans: Sequence[_Span]) -> None:
        """Raise NotOneRun if some files ended before others began; spans are on one clock.

        A file without GPU activity has no span and never conflicts, unless none has any: then their
        processes count.
        """
        if self._overlaps:
            return
        if not any(spans):
            spans = [part.lived for part in self._parts]
        known = [
            (span, part.trace.path)
            for span, part in zip(spans, self._parts, strict=True)
            if span is not None
        ]
        runs: list[list[Path]] = []
        ends: list[tuple[int, Path]] = []
        """Latest end in each run, and its file."""
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
        self._overlaps = True

    def _translated(self, part: MergePart, events: Events, columns: Sequence[str]) -> Events:
        """Convert rows of a part to the merged clock and numbers."""
        self._take_over(part)
        arrays: dict[str, Column] = {name: getattr(events, name) for name in columns}
        for name in {"start", "end"} & arrays.keys():
            arrays[name] = arrays[name] + part.shift if part.shift else arrays[name]
        if "process" in arrays and len(events):
            arrays["process"] = np.array(part.processes, np.int16)[arrays["process"]]
        if "name" in arrays:
            arrays["name"] = self._names.number(part.number, arrays["name"])
        return Events(arrays)

    def take_over(self) -> None:
        """Copy processes and quality problems known so far from all traces."""
        for part in self._parts:
            self._take_over(part)

    def _take_over(self, part: MergePart) -> None:
        """Copy processes and quality problems known so far from a part."""
        for process in part.trace.processes[len(part.processes) :]:
            name = process.host_name or self._name_after_file(part, len(part.processes))
            host = self._hosts.setdefault(part.host_key(process), len(self._hosts))
            merged = Process(process.pid, host, process.rank, process.name, name)
            index = self.add_process(merged)
            part.local_process[index] = len(part.processes)
            self._part_of[index] = part
            part.processes.append(index)
        if not part.copy_quality(self.quality):
            return
        # Sort the warnings and notes of the traces by trace, not by order of reading.
        number = {text: part.number for part in self._parts for text in part.messages}
        for texts in (self.quality.warnings, self.quality.notes):
            indices = [index for index, text in enumerate(texts) if text in number]
            ordered = sorted((texts[index] for index in indices), key=number.__getitem__)
            for index, text in zip(indices, ordered, strict=True):
                texts[index] = text

    def _name_after_file(self, part: MergePart, process: int) -> str:
        """Return a name for the machine of a process without one; empty where the file shows
        nothing of its cards but one without a number, as other files may be of that machine too.
        """
        shown = part.machine in self._sharing or len(part.trace.session.cards) > 1
        known = shown or part.trace.device(process, 0).gpu != UNKNOWN
        return part.machine_name if known and len(self._parts) > 1 else ""

    def coverage(self, process: int) -> Coverage:
        part = self._part_of[process]
        return part.trace.coverage(part.local_process[process]).moved(part.shift)

    def node_stretches(self) -> Sequence[Window]:
        parts = (moved(part.trace.node_stretches(), part.shift) for part in self._parts)
        return sorted(chain.from_iterable(parts))

    def read_nvml(self) -> Nvml:
        for part in self._parts:
            part.trace.ask_nvml()
        merged = []
        for part in self._parts:
            # Not its `nvml`, which would be kept for each part, too.
            nvml = merge_nvml([part.trace.read_nvml(), part.trace.logged])
            named = part.trace.session.hosts
            name = next(iter(named)) if len(named) == 1 else ""
            numbers = {}
            for host in sorted({host for host, _ in nvml.places}):
                key = part.host_key(Process(0, host, host_name=name))
                numbers[host] = self._hosts.setdefault(key, len(self._hosts))
            merged.append(nvml.moved(part.shift, numbers) if nvml else nvml)
        return merge_nvml(merged)

    def close(self) -> None:
        for part in self._parts:
            part.trace.close()


def _span(events: Events) -> _Span:
    return (int(events.start.min()), int(events.end.max())) if len(events) else None


def merge(traces: Sequence[Trace]) -> Trace:
    """Merge traces, which are then owned by the result; raise InputError if not of one run."""
    check_parts(traces)
    ordered = sorted(traces, key=lambda trace: min(trace.session.ranks, default=0))
    have_clocks = any(trace.session.epoch_ns is not None for trace in ordered)
    # Wall clocks align the traces if any says when it was recorded, so all must; else they begin
    # together, if each is of one rank and so belongs to the run.
    for trace in ordered:
        if trace.session.epoch_ns is None and (have_clocks or len(trace.session.ranks) != 1):
            raise InputError(trace.path, _NO_EPOCH)
    if have_clocks:
        epochs = [trace.session.epoch_ns or 0 for trace in ordered]
        first = min(epochs)
        shifts = [epoch - first for epoch in epochs]
    else:
        shifts = [ordered[0].origin - trace.origin for trace in ordered]
    merged = MergedTrace(ordered, shifts, have_clocks)
    hosts = [trace.session.hosts for trace in ordered]
    named = len(frozenset[str]().union(*hosts)) == 1 and all(hosts)
    if not have_clocks:
        merged.quality.notes.append(MERGED_BY_BEGINNING)
    elif not named and len(set(machines(ordered))) > 1:
        merged.quality.notes.append(MERGED_BY_WALL_CLOCK)
    merged.quality.notes += filter(None, [missing_ranks(ordered)])
    if (jobs := sorted({trace.session.job for trace in ordered} - {""}))[1:]:
        merged.quality.notes.append(
            f"of several jobs ({', '.join(jobs)}): see that they are one run"
        )
    return merged


_CLOCK_OF_ITS_OWN: Final = ("nvprof",)
"""Sources whose files of one host differ by milliseconds: each process converts the times of its
GPU by itself."""

_NOT_ONE_RUN = "the files must be of one run"


class NotOneRun(InputError):
    """Error for files of several runs."""

    def __init__(self, path: Path, problem: str, runs: Sequence[Sequence[Path]]) -> None:
        self.runs = sorted(runs, key=len, reverse=True)
        """Files of each run, largest run first."""
        if len(self.runs[1]) > 1:
            folders = {file.absolute().parent for run in runs for file in run}
            path = Path(os.path.commonpath(folders))
            each = "; ".join(", ".join(file.name for file in run) for run in self.runs)
            problem = f"files of {len(runs)} runs ({each}); name those of one"
        super().__init__(path, problem)


def check_parts(traces: Sequence[Trace]) -> None:
    """Raise NotOneRun if traces cannot be parts of one run."""
    parts = [(trace.path, trace.session) for trace in traces]
    # Most traces fit, which linear time shows: no two have the same rank or start.
    sizes = {session.world_size for _, session in parts} - {None, 0}
    ranks = Counter(rank for _, session in parts for rank in session.ranks)
    epochs = Counter(session.epoch_ns for _, session in parts)
    del epochs[None]
    if len(sizes) < 2 and all(n == 1 for n in (*ranks.values(), *epochs.values())):
        return
    for number, part in enumerate(parts):
        for other in parts[:number]:
            if problem := _conflict(part, other):
                raise NotOneRun(part[0], problem, _runs(parts))


_Part = tuple[Path, Session]


def _conflict(part: _Part, other: _Part) -> str:
    """Return the reason why two traces are not parts of one run; empty if they may be."""
    (_, a), (path, b) = part, other
    if a.world_size and b.world_size and a.world_size != b.world_size:
        problem = f"is from a run of {a.world_size} ranks, and {path} from one of"
        return f"{problem} {b.world_size}; {_NOT_ONE_RUN}"
    # No two recordings begin at the same nanosecond.
    if a.epoch_ns is not None and not a.ranks and a.epoch_ns == b.epoch_ns:
        return f"a copy of {path}; name each file once"
    if both := sorted(a.ranks & b.ranks):
        return f"has rank {both[0]}, as {path} has; {_NOT_ONE_RUN}, each rank once"
    return ""


def _runs(parts: Sequence[_Part]) -> list[list[Path]]:
    """Cluster the traces into runs, joining those that began closest to each other first."""
    run_of = {number: [number] for number in range(len(parts))}

    def distance(pair: tuple[int, int]) -> tuple[bool, int]:
        a, b = (parts[number][1] for number in pair)
        return a.job != b.job, abs((a.epoch_ns or 0) - (b.epoch_ns or 0))

    for first, second in sorted(combinations(run_of, 2), key=distance):
        run, other = run_of[first], run_of[second]
        if run is not other and not any(_conflict(parts[a], parts[b]) for a in run for b in other):
            run += other
            run_of |= dict.fromkeys(other, run)
    distinct = {id(run): run for run in run_of.values()}.values()
    return [[parts[number][0] for number in sorted(run)] for run in distinct]


def machines(traces: Sequence[Trace]) -> list[int]:
    """Return for each trace the index of the first trace of the same machine, by visible cards."""
    cards = [trace.session.cards for trace in traces]
    return [
        next(first for first in range(number + 1) if first == number or visible & cards[first])
        for number, visible in enumerate(cards)
    ]


def missing_ranks(traces: Iterable[Trace]) -> str:
    """Return a note on the ranks of the run without a trace; empty if there are none."""
    sessions = [trace.session for trace in traces]
    size = max((session.world_size or 0 for session in sessions), default=0)
    present = frozenset[int]().union(*(session.ranks for session in sessions))
    if not present or not (missing := sorted(set(range(size)) - present)):
        return ""
    which = format_ranges(missing)
    if len(missing) == 1:
        return f"rank {which} of {size} is missing: no file of its own was given"
    return f"ranks {which} of {size} are missing: no file of theirs was given"


class MergePart:
    """One trace of a merge, and the mapping of its numbers to merged ones."""

    def __init__(
        self, number: int, trace: Trace, shift: int, machine: int, name: str, has_clock: bool
    ) -> None:
        """``shift`` is in ns; ``machine``, ``name`` are of the first trace of its machine."""
        self._has_clock = has_clock
        self.number, self.trace, self.shift = number, trace, shift
        self.machine, self.machine_name = machine, name
        self.processes: list[int] = []
        """Merged number of each of its processes."""
        self.local_process: dict[int, int] = {}
        """Its process number by merged number."""
        self.messages: list[str] = []
        """Warnings and notes as they appear in the merged trace."""
        self._copied = (0, 0, 0)

    def copy_quality(self, merged: Quality) -> bool:
        """Copy new problems, prefixed with the file name; return True for warnings or notes."""
        quality, where = self.trace.quality, self.trace.path.name
        first_warning, first_note, first_left_out = self._copied
        self._copied = len(quality.warnings), len(quality.notes), len(quality.left_out)
        merged.left_out += quality.left_out[first_left_out:]
        warnings = [f"{where}: {text}" for text in quality.warnings[first_warning:]]
        notes = [f"{where}: {text}" for text in quality.notes[first_note:]]
        merged.warnings += warnings
        merged.notes += notes
        self.messages += warnings + notes
        for reason, rows in quality.dropped.items():
            merged.drop(reason, rows, str(self.number))
        return bool(warnings or notes)

    @property
    def lived(self) -> _Span:
        """Span of its processes on the merged clock; None where it is unknown."""
        lives = [life.moved(self.shift, life.process) for life in self.trace.lives]
        ends = [(life.start, life.end) for life in lives]
        return (min(ends)[0], max(end for _, end in ends)) if ends else None

    def host_key(self, process: Process) -> tuple[str, int]:
        """Return a key of the machine: its name, or the first trace that saw the same cards; of
        each trace by itself where their clocks are unknown.
        """
        if not self._has_clock:
            return f"/{self.number}", process.host
        if process.host_name:
            return process.host_name, 0
        return f"/{self.machine}", process.host


MERGED_BY_WALL_CLOCK = (
    "the clocks of different hosts are aligned by their wall clocks only: what one host seems to "
    "wait for another is only as exact as NTP"
)


MERGED_BY_BEGINNING: Final = (
    "the files do not say when they were recorded: taken to begin at the same time"
)


_NO_EPOCH: Final = "does not say when it was recorded, so it cannot be merged; analyze it alone"


_Ids = NDArray[np.int64]


class Numbering:
    """Dense numbers for the ids of all traces; `UNKNOWN` is preserved."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Ids, _Ids]] = {}
        """Sorted ids and their numbers, by trace."""
        self._count = 0
        self._given: list[tuple[int, _Ids]] = []
        """Number of a trace, and new ids of it, in the order of their numbers."""
        self._origin_of: tuple[_Ids, _Ids] | None = None
        """Trace and original id of each number; None if there are new ones."""

    def number(self, part: int, ids: Column) -> NDArray[np.int32]:
        """Return the numbers of a trace's ids, assigning new ones."""
        distinct, indices = number_ids(ids)
        known, numbers = self._known.get(part, (np.empty(0, np.int64), np.empty(0, np.int64)))
        is_id = distinct != UNKNOWN
        new = np.setdiff1d(distinct[is_id], known, assume_unique=True)
        if len(new):
            fresh = np.arange(self._count, self._count + len(new))
            self._count += len(new)
            order = np.argsort(both := np.concatenate([known, new]), kind="stable")
            known, numbers = both[order], np.concatenate([numbers, fresh])[order]
            self._known[part] = known, numbers
            self._given.append((part, new))
            self._origin_of = None
        result = np.full(len(distinct), UNKNOWN, np.int32)
        result[is_id] = numbers[np.searchsorted(known, distinct[is_id])]
        return result.take(indices)

    def by_part(self, numbers: _Ids) -> Iterator[tuple[int, _Ids, _Ids]]:
        """Group numbers by trace: yield the trace, its ids, and their numbers."""
        wanted = distinct_ids(numbers)
        wanted = wanted[(wanted >= 0) & (wanted < self._count)]
        if not len(wanted):
            return
        if self._origin_of is None:
            lengths = [len(ids) for _, ids in self._given]
            parts = np.repeat([part for part, _ in self._given], lengths)
            self._origin_of = parts, np.concatenate([ids for _, ids in self._given])
        parts, ids = (column[wanted] for column in self._origin_of)
        order = np.lexsort((ids, parts))
        for rows in np.split(order, np.flatnonzero(np.diff(parts[order])) + 1):
            yield int(parts[rows[0]]), ids[rows], wanted[rows]
