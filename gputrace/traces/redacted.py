"""A trace whose names of hosts, users, paths and programs are replaced."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.traces.events import Column, Events, Kind
from gputrace.traces.exported import REDACTED
from gputrace.traces.nvml.model import Nvml
from gputrace.traces.redaction import Redaction, redaction_of
from gputrace.traces.trace import Device, NoGpu, Progress, Session, Trace, Window

_NAME: Final = Path("redacted")


class RedactedTrace(Trace):
    """Another trace with other names; who closes that is its owner."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(_NAME)
        self._trace = trace
        self.source, self.origin = trace.source, trace.origin
        self._redaction = (
            Redaction() if trace.tables is None else redaction_of(trace.tables.database)
        )
        self._learn()
        if trace.no_gpu is not None:
            self.no_gpu = NoGpu(*map(self._redaction.text, trace.no_gpu))
        self.quality.notes.append(REDACTED)
        self._told = 0, 0

    def _learn(self) -> None:
        hosts = {process.host_name for process in self._trace.processes}
        programs = {process.name for process in self._trace.processes}
        self._redaction.learn("host", filter(None, hosts | self._trace.session.hosts))
        self._redaction.learn("program", filter(None, programs))
        self._redaction.learn_from(map(str, self._trace.paths))

    @property
    def session(self) -> Session:
        session = self._trace.session
        hosts = frozenset(self._redaction.stand_in("host", host) for host in session.hosts)
        return replace(session, hosts=hosts, job="")

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._trace.kinds

    @cached_property
    def _kernels(self) -> frozenset[int]:
        """Ids of names that are kept: those of kernels."""
        names = self._trace.events([Kind.KERNEL], ["name"]).name
        return frozenset(np.unique(names).tolist())

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        return self._shown(self._trace.names(ids))

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        return self._shown(self._trace.search(ids, pattern))

    def _shown(self, texts: dict[int, str]) -> dict[int, str]:
        kept, redacted = self._kernels, self._redaction.text
        return {id: text if id in kept else redacted(text) for id, text in texts.items()}

    def device(self, process: int, device: int) -> Device:
        found = self._trace.device(process, device)
        return replace(found, uuid=self._redaction.text(found.uuid))

    def recorded(self, process: int) -> Sequence[Window]:
        return self._trace.recorded(process)

    def calls_recorded(self, process: int) -> Sequence[Window] | None:
        return self._trace.calls_recorded(process)

    def read_nvml(self) -> Nvml:
        found, redacted = self._trace.nvml, self._redaction.text
        cards = (
            replace(card, uuid=redacted(card.uuid), pci=redacted(card.pci)) for card in found.cards
        )
        return replace(found, cards=tuple(cards))

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        events = self._trace.read(kinds, columns, window, progress)
        self._take_over()
        return events

    def _take_over(self) -> None:
        """Makes the processes and what is wrong with the trace ours, as far as it is known."""
        theirs, ours = self._trace.quality, self.quality
        if len(self._trace.processes) > len(self.processes):
            self._learn()
        for process in self._trace.processes[len(self.processes) :]:
            program = self._redaction.stand_in("program", process.name)
            host = self._redaction.stand_in("host", process.host_name)
            self.processes.append(replace(process, name=program, host_name=host))
        warnings, notes = self._told
        ours.warnings += map(self._redaction.text, theirs.warnings[warnings:])
        ours.notes += map(self._redaction.text, theirs.notes[notes:])
        self._told = len(theirs.warnings), len(theirs.notes)
        for reason, rows in theirs.dropped.items():
            ours.drop(reason, rows)

    def close(self) -> None:
        pass
