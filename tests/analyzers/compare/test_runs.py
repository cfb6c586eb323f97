"""``gputrace.compare`` of runs on different numbers of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.api import ComparisonReport
from gputrace.errors import UsageError
from gputrace.model.comparison import Scaling
from gputrace.model.time_class import CLASSES
from tests.helpers.handmade import Run, train
from tests.synthetic import Plan, simulate, write_nsys

PLAN: Final = Plan(
    seed=2, model_seed=2, steps=14, warmup_steps=1, kernels_per_step=60, sync_every_step=True
)
GPUS: Final = (1, 2, 4, 8)
TRANSFER: Final = 200_000
"""Nanoseconds that an all-reduce takes for each GPU; two a step, of which one is exposed."""


def plan(gpus: int, **values: Any) -> Plan:
    usual: dict[str, Any] = {"allreduces": 2 if gpus > 1 else 0, "allreduce_ns": TRANSFER * gpus}
    return replace(PLAN, ranks=gpus, **({"seed": gpus} | usual | values))


def written(folder: Path, plans: dict[str, Plan]) -> list[Path]:
    for name, own in plans.items():
        write_nsys(simulate(own), folder / f"{name}.sqlite", nvtx=("nccl",))
    return [folder / f"{name}.sqlite" for name in plans]


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Each GPU does the same work, however many there are."""
    folder = tmp_path_factory.mktemp("weak")
    return written(folder, {f"on{gpus}": plan(gpus) for gpus in GPUS})


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All GPUs together do the same work."""
    folder = tmp_path_factory.mktemp("strong")
    plans = {
        f"on{gpus}": plan(
            gpus,
            kernel_ns=400_000 // gpus,
            input_bytes=PLAN.input_bytes // gpus,
            h2d_ns=PLAN.h2d_ns // gpus,
        )
        for gpus in GPUS
    }
    return written(folder, plans)


@pytest.fixture(scope="module")
def weakly(weak: list[Path]) -> ComparisonReport:
    """The comparison, the runs named in the order of fewer and fewer GPUs."""
    return gputrace.compare(*weak[::-1])


@pytest.fixture(scope="module")
def strongly(strong: list[Path]) -> ComparisonReport:
    return gputrace.compare(*strong)


def scaling(report: ComparisonReport) -> Scaling:
    assert report.verdict == "scaling"
    assert report.scaling is not None
    return report.scaling


def test_the_work_of_a_gpu_stays(weakly: ComparisonReport) -> None:
    found = scaling(weakly)
    assert (found.kind, found.source) == ("weak", "input_bytes")
    first, *others = found.rows
    assert [row.gpus for row in found.rows] == [1, 2, 4, 8]
    for row in others:
        assert row.speed_up == pytest.approx(row.gpus * first.mean_ns / row.mean_ns)
        assert row.efficiency == pytest.approx(first.mean_ns / row.mean_ns)
        assert row.losses[0].name == "communication"
        assert row.losses[0].changed


def test_two_runs_that_scale_are_a_and_b_as_named(weak: list[Path]) -> None:
    report = gputrace.compare(weak[1], weak[0])
    assert [(run.label, run.gpus) for run in report.runs] == [("A", 2), ("B", 1)]
    assert [(row.label, row.gpus) for row in scaling(report).rows] == [("B", 1), ("A", 2)]


def test_the_work_of_a_step_stays(strongly: ComparisonReport) -> None:
    found = scaling(strongly)
    assert (found.kind, found.source) == ("strong", "input_bytes")
    first, *others = found.rows
    for row in others:
        assert row.speed_up == pytest.approx(first.mean_ns / row.mean_ns)
        assert row.ideal_ns == pytest.approx(first.mean_ns / row.gpus, abs=1)
        assert row.losses[0].name == "communication"


def test_runs_come_in_order_of_gpus(weakly: ComparisonReport) -> None:
    assert [run.label for run in weakly.runs] == ["on1", "on2", "on4", "on8"]
    assert weakly.message.startswith("8 GPUs are ")


def test_the_losses_of_all_classes_are_what_a_step_takes_beyond_the_ideal(
    weakly: ComparisonReport, strongly: ComparisonReport
) -> None:
    for report in (weakly, strongly):
        for row in scaling(report).rows[1:]:
            assert {loss.name for loss in row.losses} <= set(CLASSES)
            assert row.ideal_ns is not None
            lost = sum(loss.ns for loss in row.losses)
            assert lost == pytest.approx(row.mean_ns - row.ideal_ns, abs=len(row.losses))


def test_two_runs_on_different_numbers_of_gpus_scale(weak: list[Path]) -> None:
    report = gputrace.compare(weak[2], weak[0])
    assert [row.gpus for row in scaling(report).rows] == [1, 4]
    assert report.pair is not None


def test_kernels_tell_the_kind_where_no_input_is_copied(tmp_path: Path) -> None:
    plans = {f"on{gpus}": plan(gpus, input_copies=0, kernel_ns=400_000 // gpus) for gpus in (1, 4)}
    found = scaling(gputrace.compare(*written(tmp_path, plans)))
    assert (found.kind, found.source) == ("strong", "kernels")


def test_nothing_is_said_of_work_that_is_neither(tmp_path: Path) -> None:
    one, four = Run(), [Run(pid=100 + n, device=n) for n in range(4)]
    train(one)
    for run in four:
        run.export = four[0].export
        for _ in range(20):
            run.input_copy(19_000_000)
            run.model(20)
            run.optimizer()
            run.synchronize()
    paths = [run.export.write(tmp_path / f"{n}.sqlite") for n, run in enumerate((one, four[0]))]
    report = gputrace.compare(*paths)
    found = scaling(report)
    assert (found.kind, found.source) == ("unknown", "none")
    assert [row.speed_up for row in found.rows] == [1, None]
    assert "--batch" in report.message


def test_samples_a_second_are_told_where_the_batch_is(weak: list[Path]) -> None:
    report = gputrace.compare(*weak, batch=32)
    assert [run.samples for run in report.runs] == [32, 64, 128, 256]
    for run, row in zip(report.runs, scaling(report).rows, strict=True):
        assert run.mean_ns is not None
        assert run.throughput == pytest.approx((run.samples or 0) / run.mean_ns * 1e9)
        assert row.throughput == pytest.approx(run.throughput, rel=1e-6)
    assert scaling(report).source == "batch"


def test_one_batch_of_all_gpus_is_strong_scaling(strong: list[Path]) -> None:
    report = gputrace.compare(*strong, global_batch=64)
    assert scaling(report).kind == "strong"
    assert [run.samples for run in report.runs] == [64] * 4


def test_runs_on_as_many_gpus_are_ranked_beside_the_first(tmp_path: Path) -> None:
    plans = {name: plan(2, seed=n) for n, name in enumerate(("first", "second"))}
    plans["quick"] = plan(2, seed=7, kernel_ns=30_000)
    report = gputrace.compare(*written(tmp_path, plans))
    assert scaling(report).kind == "same"
    assert report.message.startswith("quick is 1.")


@pytest.mark.parametrize(
    "values",
    [
        {"batch": 0},
        {"batch": (1, 2, 3)},
        {"batch": 32, "global_batch": 64},
        {"labels": ["one"]},
        {"labels": ["same", "same"]},
    ],
)
def test_arguments_that_make_no_sense(weak: list[Path], values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        gputrace.compare(weak[0], weak[1], **values)  # type: ignore[arg-type]
