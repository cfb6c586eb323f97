"""Ranks that others wait for: who, in which steps, why, and what it costs. Nobody in balanced runs.

`tests.synthetic.plants` has what is planted; `python -m benchmarks diagnosis` tries more of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.lateness import straggling_steps
from gputrace.api import Report
from gputrace.model.results import Finding
from tests.helpers.recordings import DATA, packed, unpack
from tests.helpers.sentences import words_of
from tests.synthetic import Plan, simulate, write_nsys
from tests.synthetic.plants import steady_ns

MS = 1_000_000
IDS = {"straggler", "late-host"}
SYNCED = Plan(
    seed=3, steps=16, ranks=3, allreduces=2, allreduce_ns=200_000, sync_every_step=True,
    kernels_per_step=60, jitter=0.005,
)  # fmt: skip


def analyze(plan: Plan, folder: Path) -> Report:
    path = folder / "run.sqlite"
    path.unlink(missing_ok=True)
    write_nsys(simulate(plan), path)
    with gputrace.open(path) as trace:
        return trace.analyze()


def late(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.id in IDS]


def lengthened(plan: Plan) -> float:
    """Nanoseconds a step that what is planted costs, by the same run without it."""
    balanced = replace(plan, late_host_rank=-1, slow_rank=-1, busy_rank=-1)
    steps = plan.steps - plan.warmup_steps
    return (steady_ns(simulate(plan)) - steady_ns(simulate(balanced))) / steps


def test_each_reason_of_a_late_rank_is_said_with_what_it_gains_alone(tmp_path: Path) -> None:
    """Kernels 1.5 times as long, more of them, and a late host: each is taken out in turn."""
    slow = replace(SYNCED, slow_rank=1, slow_factor=1.5)
    both = replace(slow, late_host_rank=1, late_host_ns=2 * MS)
    more = replace(SYNCED, busy_rank=1, busy_share=1.0)
    of_slow, of_both, of_more = (late(analyze(plan, tmp_path))[0] for plan in (slow, both, more))
    reasons = ("extra_ns", "slower_ns", "host_ns")
    for found, plan, reason in ((of_slow, slow, "slower_ns"), (of_more, more, "extra_ns")):
        gains = [int(found.evidence[name] or 0) for name in reasons]
        assert found.id == "straggler"
        assert max(gains) == found.evidence[reason] == pytest.approx(lengthened(plan), rel=0.1)
        assert sum(gains) == pytest.approx(max(gains), rel=0.05)
        assert "a step is shorter by" not in words_of(found)
    whole, host = lengthened(both), lengthened(replace(both, slow_rank=-1))
    assert of_both.evidence["slower_ns"] == pytest.approx(whole - host, rel=0.15)
    assert of_both.evidence["host_ns"] == pytest.approx(whole - lengthened(slow), rel=0.15)
    assert "with kernels as quick as the others' and by" in words_of(of_both)


def test_a_host_that_comes_late_is_named_with_what_it_costs(tmp_path: Path) -> None:
    plan = replace(SYNCED, late_host_rank=1, late_host_ns=2 * MS)
    report = analyze(plan, tmp_path)
    assert report.findings[0].id == "late-host"
    (found,) = late(report)
    assert (found.ranks, found.evidence["pattern"]) == ((1,), "constant")
    assert found.impact_ns == pytest.approx(lengthened(plan), rel=0.1)
    assert found.evidence["last_share"] == 1
    assert found.evidence["kernel_ratio"] == pytest.approx(1, abs=0.02)
    assert found.evidence["cause"] == "launch"
    assert "rank 1" in words_of(found)
    assert "its kernels are as fast as the others'" in words_of(found)


def test_a_loader_that_is_slow_on_one_rank_is_told_by_its_cause(tmp_path: Path) -> None:
    plan = replace(SYNCED, late_host_rank=2, late_host_ns=2 * MS, late_in_loader=True)
    (found,) = late(analyze(plan, tmp_path))
    assert (found.id, found.ranks, found.evidence["cause"]) == ("late-host", (2,), "data_feeding")
    assert "num_workers" in found.advice


def test_slower_kernels_are_told_with_how_much_slower(tmp_path: Path) -> None:
    plan = replace(SYNCED, slow_rank=0, slow_factor=1.3)
    report = analyze(plan, tmp_path)
    (found,) = late(report)
    assert (found.id, found.ranks, found.evidence["pattern"]) == ("straggler", (0,), "constant")
    assert found.evidence["kernel_ratio"] == pytest.approx(1.3, rel=0.02)
    assert "1.30 times as long" in words_of(found)
    assert found.impact_ns == pytest.approx(lengthened(plan), rel=0.1)
    assert "communication-exposed" not in [finding.id for finding in report.findings]


def test_more_kernels_are_told_apart_from_slower_ones(tmp_path: Path) -> None:
    plan = replace(SYNCED, busy_rank=2, busy_share=1.0)
    (found,) = late(analyze(plan, tmp_path))
    assert (found.id, found.ranks) == ("straggler", (2,))
    assert found.evidence["kernel_ratio"] == pytest.approx(1, abs=0.03)
    assert found.impact_ns == pytest.approx(lengthened(plan), rel=0.15)
    assert "a step are kernels that only it runs" in words_of(found)
    assert "times as long" not in words_of(found)


@pytest.mark.parametrize(
    ("steps", "pattern", "told"),
    [((9,), "one-step", "in step 9 alone"), ((7, 8, 9), "burst", "in steps 7-9")],
)
def test_one_bad_step_and_a_burst_are_told_apart(
    steps: tuple[int, ...], pattern: str, told: str, tmp_path: Path
) -> None:
    plan = replace(SYNCED, late_host_rank=1, late_host_ns=6 * MS, odd_steps=steps)
    (found,) = late(analyze(plan, tmp_path))
    assert (found.evidence["pattern"], found.evidence["first_step"]) == (pattern, steps[0])
    assert told in words_of(found)
    assert " of the time (" in found.message
    assert found.impact_ns == pytest.approx(lengthened(plan), rel=0.15)


def test_a_rank_that_stays_behind_after_one_bad_step_costs_that_step_alone(tmp_path: Path) -> None:
    """Without a synchronisation hosts as slow as each other never catch up: no one gains by it."""
    plan = replace(
        SYNCED, sync_every_step=False, kernel_ns=8_000, launch_ns=20_000, steps=24,
        late_host_rank=1, late_host_ns=8 * MS, odd_steps=(8,),
    )  # fmt: skip
    (found,) = late(analyze(plan, tmp_path))
    assert (found.ranks, found.evidence["pattern"]) == ((1,), "one-step")
    assert 0.5 < float(found.evidence["last_share"] or 0) < 16 / 21
    assert found.impact_ns == pytest.approx(lengthened(plan), rel=0.2)


def test_work_that_slower_hosts_hide_is_told_and_costs_nothing(tmp_path: Path) -> None:
    plan = replace(
        SYNCED, sync_every_step=False, launch_ns=12_000, kernel_ns=20_000,
        late_host_rank=0, late_host_ns=3 * MS, busy_rank=2, busy_share=0.9,
    )  # fmt: skip
    found = late(analyze(plan, tmp_path))
    assert [(f.id, f.ranks) for f in found] == [("late-host", (0,)), ("straggler", (2,))]
    assert (found[1].severity, found[1].impact_ns < found[0].impact_ns / 10) == ("low", True)


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_nobody_is_late_in_a_balanced_run(ranks: int, synced: bool, tmp_path: Path) -> None:
    plan = replace(SYNCED, ranks=ranks, allreduces=2, jitter=0.1, sync_every_step=synced)
    assert late(analyze(plan, tmp_path)) == []


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(0, 60), scatter=st.floats(0, 0.02))
def test_noise_around_nothing_makes_nobody_late(seed: int, steps: int, scatter: float) -> None:
    excess = np.random.default_rng(seed).normal(0, scatter * MS, steps)
    assert not straggling_steps(excess, MS).any()


@given(steps=st.integers(4, 60), lag=st.floats(0.03, 2))
def test_a_lag_that_is_always_there_is_found_from_3_percent_of_a_step(
    steps: int, lag: float
) -> None:
    assert straggling_steps(np.full(steps, np.ceil(lag * MS)), MS).all()
    assert not straggling_steps(np.full(steps, 0.02 * MS), MS).any()


def real(name: str, folder: Path) -> Report:
    if not packed(f"{name}.sqlite").exists():
        pytest.skip(f"{name} is too large for the repository, and is not beside it")
    with gputrace.open(unpack(f"{name}.sqlite", folder)) as trace:
        return trace.analyze()


def test_the_rank_of_a_real_run_that_arrives_last_is_late_by_its_host(tmp_path: Path) -> None:
    """Rank 3 is the last at most collectives, with the same kernels as the others."""
    (found,) = late(real("h200x4-ddp-starved", tmp_path))
    assert (found.id, found.ranks, found.evidence["pattern"]) == ("late-host", (3,), "constant")
    assert found.evidence["last_share"] == pytest.approx(0.7, abs=0.02)
    assert found.evidence["kernel_ratio"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["h200x2-ddp-validation", "h200x4-dataparallel"])
def test_nobody_is_late_in_real_runs_of_equal_ranks(name: str, tmp_path: Path) -> None:
    assert late(real(name, tmp_path)) == []


@pytest.mark.parametrize("path", sorted(DATA.glob("nsys-ai-*.sqlite.xz")), ids=lambda p: p.name)
def test_slices_without_steps_name_nobody(path: Path, tmp_path: Path) -> None:
    with gputrace.open(unpack(path.name.removesuffix(".xz"), tmp_path)) as trace:
        assert late(trace.analyze()) == []
