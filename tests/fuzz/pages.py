"""Pages of SQLite tables with bytes changed: a scan gives SQLite's answer, or none.

``python -m tests.fuzz.pages --minutes 10`` compares for so long.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gputrace.errors import InputError
from gputrace.store import sqlite_reader
from gputrace.store.sqlite_page_scan import Condition, Integers, Query, Rows, Value
from gputrace.store.sqlite_reader import Database, read_integers

TABLE: Final = "events"
COLUMNS: Final = ("id", "start", "end", "kind", "text", "name", "added")
_DECLARED: Final = "id INTEGER PRIMARY KEY, start INT, end INTEGER, kind, text TEXT, name BIGINT"
_INTEGERS: Final = (0, 1, -1, 127, 128, -129, 2**15, -(2**23), 2**31, 2**40, -(2**47), 2**63 - 1)


def write_table(path: Path, seed: int, rows: int = 300, page: int = 512) -> int:
    """Write a table with all widths of integers, long texts, holes and a late column; its root."""
    draw = random.Random(seed)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for setting in (f"page_size = {page}", "journal_mode = OFF", "synchronous = OFF"):
            database.execute(f"PRAGMA {setting}")
        if draw.random() < 0.3:
            database.execute("PRAGMA auto_vacuum = FULL")
        database.execute("BEGIN")
        database.execute(f"CREATE TABLE {TABLE} ({_DECLARED})")
        rowid = draw.choice([1, 1, -50, 2**40])
        for row in range(rows):
            if row == rows // 2:
                database.execute(f"ALTER TABLE {TABLE} ADD COLUMN added INTEGER DEFAULT 7")
            numbers = [draw.choice([None, *_INTEGERS, row, row]) for _ in range(4)]
            long = draw.random() < 0.05
            text = "x" * draw.randrange(3 * page) if long else draw.choice([None, "", "text"])
            values = (rowid, *numbers[:3], text, numbers[3])
            names = ", ".join(COLUMNS[:6])
            database.execute(f"INSERT INTO {TABLE} ({names}) VALUES (?, ?, ?, ?, ?, ?)", values)
            rowid += 1 if draw.random() < 0.95 else draw.randrange(1, 4)
        gone = [(rowid - 1 - back,) for back in range(rows) if draw.random() < seed % 3 / 20]
        database.executemany(f"DELETE FROM {TABLE} WHERE id = ?", gone)
        database.execute("COMMIT")
        if draw.random() < 0.3:
            database.execute("VACUUM")
        (root,) = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (TABLE,)
        ).fetchone()
    return int(root)


def queries() -> Iterator[Query]:
    """All operations, types and conditions."""
    values = {
        "id": Value.of("id"),
        "start": Value.of("start"),
        "end": Value.coalesce("end", "start"),
        "name": Value.coalesce_rowid("name", -2),
        "kind": Value.replaced("kind", 1, ("start", "end"), 10),
        "added": Value.of("added"),
    }
    narrow: dict[str, type[np.signedinteger[Any]]] = {"kind": np.int16, "added": np.int8}
    yield Query(TABLE, values, {name: narrow.get(name, np.int64) for name in values})
    plain = {name: Value.of(name) for name in values}
    yield Query(TABLE, plain, {name: narrow.get(name, np.int32) for name in plain})
    less = {"graph": Value.subtracted(-(1 << 30), "kind"), "end": Value.of("end")}
    where = Condition.below(Value.of("start"), 1000), Condition.at_least(less["end"], -5)
    yield Query(TABLE, less, {"graph": np.int32, "end": np.int64}, where)
    among = (Condition.among(Value.of("kind"), (1, 127, 2**40)),)
    yield Query(TABLE, {"id": Value.of("id")}, {"id": np.int64}, among)


def scan(database: Database, query: Query, rows: Rows = None) -> dict[str, Integers] | None:
    """The columns as a scan reads them; None where it leaves them to SQLite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_reader, "_read_rows", lambda *_: None)
        return read_integers(database, query, rows=rows)


def compare(path: Path) -> str:
    """Compare scans of a file with SQLite's answers; return ``scanned``, ``left`` or ``refused``.

    Raises AssertionError where a scan gives what SQLite does not.
    """
    scanned = 0
    for query in queries():
        # New connections each time: SQLite says once only that a page is broken.
        try:
            with closing(Database(path)) as scanning:
                answer = scan(scanning, query)
        except InputError:
            return "refused"
        if answer is not None:
            scanned += 1
            with closing(Database(path)) as asking:
                asking.__dict__["scanner"] = None
                assert same(answer, read_integers(asking, query)), f"{path}: {query}"
    return "scanned" if scanned else "left"


def same(first: dict[str, Integers], second: dict[str, Integers]) -> bool:
    """Return True for the same columns, of the same types."""
    return first.keys() == second.keys() and all(
        column.dtype == second[name].dtype and np.array_equal(column, second[name])
        for name, column in first.items()
    )


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Change some bytes, half of them in the heads of pages, where trees are described."""
    changed, page = bytearray(content), 512
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(100, len(changed))
        if draw.random() < 0.5:
            at = at // page * page + draw.randrange(48)
        changed[at] = draw.choice([draw.randrange(256), 0, 0xFF, 0x7F, 0x80, draw.randrange(64)])
    return bytes(changed)


def run(folder: Path, seed: int, inputs: int) -> Counter[str]:
    """Compare mutations of a table; return how many there were of each outcome."""
    path, draw, outcomes = folder / f"pages-{seed}.sqlite", random.Random(seed), Counter[str]()
    write_table(path, seed, rows=draw.choice([3, 60, 300]))
    content = path.read_bytes()
    for _ in range(inputs):
        path.write_bytes(mutate(content, draw))
        outcomes[compare(path)] += 1
    path.unlink()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz.pages", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcomes, seed = Counter[str](), options.seed
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            outcomes += run(Path(folder), seed, 500)
            seed += 1
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    sys.stdout.write(f"pages: {outcomes.total():,} files, none other than SQLite's: {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
