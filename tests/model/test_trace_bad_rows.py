"""Rows that make no sense are left out and counted; the others are analyzed as if alone."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

import gputrace
from tests.helpers import command
from tests.helpers.command import assert_refused
from tests.helpers.exports import KERNEL, MEMCPY, Export, Value

NO_TIME = "no timestamp"
NEGATIVE = "end before start"
IMPOSSIBLE = "impossible time"


class Found(NamedTuple):
    span_ns: int
    compute_ns: int
    idle_ns: int
    dropped: dict[str, int]


def found(path: Path) -> Found:
    """Analyze an export with one GPU; the note in the text agrees."""
    with gputrace.open(path) as trace:
        analysis = trace.analyze()
    for reason, rows in analysis.dropped_rows.items():
        assert re.search(rf"\b{rows} rows? left out: {reason}", str(analysis))
    (gpu,) = analysis.gpus
    return Found(gpu.span_ns, gpu.compute_ns, gpu.idle_ns, dict(analysis.dropped_rows))


def with_row(start: Value, end: Value) -> Export:
    """100 ns with 80 ns of computation in them, and one more kernel."""
    export = Export().kernel(1000, 1050).kernel(1070, 1100)
    return export.add(
        KERNEL, **(export.rows[KERNEL][0] | {"start": start, "end": end, "streamId": 8})
    )


@pytest.mark.parametrize(
    ("start", "end", "dropped"),
    [
        (1060, 1050, {NEGATIVE: 1}),
        (1060, -5, {NEGATIVE: 1}),
        (0, 0, {NO_TIME: 1}),
        (0, 1060, {NO_TIME: 1}),
        (1060, 0, {NEGATIVE: 1}),
        (None, None, {NO_TIME: 1}),
        (None, 1060, {NO_TIME: 1}),
        (1060, None, {NO_TIME: 1}),
        (1060, 2**62 + 1, {IMPOSSIBLE: 1}),
        (2**62 + 1, 2**62 + 2, {IMPOSSIBLE: 1}),
        (-(2**63), 1060, {IMPOSSIBLE: 1}),
        (-(2**63), 2**63 - 1, {IMPOSSIBLE: 1}),
        (1060, 1e300, {IMPOSSIBLE: 1}),
        (1060, float("inf"), {IMPOSSIBLE: 1}),
        ("then", "now", {NO_TIME: 1}),
        (b"\xff", b"\xfe", {NO_TIME: 1}),
        (1060, "now", {NEGATIVE: 1}),
    ],
)
def test_a_row_without_sensible_times_is_left_out(
    start: Value, end: Value, dropped: dict[str, int], tmp_path: Path
) -> None:
    path = with_row(start, end).write(tmp_path / "trace.sqlite")
    assert found(path) == Found(100, 80, 20, dropped)


@pytest.mark.parametrize(
    ("start", "end"), [(1060, 1060), (1060.0, 1060.9), ("1060", "1060"), (1020, 1030)]
)
def test_a_row_that_adds_nothing_stays(start: Value, end: Value, tmp_path: Path) -> None:
    path = with_row(start, end).write(tmp_path / "trace.sqlite")
    assert found(path) == Found(100, 80, 20, {})
    with gputrace.open(path) as trace:
        assert trace.analyze().gpus[0].kernels == 3


def test_a_trace_may_begin_at_0(tmp_path: Path) -> None:
    path = Export().kernel(0, 40).kernel(60, 100).write(tmp_path / "trace.sqlite")
    assert found(path) == Found(100, 80, 20, {})


def test_a_trace_may_begin_before_its_origin(tmp_path: Path) -> None:
    path = Export().kernel(-100, -60).kernel(-40, -2).write(tmp_path / "trace.sqlite")
    assert found(path) == Found(98, 78, 20, {})


def test_times_of_a_clock_since_1970_are_times(tmp_path: Path) -> None:
    now = 1_800_000_000 * 10**9
    path = Export().kernel(now, now + 40).kernel(now + 60, now + 101).write(tmp_path / "t.sqlite")
    assert found(path) == Found(101, 81, 20, {})


def test_a_lost_start_is_seen_beside_an_impossible_time(tmp_path: Path) -> None:
    export = with_row(0, 1060)
    export.add(KERNEL, **(export.rows[KERNEL][0] | {"start": 5, "end": 2**63 - 1}))
    path = export.write(tmp_path / "trace.sqlite")
    assert found(path) == Found(100, 80, 20, {NO_TIME: 1, IMPOSSIBLE: 1})


def test_the_command_goes_on_and_says_how_many(tmp_path: Path) -> None:
    path = with_row(1060, 1050).kernel(0, 0).write(tmp_path / "trace.sqlite")
    ran = command.gputrace("analyze", path)
    assert (ran.code, ran.err) == (0, "")
    for reason in (NEGATIVE, NO_TIME):
        assert re.search(rf"^note: 1 rows? left out: {reason}", ran.out, re.MULTILINE)


def test_rows_of_every_table_are_counted_together(tmp_path: Path) -> None:
    export = with_row(5, 4).copy(1060, 1050).memset(0, 0)
    path = export.write(tmp_path / "trace.sqlite")
    assert found(path) == Found(100, 80, 20, {NEGATIVE: 2, NO_TIME: 1})


def test_a_broken_row_is_counted_once_however_often_it_is_read(tmp_path: Path) -> None:
    export = with_row(1060, 1050)
    export.copy(1060, 1050, 10, srcDeviceId=0, dstDeviceId=1)
    export.copy(1070, 1080, 10, srcDeviceId=0, dstDeviceId=1)
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        assert trace.analyze().dropped_rows == {NEGATIVE: 2}
        assert trace.analyze().dropped_rows == {NEGATIVE: 2}


def test_a_file_without_one_usable_row_is_refused(tmp_path: Path) -> None:
    path = Export().kernel(0, 0).kernel(20, 10).write(tmp_path / "trace.sqlite")
    assert_refused(command.gputrace("analyze", path), 3, str(path), "usable times")


@pytest.mark.parametrize("value", [2**62, -(2**63), 1.5, "text", b"\0\xff", None])
@pytest.mark.parametrize(
    "column", ["deviceId", "streamId", "correlationId", "globalPid", "demangledName"]
)
def test_nonsense_in_another_column_costs_no_time(
    column: str, value: Value, tmp_path: Path
) -> None:
    export = Export().kernel(0, 40).kernel(60, 100)
    for row in export.rows[KERNEL]:
        row[column] = value
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        (gpu,) = trace.analyze().gpus
    assert (gpu.span_ns, gpu.compute_ns, gpu.idle_ns) == (100, 80, 20)


@pytest.mark.parametrize("value", [2**62, -5, 1.5, "text", None])
@pytest.mark.parametrize(
    "column", ["copyKind", "srcKind", "dstKind", "bytes", "srcDeviceId", "dstDeviceId"]
)
def test_nonsense_about_a_copy_leaves_it_a_copy(column: str, value: Value, tmp_path: Path) -> None:
    export = Export().kernel(0, 40).copy(60, 100)
    export.rows[MEMCPY][0][column] = value
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        (gpu,) = trace.analyze().gpus
    assert (gpu.copies, gpu.h2d_ns + gpu.other_copy_ns, gpu.idle_ns) == (1, 40, 20)


@pytest.mark.parametrize("last", [10**6, 2**40, 2**63 - 1])
@pytest.mark.parametrize("first", [-(2**63), -5, 1])
def test_rows_far_apart_in_the_file_are_all_read(first: int, last: int, tmp_path: Path) -> None:
    path = Export().kernel(0, 40).kernel(60, 100).copy(45, 50).write(tmp_path / "trace.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        for rowid, start in ((first, 0), (last, 60)):
            sql = f"UPDATE {KERNEL} SET rowid = ? WHERE start = ?"
            database.execute(sql, (rowid, start))
    assert found(path) == Found(100, 80, 15, {})


def test_many_rows_of_which_one_is_no_integer(tmp_path: Path) -> None:
    """Past one batch of rows, the reader has already filled its columns when it meets one."""
    export = Export()
    for index in range(70_000):
        export.kernel(10 * index, 10 * index + 5)
    export.rows[KERNEL][-1]["end"] = float(10 * 69_999 + 6)
    export.rows[KERNEL][-2]["start"] = "no time"
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        analysis = trace.analyze()
    (gpu,) = analysis.gpus
    assert gpu.compute_ns == 69_998 * 5 + 6
    assert analysis.dropped_rows == {NO_TIME: 1}


def test_a_table_without_rowids_is_read(tmp_path: Path) -> None:
    path = Export().copy(0, 40).write(tmp_path / "trace.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"ALTER TABLE {MEMCPY} RENAME TO old")
        columns = ", ".join(row[1] for row in database.execute("PRAGMA table_info(old)"))
        columns = columns.replace("end", '"end"')
        database.execute(f"CREATE TABLE {MEMCPY} ({columns}, PRIMARY KEY (start)) WITHOUT ROWID")
        database.execute(f"INSERT INTO {MEMCPY} SELECT * FROM old")
        database.execute("DROP TABLE old")
    with gputrace.open(path) as trace:
        assert trace.analyze().gpus[0].h2d_ns == 40
