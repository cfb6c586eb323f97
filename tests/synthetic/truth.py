"""The truth of a recording, found by plain sweeps and by what the simulator knows. Times are ns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.synthetic.recording import (
    CAUSES,
    CLASSES,
    GAPS,
    Ints,
    Kind,
    Partition,
    Recording,
    State,
    Table,
    Truth,
    Unit,
    Window,
)

IDLE = CLASSES.index("idle")
COMMUNICATION = CLASSES.index("communication")
CLASS_OF = {
    Kind.KERNEL: 0, Kind.GRAPH: 0, Kind.COMMUNICATION: 1, Kind.PEER: 1, Kind.H2D: 2, Kind.D2H: 3,
    Kind.MEMSET: 4,
}  # fmt: skip


def windows_of(recording: Recording, units: Sequence[Sequence[Unit]]) -> list[Window]:
    """Every step and phase of each rank, by what its first GPU does."""
    windows: list[Window] = []
    for process, of_rank in zip(recording.processes, units, strict=True):
        ops = ops_of(recording.ops, process.devices[0][1])
        starts = _starts(ops, of_rank)
        ends = [*starts[1:], int(ops["end"].max())]
        for index, (unit, start, end) in enumerate(zip(of_rank, starts, ends, strict=True)):
            steady = "warmup" if unit.step < recording.plan.warmup_steps else "steady"
            phase = steady if unit.phase == "step" else unit.phase
            at = (process.rank, unit.step, phase, start, end)
            windows.append(Window(*at, whole=True, unit=index))
    return windows


def _starts(ops: Table, units: Sequence[Unit]) -> list[int]:
    """Where each unit's window starts: with the gap before its first operation, if there is one.

    What the host still did for the phase before it (writing a file) stays with that phase.
    """
    first = np.full(len(units), len(ops))
    np.minimum.at(first, ops["unit"], np.arange(len(ops)))
    done = np.maximum.accumulate(ops["end"])
    starts: list[int] = []
    for index, row in enumerate(first):
        start = int(ops["start"][row])
        before = int(done[row - 1]) if row else start
        through = units[index - 1].host_end if index else 0
        starts.append(min(start, max(before, through)))
    return starts


def truth_of(recording: Recording, windows: Sequence[Window]) -> Truth:
    """Partition each GPU's span, and explain its gaps."""
    partitions, breakdown, gaps = {}, {}, {}
    for process in recording.processes:
        mine = [w for w in windows if w.rank == process.rank]
        steady = [w for w in mine if w.phase == "steady" and w.whole]
        for _, gpu in process.devices:
            ops = ops_of(recording.ops, gpu)
            partitions[gpu] = _partition(ops)
            gaps[gpu] = Gaps(recording, process.rank, ops, partitions[gpu]).listed()
            padded = _padded(partitions[gpu], mine)
            causes = Gaps(recording, process.rank, ops, padded)
            breakdown[gpu] = _breakdown(recording, padded, causes, steady)
    return Truth(tuple(windows), partitions, breakdown, gaps)


def ops_of(ops: Table, gpu: int) -> Table:
    """Return what one GPU does, peer copies from other GPUs included."""
    mine: Table = ops[(ops["gpu"] == gpu) | (ops["peer"] == gpu)]
    return mine


def _partition(ops: Table) -> Partition:
    """Sweep over all edges; at each, the first class with anything under way."""
    classes = np.array([CLASS_OF[Kind(kind)] for kind in range(len(Kind))])[ops["kind"]]
    edges = _distinct(ops["start"], ops["end"])
    running = np.full(len(edges), IDLE)
    for index in reversed(range(IDLE)):
        mine = ops[classes == index]
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, mine["start"]), 1)
        np.add.at(change, np.searchsorted(edges, mine["end"]), -1)
        running[np.cumsum(change) > 0] = index
    running = running[:-1]
    keep = np.concatenate(([True], running[1:] != running[:-1]))
    return Partition(np.append(edges[:-1][keep], edges[-1]), running[keep])


def _padded(partition: Partition, windows: Sequence[Window]) -> Partition:
    """The partition, idle from the first window's start and to the last one's end."""
    early = windows[0].start < partition.edges[0]
    late = windows[-1].end > partition.edges[-1]
    edges, classes = partition.edges, partition.classes
    if early:
        edges, classes = np.insert(edges, 0, windows[0].start), np.insert(classes, 0, IDLE)
    if late:
        edges, classes = np.append(edges, windows[-1].end), np.append(classes, IDLE)
    return Partition(edges, classes)


def _distinct(*times: Ints) -> Ints:
    """All the times, sorted, each once."""
    ordered = np.sort(np.concatenate(times))
    once: Ints = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    return once


class _Cover:
    """Disjoint intervals, and how much of a stretch they cover (ns)."""

    def __init__(self, rows: Table, end: str = "end") -> None:
        self.starts, self.ns = rows["start"], rows[end] - rows["start"]
        self.sums = np.concatenate(([0], np.cumsum(self.ns)))

    def until(self, times: Ints) -> Ints:
        """How much lies before each time."""
        index = np.searchsorted(self.starts, times, side="right")
        if not len(self.starts):
            return np.zeros(len(times), np.int64)
        last = np.maximum(index - 1, 0)
        inside = np.clip(times - self.starts[last], 0, self.ns[last])
        covered: Ints = self.sums[last] + np.where(index > 0, inside, 0)
        return covered

    def within(self, starts: Ints, ends: Ints) -> Ints:
        return np.where(ends > starts, self.until(ends) - self.until(starts), 0)


class Gaps:
    """The gaps of one GPU and why they are, by what its feeding thread was at."""

    def __init__(self, recording: Recording, rank: int, ops: Table, partition: Partition) -> None:
        idle = partition.classes == IDLE
        self.start, self.end = partition.edges[:-1][idle], partition.edges[1:][idle]
        row = np.searchsorted(ops["start"], self.end)  # the operation that ends the gap
        none = row == len(ops)  # the GPU does no more: nothing is known
        row = np.minimum(row, len(ops) - 1)
        self.issue = np.where(none, self.start, ops["issue"][row])
        copies = ops[ops["kind"] == Kind.H2D]
        self.thread = copies["thread"][:1].repeat(len(row)) if len(copies) else ops["thread"][row]
        self.states = recording.states[recording.states["rank"] == rank]

    def causes(self, start: Ints, end: Ints, gap: Ints) -> dict[str, Ints]:
        """Nanoseconds by cause of parts of gaps, given by the index of their gap.

        The host's states count until it has issued what ends the gap.
        """
        waiting, thread = np.minimum(end, self.issue[gap]), self.thread[gap]
        found = {cause: np.zeros(len(start), np.int64) for cause in CAUSES}
        for one in np.unique(thread):
            mine, rows = thread == one, self.states[self.states["thread"] == one]
            for state, cause in zip(State, CAUSES, strict=False):
                cover = _Cover(rows[rows["state"] == state])
                found[cause][mine] = cover.within(start[mine], waiting[mine])
        rest = end - start - sum(found.values())
        late = self.issue[gap] > self.start[gap]
        return found | {"launch": np.where(late, rest, 0), "other_idle": np.where(late, 0, rest)}

    def listed(self) -> Table:
        """Each gap with the cause of most of it."""
        table = self.causes(self.start, self.end, np.arange(len(self.start)))
        rows = np.zeros(len(self.start), GAPS)
        rows["start"], rows["end"] = self.start, self.end
        rows["cause"] = np.argmax(np.stack([table[cause] for cause in CAUSES]), axis=0)
        return rows


def _breakdown(
    recording: Recording, partition: Partition, gaps: Gaps, windows: Sequence[Window]
) -> dict[str, int]:
    """Totals over some windows of one rank: classes, causes, and waiting in communication."""
    if not windows:
        return dict.fromkeys(("steps", "total", *CLASSES, *CAUSES, "communication_wait"), 0)
    start, end, classes = _inside(partition, windows)
    sums = {name: int((end - start)[classes == i].sum()) for i, name in enumerate(CLASSES)}
    idle = classes == IDLE
    gap = np.searchsorted(gaps.start, start[idle], side="right") - 1
    causes = gaps.causes(start[idle], end[idle], gap)
    joint = recording.collectives[recording.collectives["rank"] == windows[0].rank]
    exposed, waits = classes == COMMUNICATION, _Cover(joint, "arrived")
    data = recording.states[recording.states["state"] == State.DATA]
    data = data[data["rank"] == windows[0].rank]
    data = data[np.isin(data["unit"], [window.unit for window in windows])]
    return {
        "steps": len(windows),
        "total": sum(window.end - window.start for window in windows),
        **sums,
        **{cause: int(ns.sum()) for cause, ns in causes.items()},
        "communication_wait": int(waits.within(start[exposed], end[exposed]).sum()),
        "host_data": int((data["end"] - data["start"]).sum()),
    }


def _inside(partition: Partition, windows: Sequence[Window]) -> tuple[Ints, Ints, Ints]:
    """(starts, ends, classes) of the pieces of a partition that lie inside sorted windows."""
    low = np.array([window.start for window in windows])
    high = np.array([window.end for window in windows])
    edges = _distinct(partition.edges, low, high)
    edges = edges[(edges >= partition.edges[0]) & (edges <= partition.edges[-1])]
    start, end = edges[:-1], edges[1:]
    classes = partition.classes[np.searchsorted(partition.edges, start, side="right") - 1]
    window = np.searchsorted(low, start, side="right") - 1
    keep = (window >= 0) & (end <= high[window])
    return start[keep], end[keep], classes[keep]
