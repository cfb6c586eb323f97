"""Traces of `gputrace record`: SQLite tables as nsys exports them, and some of our own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final, Self

from msgspec.structs import replace

from gputrace.model.attempts import Life, choose_attempt, of_other_attempts
from gputrace.model.events import COPY_KINDS, UNKNOWN, Events, Kind, is_among
from gputrace.model.options import Window
from gputrace.model.trace import FROM_THE_START, Coverage, NoGpu, Quality
from gputrace.readers import graph_nodes
from gputrace.readers import nsys_schema as schema
from gputrace.readers.nsys import GRAPHS, NsysTrace
from gputrace.store.sqlite_page_scan import Rows
from gputrace.store.sqlite_reader import Database, Selection

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
        self._graphs = graph_nodes.read_graph_nodes(
            database, self._process_index, schema.KIND_OF["CUPTI_ACTIVITY_KIND_MEMCPY"]
        )
        if not self._graphs:
            return
        sql = (
            f"SELECT globalPid, graphId, count(*) FROM {graph_nodes.REPLAYS} "
            "WHERE typeof(globalPid) = 'integer' GROUP BY globalPid, graphId"
        )
        counts = {(self._process_index(p >> 24), g): n for p, g, n in database.query(sql)}
        self._graphs = graph_nodes.that_fit(self._graphs, counts)
        self._tables = [
            replace(table, kinds=(Kind.GRAPH, *_NODES))
            if table.name == graph_nodes.REPLAYS
            else table
            for table in self._tables
        ]
        self.quality.notes += filter(None, [graph_nodes.describe(self._graphs, counts)])

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
        """Read the rows of the attempt that is covered."""
        if not self._left_out:
            return self._read_every(table, wanted, rows, quality)
        columns = list(dict.fromkeys([*wanted.columns, "process"]))
        events = self._read_every(table, replace(wanted, columns=columns), rows, quality)
        covered = ~is_among(events.process, self._left_out)
        return events.select(covered).having(*wanted.columns)

    def _read_every(
        self, table: schema.Table, wanted: Selection, rows: Rows, quality: Quality | None
    ) -> Events:
        """Read rows; replays of graphs whose nodes are known elsewhere are rows of their nodes."""
        if table.name != graph_nodes.REPLAYS or not self._graphs:
            return super()._read_table(table, wanted, rows, quality)
        columns = dict.fromkeys([*wanted.columns, "start", "end", "kind", "process", "name"])
        every = replace(wanted, kinds=frozenset(table.kinds), columns=list(columns))
        replays = super()._read_table(table, every, rows, quality)
        events = graph_nodes.with_nodes(replays, self._graphs, GRAPHS, every.columns)
        chosen = is_among(events.kind, wanted.kinds)
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
        return sorted(chain.from_iterable(self._windows(graph_nodes.STRETCHES).values()))

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
