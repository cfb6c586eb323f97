"""The small tables of an nsys export: devices, processes, the session."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from tests.synthetic.recording import Process, Recording
from tests.synthetic.schema import H200, columns, create, create_enum, enums

VM = 1 << 48
UTC_EPOCH_NS = 1_795_221_598_000_000_000  # when the sessions of all plans started


def write_info(
    connection: sqlite3.Connection, recording: Recording, name: str, with_device_table: bool
) -> None:
    """Write them; without the device table, the physical GPUs cannot be known."""
    for table, rows in enums().items():
        connection.execute(create_enum(table))
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
    end = int(recording.ops["end"].max())
    tables: dict[str, Iterable[Mapping[str, object]]] = {
        "TARGET_INFO_SESSION_START_TIME": [_start()],
        "ANALYSIS_DETAILS": [
            {"globalVid": VM, "duration": end, "startTime": 0, "stopTime": end},
        ],
        "PROCESSES": [
            {"globalPid": VM | p.pid << 24, "pid": p.pid, "name": "python"}
            for p in recording.processes
        ],
        "META_DATA_EXPORT": [{"name": key, "value": value} for key, value in _meta(name).items()],
    }
    if with_device_table:
        cards = sorted({gpu for p in recording.processes for _, gpu in p.devices})
        tables["TARGET_INFO_GPU"] = [_card(gpu) for gpu in cards]
        tables["TARGET_INFO_CUDA_DEVICE"] = [
            {"gpuId": gpu, "cudaId": device, "pid": process.pid}
            for process in recording.processes
            for device, gpu in visible(recording, process)
        ]
    for table, filled in tables.items():
        _fill(connection, table, filled)


def _fill(connection: sqlite3.Connection, table: str, rows: Iterable[Mapping[str, object]]) -> None:
    connection.execute(create(table))
    slots = ", ".join("?" * len(columns(table)))
    values = ([row.get(column) for column in columns(table)] for row in rows)
    connection.executemany(f"INSERT INTO {table} VALUES ({slots})", values)


def visible(recording: Recording, process: Process) -> list[tuple[int, int]]:
    """(device, gpu) of what a process sees: all cards, or its own only."""
    if recording.plan.isolated:
        return list(process.devices)
    return sorted(pair for other in recording.processes for pair in other.devices)


def _card(gpu: int) -> dict[str, object]:
    return {
        **H200,
        "vmId": VM,
        "id": gpu,
        "busLocation": f"0000:00:{6 + gpu:02x}.0",
        "pwGpuId": gpu,
        "uuid": f"{gpu:08x}-1b03-36ec-9b21-6a0c3eb7c873",
        "cuDevice": gpu,
    }


def _start() -> dict[str, object]:
    when = "2026-11-21T00:39:58"
    return {"utcEpochNs": UTC_EPOCH_NS, "utcTime": when, "localTime": when}


def _meta(name: str) -> dict[str, str]:
    return {
        "EXPORT_PRODUCT_NAME": "NVIDIA Nsight Systems",
        "EXPORT_PRODUCT_VERSION": "2025.3.2.0",
        "EXPORT_PRODUCT_DATE": "2025.3",
        "EXPORT_SCHEMA_VERSION": "3.20.3",
        "EXPORT_SCHEMA_VERSION_MAJOR": "3",
        "EXPORT_SCHEMA_VERSION_MINOR": "20",
        "EXPORT_SCHEMA_VERSION_MICRO": "3",
        "EXPORT_PLATFORM": "linux-desktop",
        "EXPORT_ARCH": "x64",
        "EXPORT_PARAM_OUTPUT_FILE": name,
        "EXPORT_PARAM_LAZY": "true",
    }
