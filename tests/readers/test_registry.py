"""Files are known by their content, however they are written, packed, merged or cut."""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import zstandard

import gputrace
from gputrace.errors import InputError
from gputrace.model.events import Kind
from gputrace.readers.registry import open_trace
from tests.helpers.kineto import PID, event, kernel, write
from tests.helpers.recordings import DATA
from tests.synthetic import Plan, simulate, write_nsys

MILLISECOND: Final = 1_000_000


def kernels(path: Path) -> int:
    with open_trace(path) as trace:
        return len(trace.events([Kind.KERNEL], ["start"]))


@pytest.fixture(scope="module", params=[2, 40_000])
def counted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, bytes]:
    """So many kernels, and a trace of them: one of more than a block is among them."""
    path = tmp_path_factory.mktemp("counted") / "run.json"
    write(path, *(kernel(at, 1, "gemmé") for at in range(request.param)))
    return request.param, path.read_bytes()


@pytest.mark.parametrize(
    "written",
    [
        lambda text: codecs.BOM_UTF8 + text,
        lambda text: text.decode().encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.decode().encode("utf-16-be"),
        lambda text: gzip.compress(gzip.compress(text)),
        lambda text: gzip.compress(gzip.compress(text.decode().encode("utf-16"))),
        lzma.compress,
        lambda text: lzma.compress(text[:99]) + lzma.compress(text[99:]),
        zstandard.compress,
        lambda text: zstandard.compress(text[:99]) + zstandard.compress(text[99:]),
        lambda text: gzip.compress(zstandard.compress(text)),
    ],
    ids=[
        "mark",
        "utf-16",
        "utf-16-be",
        "twice",
        "all",
        "xz",
        "xz-parts",
        "zstd",
        "zstd-parts",
        "gzip-of-zstd",
    ],
)
def test_a_trace_is_read_in_any_encoding(
    written: Callable[[bytes], bytes], counted: tuple[int, bytes], tmp_path: Path
) -> None:
    path, (count, text) = tmp_path / "run.json", counted
    path.write_bytes(written(text))
    assert kernels(path) == count


def test_without_a_library_for_zstd_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt.trace.json.zst"
    path.write_bytes(zstandard.compress(b'{"schemaVersion": 1, "traceEvents": []}'))
    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    for named in (path, tmp_path):
        with pytest.raises(InputError, match="pip install zstandard"):
            gputrace.open(named)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstandard.compress])
def test_a_packed_database_is_read_like_the_file_in_it(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    plain, packed = tmp_path / "run.sqlite", tmp_path / "run.sqlite.packed"
    write_nsys(simulate(Plan(steps=4)), plain)
    packed.write_bytes(pack(plain.read_bytes()))
    before = sorted(tmp_path.iterdir())
    with gputrace.open(plain) as one, gputrace.open(packed) as other:
        assert other.analyze().breakdown == one.analyze().breakdown
        assert other.analyze().paths == (str(packed),)
    assert sorted(tmp_path.iterdir()) == before
    # One that changes is unpacked again; a broken one is refused, and nothing of it is kept.
    packed.write_bytes(pack(plain.read_bytes())[:-2000])
    with pytest.raises(InputError, match=f"{packed.name}: (cut off|broken|the SQLite file in it)"):
        open_trace(packed)
    with pytest.raises(InputError, match=f"{packed.name}: (cut off|broken|the SQLite file in it)"):
        open_trace(packed)


def test_a_trace_with_a_pg_config_is_no_dump_of_a_flight_recorder(tmp_path: Path) -> None:
    about = {"rank": 1, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    path = write(tmp_path / "trace1.json", kernel(1, 1), distributedInfo=about)
    with gputrace.open(path) as trace:
        assert json.loads(trace.analyze().render("json"))["gpus"][0]["rank"] == 1


def test_the_list_of_a_pytorch_without_kineto_has_operations_and_steps(tmp_path: Path) -> None:
    host = {"ph": "X", "pid": "CPU functions", "tid": 3, "args": {}}
    gpu = {"ph": "X", "pid": "CUDA functions", "tid": 1, "args": {}}
    events = [
        host | {"name": "ProfilerStep#0", "ts": 0, "dur": 10},
        host | {"name": "aten::mm", "ts": 1, "dur": 2},
        {"ph": "s", "id": 0, "cat": "cpu_to_cuda", "name": "mm", "ts": 1, "pid": "CPU functions"},
        gpu | {"name": "aten::mm", "ts": 2.5, "dur": 4},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    with open_trace(path) as trace:
        found = trace.events([Kind.KERNEL, Kind.STEP], ["kind", "start", "end", "device"])
        rows = zip(found.kind.tolist(), (found.end - found.start).tolist(), strict=True)
        assert sorted(rows) == [(Kind.KERNEL, 4000), (Kind.STEP, 10_000)]
        assert found.device[found.kind == Kind.KERNEL].tolist() == [1]


class TestATimelineOfHorovod:
    HEAD = (
        '[{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "Broadcast_w"}},\n'
        '{"ph": "B", "name": "NEGOTIATE_BROADCAST", "ts": 141252604, "pid": 1},\n'
    )

    def test_has_the_phases_of_tensors_and_says_what_is_lacking(self, tmp_path: Path) -> None:
        path = Path(shutil.copy(DATA / "horovod_timeline.json.gz", tmp_path))
        with gputrace.open(path) as trace:
            analysis = json.loads(trace.analyze().render("json"))
        assert analysis["findings"][0]["id"] == "no-gpu-activity"
        with open_trace(path) as trace:
            ranges = trace.events([Kind.RANGE], ["start", "end", "name", "thread"])
            names = trace.names(np.unique(ranges.name)).values()
        assert len(ranges) == 892
        assert {"NEGOTIATE_ALLREDUCE", "MPI_ALLREDUCE"} < set(names)
        assert len(np.unique(ranges.thread)) == 92

    def test_of_old_need_not_say_when_it_began_nor_end(self, tmp_path: Path) -> None:
        path = tmp_path / "timeline.json"
        path.write_text(
            self.HEAD + '{"ph": "X", "name": "2", "ts": 141252607, "pid": 1, "dur": 0},\n{"p'
        )
        with open_trace(path) as trace:
            ranges = trace.events([Kind.RANGE], ["start", "end"])
            assert (ranges.end - ranges.start).tolist() == [3000]


def test_a_copy_for_perfetto_beside_a_profile_of_jax_is_skipped(tmp_path: Path) -> None:
    shutil.copy(DATA / "jax0.10_steps.trace.json.gz", tmp_path / "node0.trace.json.gz")
    shutil.copy(tmp_path / "node0.trace.json.gz", tmp_path / "perfetto_trace.json.gz")
    with gputrace.open(tmp_path) as trace:
        assert json.loads(trace.analyze().render("json"))["paths"] == [
            str(tmp_path / "node0.trace.json.gz")
        ]


def window(path: Path, first: int, start: float, **more: Any) -> Path:
    """Three steps of 10 ms; in each a call launches a kernel of 4.99 ms, whose ids begin at 0."""
    events = []
    for number in range(3):
        at = start + 10_000 * number
        events += [
            event("user_annotation", f"ProfilerStep#{first + number}", at, 10_000),
            event("cuda_runtime", "cudaLaunchKernel", at + 1_000, 5, args={"correlation": number}),
            kernel(at + 5_000, 4_990, correlation=number),
        ]
    return write(path, *events, baseTimeNanoseconds=1_732_000_000_000_000_000, **more)


class TestTwoWindowsOfOneProcess:
    @pytest.mark.parametrize("rank", [None, 0])
    def test_are_one_run_with_the_steps_of_both(self, tmp_path: Path, rank: int | None) -> None:
        more: dict[str, Any] = {} if rank is None else {"distributedInfo": {"rank": rank}}
        window(tmp_path / "b.json", 20, 5_000_000, **more)
        window(tmp_path / "a.json", 5, 1_000_000, **more)
        with gputrace.open(tmp_path) as trace:
            analysis = json.loads(trace.analyze().render("json"))
        # Of the first step of a later window, the beginning is not always known.
        assert analysis["steps"]["count"] in (5, 6)
        assert analysis["steps"]["mean_ns"] == 10 * MILLISECOND
        (gpu,) = analysis["gpus"]
        assert gpu["compute_ns"] == 6 * 4_990_000
        assert gpu["span_ns"] == 54_990_000  # Of 4 s between them nothing is known.
        assert sum(row["launch_ns"] for row in analysis["breakdown"]) > 0

    def test_that_overlap_are_two_processes(self, tmp_path: Path) -> None:
        window(tmp_path / "a.json", 5, 1_000_000)
        window(tmp_path / "b.json", 5, 1_005_000)
        with gputrace.open(tmp_path) as trace:
            assert len(json.loads(trace.analyze().render("json"))["gpus"]) == 2


@pytest.mark.parametrize("devices", [(0, 0), (0, 1)])
@pytest.mark.parametrize("labels", ["[TP{:02}] {}", "rank{}: {}", "[TP0-DP{}] {}"])
def test_ranks_merged_into_one_file_are_kept_apart(
    tmp_path: Path, devices: tuple[int, int], labels: str
) -> None:
    """Rank 1 launches its kernel 5 ms after rank 0, with the same correlation id."""
    events = []
    for rank, device in enumerate(devices):
        host, at = {"pid": labels.format(rank, PID)}, 5_000 * rank
        call = event("cuda_runtime", "cudaLaunchKernel", at, 5, args={"correlation": 7}, **host)
        on = {"pid": labels.format(rank, device)}
        events += [call, kernel(at + 10, 1_000, device=device, correlation=7) | on]
    path = write(tmp_path / "merged.json", *events, distributedInfo={"rank": 0, "world_size": 2})
    with open_trace(path) as trace:
        assert [process.rank for process in trace.processes] == [0, 1]
        assert [process.pid for process in trace.processes] == [PID, PID]
        rows = trace.events([Kind.KERNEL, Kind.API], ["process", "device", "kind"])
        assert rows.process[rows.kind == Kind.API].tolist() == [0, 1]
        assert rows.process[rows.kind == Kind.KERNEL].tolist() == [0, 1]
        assert rows.device[rows.kind == Kind.KERNEL].tolist() == [*devices]
    with gputrace.open(path) as trace:
        gpus = json.loads(trace.analyze().render("json"))["gpus"]
    assert [gpu["rank"] for gpu in gpus] == [0, 1]
    assert [gpu["compute_ns"] for gpu in gpus] == [MILLISECOND, MILLISECOND]


def test_ranks_merged_under_numbers_are_told_by_what_their_calls_issued(tmp_path: Path) -> None:
    """As fused: process and correlation ids are moved apart, and nothing else says whose a row is.

    Rank 1 makes fewer calls than rank 0, which would else be taken for that of all GPUs.
    """
    events = [event("cuda_runtime", "cudaEventQuery", 90, 1, args={"correlation": 99})]
    for rank in (1, 0):
        call = event("cuda_runtime", "cudaLaunchKernel", 5, 5, args={"correlation": rank + 7})
        on_gpu = kernel(20, 1_000, device=2 + rank, correlation=rank + 7)
        events += [call | {"pid": PID + rank * 10**8}, on_gpu | {"pid": rank * 10**8 + 2 + rank}]
    with open_trace(write(tmp_path / "fused.json", *events)) as trace:
        rows = trace.events([Kind.KERNEL], ["process", "device"])
        ranks = [trace.processes[process].rank for process in rows.process.tolist()]
        assert dict(zip(rows.device.tolist(), ranks, strict=True)) == {2: 0, 3: 1}
