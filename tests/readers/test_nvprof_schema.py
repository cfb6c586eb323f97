"""nvprof's files, of every version, become one trace with nsys's tables."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.hooks._gputrace_hooks import host_file, recorder
from gputrace.readers.nvprof_schema import DRIVER, RUNTIME, call_name
from tests.helpers import command
from tests.helpers.lookups import rows
from tests.helpers.nvprof import (
    EPOCH,
    LAUNCH_DRIVER,
    MEMCPY_ASYNC,
    PID,
    SYNCHRONIZE,
    THREAD,
    VERSIONS,
    Nvvp,
    convert,
    spool,
)
from tests.helpers.recordings import DATA

REAL: Final = DATA / "profiling-lm-da6bcc3f.nvprof.xz"
US: Final = 1_000
PROCESS: Final = 1 << 48 | PID << 24
NAMED: Final = "FROM {} JOIN StringIds ON id = {}"
KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
CALLS: Final = NAMED.format("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return spool(tmp_path)


def converted(folder: Path) -> Path:
    ran, output = convert(folder)
    assert ran.code == 0, ran.err
    return output


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gives_its_kernels_copies_and_calls(folder: Path, version: int) -> None:
    file = Nvvp(folder / f"{PID}.nvvp", version)
    file.call(0, 5 * US, MEMCPY_ASYNC)
    file.row("MEMCPY", start=10 * US, end=30 * US, bytes=4096, copyKind=1, srcKind=2, dstKind=3)
    file.row("MEMSET", start=30 * US, end=31 * US, bytes=64, memoryKind=3)
    file.call(6 * US, 9 * US)
    file.kernel(31 * US, 131 * US, gridX=640, blockX=128, registersPerThread=32)
    file.call(10 * US, 12 * US, LAUNCH_DRIVER, table="DRIVER")
    file.kernel(131 * US, 132 * US, "saxpy", table="KERNEL")
    file.save()
    trace = converted(folder)
    assert rows(trace, f"SELECT start, end, value, gridX {NAMED.format(KERNELS, 'shortName')}") == [
        (31 * US, 131 * US, "gemm", 640),
        (131 * US, 132 * US, "saxpy", 0),
    ]
    sql = f"SELECT value {NAMED.format(KERNELS, 'demangledName')} ORDER BY start"
    assert rows(trace, sql) == [("void gemm<float>(float*)",), ("saxpy",)]
    copy = "SELECT start, end, bytes, copyKind, srcKind, dstKind FROM CUPTI_ACTIVITY_KIND_MEMCPY"
    pinned, device, unknown = 1, 2, 7
    assert rows(trace, copy) == [(10 * US, 30 * US, 4096, 1, pinned, device)]
    memset = rows(trace, "SELECT bytes, memKind FROM CUPTI_ACTIVITY_KIND_MEMSET")
    assert memset == [(64, unknown if version < 11 else device)]
    assert rows(trace, f"SELECT eventClass, correlationId, value {CALLS}") == [
        (0, 1, "cudaMemcpyAsync_v3020"),
        (0, 2, "cudaLaunchKernel_v7000"),
        (1, 3, "cuLaunchKernel"),
    ]


def test_the_real_file_of_a_v100_is_host_bound(folder: Path) -> None:
    (folder / f"{PID}.nvvp").write_bytes(lzma.decompress(REAL.read_bytes()))
    ran, trace = convert(folder)
    assert "284 kernels, 0 steps, processes: 1" in ran.err
    report = json.loads(command.gputrace("analyze", trace, "--json").out)
    (gpu,) = report["gpus"]
    assert gpu["name"] == "Tesla V100-SXM2-16GB"
    busy = gpu["span_ns"] - gpu["idle_ns"]
    assert (round(busy / 1e6, 1), round(gpu["span_ns"] / 1e6, 1)) == (8.3, 57.7)
    assert rows(trace, "SELECT count(*) FROM NVTX_EVENTS WHERE end IS NOT NULL") == [(1195,)]


def test_the_command_line_is_left_behind(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    command_line, thread = file.text("python train.py --token planted"), file.text("feeder")
    file.row("NAME", objectKind=1, objectId=file.object(0), name=command_line)
    file.row("NAME", objectKind=2, objectId=file.object(), name=thread)
    file.call(0, 5 * US)
    file.kernel(9 * US, 20 * US)
    file.save()
    trace = converted(folder)
    names = rows(trace, f"SELECT value {NAMED.format('ThreadNames', 'nameId')}")
    assert ("feeder",) in names
    assert b"planted" not in trace.read_bytes()


def test_a_peer_copy_names_both_cards(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    file.call(0, 5 * US)
    file.row("MEMCPY2", start=9 * US, end=20 * US, copyKind=10, srcDeviceId=1, dstDeviceId=3)
    file.save()
    sql = "SELECT copyKind, srcDeviceId, dstDeviceId FROM CUPTI_ACTIVITY_KIND_MEMCPY"
    assert rows(converted(folder), sql) == [(10, 1, 3)]


def test_a_synchronisation_has_the_device_of_its_context(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    file.row("CONTEXT", contextId=4, deviceId=2)
    correlation = file.call(0, 50 * US, SYNCHRONIZE)
    more = {"contextId": 4, "streamId": 7, "cudaEventId": -1, "correlationId": correlation}
    file.row("SYNCHRONIZATION", type=3, start=1 * US, end=49 * US, **more)
    file.save()
    sql = "SELECT start, end, deviceId, streamId, syncType FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
    assert rows(converted(folder), sql) == [(1 * US, 49 * US, 2, 7, 3)]


def test_markers_of_one_id_become_a_range(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    outer, inner, mark = (file.text(name) for name in ("step", "forward", "here"))
    at = {"objectKind": 2, "objectId": file.object()}
    file.row("MARKER", flags=2, timestamp=0, id=1, name=outer, **at)
    file.row("MARKER", flags=2, timestamp=10, id=2, name=inner, domain=file.text("model"), **at)
    file.row("MARKER", flags=4, timestamp=20, id=2, **at)
    file.row("MARKER", flags=1, timestamp=25, id=3, name=mark, **at)
    elsewhere = at | {"objectId": file.object(THREAD + 0x1000)}
    file.row("MARKER", flags=4, timestamp=30, id=1, **elsewhere)
    file.save()
    trace = converted(folder)
    sql = f"SELECT start, end, eventType, value {NAMED.format('NVTX_EVENTS', 'textId')}"
    created, push_pop, start_end, marked = 75, 59, 60, 34
    assert rows(trace, f"{sql} ORDER BY start, eventType") == [
        (0, 30, start_end, "step"),
        (10, 20, push_pop, "forward"),
        (10, None, created, "model"),
        (25, None, marked, "here"),
    ]


def test_rows_without_times_are_left_out_and_counted(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    file.call(0, 5 * US)
    file.kernel(9 * US, 20 * US)
    file.row("CONCURRENT_KERNEL", start=-EPOCH, end=-EPOCH, name=file.text("lost"))
    file.row("CONCURRENT_KERNEL", start=30 * US, end=-EPOCH, name=file.text("lost"))
    file.save()
    trace = converted(folder)
    assert rows(trace, f"SELECT count(*) FROM {KERNELS}") == [(1,)]
    ((process, count, reason),) = rows(
        trace, "SELECT globalPid, records, reason FROM GPUTRACE_LOSS"
    )
    assert (process, count) == (PROCESS, 2)
    assert "CONCURRENT_KERNEL" in reason
    assert "2 records lost" in command.gputrace("analyze", trace).out


@pytest.mark.parametrize("skew_s", [156, -156])
def test_a_gpu_whose_clock_is_wrong_is_moved_and_told(folder: Path, skew_s: int) -> None:
    skew = skew_s * 1_000_000_000
    file = Nvvp(folder / f"{PID}.nvvp")
    # Ten minutes in, so that what comes too early still is after the epoch.
    for launch in range(600_000_000 * US, 600_000_100 * US, 10 * US):
        file.call(launch, launch + 3 * US)
        file.kernel(launch + 4 * US + skew, launch + 9 * US + skew)
    file.save()
    ran, trace = convert(folder)
    assert "156 s" in ran.err
    delays = (
        f"SELECT DISTINCT k.start - r.start, k.end - k.start FROM {KERNELS} AS k "
        "JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS r USING (correlationId)"
    )
    assert rows(trace, delays) == [(0, 5 * US)]
    assert "156 s" in rows(trace, "SELECT text FROM GPUTRACE_NOTE")[0][0]


def test_work_that_waits_in_a_queue_is_not_moved(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    for number in range(10):
        file.call(number * US, number * US + 500)
        file.kernel((5_000_000 + number) * US, (5_000_001 + number) * US)
    file.save()
    ran, trace = convert(folder)
    assert "moved" not in ran.err
    assert rows(trace, f"SELECT min(start) FROM {KERNELS}") == [(5_000_000 * US,)]


def test_threads_that_hooks_know_have_their_system_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    file.call(10 * US, 15 * US)
    file.kernel(20 * US, 30 * US)
    file.call(20 * US, 25 * US, threadId=0x1234)
    file.save()
    said = {"RANK": "3", "WORLD_SIZE": "4", f"pthread.{PID}": str(THREAD)}
    _host_file(folder, said)
    trace = converted(folder)
    threads = rows(
        trace, "SELECT globalTid - ? FROM CUPTI_ACTIVITY_KIND_RUNTIME".replace("?", str(PROCESS))
    )
    assert threads[0] == (PID,)
    assert threads[1][0] >= 1 << 23
    named = rows(
        trace, f"SELECT globalTid - {PROCESS}, value {NAMED.format('ThreadNames', 'nameId')}"
    )
    assert named == [(threads[1][0], "pthread 0x1234")]
    assert rows(trace, "SELECT rank, worldSize FROM GPUTRACE_PROCESS") == [(3, 4)]
    waits = rows(trace, "SELECT start, end, globalTid FROM GPUTRACE_HOST_RANGE")
    assert waits == [(0, 5 * US, PROCESS + PID)]


def _host_file(folder: Path, said: dict[str, str]) -> None:
    """Write what the hooks of a process leave that waited for data at first."""
    from struct import pack

    def chunk(tag: bytes, body: bytes) -> bytes:
        return pack("<4sI", tag, len(body)) + body

    header = pack("<8sIIQQ", host_file.MAGIC, host_file.VERSION, PID, EPOCH, 0)
    info = [chunk(b"INFO", f"{key}={value}".encode()) for key, value in said.items()]
    name = chunk(b"NAME", pack("<I", 0) + b"loader")
    wait = pack("<QQIIHHI", EPOCH, EPOCH + 5 * US, PID, 0, recorder.DATA_WAIT, 0, 0)
    path = folder / f"node.{PID}.host"
    path.write_bytes(b"".join([header, *info, name, chunk(b"EVNT", wait)]))


def test_a_pthread_id_that_two_threads_had_names_neither(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    file.call(10 * US, 15 * US)
    file.save()
    _host_file(folder, {"pthread.500": str(THREAD), "pthread.501": str(THREAD)})
    sql = f"SELECT globalTid - {PROCESS} FROM CUPTI_ACTIVITY_KIND_RUNTIME"
    assert rows(converted(folder), sql)[0][0] >= 1 << 23


def test_cards_are_told_apart_by_their_uuids(folder: Path) -> None:
    for pid, uuid in ((100, 0xA), (200, 0xB), (300, 0xA)):
        file = Nvvp(folder / f"{pid}.nvvp", pid=pid)
        name = file.text("Tesla P100")
        clocks = {"coreClockRate": 1_480_500, "globalMemoryBandwidth": 732_160_000}
        file.row("DEVICE", id=0, name=name, uuid=uuid.to_bytes(16, "big"), **clocks)
        file.call(0, 5 * US)
        file.kernel(9 * US, 20 * US)
        file.save()
    trace = converted(folder)
    found = rows(trace, "SELECT pid, gpuId FROM TARGET_INFO_CUDA_DEVICE ORDER BY pid")
    assert found == [(100, 0), (200, 1), (300, 0)]
    sql = "SELECT id, name, clockRate, memoryBandwidth FROM TARGET_INFO_GPU"
    figures = ("Tesla P100", 1_480_500_000, 732_160_000_000)
    assert rows(trace, sql) == [(0, *figures), (1, *figures)]


def test_cards_have_the_numbers_that_nvml_gives_them(folder: Path) -> None:
    file = Nvvp(folder / f"{PID}.nvvp")
    file.row("DEVICE", id=0, name=file.text("Tesla P100"), uuid=(0xAB).to_bytes(16, "big"))
    file.call(0, 5 * US)
    file.kernel(9 * US, 20 * US)
    file.save()
    uuid = "GPU-00000000-0000-0000-0000-0000000000ab"
    device = {"gpu": 5, "uuid": uuid, "pciBusId": "0000:3B:00.0", "cpuAffinity": None}
    said = {"devices": [device], "topology": [], "host": "node", "driver": "1", "interval_ns": 1}
    line = json.dumps(said | {"columns": []})
    (folder / "node.nvml.jsonl").write_text(f"{line}\n", encoding="utf-8")
    trace = converted(folder)
    assert rows(trace, "SELECT id, busLocation FROM TARGET_INFO_GPU") == [(5, "0000:3b:00.0")]


def test_a_file_without_rows_is_said_to_be_one(folder: Path) -> None:
    Nvvp(folder / f"{PID}.nvvp").save()
    ran, trace = convert(folder)
    assert (ran.code, "nvprof recorded nothing" in ran.err) == (0, True)
    command.assert_refused(command.gputrace("analyze", trace), 3, "no GPU activity")


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0 and then nothing", b"text" * 1000])
def test_a_broken_file_costs_nothing_but_itself(folder: Path, content: bytes) -> None:
    file = Nvvp(folder / "100.nvvp", pid=100)
    file.call(0, 5 * US)
    file.kernel(9 * US, 20 * US)
    file.save()
    (folder / "200.nvvp").write_bytes(content)
    ran, trace = convert(folder)
    assert ran.code == 0
    assert "200.nvvp is" in ran.err
    assert rows(trace, f"SELECT count(*) FROM {KERNELS}") == [(1,)]
    assert folder.exists() == bool(content), "what could not be read is kept"


def test_another_sqlite_file_is_none_of_nvprofs(folder: Path) -> None:
    import sqlite3

    sqlite3.connect(folder / "1.nvvp").execute("CREATE TABLE mine (x)").connection.close()
    ran, _ = convert(folder)
    assert "an SQLite file, but not of nvprof" in ran.err


def test_numbers_of_calls_have_cuptis_names() -> None:
    assert call_name(RUNTIME, 211) == "cudaLaunchKernel_v7000"
    assert call_name(DRIVER, 307) == "cuLaunchKernel"
    assert call_name(RUNTIME, 20) == "cudaMalloc_v3020"
    assert call_name(RUNTIME, 311) == "cudaGraphLaunch_v10000"
    assert call_name(DRIVER, 100_000) == "cu(unknown call 100000)"
