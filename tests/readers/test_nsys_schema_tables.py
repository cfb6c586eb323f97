"""Tables of later versions of nsys are read by their columns, or said not to be understood."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import gputrace
from tests.helpers import command
from tests.helpers.exports import KERNEL, MEMCPY, Export
from tests.helpers.recordings import unpack

ALL = ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "OSRT_API", "NVTX_EVENTS")


def renamed(path: Path, suffix: str, *tables: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for (name,) in list(database.execute("SELECT name FROM sqlite_master WHERE type='table'")):
            if suffix and name.removeprefix("CUPTI_ACTIVITY_KIND_") in tables:
                database.execute(f'ALTER TABLE "{name}" RENAME TO "{name}{suffix}"')


def test_a_suffix_changes_nothing(tmp_path: Path) -> None:
    path, reports = tmp_path / "trace.sqlite", []
    recording = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    some = ("KERNEL",), ("RUNTIME", "NVTX_EVENTS")
    for suffix, tables in (
        ("", ALL),
        ("_V3", ALL),
        ("_2027", ALL),
        *(("_V12", one) for one in some),
    ):
        shutil.copy(recording, path)
        renamed(path, suffix, *tables)
        with gputrace.open(path) as trace:
            reports.append(json.loads(trace.analyze().render("json")))
    assert reports[1:] == [reports[0]] * 4


def test_a_trace_with_suffixes_can_be_cut(tmp_path: Path) -> None:
    path = unpack("pipit-cloverleaf.sqlite", tmp_path)
    renamed(path, "_V3", *ALL)
    cut = tmp_path / "cut.sqlite"
    ran = command.gputrace("export", path, "--to", "trace", "--time", "0.6:0.7", "-o", cut)
    assert ran.code == 0, ran.err
    with gputrace.open(cut) as trace:
        assert trace.analyze().gpus[0].kernels > 100


def with_columns(table: str, path: Path) -> Path:
    export = Export().kernel(0, 40).copy(60, 100)
    export.rows[f"{table}_V9"] = [{"begin": 0, "finish": 40}]
    export.give(f"{table}_V9", "begin", "finish")
    del export.rows[table]
    return export.write(path)


def test_kernels_whose_columns_are_unknown_are_not_none(tmp_path: Path) -> None:
    path = with_columns(KERNEL, tmp_path / "trace.sqlite")
    command.assert_unreadable(path, f"{KERNEL}_V9 has other columns", "use a newer one")


def test_other_tables_whose_columns_are_unknown_are_told(tmp_path: Path) -> None:
    path = with_columns(MEMCPY, tmp_path / "trace.sqlite")
    with gputrace.open(path) as trace:
        analysis = trace.analyze()
    assert f"left out: table {MEMCPY}_V9 has other columns than gputrace knows" in analysis.warnings
