"""Time of host threads on a core, queued for one, or neither; and who wants the cores.

The counters are the kernel's: ``/proc/*/task/*/schedstat`` (Documentation/scheduler/sched-stats),
``getrusage(2)``, ``cpu.stat`` of control groups and ``/proc/pressure/cpu``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import Shard
from gputrace.model.events import Events, Kind, Mask, distinct_ids
from gputrace.model.intervals import Intervals, union
from gputrace.model.results import HostLoad, Step

_WANTS_A_CORE: Final = 0.3
"""Share of the time that a thread is on a core or queued for one, to count as wanting one."""
_OF_STEPPING: Final = "process on core"
"""Counter that only the thread has that marks the steps."""


def read_counters(shard: Shard) -> Mapping[int, Counters]:
    """Read the counters of the host threads by process; none where none were recorded.

    Only processes whose steps were marked have some of the thread that marks them.
    """
    trace = shard.trace
    if Kind.COUNTER not in trace.kinds:
        return {}
    columns = ("start", "end", "name", "process", "thread", "bytes")
    events = trace.events([Kind.COUNTER], columns)
    names = trace.names(distinct_ids(events.name))
    stepping = np.isin(events.name, [id for id, text in names.items() if text == _OF_STEPPING])
    found = {}
    for process in distinct_ids(events.process[stepping]).tolist():
        own = events.process == process
        threads, count = np.unique(events.thread[own & stepping], return_counts=True)
        found[process] = Counters(events.select(own), names, int(threads[np.argmax(count)]))
    return found


class Counters:
    """Counters of the process of a rank.

    Args:
        events: of the process, with their values in ``bytes``.
        names: texts of the names.
        thread: that marks the steps.
    """

    def __init__(self, events: Events, names: Mapping[int, str], thread: int) -> None:
        self._names, self._of_thread = names, events.thread == thread
        self._events = events

    def load_in(self, time: Intervals, rank: int, steps: int) -> HostLoad | None:
        """Return the load in the steps of the rank; None where nothing was counted in them."""
        events = self._events
        inside = time.contains((events.start + events.end) // 2)
        of_step = inside & self._of_thread & (self._is("on core") | self._is("queued"))
        covered = union(events.start[of_step], events.end[of_step]).total
        if not covered:
            return None
        mine = inside & self._of_thread
        on_core, queued = (self._sum(mine, name) for name in ("on core", "queued"))
        others = self._others(inside & ~self._of_thread)
        wanting = [(on_core + queued) / covered, *others.sum(axis=1).tolist()]
        wanting = [share for share in wanting if share >= _WANTS_A_CORE]
        starved = [own for own in others.tolist() if sum(own) >= _WANTS_A_CORE]
        quota = self._usual(inside, "quota")
        scanned = self._length(inside & self._is("cores"))
        return HostLoad(
            rank,
            steps,
            covered_ns=covered,
            on_core_ns=on_core,
            queued_ns=queued,
            blocked_ns=max(0, covered - on_core - queued),
            others_queued=max([waiting for _, waiting in starved], default=0.0),
            process_cores=self._sum(mine, "process on core") / covered,
            threads=len(wanting),
            wanted_cores=float(sum(wanting)),
            cores=int(self._usual(inside, "cores") or 0),
            quota_cores=None if quota is None else quota / 1000,
            runnable=self._usual(inside, "runnable"),
            throttled=self._sum(inside, "throttled") / scanned if scanned else 0.0,
            pressure=self._sum(inside, "pressure") / scanned if scanned else 0.0,
            minor_faults=self._sum(mine, "minor faults"),
            major_faults=self._sum(mine, "major faults"),
            preemptions=self._sum(mine, "preemptions"),
        )

    def _is(self, name: str) -> Mask:
        ids = [id for id, text in self._names.items() if text == name]
        return np.isin(self._events.name, ids)

    def _sum(self, rows: Mask, name: str) -> int:
        return int(self._events.bytes[rows & self._is(name)].sum())

    def _usual(self, rows: Mask, name: str) -> float | None:
        values = self._events.bytes[rows & self._is(name)]
        return float(np.mean(values)) if len(values) else None

    def _length(self, rows: Mask) -> int:
        return union(self._events.start[rows], self._events.end[rows]).total

    def _others(self, rows: Mask) -> NDArray[np.float64]:
        """Return the shares of the scanned time in which each other thread was on a core, and
        queued: shape (threads, 2).
        """
        scanned = self._length(rows & self._is("on core")) or 1
        threads, row = np.unique(self._events.thread[rows], return_inverse=True)
        values = self._events.bytes[rows]
        shares = [
            np.bincount(row, values * self._is(name)[rows], len(threads)) / scanned
            for name in ("on core", "queued")
        ]
        return np.stack(shares, axis=-1)


def measure_load(
    counters: Mapping[int, Counters], processes: Mapping[int, int], steps: Sequence[Step]
) -> tuple[HostLoad, ...]:
    """Return the load of each rank's host in the measured steps.

    Args:
        counters: by process.
        processes: of each rank.
        steps: on all GPUs.
    """
    found = []
    for rank, process in sorted(processes.items()):
        spans = {step.step: (step.start_ns, step.end_ns) for step in steps if step.rank == rank}
        if process not in counters or not spans:
            continue
        starts, ends = np.array(list(spans.values()), np.int64).reshape(-1, 2).T
        load = counters[process].load_in(union(starts, ends), rank, len(spans))
        found += [] if load is None else [load]
    return tuple(found)
