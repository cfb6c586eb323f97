"""Our traces answer what `nsys stats` asks of an export.

The queries are our own; they need the tables, columns and joins that the CUDA and NVTX reports of
nsys 2022.4 and 2023.4 need, which were run over such a trace.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace.collectors.finalize import merge
from tests.native.build import Machine

REFERENCES: Final = {
    "CUPTI_ACTIVITY_KIND_KERNEL": {
        "demangledName": "StringIds",
        "shortName": "StringIds",
        "mangledName": "StringIds",
        "launchType": "ENUM_CUDA_KERNEL_LAUNCH_TYPE",
    },
    "CUPTI_ACTIVITY_KIND_MEMCPY": {
        "copyKind": "ENUM_CUDA_MEMCPY_OPER",
        "srcKind": "ENUM_CUDA_MEM_KIND",
        "dstKind": "ENUM_CUDA_MEM_KIND",
    },
    "CUPTI_ACTIVITY_KIND_MEMSET": {"memKind": "ENUM_CUDA_MEM_KIND"},
    "CUPTI_ACTIVITY_KIND_RUNTIME": {"nameId": "StringIds", "eventClass": "ENUM_NSYS_EVENT_CLASS"},
    "CUPTI_ACTIVITY_KIND_OVERHEAD": {
        "nameId": "StringIds",
        "overheadType": "ENUM_CUPTI_OVERHEAD_TYPE",
    },
    "NVTX_EVENTS": {"textId": "StringIds", "eventType": "ENUM_NSYS_EVENT_TYPE"},
    "ThreadNames": {"nameId": "StringIds"},
    "TARGET_INFO_CUDA_DEVICE": {"gpuId": "TARGET_INFO_GPU"},
}


@pytest.fixture(scope="module")
def trace(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sqlite3.Connection]:
    """One record of each kind, a copy of each direction, ranges of a domain and of none."""
    spools = tmp_path_factory.mktemp("spools")
    assert machine.run(spools, "inject nvtx sample copies ranges").returncode == 0
    merge(spools, spools / "t.sqlite", {})
    database = sqlite3.connect(spools / "t.sqlite")
    yield database
    database.close()


@pytest.mark.parametrize("table", REFERENCES)
def test_every_number_that_stands_for_something_is_explained(
    trace: sqlite3.Connection, table: str
) -> None:
    for column, meaning in REFERENCES[table].items():
        (rows, explained) = trace.execute(
            f"SELECT count({column}), count(meaning.id) FROM {table} "
            f"LEFT JOIN {meaning} AS meaning ON meaning.id = {table}.{column}"
        ).fetchone()
        assert rows == explained > 0, column


def test_memory_operations_are_summed_by_direction(trace: sqlite3.Connection) -> None:
    found = trace.execute(
        "SELECT label, count(*), sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY AS copy "
        "JOIN ENUM_CUDA_MEMCPY_OPER AS direction ON direction.id = copyKind "
        "GROUP BY copyKind ORDER BY copyKind"
    ).fetchall()
    # The script `copies` makes one of each direction, of as many bytes as its number; `sample`
    # makes one of 5 GB to the device and one of 4 KiB between two.
    assert [label for label, _, _ in found][:2] == ["Host-to-Device", "Device-to-Host"]
    assert [count for _, count, _ in found] == [2, *[1] * 8, 2, 1, 1, 1]
    assert [size for _, _, size in found] == [5_000_000_001, *range(2, 10), 4106, 11, 12, 13]


def test_operations_have_the_name_of_their_card_and_kinds_of_memory(
    trace: sqlite3.Connection,
) -> None:
    row = trace.execute(
        "SELECT card.name, source.label, destination.label FROM CUPTI_ACTIVITY_KIND_MEMCPY "
        "JOIN TARGET_INFO_GPU AS card ON card.id = deviceId "
        "JOIN ENUM_CUDA_MEM_KIND AS source ON source.id = srcKind "
        "JOIN ENUM_CUDA_MEM_KIND AS destination ON destination.id = dstKind ORDER BY start"
    ).fetchone()
    assert row == ("Fake GPU 0", "Pinned", "Device")


def test_calls_have_their_thread_and_the_kernel_that_they_launched(
    trace: sqlite3.Connection,
) -> None:
    rows = trace.execute(
        "SELECT call.value, thread.value, kernel.gridX, PROCESSES.name "
        "FROM CUPTI_ACTIVITY_KIND_RUNTIME AS api JOIN StringIds AS call ON call.id = api.nameId "
        "JOIN ThreadNames USING (globalTid) JOIN StringIds AS thread ON thread.id = "
        "ThreadNames.nameId JOIN CUPTI_ACTIVITY_KIND_KERNEL AS kernel ON kernel.correlationId = "
        "api.correlationId AND kernel.globalPid = api.globalTid & ~0xffffff "
        "JOIN PROCESSES USING (globalPid)"
    ).fetchall()
    assert rows == [("cudaLaunchKernel_v7000", "workload", 11, "workload")]


def test_ranges_are_summed_by_domain_and_name(trace: sqlite3.Connection) -> None:
    rows: list[Any] = trace.execute(
        "WITH domains AS (SELECT domainId, globalTid >> 24 AS process, text FROM NVTX_EVENTS "
        "WHERE eventType = 75) SELECT coalesce(domains.text || ':', '') || coalesce(ranges.text, "
        "value), label FROM NVTX_EVENTS AS ranges LEFT JOIN domains ON domains.domainId = "
        "ranges.domainId AND process = globalTid >> 24 LEFT JOIN StringIds AS name ON name.id = "
        "textId JOIN ENUM_NSYS_EVENT_TYPE AS type ON type.id = eventType "
        "WHERE eventType IN (59, 60)"
    ).fetchall()
    assert len(rows) == 13 + 9
    assert ("trainer:registered", "NvtxPushPopRange") in rows
    assert ("outer", "NvtxPushPopRange") in rows
    assert ("two", "NvtxStartEndRange") in rows


def test_ranges_are_projected_on_the_operations_issued_within_them(
    trace: sqlite3.Connection,
) -> None:
    rows = trace.execute(
        "SELECT value, copyKind FROM NVTX_EVENTS AS ranges JOIN StringIds ON id = textId "
        "JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS api ON api.globalTid = ranges.globalTid "
        "AND api.start >= ranges.start AND api.end <= ranges.end "
        "JOIN CUPTI_ACTIVITY_KIND_MEMCPY AS copy ON copy.correlationId = api.correlationId "
        "WHERE eventType = 59 ORDER BY copyKind"
    ).fetchall()
    assert rows == [(f"copy {kind}", kind) for kind in range(1, 14)]


def test_thread_names_are_there_be_it_without_rows(tmp_path: Path) -> None:
    merge(tmp_path, tmp_path / "t.sqlite", {})
    database = sqlite3.connect(tmp_path / "t.sqlite")
    assert database.execute("SELECT count(*) FROM ThreadNames, StringIds").fetchone() == (0,)
    database.close()
