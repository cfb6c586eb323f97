"""nvprof's files as a `Trace`: each holds one process, with times of the machine's wall clock.

The clock of the columns is nanoseconds after the first moment in the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from gputrace.errors import InputError
from gputrace.traces.arrow import Integers
from gputrace.traces.broken import drop_broken
from gputrace.traces.columns import Query, read_integers
from gputrace.traces.demangling import demangle_all
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
from gputrace.traces.names import bounded
from gputrace.traces.nvprof.cutting import nvprof_tables
from gputrace.traces.nvprof.file import PREFIX
from gputrace.traces.nvprof.markers import join_markers
from gputrace.traces.nvprof.process import Card, first_moment, read_cards, read_contexts, read_pid
from gputrace.traces.nvprof.skew import measure_skew
from gputrace.traces.nvprof.tables import (
    MARKERS,
    OBJECT_COLUMNS,
    TABLES,
    Table,
    copy_kinds,
    fixed_name,
    memory_kinds,
    name_ids,
)
from gputrace.traces.sqlite import Database, quoted
from gputrace.traces.tables import Tables
from gputrace.traces.trace import Device, Process, Progress, Session, Trace, Window
from gputrace.units import format_ns

_THREAD_BITS: Final = 0x7FFFFFFF
"""Of the 32 bits of a pthread id that nvprof keeps, those that fit the column and tell threads
apart."""
_ENDS: Final = ("source_device", "destination_device")


def is_nvprof(database: Database) -> bool:
    """Whether nvprof wrote the tables, with or without GPU activity."""
    return database.has("StringTable", "_id_", "value") and any(
        name.startswith(PREFIX) and "_id_" in columns for name, columns in database.tables.items()
    )


class NvprofTrace(Trace):
    """One file of nvprof, of any version."""

    source = "nvprof"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path)
        self._database = database
        self._clear: dict[str, str] = {}
        """Names as people read them, by what the file has."""
        self._tables = [table for table in (*TABLES, MARKERS) if _usable(database, table)]
        if not self.kinds & set(GPU_KINDS):
            raise InputError(path, _nothing_on_gpu(self._tables))
        self._late = self._find_skew()
        self._epoch = first_moment(database, self._tables, self._late)
        self.processes.append(Process(read_pid(database)))

    @property
    def tables(self) -> Tables:
        return nvprof_tables(self._database, self._epoch, self._late)

    def on(self, database: Database) -> Self:
        part = copy(self)
        part._database, part.processes = database, list(self.processes)
        return part

    @property
    def session(self) -> Session:
        uuids = frozenset(card.uuid for card in self._cards.values())
        return Session(self._epoch or None, cards=uuids - {""})

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(kind for table in self._tables for kind in table.kinds)

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
        card = self._cards.get(device)
        return Device(process, device, UNKNOWN, *((card.name, card.uuid) if card else ()))

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

    def close(self) -> None:
        self._database.close()

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
        events = drop_broken(Events(arrays), self.quality, table.name)
        if not kinds >= set(table.kinds):
            events = events.select(np.isin(events.kind, sorted(kinds)))
        shifted = {edge: getattr(events, edge) - shift for edge in ("start", "end")}
        return Events({name: shifted.get(name, getattr(events, name)) for name in columns})

    def _query(self, table: Table, needed: Collection[str], window: Window | None) -> Query:
        """What to select for some event columns, of the columns that are there."""
        wanted = {*needed, *table.required, *(_ENDS if "kind" in needed else ())}
        there = {
            column: expression
            for column, expression in table.columns.items()
            if column in wanted and self._has(table, expression)
        }
        types = {column: _raw_type(column) for column in there}
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
        devices = np.full(len(contexts), UNKNOWN, np.int16)
        for context, device in self._contexts.items():
            devices[contexts == context] = device
        return devices

    @cached_property
    def _contexts(self) -> dict[int, int]:
        return read_contexts(self._database)

    @cached_property
    def _cards(self) -> dict[int, Card]:
        return read_cards(self._database)

    def _find_skew(self) -> int:
        """By how many nanoseconds the GPU's clock is ahead of the host's; a note tells of it."""
        tables = self._database.tables
        late = measure_skew(
            self._database,
            {table.name: frozenset(tables[table.full_name]) for table in self._tables},
        )
        if late:
            way = "after" if late > 0 else "before"
            note = (
                f"the times of the GPU's work were {format_ns(abs(late))} {way} its CUDA calls: "
                "moved by as much"
            )
            self.quality.notes.append(note)
        return late


def _raw_type(column: str) -> type[np.signedinteger[Any]]:
    """What is translated is read whole, the rest in the contract's type."""
    whole = ("kind", "thread", "device")
    return np.int64 if column in whole else COLUMN_TYPES.get(column, np.int64)


def _usable(database: Database, table: Table) -> bool:
    """Whether a table has rows, and the columns without which they tell nothing."""
    required = [table.columns[name].strip('"') for name in table.required]
    if not database.has(table.full_name, *required):
        return False
    sql = f"SELECT 1 FROM {quoted(table.full_name)} LIMIT 1"
    return next(database.query(sql), None) is not None


def _kinds(table: Table, raw: Mapping[str, Integers]) -> Column:
    rows = len(raw["start"])
    if len(table.kinds) == 1:
        return np.full(rows, table.kinds[0], np.int8)
    if table is MARKERS:
        return raw["kind"]
    unknown = np.full(rows, UNKNOWN)
    return copy_kinds(*(raw.get(column, unknown) for column in ("kind", *_ENDS)))


def _nothing_on_gpu(tables: Sequence[Table]) -> str:
    if tables:
        return "no GPU activity in this nvprof file, only the host's; record it again"
    return (
        "nvprof recorded no GPU activity in it: nothing ran on a GPU while it recorded; see "
        "--profile-from-start and --profile-child-processes, and record it again"
    )
