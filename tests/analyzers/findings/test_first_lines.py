"""First lines of recordings as people make them: short, begun too early, cut, without steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gputrace
from gputrace.analyzers.findings import idle
from tests.helpers import kineto
from tests.helpers.exports import MEMCPY, RUNTIME, UNIFIED_D2H, UNIFIED_H2D, global_id
from tests.helpers.handmade import BATCH_BYTES, MS, US, Run, analyze, ids
from tests.helpers.lookups import finding_of
from tests.helpers.sentences import words_of


def first(run: Run, folder: Path) -> tuple[str, str]:
    """The id and the message of the first finding."""
    finding = analyze(run, folder).findings[0]
    return finding.id, words_of(finding)


def test_five_steps_of_which_the_first_loads_code_are_judged_by_the_others(tmp_path: Path) -> None:
    run = Run()
    run.wait(US)
    for step in range(5):
        start = run.now
        run.input_copy(length=20 * US)
        if step == 0:
            run.allocate(8 * MS, "cuLibraryLoadData")
        run.model(60)
        run.synchronize()
        run.range(start, run.now, f"step {step}")
    report = analyze(run, tmp_path)
    assert report.findings[0].id == "compute-bound"
    assert (report.steps.warmup_count, report.steps.steady_count) == (1, 4)


def test_five_steps_that_differ_have_no_warmup(tmp_path: Path) -> None:
    run = Run()
    for step, kernels in enumerate((120, 40, 60, 80, 40)):
        start = run.now
        run.model(kernels)
        run.synchronize()
        run.range(start, run.now, f"step {step}")
    assert analyze(run, tmp_path).steps.warmup_count == 0


def test_a_recording_of_a_start_says_so(tmp_path: Path) -> None:
    """Not that allocations or launches are the limit: none of them comes again."""
    run = Run()
    for kernel in range(40):
        if kernel % 4 == 0:
            run.allocate(3 * MS, "cuLibraryLoadData")
            run.allocate(2 * MS)
        run.kernel(50 * US, f"void at::native::op_{kernel}")
    report = analyze(run, tmp_path)
    assert ids(report)[0] == "warmup"
    assert "loading modules" in words_of(report.findings[0])
    assert not {"alloc-stall", "launch-bound"} & set(ids(report))


def test_capturing_a_graph_is_a_start_and_no_loss_of_records(tmp_path: Path) -> None:
    run = Run()
    run.kernels(4, "before")
    run.allocate(2 * US, "cudaStreamBeginCapture_v10000")
    for _ in range(400):
        run.allocate(5 * US, "cudaLaunchKernel")
    run.allocate(2 * US, "cudaStreamEndCapture_v10000")
    for _ in range(10):
        run.kernels(20, "after", 10 * US)
    report = analyze(run, tmp_path)
    assert not report.missing
    assert "capturing CUDA graphs" in words_of(report.findings[0])


def test_what_another_thread_launches_into_a_capture_is_no_loss_either(tmp_path: Path) -> None:
    """As the thread of the backward pass does; what it launches later without a kernel is one."""
    for late in (False, True):
        run = Run()
        run.kernels(4, "before")
        run.allocate(2 * US, "cudaStreamBeginCapture_v10000")
        backward = Run(run.export, thread=101)
        backward.now = run.now + late * 10 * MS
        for _ in range(400):
            backward.allocate(5 * US, "cudaLaunchKernel")
        run.wait(5 * MS)
        run.allocate(2 * US, "cudaStreamEndCapture_v10000")
        for _ in range(40):
            run.kernels(20, "after", 10 * US)
        assert bool(analyze(run, tmp_path).missing) is late


def test_a_host_that_waits_each_step_launches_late_for_that(tmp_path: Path) -> None:
    """It would be ahead: it takes 1.4 ms of a step of 3.3, and the GPU 2.4."""
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.wait(900 * US)
        run.model()
        run.optimizer()
        run.synchronize()
    name, message = first(run, tmp_path)
    assert name == "sync-bound"
    assert "before launches that the call delayed" in message
    assert "launch-bound" not in ids(analyze(run, tmp_path))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_first_wait_may_be_for_what_was_issued_before_the_recording(
    tmp_path: Path, is_recorded: bool
) -> None:
    """A server's batch runs for 60 ms when its profiler starts; then comes one of 60 ms."""
    run = Run()
    run.kernels(60 if is_recorded else 1, "before", 50 * US)
    run.synchronize()
    run.gpu_free[0] = run.now + 60 * MS
    run.copy(2 * US, to_host=True)
    run.synchronize()
    run.kernels(120, "batch", 500 * US)
    found = finding_of(analyze(run, tmp_path), "sync-bound")
    assert ("issued before" in words_of(found)) is not is_recorded
    assert found.advice.startswith("record more") is not is_recorded


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_slow_host_that_waits_once_a_step_is_launch_bound(tmp_path: Path, is_ours: bool) -> None:
    """A recording too short for stretches without the recorder says that its cost is unknown."""
    run = Run()
    if is_ours:
        run.export.give("GPUTRACE_META", "name", "value").rows["GPUTRACE_META"] = []
    for _ in range(20):
        run.input_copy(length=20 * US)
        run.kernels(100, "small", 3 * US)
        run.optimizer()
        run.item()
    found = analyze(run, tmp_path).findings[0]
    assert found.id == "launch-bound"
    assert ("recorder's own part of it is unknown" in " ".join(found.details)) == is_ours


def test_a_slow_host_is_told_how_often_it_waits(tmp_path: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy(length=20 * US)
        for _ in range(60):
            run.kernels(4, "small", US)
            run.synchronize()
        run.optimizer()
    found = finding_of(analyze(run, tmp_path), "launch-bound")
    assert "synchronises 60 times in each step" in " ".join(found.details)
    assert "run ahead" in found.advice


def test_where_there_are_no_steps_it_is_not_told_how_often_the_host_waits(tmp_path: Path) -> None:
    """Most of the time it waited for copies of the weights, before the loop."""
    run, kernels = Run(), np.random.default_rng(1)
    run.export.give("GPUTRACE_META", "name", "value").rows["GPUTRACE_META"] = []
    for _ in range(80):
        run.input_copy(4_000 + int(kernels.integers(1_000_000)), 2 * US)
        run.synchronize()
    for _ in range(2_000):
        run.kernel(US, f"small_{kernels.integers(400)}")
    report = analyze(run, tmp_path)
    assert report.steps.kind == "none"
    found = finding_of(report, "launch-bound")
    assert "synchronises" not in " ".join(found.details)
    assert "run ahead" not in found.advice
    # No steps without the recorder can tell what it costs.
    assert "compare the program's own pace with and without it" in " ".join(found.details)


def test_launches_before_a_wait_are_not_its_doing(tmp_path: Path) -> None:
    """One synchronisation at the end of a recording that begins with a slow host."""
    run = Run()
    for _ in range(100):
        run.wait(20 * US)
        run.kernel(10 * US, "void at::native::op")
    run.kernels(30, "rest", 100 * US)
    run.synchronize()
    assert "sync-bound" not in ids(analyze(run, tmp_path))


@pytest.mark.parametrize("loads", [False, True])
def test_a_run_that_has_settled_is_healthy_where_it_started_before(
    tmp_path: Path, loads: bool
) -> None:
    run = Run()
    run.kernel(10 * US, "void at::native::before")
    for index in range(2):
        if loads:
            run.allocate(2 * MS, "cuModuleLoadData")
        else:
            run.wait(2 * MS)
        run.kernel(10 * US, f"void at::native::first_{index}")
    run.kernels(200, "rest", 40 * US)
    found = analyze(run, tmp_path).findings
    said = [words_of(each) for each in found if each.id == "compute-bound"]
    assert ["in the later half" in message for message in said] == [True] * loads


@pytest.mark.parametrize(("to_host", "said"), [(True, "to the host"), (False, "within GPU memory")])
def test_copies_that_nothing_hides_are_a_finding(tmp_path: Path, to_host: bool, said: str) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model()
        run.optimizer()
        run.copy(MS, to_host=to_host)
    report = analyze(run, tmp_path)
    found = finding_of(report, "copies-exposed")
    assert said in words_of(found)
    assert found.impact_ns == pytest.approx(MS, rel=0.06)


def test_a_recording_that_hardly_has_a_kernel_says_so(tmp_path: Path) -> None:
    run = Run()
    run.kernels(2, "fill", 5 * US)
    run.allocate(30 * MS, "cudaGraphInstantiate")
    name, message = first(run, tmp_path)
    assert name == "low-utilization"
    assert "2 kernels within" in message
    found = analyze(run, tmp_path).findings[0]
    assert "cudaGraphInstantiate takes 30.0 ms" in words_of(found)
    assert "graph" not in found.advice


def test_a_recording_without_a_kernel_says_so(tmp_path: Path) -> None:
    run = Run()
    for _ in range(12):
        run.input_copy()
        run.wait(MS)
    assert first(run, tmp_path)[1].endswith("only 12 copies")


def test_pauses_of_the_host_are_no_launch_overhead(tmp_path: Path) -> None:
    run = Run()
    for index in range(30):
        run.wait(3 * MS)
        run.kernels(40, f"part_{index % 7}")
    name, message = first(run, tmp_path)
    assert name == "host-work"
    assert "while the host does other work" in message


@pytest.mark.parametrize("named", ["load layer {}", "all of it"])
def test_the_host_s_work_is_in_the_narrowest_range_that_holds_most_of_it(
    tmp_path: Path, named: str
) -> None:
    """Not in one that holds all else, too."""
    run = Run()
    for index in range(30):
        began = run.now
        run.wait(3 * MS)
        if "{}" in named:
            run.range(began, run.now, named.format(index))
        run.kernels(40, f"part_{index % 7}")
    run.range(0, run.now, "all of it")
    found = analyze(run, tmp_path).findings[0]
    assert found.id == "host-work"
    assert ("of it is in the range load layer #" in words_of(found)) == ("{}" in named)
    assert "all of it" not in words_of(found)


def test_the_host_s_work_at_several_lines_is_told_by_the_first(tmp_path: Path) -> None:
    """It has 40 % of it: not enough for the message."""
    run = Run()
    for index in range(30):
        run.wait_at(*["app.py:3 scale"] * 2, *(f"app.py:{n} f{n}" for n in (10, 20, 30)))
        run.kernels(40, f"part_{index % 7}", 5 * US)
    found = finding_of(analyze(run, tmp_path), "host-work")
    assert found.message.endswith("while the host does other work")
    assert "at app.py:3 scale in 40% of 145 samples" in words_of(found)


@pytest.mark.parametrize(("kernel", "cause"), [("triton_poi_fused_add_0", True), ("add", False)])
def test_a_long_gap_before_the_first_run_of_a_generated_kernel_is_its_compilation(
    tmp_path: Path, kernel: str, cause: bool
) -> None:
    run = Run()
    run.kernel(10 * US, "void at::native::fill")
    run.wait(300 * MS)
    run.synchronize()
    run.wait(50 * MS)
    run.kernel(10 * US, kernel)
    run.kernels(20, "rest")
    found = analyze(run, tmp_path).findings[0]
    assert (found.id == "warmup") == cause
    assert ("compilation" in words_of(found)) == cause


def test_work_without_calls_is_said_to_lack_them(tmp_path: Path) -> None:
    run = Run()
    for _ in range(30):
        run.wait(2 * MS)
        run.kernel(100 * US, "void at::native::op")
    kept = [row for row in run.export.rows[RUNTIME] if not 1 < int(row["correlationId"] or 0) < 25]
    run.export.rows[RUNTIME] = kept
    report = analyze(run, tmp_path)
    found = finding_of(report, "idle-unexplained")
    assert "the calls that issued the next operations were not recorded" in words_of(found)


@pytest.mark.parametrize(
    ("call", "id", "cause"),
    [
        ("MPI_Sendrecv", "sync-bound", "sync"),
        ("MPI_Isend", "host-work", "launch"),
        ("MPI_Reduce_local", "host-work", "launch"),
    ],
)
def test_a_host_that_waits_in_mpi_is_said_to(
    tmp_path: Path, call: str, id: str, cause: str
) -> None:
    """Not one that is in a call which returns at once."""
    run = Run()
    table = "MPI_P2P_EVENTS"
    run.export.give(table, "start", "end", "globalTid", "textId")
    name = run.export.string(call)
    for _ in range(30):
        run.kernel(500 * US, "jacobi_kernel")
        run.synchronize()
        start = run.now
        run.wait(2 * MS)
        values = {"globalTid": global_id(100, thread=100), "textId": name}
        run.export.add(table, start=start, end=run.now, **values)
    report = analyze(run, tmp_path)
    found, gap = report.findings[0], report.gaps.largest[0]
    assert found.id == id
    assert ("of it is in MPI, for other ranks" in words_of(found)) == (cause == "sync")
    assert gap.cause == cause
    assert f"in the range {call}" in gap.evidence


def test_mapping_another_rank_s_memory_is_no_wait_for_it(tmp_path: Path) -> None:
    """MPI opens a handle of each buffer when it first sends from it, 1 ms of 3 ms here."""
    run = Run()
    run.export.give("MPI_P2P_EVENTS", "start", "end", "globalTid", "textId")
    sends = {"globalTid": global_id(100, thread=100), "textId": run.export.string("MPI_Sendrecv")}
    for _ in range(30):
        run.kernel(500 * US, "jacobi_kernel")
        run.synchronize()
        start = run.now
        run.allocate(MS, "cuIpcOpenMemHandle")
        run.wait(2 * MS)
        run.export.add("MPI_P2P_EVENTS", start=start, end=run.now, **sends)
    by_cause = analyze(run, tmp_path).gaps.by_cause
    assert by_cause["alloc"] == 29 * MS
    assert 58 * MS <= by_cause["sync"] < 59 * MS


@pytest.mark.parametrize("kind", [UNIFIED_H2D, UNIFIED_D2H])
def test_pages_of_managed_memory_are_named_where_they_end_gaps(tmp_path: Path, kind: int) -> None:
    """The driver moves them: no call of the program did."""
    run = Run()
    run.kernel(100 * US, "add")
    for _ in range(30):
        run.wait(2 * MS)
        run.copy(8 * US, to_host=True)
    for row in run.export.rows[MEMCPY]:
        row |= {"copyKind": kind, "correlationId": 0, "srcKind": 7, "dstKind": 7}
    run.export.rows[RUNTIME] = run.export.rows[RUNTIME][:1]
    found = analyze(run, tmp_path).findings[0]
    assert found.id == "idle-unexplained"
    assert "before page migrations of managed memory" in words_of(found)
    assert "cudaMemPrefetchAsync" in found.advice


@pytest.mark.parametrize("steps", [1, 2])
def test_layers_of_a_profiled_step_are_no_iterations(tmp_path: Path, steps: int) -> None:
    events = []
    for step in range(steps):
        begin = step * 30_000
        events.append(kineto.event("user_annotation", f"ProfilerStep#{step}", begin, 29_000))
        for index in range(240):
            at, id = begin + 100 + 100 * index, 1_000 * step + index + 1
            name = f"layer_part_{index % 20}"
            events += [
                kineto.event("cuda_runtime", "cudaLaunchKernel", at, 5, args={"correlation": id}),
                kineto.kernel(at + 10, 60, name, correlation=id),
            ]
    path = kineto.write(tmp_path / "layers.pt.trace.json", *events)
    with gputrace.open(path) as trace:
        found = trace.analyze().steps
    expected = ("training", 2) if steps == 2 else ("none", 0)
    assert (found.kind, found.count) == expected


@pytest.mark.parametrize("loads", [True, False])
def test_only_a_program_with_a_loader_is_told_to_give_it_workers(
    tmp_path: Path, loads: bool
) -> None:
    """PyTorch's profiler records each batch of one, beside the operators."""
    events = []
    for step in range(6):
        begin, id = step * 10_000, 10 * step
        place = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__" if loads else "randn"
        events += [
            kineto.event("user_annotation", f"ProfilerStep#{step}", begin, 9_900),
            kineto.event("cpu_op", "aten::normal_", begin + 10, 4_900),
            kineto.event("user_annotation", place, begin, 5_000),
            kineto.event("cuda_runtime", "cudaMemcpyAsync", begin + 5_000, 200,
                         args={"correlation": id + 1}),
            kineto.event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", begin + 5_010, 150,
                         args={"device": 0, "stream": 7, "correlation": id + 1, "bytes": 1 << 20}),
            kineto.event("cuda_runtime", "cudaLaunchKernel", begin + 5_300, 10,
                         args={"correlation": id + 2}),
            kineto.kernel(begin + 5_320, 4_000, "gemm", correlation=id + 2),
        ]  # fmt: skip
    with gputrace.open(kineto.write(tmp_path / "t.pt.trace.json", *events)) as trace:
        first = trace.analyze().findings[0]
    assert first.id == "data-feeding"
    assert ("num_workers" in first.advice) == loads
    assert ("make the batch on the GPU" in first.advice) == (not loads)


@pytest.mark.parametrize("calls", [1, 12])
def test_layers_of_one_call_of_a_network_are_no_iterations(tmp_path: Path, calls: int) -> None:
    """Twelve blocks of one forward pass, or as many forward passes of one block each."""
    events = []
    for part in range(12):
        begin = 10_000 * part
        if part < calls:
            length = 12 * 10_000 if calls == 1 else 9_900
            events.append(kineto.event("python_function", "nn.Module: Net_0", begin, length))
        block = f"nn.Module: Block_{part}"
        events.append(kineto.event("python_function", block, begin + 10, 9_800))
        for index in range(20):
            at, id = begin + 20 + 400 * index, 100 * part + index + 1
            events += [
                kineto.event("cuda_runtime", "cudaLaunchKernel", at, 5, args={"correlation": id}),
                kineto.kernel(at + 10, 300, f"part_{index}", correlation=id),
            ]
    path = kineto.write(tmp_path / "network.pt.trace.json", *events)
    with gputrace.open(path) as trace:
        found = trace.analyze().steps
    assert (found.kind, found.count) == (("none", 0) if calls == 1 else ("iterations", 12))


@pytest.mark.parametrize("before", [0, 3])
def test_iterations_are_counted_from_the_first_to_the_last(tmp_path: Path, before: int) -> None:
    """Seven are recorded, whether something else comes before, and where no kernel but a repeated
    one begins them.
    """
    run = Run()
    for index in range(before):
        run.kernel(50 * US, f"start_{index}")
    for _ in range(7):
        for name in ("convert", "join", "convert", "product", "sum", "product", "convert"):
            run.kernel(80 * US, name)
        run.wait(20 * US)
    found = analyze(run, tmp_path).steps
    assert (found.kind, found.count) == ("iterations", 7)


def test_the_last_iteration_counts_where_other_work_follows_the_loop(tmp_path: Path) -> None:
    """As text is encoded before the passes of a diffusion model, and an image decoded after."""
    run = Run()
    run.kernels(12, "text")
    for _ in range(4):
        run.wait(30 * US)
        for name in ("convert", "join", "convert", *(f"block_{part}" for part in range(60))):
            run.kernel(40 * US, name)
    run.kernels(20, "decode")
    report = analyze(run, tmp_path)
    assert (report.steps.kind, report.steps.count) == ("iterations", 4)
    passes = [step.end_ns - step.start_ns for step in report.step_list]
    assert max(passes) - min(passes) <= 40 * US


def test_iterations_whose_last_copy_is_late_begin_where_the_recording_does(tmp_path: Path) -> None:
    """Passes over batches, at whose end results are scaled by sizes that are copied in."""
    run = Run()
    for turn in range(5):
        run.wait(2 * MS if turn else US)
        run.input_copy(size=6 << 20)
        run.kernels(40, "forward")
        run.input_copy(size=80 << 10)
        run.kernels(2, "scale")
    found = analyze(run, tmp_path)
    assert (found.steps.kind, found.steps.count) == ("iterations", 5)


@pytest.mark.parametrize(
    ("name", "advised"),
    [
        ("Cijk_Alik_Bljk_BBS_BH_Bias_MT128x128", False),
        ("Cijk_Alik_Bljk_SB_MT128x64", True),
        ("fused_moe_kernel", False),
    ],
)
def test_mixed_precision_is_no_advice_to_who_has_it(
    tmp_path: Path, name: str, advised: bool
) -> None:
    """By the precision that a product's name says; nothing is advised where it says none."""
    run = Run()
    for _ in range(20):
        run.kernel(500 * US, name)
    (finding,) = analyze(run, tmp_path).findings
    assert ("mixed precision" in finding.advice) == advised
    assert "channels_last" not in finding.advice


def stencil(folder: Path, factors: tuple[float, ...], *, extra: int = 0, steps: int = 30) -> Path:
    """Ranks that exchange halos through MPI on their hosts: no collective tells who waits.

    Rank 1 runs ``extra`` kernels more.
    """
    runs = [Run()]
    runs += [Run(runs[0].export, pid=101 + n, device=n + 1) for n in range(len(factors) - 1)]
    for _ in range(steps):
        for rank, (run, factor) in enumerate(zip(runs, factors, strict=True)):
            for number in range(4):
                run.kernel(round(factor * (200 + 50 * number) * US), f"stencil_{number}")
            for _ in range(extra if rank == 1 else 0):
                run.kernel(300 * US, "boundary")
            run.copy(20 * US, to_host=True)
            run.synchronize()
        meet = max(run.now for run in runs) + 30 * US
        for run in runs:
            run.now = meet
            run.input_copy(4096, 20 * US)
    return runs[0].export.write(folder / "run.sqlite")


def told(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The id and the ranks of the findings but compute-bound, in order."""
    with gputrace.open(path) as trace:
        return [(f.id, f.ranks) for f in trace.analyze().findings if f.id != "compute-bound"]


def test_ranks_that_meet_on_their_hosts_wait_for_the_slow_one(tmp_path: Path) -> None:
    assert told(stencil(tmp_path, (1, 1.9, 1)))[0] == ("straggler", (1,))


def test_ranks_that_meet_on_their_hosts_wait_for_the_one_with_more_work(tmp_path: Path) -> None:
    assert told(stencil(tmp_path, (1, 1, 1), extra=3))[0] == ("gpu0-skew", (1,))


def test_ranks_that_meet_on_their_hosts_with_equal_work_are_not_accused(tmp_path: Path) -> None:
    assert told(stencil(tmp_path, (1, 1, 1))) == []


def test_a_gpu_that_is_slow_in_bursts_is_a_finding_without_steps(tmp_path: Path) -> None:
    runs = [Run()]
    runs += [Run(runs[0].export, pid=101, device=1)]
    for run in runs:
        for turn in range(30):
            slow = run.device == 1 and turn % 10 >= 6
            for number in range(5):
                run.kernel((190 if slow else 100 + turn % 3) * US, f"dslash_{number}")
    path = runs[0].export.write(tmp_path / "run.sqlite")
    with gputrace.open(path) as trace:
        finding = trace.analyze().findings[0]
    assert (finding.id, finding.ranks) == ("straggler", (1,))
    assert finding.evidence["pattern"] == "burst"
    assert "1.31 times as long as others', which costs " in finding.message
    assert "slow in bursts" in finding.details[0]


def test_slow_kernels_cost_what_they_take_longer_in_all(tmp_path: Path) -> None:
    """Not what the median launch would: three of five take twice as long, the others 1.2 times."""
    runs = [Run()]
    runs += [Run(runs[0].export, pid=101, device=1)]
    for run in runs:
        for _ in range(30):
            for number in range(5):
                slower = (200 if number < 3 else 120) if run.device == 1 else 100
                run.kernel(slower * US, f"dslash_{number}")
            run.gpu_free[run.device] += 340 * US if run.device == 0 else 0
    path = runs[0].export.write(tmp_path / "run.sqlite")
    with gputrace.open(path) as trace:
        finding = trace.analyze().findings[0]
    assert (finding.id, finding.ranks) == ("straggler", (1,))
    assert finding.impact_ns == pytest.approx(30 * (3 * 100 + 2 * 20) * US, rel=0.001)
    assert "1.68 times as long as others', which costs 41% of the time (10.2 of " in finding.message


def test_of_one_gpu_is_not_spoken_as_of_several(tmp_path: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.wait(5 * MS)
        run.model()
        run.optimizer()
    assert first(run, tmp_path)[1].startswith("the GPU waits ")


def test_computation_comes_before_little_idle_time(tmp_path: Path) -> None:
    """The host waits for each kernel: 9 % of the time."""
    run = Run()
    for _ in range(200):
        run.kernel(100 * US, "Fan2")
        run.synchronize()
    report = analyze(run, tmp_path)
    assert ids(report)[:2] == ["compute-bound", "sync-bound"]
    assert [finding.severity for finding in report.findings[:2]] == ["info", "medium"]


@pytest.mark.parametrize(
    ("call", "advised"),
    [("cuMemHostRegister_v2", "pin host memory once"), ("cudaMalloc_v3020", "a pool")],
)
def test_the_calls_that_allocate_are_named(tmp_path: Path, call: str, advised: str) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
        run.allocate(5 * MS, call)
    finding = analyze(run, tmp_path).findings[0]
    assert finding.id == "alloc-stall"
    assert f"waits in {call.partition('_')[0]} " in finding.message
    assert advised in finding.advice


@pytest.mark.parametrize(
    ("mark", "reason"),
    [(True, "1 range named as a step is too few, or holds"), (False, "no marker names steps")],
)
def test_why_there_are_no_steps(tmp_path: Path, mark: bool, reason: str) -> None:
    events = [kineto.event("user_annotation", "ProfilerStep#3", 0, 50_000)] if mark else []
    for id in range(1, 201):
        call = kineto.event(
            "cuda_runtime", "cudaLaunchKernel", 200 * id, 5, args={"correlation": id}
        )
        events += [call, kineto.kernel(200 * id + 10, 60, f"k{id}", correlation=id)]
    with gputrace.open(kineto.write(tmp_path / "t.pt.trace.json", *events)) as trace:
        assert trace.analyze().steps.reason.startswith(reason)


@pytest.mark.parametrize(("name", "advised"), [("triton_poi_fused_add", False), ("gemm", True)])
def test_compilation_is_no_advice_to_who_compiles(tmp_path: Path, name: str, advised: bool) -> None:
    run = Run()
    for _ in range(20):
        run.kernel(500 * US, name)
    (finding,) = analyze(run, tmp_path).findings
    assert ("compiled or fused operations" in finding.advice) == advised


@pytest.mark.parametrize(("kernel", "is_measured"), [(50 * US, True), (20 * MS, False)])
def test_iterations_after_a_start_with_little_to_compute_are_measured(
    tmp_path: Path, kernel: int, is_measured: bool
) -> None:
    """A start that computes is a part of the run, of which iterations are not the most."""
    run = Run()
    for index in range(20):
        run.wait(100 * MS)
        run.kernel(kernel, f"start_{index}")
    for _ in range(24):
        run.wait(5 * MS)
        run.input_copy()
        for index in range(60):
            run.kernel(50 * US, f"k{index}")
        run.synchronize()
    report = analyze(run, tmp_path)
    assert report.steps.kind == "iterations"
    assert (report.breakdown[0].steps > 0) == is_measured
    assert report.findings[0].id == ("data-feeding" if is_measured else "host-work")


def test_work_that_does_not_start_while_the_host_waits_for_it_is_no_late_launch(
    tmp_path: Path,
) -> None:
    """It was launched in time: both wait for something that is not recorded."""
    run = Run()
    run.kernels(20, "decode")
    run.synchronize()
    run.wait(100 * US)
    run.gpu_free[0] = run.now + 400 * MS
    run.kernel(50 * US, "void at::native::sample")
    run.synchronize()
    name, message = first(run, tmp_path)
    assert name == "sync-bound"
    assert "(400 of " in message


def test_data_of_a_program_without_steps_are_no_batches(tmp_path: Path) -> None:
    """It fills arrays on the host and copies them: nothing is decoded, and no loader is there."""
    run = Run()
    run.kernel(US, "start")
    for _ in range(5):
        run.wait(20 * MS)
        run.input_copy(size=1 << 26, length=4 * MS, pageable=True)
        run.input_copy(size=1 << 26, length=4 * MS, pageable=True)
        run.kernel(3 * MS, "saxpy")
        run.copy(2 * MS, to_host=True)
        run.synchronize()
    report = analyze(run, tmp_path)
    assert report.steps.kind != "training"
    found = finding_of(report, "data-feeding")
    assert "data from the host" in words_of(found)
    assert "batch" not in found.advice


@pytest.mark.parametrize(("setup_ms", "said"), [(200, False), (2000, True)])
def test_a_pass_that_is_next_to_nothing_of_the_recording_is_told_as_that(
    tmp_path: Path, setup_ms: int, said: bool
) -> None:
    run = Run()
    run.allocate(setup_ms * MS, "cudaMalloc")
    names = ("ampere_sgemm_128x64_tn", "void at::native::add", "void at::native::norm")
    for index in range(30):
        run.kernel(100 * US, f"{names[index % 3]}_{index}")
    assert ("low-utilization" in ids(analyze(run, tmp_path))) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", True),
        ("load the model", False),
    ],
)
def test_a_pass_that_is_next_to_nothing_beside_the_wait_for_its_data_is_told_as_that(
    tmp_path: Path, name: str, said: bool
) -> None:
    """Its only calls are in the last 6 of 200 ms."""
    names = ("sgemm", "void at::native::add", "void at::native::norm")
    events = [kineto.event("user_annotation", name, 0, 190_000)]
    for index in range(30):
        start, issued = 194_000 + 200 * index, {"correlation": index + 1}
        events.append(kineto.event("cuda_runtime", "cudaLaunchKernel", start, 5, args=issued))
        events.append(kineto.kernel(start + 8, 190, f"{names[index % 3]}_{index}", **issued))
    with gputrace.open(kineto.write(tmp_path / "trace.json", *events)) as trace:
        found = trace.analyze().findings
    told = [each for each in found if each.id == "low-utilization"]
    assert bool(told) == said
    if said:
        assert "30 kernels within 5.99 ms of the 200 ms" in words_of(told[0])
        assert "waits for data for 190 ms" in words_of(told[0])


@pytest.mark.parametrize(("frees", "first_id"), [(False, "warmup"), (True, "alloc-stall")])
def test_memory_that_is_freed_again_and_again_is_not_allocated_once(
    tmp_path: Path, frees: bool, first_id: str
) -> None:
    run = Run()
    for kernel in range(60):
        run.allocate(2 * MS)
        run.kernel(50 * US, f"part_{kernel}")
        if frees:
            run.synchronize()
            run.allocate(MS, "cudaFree")
    found = analyze(run, tmp_path).findings[0]
    assert found.id == first_id
    assert ("allocate memory once" in found.advice) == frees


def test_a_cause_on_some_ranks_says_what_the_others_lose_to_it(tmp_path: Path) -> None:
    """Rank 1 pauses in its only pass, and rank 0 waits for it in the collective that follows."""
    run = Run(pid=100)
    other = Run(run.export, pid=101, device=1)
    for one in (run, other):
        for index in range(40):
            one.kernel(50 * US, f"void at::native::op_{index % 7}")
    other.wait(6 * MS)
    other.kernel(50 * US, "void at::native::late")
    end = other.now + 100 * US
    for one in (run, other):
        one.kernel(end - max(one.now, one.gpu_free[one.device]), "ncclDevKernel_AllReduce_Sum_f32")
    found = finding_of(analyze(run, tmp_path), "host-work")
    assert found.ranks == (1,)
    assert any("the GPU of rank 0 loses" in detail for detail in found.details)


@pytest.mark.parametrize("turns", [(1, 1, 1), (1, 0, 1)])
def test_a_rank_that_always_comes_last_is_named(tmp_path: Path, turns: tuple[int, ...]) -> None:
    """In too few collectives to call it late."""
    run = Run(pid=100)
    both = run, Run(run.export, pid=101, device=1)
    for index, last in enumerate(turns):
        for rank, one in enumerate(both):
            one.kernel(500 * US, "void at::native::op")
            if rank == last:
                one.kernel(3 * MS, f"void at::native::more_{index}")
        end = max(one.gpu_free[one.device] for one in both) + 100 * US
        for one in both:
            start = max(one.now, one.gpu_free[one.device])
            one.kernel(end - start, "ncclDevKernel_AllReduce_Sum_f32")
    advice = finding_of(analyze(run, tmp_path), "communication-exposed").advice
    assert ("rank 1 comes last" if all(turns) else "none is always last") in advice


@pytest.mark.parametrize(("turns", "part"), [(6, 1.0), (6, 0.5), (2, 1.0)])
def test_data_that_goes_back_and_forth_should_stay_on_the_gpu(
    tmp_path: Path, turns: int, part: float
) -> None:
    """Around each kernel, as with OpenMP's target regions without one for data."""
    run = Run()
    for _ in range(turns):
        run.input_copy(round(BATCH_BYTES / part), 8 * MS, pageable=True)
        run.kernel(MS, "solve")
        run.copy(7 * MS, to_host=True)
        run.synchronize()
    found = finding_of(analyze(run, tmp_path), "h2d-pageable")
    stays = (turns, part) == (6, 1.0)
    assert ("keep the data on the GPU between its kernels" in found.advice) == stays
    assert ("as many bytes come back to the host" in words_of(found)) == stays


@pytest.mark.parametrize(("copies", "found"), [(2, 12), (0, 0)])
def test_one_kernel_repeats_with_the_copies_around_it(
    tmp_path: Path, copies: int, found: int
) -> None:
    run = Run()
    for _ in range(12):
        for _ in range(copies):
            run.input_copy(length=MS)
        run.kernel(MS, "solve")
        if copies:
            run.copy(MS, to_host=True)
        run.synchronize()
    steps = analyze(run, tmp_path).steps
    assert steps.count == found


def test_a_library_that_starts_is_start_up(tmp_path: Path) -> None:
    """It looks up the driver's functions, and makes no long call."""
    run = Run()
    run.kernel(MS, "fill")
    run.synchronize()
    for _ in range(120):
        run.allocate(US, "cuGetProcAddress_v2")
    run.wait(10 * MS)
    run.kernel(MS, "product")
    name, message = first(run, tmp_path)
    assert name == "warmup"
    assert "start-up work, done once" in message


def test_a_short_recording_of_a_host_that_took_long_is_judged(tmp_path: Path) -> None:
    run = Run()
    run.allocate(200 * MS, "cudaHostAlloc")
    run.kernels(3, "add")
    assert "Almost nothing runs on the GPUs" in repr(analyze(run, tmp_path))


def test_no_warmup_is_called_excluded_where_the_whole_span_is_measured(tmp_path: Path) -> None:
    """Iterations of a solver: the first of them load code, and none is left out."""
    run = Run()
    for index in range(60):
        if index < 3:
            run.allocate(4 * MS, "cuModuleLoadData")
        run.kernel(10 * US, "eliminate_row")
        run.synchronize()
        run.kernel(690 * US, "eliminate_rest")
        run.synchronize()
    report = analyze(run, tmp_path)
    assert report.steps.kind == "iterations"
    assert report.breakdown[0].steps == 0
    assert not any("excluded" in finding.message for finding in report.findings)


@pytest.mark.parametrize("last", ["norm", "norm_backward"])
def test_inference_gets_no_advice_on_training(tmp_path: Path, last: str) -> None:
    """A pass whose host is late with small kernels, and that ends with an exchange."""
    run, names = Run(), ("ampere_sgemm_128x64_tn", "void at::native::add", "void at::native::mul")
    for index in range(60):
        run.wait(20 * US)
        run.kernel(10 * US, f"{names[index % 3]}_{index}")
    run.kernel(10 * US, f"void at::native::{last}")
    run.kernel(400 * US, "ncclDevKernel_AllReduce_Sum_f16")
    report = analyze(run, tmp_path)
    assert report.steps.kind == "pass"
    advice = finding_of(report, "launch-bound").advice
    advice += finding_of(report, "communication-exposed").advice
    trains = last.endswith("backward")
    assert [word in advice for word in ("optimizers", "gradient")] == [trains] * 2


@pytest.mark.parametrize(
    ("longest", "ns", "phase"),
    [("other", 900, "other"), ("optimizer", 900, "optimizer"), ("other", 300, "")],
)
def test_the_phase_that_has_most_waits_for_launches_is_known_with_its_line(
    longest: str, ns: int, phase: str
) -> None:
    waits = {"forward": 200, "backward": 300, longest: ns}
    phases = [SimpleNamespace(name=name, launch_ns=ns) for name, ns in waits.items()]
    row = SimpleNamespace(rank=0, line="ema.py:9 update")
    facts: Any = SimpleNamespace(
        at_line=lambda _: row, step_phases=[SimpleNamespace(rank=0, phases=phases)]
    )
    assert idle._launching_phase(facts) == (phase, "ema.py:9 update" if phase else "")


@pytest.mark.parametrize(("batches", "told"), [(16.0, True), (1.0, False)])
def test_small_batches_whose_gradients_are_accumulated_may_be_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: float, told: bool
) -> None:
    loader = SimpleNamespace(batches_per_step=batches)
    monkeypatch.setattr(idle, "find_loaders", lambda _: (loader,))
    run = Run()
    for _ in range(20):
        for _ in range(40):
            run.wait(20 * US)
            run.kernel(10 * US, "void at::native::add")
        run.optimizer()
        run.synchronize()
    launches = finding_of(analyze(run, tmp_path), "launch-bound")
    assert ("each step takes 16 batches" in launches.details) == told
    assert launches.advice.startswith("fewer, larger batches a step") == told
