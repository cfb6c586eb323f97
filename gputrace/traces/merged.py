"""Traces of one run, from one machine or several, as one trace.

What is merged are traces, of whatever readers; processes, names and hosts get numbers of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.clocks import MERGED_BY_WALL_CLOCK, wall_clock_shifts
from gputrace.traces.events import GPU_KINDS, Column, Events, Kind, concatenate
from gputrace.traces.numbering import Numbering
from gputrace.traces.nvml.model import Nvml, together
from gputrace.traces.part import Part
from gputrace.traces.runs import check_overlap, check_parts, machines, missing_ranks, several_jobs
from gputrace.traces.trace import Device, Process, Progress, Session, Trace, Window

_AHEAD: Final = 8
"""Files that other processes are asked to read before their rows are needed."""


class MergedTrace(Trace):
    """Several traces behind the interface of one; closes them when it is closed."""

    def __init__(self, traces: Sequence[Trace], shifts: Sequence[int]) -> None:
        """``shifts`` are nanoseconds that bring the times of each trace onto one clock."""
        super().__init__(traces[0].path)
        self.source = "+".join(sorted({trace.source for trace in traces}))
        self._names = Numbering()
        self._hosts: dict[tuple[str, int], int] = {}
        self._part_of: dict[int, Part] = {}
        """By the merged number of a process."""
        self._parts = [
            Part(number, trace, shift, machine, traces[machine].path.stem)
            for number, (trace, shift, machine) in enumerate(
                zip(traces, shifts, machines(traces), strict=True)
            )
        ]
        self.origin = self._first_origin()
        self._overlaps = False
        reasons = [trace.no_gpu for trace in traces]
        self.no_gpu = None if None in reasons else reasons[0]
        for part in self._parts:
            self._take_over(part)

    @property
    def traces(self) -> list[Trace]:
        """Those that were merged."""
        return [part.trace for part in self._parts]

    @property
    def cut_bytes(self) -> int:
        return sum(part.trace.cut_bytes for part in self._parts)

    @property
    def shifts(self) -> list[int]:
        """The nanoseconds that are added to the times of each."""
        return [part.shift for part in self._parts]

    def _first_origin(self) -> int:
        return min(part.trace.origin + part.shift for part in self._parts)

    def shift_hosts(self, shifts: Mapping[int, int], how: str) -> None:
        for part in self._parts:
            hosts = {self.processes[number].host for number in part.processes}
            part.shift += next((shifts[host] for host in hosts if host in shifts), 0)
        self.origin = self._first_origin()
        notes = self.quality.notes
        notes[:] = [how if note == MERGED_BY_WALL_CLOCK else note for note in notes]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for part in self._parts for path in part.trace.paths)

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

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset[Kind]().union(*(part.trace.kinds for part in self._parts))

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        found = self._explained(ids, lambda part, own: part.trace.names(own))
        return {int(id): found.get(int(id), f"<name {id}>") for id in ids}

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        return self._explained(ids, lambda part, own: part.trace.search(own, pattern))

    def _explained(
        self,
        ids: Collection[int] | Column,
        explain: Callable[[Part, Column], dict[int, str]],
    ) -> dict[int, str]:
        """Texts by merged id, of what each trace says about its own ids."""
        found: dict[int, str] = {}
        for number, own, merged in self._names.by_part(np.fromiter(ids, np.int64, len(ids))):
            texts = explain(self._parts[number], own)
            pairs = zip(own.tolist(), merged.tolist(), strict=True)
            found |= {id: texts[local] for local, id in pairs if local in texts}
        return found

    def device(self, process: int, device: int) -> Device:
        part = self._part_of[process]
        found = part.trace.device(part.own_process[process], device)
        return Device(process, device, found.gpu, found.name, found.uuid)

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        for part in self._parts:
            part.trace.ask(kinds, columns, part.on_own_clock(window))
        parts = []
        for part in self._parts:
            events = part.trace.read(kinds, columns, part.on_own_clock(window), progress)
            parts.append(self._translated(part, events, columns))
        everything = window is None and kinds == frozenset(GPU_KINDS)
        if everything and {"start", "end"} <= set(columns):
            self._check_overlap([_span(events) for events in parts])
        return concatenate(parts, columns)

    def read_parts(
        self, kinds: frozenset[Kind], columns: Sequence[str], progress: Progress | None
    ) -> Iterator[Events]:
        spans = []
        for part in self._parts[:_AHEAD]:
            part.trace.ask(kinds, columns, None)
        for part, ahead in zip_longest(self._parts, self._parts[_AHEAD:]):
            if ahead is not None:
                ahead.trace.ask(kinds, columns, None)
            own = []
            for events in part.trace.read_parts(kinds, columns, progress):
                yield (ours := self._translated(part, events, columns))
                own.append(_span(ours) if "start" in columns and "end" in columns else None)
            spans.append(_together(own))
        if kinds == frozenset(GPU_KINDS):
            self._check_overlap(spans)

    def check_spans(self, spans: Sequence[tuple[int, int] | None]) -> None:
        """Raises NotOneRun where the times of all operations of each, by its clock, tell so."""
        pairs = zip(self._parts, spans, strict=True)
        self._check_overlap([s and (s[0] + part.shift, s[1] + part.shift) for part, s in pairs])

    def processes_of(self, number: int) -> Sequence[int]:
        """The numbers of the processes that one of the traces has met."""
        self._take_over(self._parts[number])
        return self._parts[number].processes

    def number_names(self, number: int, ids: Column) -> NDArray[np.int32]:
        """The numbers of name ids of one of the traces."""
        return self._names.number(number, ids)

    def _check_overlap(self, spans: Sequence[tuple[int, int] | None]) -> None:
        if not self._overlaps:
            check_overlap([part.trace.path for part in self._parts], spans)
            self._overlaps = True

    def _translated(self, part: Part, events: Events, columns: Sequence[str]) -> Events:
        """What was read of a part, on our clock and with our numbers."""
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
        """Makes what is wrong with any of the traces ours, as far as it is known."""
        for part in self._parts:
            self._take_over(part)

    def _take_over(self, part: Part) -> None:
        """Makes the part's processes and what is wrong with it ours, as far as it is known."""
        for process in part.trace.processes[len(part.processes) :]:
            name = process.host_name or (part.machine_name if len(self._parts) > 1 else "")
            host = self._hosts.setdefault(part.host_key(process), len(self._hosts))
            own = Process(process.pid, host, process.rank, process.name, name)
            part.own_process[len(self.processes)] = len(part.processes)
            self._part_of[len(self.processes)] = part
            part.processes.append(len(self.processes))
            self.processes.append(own)
        if part.tell(self):
            self._put_in_order()

    def _put_in_order(self) -> None:
        """What was told of the traces, in the order of these, whichever was read first."""
        number = {text: part.number for part in self._parts for text in part.told}
        for texts in (self.quality.warnings, self.quality.notes):
            places = [place for place, text in enumerate(texts) if text in number]
            ordered = sorted((texts[place] for place in places), key=number.__getitem__)
            for place, text in zip(places, ordered, strict=True):
                texts[place] = text

    def recorded(self, process: int) -> Sequence[Window]:
        part = self._part_of[process]
        return part.on_our_clock(part.trace.recorded(part.own_process[process]))

    def calls_recorded(self, process: int) -> Sequence[Window] | None:
        part = self._part_of[process]
        own = part.trace.calls_recorded(part.own_process[process])
        return None if own is None else part.on_our_clock(own)

    def read_nvml(self) -> Nvml:
        for part in self._parts:
            part.trace.ask_nvml()
        return together([self._nvml_of(part) for part in self._parts])

    def _nvml_of(self, part: Part) -> Nvml:
        found = part.trace.nvml
        if not found:
            return found
        named = part.trace.session.hosts
        name = next(iter(named)) if len(named) == 1 else ""
        numbers = {}
        for host in sorted({host for host, _ in found.places}):
            key = part.host_key(Process(0, host, host_name=name))
            numbers[host] = self._hosts.setdefault(key, len(self._hosts))
        return found.moved(part.shift, numbers)

    def close(self) -> None:
        for part in self._parts:
            part.trace.close()


_Span = tuple[int, int] | None


def _span(events: Events) -> _Span:
    return (int(events.start.min()), int(events.end.max())) if len(events) else None


def _together(spans: Sequence[_Span]) -> _Span:
    known = [span for span in spans if span is not None]
    return (min(s[0] for s in known), max(s[1] for s in known)) if known else None


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace of several, in order of their ranks; raises InputError where they are not one run.

    The traces are the merged one's from then on, unless it raises.
    """
    check_parts(traces)
    ordered = sorted(traces, key=lambda trace: min(trace.session.ranks, default=0))
    merged = MergedTrace(ordered, wall_clock_shifts(ordered))
    hosts = [trace.session.hosts for trace in ordered]
    named = len(frozenset[str]().union(*hosts)) == 1 and all(hosts)
    if not named and len(set(machines(ordered))) > 1:
        merged.quality.notes.append(MERGED_BY_WALL_CLOCK)
    merged.quality.notes += filter(None, (missing_ranks(ordered), several_jobs(ordered)))
    return merged
