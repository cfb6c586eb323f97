"""State of a GPU's host meanwhile: phase of the step, garbage collection, compilation, no core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.step_phases import PhaseTimes, read_phases_of
from gputrace.model.events import Events, Kind, distinct_ids
from gputrace.model.intervals import EMPTY, Intervals, union
from gputrace.model.step_phases import OTHER, PHASES
from gputrace.model.trace import Trace
from gputrace.units import format_ns

_WORTH_TELLING: Final = 0.05
"""Part of a gap from which a collection or a compilation is told."""
_QUEUED: Final = 0.2
"""Part of the counted time for which a thread must be queued for that to be told."""
_AROUND: Final = 5
"""Times as long as a gap that what was counted may be: longer, it says nothing of the gap."""


@dataclass(frozen=True)
class HostState:
    """Recorded state of the hosts of a trace.

    Attributes:
        phases: of each process in which some were recorded.
        collections: when each process collected garbage.
        compilations: when each process compiled a part of its program.
        queued: time for which threads were queued for a core, in ``bytes``, from look to look.
    """

    phases: Mapping[int, PhaseTimes]
    collections: Mapping[int, Intervals]
    compilations: Mapping[int, Intervals]
    queued: Events

    def during(self, thread: tuple[int, int], start: int, end: int) -> Iterator[str]:
        """Yield what is known of a thread, by its process and its number, as clauses."""
        process, number = thread
        phases = self.phases.get(process)
        if phases is not None:
            spent = {name: own.clip(start, end).total for name, own in phases.of.items()}
            most = max(spent, key=lambda name: spent[name])
            if most != OTHER and 2 * spent[most] > end - start:
                yield f"in {PHASES[most]}"
        of_processes = {"garbage collection": self.collections, "compilation": self.compilations}
        for what, of_process in of_processes.items():
            took = of_process.get(process, EMPTY).clip(start, end).total
            if took >= _WORTH_TELLING * (end - start):
                yield f"{what} {format_ns(took)}"
        own = self.queued
        own = own.select((own.process == process) & (own.thread == number))
        own = own.select((own.end > start) & (own.start < end))
        around, waited = union(own.start, own.end).total, int(own.bytes.sum())
        if 0 < around <= _AROUND * (end - start) and waited >= _QUEUED * around:
            yield f"queued for a core {format_ns(waited)} of the {format_ns(around)} around it"


def read_host_state(shard: Shard) -> HostState:
    """Read the state of a shard's hosts."""
    return read_state_of(shard.trace)


def read_state_of(trace: Trace) -> HostState:
    """Read the state of a trace's hosts; empty where none was recorded."""
    columns = ("start", "end", "process", "thread", "name", "bytes")
    counted = trace.events({Kind.COUNTER} & trace.kinds, columns)
    names = trace.names(distinct_ids(counted.name))
    queued = np.isin(counted.name, [id for id, text in names.items() if text == "queued"])
    return HostState(
        read_phases_of(trace),
        _by_process(trace, Kind.COLLECTION),
        _by_process(trace, Kind.COMPILATION),
        counted.select(queued),
    )


def _by_process(trace: Trace, kind: Kind) -> Mapping[int, Intervals]:
    events = trace.events({kind} & trace.kinds, ("start", "end", "process"))
    found = {}
    for process in distinct_ids(events.process).tolist():
        own = events.process == process
        found[process] = union(events.start[own], events.end[own])
    return found
