"""A text column of an SQLite table that keeps its texts in the rows: each different text once.

NVTX ranges whose names count something (``aten::add, seq = 17``) have nearly as many texts as
rows, and there are millions. So they stay Arrow's; only those asked for become Python strings, and
a pattern is tried on texts that differ in nothing but digits once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.arrow import NULL, Integers
from gputrace.traces.columns import Rows, in_threads, read_batches, row_ranges
from gputrace.traces.names import bounded
from gputrace.traces.sqlite import Database, broken, quoted

_ZERO_FOR_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)


class Texts:
    """The different texts of a column, numbered from 0, and which row has which."""

    def __init__(self, rowids: NDArray[np.int64], numbers: Integers, distinct: Any) -> None:
        """``distinct`` is an Arrow array of bytes; ``rowids`` are in any order."""
        if (np.diff(rowids) < 0).any():
            order = np.argsort(rowids, kind="stable")
            rowids, numbers = rowids[order], numbers[order]
        self._rowids, self._numbers = rowids, numbers
        self._distinct = distinct
        self._shape_of: Integers | None = None
        self._shapes: list[str] = []

    def numbers(self, rowids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the text of each row, NULL where a row has none."""
        if not len(self._rowids):
            return np.full(len(rowids), NULL)
        place = np.minimum(np.searchsorted(self._rowids, rowids), len(self._rowids) - 1)
        found: NDArray[np.int64] = np.where(
            self._rowids[place] == rowids, self._numbers[place], NULL
        )
        return found

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """Texts by number, for the numbers that there are."""
        known = [number for number in numbers if 0 <= number < len(self._distinct)]
        return dict(zip(known, _decoded(self._distinct.take(_arrow_array(known))), strict=True))

    def matching(self, pattern: re.Pattern[str], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the numbers in whose texts the pattern is found; digits must be alike to it."""
        if self._shape_of is None:
            self._shape_of, self._shapes = _shapes(self._distinct)
        found = np.array([pattern.search(shape) is not None for shape in self._shapes], bool)
        numbers = numbers[(numbers >= 0) & (numbers < len(self._distinct))]
        matching: NDArray[np.int64] = numbers[found[self._shape_of[numbers]]]
        return matching


def read_texts(database: Database, table: str, column: str, where: str) -> Texts:
    """The texts of a column in the rows that meet an SQL condition, NULL left out.

    Raises InputError on a broken file.
    """
    sql = (
        f"SELECT rowid, CAST({quoted(column)} AS TEXT) FROM {quoted(table)} "
        f"WHERE {quoted(column)} IS NOT NULL AND {where}"
    )
    parts = in_threads(lambda rows: _read_range(database, sql, rows), row_ranges(database, table))
    return _number(list(chain.from_iterable(parts)))


def _number(batches: list[tuple[Any, Any]]) -> Texts:
    import pyarrow

    rowids = [np.frombuffer(ids.buffers()[1], np.int64, len(ids)) for ids, _ in batches]
    texts = pyarrow.chunked_array([texts for _, texts in batches], pyarrow.large_binary())
    return Texts(np.concatenate([np.empty(0, np.int64), *rowids]), *_encode(texts))


def _read_range(database: Database, sql: str, rows: Rows) -> list[tuple[Any, Any]]:
    """Batches of rowids and texts, these as bytes: nobody says that they are UTF-8."""
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
        raise broken(database.path, error) from error


def _encode(texts: Any) -> tuple[Integers, Any]:
    """The number of each of the texts, a chunked array, and the different texts by number."""
    import pyarrow

    chunks = texts.dictionary_encode().chunks
    if not chunks:
        return np.empty(0, np.int32), pyarrow.array([], pyarrow.large_binary())
    parts = [np.frombuffer(c.indices.buffers()[1], np.int32, len(c)) for c in chunks]
    return np.concatenate(parts), chunks[-1].dictionary


def _shapes(texts: Any) -> tuple[Integers, list[str]]:
    """The texts with 0 for every digit: the number of each, and the different ones by number."""
    import pyarrow

    numbers, distinct = _encode(pyarrow.chunked_array([_without_digits(texts)]))
    return numbers, _decoded(distinct)


def _without_digits(texts: Any) -> Any:
    import pyarrow

    if not len(texts):
        return texts
    _, offsets, data = texts.buffers()
    letters = pyarrow.py_buffer(data.to_pybytes().translate(_ZERO_FOR_DIGITS))
    buffers = [None, offsets, letters]
    return pyarrow.Array.from_buffers(texts.type, len(texts), buffers, offset=texts.offset)


def _decoded(texts: Any) -> list[str]:
    return [bounded(text.decode("utf-8", "replace")) for text in texts.to_pylist()]


def _arrow_array(numbers: list[int]) -> Any:
    import pyarrow

    return pyarrow.array(numbers, pyarrow.int64())
