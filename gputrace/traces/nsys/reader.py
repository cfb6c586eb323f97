"""nsys SQLite exports as a `Trace`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.traces.arrow import Integers
from gputrace.traces.broken import drop_broken
from gputrace.traces.columns import Rows, read_integers, stretches
from gputrace.traces.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Memory,
    concatenate,
)
from gputrace.traces.exported import read_notes
from gputrace.traces.ids import number_ids
from gputrace.traces.nsys.devices import DeviceMap
from gputrace.traces.nsys.names import Names, plain
from gputrace.traces.nsys.queries import build_query
from gputrace.traces.nsys.schema import KIND_OF, MEMORY_OF, TABLES, Table
from gputrace.traces.nsys.session import NOBODY, Member, read_members, read_session
from gputrace.traces.nsys.tables import nsys_tables
from gputrace.traces.nsys.zones import Zones, find_zones, joined_zones
from gputrace.traces.nvml.model import Nvml
from gputrace.traces.nvml.tables import read_nvml
from gputrace.traces.quality import Quality
from gputrace.traces.sqlite import Database, quoted
from gputrace.traces.tables import Tables
from gputrace.traces.trace import Device, NoGpu, Process, Progress, Session, Trace, Window


def is_nsys(database: Database) -> bool:
    """Whether the tables are those of an nsys export, with or without GPU activity.

    nvprof's tables have some of the same names, and an ``_id_`` each.
    """
    return any(
        database.has(table.name, "start") and not database.has(table.name, "_id_")
        for table in TABLES
    ) or (
        database.has("StringIds", "id", "value")
        and any(name.startswith(("TARGET_INFO_", "META_DATA_")) for name in database.tables)
    )


class NsysTrace(Trace):
    """One nsys SQLite export; may hold several processes and GPUs."""

    source = "nsys"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path)
        self._database = database
        self._names = Names(database)
        self._process_keys: dict[int, int] = {}
        self._zones: dict[str, Zones | None] = {}
        self._tables = [table for table in TABLES if _usable(database, table)]
        self.quality.notes += read_notes(database)
        if not any(self.has_rows(table) for table in self._tables if table.kinds[0] in GPU_KINDS):
            self.no_gpu = self._without_gpu()

    def _without_gpu(self) -> NoGpu:
        """Why nothing was recorded of a GPU; raises InputError where nothing else can be told."""
        raise InputError(self.path, _nothing_on_gpu(self))

    @property
    def tables(self) -> Tables:
        return nsys_tables(self._database)

    def on(self, database: Database) -> Self:
        part = copy(self)
        part._database = database
        part.processes, part._process_keys = list(self.processes), dict(self._process_keys)
        part._zones = {}
        part._names = Names(database)  # Some go by row.
        return part

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(kind for table in self._tables for kind in table.kinds)

    def has_rows(self, table: Table) -> bool:
        sql = f"SELECT 1 FROM {quoted(table.name)} LIMIT 1"
        return next(self._database.query(sql), None) is not None

    def close(self) -> None:
        self._database.close()

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        return self._names.texts(ids)

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        return self._names.matching(ids, pattern)

    def device(self, process: int, device: int) -> Device:
        return Device(process, device, *self._devices.find(self.processes[process].pid, device))

    @cached_property
    def _devices(self) -> DeviceMap:
        return DeviceMap(self._database)

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        parts = [
            self._read_table(table, kinds, columns, window, progress)
            for table in self._tables
            if kinds & set(table.kinds)
        ]
        return concatenate(parts, columns)

    def read_parts(
        self, kinds: frozenset[Kind], columns: Sequence[str], progress: Progress | None
    ) -> Iterator[Events]:
        for table in self._tables:
            if kinds & set(table.kinds):
                yield from self._read_in_parts(table, kinds, columns, progress)

    def _read_in_parts(
        self,
        table: Table,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        progress: Progress | None,
    ) -> Iterator[Events]:
        zones: list[Zones | None] = []
        dropped: Counter[str] = Counter()
        for rows in stretches(self._database, table.name):
            quality = Quality()
            yield self._read_rows(table, kinds, columns, None, rows, quality, progress)
            zones.append(self._zones[table.name])
            dropped.update(quality.dropped)
        self._zones[table.name] = joined_zones(zones)
        for reason, count in dropped.items():
            self.quality.drop(reason, count, table.name)

    def _read_table(
        self,
        table: Table,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        zones = None if window is None else self._zones.get(table.name)
        rows = zones.rows(window) if zones and window else None
        return self._read_rows(table, kinds, columns, window, rows, self.quality, progress)

    def _read_rows(
        self,
        table: Table,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        rows: Rows,
        quality: Quality,
        progress: Progress | None,
    ) -> Events:
        """What touches a window, of all rows of a table or of those with some rowids."""
        partial = not kinds >= set(table.kinds)
        needed = dict.fromkeys([*columns, "start", "end", *(["kind"] if partial else [])])
        query = build_query(self._database, table, needed, window)
        raw = read_integers(self._database, query, progress, rows)
        if window is None:
            bounds = (rows[0], rows[1] - 1) if rows else self._database.row_bounds(table.name)
            self._zones[table.name] = find_zones(raw["start"], raw["end"], bounds)
        if table.name == "NVTX_EVENTS" and "name" in raw:
            raw["name"] = self._names.numbered(raw["name"])
        arrays = {name: self._translate(table, name, raw) for name in needed}
        events = drop_broken(Events(arrays), quality, table.name)
        if partial:
            events = events.select(np.isin(events.kind, sorted(kinds)))
        return Events({name: getattr(events, name) for name in columns})

    def _translate(self, table: Table, column: str, raw: dict[str, Integers]) -> Column:
        """An event column from what was read."""
        rows = len(raw["start"])
        if column == "kind":
            if table.name not in KIND_OF:
                return np.full(rows, table.kinds[0], np.int8)
            return _lookup(KIND_OF[table.name], raw, "kind", rows, table.kinds[-1])
        if column in ("source_memory", "destination_memory"):
            return _lookup(MEMORY_OF, raw, column, rows, Memory.UNKNOWN)
        if column == "thread" and "thread" in table.columns and "process" in raw:
            return raw["process"] & 0xFFFFFF
        if column not in raw:
            empty = 0 if column == "process" else UNKNOWN
            if column == "process" and rows and not self.processes:
                self._process_index(0)
            return np.full(rows, empty, COLUMN_TYPES[column])
        if column == "process":
            return self._process_column(raw["process"])
        return raw[column]

    def _process_column(self, global_ids: Integers) -> NDArray[np.int16]:
        distinct, where = number_ids(global_ids >> 24)
        indices = np.array([self._process_index(key) for key in distinct.tolist()], np.int16)
        found: NDArray[np.int16] = indices.take(where)
        return found

    def _process_index(self, key: int) -> int:
        if key not in self._process_keys:
            self._process_keys[key] = len(self.processes)
            pid = key & 0xFFFFFF
            member, name = self._members.get(key, NOBODY), self._process_names.get(pid, "")
            self.processes.append(Process(pid, key >> 24, member.rank, name, member.host))
        return self._process_keys[key]

    @property
    def session(self) -> Session:
        return read_session(self._database)

    def read_nvml(self) -> Nvml:
        return read_nvml(self._database, self.session.epoch_ns)

    @cached_property
    def _members(self) -> dict[int, Member]:
        return read_members(self._database)

    @cached_property
    def _process_names(self) -> dict[int, str]:
        if not self._database.has("PROCESSES", "pid", "name"):
            return {}
        return {
            pid: plain(name)
            for pid, name in self._database.query("SELECT pid, name FROM PROCESSES")
        }


def _usable(database: Database, table: Table) -> bool:
    required = ["start"] if table.name == "NVTX_EVENTS" else ["start", *table.columns["end"]]
    if table.where:
        required.append("eventType")
    return database.has(table.name, *required)


def _lookup(
    known: Mapping[int, int],
    raw: dict[str, Integers],
    column: str,
    rows: int,
    default: int,
) -> NDArray[np.int8]:
    """Numbers of nsys turned into ours; unknown ones and NULL give the default."""
    if column not in raw:
        return np.full(rows, default, np.int8)
    values = np.full(max(known) + 2, default, np.int8)
    for number, meaning in known.items():
        values[number] = meaning
    numbers = raw[column]
    return values[np.where((numbers < 0) | (numbers > max(known)), max(known) + 1, numbers)]


def _nothing_on_gpu(trace: NsysTrace) -> str:
    if trace.kinds:
        return "no GPU activity in this nsys export, only the host's; record with nsys -t cuda"
    return "an nsys export without CUDA tables; record with nsys -t cuda"
