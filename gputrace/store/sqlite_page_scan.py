"""Columns of integers of SQLite tables: what to read, and the scan that reads it past SQLite.

SQLite's virtual machine takes most of the time that reading a trace costs.
`native/sqlite_page_scan.c` reads the pages of a table instead, on several threads, in the format of
sqlite.org/fileformat2.html. SQLite says which tables and columns there are, and answers itself
where the scan cannot: without the library, or where a table has anything but integers and NULL in
the columns asked for, is WITHOUT ROWID, has generated columns, or is broken.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.model.struct import Struct
from gputrace.native import address, library

Integers = NDArray[np.signedinteger[Any]]
Rows = tuple[int, int] | None
"""Rowids ``first <= rowid < end``, or None for all rows."""

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
_INT64: Final = np.iinfo(np.int64)
_COLUMN, _COALESCE, _COALESCE_ROWID, _SUBTRACTED, _UNLESS_EQUAL = range(5)


def quote_identifier(name: str) -> str:
    """Quote an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


class Value(Struct, frozen=True):
    """Integer computed from a row: SQL, and its equivalent for the scan, if there is one."""

    sql: str
    columns: tuple[str, ...] = ()
    """Columns of the table that it takes; empty for what SQLite alone can compute."""
    operation: int = _COLUMN
    constant: int = 0
    equal: int = 0

    @classmethod
    def of(cls, column: str) -> Value:
        """Return a column's value."""
        return cls(quote_identifier(column), (column,))

    @classmethod
    def coalesce(cls, column: str, other: str) -> Value:
        """Return a column's value, and where that is NULL another's."""
        sql = f"COALESCE({quote_identifier(column)}, {quote_identifier(other)})"
        return cls(sql, (column, other), _COALESCE)

    @classmethod
    def coalesce_rowid(cls, column: str, constant: int) -> Value:
        """Return a column's value, and where that is NULL a constant minus the rowid."""
        sql = f"COALESCE({quote_identifier(column)}, {constant} - rowid)"
        return cls(sql, (column,), _COALESCE_ROWID, constant)

    @classmethod
    def subtracted(cls, constant: int, column: str) -> Value:
        """Return a constant minus a column's value."""
        return cls(f"{constant} - {quote_identifier(column)}", (column,), _SUBTRACTED, constant)

    @classmethod
    def replaced(cls, column: str, equal: int, ends: tuple[str, str], constant: int) -> Value:
        """Return a column's value, but a constant where it equals one and two others differ."""
        name, (first, second) = quote_identifier(column), map(quote_identifier, ends)
        condition = f"{name} = {equal} AND {first} <> {second}"
        sql = f"CASE WHEN {condition} THEN {constant} ELSE {name} END"
        return cls(sql, (column, *ends), _UNLESS_EQUAL, constant, equal)


class Condition(Struct, frozen=True):
    """A value within one of some ranges, both ends included; not NULL."""

    value: Value
    ranges: tuple[tuple[int, int], ...]
    sql: str

    @classmethod
    def below(cls, value: Value, limit: int) -> Condition:
        return cls(value, ((_INT64.min, _clipped(limit - 1)),), f"{value.sql} < {limit}")

    @classmethod
    def at_least(cls, value: Value, limit: int) -> Condition:
        return cls(value, ((_clipped(limit), _INT64.max),), f"{value.sql} >= {limit}")

    @classmethod
    def among(cls, value: Value, numbers: tuple[int, ...]) -> Condition:
        ranges = tuple((number, number) for number in numbers)
        return cls(value, ranges, f"{value.sql} IN ({', '.join(map(str, numbers))})")


def _clipped(number: int) -> int:
    return max(int(_INT64.min), min(number, int(_INT64.max)))


class Query(Struct, frozen=True):
    """Selection of columns and rows: values by result name, and their numpy types."""

    table: str
    values: Mapping[str, Value]
    types: Mapping[str, type[np.signedinteger[Any]]]
    where: tuple[Condition, ...] = ()
    """Conditions that a row has to meet, all of them."""

    def sql(self, table: str, rows: Rows = None, cast: bool = False) -> str:
        """Return the statement for a row range of the table, an identifier in SQL; ``cast``
        converts every value to an integer.
        """
        pattern = "CAST({} AS INTEGER)" if cast else "{}"
        columns = ", ".join(pattern.format(value.sql) for value in self.values.values())
        where = " AND ".join(condition.sql for condition in self.where) or "1"
        order = " ORDER BY rowid" if rows is not None else ""  # The natural order, made explicit.
        return f"SELECT {columns} FROM {table} WHERE ({where}){within(rows)}{order}"


def within(rows: Rows) -> str:
    """Return the end of an SQL condition, which restricts it to a row range."""
    return "" if rows is None else f" AND rowid >= {rows[0]} AND rowid < {rows[1]}"


class _File(ctypes.Structure):
    _fields_ = [
        ("pages", ctypes.c_int64),
        ("descriptor", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("usable", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class _Column(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_int32),
        ("absence", ctypes.c_int32),
        ("constant", ctypes.c_int64),
    ]


class _Value(ctypes.Structure):
    _fields_ = [
        ("operation", ctypes.c_int32),
        ("columns", ctypes.c_int32 * 3),
        ("equal", ctypes.c_int64),
        ("constant", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("ranges", ctypes.c_int32),
        ("limits", ctypes.c_void_p),
    ]


_NO_DEFAULT, _NULL_DEFAULT, _INTEGER_DEFAULT, _ROWID = range(4)
_MOST_COLUMNS: Final = 24
_LEAVES_AT_ONCE: Final = 2048
_ROWS_WORTH_A_THREAD: Final = 50_000


class TableLayout(Struct, frozen=True):
    """Where a table is in its file, and the columns of its records."""

    root: int
    columns: Mapping[str, _Column]
    """By name, those that can be read."""

    @classmethod
    def read(cls, query: Callable[..., Iterable[Any]], table: str) -> TableLayout | None:
        """Return the layout of a table by SQLite's schema; None if it cannot be scanned."""
        sql = "SELECT rootpage, sql FROM sqlite_master WHERE type = 'table' AND name = ?"
        entries = list(query(sql, (table,)))
        rows = list(query(f"PRAGMA table_xinfo({quote_identifier(table)})"))
        # Generated and hidden columns are not where their number says.
        if len(entries) != 1 or any(hidden for *_, hidden in rows):
            return None
        ((root, declaration),) = entries
        keys = [name for _, name, _, _, _, key, _ in rows if key]
        columns = {}
        for index, name, type_, _, default, key, _ in rows:
            # Integers of other affinities are not returned as they are stored
            # (sqlite.org/datatype3.html, section 3.1).
            kind = str(type_).upper()
            if "INT" not in kind and re.search("CHAR|CLOB|TEXT|REAL|FLOA|DOU[B]", kind):
                continue
            column = _Column(index, *_absence(kind, default))
            if key and len(keys) == 1 and kind == "INTEGER":
                # That is the rowid, unless the column's definition says DESC.
                if re.search(r"\bDESC\b", str(declaration), re.IGNORECASE):
                    continue
                column.absence = _ROWID
            columns[name] = column
        return cls(root, columns) if isinstance(root, int) and 1 < root < 1 << 32 else None

    def select(self, query: Query) -> dict[str, int] | None:
        """Return a position for each column that a query takes; None if one cannot be read."""
        positions: dict[str, int] = {}
        for value in (*query.values.values(), *[condition.value for condition in query.where]):
            if not value.columns or not self.columns.keys() >= set(value.columns):
                return None
            for name in value.columns:
                positions.setdefault(name, len(positions))
        return positions


def _absence(type_: str, default: object) -> tuple[int, int]:
    """Return the value of a column in records from before it was added."""
    if default is None or str(default).upper() == "NULL":
        return _NULL_DEFAULT, 0
    if "INT" in type_.upper() and re.fullmatch(r"-?[0-9]{1,18}", str(default)):
        return _INTEGER_DEFAULT, int(str(default))
    return _NO_DEFAULT, 0


class _Leaves(NamedTuple):
    """Leaves of a table: the page of each, and its lowest and highest rowid."""

    pages: NDArray[np.uint32]
    lows: NDArray[np.int64]
    highs: NDArray[np.int64]


class Scanner:
    """An SQLite file whose tables are scanned; it must not change.

    It is open during reads alone, since the traces of a run may be as many as a process may open.
    """

    def __init__(self, path: Path) -> None:
        """Look at a file; raise OSError if that fails, and ValueError if it cannot be scanned."""
        loaded = library()
        if loaded is None:
            raise ValueError("the package was built without a compiler")
        self._library, self._path = loaded, path
        with path.open("rb") as file:
            head, self._about = file.read(100), os.fstat(file.fileno())
        size, reserved, fractions, changes, pages, valid_for = struct.unpack(
            ">16xH2xB3sII60xI4x", head
        )
        size = 65536 if size == 1 else size
        in_file, rest = divmod(self._about.st_size, size or 1)
        # Old writers leave the page count stale.
        pages = pages if pages and changes == valid_for else in_file
        if rest or pages > in_file or fractions != b"\x40\x20\x20":
            raise ValueError("a header that SQLite has to judge")
        self._file = pages, size, size - reserved

    def read(
        self,
        layout: TableLayout,
        query: Query,
        first: int,
        end: int,
        count: Callable[[int], None] | None,
    ) -> dict[str, Integers] | None:
        """Read a query's columns in rows ``first <= rowid < end``; None where SQLite has to.

        ``count`` is called with numbers of rows that have been read, by several threads; None for
        nobody.
        """
        positions = layout.select(query)
        if not positions or len(positions) > _MOST_COLUMNS or end > _INT64.max:
            return None
        ids = range(first, end)
        with suppress(OSError), self._path.open("rb") as opened:
            if not os.path.samestat(os.fstat(opened.fileno()), self._about):
                return None  # Another has its name.
            file = _File(self._file[0], opened.fileno(), *self._file[1:])
            if (leaves := self._leaves(file, layout.root, ids)) is None:
                return None
            # Each leaf's rows have ids of their own, as many elements as rows fit between them.
            starts = np.append(np.clip(leaves.lows, first, end), end) - first
            outputs = {name: np.empty(len(ids), query.types[name]) for name in query.values}
            columns = (_Column * len(positions))(*map(layout.columns.__getitem__, positions))
            threads = min(count_threads(len(ids)), len(leaves.pages))
            edges = [len(leaves.pages) * part // threads for part in range(threads + 1)]
            begins = starts[edges].tolist()
            values = []
            for begin in begins[:-1]:
                values.append(_values(query, positions, outputs, begin))
            pages, highs = address(leaves.pages), address(leaves.highs)

            def read_part(part: int) -> int:
                """Read the leaves of a part; return how many rows there are, or -1."""
                row, room = 0, begins[part + 1] - begins[part]
                wanted, _limits = values[part]
                for leaf in range(edges[part], edges[part + 1], _LEAVES_AT_ONCE):
                    size = min(_LEAVES_AT_ONCE, edges[part + 1] - leaf)
                    before = row
                    row = self._library.gputrace_scan_leaves(
                        *(ctypes.byref(file), pages + leaf * leaves.pages.itemsize),
                        *(highs + leaf * leaves.highs.itemsize, size),
                        *(int(leaves.lows[leaf]), first, end - 1, layout.root),
                        *(columns, len(columns), wanted, len(wanted), row, room),
                    )
                    if row < 0:
                        return -1
                    if count is not None:
                        count(row - before)
                return row

            rows = map_in_threads(read_part, range(threads))
            if min(rows) < 0:
                return None
            if sum(rows) == len(ids):
                return outputs
            pieces = [slice(at, at + length) for at, length in zip(begins[:-1], rows, strict=True)]
            return {
                name: np.concatenate([column[piece] for piece in pieces])
                for name, column in outputs.items()
            }
        return None  # It has gone.

    def _leaves(self, file: _File, root: int, ids: range) -> _Leaves | None:
        """Return the leaves with rows of a range of ids; None where SQLite has to find them."""
        pages, highs = np.empty(file.pages, np.uint32), np.empty(file.pages, np.int64)
        low, room = ctypes.c_int64(), (address(pages), address(highs), len(pages))
        leaves = self._library.gputrace_list_leaves(
            ctypes.byref(file), root, ids.start, ids.stop - 1, *room, ctypes.byref(low)
        )
        if leaves <= 0:
            return None
        lows = np.concatenate([[low.value], highs[: leaves - 1] + 1])
        return _Leaves(pages[:leaves], lows, highs[:leaves])


def _values(
    query: Query, positions: Mapping[str, int], outputs: Mapping[str, Integers], base: int
) -> tuple[Any, list[Any]]:
    """Return the values of a query as the library takes them, and what has to outlive them."""
    values, computed, kept = [], list(query.values.values()), []
    for name in query.values:
        output = outputs[name][base:]
        values.append(_Value(output=address(output), width=output.itemsize))
    for condition in query.where:
        limits = np.array(condition.ranges, np.int64)
        values.append(_Value(limits=address(limits), ranges=len(limits)))
        computed.append(condition.value)
        kept.append(limits)
    for scanned, value in zip(values, computed, strict=True):
        first, *more = map(positions.__getitem__, value.columns)
        scanned.columns[:] = [first, *more, first, first][:3]
        scanned.operation, scanned.equal = value.operation, value.equal
        scanned.constant = value.constant
    return (_Value * len(values))(*values), kept


def count_threads(rows: int) -> int:
    """Return by how many threads so many rows are best read."""
    return max(1, min(count_cores(), rows // _ROWS_WORTH_A_THREAD, 16))


def count_cores() -> int:
    """Return how many cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()) or 1


def map_in_threads(work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
    """Do the work of all parts concurrently; return the results in order."""
    if len(parts) == 1:
        return [work(parts[0])]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, parts))
