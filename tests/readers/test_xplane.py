"""Profiles of TensorFlow and JAX, read without either."""

from __future__ import annotations

import gzip
import json
import lzma
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputrace.api import Report
from gputrace.errors import InputError
from gputrace.model.events import GPU_KINDS, UNKNOWN, Kind, Memory
from gputrace.model.trace import Trace
from gputrace.readers.registry import open_trace
from tests.helpers import command, xplane
from tests.helpers.lookups import analyze
from tests.helpers.recordings import DATA
from tests.helpers.xplane import Event, Row
from tests.synthetic import Plan, simulate, write_nsys

PLANS = {
    "starved": Plan(steps=10, data_wait_ns=4_000_000, data_wait="python", sync_every_step=True),
    "launches": Plan(steps=10, kernel_ns=4_000, streams=2, allocs_per_step=4, pageable=True),
    "graph": Plan(steps=10, graph=True, data_wait="python", data_wait_ns=900_000),
    "dataparallel": Plan(steps=8, gpus_per_process=3, data_wait="python", data_wait_ns=2_000_000),
}


def opened(content: bytes, folder: Path, name: str = "run.xplane.pb") -> Trace:
    (folder / name).write_bytes(content)
    return open_trace(folder / name)


def gpu(*events: Event, name: str = "Stream #7(Compute)", plane: str = "/device:GPU:2") -> Row:
    return Row(plane, name, 7, events)


KERNEL = Event("gemm", 1000, 1500, {"correlation_id": 5})
TO_DEVICE = "kind_src:pinned kind_dst:device size:64 dest:2 async:1"
COPY = Event("MemcpyH2D", 400, 900, {"correlation_id": 4, "memcpy_details": TO_DEVICE})
HOST = Row("/host:CPU", "python", 99, [Event("gemm", 300, 350, {"correlation_id": 5})])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "tensorflow-8gpu.xplane.pb"
    path.write_bytes(lzma.decompress((DATA / f"{path.name}.xz").read_bytes()))
    return path


class TestARealProfile:
    def test_of_eight_gpus_of_which_two_compute(self, demo: Path) -> None:
        report = analyze(demo)
        assert report.source == "tensorflow"
        of = {row.device: (row.kernels, row.compute_ns, row.gpu_known) for row in report.gpus}
        assert of == {1: (0, 0, False), 4: (665, 14_825_385, False), 6: (665, 14_865_363, False)}
        assert [row.copies for row in report.gpus if row.device == 1] == [19]

    def test_its_calls_are_joined_with_what_they_issued(self, demo: Path) -> None:
        with open_trace(demo) as trace:
            kernels = trace.events([Kind.KERNEL], ["correlation", "stream"])
            calls = trace.events([Kind.API], ["correlation", "name"])
            assert set(kernels.correlation.tolist()) <= set(calls.correlation.tolist())
            assert set(kernels.stream.tolist()) == {134, 142}
            assert set(trace.names(calls.name).values()) == {"cuLaunchKernel", "cuMemcpyAsync"}

    def test_needs_neither_tensorflow_nor_protobuf(self, demo: Path) -> None:
        code = (
            "import sys, gputrace; gputrace.open(sys.argv[1]).analyze();"
            "print([n for n in sys.modules if n.split('.')[0] in ('tensorflow', 'google', 'jax')])"
        )
        assert command.python("-c", code, str(demo)).out.strip() == "[]"

    @pytest.mark.parametrize(
        ("name", "source", "steps"),
        [
            ("tf2.15_keras_fit.xplane.pb.gz", "tensorflow", 4),
            ("tf2.8_fit.trace.json.gz", "tensorflow", 4),
            ("jax0.10_steps.trace.json.gz", "jax", 2),
        ],
    )
    def test_of_a_run_on_cpus_tells_its_steps(self, name: str, source: str, steps: int) -> None:
        report = analyze(DATA / name)
        assert (report.source, report.gpus, report.steps.count) == (source, (), steps)
        (row,) = report.breakdown
        assert (row.host_data_ns or 0) < row.total_ns
        assert (row.host_data_ns is not None) == (source == "tensorflow")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_run_has_the_breakdown_gaps_and_findings_that_its_nsys_export_has(
    plan: Plan, tmp_path: Path
) -> None:
    write_nsys(simulate(plan), tmp_path / "run.sqlite")
    with open_trace(tmp_path / "run.sqlite") as trace:
        files = xplane.write(xplane.rows_of(trace), tmp_path)
    export = analyze(tmp_path / "run.sqlite")
    for other in map(analyze, files):
        assert other.source == "tensorflow"
        assert _plain(other, "breakdown") == _plain(export, "breakdown")
        assert _plain(other, "step_list") == _plain(export, "step_list")
        assert other.gaps.by_cause == export.gaps.by_cause
        assert [f.id for f in other.findings] == [f.id for f in export.findings]


def test_steps_that_the_profiler_marks_are_found_in_the_gpus_time(tmp_path: Path) -> None:
    write_nsys(simulate(PLANS["starved"]), tmp_path / "run.sqlite")
    export = analyze(tmp_path / "run.sqlite")
    with open_trace(tmp_path / "run.sqlite") as trace:
        rows = [
            *xplane.rows_of(trace),
            Row("/host:CPU", "python", 4242, _marks(trace, export)),
        ]
    for path in xplane.write(rows, tmp_path):
        report = analyze(path)
        assert (report.steps.source, report.steps.reason) == ("markers", "ranges named 'train'")
        assert (report.steps.count, export.steps.source) == (export.steps.count, "inferred")
        assert _plain(report, "step_list") == _plain(export, "step_list")


def _marks(trace: Trace, report: Report) -> list[Event]:
    """A step from the first to the last call that issued something of it, as a loop marks it."""
    operations = trace.events(GPU_KINDS, ["start", "correlation"])
    calls = trace.events([Kind.API], ["start", "end", "correlation"])
    marks = []
    for step in report.step_list:
        inside = (operations.start >= step.start_ns) & (operations.start < step.end_ns)
        own = np.isin(calls.correlation, operations.correlation[inside])
        start, end = int(calls.start[own].min()), int(calls.end[own].max())
        marks.append(Event("train", start, end, {"step_num": step.step}))
    return marks


def _plain(report: Report, table: str) -> list[dict[str, object]]:
    """Rows without what one of both does not tell: which card it is, and the program's numbers."""
    without = ("gpu", "gpu_known", "gpus", "number")
    rows = getattr(report, table)
    return [{n: getattr(row, n) for n in row.__slots__ if n not in without} for row in rows]


class TestWhatIsRead:
    def test_only_streams_of_a_gpu_hold_what_ran(self, tmp_path: Path) -> None:
        repeated = [
            gpu(KERNEL, name=n) for n in ("XLA Ops", "Steps", "TensorFlow Ops", "XLA Modules")
        ]
        with opened(xplane.xspace([gpu(KERNEL), *repeated]), tmp_path) as trace:
            found = trace.events([Kind.KERNEL], ["start", "end", "device", "stream", "correlation"])
            row = [getattr(found, name).tolist() for name in found.columns]
            assert row == [[1000], [1500], [2], [7], [5]]
            assert trace.device(0, 2).name == ""

    def test_a_copy_tells_its_size_and_memory(self, tmp_path: Path) -> None:
        with opened(xplane.xspace([gpu(COPY, KERNEL)]), tmp_path) as trace:
            copy = trace.events(
                [Kind.COPY_H2D], ["bytes", "source_memory", "destination_memory", "source_device"]
            )
            assert (copy.bytes[0], copy.source_device[0]) == (64, UNKNOWN)
            ends = (copy.source_memory[0], copy.destination_memory[0])
            assert ends == (Memory.PINNED, Memory.DEVICE)

    def test_a_copy_between_gpus_tells_both(self, tmp_path: Path) -> None:
        peer = Event("MemcpyP2P", 1, 9, {"memcpy_details": "size:8 dest:5 async:1"})
        with opened(xplane.xspace([gpu(peer)]), tmp_path) as trace:
            copy = trace.events([Kind.COPY_PEER], ["source_device", "destination_device", "bytes"])
            assert (copy.source_device[0], copy.destination_device[0], copy.bytes[0]) == (2, 5, 8)

    def test_memory_that_is_allocated_occupies_no_gpu(self, tmp_path: Path) -> None:
        allocated = Event("MemoryAlloc", 0, 900)
        graph = Event("CudaGraphExec:3", 5, 6)
        with opened(xplane.xspace([gpu(allocated, graph, KERNEL)]), tmp_path) as trace:
            found = trace.events([Kind.KERNEL, Kind.GRAPH], ["kind"])
            assert sorted(found.kind.tolist()) == [Kind.KERNEL, Kind.GRAPH]

    def test_picoseconds_become_whole_nanoseconds(self, tmp_path: Path) -> None:
        event = xplane.number(1, 1) + xplane.number(2, 1999) + xplane.number(3, 2002)
        line = (
            xplane.message(2, "Stream #1(Compute)")
            + xplane.number(3, 10)
            + xplane.message(4, event)
        )
        plane = xplane.message(2, "/device:GPU:0") + xplane.message(3, line)
        with opened(xplane.message(1, plane), tmp_path) as trace:
            found = trace.events([Kind.KERNEL], ["start", "end", "name"])
            assert (found.start[0], found.end[0]) == (11, 14)
            assert trace.names(found.name) == {int(found.name[0]): "<event 1>"}

    def test_times_of_the_wall_clock_count_from_the_first(self, tmp_path: Path) -> None:
        now = 1_795_222_316_000_000_000
        late = Event("gemm", now + 50, now + 90)
        content = xplane.xspace(
            [gpu(late), Row("/host:CPU", "python", 1, [Event("f", now, now + 9)])]
        )
        with opened(content, tmp_path) as trace:
            assert trace.events([Kind.KERNEL], ["start"]).start.tolist() == [50]
            assert trace.session.epoch_ns == now

    def test_the_profilers_own_complaints_are_told(self, tmp_path: Path) -> None:
        content = xplane.xspace([gpu(KERNEL)]) + xplane.message(2, "CUPTI: out of buffers")
        assert "CUPTI: out of buffers" in analyze_bytes(content, tmp_path).warnings

    def test_steps_are_events_with_a_step_number(self, tmp_path: Path) -> None:
        step = Event("train", 0, 90, {"step_num": 3})
        rows = [gpu(KERNEL), Row("/host:CPU", "python", 1 << 31, [step, Event("f", 1, 2)])]
        for path in xplane.write(rows, tmp_path):
            with open_trace(path) as trace:
                found = trace.events([Kind.STEP], ["start", "end", "name", "thread"])
                assert (found.start[0], found.end[0], found.thread[0]) == (0, 90, -(1 << 31))
                assert trace.names(found.name) == {int(found.name[0]): "train"}

    def test_waits_for_tf_data_hold_up_the_thread_that_feeds_the_only_gpu(
        self, tmp_path: Path
    ) -> None:
        wait = Row("/host:CPU", "tf_data", 8, [Event("IteratorGetNextOp::DoCompute", 10, 250)])
        with opened(xplane.xspace([gpu(KERNEL), HOST, wait]), tmp_path) as trace:
            assert trace.events([Kind.DATA_WAIT], ["thread"]).thread.tolist() == [8, 99]
        second = gpu(KERNEL, plane="/device:GPU:3")
        with opened(xplane.xspace([gpu(KERNEL), second, HOST, wait]), tmp_path) as trace:
            assert trace.events([Kind.DATA_WAIT], ["thread"]).thread.tolist() == [8]


def analyze_bytes(content: bytes, folder: Path) -> Report:
    (folder / "run.xplane.pb").write_bytes(content)
    return analyze(folder / "run.xplane.pb")


WHOLE = xplane.xspace([gpu(COPY, KERNEL), HOST], gpu_device_name="NVIDIA H200")


def test_the_card_is_named(tmp_path: Path) -> None:
    with opened(WHOLE, tmp_path) as trace:
        assert trace.device(0, 2).name == "NVIDIA H200"


class TestABrokenFile:
    """Is refused in one line, or read as far as its whole messages go: nothing else happens."""

    def test_cut_short_at_any_byte(self, tmp_path: Path) -> None:
        for length in range(len(WHOLE)):
            read_or_refuse(WHOLE[:length], tmp_path)

    def test_cut_in_the_middle_says_so(self, tmp_path: Path) -> None:
        path = tmp_path / "run.xplane.pb"
        path.write_bytes(WHOLE[: len(WHOLE) // 2])
        command.assert_unreadable(path, "XSpace", "cut short", "copy it or record it again")

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
    def test_real_one_cut_short(self, share: float, demo: Path, tmp_path: Path) -> None:
        content = demo.read_bytes()
        with pytest.raises(InputError, match="cut short"):
            opened(content[: int(share * len(content))], tmp_path)

    @given(st.data())
    @settings(deadline=2000)
    def test_with_bytes_that_are_others(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        content = bytearray(WHOLE)
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        read_or_refuse(bytes(content), tmp_path_factory.getbasetemp())

    @given(st.binary(max_size=300))
    @settings(deadline=2000)
    def test_with_garbage_after_a_good_start(
        self, tmp_path_factory: pytest.TempPathFactory, garbage: bytes
    ) -> None:
        plane = xplane.message(2, "/device:GPU:0") + garbage
        read_or_refuse(xplane.message(1, plane), tmp_path_factory.getbasetemp())
        line = xplane.message(2, "Stream #1()") + garbage
        plane = xplane.message(2, "/device:GPU:0") + xplane.message(3, line)
        read_or_refuse(xplane.message(1, plane), tmp_path_factory.getbasetemp())

    @pytest.mark.parametrize("length", [1 << 20, 1 << 31, 1 << 40, (1 << 63) + 5, (1 << 64) - 1])
    def test_with_a_huge_length(self, length: int, tmp_path: Path) -> None:
        start = xplane.message(2, "/device:GPU:0")
        for tag in (3, 4, 5, 6):
            plane = start + xplane.varint(tag << 3 | 2) + xplane.varint(length)
            refuse(xplane.message(1, plane), tmp_path)
        event = xplane.message(4, xplane.varint(4 << 3 | 2) + xplane.varint(length))
        refuse(xplane.message(1, start + xplane.message(3, event)), tmp_path)

    def test_a_gzip_cut_short(self, tmp_path: Path) -> None:
        for content in (
            gzip.compress(WHOLE * 9),
            xplane.trace_viewer([gpu(KERNEL), HOST]),
        ):
            for length in range(len(content)):
                read_or_refuse(content[:length], tmp_path)
        with pytest.raises(InputError, match="cut off: its gzip data end after"):
            opened(gzip.compress(WHOLE)[:-9], tmp_path)

    def test_a_gzip_that_unpacks_to_far_more_than_a_trace(self, tmp_path: Path) -> None:
        bomb = gzip.compress(WHOLE) + gzip.compress(bytes(1 << 26)) * 5
        with pytest.raises(InputError, match="no trace compresses that well"):
            opened(bomb, tmp_path)

    def test_the_trace_viewers_file_cut_short(self, tmp_path: Path) -> None:
        content = gzip.decompress(xplane.trace_viewer([gpu(KERNEL), HOST]))
        for length in range(len(content)):
            read_or_refuse(content[:length], tmp_path)
        with pytest.raises(InputError, match=r"cut off.*--keep-going"):
            opened(content[:-5], tmp_path)

    @pytest.mark.parametrize("field", ["ph", "pid", "tid", "ts", "dur", "name", "args"])
    @pytest.mark.parametrize("value", [None, "x", [], {"a": {}}, 1e300, -5, True, 10**30])
    def test_the_trace_viewers_values_of_any_type(
        self, field: str, value: object, tmp_path: Path
    ) -> None:
        document = json.loads(gzip.decompress(xplane.trace_viewer([gpu(COPY, KERNEL), HOST])))
        for event in document["traceEvents"]:
            broken = {**event, field: value}
            others = [broken if other is event else other for other in document["traceEvents"]]
            content = json.dumps({**document, "traceEvents": others}).encode()
            read_or_refuse(content, tmp_path)


def read_or_refuse(content: bytes, folder: Path) -> None:
    try:
        with opened(content, folder) as trace:
            trace.events(list(Kind), ["start", "end", "name", "thread", "bytes", "gpu"])
    except InputError as error:
        one_line(error)


def one_line(error: InputError) -> None:
    assert "\n" not in str(error)


def refuse(content: bytes, folder: Path) -> None:
    with pytest.raises(InputError):
        opened(content, folder)


def test_a_large_profile_takes_seconds(tmp_path: Path) -> None:
    """60,000 kernels and their calls: 0.5 s on the machine of the authors."""
    kernels = [
        Event(f"kernel_{i % 50}", 100 * i, 100 * i + 60, {"correlation_id": i + 1})
        for i in range(60_000)
    ]
    rows = [gpu(*kernels), Row("/host:CPU", "python", 1, kernels)]
    content = xplane.xspace(rows)
    began = time.process_time()
    with opened(content, tmp_path) as trace:
        assert len(trace.events([Kind.KERNEL], ["start"])) == 60_000
    assert time.process_time() - began < 10
