"""Traces of `gputrace record`: SQLite tables as nsys exports them, and some of our own.

Of CUDA graphs, ``gputrace record --graph-nodes`` records the nodes in a few steps. A replay
elsewhere runs the same nodes, so it is given their medians, fitted to its length: if it is shorter,
as it mostly is since recording nodes delays each, pauses between the nodes are cut before the nodes
are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.model.attempts import Life, choose_attempt, of_other_attempts
from gputrace.model.events import (
    COLUMN_TYPES,
    COPY_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    concatenate,
    is_among,
)
from gputrace.model.intervals import union
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.trace import FROM_THE_START, Coverage, NoGpu, Quality, Selection
from gputrace.readers import nsys_schema as schema
from gputrace.readers.nsys import GRAPHS, NsysTrace
from gputrace.store.sqlite_page_scan import Rows
from gputrace.store.sqlite_reader import Database
from gputrace.units import format_count

STRETCHES: Final = "GPUTRACE_GRAPH_NODES"
REPLAYS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_MOST_ROWS: Final = 1 << 18
"""Nodes that are read; those of the first stretches."""
_LATEST_NS: Final = 1 << 62
_MOST_NODES: Final = 1 << 25
"""Nodes of all replays together, which are held in memory."""
_ORDINARY: Final = 2.0
"""Longest replay, in medians, of which the nodes count."""
_NODE: Final = ("kind", "name", "node", "device", "stream", "bytes")
"""Columns of the nodes that all replays share."""


class GraphNodes(Struct, frozen=True, dict=True):
    """Nodes of a graph in a replay, in order of kind, name and id, and where that is unknown of
    start: medians of some replays.
    """

    columns: Mapping[str, Column]
    """The `_NODE` columns."""
    busy: NDArray[np.float64]
    """Nanoseconds before each start (row 0) and end (row 1) in which any node runs."""
    paused: NDArray[np.float64]
    """Nanoseconds of pauses before each; with `busy`, the time since the start of the replay."""
    replays: int
    """Number of replays with nodes."""
    error: float | None
    """Largest part of a replay's work that was another node's than the medians say; None of one."""

    def fit(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the starts and ends of all nodes in some replays: shape (2, replays, nodes)."""
        busy, paused = float(self.busy.max()), float(self.paused.max())
        length = (end - start).astype(np.float64)
        longer = np.maximum(length / max(busy + paused, 1.0), 1.0)
        of_busy = np.where(length < busy, length / max(busy, 1.0), longer)
        of_pauses = np.clip((length - busy) / paused, 0, longer) if paused else longer
        offsets = (
            of_busy[:, None] * self.busy[:, None, :] + of_pauses[:, None] * self.paused[:, None, :]
        )
        return np.minimum(start[:, None] + np.rint(offsets).astype(np.int64), end[:, None])


Graph = tuple[int, int]
"""Process and id of a graph."""
_Call = tuple[int, int]
"""Process and correlation of a launch."""
_Replay = list[tuple[int, int, int, int, int, int, int, int]]
"""Kind, name, id, start, end, device, stream and bytes of each node."""


def read_graph_nodes(
    database: Database, process_index: Callable[[int], int], copy_kinds: Mapping[int, Kind]
) -> dict[Graph, GraphNodes]:
    """Return what is known of the graphs of a trace, by process and graph.

    Args:
        database: the trace.
        process_index: returns the index of a globalPid without its thread.
        copy_kinds: kinds by the number in ``copyKind``.
    """
    if not database.has(STRETCHES, "start") or not database.has(REPLAYS, "graphId"):
        return {}
    replays: dict[_Call, _Replay] = defaultdict(list)
    graphs: dict[_Call, set[int]] = defaultdict(set)
    known = f"start > 0 AND end >= start AND end < {_LATEST_NS} AND correlationId > 0"
    columns = ("globalPid", "correlationId", "graphId", "demangledName", "start", "end")
    where = f"{known} AND graphId > 0 LIMIT {_MOST_ROWS}"
    # Some recordings have no ids of nodes.
    has_id = database.has(_KERNELS, "graphNodeId")
    more = ("deviceId", "streamId", "graphNodeId" if has_id else "deviceId")
    rows = database.select(_KERNELS, *columns, *more, where=where)
    known_ids = ((*row[:8], UNKNOWN if not has_id or row[8] is None else row[8]) for row in rows)
    for process, call, graph, name, start, end, *place, node in filter(_are_whole, known_ids):
        key = process_index(process >> 24), call
        graphs[key].add(graph)
        replays[key].append((Kind.KERNEL, name, node, start, end, *place, UNKNOWN))
    launches = f"SELECT correlationId FROM {_KERNELS} WHERE graphId > 0"
    in_graphs = f"{known} AND correlationId IN ({launches})"
    copied = ("globalPid", "correlationId", "start", "end", "deviceId", "streamId", "bytes")
    for table, *kinds in (("MEMCPY", "copyKind"), ("MEMSET",)):
        rows = database.select(f"CUPTI_ACTIVITY_KIND_{table}", *copied, *kinds, where=in_graphs)
        for process, call, *node in filter(_are_whole, rows):
            of = copy_kinds.get(node.pop(), Kind.COPY_OTHER) if kinds else Kind.MEMSET
            if (key := (process_index(process >> 24), call)) in replays:
                replays[key].append((of, UNKNOWN, UNKNOWN, *node))
    by_graph: dict[Graph, list[_Replay]] = defaultdict(list)
    for key, ids in graphs.items():
        for graph in ids:
            by_graph[key[0], graph].append(sorted(replays[key]))
    return {graph: _medians(each) for graph, each in by_graph.items()}


def _are_whole(row: tuple[object, ...]) -> bool:
    return all(isinstance(value, int) for value in row)


def _medians(replays: Sequence[_Replay]) -> GraphNodes:
    """Return the nodes of a graph, from the replays that have what most have."""
    shapes = [tuple((kind, name) for kind, name, *_ in replay) for replay in replays]
    usual = Counter(shapes).most_common(1)[0][0]
    alike = [replay for replay, shape in zip(replays, shapes, strict=True) if shape == usual]
    rows = np.array(alike, np.int64)
    # A node whose end CUPTI did not know makes its replay many times as long.
    spans = rows[:, :, 4].max(axis=1) - rows[:, :, 3].min(axis=1)
    alike = rows[spans <= _ORDINARY * np.median(spans)]
    kind, name, node, start, end, device, stream, size = alike.transpose(2, 0, 1)
    work = np.maximum(end - start, 1)
    origin = start.min(axis=1, keepdims=True)
    times = np.stack([np.median(edge - origin, axis=0) for edge in (start, end)])
    whole = np.rint(times - times.min()).astype(np.int64)
    runs = union(*whole)
    busy = runs.within(np.zeros_like(whole), whole).astype(np.float64)
    share = np.median(work, axis=0)
    differs = np.abs(work / work.sum(axis=1, keepdims=True) - share / share.sum()).sum(axis=1) / 2
    shared = (column[0] for column in (kind, name, node, device, stream, size))
    columns = zip(_NODE, shared, strict=True)
    error = float(differs.max()) if len(alike) > 1 else None
    return GraphNodes(dict(columns), busy, whole - busy, len(alike), error)


def with_nodes(
    replays: Events, known: Mapping[Graph, GraphNodes], first_name: int, columns: Sequence[str]
) -> Events:
    """Return replays with known nodes as these nodes, and the others as they are.

    Args:
        replays: rows with ``process`` and ``name``.
        known: nodes by graph.
        first_name: the name of a replay is this minus the graph's id.
        columns: columns to return.
    """
    keys = replays.process.astype(np.int64) << 32 | (first_name - replays.name.astype(np.int64))
    parts, rest = [], np.ones(len(replays), np.bool_)
    for key in np.unique(keys).tolist():
        nodes = known.get((key >> 32, key & 0xFFFFFFFF))
        if nodes is None:
            continue
        mine = keys == key
        rest &= ~mine
        rows, count = replays.select(mine), len(nodes.columns["kind"])
        start, end = map(np.ravel, nodes.fit(rows.start, rows.end))
        of_nodes: dict[str, Column] = {"start": start, "end": end}
        for name in columns:  # One replay after the other.
            if name in nodes.columns:
                of_nodes[name] = np.tile(nodes.columns[name], len(rows))
            elif name in ("process", "correlation"):
                of_nodes[name] = np.repeat(getattr(rows, name), count)
            elif name not in of_nodes:
                of_nodes[name] = np.full(len(rows) * count, UNKNOWN, COLUMN_TYPES[name])
        parts.append(Events(of_nodes).having(*columns))
    others = replays.select(rest).having(*columns)
    return concatenate([others, *parts], columns)


def that_fit(
    known: Mapping[Graph, GraphNodes], replays: Mapping[Graph, int]
) -> dict[Graph, GraphNodes]:
    """Return the graphs whose replays have few enough nodes to hold, those with fewest first."""
    sizes = {graph: replays.get(graph, 0) * len(nodes.busy[0]) for graph, nodes in known.items()}
    order = sorted(sizes, key=sizes.__getitem__)
    held = np.cumsum([sizes[graph] for graph in order]) <= _MOST_NODES
    return {graph: known[graph] for graph, fits in zip(order, held.tolist(), strict=True) if fits}


def describe(known: Mapping[Graph, GraphNodes], replays: Mapping[Graph, int]) -> str:
    """Return a note on how many replays got their nodes from others, and how exact that is.

    ``replays`` are those recorded as a whole, by graph; the note is empty without any.
    """
    fitted = [graph for graph in known if replays.get(graph)]
    if not fitted:
        return ""
    count, graphs = sum(replays[graph] for graph in fitted), len(fitted)
    by = sum(known[graph].replays for graph in fitted)
    errors = [error for graph in fitted if (error := known[graph].error) is not None]
    exact = "from one replay each, so the error is unknown"
    if errors:
        exact = f"to {max(errors):.1%} of a replay's work, by the spread of these"
    return (
        f"what {count:,} replays of {format_count(graphs, 'CUDA graph')} ran is taken from "
        f"{by:,} recorded with their nodes, and fitted to each one's length: {exact}"
    )


_NODES: Final = (Kind.KERNEL, *COPY_KINDS, Kind.MEMSET)
"""Kinds of the nodes of CUDA graphs."""


def is_own(database: Database) -> bool:
    """Return True if gputrace wrote the file."""
    return database.has("GPUTRACE_META", "name", "value")


class OwnTrace(NsysTrace):
    """Trace of ``gputrace record``, with ranks, steps and data waits."""

    source = "gputrace"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path, database)
        self._known_windows: dict[tuple[str, str], dict[int, list[Window]]] = {}
        if database.has("GPUTRACE_LOSS", "records", "reason"):
            rows = database.query("SELECT reason, sum(records) FROM GPUTRACE_LOSS GROUP BY reason")
            for reason, count in rows:
                text = f"{count:,} records lost: {reason}" if count else reason
                self.quality.warnings.append(text)
        sql = "SELECT value FROM GPUTRACE_META WHERE name = 'slow_step'"
        self.quality.notes += [
            f"the stretch around a slow step: {why}" for (why,) in database.query(sql)
        ]
        self._lives = schema.read_lives(database)
        self._left_out: list[int] = []
        self.cover(choose_attempt(self._lives, None if self.cut is None else self.cut.end))
        self._graphs = read_graph_nodes(
            database, self._process_index, schema.KIND_OF["CUPTI_ACTIVITY_KIND_MEMCPY"]
        )
        if not self._graphs:
            return
        sql = (
            f"SELECT globalPid, graphId, count(*) FROM {REPLAYS} "
            "WHERE typeof(globalPid) = 'integer' GROUP BY globalPid, graphId"
        )
        counts = {(self._process_index(p >> 24), g): n for p, g, n in database.query(sql)}
        self._graphs = that_fit(self._graphs, counts)
        self._tables = [
            replace(table, kinds=(Kind.GRAPH, *_NODES)) if table.name == REPLAYS else table
            for table in self._tables
        ]
        self.quality.notes += filter(None, [describe(self._graphs, counts)])

    @property
    def _is_nsys_clock(self) -> bool:
        # `record --backend nsys` writes the version.
        return any(self._database.select("GPUTRACE_META", "value", where="name = 'nsys'"))

    def on(self, database: Database) -> Self:
        part = super().on(database)
        names = {int(id) for nodes in self._graphs.values() for id in nodes.columns["name"]}
        part._texts = self.names(names - {UNKNOWN})  # A slice may have no row of a node.
        return part

    @property
    def lives(self) -> Sequence[Life]:
        return self._lives

    def cover(self, attempt: int) -> None:
        super().cover(attempt)
        keys = sorted(of_other_attempts(self.lives, attempt))
        self._left_out = [self._process_index(key) for key in keys]

    def _read_table(
        self,
        table: schema.Table,
        wanted: Selection,
        rows: Rows = None,
        quality: Quality | None = None,
    ) -> Events:
        """Read the rows of the attempt that is covered; replays of graphs whose nodes are known
        elsewhere are rows of their nodes.
        """
        has_nodes = table.name == REPLAYS and bool(self._graphs)
        if not has_nodes and not self._left_out:
            return super()._read_table(table, wanted, rows, quality)
        needed, kinds = ["process"], wanted.kinds
        if has_nodes:
            needed, kinds = ["start", "end", "kind", "process", "name"], frozenset(table.kinds)
        columns = list(dict.fromkeys([*wanted.columns, *needed]))
        every = replace(wanted, kinds=kinds, columns=columns)
        events = super()._read_table(table, every, rows, quality)
        if has_nodes:
            events = with_nodes(events, self._graphs, GRAPHS, columns)
        chosen = ~is_among(events.process, self._left_out)
        if has_nodes:
            chosen &= is_among(events.kind, wanted.kinds)
            if (window := wanted.window) is not None:
                chosen &= (events.start < window.end) & (events.end >= window.start)
        return events.select(chosen).having(*wanted.columns)

    def coverage(self, process: int) -> Coverage:
        calls = self._windows("GPUTRACE_API_WINDOW").get(process)
        return Coverage(
            self._windows("GPUTRACE_WINDOW").get(process, ()),
            calls and [window for window in calls if window.start < window.end],
            self._windows("GPUTRACE_CONTROL").get(process, ()),
            self._windows("GPUTRACE_CONTROL", "idleCupti").get(process, ()),
        )

    def node_stretches(self) -> Sequence[Window]:
        return sorted(chain.from_iterable(self._windows(STRETCHES).values()))

    def _windows(self, table: str, flag: str = "") -> dict[int, list[Window]]:
        """Return the windows of each process in a table, or those with a flag, which may lack."""
        if (table, flag) in self._known_windows:
            return self._known_windows[table, flag]
        windows = self._known_windows[table, flag] = dict[int, list[Window]]()
        if flag and not self._database.has(table, flag):
            return windows
        columns, where = ("globalPid", "start", "end"), f"{flag or 1} ORDER BY start"
        rows = self._database.select(table, *columns, where=where)
        for process, start, end in rows:
            window = Window(start if start > 0 else FROM_THE_START, end)
            windows.setdefault(self._process_index(process >> 24), []).append(window)
        return windows

    def _without_gpu(self) -> NoGpu:
        database = self._database
        meta = dict(database.query("SELECT name, value FROM GPUTRACE_META"))
        if "unreached" in meta and "GPUTRACE_STEP" not in database.tables:
            why, _, remedy = meta["unreached"].partition("; ")
            return NoGpu(why, remedy)
        if "no_gpu" in meta and meta.get("driver") == "yes":
            why, _, remedy = meta["no_gpu"].partition("; ")
            return NoGpu(why, remedy or "see `gputrace doctor`")
        if meta.get("backend") == "host":
            lacking = meta.get("driver") == "no"
            why = "there was no NVIDIA driver" if lacking else "--backend host was asked for"
            return NoGpu(why, "record on a machine with an NVIDIA driver")
        for (note,) in database.select(
            "GPUTRACE_PROCESS", "note", where="note IS NOT NULL LIMIT 1"
        ):
            return NoGpu(str(note), "see `gputrace doctor`")
        why = "no process of the recorded program ran anything on a GPU"
        return NoGpu(why, "check that it is set to use one")
