"""Declarations in an SQLite file are never run: views, triggers, checks, computed columns."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.analyzers.operations import MOST_GPUS
from gputrace.errors import InputError
from gputrace.model.trace import MOST_PROCESSES
from gputrace.store import sqlite_security
from gputrace.store.sqlite_reader import Database
from tests.helpers.command import assert_unreadable
from tests.helpers.exports import KERNEL, Export

FOR_EVER: Final = "WITH RECURSIVE c(n) AS (VALUES(1) UNION ALL SELECT n + 1 FROM c)"
"""Who reads a view of this does not come back."""


def export() -> Export:
    made = Export()
    for index in range(200):
        made.kernel(10 * index, 10 * index + 5, f"kernel_{index % 7}")
    return made


def changed(path: Path, *statements: str) -> Path:
    """The file with statements run on it that may change the list of tables, too."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            database.execute(statement)
    return path


def forged(path: Path, table: str, declaration: str) -> Path:
    """The file with a declaration in place of a table's; the list goes on calling it a table."""
    text = declaration.replace("'", "''")
    return changed(path, f"UPDATE sqlite_master SET sql = '{text}' WHERE name = '{table}'")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return export().write(tmp_path / "trace.sqlite")


@pytest.mark.parametrize("page", ["rootpage", "0", "1"])
def test_a_view_that_says_it_is_a_table_is_not_read(page: str, path: Path) -> None:
    view = f'CREATE VIEW {KERNEL}(start, "end", deviceId, streamId, correlationId, globalPid,'
    view += f" demangledName, shortName) AS {FOR_EVER} SELECT n, n, 0, 7, 0, 0, 1, 1 FROM c"
    changed(path, f"UPDATE sqlite_master SET rootpage = {page} WHERE name = '{KERNEL}'")
    assert_unreadable(forged(path, KERNEL, view))


@pytest.mark.parametrize("table", ["StringIds", "META_DATA_EXPORT"])
def test_not_even_where_the_names_are(table: str, tmp_path: Path) -> None:
    made = export().add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.3")
    columns = "id, value" if table == "StringIds" else "name, value"
    path = made.write(tmp_path / "trace.sqlite")
    view = f"CREATE VIEW {table}({columns}) AS {FOR_EVER} SELECT n, n FROM c"
    with suppress(InputError), gputrace.open(forged(path, table, view)) as trace:
        trace.analyze()  # It comes back, whether or not it needs that table.


def test_views_and_triggers_beside_the_tables_do_no_harm(path: Path) -> None:
    with gputrace.open(path) as trace:
        before = trace.analyze().render("json")
    changed(
        path,
        f"CREATE VIEW aside AS {FOR_EVER} SELECT load_extension('/tmp/x.so'), n FROM c",
        f"CREATE TRIGGER t AFTER INSERT ON {KERNEL} BEGIN SELECT load_extension('/tmp/x.so'); END",
    )
    with gputrace.open(path) as trace:
        assert trace.analyze().render("json") == before


def test_a_computed_column_is_no_column(path: Path) -> None:
    changed(path, f"ALTER TABLE {KERNEL} ADD COLUMN bytes AS (length(zeroblob(1 << 40)))")
    with closing(Database(path)) as database:
        assert database.has(KERNEL, "start")
        assert not database.has(KERNEL, "bytes")


@pytest.mark.parametrize(
    "declaration",
    [
        f'CREATE TRIGGER t AFTER INSERT ON "{KERNEL}" BEGIN DELETE FROM "{KERNEL}"; END',
        "CREATE VIEW extra(id) AS SELECT 1",
        "CREATE TABLE extra (id CHECK (length(hex(randomblob(1 << 30))) > id))",
        "CREATE TABLE extra (id, more AS (zeroblob(1 << 30)) STORED)",
        "CREATE VIRTUAL TABLE extra USING fts5(id)",
    ],
    ids=["trigger", "view", "check", "computed", "virtual"],
)
def test_a_part_that_is_cut_out_takes_over_no_code(declaration: str, path: Path) -> None:
    changed(path, "CREATE TABLE extra (id)", "INSERT INTO extra VALUES (1)")
    target = path.with_name("part.sqlite")
    with suppress(InputError), gputrace.open(forged(path, "extra", declaration)) as trace:
        trace.export("trace", target, time="0s:1us")
    if target.exists():
        with closing(sqlite3.connect(target)) as part:
            kinds = part.execute("SELECT DISTINCT type FROM sqlite_master").fetchall()
            assert set(kinds) <= {("table",), ("index",)}
            assert (
                part.execute("SELECT 1 FROM sqlite_master WHERE sql LIKE '%blob(%'").fetchall()
                == []
            )
    assert list(path.parent.glob(".*")) == []


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH '{}' AS other",
        "PRAGMA writable_schema = ON",
        "PRAGMA trusted_schema = ON",
        "DELETE FROM StringIds",
        "CREATE TEMP TABLE t (x)",
        "CREATE TEMP TRIGGER t AFTER INSERT ON StringIds BEGIN SELECT 1; END",
    ],
)
def test_a_connection_to_a_trace_reads_and_nothing_else(sql: str, path: Path) -> None:
    with closing(sqlite_security.connect(f"{path.as_uri()}?mode=ro&immutable=1")) as connection:
        with pytest.raises(sqlite3.DatabaseError, match=r"not authorized|prohibited|too many"):
            connection.execute(sql.format(path.with_name("other.sqlite")))
        with pytest.raises(sqlite3.DatabaseError, match=r"not authorized|no such function"):
            connection.execute("SELECT load_extension('/tmp/x.so')")
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_text_that_is_far_too_long_is_refused(path: Path) -> None:
    size = sqlite_security.LONGEST_VALUE + 1
    changed(path, f"UPDATE StringIds SET value = CAST(zeroblob({size}) AS TEXT) WHERE id = 100")
    with pytest.raises(InputError, match="too big"), gputrace.open(path) as trace:
        trace.analyze()


def test_a_schema_of_far_too_many_is_refused_before_it_is_read(path: Path) -> None:
    """SQLite needs more than a minute for a million."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA writable_schema = ON")
        names = ((f"n{i}",) * 3 for i in range(sqlite_security.MOST_SCHEMA + 100))
        view = "'CREATE VIEW ' || ? || ' AS SELECT 1'"
        database.executemany(f"INSERT INTO sqlite_master VALUES ('view', ?, ?, 0, {view})", names)
    with pytest.raises(InputError, match="more than 10,000 tables and views"):
        Database(path)


def pages_of(path: Path, table: str) -> tuple[int, int, int]:
    """The root page of a table, the number of pages, and their size."""
    with closing(sqlite3.connect(path)) as database:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        root = database.execute(sql, (table,)).fetchone()[0]
        count = database.execute("PRAGMA page_count").fetchone()[0]
        size = database.execute("PRAGMA page_size").fetchone()[0]
    return root, count, size


def endless(path: Path, levels: int = 8) -> Path:
    """The file, whose table of kernels is a tree that comes to the same leaf many million times."""
    root, count, size = pages_of(path, KERNEL)
    content = bytearray(path.read_bytes())
    leaf = content[(root - 1) * size : root * size]
    content += leaf
    below = count + 1
    for level in range(levels):
        page = interior(below, size)
        if level == levels - 1:
            content[(root - 1) * size : root * size] = page
        else:
            content += page
            below = len(content) // size
    content[28:32] = (len(content) // size).to_bytes(4, "big")
    path.write_bytes(content)
    return path


def interior(child: int, size: int) -> bytes:
    """A page of a table's tree all of whose pointers lead to one page (sqlite.org/fileformat2)."""
    cells, cell = 200, child.to_bytes(4, "big") + b"\x01"
    start = size - cells * len(cell)
    head = b"\x05\0\0" + cells.to_bytes(2, "big") + start.to_bytes(2, "big") + b"\0"
    places = b"".join((start + at * len(cell)).to_bytes(2, "big") for at in range(cells))
    page = head + child.to_bytes(4, "big") + places
    return page.ljust(start, b"\0") + cell * cells


def test_a_tree_whose_branches_meet_again_is_not_read_for_ever(tmp_path: Path) -> None:
    made = Export()
    for index in range(30):
        made.kernel(10 * index, 10 * index + 5)
    path = endless(made.write(tmp_path / "trace.sqlite"))
    with pytest.raises(InputError, match="more rows than fit into it"):
        gputrace.open(path).analyze()


def test_more_processes_than_the_columns_can_tell_apart_are_refused(tmp_path: Path) -> None:
    made = Export()
    for pid in range(MOST_PROCESSES + 1):
        made.kernel(10 * pid, 10 * pid + 5, pid=pid)
    assert_unreadable(made.write(tmp_path / "trace.sqlite"), "more than 32,768 processes")


def test_more_gpus_than_any_host_has_are_refused(tmp_path: Path) -> None:
    made = Export()
    for device in range(MOST_GPUS + 1):
        made.kernel(10 * device, 10 * device + 5, deviceId=device)
    path = made.write(tmp_path / "trace.sqlite")
    assert_unreadable(path, "operations on 4,097 GPUs of one host, of 4,096 at most")
