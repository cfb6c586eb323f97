"""Exports of every nsys since 2022 are read, and those that people stripped of columns."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.errors import InputError
from gputrace.model.events import Kind
from gputrace.readers.nsys import is_nsys
from gputrace.readers.registry import open_trace
from gputrace.store.sqlite_reader import Database
from tests.helpers.exports import (
    D2H,
    GRAPH_TRACE,
    H2D,
    KERNEL,
    MEMCPY,
    MEMSET,
    RUNTIME,
    Export,
    global_id,
    insert,
)
from tests.helpers.recordings import shared

FOLDER: Final = shared("schemas")
SCHEMAS: Final = sorted(path.name for path in FOLDER.glob("nsys-*.sql"))
HOST_ONLY: Final = {"nsys-2024.1.1.59-real-export.sql", "nsys-2025.3.2.367-real-export.sql"}
"""Made of recordings without CUDA, so that they have no GPU tables."""

NCCL: Final = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"
PARTS: Final = [60, 20, 10, 5, 1, 4]
"""Of `sample`: compute, communication, host to device, other copies, memset, idle."""


def sample() -> Export:
    """One process, one GPU, 100 ns, something of each class."""
    export = Export().kernel(0, 60, "gemm").kernel(50, 80, NCCL).copy(70, 90, H2D, srcKind=0)
    export.copy(90, 95, D2H).memset(99, 100)
    return export.call(0, 5, "cudaLaunchKernel_v7000", correlation=1)


def fill(path: Path, schema: str, export: Export) -> set[str]:
    """Makes a database by a schema, and puts in those rows that it has tables for."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(schema)
        known = _columns(database)
        for table, rows in export.rows.items():
            if table in known:
                required = dict.fromkeys(known[table], 0)
                values: list[dict[str, Any]] = [
                    required | {name: row[name] for name in row if name in known[table]}
                    for row in rows
                ]
                insert(database, table, known[table], values)
    return set(known)


def _columns(database: sqlite3.Connection) -> dict[str, list[str]]:
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        for (table,) in tables
    }


def schema(name: str) -> str:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path.read_text(encoding="utf-8")


def parts(path: Path) -> list[int]:
    with gputrace.open(path) as trace:
        (gpu,) = trace.analyze().gpus
    return [getattr(gpu, name) for name in _PART_NAMES]


_PART_NAMES: Final = tuple(
    f"{name}_ns" for name in ("compute", "communication", "h2d", "other_copy", "memset", "idle")
)


def test_schemas_are_here() -> None:
    if not FOLDER.exists():
        pytest.skip(f"{FOLDER} is not on this machine")
    assert len(SCHEMAS) >= 9


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in HOST_ONLY])
def test_an_export_of_each_version_gives_the_partition(name: str, tmp_path: Path) -> None:
    export = sample()
    tables = fill(tmp_path / "trace.sqlite", schema(name), export)
    expected = list(PARTS)
    if MEMSET not in tables:  # exports are lazy: that recording had none, so the span ends at 95
        expected[4:] = [0, 0]
    assert parts(tmp_path / "trace.sqlite") == expected


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in HOST_ONLY])
def test_an_export_of_each_version_gives_names_and_calls(name: str, tmp_path: Path) -> None:
    fill(tmp_path / "trace.sqlite", schema(name), sample())
    with open_trace(tmp_path / "trace.sqlite") as trace:
        events = trace.events([Kind.KERNEL, Kind.API], ["name", "process"])
        names = trace.names(events.name)
    assert set(names.values()) == {"gemm", NCCL, "cudaLaunchKernel_v7000"}
    assert [process.pid for process in trace.processes] == [100]


@pytest.mark.parametrize("name", sorted(HOST_ONLY & set(SCHEMAS)))
def test_an_export_without_cuda_is_told_as_one(name: str, tmp_path: Path) -> None:
    fill(tmp_path / "trace.sqlite", schema(name), sample())
    with pytest.raises(InputError, match="no GPU activity in this nsys export"):
        gputrace.open(tmp_path / "trace.sqlite")


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        (KERNEL, ("globalPid",)),
        (KERNEL, ("deviceId",)),
        (KERNEL, ("correlationId", "streamId", "contextId")),
        (KERNEL, ("demangledName",)),
        (MEMCPY, ("srcKind", "dstKind")),
        (MEMCPY, ("srcDeviceId", "dstDeviceId")),
        (MEMCPY, ("globalPid", "deviceId", "streamId", "correlationId", "bytes")),
        (MEMSET, ("bytes",)),
        (RUNTIME, ("eventClass", "correlationId")),
        (RUNTIME, ("globalTid", "nameId")),
        (RUNTIME, ("end",)),
    ],
)
def test_columns_that_the_partition_does_not_need_may_be_missing(
    table: str, columns: tuple[str, ...], tmp_path: Path
) -> None:
    export = sample()
    if {"globalPid", "deviceId"} & set(columns):  # of one table alone they would be another GPU's
        for other in (KERNEL, MEMCPY, MEMSET):
            export.strip(other, *columns)
    path = export.strip(table, *columns).write(tmp_path / "trace.sqlite")
    assert parts(path) == PARTS


def test_kernels_without_names_are_computation(tmp_path: Path) -> None:
    export = sample().strip(KERNEL, "demangledName", "shortName")
    assert parts(export.write(tmp_path / "trace.sqlite")) == [80, 0, 10, 5, 1, 4]


def test_copies_without_a_direction_are_other_copies(tmp_path: Path) -> None:
    export = sample().strip(MEMCPY, "copyKind")
    assert parts(export.write(tmp_path / "trace.sqlite")) == [60, 20, 0, 15, 1, 4]


def test_a_table_without_times_is_left_out(tmp_path: Path) -> None:
    export = sample().strip(MEMSET, "end")
    assert parts(export.write(tmp_path / "trace.sqlite")) == [60, 20, 10, 5, 0, 0]


@pytest.mark.parametrize("table", [KERNEL, MEMCPY, MEMSET, GRAPH_TRACE])
def test_one_gpu_table_is_enough(table: str, tmp_path: Path) -> None:
    export = sample().graph(0, 100)
    export.rows = {table: export.rows[table]}
    path = export.write(tmp_path / "trace.sqlite")
    with gputrace.open(path) as trace:
        (gpu,) = trace.analyze().gpus
    assert gpu.span_ns == gpu.compute_ns + gpu.h2d_ns + gpu.other_copy_ns + (
        gpu.memset_ns + gpu.idle_ns
    )


def test_a_table_that_nsys_adds_later_does_no_harm(tmp_path: Path) -> None:
    export = sample()
    export.give("CUPTI_ACTIVITY_KIND_NEW", "start", "end", "value")
    export.add("CUPTI_ACTIVITY_KIND_NEW", start=-5, end="soon", value="x")
    assert parts(export.write(tmp_path / "trace.sqlite")) == PARTS


@pytest.mark.parametrize("name", ["nvprof-11.8.87.sql", "nvprof-12.4.127.sql"])
def test_a_database_of_nvprof_is_not_taken_for_one_of_nsys(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.nvvp"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(schema(name))
    with closing(Database(path)) as found:
        assert not is_nsys(found)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("cudaLaunchKernel_v7000", "though CUDA calls gave a GPU work; .*received none of it"),
        ("cudaStreamCreate_v3020", "none of its 1 CUDA call gives a GPU work; record while"),
        (None, "not a CUDA call, though nsys traced them: the program used no GPU"),
    ],
)
def test_an_export_of_calls_alone_says_what_they_show(
    call: str | None, said: str, tmp_path: Path
) -> None:
    """Not that CUDA was not traced: it was."""
    export = Export()
    if call is not None:
        export.call(10, 20, call)
    export.add("META_DATA_CAPTURE", name="PROCESS_0:COLLECT_CUDA_TRACE", value="true")
    export.add("OSRT_API", start=1, end=5, globalTid=global_id(100), nameId=export.string("poll"))
    with pytest.raises(InputError, match=said):
        gputrace.open(export.write(tmp_path / "trace.sqlite"))
    export.string("/usr/lib/wsl/drivers/libcuda.so.1.1")
    stacks = "or nsys cannot trace it here: libcuda.so.1.1 is in the stacks"
    with pytest.raises(InputError, match=said if call else stacks):
        gputrace.open(export.write(tmp_path / "stacks.sqlite"))
