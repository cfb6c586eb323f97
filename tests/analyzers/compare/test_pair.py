"""``gputrace.compare``: two runs side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.analyzers.compare import compare
from gputrace.analyzers.compare.runs import Run as Read
from gputrace.analyzers.compare.runs import read_run
from gputrace.api import ComparisonReport
from gputrace.model.comparison import ClassChange, FindingChange, KernelChange
from gputrace.model.options import Options
from gputrace.model.time_class import CLASSES
from gputrace.readers.open import open_traces
from gputrace.report.comparison import _finding
from tests.helpers.examples import few
from tests.helpers.exports import PEER
from tests.helpers.handmade import MS, STEP, US, Run, train
from tests.helpers.kineto import event, kernel, write
from tests.helpers.recordings import REFERENCE
from tests.synthetic import Plan, simulate, write_nsys

PLAN: Final = Plan(
    seed=5,
    model_seed=5,
    steps=24,
    warmup_steps=1,
    kernels_per_step=60,
    ranks=2,
    allreduces=2,
    data_wait_ns=800_000,
    sync_every_step=True,
)
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "compute": {"kernel_ns": 40_000},
    "communication": {"allreduce_ns": 900_000},
    "h2d": {"h2d_ns": 1_500_000},
    "data_feeding": {"data_wait_ns": 2_000_000},
    "alloc": {"allocs_per_step": 6},
}


def written(run: Run, path: Path) -> Path:
    path.unlink(missing_ok=True)
    return run.export.write(path)


def trained(path: Path, steps: int = 20, **values: int) -> Path:
    run = Run()
    train(run, steps, **values)
    return written(run, path)


def generated(path: Path, plan: Plan) -> Path:
    write_nsys(simulate(plan), path, nvtx=("nccl",))
    return path


def classes(report: ComparisonReport) -> dict[str, ClassChange]:
    assert report.pair is not None
    return {row.name: row for row in report.pair.classes}


def kernels(report: ComparisonReport) -> dict[str, KernelChange]:
    assert report.pair is not None
    return {row.name: row for row in report.pair.kernels}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("quick") / "quick.sqlite")


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of which each waits 1 ms for data."""
    return trained(tmp_path_factory.mktemp("waiting") / "waiting.sqlite", wait=MS)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("usual") / "usual.sqlite", PLAN)


def test_a_run_that_waits_is_slower_by_what_it_waits(quick: Path, waiting: Path) -> None:
    report = gputrace.compare(quick, waiting)
    assert (report.verdict, report.unit) == ("slower", "step")
    assert report.pair is not None
    assert report.pair.step is not None
    hidden = 50 * US  # of the wait, under the end of the step before
    assert report.pair.step.difference_ns == pytest.approx(MS - hidden, rel=0.01)
    assert classes(report)["data_feeding"].difference_ns == pytest.approx(MS - hidden, rel=0.01)
    assert [row.name for row in report.pair.classes if row.changed] == ["data_feeding", "host_data"]
    assert "more data feeding" in report.message


def test_the_other_way_round_it_is_faster(quick: Path, waiting: Path) -> None:
    report = gputrace.compare(waiting, quick)
    assert report.verdict == "faster"
    assert report.pair is not None
    assert report.pair.speed_up == pytest.approx((STEP + MS) / STEP, rel=0.02)
    assert report.message.startswith("B is 1.4")
    assert "less data feeding" in report.message


def test_a_run_beside_itself_shows_no_difference(quick: Path) -> None:
    report = gputrace.compare(quick, quick)
    assert report.verdict == "same"
    assert report.message.startswith("no difference between A and B")
    assert not any(row.changed for row in classes(report).values())
    assert not any(row.changed for row in kernels(report).values())


def test_classes_sum_to_the_step(quick: Path, waiting: Path) -> None:
    report = gputrace.compare(quick, waiting)
    rows, pair = classes(report), report.pair
    assert pair is not None
    assert pair.step is not None
    for name in ("a_ns", "b_ns", "difference_ns"):
        total = sum(getattr(rows[name_], name) for name_ in CLASSES if name_ in rows)
        assert total == pytest.approx(getattr(pair.step, name), abs=len(rows))


def test_a_kernel_that_takes_longer_is_named(tmp_path: Path, quick: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.kernels(20, "gemm_forward", 50 * US)
        run.kernels(20, "gemm_backward", 70 * US)
        run.optimizer()
        run.synchronize()
    report = gputrace.compare(quick, written(run, tmp_path / "longer.sqlite"))
    changed = {name for name, row in kernels(report).items() if row.changed}
    assert changed == {f"void at::native::gemm_backward_{index}" for index in range(5)}
    one = kernels(report)["void at::native::gemm_backward_0"]
    assert (one.status, one.a_count, one.b_count) == ("both", 4, 4)
    assert (one.a_median_ns, one.b_median_ns) == (50 * US, 70 * US)
    assert (one.a_ns, one.b_ns) == (200 * US, 280 * US)


def test_kernels_that_came_and_went_are_told(tmp_path: Path, quick: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model(name="fused")
        run.optimizer()
        run.synchronize()
    report = gputrace.compare(quick, written(run, tmp_path / "fused.sqlite"))
    gone, new = (kernels(report)[f"void at::native::{n}_forward_1"] for n in ("gemm", "fused"))
    assert (gone.status, gone.b_count, gone.b_median_ns, gone.changed) == ("gone", 0, None, True)
    assert (new.status, new.a_count, new.a_median_ns, new.changed) == ("new", 0, None, True)
    assert "Kernels: 20 of 21 changed: 10 gone, 10 new (" in report.render()


def test_runs_without_kernels_in_common_are_noted(tmp_path: Path, quick: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model(name="fused")
        run.synchronize()
    other = written(run, tmp_path / "other.sqlite")
    said = "hardly a kernel in common"
    assert said in gputrace.compare(quick, other).render()
    assert said not in gputrace.compare(quick, quick).render()


def test_findings_that_appeared_went_and_stayed(quick: Path, waiting: Path) -> None:
    report = gputrace.compare(quick, waiting)
    assert report.pair is not None
    status = {finding.id: finding.status for finding in report.pair.findings}
    assert status["data-feeding"] == "appeared"
    assert status["compute-bound"] == "gone"
    assert status["h2d-exposed"] == "stayed"


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (2, "still there: data-feeding costs 1.90 ms a step, 953 µs before."),
        (4, "grew: data-feeding costs 3.80 ms a step, 953 µs before."),
    ],
)
def test_a_finding_that_stayed_says_how_much_of_it_there_is(
    wait: int, said: str, tmp_path: Path, waiting: Path
) -> None:
    run = Run()
    train(run, wait=wait * MS)
    report = gputrace.compare(waiting, written(run, tmp_path / "longer.sqlite"))
    assert said in report.render()


@pytest.mark.parametrize("status", ["appeared", "gone"])
@pytest.mark.parametrize("cost", [1, 2, 6])
def test_a_finding_of_a_shorter_step_may_be_in_the_longer_one_too(
    cost: int, status: str, quick: Path, waiting: Path
) -> None:
    """Of 20 ms instead of 100 ms, in which 5 % are told."""
    report = gputrace.compare(quick, waiting)
    assert report.pair is not None
    assert report.pair.step is not None
    first, second = (100, 20) if status == "appeared" else (20, 100)
    step = replace(report.pair.step, a_ns=first * MS, b_ns=second * MS)
    a, b = (None, cost * MS) if status == "appeared" else (cost * MS, None)
    found = FindingChange("no-tensor-cores", status, None, None, a, b, "products take long")
    heading, said = _finding(found, replace(report.pair, step=step))
    assert heading == status
    other = "A" if status == "appeared" else "B"
    more = f". As much would go untold in the longer step of {other}" * (cost in (1, 2))
    assert said == f"no-tensor-cores: products take long{more}."


def test_a_small_difference_that_is_sure_is_not_called_the_same(tmp_path: Path) -> None:
    for name, length in (("a", 1000), ("b", 1002)):
        run = Run()
        for _ in range(20):
            run.kernel(length * US, "gemm")
            run.optimizer()
            run.synchronize()
            run.copy(9 * MS, to_host=True)
        written(run, tmp_path / f"{name}.sqlite")
    report = gputrace.compare(tmp_path / "a.sqlite", tmp_path / "b.sqlite")
    compute = classes(report)["compute"]
    assert compute.low_ns is not None
    assert (compute.changed, compute.low_ns > 0) == (False, True)
    assert report.message.startswith("hardly any difference between A and B")
    line = next(line for line in report.render().splitlines() if line.startswith("  compute"))
    assert line.endswith("slightly more")


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_change_is_the_class_that_changed_most(
    name: str, usual: Path, tmp_path: Path
) -> None:
    after = generated(tmp_path / "b.sqlite", replace(PLAN, seed=6, **CHANGES[name]))
    report = gputrace.compare(usual, after)
    rows = {n: row for n, row in classes(report).items() if n in CLASSES}
    assert max(rows, key=lambda n: abs(rows[n].difference_ns)) == name
    assert rows[name].changed
    assert report.verdict == ("faster" if rows[name].difference_ns < 0 else "slower")


@pytest.mark.parametrize("seed", range(few(3)))
def test_another_throw_of_the_dice_is_no_difference(seed: int, tmp_path: Path) -> None:
    before = generated(tmp_path / "a.sqlite", replace(PLAN, seed=seed))
    after = generated(tmp_path / "b.sqlite", replace(PLAN, seed=seed + 100))
    report = gputrace.compare(before, after)
    assert report.verdict == "same"
    assert not any(row.changed for row in kernels(report).values())


def test_few_noisy_steps_leave_the_answer_open(tmp_path: Path) -> None:
    noisy = replace(PLAN, steps=12, hiccup_rate=0.3)
    before = generated(tmp_path / "a.sqlite", noisy)
    after = generated(tmp_path / "b.sqlite", replace(noisy, seed=6))
    report = gputrace.compare(before, after)
    assert report.verdict == "unclear"
    assert "cannot tell whether" in report.message


def test_of_two_steps_no_kernel_is_said_to_be_the_same(tmp_path: Path) -> None:
    """A kernel of 3 ms that the other run lacks is no noise, but two steps show no bounds."""
    paths = []
    for names in ("a", "ab"):
        events = []
        for step in range(2):
            at = 10_000.0 * step
            events.append(event("user_annotation", f"ProfilerStep#{step}", at, 9_990))
            for number, name in enumerate(names):
                link, later = 9 * step + number + 1, at + 3_500 * number
                events.append(
                    event("cuda_runtime", "cudaLaunchKernel", later, 5, args={"correlation": link})
                )
                events.append(kernel(later + 100, 3_000, name, correlation=link))
        paths.append(write(tmp_path / f"{names}.pt.trace.json", *events))
    report = gputrace.compare(*paths)
    assert {row.changed for row in kernels(report).values()} == {None}
    assert "kernels: too few steps to tell which of 2 differ." in report.render("text")


def test_twice_the_batch_in_less_than_twice_the_time_is_faster(tmp_path: Path, quick: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy(2 * 38_000_000, 600 * US)
        run.kernels(20, "gemm_forward", 90 * US)
        run.kernels(20, "gemm_backward", 90 * US)
        run.optimizer()
        run.synchronize()
    report = gputrace.compare(quick, written(run, tmp_path / "twice.sqlite"))
    assert report.pair is not None
    assert (report.pair.work_ratio, report.pair.work_source) == (2, "input_bytes")
    assert report.verdict == "faster"
    assert "does 2x the work" in report.message


def test_input_of_another_size_alone_is_taken_for_the_same_work(
    tmp_path: Path, quick: Path
) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy(38_000_000 // 4, 75 * US)
        run.model()
        run.optimizer()
        run.synchronize()
    smaller = written(run, tmp_path / "bytes.sqlite")
    report = gputrace.compare(quick, smaller)
    assert report.pair is not None
    assert (report.pair.work_ratio, report.pair.work_source) == (1, "assumed")
    assert any("38.00 MB and 9.50 MB" in warning for warning in report.warnings)
    told = gputrace.compare(quick, smaller, batch=(64, 16))
    assert told.pair is not None
    assert (told.pair.work_ratio, told.pair.work_source) == (0.25, "batch")
    assert told.verdict == "slower"


def test_runs_whose_kernels_are_all_in_graphs_are_compared(tmp_path: Path) -> None:
    paths = []
    for name, length in (("short", MS), ("long", 2 * MS)):
        run = Run()
        for _ in range(20):
            run.input_copy()
            run.graph(length)
            run.synchronize()
        paths.append(written(run, tmp_path / f"{name}.sqlite"))
    report = gputrace.compare(*paths)
    assert report.verdict == "slower"
    assert classes(report)["compute"].difference_ns == pytest.approx(MS, rel=0.01)
    assert kernels(report) == {}


def test_a_real_optimisation_that_made_it_slower(recording: Callable[[str], Path]) -> None:
    """The GPUs wait longer for launches. Both are parts of one pass, of different lengths."""
    names = [f"nsys-ai-mfu_2gpu_{name}.sqlite" for name in ("before", "after")]
    report = gputrace.compare(*map(recording, names))
    assert (report.verdict, report.unit) == ("unknown", "span")
    assert report.pair is not None
    grew = max(report.pair.classes, key=lambda row: (row.b_share or 0) - (row.a_share or 0))
    assert grew.name == "launch"
    for pair in report.pair.gpus:
        for name, row in zip(names, (pair.a, pair.b), strict=True):
            truth = REFERENCE[name][str(pair.gpu)]
            assert row is not None
            assert row.compute_ns == truth["compute_ns"]
            assert row.communication_ns == truth["communication_ns"]
            assert row.idle_ns == truth["idle_ns"]


def test_runs_without_steps_in_common_are_compared_by_shares(
    recording: Callable[[str], Path],
) -> None:
    report = gputrace.compare(
        recording("pipit-cloverleaf.sqlite"), recording("pipit-saxpy-mpi.sqlite")
    )
    assert (report.verdict, report.unit) == ("unknown", "span")
    assert report.pair is not None
    assert (report.pair.step, report.pair.speed_up) == (None, None)
    assert sum(row.a_share for row in report.pair.classes) == pytest.approx(1)
    assert "no steps" in report.message
    assert "points" in report.render()


def test_kernels_have_their_shares_of_the_time_of_the_gpus_as_classes_do(tmp_path: Path) -> None:
    """Of 10 and 5 ms, not of the 10 ms from the first GPU's start to the last one's end; and of one
    GPU, not of two, where another is but the far end of a copy.
    """
    two = [Run(device=0)]
    two += [Run(two[0].export, device=1, thread=101)]
    for run, kernels in zip(two, (100, 50), strict=True):
        for _ in range(kernels):
            run.kernel(100 * US, "dslash")
    one = Run()
    for _ in range(100):
        one.kernel(100 * US, "stencil")
    free = one.gpu_free[0]
    one.export.copy(free, free + 10 * US, PEER, srcDeviceId=0, dstDeviceId=1)
    report = gputrace.compare(
        written(two[0], tmp_path / "two.sqlite"), written(one, tmp_path / "one.sqlite")
    )
    assert report.unit == "span"
    text = report.render()
    assert re.search(r"compute +100.0% +99.9%", text)
    assert re.search(r"dslash +100.0% +–", text)
    assert re.search(r"stencil +– +99.9%", text)


def test_runs_that_do_not_scale_stay_in_the_order_given(recording: Callable[[str], Path]) -> None:
    two, one = recording("nsys-ai-h100_2gpu_1s.sqlite"), recording("pipit-saxpy-mpi.sqlite")
    for paths in ([two, one], [one, two]):
        report = gputrace.compare(*paths)
        assert (report.unit, report.scaling) == ("span", None)
        assert [run.paths for run in report.runs] == [(str(path),) for path in paths]
        assert [run.gpus for run in report.runs] == [2 if path == two else 1 for path in paths]


def test_the_wait_for_other_ranks_is_a_row_of_its_own(usual: Path, tmp_path: Path) -> None:
    path = generated(tmp_path / "late.sqlite", replace(PLAN, slow_rank=1, slow_factor=1.3))
    with open_traces([str(usual)]) as even, open_traces([str(path)]) as late:
        runs = [read_run(trace, "", Options()) for trace in (even, late)]
    rows = {row.name: row for row in pairs(*runs)}
    assert rows["communication_wait"].changed
    assert rows["communication_wait"].b_ns <= rows["communication"].b_ns


def pairs(a: Read, b: Read) -> tuple[ClassChange, ...]:
    found = compare([a, b]).pair
    assert found is not None
    return found.classes
