"""Kernels that wait are told from those that work, by counters that cover 100 ms at a time."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.model.kernels import KernelActivity
from tests.helpers.examples import few
from tests.helpers.handmade import MS, Run, analyze, ids
from tests.helpers.lookups import finding_of
from tests.helpers.sentences import words_of
from tests.synthetic.nvml import ACTIVE, write_activity

Kernels = tuple[tuple[str, int, int], ...]

WORK: Final[Kernels] = (("gemm", 3, 20), ("elementwise", 1, 20), ("attention", 2, 10))
"""Names, lengths in ms and launches of the kernels of a step of 100 ms."""
SPINS: Final = ("spin_one_block", "spin_clock", "spin_sleeping")


def steps_of(kernels: Kernels, steps: int, *, seed: int = 0) -> Run:
    """Steps of a copy of 2 ms and the kernels, which differ by 2 %, with gaps of up to 3 ms."""
    run, random = Run(), Random(seed)
    for _ in range(steps):
        run.input_copy(length=2 * MS)
        for name, length, count in kernels:
            for _ in range(count):
                run.kernel(int(length * MS * random.uniform(0.98, 1.02)), name)
        run.optimizer(1)
        run.wait(random.randrange(3 * MS))
        run.synchronize()
    return run


def analyzed(run: Run, folder: Path, *, seed: int = 0, delay_ns: int = 60 * MS) -> Report:
    path = run.export.write(folder / "run.sqlite")
    write_activity(path, seed=seed, delay_ns=delay_ns)
    with gputrace.open(path) as trace:
        return trace.analyze()


def activity_of(report: Report, name: str) -> KernelActivity | None:
    assert report.kernels is not None
    return next(use for use in report.kernels.top if use.name == name).activity


@pytest.mark.parametrize("length", [50, 200])
@pytest.mark.parametrize("name", SPINS)
def test_a_planted_spin_is_named_and_the_work_beside_it_is_not(
    tmp_path: Path, name: str, length: int
) -> None:
    report = analyzed(steps_of((*WORK, (name, length, 1)), 150), tmp_path)
    found = finding_of(report, "kernel-waits")
    assert f" goes to {name} alone" in words_of(found)
    assert found.impact_ns == pytest.approx(length * MS, rel=0.02)
    for work, _, _ in WORK:
        known = activity_of(report, work)
        assert known is not None
        assert known.does is None


@pytest.mark.parametrize("delay_ms", [8, 22, 97, 130])
def test_activity_is_found_whatever_the_delay_of_the_counters(
    tmp_path: Path, delay_ms: int
) -> None:
    kernels = (*WORK, ("spin_clock", 41, 1))
    report = analyzed(steps_of(kernels, 200), tmp_path, delay_ns=delay_ms * MS)
    for name, _, _ in kernels:
        known, (sms, tensor, single, memory) = activity_of(report, name), ACTIVE[name]
        assert known is not None
        assert known.error < 0.03
        wrong = (
            abs(100 * known.sms - sms),
            abs(100 * known.tensor_cores - tensor),
            abs(100 * known.arithmetic - tensor - single),
            abs(100 * known.memory - memory),
        )
        assert max(wrong) < 4 * 100 * known.error, name


def test_spins_of_10_ms_are_known_where_they_follow_one_another(tmp_path: Path) -> None:
    report = analyzed(steps_of((*WORK, ("spin_clock", 10, 20)), 60), tmp_path)
    assert finding_of(report, "kernel-waits").impact_ns == pytest.approx(200 * MS, rel=0.02)


@pytest.mark.parametrize("seed", range(few(3)))
def test_work_is_never_named_however_long_its_kernels(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    works = [name for name in ACTIVE if not name.startswith(("spin", "fma", "nccl", "fused"))]
    lengths = [(name, random.choice([1, 5, 30, 200])) for name in random.sample(works, 5)]
    kernels = tuple((name, length, max(1, 40 // length)) for name, length in lengths)
    report = analyzed(steps_of(kernels, 100, seed=seed), tmp_path, seed=seed)
    assert "kernel-waits" not in ids(report)
    known = [activity_of(report, name) for name, _, _ in kernels]
    assert {activity.does for activity in known if activity is not None} <= {None}


def test_one_block_is_said_to_use_few_sms_though_it_works(tmp_path: Path) -> None:
    report = analyzed(steps_of((*WORK, ("fma_one_block", 200, 1)), 60), tmp_path)
    known = activity_of(report, "fma_one_block")
    assert known is not None
    assert known.does == "few SMs"
    assert known.sms == pytest.approx(0.0076, abs=0.002)
    assert "a wait, or too few blocks" in words_of(finding_of(report, "kernel-waits"))


def test_a_fused_exchange_and_collectives_are_no_waits(tmp_path: Path) -> None:
    exchange = (("fused_exchange", 50, 2), ("ncclDevKernel_AllReduce", 100, 1))
    report = analyzed(steps_of((*WORK, *exchange), 60), tmp_path)
    known = activity_of(report, "fused_exchange")
    assert known is not None
    assert known.does == "exchanges"
    assert known.nvlink_bytes_per_s == pytest.approx(300e9, rel=0.02)
    assert "kernel-waits" not in ids(report)


def test_a_wait_beside_other_work_costs_nothing(tmp_path: Path) -> None:
    run = steps_of((("spin_one_block", 200, 1),), 60)
    beside = steps_of((("gemm", 50, 4),), 60)
    for row in beside.export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        text = run.export.string("gemm")
        row |= {"streamId": 9, "demangledName": text, "shortName": text}
        run.export.add("CUPTI_ACTIVITY_KIND_KERNEL", **row)
    report = analyzed(run, tmp_path)
    assert "kernel-waits" not in ids(report)


def test_two_kernels_that_always_run_in_equal_parts_are_not_told_apart(tmp_path: Path) -> None:
    # 1 ms each in turn: every reading has half of both.
    report = analyzed(steps_of((("gemm", 1, 1), ("spin_clock", 1, 1)) * 50, 60), tmp_path)
    assert activity_of(report, "spin_clock") is None
    assert "kernel-waits" not in ids(report)


def test_nothing_is_said_without_counters(tmp_path: Path) -> None:
    report = analyze(steps_of((*WORK, ("spin_clock", 200, 1)), 30), tmp_path)
    assert activity_of(report, "spin_clock") is None
    assert "kernel-waits" not in ids(report)
    assert " math" not in report.render("text")


def test_the_table_of_kernels_shows_how_busy_the_card_is_meanwhile(tmp_path: Path) -> None:
    report = analyzed(steps_of((*WORK, ("spin_clock", 200, 1)), 60), tmp_path)
    (row,) = [row for row in report.render("markdown").splitlines() if row.startswith("| spin")]
    assert row.endswith("| 100% | 0% | 0% | waits |")
    assert report.utilization is not None
    curves = {curve.name for curve in report.utilization.gpus[0].curves}
    assert {"sm_active", "tensor_active", "dram_active", "nvlink_sent", "pcie_received"} <= curves
