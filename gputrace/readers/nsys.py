"""nsys SQLite exports of every schema since 2.9.1 as a `Trace`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

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
    number_ids,
)
from gputrace.model.names import bounded
from gputrace.model.nvml import Nvml
from gputrace.model.trace import Device, NoGpu, Process, Progress, Quality, Session, Window
from gputrace.readers.error_policy import drop_invalid_rows
from gputrace.readers.nsys_schema import (
    KIND_OF,
    MEMORY_OF,
    NOBODY,
    TABLES,
    DeviceMap,
    Member,
    Table,
    nsys_tables,
    read_members,
    read_nvml,
    read_session,
)
from gputrace.store.slice import read_export_notes
from gputrace.store.sqlite import (
    NULL,
    Database,
    Integers,
    Query,
    Rows,
    SqliteTables,
    SqliteTrace,
    map_in_threads,
    quote_identifier,
    read_batches,
    read_integers,
    row_chunks,
    row_ranges,
    sqlite_error,
)


def is_nsys(database: Database) -> bool:
    """Return whether the tables are those of an nsys export, with or without GPU activity.

    nvprof's tables have some of the same names, and an ``_id_`` each.
    """
    return any(
        database.has(table.name, "start") and not database.has(table.name, "_id_")
        for table in TABLES
    ) or (
        database.has("StringIds", "id", "value")
        and any(name.startswith(("TARGET_INFO_", "META_DATA_")) for name in database.tables)
    )


class NsysTrace(SqliteTrace[Table]):
    """One nsys SQLite export; may hold several processes and GPUs."""

    source = "nsys"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path, database)
        self._process_keys: dict[int, int] = {}
        self._zones: dict[str, Zones | None] = {}
        self._tables = [table for table in TABLES if _usable(database, table)]
        self.quality.notes += read_export_notes(database)
        on_gpu = [table.name for table in self._tables if table.kinds[0] in GPU_KINDS]
        if not any(map(database.has_rows, on_gpu)):
            self.no_gpu = self._without_gpu()

    def _without_gpu(self) -> NoGpu:
        """Return the reason for the absence of GPU activity; raise InputError if none is known."""
        if self.kinds:
            problem = (
                "no GPU activity in this nsys export, only the host's; record with nsys -t cuda"
            )
        else:
            problem = "an nsys export without CUDA tables; record with nsys -t cuda"
        raise InputError(self.path, problem)

    @property
    def tables(self) -> SqliteTables:
        return nsys_tables(self._database)

    def on(self, database: Database) -> Self:
        part = super().on(database)
        part._process_keys, part._zones = dict(self._process_keys), {}
        part.__dict__.pop("_inline", None)  # It goes by row.
        return part

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        wanted = sorted({int(id) for id in ids})
        text: dict[int, str] = {}
        if self._database.has("StringIds", "id", "value"):
            sql = "SELECT id, value FROM StringIds WHERE id IN (SELECT value FROM json_each(?))"
            listed = json.dumps([id for id in wanted if id >= 0])
            text = {id: plain(value) for id, value in self._database.query(sql, (listed,))}
        text |= {id: f"CUDA graph {GRAPHS - id}" for id in wanted if id <= GRAPHS}
        inline = [INLINE_TEXT - id for id in wanted if GRAPHS < id <= INLINE_TEXT]
        if inline:
            text |= {INLINE_TEXT - n: text for n, text in self._inline.texts(inline).items()}
        return {id: text.get(id, f"<name {id}>") for id in wanted}

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        all_ids = np.fromiter(ids, np.int64, len(ids))
        inline = (all_ids > GRAPHS) & (all_ids <= INLINE_TEXT)
        listed = self.names(all_ids[~inline])
        matches = {id: text for id, text in listed.items() if pattern.search(text)}
        if inline.any():
            numbers = self._inline.matching(pattern, INLINE_TEXT - all_ids[inline])
            matches |= self.names(INLINE_TEXT - numbers)
        return matches

    @cached_property
    def _inline(self) -> Texts:
        """Texts of NVTX rows that are not in StringIds."""
        return read_texts(self._database, "NVTX_EVENTS", "text", "textId IS NULL")

    def device(self, process: int, device: int) -> Device:
        return Device(process, device, *self._devices.find(self.processes[process].pid, device))

    @cached_property
    def _devices(self) -> DeviceMap:
        return DeviceMap(self._database)

    def read_parts(
        self, kinds: frozenset[Kind], columns: Sequence[str], progress: Progress | None
    ) -> Iterator[Events]:
        for table in self._tables:
            if not kinds & set(table.kinds):
                continue
            zones: list[Zones | None] = []
            dropped: Counter[str] = Counter()
            for rows in row_chunks(self._database, table.name):
                quality = Quality()
                yield self._read_table(table, kinds, columns, None, progress, rows, quality)
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
        rows: Rows = None,
        quality: Quality | None = None,
    ) -> Events:
        """Read the rows of a table, or of a range of rowids, that overlap a window."""
        if window is not None and (zones := self._zones.get(table.name)) is not None:
            rows = zones.rows(window)
        partial = not kinds >= set(table.kinds)
        needed = dict.fromkeys([*columns, "start", "end", *(["kind"] if partial else [])])
        query = build_query(self._database, table, needed, window)
        raw = read_integers(self._database, query, progress, rows)
        if window is None:
            bounds = (rows[0], rows[1] - 1) if rows else self._database.row_bounds(table.name)
            self._zones[table.name] = find_zones(raw["start"], raw["end"], bounds)
        if table.name == "NVTX_EVENTS" and "name" in raw:
            self._number_texts(raw["name"])
        arrays = {name: self._translate(table, name, raw) for name in needed}
        events = drop_invalid_rows(Events(arrays), quality or self.quality, table.name)
        if partial:
            events = events.select(np.isin(events.kind, sorted(kinds)))
        return events.having(*columns)

    def _number_texts(self, names: Integers) -> None:
        """Replace rowids in a column of names by the text's number, which equal texts share."""
        inline = names <= INLINE_TEXT
        if inline.any():
            numbers = self._inline.numbers(INLINE_TEXT - names[inline].astype(np.int64))
            names[inline] = np.where(numbers == NULL, UNKNOWN, INLINE_TEXT - numbers)

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
            distinct, where = number_ids(raw["process"] >> 24)
            indices = np.array([self._process_index(key) for key in distinct.tolist()], np.int16)
            processes: Column = indices.take(where)
            return processes
        return raw[column]

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
        return {pid: plain(name) for pid, name in self._database.select("PROCESSES", "pid", "name")}


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


INLINE_TEXT: Final = -2
"""Names from here down stand for NVTX text that is not in StringIds.

In what a query reads, this minus the rowid; in event columns, this minus the number of the text.
"""
GRAPHS: Final = -(1 << 30)
"""Name ids from here down stand for CUDA graphs: this minus the graph's id."""

_WITHIN_DEVICE, _PEER = 8, 10
"""Kinds by ENUM_CUDA_MEMCPY_OPER."""


def build_query(
    database: Database, table: Table, columns: Collection[str], window: Window | None
) -> Query:
    """Build the query for some event columns, from the nsys columns that are there."""
    expressions = {}
    for column in columns:
        there = (c for c in table.columns.get(column, ()) if database.has(table.name, c))
        if (candidate := next(there, None)) is not None:
            expressions[column] = quote_identifier(candidate)
    if table.name == "NVTX_EVENTS":
        _read_nvtx(database, expressions)
    if table.name == "CUPTI_ACTIVITY_KIND_MEMCPY":
        _read_peers(database, expressions)
    if table.kinds == (Kind.GRAPH,) and "name" in expressions:
        expressions["name"] = f"{GRAPHS} - {expressions['name']}"
    if expressions.pop("thread", None):  # globalTid holds both
        expressions["process"] = quote_identifier("globalTid")
    # Ids that are packed or translated are read whole, the rest in the contract's type.
    whole = dict.fromkeys(("process", "thread", "kind"), np.int64)
    types = {name: whole.get(name, COLUMN_TYPES[name]) for name in expressions}
    conditions = [table.where] if table.where else []
    if window is not None:
        end = expressions.get("end", '"end"')
        conditions.append(f'"start" < {window.end} AND {end} >= {window.start}')
    return Query(table.name, expressions, types, " AND ".join(conditions))


def _read_nvtx(database: Database, expressions: dict[str, str]) -> None:
    """Marks have no end; texts that were not registered have no id and stand for themselves."""
    start = expressions["start"]
    end = expressions.get("end")
    expressions["end"] = f"COALESCE({end}, {start})" if end else start
    if "name" in expressions and database.has("NVTX_EVENTS", "text"):
        expressions["name"] = f"COALESCE({expressions['name']}, {INLINE_TEXT} - rowid)"


def _read_peers(database: Database, expressions: dict[str, str]) -> None:
    """A device-to-device copy whose ends are two devices is a peer copy."""
    devices = ("srcDeviceId", "dstDeviceId")
    if "kind" in expressions and database.has("CUPTI_ACTIVITY_KIND_MEMCPY", *devices):
        kind = expressions["kind"]
        expressions["kind"] = (
            f"CASE WHEN {kind} = {_WITHIN_DEVICE} AND srcDeviceId <> dstDeviceId "
            f"THEN {_PEER} ELSE {kind} END"
        )


def plain(value: object) -> str:
    """A text of the export, which need not be UTF-8, nor of any length that can be shown."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return bounded(text)


_ROWS: Final = 1 << 12
"""Rows of a zone."""


@dataclass(frozen=True)
class Zones:
    """The earliest start and the latest end in each stretch of a table's rows."""

    first: int
    """The first rowid."""
    start: Integers
    end: Integers

    def rows(self, window: Window) -> tuple[int, int]:
        """The rowids, the end not included, outside of which no row touches a window."""
        near = np.flatnonzero((self.start < window.end) & (self.end >= window.start))
        if not len(near):
            return self.first, self.first
        return self.first + int(near[0]) * _ROWS, self.first + (int(near[-1]) + 1) * _ROWS


def find_zones(start: Integers, end: Integers, bounds: tuple[int, int] | None) -> Zones | None:
    """The zones of all rows of a table in order of rowid; None where rowids have holes.

    ``bounds`` are the first rowid and the last.
    """
    if bounds is None or len(start) != bounds[1] - bounds[0] + 1:
        return None
    edges = np.arange(0, len(start), _ROWS)
    return Zones(bounds[0], np.minimum.reduceat(start, edges), np.maximum.reduceat(end, edges))


def joined_zones(parts: Sequence[Zones | None]) -> Zones | None:
    """The zones of stretches of whole zones, in order; None where one of them has none."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return Zones(
        known[0].first,
        np.concatenate([part.start for part in known]),
        np.concatenate([part.end for part in known]),
    )


_ZERO_FOR_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)


class Texts:
    """Distinct texts of a column, numbered from 0, and the text number of each row."""

    def __init__(self, rowids: NDArray[np.int64], numbers: Integers, distinct: Any) -> None:
        """Take an Arrow array of distinct texts as bytes; ``rowids`` are in any order."""
        if (np.diff(rowids) < 0).any():
            order = np.argsort(rowids, kind="stable")
            rowids, numbers = rowids[order], numbers[order]
        self._rowids, self._numbers = rowids, numbers
        self._distinct = distinct
        self._shape_of: Integers | None = None
        self._shapes: list[str] = []

    def numbers(self, rowids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the text number of each row, NULL where a row has none."""
        if not len(self._rowids):
            return np.full(len(rowids), NULL)
        index = np.minimum(np.searchsorted(self._rowids, rowids), len(self._rowids) - 1)
        numbers: NDArray[np.int64] = np.where(
            self._rowids[index] == rowids, self._numbers[index], NULL
        )
        return numbers

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """Return texts by number, skipping unknown numbers."""
        import pyarrow

        known = [number for number in numbers if 0 <= number < len(self._distinct)]
        texts = self._distinct.take(pyarrow.array(known, pyarrow.int64()))
        return dict(zip(known, _decoded(texts), strict=True))

    def matching(self, pattern: re.Pattern[str], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers whose texts match a pattern, which must treat all digits alike."""
        if self._shape_of is None:
            self._shape_of, self._shapes = _shapes(self._distinct)
        matches = np.array([pattern.search(shape) is not None for shape in self._shapes], bool)
        numbers = numbers[(numbers >= 0) & (numbers < len(self._distinct))]
        matching: NDArray[np.int64] = numbers[matches[self._shape_of[numbers]]]
        return matching


def read_texts(database: Database, table: str, column: str, where: str) -> Texts:
    """Read the non-NULL texts of a column in the rows that meet an SQL condition.

    Raises InputError on a broken file.
    """
    import pyarrow

    sql = (
        f"SELECT rowid, CAST({quote_identifier(column)} AS TEXT) FROM {quote_identifier(table)} "
        f"WHERE {quote_identifier(column)} IS NOT NULL AND {where}"
    )
    ranges = row_ranges(database, table)
    parts = map_in_threads(lambda rows: _read_text_range(database, sql, rows), ranges)
    batches = list(chain.from_iterable(parts))
    rowids = [np.frombuffer(ids.buffers()[1], np.int64, len(ids)) for ids, _ in batches]
    texts = pyarrow.chunked_array([texts for _, texts in batches], pyarrow.large_binary())
    return Texts(np.concatenate([np.empty(0, np.int64), *rowids]), *_encode(texts))


def _read_text_range(database: Database, sql: str, rows: Rows) -> list[tuple[Any, Any]]:
    """Read batches of rowids and texts; texts are bytes, since they need not be UTF-8."""
    import adbc_driver_manager
    import pyarrow

    if rows is not None:
        sql += f" AND rowid >= {rows[0]} AND rowid < {rows[1]}"
    try:
        return [
            (batch.column(0).cast(pyarrow.int64()), batch.column(1).cast(pyarrow.large_binary()))
            for batch in read_batches(database, sql)
            if batch.num_rows
        ]
    except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError) as error:
        raise sqlite_error(database.path, error) from error


def _encode(texts: Any) -> tuple[Integers, Any]:
    """Dictionary-encode a chunked array; return the number of each text and the distinct texts."""
    import pyarrow

    chunks = texts.dictionary_encode().chunks
    if not chunks:
        return np.empty(0, np.int32), pyarrow.array([], pyarrow.large_binary())
    parts = [np.frombuffer(c.indices.buffers()[1], np.int32, len(c)) for c in chunks]
    return np.concatenate(parts), chunks[-1].dictionary


def _shapes(texts: Any) -> tuple[Integers, list[str]]:
    """Dictionary-encode texts with every digit replaced by 0."""
    import pyarrow

    if len(texts):
        _, offsets, data = texts.buffers()
        letters = pyarrow.py_buffer(data.to_pybytes().translate(_ZERO_FOR_DIGITS))
        buffers = [None, offsets, letters]
        texts = pyarrow.Array.from_buffers(texts.type, len(texts), buffers, offset=texts.offset)
    numbers, distinct = _encode(pyarrow.chunked_array([texts]))
    return numbers, _decoded(distinct)


def _decoded(texts: Any) -> list[str]:
    return [bounded(text.decode("utf-8", "replace")) for text in texts.to_pylist()]
