"""Files of nvprof (.nvvp, .nvprof): one process each, on the machine's wall clock."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np

from gputrace.errors import InputError
from gputrace.model.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Memory,
    is_among,
)
from gputrace.model.impossible_times import CHECKED
from gputrace.model.names import demangle_all
from gputrace.model.options import Window
from gputrace.model.trace import Device, Process, Selection, Session, drop_invalid_rows
from gputrace.readers import nvprof_schema as schema
from gputrace.readers.gpu_clock_skew import moved
from gputrace.sanitize import bounded
from gputrace.store import sqlite_security
from gputrace.store.sqlite_page_scan import (
    Condition,
    Integers,
    Query,
    Rows,
    Value,
    map_in_threads,
    quote_identifier,
    within,
)
from gputrace.store.sqlite_reader import (
    Database,
    SqliteTables,
    SqliteTrace,
    read_integers,
    row_ranges,
    sqlite_error,
)

_ENDS: Final = ("source_device", "destination_device")
_ONLY_HOST: Final = "no GPU activity in this nvprof file, only the host's; record it again"
_NOTHING: Final = (
    "nvprof recorded no GPU activity in it: nothing ran on a GPU during the recording; see "
    "--profile-from-start and --profile-child-processes, and record it again"
)

_COUNTED: Final = ("METRIC", "METRIC_INSTANCE", "EVENT", "EVENT_INSTANCE", "PC_SAMPLING")
"""Tables of what is counted while a kernel runs alone."""
_BESIDE: Final = (Kind.RANGE, Kind.MARK, Kind.OVERHEAD)
_REPLAYED: Final = (
    "nvprof counted events in it (--metrics, --events, --analysis-metrics), for which it replays "
    "kernels, one at a time: it causes the GPUs' idle time; record without these options"
)
_SOME_KERNELS: Final = (
    "nvprof only counted events of some kernels (--metrics, --events, --kernels): when the GPUs "
    "were idle is unknown; record without these options"
)


def is_nvprof(database: Database) -> bool:
    """Return True for tables of nvprof, with or without GPU activity."""
    return database.has("StringTable", "_id_", "value") and any(
        name.startswith(schema.PREFIX) and "_id_" in columns
        for name, columns in database.tables.items()
    )


class NvprofTrace(SqliteTrace[schema.Table]):
    """One file of nvprof, of any version."""

    source = "nvprof"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path, database)
        self._demangled: dict[str, str] = {}
        for table in (*schema.TABLES, schema.MARKERS):
            required = [table.columns[name].strip('"') for name in table.required]
            if database.has(table.full_name, *required) and database.has_rows(table.full_name):
                self._tables = [*self._tables, table]
        if not self.kinds & set(GPU_KINDS):
            raise InputError(path, _ONLY_HOST if self._tables else _NOTHING)
        columns = {t.name: frozenset(database.tables[t.full_name]) for t in self._tables}
        self._late = measure_skew(database, columns)
        if self._late:
            self.quality.notes.append(moved(self._late))
        counted = (schema.PREFIX + table for table in _COUNTED)
        if any(table in database.tables and database.has_rows(table) for table in counted):
            others = (name for name in self.kinds if name not in (Kind.KERNEL, *_BESIDE))
            self.idle_unknown = _REPLAYED if any(others) else _SOME_KERNELS
            self.quality.notes.append(self.idle_unknown)
        self._epoch = first_moment(database, self._tables, self._late)
        self.processes.append(Process(schema.read_pid(database)))

    @property
    def tables(self) -> SqliteTables:
        return schema.nvprof_tables(self._database, self._epoch, self._late)

    @property
    def session(self) -> Session:
        uuids = frozenset(uuid for _, uuid in self._cards.values())
        return Session(self._epoch or None, cards=uuids - {""})

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        wanted = sorted({int(id) for id in ids})
        texts = self._database.texts("StringTable", "_id_", (id for id in wanted if id > 0))
        names = {id: bounded(str(value)) for id, value in texts.items()}
        self._demangled |= demangle_all(set(names.values()) - self._demangled.keys())
        text = {id: self._demangled[name] for id, name in names.items()}
        text |= {id: schema.fixed_name(id) for id in wanted if id < UNKNOWN}
        return {id: text.get(id, f"<name {id}>" if id > 0 else "(no name)") for id in wanted}

    def device(self, process: int, device: int) -> Device:
        return Device(process, device, UNKNOWN, *self._cards.get(device, ()))

    def _read_table(self, table: schema.Table, wanted: Selection) -> Events:
        shift = self._epoch + (self._late if table.on_gpu else 0)
        window = wanted.moved(shift).window
        more = CHECKED if Kind.KERNEL in table.kinds else ("start", "end", "kind")
        needed = dict.fromkeys([*more, *wanted.columns])
        raw = read_integers(self._database, self._query(table, needed, window), wanted.progress)
        if table is schema.MARKERS:
            raw = join_markers(raw, window)
        for edge in ("start", "end"):
            raw[edge][raw[edge] == 0] = UNKNOWN
        arrays = {name: self._translate(table, name, raw) for name in needed}
        events = drop_invalid_rows(Events(arrays), self.quality, table.name)
        if not wanted.kinds >= set(table.kinds):
            events = events.select(is_among(events.kind, wanted.kinds))
        shifted = {edge: getattr(events, edge) - shift for edge in ("start", "end")}
        events = Events({n: shifted.get(n, getattr(events, n)) for n in needed})
        return self._possible(events, table, self.quality).having(*wanted.columns)

    def _query(self, table: schema.Table, needed: Collection[str], window: Window | None) -> Query:
        """Build the query for some event columns, from the columns that are there."""
        wanted = {*needed, *table.required, *(_ENDS if "kind" in needed else ())}
        there = {}
        for column, expression in table.columns.items():
            read = schema.OBJECT_COLUMNS if "objectId" in expression else (expression.strip('"'),)
            if column in wanted and self._database.has(table.full_name, *read):
                there[column] = Value(expression) if "objectId" in expression else Value.of(*read)
        # Columns to translate are read whole, the rest in the contract's type.
        types = {**COLUMN_TYPES, **dict.fromkeys(("kind", "thread", "device"), np.int64)}
        types = {column: types.get(column, np.int64) for column in there}
        where: tuple[Condition, ...] = ()
        if window is not None and table is not schema.MARKERS:
            start, end = Value.of("start"), Value.of("end")
            where = Condition.below(start, window.end), Condition.at_least(end, window.start)
        return Query(table.full_name, there, types, where)

    def _translate(self, table: schema.Table, column: str, raw: Mapping[str, Integers]) -> Column:
        """Return an event column, given the columns read."""
        rows = len(raw["start"])
        if column == "process":
            return np.zeros(rows, np.int16)
        unknown = np.full(rows, UNKNOWN)
        if column == "kind" and len(table.kinds) == 1:
            return np.full(rows, table.kinds[0], np.int8)
        if column == "kind" and table is not schema.MARKERS:
            return schema.copy_kinds(*(raw.get(name, unknown) for name in ("kind", *_ENDS)))
        if column not in raw:
            memory = column in ("source_memory", "destination_memory")
            return np.full(rows, Memory.UNKNOWN if memory else UNKNOWN, COLUMN_TYPES[column])
        values = raw[column]
        if column in ("source_memory", "destination_memory"):
            return np.where((values < 0) | (values > max(Memory)), 0, values)
        if column == "name":
            return schema.name_ids(table, values)
        if column == "thread":
            return np.where(values == UNKNOWN, UNKNOWN, values & 0x7FFFFFFF)
        if column == "device" and table.kinds == (Kind.SYNC,):
            return self._devices_of(values)
        return values

    def _devices_of(self, contexts: Integers) -> Column:
        """Return the CUDA ordinal of the device that each context is on."""
        devices = np.full(len(contexts), UNKNOWN, np.int16)
        is_valid = (
            "typeof(contextId) = 'integer' AND typeof(deviceId) = 'integer' "
            "AND deviceId BETWEEN 0 AND 32767"
        )
        table, columns = f"{schema.PREFIX}CONTEXT", ("contextId", "deviceId")
        for context, device in dict(self._database.select(table, *columns, where=is_valid)).items():
            devices[contexts == context] = device
        return devices

    @cached_property
    def _cards(self) -> dict[int, tuple[str, str]]:
        """Name and UUID of each card by its CUDA ordinal."""
        table = f"{schema.PREFIX}DEVICE"
        if not self._database.has(table, "id", "name"):
            return {}
        uuid = "d.uuid" if self._database.has(table, "uuid") else "NULL"
        sql = (
            f"SELECT d.id, s.value, {uuid} FROM {table} AS d "
            "LEFT JOIN StringTable AS s ON s._id_ = d.name WHERE typeof(d.id) = 'integer'"
        )
        cards = {}
        for id, name, raw in self._database.query(sql):
            known = isinstance(raw, bytes) and len(raw) == 16
            cards[id] = str(name or ""), str(UUID(bytes=raw)) if known else ""
        return cards


_LATEST: Final = 1 << 62
"""Nanoseconds since 1970 that no clock shows."""


def first_moment(database: Database, tables: Sequence[schema.Table], late: int) -> int:
    """Return the first moment of all tables, in ns since 1970 UTC, on the host's clock; or 0."""
    moments = []
    for table in tables:
        edge = quote_identifier("start" if "start" in table.columns else "timestamp")
        sql = f"SELECT min({edge}) FROM {table.full_name} WHERE {edge} > 0 AND {edge} < {_LATEST}"

        def first(rows: Rows, sql: str = sql) -> object:
            # Several threads ask at once, on one connection each.
            with closing(sqlite_security.connect(database.uri)) as connection:
                return connection.execute(sql + within(rows)).fetchone()[0]

        try:
            firsts = map_in_threads(first, row_ranges(database, table.full_name))
        except sqlite_security.ERRORS as error:
            raise sqlite_error(database.path, error) from error
        shift = late if table.on_gpu else 0
        moments += [moment - shift for moment in firsts if isinstance(moment, int)]
    return min(moments, default=0)


MOMENT, START, END = 1, 2, 4
"""Flags of a marker (CUpti_ActivityFlag)."""


def join_markers(raw: dict[str, Integers], window: Window | None) -> dict[str, Column]:
    """Return start, end and kind of ranges and marks that touch a window, and given columns.

    Args:
        raw: flags, id and timestamp of the rows of markers, and optionally name and thread.
        window: a window on the file's clock.

    A range without an end ends where it starts; an end without a start is left out.
    """
    flags, moments = raw["flags"], raw["timestamp"]
    starts, marks = np.flatnonzero(flags & START), np.flatnonzero(flags & MOMENT)
    rows = np.concatenate([starts, marks])
    begin, end = moments[rows], moments[rows]
    ends = np.flatnonzero(flags & END)
    if len(ends):
        ends = ends[np.argsort(raw["id"][ends], kind="stable")]
        ids, wanted = raw["id"][ends], raw["id"][starts]
        index = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        end[: len(starts)] = np.where(ids[index] == wanted, moments[ends][index], moments[starts])
    kinds = np.full(len(rows), Kind.RANGE, np.int8)
    kinds[len(starts) :] = Kind.MARK
    columns: dict[str, Column] = {
        name: raw[name][rows] for name in ("name", "thread") if name in raw
    }
    columns |= {"start": begin, "end": end, "kind": kinds}
    if window is None:
        return columns
    inside = (begin < window.end) & (end >= window.start)
    return {name: column[inside] for name, column in columns.items()}


_INSPECTED: Final = 20_000
"""Operations to inspect of each table: a wrong clock is wrong for all of them."""
_FIRST_LOOK: Final = 500
_SUFFICIENT_PAIRS: Final = 100
"""Operations of the first look, which inspects 8 times as many calls, and sufficient pairs."""
_JOINED: Final = {"correlationId", "start", "end"}
_MOST_SKEW: Final = 1 << 61
"""Nanoseconds by which no clock is wrong: such rows have lost their times."""
_PLAUSIBLE: Final = range(-1_000_000, 60_000_000_001)
"""Nanoseconds: the soonest of many operations begins with its launch; no queue is a minute long."""


def find_skew(
    database: sqlite3.Connection, columns: Mapping[str, frozenset[str]], file: str = "nvprof"
) -> int:
    """Return by how many nanoseconds the GPU's clock is ahead of the host's; 0 if it is right.

    Takes a connection, its name for the file, and the columns of its tables. Corrected by the
    result, the operation that began soonest after its launch began with it.
    """
    soonest, count = _soonest(database, columns, file, _INSPECTED)
    return 0 if not count or soonest in _PLAUSIBLE or abs(soonest) > _MOST_SKEW else soonest


def measure_skew(file: Database, columns: Mapping[str, frozenset[str]]) -> int:
    """Call `find_skew` unless a look at the first operations and calls shows a right clock."""
    try:
        with closing(sqlite_security.connect(file.uri)) as database:
            database.set_authorizer(sqlite_security.copying)
            soonest, count = _soonest(database, columns, "main", _FIRST_LOOK, 8 * _FIRST_LOOK)
            if count >= _SUFFICIENT_PAIRS and soonest in _PLAUSIBLE:
                return 0
            return find_skew(database, columns, "main")
    except sqlite_security.ERRORS as error:
        raise sqlite_error(file.path, error) from error


def _soonest(
    database: sqlite3.Connection,
    columns: Mapping[str, frozenset[str]],
    file: str,
    operations: int,
    calls: int | None = None,
) -> tuple[int, int]:
    """Return the shortest delay between a call and what it launched, and the number of such pairs.

    Inspects so many operations and calls of each table, by default all calls.
    """
    database.execute("CREATE TEMP TABLE launched (correlation INTEGER PRIMARY KEY, start INTEGER)")
    for table in schema.ON_GPU:
        if columns.get(table, frozenset()) >= _JOINED:
            database.execute(
                f"INSERT OR IGNORE INTO temp.launched "
                "SELECT CAST(r.correlationId AS INTEGER), r.start "
                f"FROM {file}.{schema.PREFIX}{table} AS r "
                f"WHERE {schema.HAS_TIMES} LIMIT {operations}"
            )
    source = "{}" if calls is None else f"(SELECT * FROM {{}} LIMIT {calls})"
    delays = [
        database.execute(
            "SELECT CAST(min(l.start - r.start) AS INTEGER), count(*) FROM "
            f"{source.format(f'{file}.{schema.PREFIX}{table}')} AS r "
            f"JOIN temp.launched AS l ON l.correlation = r.correlationId WHERE {schema.HAS_TIMES}"
        ).fetchone()
        for table in schema.CALLS
        if columns.get(table, frozenset()) >= _JOINED
    ]
    database.execute("DROP TABLE temp.launched")
    known = [(int(delay), int(count)) for delay, count in delays if count]
    return min(known, default=(0, 0))[0], sum(count for _, count in known)
