"""Traces of PyTorch's profiler give the figures that are known of them, as nsys files do."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gputrace.api import Report
from gputrace.errors import InputError
from gputrace.model.events import GPU_KINDS, Kind
from gputrace.model.intervals import union
from gputrace.readers.registry import open_trace
from tests.helpers import command, lookups
from tests.helpers.kineto import event, kernel, real, write
from tests.synthetic import Plan, Recording, simulate, write_kineto, write_nsys
from tests.synthetic.kineto import PLAIN

MICROSECOND = 1_000
PLANS = {
    "starved": Plan(steps=12, ranks=1, data_wait_ns=6_000_000, pageable=True, data_wait="python"),
    "synchronising": Plan(steps=12, sync_every_step=True, allocs_per_step=2, streams=2),
    "ranks": Plan(steps=12, ranks=3, allreduces=2, late_host_rank=1, late_host_ns=3_000_000),
    "DataParallel": Plan(steps=12, gpus_per_process=3),
}


def there(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path


def analyze(*paths: Path) -> Report:
    return lookups.analyze(*map(there, paths))


class TestRealRecordings:
    @pytest.mark.parametrize(
        ("trace", "oracle"),
        [
            ("tracelens-falconsai.json.gz", "tracelens-falconsai.gpu_timeline.csv"),
            (
                "google_owlv2-large-patch14-ensemble__1016001.json.gz",
                "google_owlv2-large-patch14-ensemble__1016001.gpu_timeline.csv",
            ),
        ],
    )
    def test_the_partition_is_that_of_tracelens(self, trace: str, oracle: str) -> None:
        """It counts memsets as computation."""
        (gpu,) = analyze(real("tracelens", trace)).gpus
        rows = csv.reader(real("tracelens", oracle).read_text().splitlines()[1:])
        known = {name: float(time) * 1e6 for name, time, _ in rows}
        ours = {
            "computation_time": gpu.compute_ns + gpu.memset_ns,
            "exposed_comm_time": gpu.communication_ns,
            "exposed_memcpy_time": gpu.h2d_ns + gpu.other_copy_ns,
            "busy_time": gpu.span_ns - gpu.idle_ns,
            "idle_time": gpu.idle_ns,
            "total_time": gpu.span_ns,
        }
        for name, time in ours.items():
            assert time == pytest.approx(known[name], abs=MICROSECOND), name

    @pytest.mark.parametrize(
        ("workers", "in_all", "loading"), [(0, 928.5, 279.7), (4, 769.5, 10.2)]
    )
    def test_a_profiler_s_steps_are_those_it_marked(
        self, workers: int, in_all: float, loading: float
    ) -> None:
        report = analyze(real("kineto", f"resnet50-workers{workers}.pt.trace.json.gz"))
        (row,) = report.breakdown
        assert (report.steps.source, report.steps.count, row.steps) == ("profiler", 6, 6)
        assert row.total_ns / 1e6 == pytest.approx(in_all, abs=0.05)
        assert row.host_data_ns is not None
        assert row.host_data_ns / 1e6 == pytest.approx(loading, abs=0.05)

    def test_a_loader_without_workers_is_the_first_finding(self) -> None:
        report = analyze(real("kineto", "resnet50-workers0.pt.trace.json.gz"))
        assert report.findings[0].id == "data-feeding"
        waited = report.breakdown[0].data_feeding_ns
        assert waited is not None
        assert waited / 1e6 == pytest.approx(184.6, abs=0.05)

    def test_idle_time_while_loading_that_is_no_wait_for_data_is_pauses_between_kernels(
        self,
    ) -> None:
        path = there(real("kineto", "resnet50-workers0.pt.trace.json.gz"))
        with open_trace(path) as trace:
            busy, loading, steps = (
                union(rows.start, rows.end)
                for rows in (
                    trace.events(kinds, ["start", "end"])
                    for kinds in (GPU_KINDS, [Kind.DATA_WAIT], [Kind.STEP])
                )
            )
        idle = steps.difference(busy).intersection(loading)
        lengths = idle.end - idle.start
        pauses = lengths[lengths <= 3 * MICROSECOND]
        assert idle.total / 1e6 == pytest.approx(188.5, abs=0.05)
        assert (idle.total - pauses.sum()) / 1e6 == pytest.approx(183.8, abs=0.05)
        assert len(pauses) == pytest.approx(3_400, abs=50)

    def test_a_loader_with_workers_is_no_finding(self) -> None:
        report = analyze(real("kineto", "resnet50-workers4.pt.trace.json.gz"))
        assert "data-feeding" not in {finding.id for finding in report.findings}

    def test_collectives_are_communication(self) -> None:
        (gpu,) = analyze(real("kineto", "hta-nccl-allreduce.json.gz")).gpus
        assert gpu.communication_ns > 0
        assert (gpu.span_ns - gpu.idle_ns) / 1e6 == pytest.approx(157.5, abs=0.05)
        assert gpu.span_ns / 1e6 == pytest.approx(660.6, abs=0.05)

    def test_an_id_past_64_bits_does_no_harm(self) -> None:
        report = analyze(real("kineto", "hta-large-integer.pt.trace.json.gz"))
        assert [(gpu.kernels, gpu.communication_ns) for gpu in report.gpus] == [(1, 50_000)]

    @pytest.mark.parametrize(
        ("name", "steps"),
        [("hta-cpu-only.pt.trace.json.gz", 5), ("torch2.13-cpu.pt.trace.json.gz", 3)],
    )
    def test_without_a_gpu_the_host_s_side_is_told(self, name: str, steps: int) -> None:
        report = analyze(real("kineto", name))
        assert (len(report.gpus), report.steps.count) == (0, steps)
        assert "no-gpu-activity" in {finding.id for finding in report.findings}


def test_nothing_of_a_gpu_and_no_step_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "run.pt.trace.json", event("cpu_op", "aten::mm", 1, 1))
    command.assert_unreadable(path, "no GPU activity", "ProfilerActivity.CUDA")


@pytest.fixture(scope="module", params=list(PLANS))
def recording(request: pytest.FixtureRequest) -> Recording:
    return simulate(PLANS[request.param])


def figures(report: Report) -> dict[str, Any]:
    """Return what does not depend on the recorder: times are from the first operation on."""
    start = min(gpu.start_ns for gpu in report.gpus)
    apart = {"gpu", "rank", "rank_known", "gpu_known", "name", "host", "start_ns", "end_ns"}

    def plain(row: Any) -> dict[str, Any]:
        edges = {n: getattr(row, n) - start for n in ("start_ns", "end_ns") if hasattr(row, n)}
        return edges | {name: getattr(row, name) for name in row.__slots__ if name not in apart}

    return {
        "gpus": [plain(gpu) for gpu in report.gpus],
        "steps": [plain(step) for step in report.step_list],
        "breakdown": [plain(row) for row in report.breakdown],
        "gaps": (report.gaps.count, report.gaps.total_ns, report.gaps.by_cause),
        "largest": [(g.start_ns - start, g.end_ns - start, g.cause) for g in report.gaps.largest],
        "findings": [(finding.id, finding.impact_ns) for finding in report.findings],
    }


@pytest.mark.parametrize("ranges", [(), ("step", "data")])
def test_a_run_gives_the_figures_that_its_nsys_export_gives(
    recording: Recording, ranges: tuple[str, ...], tmp_path: Path
) -> None:
    write_nsys(recording, tmp_path / "run.sqlite", osrt=False, nvtx=ranges)
    names = {kind: PLAIN[kind] for kind in ranges}
    paths = write_kineto(recording, tmp_path, annotations=names, packed=bool(ranges))
    assert figures(analyze(*paths)) == figures(analyze(tmp_path / "run.sqlite"))


def test_steps_that_the_profiler_marked_are_found_behind_a_host_that_runs_ahead(
    tmp_path: Path,
) -> None:
    recording = simulate(Plan(steps=8, kernels_per_step=40, warmup_steps=0, kernel_ns=500_000))
    (path,) = write_kineto(recording, tmp_path)
    report = analyze(path)
    truth = [(w.end - w.start) for w in recording.truth.windows]
    ours = [step.end_ns - step.start_ns for step in report.step_list]
    assert (report.steps.source, report.steps.count) == ("profiler", 8)
    assert sum(ours) == pytest.approx(sum(truth), rel=0.02)


def test_all_reduces_that_nothing_waits_for_move_no_step(tmp_path: Path) -> None:
    """They end steps later, behind a late rank: a step's last operation lies in another one."""
    plan = Plan(seed=3, ranks=2, steps=16, kernels_per_step=60, allreduces=5, joined=False)
    plan = replace(plan, streams=3, allreduce_ns=500_000, queue_depth=25)
    plan = replace(plan, late_host_rank=1, late_host_ns=6_000_000)
    recording = simulate(plan)
    report = analyze(*write_kineto(recording, tmp_path))
    steady = [w for w in recording.truth.windows if (w.rank, w.phase) == (0, "steady")]
    ours = [s.end_ns - s.start_ns for s in report.step_list if (s.rank, s.phase) == (0, "steady")]
    assert ours[:-1] == [w.end - w.start for w in steady[:-1]]


def test_steps_on_a_cpu_are_of_the_profiler_not_of_its_last_step(tmp_path: Path) -> None:
    events = [event("user_annotation", f"ProfilerStep#{n}", 1_000 * n, 990) for n in range(5, 9)]
    text = analyze(write(tmp_path / "run.pt.trace.json", *events)).render()
    assert "Steps are from mark to mark of 'ProfilerStep', in host time" in " ".join(text.split())


def test_marks_that_are_points_are_steps_until_the_next_one(tmp_path: Path) -> None:
    """Older profilers of PyTorch close the range of a step where it begins."""
    events = [event("user_annotation", f"ProfilerStep#{n}", 3_000 * n, 18) for n in range(5)]
    report = analyze(write(tmp_path / "run.pt.trace.json", *events))
    assert [(step.start_ns, step.end_ns - step.start_ns) for step in report.step_list] == [
        (3_000_000 * n + report.step_list[0].start_ns, 3_000_000) for n in range(4)
    ]


def test_the_first_step_s_wait_for_data_is_not_lost(tmp_path: Path) -> None:
    """Three steps of 10 ms: 6 ms of loading, then a launch and a kernel of 3 ms."""
    events = []
    for number in range(3):
        start = 1_000_000 + number * 10_000
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        events += [
            event("user_annotation", f"ProfilerStep#{number}", start, 9_990),
            event("user_annotation", loader, start, 6_000),
            event("cuda_runtime", "cudaLaunchKernel", start + 6_000, 10,
                  args={"correlation": number + 1}),
            kernel(start + 6_010, 3_000, correlation=number + 1),
            event("cuda_runtime", "cudaDeviceSynchronize", start + 6_020, 2_995,
                  args={"correlation": number + 100}),
        ]  # fmt: skip
    report = analyze(write(tmp_path / "run.pt.trace.json", *events))
    (row,) = report.breakdown
    assert (row.steps, row.total_ns, row.compute_ns) == (3, 3 * 9_990_000, 9_000_000)
    assert row.data_feeding_ns == row.host_data_ns == 3 * 6_000_000


class TestSeveralRanks:
    @pytest.fixture
    def files(self, tmp_path: Path) -> list[Path]:
        plan = Plan(steps=8, ranks=3, allreduces=1, kernels_per_step=30)
        return write_kineto(simulate(plan), tmp_path)

    def test_a_folder_of_files_is_one_run(self, files: list[Path]) -> None:
        report = analyze(files[0].parent)
        assert [gpu.rank for gpu in report.gpus] == [0, 1, 2]
        assert report == analyze(*files)

    def test_a_missing_rank_is_named(self, files: list[Path]) -> None:
        assert any("rank 1 of 3" in note for note in analyze(files[0], files[2]).warnings)

    def test_the_same_rank_twice_is_refused(self, files: list[Path], tmp_path: Path) -> None:
        copy = tmp_path / "copy.json"
        copy.write_bytes(files[0].read_bytes())
        with pytest.raises(InputError, match="has rank 0"):
            analyze(files[0], copy)


def test_what_a_rocm_trace_calls_its_calls_is_understood(tmp_path: Path) -> None:
    """The host allocates for 2 ms before it launches what ends the gap."""
    calls = [("hipExtLaunchKernel", 0, 1), ("hipMalloc", 200, 2_000), ("hipLaunchKernel", 2_210, 5)]
    events = [
        event("cuda_runtime", name, 5_000 + start, length, args={"correlation": start + 1})
        for name, start, length in calls
    ]
    events += [kernel(5_010, 100, correlation=1), kernel(7_220, 100, correlation=2_211)]
    report = analyze(write(tmp_path / "run.pt.trace.json", *events))
    assert report.gaps.by_cause["alloc"] == 2_000_000


@pytest.mark.parametrize("library", ["cuda", "hip"])
def test_what_only_cuda_has_is_not_advised_of_a_run_on_rocm(tmp_path: Path, library: str) -> None:
    """A card of AMD is not recorded by gputrace, and loads modules as HIP is told to."""
    load = {"cuda": "cuModuleLoadData", "hip": "hipModuleLoadData"}[library]
    calls = [
        (f"{library}LaunchKernel", 0, 5),
        (load, 200, 5_000),
        (f"{library}LaunchKernel", 9_000, 5),
    ]
    events = [
        event("cuda_runtime", name, 5_000 + start, length, args={"correlation": start + 1})
        for name, start, length in calls
    ]
    events += [kernel(5_010, 100, correlation=1), kernel(14_010, 100, correlation=9_001)]
    path = write(tmp_path / "run.pt.trace.json", *events)
    report = analyze(path)
    advice = lookups.finding_of(report, "warmup").advice
    assert f"no {library.upper()} call" in report.gaps.largest[0].evidence
    assert ("gputrace record" in report.gaps.hint) == (library == "cuda")
    assert ("CUDA_MODULE_LOADING" in advice) == (library == "cuda")
    shown = command.gputrace("kernel", path, "1")
    assert shown.code == 0
    assert ("ncu --target-processes" in shown.out) == (library == "cuda")
    assert ("Nsight Compute cannot profile" in shown.out) == (library == "hip")


def test_a_run_on_rocm_gives_the_figures_of_one_on_cuda(
    recording: Recording, tmp_path: Path
) -> None:
    """HIP's names, and RCCL's kernels, which are called as NCCL's are."""
    reports = []
    for library in ("cuda", "hip"):
        (tmp_path / library).mkdir()
        for path in write_kineto(recording, tmp_path / library):
            text = path.read_text()
            assert '"cudaLaunchKernel' in text
            path.write_text(re.sub(r'"cuda(?=[A-Z])', f'"{library}', text))
        reports.append(analyze(tmp_path / library))
    cuda, hip = reports
    assert hip.breakdown == cuda.breakdown
    assert hip.gaps.by_cause == cuda.gaps.by_cause
    assert [found.id for found in hip.findings] == [found.id for found in cuda.findings]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Host -> Device)", Kind.COPY_H2D),
        ("CopyHostToDevice", Kind.COPY_H2D),
        ("CopyDeviceToHost", Kind.COPY_D2H),
        ("CopyDeviceToDevice", Kind.COPY_D2D),
        ("Memcpy PtoP (Device -> Device)", Kind.COPY_PEER),
    ],
)
def test_copies_of_rocm_have_their_direction(name: str, kind: Kind, tmp_path: Path) -> None:
    copy = event("gpu_memcpy", name, 10, 5, args={"device": 0, "stream": 0, "bytes": 64})
    with open_trace(write(tmp_path / "run.json", kernel(1, 1), copy)) as trace:
        assert trace.kinds == {Kind.KERNEL, kind}


def test_nothing_of_a_file_is_kept_but_its_columns(tmp_path: Path) -> None:
    events = [event("cpu_op", f"aten::op{n}", n, 1) for n in range(100)]
    with open_trace(write(tmp_path / "run.pt.trace.json", kernel(1, 1), *events)) as trace:
        assert trace.kinds == {Kind.KERNEL}


def rank_without_a_clock(folder: Path, rank: int, begin_us: float, late_us: float) -> Path:
    """Thirty steps of 10 ms; its clock begins anywhere. All-reduces end together on both ranks."""
    events = []
    for step in range(30):
        at = begin_us + 10_000 * step
        ready = at + 1_000 + late_us
        events.append(event("user_annotation", f"ProfilerStep#{step}", at, 10_000))
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
        work = (at + late_us, 1_000, "gemm"), (ready, at + 6_000 - ready, name)
        for number, (start, length, what) in enumerate(work, 2 * step + 1):
            call = {"args": {"correlation": number}}
            events.append(event("cuda_runtime", "cudaLaunchKernel", start - 50, 10, **call))
            events.append(kernel(start, length, what, correlation=number))
    about = {"rank": rank, "world_size": 2, "backend": "nccl"}
    return write(folder / f"rank{rank}.json", *events, distributedInfo=about)


def test_ranks_that_do_not_say_when_they_were_recorded_are_aligned_by_collectives(
    tmp_path: Path,
) -> None:
    first = rank_without_a_clock(tmp_path, 0, 1_000, 0)
    report = analyze(first, rank_without_a_clock(tmp_path, 1, 777_777, 2_000))
    starts = [step.start_ns for step in report.step_list if step.step == 3]
    assert abs(starts[0] - starts[1]) < 1_000
    assert "aligned by 30 ends of collectives" in " ".join(report.render().split())
    waited = {row.rank: (row.communication_wait_ns or 0) / row.steps for row in report.breakdown}
    assert waited == {0: pytest.approx(2e6, rel=0.01), 1: 0}


def test_ranks_without_a_clock_or_collectives_are_not_compared(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{rank}.json", kernel(7, 5), distributedInfo={"rank": rank})
        for rank in (0, 1)
    ]
    with pytest.raises(InputError, match="shares too few collectives"):
        analyze(*files)
