"""Scans of table pages give what SQLite gives, or leave the answer to it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gputrace
from gputrace.native import library
from gputrace.report import to_json
from gputrace.store import sqlite_page_scan
from gputrace.store.sqlite_page_scan import Query, Value
from gputrace.store.sqlite_reader import Database, read_integers
from tests.fuzz import native, pages
from tests.helpers.recordings import unpack

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    rows=st.sampled_from([0, 1, 5, 60, 700]),
    page=st.sampled_from([512, 1024, 4096, 65536]),
    rows_worth_a_thread=st.sampled_from([7, 50_000]),
)
def test_a_table_is_scanned_as_sqlite_reads_it(
    seed: int,
    rows: int,
    page: int,
    rows_worth_a_thread: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("scan") / "trace.sqlite"
    pages.write_table(path, seed, rows, page)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_page_scan, "_ROWS_WORTH_A_THREAD", rows_worth_a_thread)
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
        assert pages.compare(path) == "scanned"


def write(path: Path, declaration: str, *rows: tuple[object, ...]) -> Database:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE events {declaration}")
        marks = ", ".join("?" * len(rows[0]))
        database.executemany(f"INSERT INTO events VALUES ({marks})", rows)
    return Database(path)


def read(database: Database, *columns: str) -> tuple[list[list[int]], bool]:
    """The columns, and whether they were scanned."""
    query = Query(
        "events", {name: Value.of(name) for name in columns}, dict.fromkeys(columns, np.int64)
    )
    scanned = pages.scan(database, query)
    answer = read_integers(database, query)
    database.__dict__["scanner"] = None
    assert pages.same(answer, read_integers(database, query))
    database.close()
    return [column.tolist() for column in answer.values()], scanned is not None


@pytest.mark.parametrize(
    ("declaration", "row", "number"),
    [
        ("(a INTEGER, b INTEGER)", ("text", 5), -1),
        ("(a INTEGER, b INTEGER)", (1.5, 5), 1),
        ("(a INTEGER, b INTEGER)", (b"blob", 5), -1),
        ("(a REAL, b INTEGER)", (7, 5), 7),
        ("(a TEXT, b INTEGER)", (7, 5), 7),
        ("(a INTEGER PRIMARY KEY DESC, b INTEGER)", (7, 5), 7),
        ("(a INTEGER PRIMARY KEY, b INTEGER) WITHOUT ROWID", (7, 5), 7),
        ("(a INTEGER, rowid INTEGER)", (7, 5), 7),
    ],
)
def test_what_is_no_plain_integer_is_left_to_sqlite(
    declaration: str, row: tuple[object, ...], number: int, tmp_path: Path
) -> None:
    (values,), scanned = read(write(tmp_path / "trace.sqlite", declaration, row), "a")
    assert not scanned
    if number >= 0:
        assert values == [number]


def test_another_column_of_any_type_does_no_harm(tmp_path: Path) -> None:
    database = write(tmp_path / "trace.sqlite", "(a, b, c)", ("x" * 9000, 5, 1.5), (b"", None, ""))
    assert read(database, "b") == ([[5, -1]], True)


def test_generated_columns_are_left_to_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("CREATE TABLE events (a INTEGER, s AS (a + 1) VIRTUAL, b INTEGER)")
        database.execute("INSERT INTO events VALUES (1, 2)")
    assert read(Database(path), "b") == ([[2]], False)


def test_rowids_far_apart_are_left_to_sqlite(tmp_path: Path) -> None:
    database = write(tmp_path / "t.sqlite", "(a INTEGER PRIMARY KEY)", (1,), (2**62,))
    assert read(database, "a") == ([[1, 2**62]], False)


def test_the_largest_rowids_are_left_to_sqlite(tmp_path: Path) -> None:
    ids = range(2**63 - 600, 2**63)
    database = write(tmp_path / "t.sqlite", "(a INTEGER PRIMARY KEY)", *((a,) for a in ids))
    assert read(database, "a") == ([list(ids)], False)


def test_a_range_of_rows_is_read_alone(tmp_path: Path) -> None:
    rows = [(i, i * i) for i in range(1, 2001)]
    database = write(tmp_path / "t.sqlite", "(a INTEGER PRIMARY KEY, b INTEGER)", *rows)
    query = Query("events", {"b": Value.of("b")}, {"b": np.int64})
    for first, end in ((1, 2001), (500, 501), (-10, 3), (1990, 5000), (700, 700)):
        answer = pages.scan(database, query, rows=(first, end))
        wanted = [b for a, b in rows if first <= a < end]
        assert (answer["b"].tolist() if answer is not None else []) == wanted


def test_changed_pages_give_what_sqlite_gives_or_nothing(tmp_path: Path) -> None:
    outcomes = pages.run(tmp_path, 1, 60) + pages.run(tmp_path, 4, 60)
    assert outcomes["scanned"] > 30
    assert outcomes["left"] > 5


def test_no_page_makes_a_scan_read_or_write_elsewhere(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    scanned, refused = native.scan_pages(tmp_path, runs=3000)
    assert scanned > 300
    assert refused > 300


def test_an_analysis_is_the_same_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_CACHE", "off")
    path = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)

    def analyze() -> str:
        with gputrace.open(path) as trace:
            return to_json(trace.analyze())

    scanned = analyze()
    monkeypatch.setattr(sqlite_page_scan, "library", lambda: None)
    assert analyze() == scanned
