"""Trace whose file is read by a worker of a cluster, with the interface of a local one."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as changed
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from gputrace.cluster.messages import File, Recorded, Reply, Request, Told, Work, events_of, nvml_of
from gputrace.model.events import Column, Events, Kind, concatenate
from gputrace.model.nvml import Nvml
from gputrace.model.trace import Device, Process, Progress, Session, Trace, Window


class Ticket(Protocol):
    """Pending request."""

    def reply(self) -> Reply:
        """Return the answer; raises the error that kept the file from being read."""


class Place(Protocol):
    """Destination of requests."""

    def ask(self, request: Request) -> Ticket: ...


class RemoteTrace(Trace):
    """File of a run, open on a worker.

    Numbers stay stable if another worker takes over: processes are identified by their attributes,
    not by their index on a worker.
    """

    elsewhere = True

    def __init__(self, place: Place, file: File, reply: Reply) -> None:
        """Take the metadata from ``reply``, the answer to the request ``about`` the file."""
        assert reply.about is not None
        super().__init__(Path(file.path))
        self._place, self._file, self._about = place, file, reply.about
        self.source, self.origin = reply.about.source, reply.about.origin
        self.no_gpu, self.held = reply.about.no_gpu, reply.about.held
        self._names: dict[int, str] = {}
        self._devices: dict[tuple[int, int], Device] = {}
        self._recorded: dict[int, Recorded] = {}
        self._named: set[frozenset[Kind]] = set()
        self._asked: tuple[Request, Ticket] | None = None
        self._asked_nvml: Ticket | None = None
        self._take(reply)

    @property
    def session(self) -> Session:
        return self._about.session

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(map(Kind, self._about.kinds))

    @property
    def cut_bytes(self) -> int:
        return self._about.cut_bytes

    def part(self, window: Window) -> Trace:
        if self.held and not self.cut_bytes:
            return self  # The worker already has it in memory.
        file = msgspec.structs.replace(self._file, part=window)
        return RemoteTrace(self._place, file, self._place.ask(Request(file, about=True)).reply())

    def ask(self, kinds: frozenset[Kind], columns: Sequence[str], window: Window | None) -> None:
        request = self._reading(kinds, columns, window)
        if kinds & self.kinds:
            self._asked = request, self._place.ask(request)

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        if not kinds & self.kinds:
            return concatenate([], columns)
        request = self._reading(kinds, columns, window)
        asked, self._asked = self._asked, None
        ticket = asked[1] if asked and asked[0] == request else self._place.ask(request)
        reply = ticket.reply()
        numbers = self._take(reply)
        assert reply.events is not None
        events = events_of(reply.events)
        if request.with_names and (reply.names or not len(events)):
            self._named.add(kinds)
        if progress is not None:
            progress(len(events), len(events))
        if "process" not in events.columns or (numbers == np.arange(len(numbers))).all():
            return events
        arrays = {name: getattr(events, name) for name in events.columns}
        return Events(arrays | {"process": numbers[events.process]})

    def _reading(
        self, kinds: frozenset[Kind], columns: Sequence[str], window: Window | None
    ) -> Request:
        named = "name" in columns and kinds not in self._named
        ordered = tuple(sorted(int(kind) for kind in kinds))
        return Request(self._file, False, ordered, tuple(columns), window, with_names=named)

    def _take(self, reply: Reply) -> Column:
        """Store the metadata of an answer; return our number of each of the worker's processes."""
        known = {process: number for number, process in enumerate(self.processes)}
        for process in reply.processes:
            if process not in known:
                known[process] = len(self.processes)
                self.processes.append(process)
        numbers = [known[process] for process in reply.processes]
        self._recorded |= zip(numbers, reply.recorded, strict=False)
        for device in reply.devices:
            device = changed(device, process=numbers[device.process])
            self._devices[device.process, device.device] = device
        self._names |= {id: sys.intern(text) for id, text in reply.names.items()}
        self._hear(reply.told, again=reply.again)
        return np.array(numbers, np.int64)

    def recorded(self, process: int) -> Sequence[Window]:
        return entry.windows if (entry := self._recorded.get(process)) is not None else ()

    def calls_recorded(self, process: int) -> Sequence[Window] | None:
        return entry.calls if (entry := self._recorded.get(process)) is not None else None

    def _hear(self, told: Told, again: bool) -> None:
        """Add reported problems; for a file that was opened again, only new ones."""
        quality = self.quality
        news = ((quality.warnings, told.warnings), (quality.notes, told.notes))
        for ours, theirs in news:
            ours += [text for text in theirs if not (again and text in ours)]
        quality.left_out += [file for file in told.left_out if file not in quality.left_out]
        for reason, where, rows in told.dropped:
            quality.drop(reason, rows, where)

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        wanted = [int(id) for id in ids]
        if lacking := tuple(id for id in wanted if id not in self._names):
            self._take(self._place.ask(Request(self._file, names=lacking)).reply())
        return {id: self._names[id] for id in wanted}

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        wanted = tuple(int(id) for id in ids)
        if all(id in self._names for id in wanted):
            return super().search(wanted, pattern)
        request = Request(self._file, names=wanted, pattern=pattern.pattern, flags=pattern.flags)
        reply = self._place.ask(request).reply()
        self._take(reply)
        return reply.names

    def device(self, process: int, device: int) -> Device:
        if (process, device) not in self._devices:
            asked = Request(self._file, device=(self.processes[process], device))
            (answer,) = self._place.ask(asked).reply().devices
            self._devices[process, device] = changed(answer, process=process)
        return self._devices[process, device]

    def send(self, work: Work) -> Ticket:
        """Submit operations on the file's shard."""
        return self._place.ask(Request(self._file, work=work))

    def receive(self, ticket: Ticket) -> bytes | None:
        """Return the encoded result; None if the shard was not in the expected state."""
        reply = ticket.reply()
        self._take(reply)
        return None if reply.lost else reply.found

    def learn(
        self, devices: Mapping[tuple[Process, int], Device], names: Mapping[int, str]
    ) -> None:
        """Store devices and names, so that they need not be requested."""
        for (process, ordinal), device in devices.items():
            number = self.processes.index(process)
            self._devices[number, ordinal] = changed(device, process=number)
        self._names |= {id: sys.intern(text) for id, text in names.items()}

    def ask_nvml(self) -> None:
        if "_nvml" not in self.__dict__ and self._asked_nvml is None:
            self._asked_nvml = self._place.ask(Request(self._file, nvml=True))

    def read_nvml(self) -> Nvml:
        return self._nvml

    @cached_property
    def _nvml(self) -> Nvml:
        self.ask_nvml()
        assert self._asked_nvml is not None
        reply, self._asked_nvml = self._asked_nvml.reply(), None
        self._take(reply)
        return nvml_of(reply)

    def close(self) -> None:
        """Do nothing: the worker closes the file at the end of the run."""
