"""Rows found again: by an id that occurs in them, and by the window that they lie in."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gputrace.model.events import (
    UNKNOWN,
    IdLookup,
    Kind,
    distinct_ids,
    is_among,
    number_ids,
    order_by_group,
    sort_numbers,
)
from gputrace.model.options import Window
from gputrace.readers.nsys import find_zones
from gputrace.readers.registry import open_trace
from gputrace.store.sqlite_reader import read_integers
from tests.helpers.exports import Export, global_id
from tests.helpers.memory_traces import rows

DENSE, SPARSE = st.integers(-5, 20), st.integers(-(1 << 40), 1 << 40)


def ids(least: int = 0) -> st.SearchStrategy[NDArray[np.int64]]:
    """Few different ones, or ones that are far apart."""
    lists = st.one_of(*(st.lists(of, min_size=least, max_size=40) for of in (DENSE, SPARSE)))
    return lists.map(lambda values: np.array(values, np.int64))


@pytest.mark.usefixtures("columns")
@given(ids())
def test_distinct_ids_are_in_order_and_numbered(column: NDArray[np.int64]) -> None:
    assert distinct_ids(column).tolist() == sorted(set(column.tolist()))
    distinct, number = number_ids(column)
    assert distinct[number].tolist() == column.tolist()


@pytest.mark.usefixtures("columns")
@given(ids(1), ids())
def test_an_id_is_looked_up_at_its_first_row(
    column: NDArray[np.int64], more: NDArray[np.int64]
) -> None:
    wanted = np.concatenate([column, more])
    known = column.tolist()
    expected = [known.index(id) if id in known else UNKNOWN for id in wanted.tolist()]
    assert IdLookup(column, np.arange(len(column))).rows(wanted).tolist() == expected


@pytest.mark.usefixtures("columns")
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9), st.integers(0, 1 << 31))
def test_numbers_are_sorted(few: list[int], seed: int) -> None:
    many = np.random.default_rng(seed).integers(-(1 << 40), 1 << 40, 5_000)
    column = np.concatenate([many, np.array(few, np.int64)])
    expected = np.sort(column)
    sort_numbers(column)
    assert (column == expected).all()


@pytest.mark.usefixtures("columns")
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=40), st.booleans())
def test_rows_come_by_group_then_start_then_as_they_are(
    rows: list[tuple[int, int]], is_sorted: bool
) -> None:
    rows = sorted(rows, key=lambda row: row[1]) if is_sorted else rows
    group, start = np.array(rows, np.int64).reshape(-1, 2).T
    order, edges = order_by_group(group.astype(np.int16), 6, start)
    assert order.tolist() == sorted(range(len(rows)), key=rows.__getitem__)
    begins = [sum(of < number for of, _ in rows) for number in range(7)]
    assert edges.tolist() == begins


@pytest.mark.usefixtures("columns")
def test_a_row_of_no_group_is_refused() -> None:
    for group in (-1, 2):
        with pytest.raises(ValueError, match="beyond 2"):
            order_by_group(np.array([0, group]), 2, np.zeros(2, np.int64))


@given(ids(), ids(), st.sampled_from([np.int16, np.int32, np.int64]))
def test_ids_are_among_those_wanted_whatever_their_width(
    column: NDArray[np.int64], wanted: NDArray[np.int64], width: type[np.signedinteger[Any]]
) -> None:
    narrow = column.astype(width)
    expected = [id in wanted.tolist() for id in narrow.tolist()]
    assert is_among(narrow, wanted).tolist() == expected
    assert is_among(narrow, wanted.tolist()).tolist() == expected


@given(st.integers(0, 2**32), st.integers(0, 30_000), st.integers(0, 30_000))
def test_no_row_of_a_window_lies_outside_its_zones(seed: int, first: int, last: int) -> None:
    draw = np.random.default_rng(seed)
    start = np.arange(20_000) + draw.integers(0, 3_000, 20_000)
    end = start + draw.integers(0, 500, 20_000)
    zones = find_zones(start, end, (7, 20_006))
    assert zones is not None
    window = Window(min(first, last), max(first, last))
    touching = 7 + np.flatnonzero((start < window.end) & (end >= window.start))
    low, high = zones.rows(window)
    assert ((touching >= low) & (touching < high)).all()


def test_a_window_in_order_of_time_is_a_small_part() -> None:
    times = np.arange(1_000_000)
    zones = find_zones(times, times, (1, len(times)))
    assert zones is not None
    low, high = zones.rows(Window(500_000, 500_010))
    assert high - low <= 8192


def test_holes_among_the_rowids_leave_no_zones() -> None:
    times: NDArray[Any] = np.arange(10)
    assert find_zones(times, times, (1, 11)) is None
    assert find_zones(times, times, None) is None


@pytest.mark.parametrize(("holes", "touching"), [(False, 105), (True, 95)])
def test_a_window_reads_the_same_after_the_whole(
    holes: bool, touching: int, tmp_path: Path
) -> None:
    export = Export()
    for number in range(12_000):
        start = 7919 * number % 12_000
        export.kernel(start, start + 5)
    path = export.write(tmp_path / "trace.sqlite")
    if holes:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE start % 10 = 0")
    with open_trace(path) as trace:
        of_window = ([Kind.KERNEL], ["start", "end"], Window(6_000, 6_100))
        before = rows(trace.events(*of_window))
        trace.events([Kind.KERNEL], ["start", "end"])
        assert rows(trace.events(*of_window)) == before
    assert len(before) == touching


def test_a_small_table_of_the_host_is_read_once_for_all_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, columns = Export().kernel(0, 100), ("start", "end", "process")
    for start in range(10, 90, 10):
        export.call(start, start + 5, "cudaLaunchKernel")
    read = Mock(wraps=read_integers)
    monkeypatch.setattr("gputrace.readers.nsys.read_integers", read)
    with open_trace(export.write(tmp_path / "t.sqlite")) as trace:
        whole = trace.events([Kind.API], columns)
        before = read.call_count
        for window in (Window(0, 30), Window(35, 41), Window(60, 95), Window(200, 300)):
            touching = (whole.start < window.end) & (whole.end >= window.start)
            expected = whole.start[touching].tolist()
            assert trace.events([Kind.API], columns, window).start.tolist() == expected
        assert read.call_count == before + 1


def test_rows_to_drop_are_counted_by_window(tmp_path: Path) -> None:
    export = Export().kernel(0, 100)
    export.call(10, 15, "cudaLaunchKernel").call(40, 35, "cudaLaunchKernel")
    with open_trace(export.write(tmp_path / "t.sqlite")) as trace:
        trace.events([Kind.API], ("start", "end"), Window(5, 20))
        assert trace.quality.dropped == {}
        trace.events([Kind.API], ("start", "end"), Window(30, 50))
        assert trace.quality.dropped == {"end before start": 1}


def test_ranges_of_the_host_are_of_the_kinds_that_the_file_has(tmp_path: Path) -> None:
    export = Export().kernel(0, 100)
    export.give("GPUTRACE_HOST_RANGE", "start", "end", "globalTid", "nameId", "kind")
    others = {Kind.COLLECTION, Kind.PHASE, Kind.LOADER, Kind.COMPILATION, Kind.MODULE, Kind.SOURCE}
    for number, kind in ((3, Kind.COLLECTION), (6, Kind.COMPILATION)):
        who = {"globalTid": global_id(100, thread=1), "nameId": export.string("what")}
        export.add("GPUTRACE_HOST_RANGE", start=1, end=2, **who, kind=number)
        with open_trace(export.write(tmp_path / f"{number}.sqlite")) as trace:
            assert kind in trace.kinds
            # That a loader was never waited for is known, too.
            assert Kind.DATA_WAIT in trace.kinds
        others.remove(kind)
    with open_trace(tmp_path / "6.sqlite") as trace:
        assert trace.kinds.isdisjoint(others)
        assert trace.events(list(others), ("start",)).start.tolist() == []
