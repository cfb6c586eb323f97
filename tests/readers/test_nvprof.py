"""nvprof's files, of every version, are analyzed as they are."""

from __future__ import annotations

import json
import lzma
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.model.events import UNKNOWN, Kind, Memory
from gputrace.model.options import Window
from gputrace.model.trace import Trace
from gputrace.readers.registry import open_trace
from tests.helpers import command
from tests.helpers.lookups import fields_of
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
from tests.synthetic import Plan, Recording, simulate, write_nsys, write_nvprof

REAL: Final = DATA / "profiling-lm-da6bcc3f.nvprof.xz"
US: Final = 1_000
SECOND: Final = 1_000_000_000

Row = tuple[object, ...]


@pytest.fixture
def file(tmp_path: Path) -> Nvvp:
    return Nvvp(tmp_path / "train.nvvp")


def rows(trace: Trace, *kinds: Kind, columns: str, window: Window | None = None) -> list[Row]:
    """In order of time, with names as text."""
    names = columns.split()
    events = trace.events(kinds, ["start", *names], window)
    order = events.start.argsort(kind="stable")
    lists = {name: getattr(events, name)[order].tolist() for name in names}
    if "name" in lists:
        texts = trace.names(events.name)
        lists["name"] = [texts[id] for id in lists["name"]]
    return list(zip(*lists.values(), strict=True))


class TestRows:
    @pytest.mark.parametrize("version", VERSIONS)
    def test_of_every_version(self, tmp_path: Path, version: int) -> None:
        file = Nvvp(tmp_path / "any.name", version)
        file.call(0, 5 * US, MEMCPY_ASYNC)
        file.row("MEMCPY", start=10 * US, end=30 * US, bytes=4096, copyKind=1, srcKind=2, dstKind=3)
        file.row("MEMSET", start=30 * US, end=31 * US, bytes=64)
        file.call(6 * US, 9 * US)
        file.kernel(31 * US, 131 * US)
        file.call(10 * US, 12 * US, LAUNCH_DRIVER, table="DRIVER")
        file.kernel(131 * US, 132 * US, "saxpy", table="KERNEL", streamId=9)
        with open_trace(file.save()) as trace:
            assert rows(trace, Kind.KERNEL, columns="start end name stream correlation") == [
                (31 * US, 131 * US, "void gemm<float>(float*)", 7, 2),
                (131 * US, 132 * US, "saxpy", 9, 3),
            ]
            copy = "start end kind bytes source_memory destination_memory process device"
            assert rows(trace, Kind.COPY_H2D, Kind.COPY_PEER, columns=copy) == [
                (10 * US, 30 * US, Kind.COPY_H2D, 4096, Memory.PINNED, Memory.DEVICE, 0, 0)
            ]
            assert rows(trace, Kind.MEMSET, columns="start bytes") == [(30 * US, 64)]
            assert rows(trace, Kind.API, columns="start end correlation name") == [
                (0, 5 * US, 1, "cudaMemcpyAsync_v3020"),
                (6 * US, 9 * US, 2, "cudaLaunchKernel_v7000"),
                (10 * US, 12 * US, 3, "cuLaunchKernel"),
            ]
            assert [process.pid for process in trace.processes] == [PID]

    def test_of_markers_become_ranges_and_marks(self, file: Nvvp) -> None:
        outer, inner, mark = (file.text(name) for name in ("step", "forward", "here"))
        at = {"objectKind": 2, "objectId": file.object()}
        file.row("MARKER", flags=2, timestamp=0, id=1, name=outer, **at)
        file.row("MARKER", flags=2, timestamp=10, id=2, name=inner, **at)
        file.row("MARKER", flags=4, timestamp=20, id=2, **at)
        file.row("MARKER", flags=1, timestamp=25, id=3, name=mark, **at)
        file.row("MARKER", flags=4, timestamp=30, id=1, **at)
        file.row("MARKER", flags=2, timestamp=40, id=4, name=inner, **at)
        file.row("MARKER", flags=4, timestamp=50, id=99, **at)
        file.kernel(0, 1)
        with open_trace(file.save()) as trace:
            assert rows(trace, Kind.RANGE, Kind.MARK, columns="start end kind name") == [
                (0, 30, Kind.RANGE, "step"),
                (10, 20, Kind.RANGE, "forward"),
                (25, 25, Kind.MARK, "here"),
                (40, 40, Kind.RANGE, "forward"),
            ]
            inside = rows(trace, Kind.RANGE, columns="name", window=Window(21, 26))
            assert inside == [("step",)]

    def test_of_one_thread_agree_on_its_id(self, file: Nvvp) -> None:
        high = THREAD | 1 << 31
        low = high & 0xFFFFFFFF
        file.call(0, 5 * US, threadId=low - (1 << 32))
        file.kernel(9 * US, 20 * US)
        at = {"objectKind": 2, "objectId": file.object(high), "name": file.text("step")}
        file.row("MARKER", flags=1, timestamp=0, id=1, **at)
        file.row("OVERHEAD", start=1, end=2, overheadKind=2 << 16, **dict(list(at.items())[:2]))
        nobody = {"objectKind": 1, "objectId": file.object(0)}
        file.row("OVERHEAD", start=3, end=4, overheadKind=1, **nobody)
        with open_trace(file.save()) as trace:
            (call,) = rows(trace, Kind.API, columns="thread")
            assert call == (low & 0x7FFFFFFF,)
            assert rows(trace, Kind.MARK, columns="thread") == [call]
            assert rows(trace, Kind.OVERHEAD, columns="thread name") == [
                (*call, "Instrumentation (Profiler)"),
                (0, "Driver JIT compiler (CUDA)"),
            ]

    def test_of_a_copy_between_cards_occupy_both(self, file: Nvvp) -> None:
        ends = {"srcDeviceId": 1, "dstDeviceId": 3, "deviceId": 1}
        file.row("MEMCPY2", start=9 * US, end=20 * US, copyKind=10, **ends)
        file.row("MEMCPY2", start=30 * US, end=40 * US, copyKind=8, **ends)
        with open_trace(file.save()) as trace:
            columns = "kind source_device destination_device"
            peer = (Kind.COPY_PEER, 1, 3)
            assert rows(trace, Kind.COPY_PEER, columns=columns) == [peer, peer]
            assert rows(trace, Kind.COPY_D2D, columns=columns) == []
        with gputrace.open(file.path) as opened:
            assert [gpu.device for gpu in opened.analyze().gpus] == [1, 3]

    def test_of_synchronisations_have_the_device_of_their_context(self, file: Nvvp) -> None:
        file.row("CONTEXT", contextId=4, deviceId=2)
        correlation = file.call(0, 50 * US, SYNCHRONIZE)
        more = {"cudaEventId": -1, "correlationId": correlation}
        file.row("SYNCHRONIZATION", type=3, start=1, end=49, contextId=4, streamId=7, **more)
        file.row("SYNCHRONIZATION", type=4, start=60, end=61, contextId=5, streamId=-1, **more)
        file.kernel(0, 1)
        with open_trace(file.save()) as trace:
            found = rows(trace, Kind.SYNC, columns="start device stream")
            assert found == [(1, 2, 7), (60, UNKNOWN, UNKNOWN)]

    def test_of_graphs_have_the_number_of_theirs(self, file: Nvvp) -> None:
        file.row("GRAPH_TRACE", start=0, end=5, graphId=12)
        with open_trace(file.save()) as trace:
            assert rows(trace, Kind.GRAPH, columns="name") == [("CUDA graph 12",)]

    def test_without_times_are_left_out_and_counted(self, file: Nvvp) -> None:
        file.call(0, 5 * US)
        file.kernel(9 * US, 20 * US)
        file.kernel(-EPOCH, -EPOCH, "lost")
        file.kernel(30 * US, -EPOCH, "lost")
        with gputrace.open(file.save()) as opened:
            report = opened.analyze()
        assert report.dropped_rows == {"no timestamp": 2}
        assert [gpu.kernels for gpu in report.gpus] == [1]


class TestClocks:
    def test_0_is_the_first_moment(self, file: Nvvp) -> None:
        file.call(3 * SECOND, 3 * SECOND + 5)
        file.kernel(4 * SECOND, 4 * SECOND + 20)
        file.kernel(6 * SECOND, 6 * SECOND + 20)
        with gputrace.open(file.save()) as opened:
            assert opened.analyze().gaps.largest[0].start_ns == SECOND + 20
            assert opened.analyze(time="2s:4s").gpus[0].kernels == 1
        with open_trace(file.path) as trace:
            assert trace.session.epoch_ns == EPOCH + 3 * SECOND

    @pytest.mark.parametrize("skew_s", [156, -156])
    @pytest.mark.parametrize("launches", [10, 1000])
    def test_of_a_gpu_that_are_wrong_are_moved_and_told(
        self, file: Nvvp, skew_s: int, launches: int
    ) -> None:
        skew = skew_s * SECOND
        for launch in range(0, launches * 10 * US, 10 * US):
            file.call(launch, launch + 3 * US)
            file.kernel(launch + 4 * US + skew, launch + 9 * US + skew)
        with open_trace(file.save()) as trace:
            found = rows(trace, Kind.KERNEL, columns="start end")
            assert found == [(n * 10 * US, n * 10 * US + 5 * US) for n in range(launches)]
            first = Window(0, 10 * US)
            assert len(rows(trace, Kind.KERNEL, columns="start", window=first)) == 1
        ran = command.gputrace("analyze", file.path)
        assert f"156 s {'ahead of' if skew_s > 0 else 'behind'} its host's" in ran.out

    def test_of_work_that_waits_in_a_queue_stay(self, file: Nvvp) -> None:
        for number in range(10):
            file.call(number * US, number * US + 500)
            file.kernel((5_000_000 + number) * US, (5_000_001 + number) * US)
        with open_trace(file.save()) as trace:
            assert rows(trace, Kind.KERNEL, columns="start")[0] == (5_000_000 * US,)
            assert trace.quality.notes == []

    def test_between_kernels_that_were_run_again_to_count_are_explained(self, file: Nvvp) -> None:
        file.kernel(0, 5 * US)
        file.call(0, US)
        file.row("METRIC", metricId=1, correlationId=1)
        with open_trace(file.save()) as trace:
            assert "nvprof counted events in it" in trace.quality.notes[0]
            assert "it causes the GPUs' idle time" in trace.idle_unknown

    def test_of_some_kernels_alone_do_not_say_when_a_gpu_was_idle(self, file: Nvvp) -> None:
        file.kernel(0, 5 * US)
        file.row("METRIC", metricId=1, correlationId=1)
        with open_trace(file.save()) as trace:
            assert "when the GPUs were idle is unknown" in trace.idle_unknown
            assert trace.quality.notes == [trace.idle_unknown]

    def test_of_some_kernels_far_apart_give_no_verdict(self, file: Nvvp) -> None:
        """Not that nothing stands out: 999 of 1,010 ms are unknown."""
        for start in (0, 1_005_000 * US):
            file.kernel(start, start + 5_000 * US)
        file.row("METRIC", metricId=1, correlationId=1)
        ran = command.gputrace("analyze", file.save())
        assert ran.out.startswith("No verdict: the trace does not say when the GPUs were idle")

    def test_of_several_files_are_one(self, tmp_path: Path) -> None:
        paths = _two_ranks(tmp_path, cards=({1, 2}, {1, 2}))
        ran = command.gputrace("analyze", *paths, "--json")
        report = json.loads(ran.out)
        assert [(gpu["device"], gpu["kernels"]) for gpu in report["gpus"]] == [(0, 2), (1, 2)]
        assert report["gaps"]["largest"][0]["start_ns"] == 30 * US
        assert report["span_ns"] == 1_490 * US
        assert report["warnings"] == []
        told = command.gputrace("analyze", tmp_path / "files").out
        assert "2 files of 1 host: the host of 100 has ranks 0-1" in told

    def test_of_machines_are_no_better_than_ntp(self, tmp_path: Path) -> None:
        paths = _two_ranks(tmp_path, cards=({1, 2}, {3, 4}))
        ran = command.gputrace("analyze", *paths)
        assert "2 files of 2 hosts" in ran.out
        assert "wall clocks only" in ran.out


def _two_ranks(folder: Path, cards: tuple[set[int], set[int]]) -> list[Path]:
    """Two processes, the second on its second card and 0.5 ms later."""
    (folder / "files").mkdir()
    paths = []
    for number, own in enumerate(cards):
        file = Nvvp(folder / "files" / f"{100 + number}.nvvp", pid=100 + number)
        for ordinal, card in enumerate(sorted(own)):
            file.row("DEVICE", id=ordinal, name=file.text("P100"), uuid=card.to_bytes(16, "big"))
        late = number * 500 * US
        file.call(late, late + 5 * US)
        file.kernel(late + 10 * US, late + 30 * US, deviceId=number)
        file.kernel(late + 990 * US, late + 1_000 * US, deviceId=number)
        paths.append(file.save())
    return paths


PLANS: Final = {
    "starved": Plan(steps=10, ranks=2, allreduces=3, data_wait_ns=3_000_000, sync_every_step=True),
    "streams": Plan(steps=10, streams=3, pageable=True, allocs_per_step=3, jitter=0.1),
    "graph": Plan(steps=10, graph=True, data_wait="python", data_wait_ns=900_000),
    "dataparallel": Plan(steps=10, gpus_per_process=3, data_wait_ns=900_000),
    "late": Plan(steps=10, ranks=3, allreduces=2, late_host_rank=1, late_host_ns=2_000_000),
}


class TestTheSameRun:
    """Gives the same answer, whoever recorded it."""

    @pytest.mark.parametrize("name", PLANS)
    def test_as_an_nsys_export(self, name: str, tmp_path: Path) -> None:
        recording = simulate(PLANS[name])
        ranges = ("nccl", "step")
        export = tmp_path / "run.sqlite"
        write_nsys(recording, export, osrt=False, nvtx=ranges, with_device_table=False)
        with gputrace.open(export) as opened:
            nsys = opened.analyze()
        with gputrace.open(*write_nvprof(recording, tmp_path / "nvprof", nvtx=ranges)) as opened:
            nvprof = opened.analyze()
        assert len(nsys.gaps.largest) > 10
        assert _figures(nvprof, 0) == _figures(nsys, _first_moment(recording))

    def test_as_a_conversion_of_the_file(self, tmp_path: Path) -> None:
        raw = tmp_path / "real"
        raw.write_bytes(lzma.decompress(REAL.read_bytes()))
        folder = spool(tmp_path)
        (folder / f"{PID}.nvvp").write_bytes(raw.read_bytes())
        _, converted = convert(folder)
        direct, trace = (
            json.loads(command.gputrace("analyze", path, "--json", "--gaps", "400").out)
            for path in (raw, converted)
        )
        assert direct["source"] == "nvprof"
        (gpu,) = direct["gpus"]
        assert gpu["name"] == "Tesla V100-SXM2-16GB"
        busy = gpu["span_ns"] - gpu["idle_ns"]
        assert (round(busy / 1e6, 1), round(gpu["span_ns"] / 1e6, 1)) == (8.3, 57.7)
        # The conversion numbers the cards as they come.
        for report in (direct, trace):
            gaps = report["gaps"]["largest"], report["gaps"]["largest_in_steps"]
            for table in (report["gpus"], report["breakdown"], *gaps):
                for row in table:
                    _forget(row, "gpu_known", "evidence")
        for table in ("gpus", "breakdown", "gaps"):
            assert direct[table] == trace[table]
        assert [f["id"] for f in direct["findings"]] == [f["id"] for f in trace["findings"]]


def _forget(row: dict[str, Any], *names: str) -> None:
    for name in names:
        row.pop(name, None)


def _first_moment(recording: Recording) -> int:
    tables = (recording.ops, recording.api, recording.nvtx, recording.sync)
    return min(int(table["start"].min()) for table in tables if len(table))


def _figures(report: Report, origin: int) -> Mapping[str, Any]:
    """Return what a report tells that does not depend on the file, with times after an origin."""
    gaps = [
        replace(gap, start_ns=gap.start_ns - origin, evidence=gap.evidence.partition(" (thread")[0])
        for gap in (*report.gaps.largest, *report.gaps.largest_in_steps)
    ]
    return {
        "gpus": [
            fields_of(replace(gpu, start_ns=gpu.start_ns - origin), "host", "name")
            for gpu in report.gpus
        ],
        "breakdown": [fields_of(row, "host") for row in report.breakdown],
        "steps": report.steps,
        "step_list": [(s.gpu, s.step, s.phase, s.end_ns - s.start_ns) for s in report.step_list],
        "gaps": sorted((fields_of(gap, "host", "end_ns") for gap in gaps), key=str),
        "findings": [(f.id, f.severity, f.impact_ns, f.message) for f in report.findings],
    }


class TestRefused:
    """With one line and exit code 3."""

    @staticmethod
    def refused(path: Path, *words: str) -> None:
        command.assert_refused(command.gputrace("analyze", path), 3, *words)

    def test_a_file_of_a_program_that_ran_nothing_on_a_gpu(self, file: Nvvp) -> None:
        file.row("DEVICE", id=0, name=file.text("Tesla V100"))
        file.row("NAME", objectKind=1, objectId=file.object(0), name=file.text("python"))
        self.refused(file.save(), "nvprof recorded no GPU activity")

    def test_a_file_of_calls_alone(self, file: Nvvp) -> None:
        file.call(0, 5 * US)
        self.refused(file.save(), "no GPU activity", "only the host's")

    def test_a_file_whose_operations_have_no_times(self, file: Nvvp) -> None:
        file.kernel(-EPOCH, -EPOCH)
        self.refused(file.save(), "no GPU operation in it has usable times")

    @pytest.mark.parametrize("part", [0.3, 0.99])
    def test_a_file_cut_short(self, file: Nvvp, part: float) -> None:
        file.kernel(0, 10)
        content = file.save().read_bytes()
        file.path.write_bytes(content[: int(part * len(content))])
        self.refused(file.path, "truncated")

    def test_a_file_with_garbage_in_its_middle(self, file: Nvvp) -> None:
        for number in range(3000):
            file.call(number * 10, number * 10 + 5)
            file.kernel(number * 10 + 5, number * 10 + 9)
        content = bytearray(file.save().read_bytes())
        middle = len(content) // 2
        content[middle : middle + 16384] = b"\xff" * 16384
        file.path.write_bytes(content)
        self.refused(file.path, "broken SQLite file")

    def test_a_file_with_a_schema_that_is_not_even_text(self, file: Nvvp) -> None:
        file.kernel(0, 10)
        content = file.save().read_bytes()
        file.path.write_bytes(content.replace(b"CREATE TABLE S", b"CREATE\xaf\xafABLE S", 1))
        self.refused(file.path, "broken SQLite file (malformed database schema (StringTable)")

    def test_tables_without_the_columns_that_matter(self, file: Nvvp) -> None:
        file.kernel(0, 10)
        with closing(sqlite3.connect(file.save())) as database, database:
            for table in ("CONCURRENT_KERNEL", "MEMCPY"):
                full = f"CUPTI_ACTIVITY_KIND_{table}"
                database.execute(f'ALTER TABLE {full} DROP COLUMN "end"')
        self.refused(file.path, "no GPU activity")


class TestStrippedFiles:
    """Are read as far as they go."""

    def test_without_names_threads_and_objects(self, file: Nvvp) -> None:
        file.call(0, 5 * US)
        file.kernel(9 * US, 20 * US)
        at = {"objectKind": 2, "objectId": file.object(), "name": file.text("step")}
        file.row("MARKER", flags=1, timestamp=0, id=1, **at)
        file.row("MEMCPY", start=30 * US, end=31 * US, copyKind=1)
        dropped = {
            "CONCURRENT_KERNEL": "name streamId correlationId deviceId contextId",
            "RUNTIME": "threadId processId cbid",
            "MARKER": "objectKind objectId name",
            "MEMCPY": "copyKind bytes srcKind",
        }
        with closing(sqlite3.connect(file.save())) as database, database:
            for table, columns in dropped.items():
                for column in columns.split():
                    sql = f"ALTER TABLE CUPTI_ACTIVITY_KIND_{table} DROP COLUMN {column}"
                    database.execute(sql)
        with open_trace(file.path) as trace:
            kernel = rows(trace, Kind.KERNEL, columns="start name device stream correlation")
            assert kernel == [(9 * US, "(no name)", UNKNOWN, UNKNOWN, UNKNOWN)]
            assert rows(trace, Kind.API, columns="thread name") == [(UNKNOWN, "(no name)")]
            assert rows(trace, Kind.MARK, columns="start thread") == [(0, UNKNOWN)]
            assert rows(trace, Kind.COPY_OTHER, columns="bytes source_memory") == [
                (UNKNOWN, Memory.UNKNOWN)
            ]

    def test_with_text_where_integers_belong(self, file: Nvvp) -> None:
        file.call(0, 5 * US)
        file.kernel(9 * US, 20 * US)
        file.kernel(30 * US, 40 * US)
        with closing(sqlite3.connect(file.save())) as database, database:
            table = "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"
            database.execute(
                f"UPDATE {table} SET correlationId = 'none', name = 'x' WHERE _id_ = 1"
            )
            database.execute(f"UPDATE {table} SET \"end\" = 'late' WHERE _id_ = 2")
        with gputrace.open(file.path) as opened:
            report = opened.analyze()
        assert [gpu.kernels for gpu in report.gpus] == [1]
        assert report.dropped_rows == {"no timestamp": 1}


def test_the_command_line_of_the_program_is_not_told(file: Nvvp) -> None:
    name = file.text("python train.py --token planted")
    file.row("NAME", objectKind=1, objectId=file.object(0), name=name)
    file.kernel(0, 10)
    assert "planted" not in command.gputrace("analyze", file.save(), "--json").out
