"""State of the hosts: how their threads got processor time, and what they did in a gap.

The counters are the kernel's: ``/proc/*/task/*/schedstat`` (Documentation/scheduler/sched-stats),
``getrusage(2)``, ``cpu.stat`` of control groups and ``/proc/pressure/cpu``; and those of torch's
allocator (``torch.cuda.memory_stats``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.grouping import StepsOf, median, time_of, times_by_process
from gputrace.analyzers.python_samples import read_locks
from gputrace.analyzers.step_phases import PhaseTimes, read_phases
from gputrace.model.events import Events, Kind, Mask, distinct_ids, is_among
from gputrace.model.host import OTHER, PHASES, Allocator, HostLoad
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.results import Step, Throughput
from gputrace.model.struct import Struct
from gputrace.units import format_ns

_WORTH_TELLING: Final = 0.05
"""Minimum part of a gap for a collection or a compilation to be reported."""
_QUEUED_PART: Final = 0.2
"""Minimum part of the counted time that a thread is queued, to be reported."""
_COUNTED_LENGTHS: Final = 5
"""Times as long as a gap that what was counted may be: longer, it says nothing of the gap."""


class HostState(Struct, frozen=True, dict=True):
    """Recorded state of the hosts of a trace.

    Attributes:
        phases: of each process in which some were recorded.
        collections: when each process collected garbage.
        compilations: when each process compiled a part of its program.
        anomaly_modes: processes in which autograd looked for anomalies.
        queued: time for which threads were queued for a core, in ``bytes``, from look to look.
        locks: when main threads waited for Python's lock, from a sample on, and the thread that
            had it; ``holders`` are the lines that it was at, by name.
    """

    phases: Mapping[int, PhaseTimes]
    collections: Mapping[int, Intervals]
    compilations: Mapping[int, Intervals]
    anomaly_modes: frozenset[int]
    queued: Events
    locks: Events
    holders: Mapping[int, str]

    def during(self, thread: tuple[int, int], start: int, end: int) -> Iterator[str]:
        """Yield what is known of a thread, by its process and its number, as clauses."""
        process, number = thread
        phases = self.phases.get(process)
        if phases is not None:
            spent = {name: times.clip(start, end).total for name, times in phases.of.items()}
            most = max(spent, key=lambda name: spent[name])
            if most != OTHER and 2 * spent[most] > end - start:
                yield f"in {PHASES[most]}"
        of_processes = {"garbage collection": self.collections, "compilation": self.compilations}
        for what, of_process in of_processes.items():
            took = of_process[process].clip(start, end).total if process in of_process else 0
            if took >= _WORTH_TELLING * (end - start):
                yield f"{what} {format_ns(took)}"
        # What a thread waits for: Python's lock, a core.
        held, queued = self.locks, self.queued
        if len(held):
            mine = (held.process == process) & (held.thread != number)
            rows = _overlapping(held, mine, start, end)
            took = union(held.start[rows], held.end[rows]).clip(start, end).total
            if len(rows) and took >= _WORTH_TELLING * (end - start):
                line = self.holders[int(held.name[rows[np.argmax((held.end - held.start)[rows])]])]
                at = f", at {PurePath(line).name}" if line else ""
                yield f"waits for Python's lock, which another thread holds{at}"
        if len(queued):
            mine = (queued.process == process) & (queued.thread == number)
            rows = _overlapping(queued, mine, start, end)
            around = union(queued.start[rows], queued.end[rows]).total
            waited = int(queued.bytes[rows].sum())
            known = 0 < around <= _COUNTED_LENGTHS * (end - start)
            if known and waited >= _QUEUED_PART * around:
                yield f"queued for a core {format_ns(waited)} of the {format_ns(around)} around it"


def _overlapping(events: Events, mine: Mask, start: int, end: int) -> NDArray[np.intp]:
    return np.flatnonzero(mine & (events.end > start) & (events.start < end))


def read_host_state(shard: Shard) -> HostState:
    """Read the state of a shard's hosts; empty where none was recorded."""
    trace = shard.trace
    times = ("start", "end", "process")
    counted = trace.events({Kind.COUNTER} & trace.kinds, (*times, "thread", "name", "bytes"))
    names = trace.names(distinct_ids(counted.name))

    def named(name: str) -> Mask:
        return is_among(counted.name, [id for id, text in names.items() if text == name])

    return HostState(
        shard.once(read_phases),
        times_by_process(trace.events({Kind.COLLECTION} & trace.kinds, times)),
        times_by_process(trace.events({Kind.COMPILATION} & trace.kinds, times)),
        frozenset(counted.process[named("anomaly mode")].tolist()),
        counted.select(named("queued")),
        *(read_locks(trace) if len(counted) else (counted, {})),
    )


_WANTS_A_CORE: Final = 0.3
"""Share of the time that a thread is on a core or queued for one, to count as wanting one."""
_OPENMP: Final = ("libiomp5", "libomp", "libgomp")
_NEVER_WAITS: Final = 0.9
"""Share of the time that a thread is on a core or queued for one, to be said never to wait."""
_TEAM_TIME_RATIO: Final = 1.5
"""Maximum ratio of the times on a core of threads of a team."""
_WITHIN_PHASE: Final = 0.9
"""Part of the time in which a peak of memory was reached that is in one phase, for it to count."""
_MOST_REQUESTS: Final = 5
_WORK: Final = {
    "samples": ("samples", 1),
    "tokens": ("tokens", 1),
    "MFLOP": ("flop", 10**6),
    "FLOP": ("flop", 1),
}
"""Counters of a step's work, by name: what they count, and their unit. A counter has 48 bits, too
few for FLOPs."""
FAULT_NS: Final = 500
"""Least time of a page fault: 0.5 to 1 µs to map and clear 4 KiB (Linux 6 on shared cores)."""
_OF_STEPPING: Final = "process on core"
"""Counter that only the thread which marks the steps has."""


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
    stepping = is_among(events.name, [id for id, text in names.items() if text == _OF_STEPPING])
    by_process = {}
    for process in distinct_ids(events.process[stepping]).tolist():
        mine = events.process == process
        threads, count = np.unique(events.thread[mine & stepping], return_counts=True)
        by_process[process] = Counters(events.select(mine), names, int(threads[np.argmax(count)]))
    return by_process


def read_work(shard: Shard) -> Mapping[int, Mapping[str, float]]:
    """Read the samples, tokens and FLOPs of a mean step by process, as the program gave them.

    Steps that were given none, such as those of an evaluation, count as steps.
    """
    trace = shard.trace
    if Kind.COUNTER not in trace.kinds:
        return {}
    events = trace.events([Kind.COUNTER, Kind.STEP], ("kind", "name", "process", "bytes"))
    steps, events = (events.select(events.kind == kind) for kind in (Kind.STEP, Kind.COUNTER))
    names = trace.names(distinct_ids(events.name))
    work: dict[int, defaultdict[str, float]] = {}
    for number, (name, scale) in ((id, _WORK[text]) for id, text in names.items() if text in _WORK):
        counted = events.select(events.name == number)
        for process in distinct_ids(counted.process).tolist():
            given = counted.bytes[counted.process == process]
            count = int(np.count_nonzero(steps.process == process))
            of_process = work.setdefault(process, defaultdict(float))
            of_process[name] += scale * float(given.sum()) / max(count, len(given))
    return work


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
        counted = self._is("on core") | self._is("queued")
        of_step = inside & self._of_thread & counted
        covered = union(events.start[of_step], events.end[of_step]).total
        if not covered:
            return None
        mine = inside & self._of_thread
        on_core, queued = (self._sum(mine, name) for name in ("on core", "queued"))
        # Each scan notes the cores, but of other threads only what is worth a millisecond.
        elsewhere = inside & ~self._of_thread
        scanned = self._length(inside & self._is("cores")) or self._length(elsewhere & counted)
        others = self._others(elsewhere, scanned)
        wanted = np.append((on_core + queued) / covered, others.sum(axis=1))
        wants = wanted >= _WANTS_A_CORE
        quota = self._usual(inside, "quota")
        clock = self._usual(inside, "core kHz")
        fastest = self._most(events.end > 0, "core kHz")
        openmp, team = self._team(on_core / covered, queued / covered, others)
        return HostLoad(
            rank,
            steps,
            covered_ns=covered,
            on_core_ns=on_core,
            queued_ns=queued,
            blocked_ns=max(0, covered - on_core - queued),
            others_queued=float(others[wants[1:], 1].max(initial=0.0)),
            process_cores=self._sum(mine, "process on core") / covered,
            threads=int(np.count_nonzero(wants)),
            wanted_cores=float(sum(wanted[wants].tolist())),
            # Of a short run, they were noted once, at its first step.
            cores=int(self._usual(inside, "cores") or self._usual(events.end > 0, "cores") or 0),
            quota_cores=None if quota is None else quota / 1000,
            runnable=self._usual(inside, "runnable"),
            openmp=openmp if team else None,
            spinning=len(team),
            at_once=float(np.prod(team)) if team else 0.0,
            throttled=self._sum(inside, "throttled") / scanned if scanned else 0.0,
            pressure=self._sum(inside, "pressure") / scanned if scanned else 0.0,
            core_mhz=None if clock is None else round(clock / 1000, 1),
            fastest_mhz=None if clock is None else round(fastest / 1000, 1),
            minor_faults=self._sum(mine, "minor faults"),
            major_faults=self._sum(mine, "major faults"),
            preemptions=self._sum(mine, "preemptions"),
        )

    def queued_in(self, time: Intervals) -> int:
        """Return the least nanoseconds of some time for which the thread that marks steps is
        queued: of a look that is partly in it, what the rest of the look has no room for.
        """
        rows = self._events.select(self._of_thread & self._is("queued"))
        inside, unknown = time.within(rows.start, rows.end), np.zeros(len(rows))
        outside = rows.end - rows.start - inside
        return int(least_queued(rows.bytes, unknown, inside, outside, unknown).sum())

    def queued_more(self, slow: Times, others: Times) -> int:
        """Return the least nanoseconds by which the thread that marks steps is queued for longer in
        slow steps than in as much of other ones; 0 where the looks are too far apart to tell.

        A look may count more than a slow step. `least_queued` says what of it must be in one, if
        the thread has a core for as long as usual in the other steps.

        Args:
            slow, others: starts and ends of the steps: shape (2, steps).
        """
        events, on_core, queued = self._events, self._is("on core"), self._is("queued")
        counted = self._of_thread & (on_core | queued)
        starts, first = np.unique(events.start[counted], return_index=True)
        ends = events.end[counted][first]
        look = np.searchsorted(starts, events.start)
        had, waited = (
            np.bincount(look[rows], events.bytes[rows], len(starts))
            for rows in (counted & on_core, counted & queued)
        )
        lengths, inside = ends - starts, union(*slow).within(starts, ends)
        outside = union(*others).within(starts, ends)
        # What another step is longer than usual, it may be queued.
        usual = np.minimum(others[1], others[0] + int(median(others[1] - others[0])))
        expected = union(others[0], usual).within(starts, ends)
        alone = (outside == lengths) & (inside == 0) & (expected > 0)
        if not alone.any():
            return 0
        often = min(1.0, had[alone].sum() / expected[alone].sum())
        least = least_queued(waited, had, inside, lengths - inside, often * expected)
        measured = inside + outside >= lengths
        rest = (waited - least)[measured].sum() / (lengths - inside)[measured].sum()
        return max(0, int(least.sum() - rest * union(*slow).total))

    def _team(
        self, on_core: float, queued: float, others: NDArray[np.float64]
    ) -> tuple[str, list[float]]:
        """Return OpenMP's library, and the shares of the time in which its threads that never wait
        have a core; none without a library, or where only the thread that marks steps is so.

        Args:
            on_core, queued: shares of the thread that marks steps.
            others: of the other threads, shape (threads, 2).
        """
        loaded = [name for name in _OPENMP if self._is(name).any()]
        alike = (others[:, 0] >= on_core / _TEAM_TIME_RATIO) & (
            others[:, 0] <= on_core * _TEAM_TIME_RATIO
        )
        team = others[alike & (others.sum(axis=1) >= _NEVER_WAITS), 0].tolist()
        if not loaded or not team or on_core + queued < _NEVER_WAITS:
            return "", []
        return loaded[0], [on_core, *team]

    def allocator_in(
        self, time: Intervals, rank: int, steps: int, phases: PhaseTimes | None
    ) -> Allocator | None:
        """Return torch's allocator in the steps of the rank; None where it was not read in them."""
        inside = time.contains((self._events.start + self._events.end) // 2)
        if not self._sum(inside, "memory reserved"):
            return None
        segments = self._sum(inside, "segments")
        emptied = inside & self._is("cache emptied")
        before = self._events.start < time.end.max()
        peak, phase = self._peak(before & self._is("memory peak"), phases)
        sizes, counts = np.unique(
            self._events.bytes[inside & self._is("segment request")], return_counts=True
        )
        requests = tuple(sizes[np.argsort(-counts, kind="stable")][:_MOST_REQUESTS].tolist())
        return Allocator(
            rank,
            steps,
            retries=self._sum(inside, "allocation retries"),
            segments=segments,
            segment_bytes=self._sum(inside, "segment bytes") // max(segments, 1),
            segments_freed=self._sum(inside, "segments freed"),
            request_bytes=requests,
            emptied=int(emptied.sum()),
            emptying_ns=self._length(emptied) // max(steps, 1),
            allocated_bytes=self._most(inside, "memory allocated"),
            reserved_bytes=self._most(inside, "memory reserved"),
            split_bytes=self._most(inside, "memory split"),
            peak_bytes=peak,
            peak_phase=phase,
        )

    def _peak(self, rows: Mask, phases: PhaseTimes | None) -> tuple[int | None, str | None]:
        """Return the largest peak of some rows, and the phase in which the time for which it may
        have been reached lies.
        """
        peaks = self._events.select(rows)
        if not len(peaks):
            return None, None
        last = int(np.argmax(peaks.bytes))
        reached = union(peaks.start[[last]], peaks.end[[last]])
        if phases is None:
            return int(peaks.bytes[last]), None
        shares = dict(zip(PHASES, (phases.within(reached) / max(reached.total, 1)), strict=True))
        most = max(shares, key=lambda name: shares[name])
        return int(peaks.bytes[last]), most if shares[most] >= _WITHIN_PHASE else None

    def held(self, names: Iterable[str], time: Intervals) -> dict[str, tuple[int, int]]:
        """Return the first and last value that was read in some time, by name."""
        inside, held = time.contains(self._events.end), dict[str, tuple[int, int]]()
        for name in names:
            rows = np.flatnonzero(inside & self._is(name))
            if len(rows) > 1:
                rows = rows[np.argsort(self._events.end[rows], kind="stable")[[0, -1]]]
                first, last = self._events.bytes[rows].tolist()
                held[name] = first, last
        return held

    def _most(self, rows: Mask, name: str) -> int:
        return int(self._events.bytes[rows & self._is(name)].max(initial=0))

    def _is(self, name: str) -> Mask:
        ids = [id for id, text in self._names.items() if text == name]
        return is_among(self._events.name, ids)

    def _sum(self, rows: Mask, name: str) -> int:
        return int(self._events.bytes[rows & self._is(name)].sum())

    def _usual(self, rows: Mask, name: str) -> float | None:
        values = self._events.bytes[rows & self._is(name)]
        return float(np.mean(values)) if len(values) else None

    def _length(self, rows: Mask) -> int:
        return union(self._events.start[rows], self._events.end[rows]).total

    def _others(self, rows: Mask, scanned: int) -> NDArray[np.float64]:
        """Return the shares of the scanned nanoseconds in which each other thread was on a core,
        and queued: shape (threads, 2).
        """
        threads, row = np.unique(self._events.thread[rows], return_inverse=True)
        values = self._events.bytes[rows]
        shares = [
            np.bincount(row, values * self._is(name)[rows], len(threads)) / max(scanned, 1)
            for name in ("on core", "queued")
        ]
        return np.stack(shares, axis=-1)


def least_queued(
    queued: NDArray[Any], on_core: NDArray[Any], inside: Times, outside: Times, busy: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the least nanoseconds of each look for which its thread was queued inside of a time.

    Args:
        queued, on_core: nanoseconds for which the thread was so in each look.
        inside, outside: nanoseconds of the look in the time, and of the rest of it.
        busy: nanoseconds of that rest for which the thread is on a core, unless it is so for less.
    """
    least: NDArray[np.float64] = queued - (outside - np.minimum(on_core, busy))
    return least.clip(0, inside)


def measure_throughput(
    work: Mapping[int, Mapping[str, float]],
    flop: Mapping[int, float],
    processes: Mapping[int, int],
    steps: Sequence[Step],
    unrecorded: float = 1.0,
) -> tuple[Throughput, ...]:
    """Return samples and tokens of each rank, by step and, in the measured steps, by second.

    Seconds are those of the program without the recorder, as far as its cost is known.

    ``work`` is that of `read_work`, and ``flop`` that of a mean step by rank, by shapes of
    operators; ``unrecorded`` is the length of an unrecorded step as a fraction of a recorded one.
    """
    rows, steps_of = [], StepsOf(steps)
    for rank, process in sorted(processes.items()):
        mine = steps_of.of_rank(rank)
        if (process in work or rank in flop) and mine:
            counted = work.get(process, {})
            total = sum(step.end_ns - step.start_ns for step in mine)
            rate = len(mine) * 1e9 / (total * unrecorded)
            figures: dict[str, Any] = {}
            for name in ("samples", "tokens", "flop"):
                number = counted.get(name, flop.get(rank) if name == "flop" else None)
                figures[f"{name}_per_step"] = number
                figures[f"{name}_per_s"] = None if number is None else round(number * rate, 3)
            told_by = "program" if "flop" in counted else "shapes" if rank in flop else None
            rows.append(Throughput(rank, **figures, flop_source=told_by))
    return tuple(rows)


def measure_load(
    counters: Mapping[int, Counters], processes: Mapping[int, int], steps: Sequence[Step]
) -> tuple[HostLoad, ...]:
    """Return the load of each rank's host in the measured steps.

    ``counters`` are by process, and ``processes`` by rank.
    """
    loads = (
        counted.load_in(time, rank, count)
        for rank, _, counted, time, count in _counted(counters, processes, steps)
    )
    return tuple(load for load in loads if load is not None)


def measure_allocators(
    counters: Mapping[int, Counters],
    processes: Mapping[int, int],
    steps: Sequence[Step],
    phases: Mapping[int, PhaseTimes],
) -> tuple[Allocator, ...]:
    """Return torch's allocator of each rank in the measured steps; see `measure_load`."""
    allocators = (
        counted.allocator_in(time, rank, count, phases.get(process))
        for rank, process, counted, time, count in _counted(counters, processes, steps)
    )
    return tuple(allocator for allocator in allocators if allocator is not None)


def _counted(
    counters: Mapping[int, Counters], processes: Mapping[int, int], steps: Sequence[Step]
) -> Iterator[tuple[int, int, Counters, Intervals, int]]:
    """Yield each rank that has counters and steps, its process, these, and the steps' time and
    number.
    """
    steps_of = StepsOf(steps)
    for rank, process in sorted(processes.items()):
        mine = steps_of.of_rank(rank)
        if process in counters and mine:
            yield rank, process, counters[process], time_of(mine), len(mine)
