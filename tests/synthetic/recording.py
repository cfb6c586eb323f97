"""Recording of the simulator: tables of events (numpy structured arrays) and the truth."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tests.synthetic.plan import Plan

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]


class Kind(IntEnum):
    """Kinds of operations of a GPU."""

    KERNEL = 0
    COMMUNICATION = 1  # a kernel too
    H2D = 2
    D2H = 3
    PEER = 4
    MEMSET = 5
    GRAPH = 6


class State(IntEnum):
    """Kinds of activity of a host thread other than running Python or launching."""

    DATA = 0
    SYNC = 1
    ALLOC = 2


_WHEN = [("start", "i8"), ("end", "i8")]
_WHO = [("rank", "i4"), ("thread", "i4")]
_WHERE = [("device", "i4"), ("gpu", "i4"), ("stream", "i4"), ("correlation", "i8")]

# Times in ns. `device` is the CUDA ordinal in the process, `gpu` the physical index, `peer` the
# other GPU of a peer copy (else -1), `issue` when the API call that asked for it began,
# `unit` the index of the rank's unit (step or phase) it belongs to.
OP = np.dtype(
    [
        *_WHEN,
        ("issue", "i8"),
        *_WHO,
        *_WHERE,
        ("kind", "i1"),
        ("name", "i4"),
        ("bytes", "i8"),
        ("pageable", "i1"),
        ("peer", "i4"),
        ("unit", "i4"),
    ]
)
API = np.dtype([*_WHEN, *_WHO, ("correlation", "i8"), ("name", "i4")])
# `kind` is CUPTI's: 1 event, 2 stream wait event, 3 stream, 4 context.
SYNC = np.dtype([*_WHEN, *_WHO, *_WHERE, ("kind", "i1")])
OSRT = np.dtype([*_WHEN, *_WHO, ("name", "i4")])
# Ranges "step N" and "data" (domain 0), "ncclAllReduce" (domain 1).
NVTX = np.dtype([*_WHEN, *_WHO, ("name", "i4"), ("domain", "i1")])
STATES = np.dtype([*_WHEN, *_WHO, ("state", "i1"), ("unit", "i4")])
# One row a rank and collective; `arrived` is when the last rank had come.
COLLECTIVES = np.dtype([*_WHEN, ("rank", "i4"), ("arrived", "i8"), ("unit", "i4")])

GAPS = np.dtype([*_WHEN, ("cause", "i1")])


@dataclass(frozen=True)
class Unit:
    """A training step, or a validation or checkpoint phase, of one rank."""

    phase: str  # "step", "validation" or "checkpoint"
    step: int  # the step, or the one that the phase follows
    host_end: int = 0  # when the host was through with a phase (ns)


@dataclass(frozen=True)
class Process:
    """A training process: `devices` are its CUDA ordinals with their physical GPUs."""

    rank: int
    pid: int
    devices: tuple[tuple[int, int], ...]
    threads: tuple[tuple[int, str], ...]  # thread id and name


@dataclass(frozen=True)
class Window:
    """The GPU time (ns) of one step or phase of one rank."""

    rank: int
    step: int
    phase: str  # "warmup", "steady", "validation" or "checkpoint"
    start: int
    end: int
    whole: bool  # False where the edge of the trace cuts it
    unit: int  # what its rows carry in their column `unit`


@dataclass(frozen=True)
class Partition:
    """One GPU's time, every nanosecond in one class: `edges` has one entry more than `classes`."""

    edges: Ints
    classes: Ints  # indices into CLASSES

    def totals(self, start: int | None = None, end: int | None = None) -> dict[str, int]:
        """Nanoseconds by class inside [start, end), the whole span if not given."""
        low = self.edges[0] if start is None else start
        high = self.edges[-1] if end is None else end
        ns = np.diff(np.clip(self.edges, low, high))
        return {name: int(ns[self.classes == i].sum()) for i, name in enumerate(CLASSES)}


CLASSES = ("compute", "communication", "h2d", "other_copy", "memset", "idle")
CAUSES = ("data_feeding", "sync", "alloc", "launch", "other_idle")


@dataclass(frozen=True)
class Truth:
    """Planted truth. Keys of the mappings are physical GPUs, times are ns."""

    windows: tuple[Window, ...]
    partitions: dict[int, Partition]  # over the span of each GPU
    breakdown: dict[int, dict[str, int]]  # over the whole steady steps: CLASSES, CAUSES and more
    gaps: dict[int, Table]  # every gap of the span with its main cause, an index into CAUSES


@dataclass(frozen=True)
class Recording:
    """All events of a run, sorted by start, and the truth about it."""

    plan: Plan
    processes: tuple[Process, ...]
    names: tuple[str, ...]  # what the columns `name` point to
    ops: Table
    api: Table
    sync: Table
    osrt: Table
    nvtx: Table
    states: Table
    collectives: Table
    truth: Truth

    def of_kind(self, *kinds: Kind) -> Table:
        return self.ops[np.isin(self.ops["kind"], kinds)]

    @property
    def kernels(self) -> Table:
        return self.of_kind(Kind.KERNEL, Kind.COMMUNICATION)

    @property
    def copies(self) -> Table:
        return self.of_kind(Kind.H2D, Kind.D2H, Kind.PEER)

    @property
    def memsets(self) -> Table:
        return self.of_kind(Kind.MEMSET)

    @property
    def graphs(self) -> Table:
        return self.of_kind(Kind.GRAPH)
