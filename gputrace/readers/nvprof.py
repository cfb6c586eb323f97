"""Files of nvprof (.nvvp, .nvprof) as a `Trace`: one process each, on the machine's wall clock."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.model.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Memory,
)
from gputrace.model.names import bounded, demangle_all
from gputrace.model.trace import Device, Process, Progress, Session, Window
from gputrace.readers.error_policy import drop_invalid_rows
from gputrace.readers.nvprof_schema import (
    CALLS,
    HAS_TIMES,
    MARKERS,
    OBJECT_COLUMNS,
    ON_GPU,
    PREFIX,
    TABLES,
    Table,
    copy_kinds,
    fixed_name,
    memory_kinds,
    name_ids,
    nvprof_tables,
)
from gputrace.store import sqlite_security
from gputrace.store.sqlite import (
    Database,
    Integers,
    Query,
    Rows,
    SqliteTables,
    SqliteTrace,
    map_in_threads,
    quote_identifier,
    read_integers,
    row_ranges,
    sqlite_error,
)
from gputrace.units import format_ns

_THREAD_BITS: Final = 0x7FFFFFFF
"""Bits of the 32 of a pthread id that nvprof keeps that fit the column and tell threads
apart."""
_ENDS: Final = ("source_device", "destination_device")
_ONLY_HOST: Final = "no GPU activity in this nvprof file, only the host's; record it again"
_NOTHING: Final = (
    "nvprof recorded no GPU activity in it: nothing ran on a GPU while it recorded; see "
    "--profile-from-start and --profile-child-processes, and record it again"
)


def is_nvprof(database: Database) -> bool:
    """Return whether nvprof wrote the tables, with or without GPU activity."""
    return database.has("StringTable", "_id_", "value") and any(
        name.startswith(PREFIX) and "_id_" in columns for name, columns in database.tables.items()
    )


class NvprofTrace(SqliteTrace[Table]):
    """One file of nvprof, of any version."""

    source = "nvprof"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path, database)
        self._contexts: dict[int, int] | None = None
        self._clear: dict[str, str] = {}
        """Names as people read them, by what the file has."""
        self._tables = [table for table in (*TABLES, MARKERS) if _usable(database, table)]
        if not self.kinds & set(GPU_KINDS):
            raise InputError(path, _ONLY_HOST if self._tables else _NOTHING)
        columns = {t.name: frozenset(database.tables[t.full_name]) for t in self._tables}
        self._late = measure_skew(database, columns)
        if self._late:
            way = "after" if self._late > 0 else "before"
            self.quality.notes.append(
                f"the times of the GPU's work were {format_ns(abs(self._late))} {way} its CUDA "
                "calls: moved by as much"
            )
        self._epoch = first_moment(database, self._tables, self._late)
        self.processes.append(Process(read_pid(database)))

    @property
    def tables(self) -> SqliteTables:
        return nvprof_tables(self._database, self._epoch, self._late)

    @property
    def session(self) -> Session:
        uuids = frozenset(uuid for _, uuid in self._cards.values())
        return Session(self._epoch or None, cards=uuids - {""})

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        wanted = sorted({int(id) for id in ids})
        sql = "SELECT _id_, value FROM StringTable WHERE _id_ IN (SELECT value FROM json_each(?))"
        listed = json.dumps([id for id in wanted if id > 0])
        found = {id: bounded(str(value)) for id, value in self._database.query(sql, (listed,))}
        self._clear |= demangle_all(set(found.values()) - self._clear.keys())
        text = {id: self._clear[name] for id, name in found.items()}
        text |= {id: fixed_name(id) for id in wanted if id < UNKNOWN}
        return {id: text.get(id, f"<name {id}>" if id > 0 else "(no name)") for id in wanted}

    def device(self, process: int, device: int) -> Device:
        return Device(process, device, UNKNOWN, *self._cards.get(device, ()))

    def _read_table(
        self,
        table: Table,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        shift = self._epoch + (self._late if table.on_gpu else 0)
        if window is not None:
            window = Window(window.start + shift, window.end + shift)
        needed = dict.fromkeys(["start", "end", "kind", *columns])
        raw = read_integers(self._database, self._query(table, needed, window), progress)
        if table is MARKERS:
            raw = join_markers(raw, window)
        for edge in ("start", "end"):
            raw[edge][raw[edge] == 0] = UNKNOWN
        arrays = {name: self._translate(table, name, raw) for name in needed}
        events = drop_invalid_rows(Events(arrays), self.quality, table.name)
        if not kinds >= set(table.kinds):
            events = events.select(np.isin(events.kind, sorted(kinds)))
        shifted = {edge: getattr(events, edge) - shift for edge in ("start", "end")}
        return Events({name: shifted.get(name, getattr(events, name)) for name in columns})

    def _query(self, table: Table, needed: Collection[str], window: Window | None) -> Query:
        """Build the query for some event columns, from the columns that are there."""
        wanted = {*needed, *table.required, *(_ENDS if "kind" in needed else ())}
        there = {
            column: expression
            for column, expression in table.columns.items()
            if column in wanted and self._has(table, expression)
        }
        # Columns to translate are read whole, the rest in the contract's type.
        types = {**COLUMN_TYPES, **dict.fromkeys(("kind", "thread", "device"), np.int64)}
        types = {column: types.get(column, np.int64) for column in there}
        where = ""
        if window is not None and table is not MARKERS:
            where = f'"start" < {window.end} AND "end" >= {window.start}'
        return Query(table.full_name, there, types, where)

    def _has(self, table: Table, expression: str) -> bool:
        columns = OBJECT_COLUMNS if "objectId" in expression else (expression.strip('"'),)
        return self._database.has(table.full_name, *columns)

    def _translate(self, table: Table, column: str, raw: Mapping[str, Integers]) -> Column:
        """An event column from what was read."""
        rows = len(raw["start"])
        if column == "process":
            return np.zeros(rows, np.int16)
        if column == "kind":
            return _kinds(table, raw)
        if column not in raw:
            memory = column in ("source_memory", "destination_memory")
            return np.full(rows, Memory.UNKNOWN if memory else UNKNOWN, COLUMN_TYPES[column])
        values = raw[column]
        if column in ("source_memory", "destination_memory"):
            return memory_kinds(values)
        if column == "name":
            return name_ids(table, values)
        if column == "thread":
            return np.where(values == UNKNOWN, UNKNOWN, values & _THREAD_BITS)
        if column == "device" and table.kinds == (Kind.SYNC,):
            return self._devices_of(values)
        return values

    def _devices_of(self, contexts: Integers) -> Column:
        """Return the CUDA ordinal of the device that each context is on."""
        devices = np.full(len(contexts), UNKNOWN, np.int16)
        if self._contexts is None:
            is_valid = (
                "typeof(contextId) = 'integer' AND typeof(deviceId) = 'integer' "
                f"AND deviceId BETWEEN 0 AND {_MOST_DEVICES}"
            )
            table, columns = f"{PREFIX}CONTEXT", ("contextId", "deviceId")
            self._contexts = dict(self._database.select(table, *columns, where=is_valid))
        for context, device in self._contexts.items():
            devices[contexts == context] = device
        return devices

    @cached_property
    def _cards(self) -> dict[int, tuple[str, str]]:
        return read_cards(self._database)


def _usable(database: Database, table: Table) -> bool:
    """Return whether a table has rows, and the columns without which they are useless."""
    required = [table.columns[name].strip('"') for name in table.required]
    return database.has(table.full_name, *required) and database.has_rows(table.full_name)


def _kinds(table: Table, raw: Mapping[str, Integers]) -> Column:
    rows = len(raw["start"])
    if len(table.kinds) == 1:
        return np.full(rows, table.kinds[0], np.int8)
    if table is MARKERS:
        return raw["kind"]
    unknown = np.full(rows, UNKNOWN)
    return copy_kinds(*(raw.get(column, unknown) for column in ("kind", *_ENDS)))


_LATEST: Final = 1 << 62
"""Nanoseconds since 1970 that no clock shows."""
_MOST_DEVICES: Final = 0x7FFF
"""Expression for the column ``device``."""
_PROCESS: Final = 1
"""Kind by CUpti_ActivityObjectKind."""


def read_pid(database: Database) -> int:
    """The process's id; 0 where no row tells."""
    for table in CALLS:
        for (pid,) in database.select(PREFIX + table, "processId", where="1 LIMIT 1"):
            if isinstance(pid, int):
                return pid
    is_process = f"objectKind = {_PROCESS}"
    if database.has(f"{PREFIX}NAME", "objectKind"):
        for (raw,) in database.select(f"{PREFIX}NAME", "objectId", where=is_process):
            return int.from_bytes(raw[:4], "little") if isinstance(raw, bytes) else 0
    return 0


def read_cards(database: Database) -> dict[int, tuple[str, str]]:
    """Return the name and UUID of each card by its CUDA ordinal."""
    table = f"{PREFIX}DEVICE"
    if not database.has(table, "id", "name"):
        return {}
    uuid = "d.uuid" if database.has(table, "uuid") else "NULL"
    sql = (
        f"SELECT d.id, s.value, {uuid} FROM {table} AS d "
        "LEFT JOIN StringTable AS s ON s._id_ = d.name WHERE typeof(d.id) = 'integer'"
    )
    cards = {}
    for id, name, raw in database.query(sql):
        known = isinstance(raw, bytes) and len(raw) == 16
        cards[id] = str(name or ""), str(UUID(bytes=raw)) if known else ""
    return cards


def first_moment(database: Database, tables: Sequence[Table], late: int) -> int:
    """The first moment of all tables, nanoseconds since 1970 UTC; 0 where no row has a time.

    The GPU's clock is ahead of the host's by ``late``. Raises InputError on a broken file.
    """
    found = []
    for table in tables:
        ranges = row_ranges(database, table.full_name)
        for first in map_in_threads(partial(_first, database, table), ranges):
            if first is not None:
                found.append(first - late if table.on_gpu else first)
    return min(found, default=0)


def _first(database: Database, table: Table, rows: Rows) -> int | None:
    """Return the first moment, on a connection of its own, since several threads ask at once."""
    edge = quote_identifier("start" if "start" in table.columns else "timestamp")
    name = quote_identifier(table.full_name)
    sql = f"SELECT min({edge}) FROM {name} WHERE {edge} > 0 AND {edge} < {_LATEST}"
    if rows is not None:
        sql += f" AND rowid >= {rows[0]} AND rowid < {rows[1]}"
    try:
        with closing(sqlite_security.connect(database.uri)) as connection:
            first = connection.execute(sql).fetchone()[0]
    except sqlite_security.ERRORS as error:
        raise sqlite_error(database.path, error) from error
    return first if isinstance(first, int) else None


MOMENT, START, END = 1, 2, 4
"""Flags of a marker (CUpti_ActivityFlag)."""


def join_markers(raw: dict[str, Integers], window: Window | None) -> dict[str, Column]:
    """Start, end and kind of ranges and marks that touch a window; name and thread if they are in.

    Takes the columns flags, id and timestamp of the rows of markers, and some of name and thread.

    A range whose end was not recorded ends where it starts; an end without a start is left out.
    """
    flags = raw["flags"]
    starts, marks = np.flatnonzero(flags & START), np.flatnonzero(flags & MOMENT)
    rows = np.concatenate([starts, marks])
    begin = raw["timestamp"][rows]
    end = begin.copy()
    end[: len(starts)] = _ends(raw, starts)
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


def _ends(raw: dict[str, Integers], starts: NDArray[np.intp]) -> Integers:
    """When the ranges that start in some rows end."""
    ends = np.flatnonzero(raw["flags"] & END)
    begin = raw["timestamp"][starts]
    if not len(ends):
        return begin
    ends = ends[np.argsort(raw["id"][ends], kind="stable")]
    ids, wanted = raw["id"][ends], raw["id"][starts]
    place = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[place] == wanted, raw["timestamp"][ends][place], begin)


_SAMPLE: Final = 20_000
"""Operations that are looked at, of each table: a wrong clock is wrong for all of them."""
_ALL: Final = -1
_FEW: Final = 500
_MANY: Final = 8
_ENOUGH: Final = 100
"""Sample sizes of the first look: so many operations, so many times as many calls; pairs that will
do."""
_JOINED: Final = {"correlationId", "start", "end"}
_FARTHEST: Final = 1 << 61
"""Nanoseconds by which no clock is wrong: such rows have lost their times."""
_EARLIEST_NS: Final = -1_000_000
_LATEST_NS: Final = 60_000_000_000
"""The soonest of many operations begins with its launch; no queue on a GPU is a minute long."""


def find_skew(
    database: sqlite3.Connection, columns: Mapping[str, frozenset[str]], file: str = "nvprof"
) -> int:
    """By how many nanoseconds the GPU's clock is ahead of the host's; 0 where it is right.

    Takes a connection, what it calls the file, and the columns of its tables. With the answer taken
    off, the operation that began soonest after its launch began with it.
    """
    soonest, count = _soonest(database, columns, file, _SAMPLE, _ALL)
    return 0 if not count or _plausible(soonest) or abs(soonest) > _FARTHEST else soonest


def measure_skew(file: Database, columns: Mapping[str, frozenset[str]]) -> int:
    """Measure the skew of a file that is open for reading; quick if the clock is right.

    The first operations and the first calls mostly belong together: what they say of a clock that
    is right need not be asked of all calls. Raises InputError where the file is broken.
    """
    try:
        with (
            closing(sqlite_security.connect(file.uri)) as database,
            sqlite_security.under(database, sqlite_security.copying),
        ):
            soonest, count = _soonest(database, columns, "main", _FEW, _MANY * _FEW)
            if count >= _ENOUGH and _plausible(soonest):
                return 0
            return find_skew(database, columns, "main")
    except sqlite_security.ERRORS as error:
        raise sqlite_error(file.path, error) from error


def _plausible(delay: int) -> bool:
    return _EARLIEST_NS <= delay <= _LATEST_NS


def _soonest(
    database: sqlite3.Connection,
    columns: Mapping[str, frozenset[str]],
    file: str,
    operations: int,
    calls: int,
) -> tuple[int, int]:
    """The shortest delay between a call and what it launched, and how many of both were found.

    Looks at so many operations and calls of each table; calls may be `_ALL`.
    """
    database.execute("CREATE TEMP TABLE launched (correlation INTEGER PRIMARY KEY, start INTEGER)")
    for table in ON_GPU:
        if columns.get(table, frozenset()) >= _JOINED:
            database.execute(
                f"INSERT OR IGNORE INTO temp.launched "
                "SELECT CAST(r.correlationId AS INTEGER), r.start "
                f"FROM {file}.{PREFIX}{table} AS r WHERE {HAS_TIMES} LIMIT {operations}"
            )
    source = "{}" if calls == _ALL else f"(SELECT * FROM {{}} LIMIT {calls})"
    delays = [
        database.execute(
            "SELECT CAST(min(l.start - r.start) AS INTEGER), count(*) FROM "
            f"{source.format(f'{file}.{PREFIX}{table}')} AS r "
            f"JOIN temp.launched AS l ON l.correlation = r.correlationId WHERE {HAS_TIMES}"
        ).fetchone()
        for table in CALLS
        if columns.get(table, frozenset()) >= _JOINED
    ]
    database.execute("DROP TABLE temp.launched")
    found = [(int(delay), int(count)) for delay, count in delays if count]
    return min(found, default=(0, 0))[0], sum(count for _, count in found)
