"""Folders of tables that nsys exports are read as its SQLite exports are."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gputrace.readers import nsys_export
from tests.helpers import command
from tests.helpers.command import UNREADABLE, assert_refused
from tests.synthetic import Plan, simulate, write_nsys

SECRET = {"TARGET_INFO_SYSTEM_ENV", "ProcessStreams"}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "run.sqlite"
    write_nsys(simulate(Plan(steps=6, ranks=2, kernels_per_step=20, allreduces=1)), path)
    return path


def tables(export: Path) -> dict[str, pyarrow.Table]:
    """The tables of an SQLite export, with the types that nsys 2023.4 gives to ids."""
    found = {}
    with closing(sqlite3.connect(export)) as database:
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in names:
            cursor = database.execute(f'SELECT * FROM "{name}"')
            columns = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
            if rows:
                values = zip(*rows, strict=True)
                found[name] = pyarrow.table(
                    {c: _column(c, list(own)) for c, own in zip(columns, values, strict=True)}
                )
    return found


def _column(name: str, values: list[Any]) -> Any:
    if name in ("globalTid", "globalPid", "nameId") and None not in values:
        return pyarrow.array(values, pyarrow.uint64())
    if name == "eventClass":
        return pyarrow.array(values, pyarrow.uint32())
    return pyarrow.array(values)


def parquet(export: Path, folder: Path) -> Path:
    folder.mkdir()
    for name, table in tables(export).items():
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=100)
    return folder


def arrow(export: Path, folder: Path, new: Any = pyarrow.ipc.new_stream) -> Path:
    folder.mkdir()
    for name, table in tables(export).items():
        with new(str(folder / f"{name}.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=100)
    return folder


def analyzed(path: Path, cache: Path) -> dict[str, Any]:
    ran = command.gputrace("analyze", path, "--json", env={"XDG_CACHE_HOME": str(cache)})
    assert (ran.code, ran.err) == (0, "")
    report: dict[str, Any] = json.loads(ran.out)
    return {key: value for key, value in report.items() if key not in ("path", "paths")}


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
def test_a_folder_gives_the_answer_of_the_sqlite_export(
    kind: str, export: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run_pqtdir"
    if kind == "parquet":
        parquet(export, folder)
    else:
        new = pyarrow.ipc.new_stream if kind == "arrow stream" else pyarrow.ipc.new_file
        arrow(export, folder, new)
    before = command.state(folder)
    assert analyzed(folder, tmp_path / "cache") == analyzed(export, tmp_path / "cache")
    assert analyzed(folder, tmp_path / "cache") == analyzed(export, tmp_path / "cache")
    assert command.state(folder) == before


def test_a_folder_of_such_folders_is_a_run(tmp_path: Path) -> None:
    whole = tmp_path / "whole.sqlite"
    write_nsys(simulate(Plan(steps=6, ranks=1, kernels_per_step=20, allreduces=1)), whole)
    (tmp_path / "runs").mkdir()
    parquet(whole, tmp_path / "runs" / "a_pqtdir")
    (tmp_path / "runs" / "notes").mkdir()
    assert analyzed(tmp_path / "runs", tmp_path / "cache") == analyzed(whole, tmp_path)


def test_a_changed_folder_is_read_again(export: Path, tmp_path: Path) -> None:
    folder, cache = parquet(export, tmp_path / "tables"), tmp_path / "cache"
    first = analyzed(folder, cache)
    other = tmp_path / "other.sqlite"
    write_nsys(simulate(Plan(steps=7, ranks=1, kernels_per_step=20, allreduces=1)), other)
    shutil.rmtree(folder)
    parquet(other, folder)
    assert analyzed(folder, cache)["steps"]["count"] != first["steps"]["count"]


def test_the_environment_is_not_copied(export: Path, tmp_path: Path) -> None:
    folder, cache = parquet(export, tmp_path / "tables"), tmp_path / "cache"
    secret = pyarrow.table({"name": ["TOKEN"], "value": ["do-not-copy-this"]})
    for name in SECRET:
        pyarrow.parquet.write_table(secret, folder / f"{name}.parquet")
    analyzed(folder, cache)
    (made,) = cache.rglob("*.sqlite")
    assert b"do-not-copy-this" not in made.read_bytes()


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_table_cut_short_is_refused(part: float, export: Path, tmp_path: Path) -> None:
    for folder in (parquet(export, tmp_path / "p"), arrow(export, tmp_path / "a")):
        (table,) = folder.glob("CUPTI_ACTIVITY_KIND_KERNEL.*")
        content = table.read_bytes()
        table.write_bytes(content[: int(len(content) * part)])
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        ran = command.gputrace("analyze", folder, env=cache)
        assert_refused(ran, UNREADABLE, str(table), "broken (", "copy or export it again")
        assert not list((tmp_path / "cache").rglob("*.sqlite*"))


def test_a_table_that_is_cut_while_it_is_read_ends_no_process(tmp_path: Path) -> None:
    path = tmp_path / "CUPTI_ACTIVITY_KIND_KERNEL.arrow"
    table = pyarrow.table({"start": range(1_000_000)})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=100_000)
    _, batches = nsys_export._batches(path)
    os.truncate(path, 1000)  # Of a file that is mapped, the next access would be SIGBUS.
    with pytest.raises(OSError, match="too short"):
        list(batches)


def test_tables_of_others_are_no_trace(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "events.parquet")
    assert_refused(command.gputrace("analyze", tmp_path), UNREADABLE, "without traces")
