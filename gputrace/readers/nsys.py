"""nsys SQLite exports of every schema since 2.9.1, and gputrace's traces, which extend them."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.model.events import (
    COLUMN_TYPES,
    COPY_KINDS,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Memory,
    distinct_ids,
    is_among,
    number_ids,
)
from gputrace.model.impossible_times import CHECKED
from gputrace.model.nvml import Nvml
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.trace import (
    GIVES_WORK,
    Device,
    NoGpu,
    Process,
    Quality,
    Selection,
    Session,
    contains,
    drop_invalid_rows,
)
from gputrace.readers import nsys_schema as schema
from gputrace.readers.gpu_clock_skew import measure_skew, moved
from gputrace.sanitize import bounded
from gputrace.store import sqlite_security
from gputrace.store.sqlite_page_scan import Condition, Integers, Query, Rows, Value
from gputrace.store.sqlite_reader import (
    NULL,
    Database,
    SqliteTables,
    SqliteTrace,
    read_integers,
    row_chunks,
    sqlite_error,
)
from gputrace.units import format_count, format_window


def is_nsys(database: Database) -> bool:
    """Return True for tables of an nsys export, with or without GPU activity."""
    # nvprof's tables have some of the same names, and an _id_ each.
    return any(
        database.has(table.name, "start") and not database.has(table.name, "_id_")
        for table in schema.TABLES
    ) or (
        database.has("StringIds", "id", "value")
        and any(name.startswith(("TARGET_INFO_", "META_DATA_")) for name in database.tables)
    )


_MOST_HELD: Final = 1 << 15
"""Rows of a table that is read once, and not for one window after another."""
_MOST_TEXTS: Final = 1 << 14
"""Texts that are kept; kernels and calls have thousands of names at most."""


class NsysTrace(SqliteTrace[schema.Table]):
    """One nsys SQLite export; may hold several processes and GPUs."""

    source = "nsys"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path, database)
        self._process_keys: dict[int, int] = {}
        self._zones: dict[str, Zones | None] = {}
        self._texts: dict[int, str] = {}
        """Texts of StringIds that were asked for: each GPU and each gap asks again."""
        self._devices: schema.DeviceMap | None = None
        self.quality.warnings += schema.name_tables(database)
        usable = schema.usable
        self._tables = [table for table in schema.TABLES if usable(database, table, table.name)]
        self.cut, notes = _export_of(database)
        self.quality.notes += notes
        self._late = measure_skew(database) if self._is_nsys_clock else 0
        if self._late:
            self.quality.notes.append(moved(self._late))
        if failure := schema.read_failure(database):
            self.quality.warnings.append(f"the program's output ends with an error: {failure}")
        on_gpu = [table.name for table in self._tables if table.kinds[0] in GPU_KINDS]
        if not any(map(database.has_rows, on_gpu)):
            self.no_gpu = self._without_gpu()

    @property
    def _is_nsys_clock(self) -> bool:
        """Return whether nsys took the times of the GPUs."""
        return True

    def _without_gpu(self) -> NoGpu:
        """Return the reason for the absence of GPU activity; raise InputError if none is known."""
        problem, remedy = "an nsys export without CUDA tables", "record with nsys -t cuda"
        if not any(self._database.has_rows(table.name) for table in self._tables):
            problem = "nothing was recorded in this nsys export, not even of the host"
            remedy = "see that its window (--capture-range, --delay, --duration) is open while the "
            remedy += "program works"
        elif self.kinds:
            problem = "no GPU activity in this nsys export, only the host's"
        names = self.events([Kind.API], ["name"]).name if Kind.API in self.kinds else _NO_IDS
        what = "name LIKE '%COLLECT_CUDA_TRACE' AND value = 'true'"
        traced = self._database.select("META_DATA_CAPTURE", "name", "value", where=what)
        if len(names) and self.search(distinct_ids(names), GIVES_WORK):
            problem += ", though CUDA calls gave a GPU work"
            remedy = "the recorder received none of it from the driver: see the messages in the "
            remedy += "report; virtual GPUs, WSL and other profilers of the card can cause this"
        elif len(names):
            problem += f", and none of its {format_count(len(names), 'CUDA call')} gives a GPU work"
            remedy = "record while the GPU works"
        elif any(traced):
            problem += ", and not a CUDA call, though nsys traced them: the program used no GPU"
            remedy = "record one that does, or the process of it that does"
            is_cuda = "value GLOB '*/libcuda.so*' OR value GLOB '*/libcudart*.so*' LIMIT 1"
            for (library,) in self._database.select("StringIds", "value", where=is_cuda):
                problem += (
                    f", or nsys cannot trace it here: {library.rpartition('/')[2]} is in the "
                )
                problem += "stacks of its threads"
                remedy += "; in WSL and on Jetson, by the nsys and the driver that are made for it"
        problem = ". ".join([*self.quality.warnings, problem])
        raise InputError(self.path, f"{problem}; {remedy}")

    @property
    def tables(self) -> SqliteTables:
        return schema.nsys_tables(self._database, self._late)

    @cached_property
    def _has_messages(self) -> bool:
        return schema.has_messages(self._database)

    @property
    def kinds(self) -> frozenset[Kind]:
        return super().kinds | (schema.MESSAGE_KINDS if self._has_messages else frozenset())

    def _kinds_of(self, table: schema.Table) -> Collection[Kind]:
        return self._host_kinds if table.name == schema.HOST_RANGES else table.kinds

    @cached_property
    def _host_kinds(self) -> Collection[Kind]:
        """Kinds of the host's ranges that the file has, so that nobody looks for the others.

        Waits for data are always among them: with hooks, none means that there was none.
        """
        table = next(table for table in self._tables if table.name == schema.HOST_RANGES)
        if not self._database.has(table.name, "kind"):
            return table.kinds
        query = Query(table.name, {"kind": Value.of("kind")}, {"kind": np.int64}, ())
        numbers = distinct_ids(read_integers(self._database, query)["kind"]).tolist()
        kind_of = schema.KIND_OF[table.name]
        return {Kind.DATA_WAIT, *(kind_of.get(n, table.kinds[-1]) for n in numbers)}

    def _beside_tables(self, wanted: Selection) -> list[Events]:
        """Return NCCL's messages, where any are asked for and ranges have payloads."""
        if not wanted.kinds & schema.MESSAGE_KINDS or not self._has_messages:
            return []
        events = schema.read_messages(self._database, self._process_index, wanted.window)
        events = drop_invalid_rows(events, self.quality, "NVTX_PAYLOAD_SCHEMAS")
        events = events.select(is_among(events.kind, wanted.kinds))
        unknown = np.full(len(events), UNKNOWN)
        lacking = [name for name in wanted.columns if name not in events.columns]
        arrays = {name: getattr(events, name) for name in events.columns}
        return [Events(arrays | dict.fromkeys(lacking, unknown)).having(*wanted.columns)]

    def on(self, database: Database) -> Self:
        part = super().on(database)
        schema.name_tables(database)
        part._process_keys, part._zones, part._texts = dict(self._process_keys), {}, {}
        for by_row in ("_inline", "_host_kinds"):
            part.__dict__.pop(by_row, None)
        return part

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        wanted = sorted({int(id) for id in ids})
        text = {id: self._texts[id] for id in wanted if id in self._texts}
        unread = [id for id in wanted if id >= 0 and id not in text]
        if unread and self._database.has("StringIds", "id", "value"):
            texts = self._database.texts("StringIds", "id", unread)
            text |= {id: plain(value) for id, value in texts.items()}
            if len(self._texts) + len(text) < _MOST_TEXTS:
                self._texts |= text
        text |= {id: f"CUDA graph {GRAPHS - id}" for id in wanted if id <= GRAPHS}
        inline = [INLINE_TEXT - id for id in wanted if GRAPHS < id <= INLINE_TEXT]
        if inline:
            text |= {INLINE_TEXT - n: text for n, text in self._inline.texts(inline).items()}
        return {id: text.get(id, f"<name {id}>") for id in wanted}

    def search(self, ids: Collection[int] | Column, pattern: str) -> dict[int, str]:
        all_ids = np.fromiter(ids, np.int64, len(ids))
        inline = (all_ids > GRAPHS) & (all_ids <= INLINE_TEXT)
        listed = self.names(all_ids[~inline])
        matches = {id: text for id, text in listed.items() if contains(text, pattern)}
        if inline.any():
            numbers = self._inline.matching(pattern, INLINE_TEXT - all_ids[inline])
            matches |= self.names(INLINE_TEXT - numbers)
        return matches

    @cached_property
    def _inline(self) -> Texts:
        return read_texts(self._database)

    def device(self, process: int, device: int) -> Device:
        if self._devices is None:
            self._devices = schema.DeviceMap(self._database)
        return Device(process, device, *self._devices.find(self.processes[process].pid, device))

    def read_parts(self, wanted: Selection) -> Iterator[Events]:
        for table in self._tables:
            if not wanted.kinds & set(table.kinds):
                continue
            zones: list[Zones | None] = []
            dropped: Counter[str] = Counter()
            for rows in row_chunks(self._database, table.name):
                quality = Quality()
                yield self._read_table(table, wanted, rows, quality)
                zones.append(self._zones[table.name])
                dropped.update(quality.dropped)
            self._zones[table.name] = joined_zones(zones)
            for reason, count in dropped.items():
                self.quality.drop(reason, count, table.name)
        yield from self._beside_tables(wanted)

    def _read_table(
        self,
        table: schema.Table,
        wanted: Selection,
        rows: Rows = None,
        quality: Quality | None = None,
    ) -> Events:
        """Read the rows of a table, or of a range of rowids, that overlap a window."""
        late = self._late if table.kinds[0] in GPU_KINDS else 0
        columns, window = wanted.columns, wanted.moved(late).window
        if window is not None and (zones := self._zones.get(table.name)) is not None:
            rows = zones.rows(window)
        partial = not wanted.kinds >= set(table.kinds)
        # Pages of managed memory are known by the kind of the copy.
        by_kind = partial or "source_memory" in columns or "destination_memory" in columns
        more = CHECKED if Kind.KERNEL in table.kinds else ["kind"] if by_kind else []
        needed = dict.fromkeys([*columns, "start", "end", *more])
        query = build_query(self._database, table, needed, window)
        raw = read_integers(self._database, query, wanted.progress, rows)
        if window is None:
            bounds = (rows[0], rows[1] - 1) if rows else self._database.row_bounds(table.name)
            self._zones[table.name] = find_zones(raw["start"], raw["end"], bounds)
        names = raw.get("name", _NO_IDS) if table.name == "NVTX_EVENTS" else _NO_IDS
        if (inline := names <= INLINE_TEXT).any():
            # Equal texts share the number of a text, which replaces the rowids.
            numbers = self._inline.numbers(INLINE_TEXT - names[inline].astype(np.int64))
            names[inline] = np.where(numbers == NULL, UNKNOWN, INLINE_TEXT - numbers)
        arrays = {}
        for name in needed:
            arrays[name] = self._translate(table, name, raw)
        events = drop_invalid_rows(Events(arrays), quality or self.quality, table.name)
        if partial:
            events = events.select(is_among(events.kind, wanted.kinds))
        if late:
            shift = {"start": late, "end": late}
            events = Events({n: getattr(events, n) - shift.get(n, 0) for n in events.columns})
        return self._possible(events, table, quality or self.quality).having(*columns)

    def _held(self, table: schema.Table, wanted: Selection) -> Events | None:
        """Return the rows of a small table of the hosts in a window, of those read once for the
        windows of all GPUs; None if it is large, or has rows to drop, which are counted by window.
        """
        key, window = (table.name, wanted.kinds, *wanted.columns), wanted.window
        if key not in self._once:
            first, last = self._database.row_bounds(table.name) or (0, _MOST_HELD)
            is_small = last - first < _MOST_HELD and table.kinds[0] not in GPU_KINDS
            quality, self._once[key] = Quality(), None
            if is_small and {"start", "end"} <= {*wanted.columns}:
                events = self._read_table(table, replace(wanted, window=None), None, quality)
                self._once[key] = None if quality.dropped else events
        held: Events | None = self._once[key]
        if held is None or window is None:
            return None
        return held.select((held.start < window.end) & (held.end >= window.start))

    def _translate(self, table: schema.Table, column: str, raw: dict[str, Integers]) -> Column:
        """Return an event column, given the columns read."""
        rows = len(raw["start"])
        if column == "kind":
            if table.name not in schema.KIND_OF:
                return np.full(rows, table.kinds[0], np.int8)
            return _lookup(schema.KIND_OF[table.name], raw, "kind", rows, table.kinds[-1])
        if column in ("source_memory", "destination_memory"):
            memory = _lookup(schema.MEMORY_OF, raw, column, rows, Memory.UNKNOWN)
            if "kind" in raw:
                memory[is_among(raw["kind"], schema.MIGRATIONS)] = Memory.MANAGED
            return memory
        if column == "thread" and "thread" in table.columns and "process" in raw:
            return raw["process"] & 0xFFFFFF
        if column not in raw:
            empty = 0 if column == "process" else UNKNOWN
            if column == "process" and rows and not self.processes:
                self._process_index(0)
            return np.full(rows, empty, COLUMN_TYPES[column])
        if column == "process":
            distinct, where = number_ids(raw["process"] >> 24)
            indices = np.array(list(map(self._process_index, distinct.tolist())), np.int16)
            processes: Column = indices.take(where)
            return processes
        return raw[column]

    def _process_index(self, key: int) -> int:
        if key not in self._process_keys:
            pid = key & 0xFFFFFF
            members, names = self._recorded
            member, name = members.get(key, schema.NOBODY), names.get(pid, "")
            process = Process(pid, key >> 24, member.rank, name, member.host)
            self._process_keys[key] = self.add_process(process)
        return self._process_keys[key]

    @cached_property
    def session(self) -> Session:
        return schema.read_session(self._database)

    def read_nvml(self) -> Nvml:
        return schema.read_nvml(self._database, self.session.epoch_ns)

    @cached_property
    def _recorded(self) -> tuple[dict[int, schema.Member], dict[int, str]]:
        """Ranks and hosts of processes by globalPid without the thread, and names by pid."""
        names = self._database.select("PROCESSES", "pid", "name")
        return schema.read_members(self._database), {pid: plain(name) for pid, name in names}


def _export_of(database: Database) -> tuple[Window | None, list[str]]:
    """Return the window of a trace that was exported from another, and notes for users on it."""
    if not database.has("GPUTRACE_EXPORT", "name", "value"):
        return None, []
    about = dict(database.query("SELECT name, CAST(value AS TEXT) FROM GPUTRACE_EXPORT"))
    notes: list[str] = []
    if "redacted" in about:
        from gputrace.store.redact import REDACTED

        notes.append(REDACTED)
    window = None
    if {"start_ns", "end_ns"} <= about.keys():
        try:
            window = Window(int(about["start_ns"]), int(about["end_ns"]))
        except ValueError:
            return None, notes
        notes.append(
            f"cut out of a larger trace, {format_window(window.start, window.end)}: steps are "
            "counted within it, and waiting for data is known only if it holds several steps"
        )
    return window, notes


def _lookup(
    known: Mapping[int, int], raw: dict[str, Integers], column: str, rows: int, default: int
) -> NDArray[np.int8]:
    """Translate numbers of nsys; unknown ones and NULL become the default."""
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

_NO_IDS: Final = np.empty(0, np.int64)
_WITHIN_DEVICE, _PEER = 8, 10
"""Kinds by ENUM_CUDA_MEMCPY_OPER."""


def build_query(
    database: Database, table: schema.Table, columns: Collection[str], window: Window | None
) -> Query:
    """Build the query for some event columns, from the nsys columns that are there."""
    there = {
        column: next((c for c in candidates if database.has(table.name, c)), None)
        for column, candidates in table.columns.items()
        if column in columns
    }
    names = {column: name for column, name in there.items() if name is not None}
    if names.pop("thread", None):  # globalTid holds both
        names["process"] = "globalTid"
    values = {column: Value.of(name) for column, name in names.items()}
    _adapt(database, table, names, values)
    # Ids that are packed or translated are read whole, the rest in the contract's type.
    whole = dict.fromkeys(("process", "thread", "kind"), np.int64)
    types = {name: whole.get(name, COLUMN_TYPES[name]) for name in values}
    where = [Condition.among(Value.of("eventType"), table.types)] if table.types else []
    if window is not None:
        where.append(Condition.below(Value.of("start"), window.end))
        where.append(Condition.at_least(values.get("end", Value.of("end")), window.start))
    return Query(table.name, values, types, tuple(where))


def _adapt(
    database: Database, table: schema.Table, names: Mapping[str, str], values: dict[str, Value]
) -> None:
    """Replace the values that are not a column's alone."""
    if table.kinds[0] == Kind.GRAPH and "name" in names:
        values["name"] = Value.subtracted(GRAPHS, names["name"])
    if table.name == "NVTX_EVENTS":
        # Marks have no end; texts that were not registered have no id and stand for themselves.
        start = names["start"]
        values["end"] = Value.coalesce(names["end"], start) if "end" in names else values["start"]
        if "name" in names and database.has("NVTX_EVENTS", "text"):
            values["name"] = Value.coalesce_rowid(names["name"], INLINE_TEXT)
    if table.name == "GPUTRACE_MESSAGE":
        # A row with a number of ranks is of a communicator, and has no message.
        if "kind" in names:
            values["kind"] = Value("CASE WHEN ranks IS NULL THEN 1 ELSE 2 END")
        if "bytes" in names:
            values["bytes"] = Value.coalesce("ranks", "bytes")
    ends = ("srcDeviceId", "dstDeviceId")
    if table.kinds == COPY_KINDS and "kind" in names and database.has(table.name, *ends):
        # A device-to-device copy whose ends are two devices is a peer copy.
        values["kind"] = Value.replaced(names["kind"], _WITHIN_DEVICE, ends, _PEER)


def plain(value: object) -> str:
    """Return a text of the export, which need not be UTF-8, in a length that can be shown."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return bounded(text)


_ZONE_ROWS: Final = 1 << 12
"""Rows of a zone."""


class Zones(Struct, frozen=True):
    """The earliest start and the latest end in each stretch of `_ZONE_ROWS` rows of a table."""

    first: int
    """The first rowid."""
    start: Integers
    end: Integers

    def rows(self, window: Window) -> tuple[int, int]:
        """Return the range of rowids outside of which no row touches a window."""
        near = np.flatnonzero((self.start < window.end) & (self.end >= window.start))
        if not len(near):
            return self.first, self.first
        return self.first + int(near[0]) * _ZONE_ROWS, self.first + (int(near[-1]) + 1) * _ZONE_ROWS


def find_zones(start: Integers, end: Integers, bounds: tuple[int, int] | None) -> Zones | None:
    """Return the zones of rows with the first and last rowid given; None if rowids have holes."""
    if bounds is None or len(start) != bounds[1] - bounds[0] + 1:
        return None
    edges = np.arange(0, len(start), _ZONE_ROWS)
    return Zones(bounds[0], np.minimum.reduceat(start, edges), np.maximum.reduceat(end, edges))


def joined_zones(parts: Sequence[Zones | None]) -> Zones | None:
    """Join the zones of consecutive stretches; None if one of them has none."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    start, end = ([getattr(part, edge) for part in known] for edge in ("start", "end"))
    return Zones(known[0].first, np.concatenate(start), np.concatenate(end))


_ZERO_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)


class Texts:
    """Distinct texts of a column, numbered from 0, and the text number of each row."""

    def __init__(
        self, rowids: NDArray[np.int64], numbers: Integers, distinct: Sequence[bytes]
    ) -> None:
        """Take rowids in any order; texts are bytes, since they need not be UTF-8."""
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
        known = self._rowids[index] == rowids
        return np.where(known, self._numbers[index], NULL).astype(np.int64)

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """Return texts by number, skipping unknown numbers."""
        known = [number for number in numbers if 0 <= number < len(self._distinct)]
        return {number: plain(self._distinct[number]) for number in known}

    def matching(self, pattern: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers whose texts match a pattern, which must treat all digits alike."""
        if self._shape_of is None:
            shapes = dict[bytes, int]()
            texts = [text.translate(_ZERO_DIGITS) for text in self._distinct]
            self._shape_of = np.fromiter(_number(texts, shapes), np.int32, len(texts))
            self._shapes = list(map(plain, shapes))
        matches = np.array([re.search(pattern, shape) is not None for shape in self._shapes], bool)
        numbers = numbers[(numbers >= 0) & (numbers < len(self._distinct))]
        return np.asarray(numbers[matches[self._shape_of[numbers]]])


def read_texts(database: Database) -> Texts:
    """Read the texts of NVTX rows that are not in StringIds."""
    sql = (
        f"SELECT ifnull(CAST(rowid AS INTEGER), {NULL}), CAST(text AS TEXT) "
        f"FROM {database.quoted('NVTX_EVENTS')} WHERE text IS NOT NULL AND textId IS NULL"
    )
    rowids, distinct = array("q"), dict[bytes, int]()
    numbers = array("i")
    try:
        with closing(sqlite_security.connect(database.uri)) as connection:
            connection.text_factory = bytes
            cursor = connection.execute(sql)
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                ids, texts = zip(*rows, strict=True)
                rowids.extend(ids)
                numbers.extend(_number(texts, distinct))
                if len(rowids) > database.most_rows:
                    raise database.endless()
    except (*sqlite_security.ERRORS, MemoryError) as error:
        raise sqlite_error(database.path, error) from error
    return Texts(np.array(rowids, np.int64), np.array(numbers, np.int32), list(distinct))


_ROWS_AT_ONCE: Final = 16_384


def _number(texts: Sequence[bytes], distinct: dict[bytes, int]) -> Iterator[int]:
    """Return the number of each text; those that are not among the distinct texts get the next."""
    for text in dict.fromkeys(texts):
        distinct.setdefault(text, len(distinct))
    return map(distinct.__getitem__, texts)
