"""Which call of the host issued an operation: read from around it, not from the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.host import NOBODY, HostCalls, read_calls
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.scene.scene import Scene, index_in
from gputrace.traces.events import Events, Kind
from gputrace.traces.trace import Trace, Window

_BEFORE_NS: Final = (1_000_000, 100_000_000)
"""How long before an operation its call is looked for, before the whole trace is read."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The call of the host that issued an operation."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    """By the number of the operating system."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A call among those around it."""

    calls: HostCalls
    call: int
    """Which of them."""
    launch: Launch

    @property
    def pair(self) -> tuple[int, int]:
        """Its (process index, thread), as the trace counts them."""
        return self.calls.threads[int(self.calls.thread[self.call])]


def find_issuer(
    trace: Trace, scene: Scene, own: GpuOperations, row: int, since: int
) -> Issued | None:
    """The call that issued an operation; None where the trace does not tell.

    The calls that it is found among are all that touch the time from ``since`` to the operation.
    """
    if Kind.API not in trace.kinds or own.events.correlation[row] <= 0:
        return None
    process = scene.processes[int(own.events.process[row])]
    for window in _windows(since, int(own.start[row])):
        calls = read_calls(trace, window=window)
        if calls is None:
            continue
        issued_by = int(calls.issued_by(_one(own, row, index_in(trace, process)))[0])
        if issued_by != NOBODY:
            return Issued(calls, issued_by, _launch(trace, calls, issued_by))
    return None


def _windows(since: int, started: int) -> Iterator[Window | None]:
    """Ever more of what was before an operation; at last, all."""
    for before in _BEFORE_NS:
        yield Window(min(since, started - before), started + 1)
    yield None


def _one(own: GpuOperations, row: int, process: int) -> Events:
    """An operation, of a process by the trace's count."""
    correlation = own.events.correlation[row : row + 1]
    return Events({"process": np.array([process]), "correlation": correlation})


def _launch(trace: Trace, calls: HostCalls, call: int) -> Launch:
    id = int(calls.name[call])
    thread = calls.threads[int(calls.thread[call])][1] & 0xFFFFFFFF
    return Launch(trace.names([id])[id], int(calls.start[call]), int(calls.end[call]), thread)
