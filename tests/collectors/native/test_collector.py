"""The collector inside a program, with a libcupti and a GPU of our own: tests/native.

GPUTRACE_TEST_CUPTI names a libcupti.so.13 of NVIDIA's wheel nvidia-cuda-cupti 13.0, whose walk over
buffers and whose names of calls are tested too.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from gputrace.collectors.backends.cupti import cupti_folders
from gputrace.collectors.finalize import merge
from gputrace.collectors.spool.activity import Spool, read_spool
from gputrace.model.events import Kind
from gputrace.readers.registry import open_trace
from tests.native.build import Machine


def spools(folder: Path) -> list[Spool]:
    return [read_spool(path) for path in sorted(folder.iterdir())]


def only(folder: Path) -> Spool:
    (spool,) = spools(folder)
    return spool


def kernels(spool: Spool) -> int:
    return len(spool.records[b"KERN"])


def recorded(machine: Machine, folder: Path, script: str, env: dict[str, str] | None = None) -> Any:
    """Runs a script that ends well, and gives what its processes left."""
    done = machine.run(folder, script, env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return only(folder)


class Database:
    """The trace of what is in a folder."""

    def __init__(self, folder: Path) -> None:
        self.merged = merge(folder, folder / "t.sqlite", {})
        self._database = sqlite3.connect(folder / "t.sqlite")
        self.strings = dict(self.rows("SELECT id, value FROM StringIds"))

    def rows(self, query: str) -> list[Any]:
        return self._database.execute(query).fetchall()

    def one(self, table: str, columns: str) -> tuple[Any, ...]:
        (row,) = self.rows(f"SELECT {columns} FROM {table}")
        return tuple(row)

    def close(self) -> None:
        self._database.close()


@pytest.fixture(params=["new", "old", "real"])
def sample(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> Any:
    """One record of each kind, through a libcupti of 13.0, one of before 12.8, or NVIDIA's own."""
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "PLANTED": "s3cret"}
    if request.param == "old":
        env["GPUTRACE_CUPTI"] = str(machine.folder / "old_cupti.so")
    if request.param == "real":
        if "GPUTRACE_TEST_CUPTI" not in os.environ:
            pytest.skip("GPUTRACE_TEST_CUPTI names no libcupti of NVIDIA's, of 13.0")
        env["FAKE_CUPTI_REAL"] = os.environ["GPUTRACE_TEST_CUPTI"]
    recorded(machine, tmp_path, "inject sample", env)
    database = Database(tmp_path)
    yield database
    database.close()


ON_GPU: Final = "end - start, deviceId, contextId, streamId, correlationId"


def test_kernels_have_their_names_shapes_and_memory(sample: Database) -> None:
    columns = f"{ON_GPU}, gridX, gridY, gridZ, blockX, blockY, blockZ, registersPerThread"
    row = sample.one("CUPTI_ACTIVITY_KIND_KERNEL", f"{columns}, staticSharedMemory")
    assert row == (400, 1, 7, 13, 101, 11, 12, 13, 32, 33, 34, 40, 1024)
    columns = "dynamicSharedMemory, localMemoryPerThread, localMemoryTotal, gridId, launchType"
    assert sample.one("CUPTI_ACTIVITY_KIND_KERNEL", columns) == (2048, 16, 4096, 12, 2)
    names = sample.one("CUPTI_ACTIVITY_KIND_KERNEL", "mangledName, demangledName, shortName")
    mangled, demangled, short = (sample.strings[name] for name in names)
    assert mangled == "_ZN3net5scaleIfEEvPT_f"
    assert demangled in ("void net::scale<float>(float*, float)", mangled)
    assert short in ("scale", mangled)


def test_copies_have_their_direction_and_both_devices_of_a_peer_copy(sample: Database) -> None:
    columns = f"{ON_GPU}, bytes, copyKind, srcKind, dstKind, srcDeviceId, dstDeviceId"
    rows = sample.rows(f"SELECT {columns} FROM CUPTI_ACTIVITY_KIND_MEMCPY ORDER BY start")
    assert rows == [
        (500, 1, 7, 14, 105, 5_000_000_000, 1, 1, 2, None, None),
        (600, 1, 7, 15, 106, 4096, 10, 2, 2, 1, 0),
    ]


def test_memsets_graphs_and_overheads_are_there(sample: Database) -> None:
    memset = sample.one("CUPTI_ACTIVITY_KIND_MEMSET", f"{ON_GPU}, bytes, value, memKind")
    assert memset == (700, 0, 8, 16, 107, 64, 255, 2)
    graph = sample.one("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", f"{ON_GPU}, graphId")
    assert graph == (800, 1, 7, 17, 108, 99)
    span, name, kind = sample.one(
        "CUPTI_ACTIVITY_KIND_OVERHEAD", "end - start, nameId, overheadType"
    )
    # CUPTI's 6 << 16 is nsys's 8.
    assert (span, sample.strings[name], kind) == (950, "Command buffer full (CUDA)", 8)


def test_only_the_calls_that_matter_are_there_with_their_thread(sample: Database) -> None:
    columns = "end - start, nameId, correlationId, eventClass, returnValue, globalTid"
    rows = sample.rows(f"SELECT {columns} FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start")
    (pid,) = sample.one("PROCESSES", "pid")
    thread = 1 << 48 | pid << 24 | pid
    assert [(span, sample.strings[name], *rest) for span, name, *rest in rows] == [
        (900, "cudaLaunchKernel_v7000", 101, 0, 0, thread),
        (900, "cuLaunchKernel", 103, 1, 2, thread),
    ]


@pytest.mark.parametrize(("library", "calls"), [("libcupti.so.13", 3 * 2), ("old_cupti.so", 3 * 4)])
def test_cupti_makes_no_records_of_other_calls_where_it_can_choose(
    machine: Machine, tmp_path: Path, library: str, calls: int
) -> None:
    script = "inject sample capture 0 sleep 50 sample capture 1 sleep 5 sample "
    script += "pause 1 sample pause 0 sleep 5 sample calls"
    done = machine.run(tmp_path, script, {"GPUTRACE_CUPTI": str(machine.folder / library)})
    assert done.stdout == f"{calls}\n"
    assert len(only(tmp_path).records[b"API "]) == 3 * 2


def test_times_count_from_the_start_of_the_recording(sample: Database) -> None:
    tables = ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "OVERHEAD")
    starts = [sample.rows(f"SELECT start FROM CUPTI_ACTIVITY_KIND_{table}") for table in tables]
    found = sorted(start for rows in starts for (start,) in rows)
    assert [start - found[0] for start in found] == [*range(0, 7000, 1000), 8000]
    assert abs(found[0]) < 10e9


def test_processes_have_their_rank_and_their_cards(sample: Database) -> None:
    row = sample.one("GPUTRACE_PROCESS", "rank, worldSize, localRank, whole, note")
    assert row == (3, 8, 1, 1, None)
    cards = sample.rows("SELECT id, name, busLocation, uuid FROM TARGET_INFO_GPU ORDER BY id")
    assert cards == [
        (0, "Fake GPU 1", "0000:1b:00.0", str(UUID("a1" * 16))),
        (1, "Fake GPU 0", "0000:3b:00.0", str(UUID("a0" * 16))),
    ]
    sizes = "clockRate, smCount, memoryBandwidth, l2CacheSize, computeMajor, computeMinor"
    row = sample.one("TARGET_INFO_GPU WHERE id = 1", f"totalMemory, {sizes}")
    assert row == (150109880320, 1_980_000_000, 132, 4_814_304_000_000, 62914560, 9, 0)
    numbers = "SELECT cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE ORDER BY cudaId"
    assert sample.rows(numbers) == [(0, 1), (1, 0)]


def test_nothing_else_of_the_environment_is_there(sample: Database, tmp_path: Path) -> None:
    assert not any(b"s3cret" in path.read_bytes() for path in tmp_path.iterdir())


RANGES: Final = [
    # Its text, its domain, its kind: in a thread's stack, a mark, or with a start and an end.
    (None, "trainer", 3),  # the creation of a domain
    ("inner", None, 0),
    ("registered", "trainer", 0),
    ("outer", None, 0),
    ("one", None, 2),
    ("two", None, 2),
    ("mark", None, 1),
    ("registered", "trainer", 1),
    ("elsewhere", None, 0),
    ("within", None, 0),
    ("wide é", None, 0),
    ("before", None, 0),
]
"""What the script `ranges` makes, by their ends."""


def test_ranges_too_deep_are_left_out_and_do_not_shift_the_others(
    machine: Machine, tmp_path: Path
) -> None:
    spool = recorded(machine, tmp_path, "nvtx deep 100")
    texts = [spool.names[row["name"]] for row in spool.records[b"NVTX"]]
    assert texts == [str(i).encode() for i in reversed(range(64))]


@pytest.mark.parametrize("script", ["nvtx ranges", "inject nvtx ranges", "nvtx inject ranges"])
def test_nvtx_ranges_and_marks_have_texts_domains_and_threads(
    machine: Machine, tmp_path: Path, script: str
) -> None:
    spool = recorded(machine, tmp_path, script)
    rows = spool.records[b"NVTX"]
    texts = {id: text.decode() for id, text in spool.names.items()} | {0: None}
    found = [(texts[row["name"]], texts[row["domain"]], row["kind"]) for row in rows]
    assert found == RANGES
    by_text = {texts[row["name"]]: row for row in rows}
    assert {row["thread"] for text, row in by_text.items() if text != "elsewhere"} == {spool.pid}
    assert by_text["elsewhere"]["thread"] != spool.pid
    inner, outer, one, two = (by_text[text] for text in ("inner", "outer", "one", "two"))
    assert outer["start"] <= inner["start"] <= inner["end"] <= outer["end"]
    assert one["start"] <= two["start"] <= one["end"] <= two["end"]
    merge(tmp_path, tmp_path / "t.sqlite", {})
    database = sqlite3.connect(tmp_path / "t.sqlite")
    # As nsys exports them: 34 a mark, 59 a push and a pop, 60 a start and an end, 75 a new domain.
    query = "SELECT value, domain.text, ranges.eventType FROM NVTX_EVENTS ranges "
    query += "LEFT JOIN NVTX_EVENTS domain ON domain.eventType = 75 "
    query += "AND domain.domainId = ranges.domainId LEFT JOIN StringIds ON id = ranges.textId"
    types = (59, 34, 60, 75)
    expected = [(text, domain, types[kind]) for text, domain, kind in RANGES]
    assert sorted(database.execute(query).fetchall(), key=str) == sorted(expected, key=str)
    # Only `two` is ended by another thread, and only a moment has no end.
    query = "SELECT rangeId, end IS NULL, endGlobalTid = globalTid FROM NVTX_EVENTS "
    assert database.execute(query + "WHERE eventType = 60").fetchall() == [
        (1, 0, None),
        (2, 0, 0),
    ]
    assert set(database.execute(query + "WHERE eventType = 59")) == {(None, 0, None)}
    assert set(database.execute(query + "WHERE eventType IN (34, 75)")) == {(None, 1, None)}
    database.close()


def test_nccls_payloads_tell_of_communicators_sizes_and_peers(
    machine: Machine, tmp_path: Path
) -> None:
    recorded(machine, tmp_path, "inject sample nvtx payloads")
    Database(tmp_path).close()
    id = 0xFEDCBA9876543210 - (1 << 64)
    with open_trace(tmp_path / "t.sqlite") as trace:
        found = {}
        for kind in (Kind.COMMUNICATOR, Kind.MESSAGE):
            events = trace.events([kind], ["name", "correlation", "bytes", "device"])
            columns = (events.name, events.correlation, events.bytes, events.device)
            text = trace.names(events.name)
            for name, *rest in zip(*(column.tolist() for column in columns), strict=True):
                found[text[name]] = (kind, *rest)
    assert found == {
        "ncclCommInitRank": (Kind.COMMUNICATOR, id, 4, 2),
        "ncclAllReduce": (Kind.MESSAGE, id, 4 << 20, -1),
        "ncclSend": (Kind.MESSAGE, id, 8192, 3),
    }


def test_every_kernel_of_a_storm_from_eight_threads_is_there(
    machine: Machine, tmp_path: Path
) -> None:
    spool = recorded(machine, tmp_path, "inject storm 500000 8")
    rows = spool.records[b"KERN"]
    assert (len(rows), len(spool.records[b"API "]), spool.losses) == (500_000, 500_000, [])
    for thread in range(8):
        numbers = rows["grid"][rows["stream"] == thread][:, 0]
        assert numbers.tolist() == list(range(62_500))
    launches = spool.records[b"API "]
    assert sorted(launches["correlation"]) == sorted(rows["correlation"])
    assert len(set(launches["thread"])) == 8


def test_what_cupti_dropped_is_counted(machine: Machine, tmp_path: Path) -> None:
    spool = recorded(machine, tmp_path, "inject sample", {"FAKE_CUPTI_DROPPED": "17"})
    ((at, count, why),) = spool.losses
    assert (count, why) == (17, "CUPTI had no room for them")
    database = Database(tmp_path)
    assert database.one("GPUTRACE_LOSS", "records, reason") == (17, why)
    database.close()
    assert abs(at - time.time_ns()) < 60e9


def test_it_stands_down_where_another_tool_holds_cupti(machine: Machine, tmp_path: Path) -> None:
    script = "inject nvtx sample ranges"
    spool = recorded(machine, tmp_path, script, {"FAKE_CUPTI_TAKEN": "1"})
    assert spool.info["no_gpu_activity"] == "another tool in the process holds CUPTI"
    assert kernels(spool) == 0
    assert len(spool.records[b"NVTX"]) == len(RANGES)
    assert merge(tmp_path, tmp_path / "t.sqlite", {}).notes == (spool.info["no_gpu_activity"],)


def test_it_says_that_there_is_no_libcupti(machine: Machine, tmp_path: Path) -> None:
    spool = recorded(machine, tmp_path, "inject sample", {"GPUTRACE_CUPTI": "/nowhere/libcupti.so"})
    assert spool.info["no_gpu_activity"] == "no libcupti was found"
    assert spool.whole


def test_it_takes_the_libcupti_of_a_wheel_where_the_programs_cuda_brings_none(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CUDA 11, as hardly a machine has it: a libcupti of another version must not be taken.
    runtime, site = tmp_path / "libcudart.so.11.0", tmp_path / "site-packages"
    shutil.copy(machine.folder / "libcuda.so.1", runtime)
    env = {"GPUTRACE_CUPTI": "", "LD_LIBRARY_PATH": "", "LD_PRELOAD": str(runtime)}
    (tmp_path / "without").mkdir()
    spool = recorded(machine, tmp_path / "without", "inject", env)
    assert spool.info["no_gpu_activity"] == "no libcupti was found"
    wheel = site / "nvidia" / "cuda_cupti" / "lib" / "libcupti.so.11"
    wheel.parent.mkdir(parents=True)
    shutil.copy(machine.folder / "libcupti.so.13", wheel)
    monkeypatch.setattr("sys.path", ["/nowhere", str(site)])
    env["GPUTRACE_CUPTI_FOLDERS"] = "/nowhere:" + cupti_folders()["GPUTRACE_CUPTI_FOLDERS"]
    (tmp_path / "with").mkdir()
    spool = recorded(machine, tmp_path / "with", "inject", env)
    assert spool.info["cupti"] == str(wheel)
    assert "no_gpu_activity" not in spool.info


def test_a_library_without_cuptis_functions_is_refused(machine: Machine, tmp_path: Path) -> None:
    library = str(machine.folder / "libcuda.so.1")
    spool = recorded(machine, tmp_path, "inject sample", {"GPUTRACE_CUPTI": library})
    assert spool.info["no_gpu_activity"] == "libcupti lacks functions"


@pytest.mark.parametrize("variable", ["NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY"])
def test_nothing_happens_under_nsys(machine: Machine, tmp_path: Path, variable: str) -> None:
    done = machine.run(tmp_path, "inject nvtx sample ranges exit 3", {variable: "1"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["exit", "_exit"])
def test_forked_children_write_nothing_and_disturb_nothing(
    machine: Machine, tmp_path: Path, end: str
) -> None:
    forks = f"fork {end} " * 5
    spool = recorded(machine, tmp_path, f"inject nvtx run 20 2 3 {forks} run 20 2 3 ranges {forks}")
    rows = spool.records[b"KERN"]
    for thread in range(2):
        numbers = rows["grid"][rows["stream"] == thread][:, 0].tolist()
        assert len(numbers) >= 6
        assert numbers == list(range(len(numbers)))
    assert len(spool.records[b"NVTX"]) == len(RANGES)
    assert b"in the child" not in spool.names.values()
    assert spool.whole


def test_children_forked_while_threads_record_come_to_their_end(
    machine: Machine, tmp_path: Path
) -> None:
    done = machine.run(tmp_path, "inject nvtx meanwhile 99999999 " + "fork exit " * 300 + "_exit 0")
    assert (done.returncode, done.stderr) == (0, "")
    assert b"in the child" not in only(tmp_path).names.values()


def test_a_program_that_is_executed_by_a_child_has_a_spool_of_its_own(
    machine: Machine, tmp_path: Path
) -> None:
    done = machine.run(tmp_path, "inject sample spawn inject sample sample")
    assert done.returncode == 0
    assert sorted(kernels(spool) for spool in spools(tmp_path)) == [1, 2]
    assert merge(tmp_path, tmp_path / "t.sqlite", {}).kernels == 3


def test_a_process_that_executes_another_program_keeps_both_recordings(
    machine: Machine, tmp_path: Path
) -> None:
    done = machine.run(tmp_path, "inject sample sleep 2000 exec inject sample sample")
    assert done.returncode == 0
    found = spools(tmp_path)
    assert sorted(kernels(spool) for spool in found) == [1, 2]
    assert len({(spool.pid, spool.host) for spool in found}) == 1
    assert merge(tmp_path, tmp_path / "t.sqlite", {}).kernels == 3


ENDS: Final = [
    ("return 7", 7),
    ("exit 7", 7),
    ("_exit 7", 7),
    ("raise 6", -6),
    ("raise 15", -15),
    ("raise 9", -9),
    ("raise 11", -11),
]


@pytest.mark.parametrize(("end", "code"), ENDS)
def test_exit_codes_and_output_are_the_programs(
    machine: Machine, tmp_path: Path, end: str, code: int
) -> None:
    done = machine.run(tmp_path, f"say hello inject nvtx sample ranges complain aloud {end}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "hello\n", "aloud\n")
    assert only(tmp_path).whole == end.startswith(("return", "exit"))


def window(spool: Spool) -> range:
    """Numbers of the kernels of the only thread, which follow each other."""
    numbers: list[int] = spool.records[b"KERN"]["grid"][:, 0].tolist()
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    return range(numbers[0], numbers[-1] + 1)


def test_a_window_has_a_delay_and_a_duration(machine: Machine, tmp_path: Path) -> None:
    env = {"GPUTRACE_DELAY_NS": str(300_000_000), "GPUTRACE_DURATION_NS": str(400_000_000)}
    spool = recorded(machine, tmp_path, "inject nvtx run 1000 1 1 ranges", env)
    rows = spool.records[b"KERN"]
    assert len(window(spool)) > 100
    assert rows["start"][0] - spool.started > 0.29e9
    assert 0.2e9 < rows["end"][-1] - rows["start"][0] < 0.45e9
    assert rows["end"][-1] - spool.started < 0.95e9
    # Of what is outside only the name of a domain, which ranges inside may need.
    assert spool.records[b"NVTX"]["kind"].tolist() == [3]


def test_a_duration_alone_begins_at_once(machine: Machine, tmp_path: Path) -> None:
    env = {"GPUTRACE_DURATION_NS": str(300_000_000)}
    spool = recorded(machine, tmp_path, "inject run 500 1 1", env)
    assert window(spool)[0] < 50
    # The first launch may have come before the window, and its kernel after.
    assert len(spool.records[b"API "]) + 1 >= len(window(spool)) > 100
    assert spool.records[b"KERN"]["end"][-1] - spool.started < 0.45e9


def test_the_profiler_api_turns_recording_on_and_off(machine: Machine, tmp_path: Path) -> None:
    script = "inject run 20 1 5 profiler 1 sample profiler 0 run 20 1 5 profiler 1 sample"
    spool = recorded(machine, tmp_path, script, {"GPUTRACE_CAPTURE": "profiler"})
    assert spool.records[b"KERN"]["correlation"].tolist() == [101, 101]


def test_the_profiler_api_is_not_heeded_unless_asked_for(machine: Machine, tmp_path: Path) -> None:
    spool = recorded(machine, tmp_path, "inject profiler 0 sample profiler 1 sample")
    assert kernels(spool) == 2


def test_captures_by_hand_record_what_is_between(machine: Machine, tmp_path: Path) -> None:
    script = "inject nvtx ranges run 20 1 5 capture 1 sample ranges capture 0 run 20 1 5 ranges"
    spool = recorded(machine, tmp_path, script, {"GPUTRACE_CAPTURE": "manual"})
    assert spool.records[b"KERN"]["correlation"].tolist() == [101]
    assert len(spool.records[b"NVTX"]) == len(RANGES)


def test_a_pause_leaves_a_gap_that_is_told(machine: Machine, tmp_path: Path) -> None:
    script = "inject sample pause 1 run 30 1 5 capture 1 run 30 1 5 pause 0 sample"
    spool = recorded(machine, tmp_path, script)
    first, second = spool.records[b"KERN"]["correlation"].tolist()
    assert first == 101
    assert second > first, "another profiler may have made CUPTI number calls from 1 on again"
    assert int(spool.info["capture_on"]) <= int(spool.info["capture_off"])
    assert [(count, "paused" in why) for _, count, why in spool.losses] == [(0, True)]


def test_windows_turn_on_and_off_a_thousand_times(machine: Machine, tmp_path: Path) -> None:
    script = "inject " + "capture 1 sample capture 0 " * 1000
    spool = recorded(machine, tmp_path, script, {"GPUTRACE_CAPTURE": "manual"})
    assert kernels(spool) == 1000


def said(machine: Machine, folder: Path, script: str, env: dict[str, str]) -> list[int]:
    """The numbers that a script that ends well says."""
    done = machine.run(folder, script, env)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(line) for line in done.stdout.split()]


MANUAL: Final = {"GPUTRACE_CAPTURE": "manual", "GPUTRACE_HOLD_NS": "0"}


def test_after_a_window_cupti_is_taken_out_of_the_program_once(
    machine: Machine, tmp_path: Path
) -> None:
    """At the end of a call of the collector's, or of the program's if CUPTI tells of no other."""
    window = "inject plain capture 1 sleep 5 plain capture 0"
    for library, script, expected in (
        ("libcupti.so.13", f"{window} released 1 0 sleep 300 plain finalized", [1]),
        ("libcupti.so.13", f"{window} sleep 1500 finalized plain finalized", [1, 1]),
        ("old_cupti.so", f"{window} sleep 300 finalized released 1 0 plain finalized", [0, 1]),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        env = MANUAL | {"GPUTRACE_CUPTI": str(machine.folder / library)}
        assert said(machine, folder, script, env) == expected
        spool = only(folder)
        assert (kernels(spool), len(spool.records[b"API "])) == (1, 2)
        assert int(spool.info["capture_off"]) <= int(spool.info["let_go"])


def test_cupti_leaves_as_soon_as_the_gpu_has_done_what_a_window_has(
    machine: Machine, tmp_path: Path
) -> None:
    """And not before, for all that it is held for a minute at most: the kernel has its times."""
    script = "inject capture 1 sleep 5 unfinished 300 leave 60000 sleep 100 finalized "
    script += "released 1 0 capture 1 plain leave 60000 released 2 0 finalized"
    assert said(machine, tmp_path, script, MANUAL) == [0, 2]
    spool = only(tmp_path)
    assert kernels(spool) == 2
    ended = int(spool.records[b"KERN"]["end"][0])
    assert ended - int(spool.records[b"KERN"]["start"][0]) > 299_000_000
    left, left_again = (moment for moment, is_out, _ in spool.switches["control"] if is_out)
    assert ended <= left < left_again < ended + 30e9


def test_cupti_does_not_leave_in_the_midst_of_a_flush(machine: Machine, tmp_path: Path) -> None:
    """The program may ask for all that was recorded at any time; NVIDIA's crashes there."""
    window = "capture 1 sleep 5 plain leave 60000 sleep 60 write released {} 0 "
    script = "inject " + "".join(window.format(number) for number in (1, 2, 3, 4)) + "finalized"
    assert said(machine, tmp_path, script, MANUAL | {"FAKE_CUPTI_FLUSH_MS": "40"}) == [4]
    assert kernels(only(tmp_path)) == 4


@pytest.mark.parametrize("stays", [True, False])
def test_in_a_control_stretch_cupti_is_idle_or_taken_out(
    machine: Machine, tmp_path: Path, stays: bool
) -> None:
    out = "sleep 1500" if stays else "released 1 0"
    script = f"inject plain sleep 5 rest {stays:d} {out} plain sleep 300 finalized capture 1 "
    script += "sleep 5 plain"
    assert said(machine, tmp_path, script, {}) == [not stays]
    spool = only(tmp_path)
    assert (kernels(spool), len(spool.records[b"API "])) == (2, 4)
    assert [is_out for _, is_out, _ in spool.switches["control"]] == [False, True, False]
    merge(tmp_path, tmp_path / "t.sqlite", {})
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as rows:
        assert rows.execute("SELECT idleCupti FROM GPUTRACE_CONTROL").fetchall() == [(stays,)]


def test_in_programs_of_xla_copies_between_gpus_are_left_out(
    machine: Machine, tmp_path: Path
) -> None:
    """CUPTI 13.0 crashes them otherwise: see hazards.c."""
    kinds = []
    for name, env in (("plain", {}), ("xla", machine.with_library(tmp_path))):
        (tmp_path / name).mkdir()
        spool = recorded(machine, tmp_path / name, "inject sample", env)
        kinds.append(spool.records[b"COPY"]["copy_kind"].tolist())
        assert ("left_out" in spool.info) is (name == "xla")
    assert kinds == [[1, 10], [1]]
    merge(tmp_path / "xla", tmp_path / "t.sqlite", {})
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as rows:
        (why,) = rows.execute("SELECT reason FROM GPUTRACE_LOSS").fetchone()
    assert why.startswith("copies between GPUs:")


def test_cupti_stays_once_there_was_a_graph(machine: Machine, tmp_path: Path) -> None:
    """It may crash programs that have CUDA graphs if it is let go of."""
    script = "inject plain sleep 5 sample capture 0 sleep 1500 plain finalized"
    assert said(machine, tmp_path, script, {"GPUTRACE_HOLD_NS": "0"}) == [0]


def test_a_profiler_that_lets_go_of_cupti_gets_it_before_there_is_a_graph_of_xla(
    machine: Machine, tmp_path: Path
) -> None:
    """XLA's calls cuptiFinalize as it ends, which graphs that were recorded do not survive."""
    xla = machine.with_library(tmp_path)
    script = "inject sample sleep 5 keeps graphs 1 1 keeps taken"
    for name, env, expected in (
        ("xla", xla, [-1, 0, 1]),
        ("not-told", xla | {"GPUTRACE_SERIAL_GRAPHS": "0"}, [0, 0, 1]),
        ("plain", {}, [-1, -1, 0]),
    ):
        (tmp_path / name).mkdir()
        assert said(machine, tmp_path / name, script, env) == expected, name


HARDWARE: Final = {"GPUTRACE_HW_TRACE": "1", "FAKE_CUPTI_VERSION": "130401"}


def test_hardware_events_are_used_where_asked_for_and_cupti_stays(
    machine: Machine, tmp_path: Path
) -> None:
    """It cannot be let go of once it uses them: the stand-in ends the program."""
    script = "inject plain capture 1 sleep 5 plain capture 0 sleep 1500 plain hardware finalized"
    env = MANUAL | HARDWARE | {"FAKE_CUPTI_HW_TRACE": "1"}
    assert said(machine, tmp_path, script, env) == [1, 0]
    assert only(tmp_path).info["hw_trace"] == "on"


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "cuptiActivityEnableHWTrace failed (27)"),
        ({"FAKE_CUPTI_VERSION": "130400"}, "no hardware event tracing, which takes CUPTI 13.4"),
    ],
)
def test_where_there_are_no_hardware_events_kernels_are_recorded_as_ever(
    machine: Machine, tmp_path: Path, env: dict[str, str], why: str
) -> None:
    spool = recorded(machine, tmp_path, "inject plain", HARDWARE | env)
    assert kernels(spool) == 1
    ((_, _, text),) = spool.losses
    assert text.startswith(why)


def test_cupti_is_held_between_windows_where_that_is_asked_for(
    machine: Machine, tmp_path: Path
) -> None:
    window = "capture 1 sleep 5 sample calls capture 0 calls sleep 300 sample calls "
    env = MANUAL | {"GPUTRACE_HOLD_NS": str(10**12)}
    *calls, finalized = said(machine, tmp_path, f"inject sample {window * 2} finalized", env)
    assert finalized == 0
    assert calls[2] == calls[1], "between windows no call is watched"
    assert calls[4] > calls[2]
    spool = only(tmp_path)
    assert (kernels(spool), len(spool.records[b"API "])) == (2, 2 * 2)


def test_a_clock_is_registered_once_until_cupti_is_let_go_of_or_another_profiler_had_it(
    machine: Machine, tmp_path: Path
) -> None:
    """After each registration CUPTI takes the times of one kernel more from its default clock."""
    window = "capture 1 sleep 5 plain capture 0 sleep 5 "
    env = MANUAL | {"GPUTRACE_HOLD_NS": str(10**12)}
    script = f"inject plain {window * 5} registrations pause 1 pause 0 {window * 2} registrations"
    assert said(machine, tmp_path, script, env) == [1, 2]
    script = f"inject plain {window} released 1 0 {window} released 2 0 registrations"
    assert said(machine, tmp_path, script, MANUAL) == [2]


def test_a_window_that_opens_again_records_as_the_first(machine: Machine, tmp_path: Path) -> None:
    window = "capture 1 sleep 5 plain capture 0 released {} 0 plain "
    windows = " ".join(window.format(number) for number in (1, 2, 3))
    assert said(machine, tmp_path, f"inject plain {windows} finalized", MANUAL) == [3]
    spool = only(tmp_path)
    assert (kernels(spool), len(spool.records[b"API "])) == (3, 3 * 2)


def test_between_cudaprofilerstart_and_stop_cupti_is_there_and_else_gone(
    machine: Machine, tmp_path: Path
) -> None:
    window = "attended profiler 1 sleep 5 plain profiler 0 released {} 0 plain "
    windows = " ".join(window.format(number) for number in (1, 2))
    env = {"GPUTRACE_CAPTURE": "profiler", "GPUTRACE_HOLD_NS": "0"}
    assert said(machine, tmp_path, f"inject plain {windows} finalized", env) == [2]
    spool = only(tmp_path)
    assert (kernels(spool), len(spool.records[b"API "])) == (2, 2 * 2)


@pytest.mark.parametrize("wait", ["", "sleep 2000 "])
def test_a_window_that_opens_late_chooses_calls_one_by_one_too(
    machine: Machine, tmp_path: Path, wait: str
) -> None:
    script = f"inject sample {wait}calls sample calls capture 1 sleep 5 sample calls capture 0"
    first, second, third = said(machine, tmp_path, script, MANUAL)
    assert first == 2
    assert second - first == (0 if wait else 2), "calls are watched until some were recorded"
    assert third - second == 2
    assert len(only(tmp_path).records[b"API "]) == 2


LATE: Final = MANUAL | {"GPUTRACE_CAPTURE": "late"}


def test_an_armed_program_has_no_cupti_before_its_first_window(
    machine: Machine, tmp_path: Path
) -> None:
    window = "sleep 5 plain capture 0 released {} 0 plain"
    script = f"inject sleep 300 loaded capture 1 loaded {window.format(1)} "
    script += f"capture 1 {window.format(2)} finalized"
    assert said(machine, tmp_path, script, LATE) == [0, 1, 2]
    spool = only(tmp_path)
    assert (kernels(spool), len(spool.records[b"API "])) == (2, 2 * 2)


def test_a_window_that_opened_before_cuda_begins_with_it(machine: Machine, tmp_path: Path) -> None:
    """NVTX loads the collector before the driver does."""
    script = "nvtx capture 1 inject loaded sleep 5 plain"
    assert said(machine, tmp_path, script, LATE) == [1]
    assert kernels(only(tmp_path)) == 1


def test_an_armed_program_gets_its_cupti_when_another_profiler_has_ended(
    machine: Machine, tmp_path: Path
) -> None:
    """That profiler may keep the only place for a subscriber, which records do not need."""
    script = "inject pause 1 capture 1 sleep 5 loaded pause 0 loaded sleep 5 plain"
    assert said(machine, tmp_path, script, LATE | {"FAKE_CUPTI_TAKEN": "1"}) == [0, 1]
    assert kernels(only(tmp_path)) == 1


def test_an_armed_program_whose_cupti_another_tool_holds_is_told(
    machine: Machine, tmp_path: Path
) -> None:
    script = "inject capture 1 sleep 5 loaded plain capture 0 capture 1"
    assert said(machine, tmp_path, script, LATE | {"FAKE_CUPTI_TAKEN": "1"}) == [1]
    assert "another tool" in only(tmp_path).info["no_gpu_activity"]


def test_a_pause_keeps_cupti_for_the_other_profiler(machine: Machine, tmp_path: Path) -> None:
    script = "inject sample capture 0 pause 1 sleep 300 sample finalized pause 0 sample"
    assert said(machine, tmp_path, script, {}) == [0]


def test_threads_that_come_and_go_are_told_apart(machine: Machine, tmp_path: Path) -> None:
    # The first call of each began, by its record, before its thread.
    script = "inject " + "run 40 1 3 " * 8 + "run 40 4 3"
    calls = recorded(machine, tmp_path, script).records[b"API "]
    assert 0 not in calls["thread"]
    assert len(set(calls["thread"].tolist())) == 8 + 4
