"""Neighbours of a run: other programs on its cards and cores, and by how much they slow kernels.

Processes with a context on one card take turns of about 2 ms, in which the others' kernels stand
still; under MPS, kernels of all run at once. A kernel that is slowed is known by how long the same
launch takes in other steps: in those without a neighbour, else in the usual one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, edges_of
from gputrace.analyzers.ledger.causes import Host
from gputrace.analyzers.load_balance import number_launches
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.model.events import Kind, number_ids
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, number_windows, union
from gputrace.model.nvml import ProcessUse
from gputrace.model.options import Window
from gputrace.model.results import Step
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

_COMPUTES: Final = 0.02
"""Minimum part of the time in which a process's kernels run for it to count as computing."""
_KNOWN_PART: Final = 0.5
"""Part of that time for which their use must be known to be said: one that ends is forgotten."""
_FEWEST_LAUNCHES: Final = 3
_SLOWED_RATIO: Final = 1.5
_TURN_NS: Final = 200_000
"""Without steps in which no neighbour computes: ratio and nanoseconds to the usual length from
which a launch was slowed; and the minimum of a wait for a turn. A turn takes a millisecond or two.
"""
USE_MARGIN: Final = 1.25
"""How far beyond a neighbour's time on the card the time that it costs may be."""


class Program(Struct, frozen=True):
    """Program beside a run; ``use`` is its part of a card, or the cores that it uses."""

    pid: int | None
    name: str
    use: float | None
    sharing: str = ""
    numa_node: int | None = None
    memory_bytes: int | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, [f"pid {self.pid}" if self.pid else "", self.name]))


class CardNeighbours(Struct, frozen=True, eq=False):
    """Other processes that compute on the card of a GPU of the run."""

    gpu: Gpu
    programs: tuple[Program, ...]
    """Programs, by use in falling order; none if they cannot be told from the run's own."""
    times: Intervals
    """When any of them computes."""
    use: float | None
    """Mean part of the card's time that they use then; None if the driver does not say."""
    steps: tuple[int, ...] = ()
    by_step: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Nanoseconds by which kernels were slowed in each of the measured steps."""

    @property
    def cost_ns(self) -> int:
        """Nanoseconds of a mean step by which kernels were slowed."""
        return int(self.by_step.sum()) // max(len(self.by_step), 1)

    @property
    def is_mps(self) -> bool:
        return any(program.sharing == "MPS" for program in self.programs)

    def __str__(self) -> str:
        """Describe them, as the subject and the verb of a sentence."""
        if not self.programs:
            return f"another process computes on GPU {self.gpu.gpu}"
        several = len(self.programs) > 1
        who = "; ".join(filter(None, map(str, self.programs[:3])))
        subject = "other processes" if several else "another process"
        subject += f" ({who})" if who else ""
        if self.use is None:
            return f"{subject} compute{'s' * (not several)} on GPU {self.gpu.gpu}"
        return f"{subject} use{'s' * (not several)} {self.use:.0%} of GPU {self.gpu.gpu}"


class _OfRun(Struct, frozen=True):
    """Test whether a process is one of the run."""

    recorded: frozenset[tuple[int, int]]

    def __call__(self, use: ProcessUse) -> bool:
        return use.is_recorded or (use.host, use.pid) in self.recorded


def _of_run(trace: Trace) -> _OfRun:
    return _OfRun(frozenset((process.host, process.pid) for process in trace.processes))


def hides_processes(trace: Trace, gpu: Gpu) -> bool:
    """Return whether the driver was asked which processes use a card, and lists none of the run."""
    uses = [use for use in trace.nvml.processes if (use.host, use.gpu) == (gpu.host, gpu.gpu)]
    return bool(uses) and not any(map(_of_run(trace), uses))


def meet_on_card(trace: Trace, gpu: Gpu, window: Window, own: int = 1) -> CardNeighbours | None:
    """Return who else computes within a window on a card of which ``own`` processes of the run have
    a part, as far as the driver lists processes; None if nobody.
    """
    uses = [use for use in trace.nvml.processes if (use.host, use.gpu) == (gpu.host, gpu.gpu)]
    if not gpu.gpu_known or not uses:
        return None
    is_ours = _of_run(trace)
    # Processes of other instances have their own part of the card.
    instances = {use.sharing for use in uses if is_ours(use) and use.sharing.startswith("MIG")}
    others = [use for use in uses if use.pid is not None and not is_ours(use)]
    others = [
        use
        for use in others
        if use.time_ns > window.start and use.time_ns - use.duration_ns < window.end
    ]
    if instances:
        others = [use for use in others if use.sharing in instances]
    if not any(map(is_ours, uses)):
        # The ids are of another namespace: some of these processes are the run's.
        listed = Counter(use.time_ns for use in others)
        others = [use for use in others if listed[use.time_ns] > own]
        ends, lengths = (
            np.array([(u.time_ns, u.duration_ns) for u in others], np.int64).reshape(-1, 2).T
        )
        times = union(ends - lengths, ends)
        return CardNeighbours(gpu, (), times, None) if len(times) else None
    active = [use for use in others if use.use is None or use.use >= _COMPUTES]
    if not active:
        return None
    ends, lengths = np.array([(use.time_ns, use.duration_ns) for use in active], np.int64).T
    times = union(ends - lengths, ends)
    known_rows = [(use.time_ns, use.duration_ns) for use in active if use.use is not None]
    known_ends, known_lengths = np.array(known_rows, np.int64).reshape(-1, 2).T
    known_ns = union(known_ends - known_lengths, known_ends).total
    programs = programs_of(active, known_ns)
    used = sum(program.use or 0.0 for program in programs)
    is_known = known_ns >= _KNOWN_PART * times.total
    return CardNeighbours(gpu, programs, times, min(used, 1.0) if is_known else None)


def programs_of(uses: Sequence[ProcessUse], total_ns: int) -> tuple[Program, ...]:
    """Return the programs of some rows, those that use most first; ``use`` is their mean in some
    nanoseconds.
    """
    by_program: dict[tuple[int | None, str], list[ProcessUse]] = defaultdict(list)
    for use in uses:
        by_program[use.pid, use.name].append(use)
    programs = []
    for (pid, name), rows in by_program.items():
        known = [row.use * row.duration_ns for row in rows if row.use is not None]
        mean = sum(known) / max(total_ns, 1) if known else None
        last = rows[-1]
        programs.append(Program(pid, name, mean, last.sharing, last.numa_node, last.memory_bytes))
    return tuple(sorted(programs, key=lambda program: -(program.use or 0.0)))


def find_card_neighbours(gpus: PerGpu, steps: Sequence[Step]) -> tuple[CardNeighbours, ...]:
    """Return the neighbours on each card that has any, with what they cost in the given steps."""
    operations, steps_of = gpus.operations, StepsOf(steps)
    own = Counter((summary.gpu.host, summary.gpu.gpu) for summary in operations)
    met = {}
    for summary in operations:
        gpu, edges = summary.gpu, edges_of(steps_of(summary.gpu))
        window = Window(edges[0].min(), edges[1].max()) if edges.size else summary.span
        neighbours = meet_on_card(gpus.trace, gpu, window, own[gpu.host, gpu.gpu])
        if neighbours is not None:
            met[gpu] = neighbours
    with_any = [summary for summary in operations if summary.gpu in met]
    steps_each = [edges_of(steps_of(summary.gpu)) for summary in with_any]
    times = [met[summary.gpu].times for summary in with_any]
    slowed = gpus.each(_slowed_by_step, with_any, steps_each, times) if with_any else []
    found = []
    for summary, edge, by_step in zip(with_any, steps_each, slowed, strict=True):
        gpu, neighbours = summary.gpu, met[summary.gpu]
        most = neighbours.times.within(*edge) * USE_MARGIN * (neighbours.use or 1.0)
        if by_step.sum() > most.sum():
            by_step = (by_step * (most.sum() / max(by_step.sum(), 1))).astype(np.int64)
        numbers = tuple(step.step for step in steps_of(gpu))
        found.append(
            CardNeighbours(
                gpu, neighbours.programs, neighbours.times, neighbours.use, numbers, by_step
            )
        )
    return tuple(found)


def _slowed_by_step(view: GpuShardView, steps: Times, times: Intervals) -> NDArray[np.int64]:
    """Return the nanoseconds by which kernels of a GPU were slowed in some time, by step."""
    operations, count = view.operations, steps.shape[1]
    kernels = operations.classes == OperationClass.COMPUTE
    rows = np.flatnonzero(kernels & (operations.events.kind == Kind.KERNEL))
    step = number_windows(operations.start, *steps)[rows]
    rows, step = rows[step >= 0], step[step >= 0]
    if not len(rows):
        return np.zeros(count, np.int64)
    names = number_ids(operations.events.name[rows])[1].astype(np.int64)
    order, places = number_launches(step, names)
    rows, step, names = rows[order], step[order], names[order]
    _, launch = np.unique(names << 32 | places, return_inverse=True)
    start, lengths = operations.start[rows], operations.end[rows] - operations.start[rows]
    meanwhile = times.within(start, operations.end[rows]) > 0
    usual, often = _usual(launch, lengths, int(launch.max()) + 1)
    # Where the launches of steps are not equal, one may be at the place of another.
    longest = np.zeros(int(names.max()) + 1)
    np.maximum.at(longest, names, usual[launch])
    is_slowed = (lengths >= _SLOWED_RATIO * longest[names]) & (often > _FEWEST_LAUNCHES)[launch]
    more = np.where(is_slowed, lengths - usual[launch], 0)
    more[more < _TURN_NS] = 0
    if not meanwhile.all():
        alone, often = _usual(launch[~meanwhile], lengths[~meanwhile], len(usual))
        is_known = (often >= _FEWEST_LAUNCHES)[launch]
        more = np.where(is_known, lengths - alone[launch], more)
    slowed = np.bincount(step[meanwhile], more[meanwhile], count)
    return (slowed if slowed.sum() > 0 else np.zeros(count)).astype(np.int64)


def _usual(
    launch: NDArray[np.intp], lengths: Times, count: int
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return the median length of each of some launches, and how often it is there."""
    counts = np.bincount(launch, minlength=count)
    order = np.lexsort((lengths, launch))
    middle = np.cumsum(counts) - counts + np.maximum(counts - 1, 0) // 2
    return lengths[order][np.minimum(middle, len(order) - 1)], counts


def claim_turns(host: Host) -> Intervals:
    """Prove waits of work that was launched while another process computes on the card: for a turn.

    Where as much of the time without a neighbour is such a wait, nothing is proven.
    """
    calls, operations = host.view.calls, host.view.operations
    names = [name for name in ("launch", "other_idle") if name in host.left]
    idle = EMPTY
    for name in names:
        idle = merge_touching(idle, host.left[name])
    if calls is None or not len(idle) or not host.view.trace.nvml.processes:
        return EMPTY
    neighbours = meet_on_card(host.view.trace, operations.gpu, host.window)
    if neighbours is None:
        return EMPTY
    issued_by = calls.issued_by(operations.events, host.ending_operations(idle))
    known = (issued_by != NOBODY) & (idle.lengths >= _TURN_NS)
    begin = np.maximum(idle.start, np.where(known, calls.end[issued_by], idle.end))
    waits = known & (idle.end - begin >= _TURN_NS)
    waiting = union(begin[waits], idle.end[waits])
    inside = waiting.intersection(neighbours.times)
    time = neighbours.times.clip(*host.window)
    outside = union([host.window.start], [host.window.end]).difference(time)
    rate = (waiting.total - inside.total) / max(outside.total, 1)
    return inside if inside.total > 2 * rate * time.total else EMPTY


def programs_on_cores(trace: Trace, host: int, time: Intervals) -> tuple[Program, ...]:
    """Return the other programs on the cores of a run's processes on a host in some time."""
    is_ours = _of_run(trace)
    uses = [
        use
        for use in trace.nvml.processes
        if use.gpu is None and use.host == host and use.duration_ns > 0 and not is_ours(use)
    ]
    if not uses:
        return ()
    ends, lengths = np.array([(use.time_ns, use.duration_ns) for use in uses], np.int64).T
    met = time.within(ends - lengths, ends) > 0
    # A look that began before that time counts whole, as its use is the mean of all of it.
    span = union(ends[met] - lengths[met], ends[met]).total
    return programs_of([use for use, inside in zip(uses, met, strict=True) if inside], span)
