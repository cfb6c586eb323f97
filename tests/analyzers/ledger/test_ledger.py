"""Lost time is charged once: to the most specific cause that rows prove, on the rank it is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers import pipeline
from gputrace.analyzers.findings import CAUSES, order
from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.ledger.causes import Cause, sought_in
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.whatif.graph import FOLLOW, OF_OTHERS
from gputrace.analyzers.whatif.optimizations import CURES, Cure
from gputrace.api import Report
from gputrace.model.events import Kind
from gputrace.model.results import Analysis, Finding
from gputrace.readers.registry import open_trace
from tests.helpers import recordings
from tests.helpers.examples import few
from tests.helpers.exports import STEP, Export, global_id
from tests.helpers.handmade import MS, US, Run, analyze, ids
from tests.helpers.lookups import finding_of
from tests.helpers.sentences import words_of
from tests.synthetic import Plan, random_plan, simulate, write_nsys

PID: Final = 100
COLLECTION, PHASE, COMPILATION = 3, 4, 6
"""Kinds in GPUTRACE_HOST_RANGE."""


class Loop:
    """Steps of 10 ms on a GPU that computes from 0 to 4 ms, whose host is at something after it."""

    def __init__(self) -> None:
        self.export = Export()
        for name in ("GPUTRACE_META", "GPUTRACE_HOST_RANGE"):
            self.export.rows.setdefault(name, [])
        self.export.give("GPUTRACE_META", "name", "value")
        self.export.give("GPUTRACE_HOST_RANGE", "start", "end", "globalTid", "nameId", "kind")
        self.run = Run(self.export, pid=PID)

    def step(self, number: int, *ranges: tuple[str, int, float, float]) -> None:
        """One step, with host ranges of a name and a kind from one millisecond of it to another."""
        start = number * 10 * MS
        self.run.now = start
        self.run.kernel(4 * MS, "gemm")
        self._add(STEP, "torch.step", start, 10, step=number)
        for name, kind, begin, end in ranges:
            at = start + round(begin * MS)
            self._add("GPUTRACE_HOST_RANGE", name, at, end - begin, kind=kind)

    def _add(self, table: str, name: str, start: int, length_ms: float, **more: int) -> None:
        who = {"globalTid": global_id(PID, thread=PID), "nameId": self.export.string(name)}
        end = start + round(length_ms * MS)
        self.export.add(table, start=start + 1, end=end + 1, **who, **more)


def charged_ms(report: Report) -> dict[str, float]:
    """Milliseconds of a mean step by cause, those of a tenth of a millisecond and more."""
    (row,) = report.breakdown
    spent: Counter[str] = Counter()
    for charge in report.ledger:
        spent[charge.cause] += charge.ns
    return {
        cause: round(ns / row.steps / MS, 1)
        for cause, ns in spent.items()
        if ns > row.steps * MS / 10
    }


def lost_of(analysis: Analysis | Report) -> list[tuple[int, int]]:
    """What the ledger charges on each GPU, and what its breakdown has beside computation."""
    pairs = []
    for row in analysis.breakdown:
        mine = [c for c in analysis.ledger if (c.gpu, c.paid_by) == (row.gpu, row.rank)]
        pairs.append((sum(c.ns for c in mine if c.of != "compute"), row.total_ns - row.compute_ns))
    return pairs


def check(analysis: Analysis | Report) -> None:
    """All that holds of any ledger, and of predictions beside it."""
    assert all(charged == lost for charged, lost in lost_of(analysis))
    assert all(charge.ns > 0 and charge.cause in charge.path for charge in analysis.ledger)
    known = {cause.id for cause in CAUSES}
    assert {charge.cause for charge in analysis.ledger} <= known
    by_cause: dict[str, int] = {}
    for cure in analysis.what_if:
        cause = cure.finding or cure.id
        by_cause[cause] = max(by_cause.get(cause, 0), cure.gain_ns)
    of = {cure.id: cure for cure in CURES}
    for cure in analysis.what_if:
        assert cure.low_ns <= cure.step_ns <= cure.high_ns <= cure.now_ns
        if of[cure.id].takes:
            assert cure.step_ns >= stays(analysis, of[cure.id]) - US, cure
    if analysis.what_if:
        assert sum(by_cause.values()) <= analysis.what_if[0].now_ns


def stays(analysis: Analysis | Report, cure: Cure) -> float:
    """What a step keeps on the GPU that keeps most: rows of causes that a cure does not take; of a
    cure that makes hosts alike, of each cause as much as the median GPU has.
    """
    gone = (*cure.takes, *(OF_OTHERS if cure.evens else FOLLOW))
    kept = np.zeros((len(CAUSES), len(analysis.breakdown)))
    number = {cause.id: at for at, cause in enumerate(CAUSES)}
    for at, row in enumerate(analysis.breakdown):
        for c in analysis.ledger:
            if (c.gpu, c.paid_by) == (row.gpu, row.rank) and c.of != "compute":
                kept[number[c.cause], at] += (c.cause not in gone) * c.ns / max(row.steps, 1)
    if cure.evens:
        kept = np.minimum(kept, np.sort(kept)[:, [(kept.shape[1] - 1) // 2]])
    ratio = analysis.recorder.ratio if analysis.recorder else 1.0
    return float(kept.sum(axis=0).max(initial=0.0)) * ratio


# ---- what is charged to what ----


def test_each_nanosecond_goes_to_the_most_specific_cause_that_is_proven(tmp_path: Path) -> None:
    loop = Loop()
    for number in range(20):
        loop.step(
            number,
            ("generation 2", COLLECTION, 5, 7),
            ("forward: shape", COMPILATION, 7, 8.5),
        )
    # The rest of the millisecond and more without a call is other work of the host.
    assert charged_ms(analyze(loop.export, tmp_path)) == pytest.approx(
        {"garbage-collection": 2.0, "recompilation": 1.5, "host-work": 2.5}, abs=0.15
    )


@pytest.mark.parametrize(("begin_ms", "end_ms", "gains_ms"), [(5, 7, 5.7), (4.2, 9.8, 4.3)])
def test_who_leaves_out_work_leaves_out_the_collections_of_its_objects(
    tmp_path: Path, begin_ms: float, end_ms: float, gains_ms: float
) -> None:
    """Of a pause that is mostly collections, they stay."""
    loop = Loop()
    for number in range(20):
        loop.step(number, ("generation 2", COLLECTION, begin_ms, end_ms))
    report = analyze(loop.export, tmp_path)
    (cure,) = (cure for cure in report.what_if if cure.id == "host-work")
    assert cure.gain_ns == pytest.approx(gains_ms * MS, abs=MS / 10)


def test_of_two_causes_at_a_time_one_is_charged(tmp_path: Path) -> None:
    loop = Loop()
    for number in range(20):
        loop.step(number, ("generation 2", COLLECTION, 5, 8), ("f: shape", COMPILATION, 4.5, 9.5))
    charged = charged_ms(analyze(loop.export, tmp_path))
    assert charged["garbage-collection"] == pytest.approx(3, abs=0.15)
    assert sum(charged.values()) == pytest.approx(6, abs=0.4)


def test_launches_at_the_hosts_own_pace_are_launch_overhead(tmp_path: Path) -> None:
    """Less than a millisecond between two calls, however often: a CUDA graph would take it."""
    run = Run()
    for _ in range(20):
        run.input_copy(length=20 * US)
        for _ in range(30):
            run.wait(200 * US)
            run.kernel(20 * US, "void at::native::op")
        run.optimizer()
    report = analyze(run, tmp_path)
    assert ids(report)[0] == "launch-bound"
    assert "host-work" not in charged_ms(report)


def test_an_optimizer_that_launches_nothing_runs_on_the_host(tmp_path: Path) -> None:
    loop = Loop()
    for number in range(20):
        loop.step(
            number,
            ("model", PHASE, 0, 1),
            ("backward", PHASE, 1, 4),
            ("optimizer", PHASE, 4.5, 9.5),
        )
    report = analyze(loop.export, tmp_path)
    assert ids(report)[0] == "host-optimizer"
    assert "for the optimizer on the host (CPU)" in report.findings[0].message
    (cure,) = (cure for cure in report.what_if if cure.id == "gpu-optimizer")
    assert cure.step_ns == pytest.approx(4 * MS, rel=0.05)


def test_a_checkpoint_within_a_step_is_charged_as_such(tmp_path: Path) -> None:
    """Not as other work of the host, even where it comes amid the program's own calls."""
    loop = Loop()
    for number in range(20):
        passes = ("model", PHASE, 0, 1), ("backward", PHASE, 1, 4)
        loop.step(number, *passes, ("checkpoint", PHASE, 4.5, 9.5))
    report = analyze(loop.export, tmp_path)
    assert ids(report)[0] == "checkpoint-stall"
    assert "for saving checkpoints" in report.findings[0].message
    assert charged_ms(report) == pytest.approx({"checkpoint-stall": 5, "host-work": 1}, rel=0.1)


@pytest.mark.parametrize("trips", [1, 6])
def test_a_programs_own_optimizer_on_the_host_is_known_by_its_copies(
    trips: int, tmp_path: Path
) -> None:
    """Gradients come and parameters go, one by one; a single copy there and back may be a result
    that is read and the next batch.
    """
    loop = Loop()
    for number in range(20):
        start = loop.run.now = number * 20 * MS
        loop.run.model(40)
        loop._add("GPUTRACE_HOST_RANGE", "backward", start, 2, kind=PHASE)
        loop.run.now = start + 2 * MS
        for _ in range(trips):
            loop.run.copy(50 * US, to_host=True)
            loop.run.wait(15 * MS // trips)
            loop.run.input_copy(length=50 * US)
    report = analyze(loop.export, tmp_path)
    assert report.steps.kind == "training"
    assert report.steps.count == (20 if trips == 1 else 19)
    assert ids(report)[0] == ("host-optimizer" if trips > 1 else "data-feeding")
    if trips > 1:
        (cure,) = (cure for cure in report.what_if if cure.id == "gpu-optimizer")
        assert cure.gain_ns == pytest.approx(15 * MS, rel=0.05)


@pytest.mark.parametrize("moves", [4, 8])
def test_what_a_game_does_between_calls_of_the_model_loads_no_batch(
    tmp_path: Path, moves: int
) -> None:
    """Though a copy to the GPU follows: its moves need what the call before it returned."""
    loop = Loop()
    for number in range(20):
        loop.run.now = number * 20 * MS
        for _ in range(moves):
            begin = loop.run.now
            loop.run.kernel(100 * US, "gemm")
            loop._add("GPUTRACE_HOST_RANGE", "model", begin, 0.02, kind=PHASE)
            loop.run.copy(5 * US, to_host=True)
            loop.run.wait(800 * US)
            loop.run.input_copy(length=5 * US)
        begin = loop.run.now
        loop.run.kernel(100 * US, "gemm")
        loop._add("GPUTRACE_HOST_RANGE", "model", begin, 0.02, kind=PHASE)
        loop._add("GPUTRACE_HOST_RANGE", "backward", loop.run.now, 0.1, kind=PHASE)
        loop.run.optimizer()
        loop._add(STEP, "torch.step", number * 20 * MS, 20, step=number)
    report = analyze(loop.export, tmp_path)
    assert report.steps.count == 20
    assert ids(report)[0] == "host-work"
    assert "data-feeding" not in charged_ms(report)
    assert not report.breakdown[0].host_data_ns
    assert not any("data" in gap.evidence for gap in report.gaps.largest)


def test_work_outside_of_the_passes_is_the_programs_own(tmp_path: Path) -> None:
    """Even where it issues kernels all the time, and reads their results one by one."""
    loop = Loop()
    for number in range(20):
        loop.step(
            number,
            ("model", PHASE, 0, 1),
            ("backward", PHASE, 1, 4),
            ("optimizer", PHASE, 9.5, 9.9),
        )
        for index in range(20):
            loop.run.now = number * 10 * MS + 4_500 * US + index * 200 * US
            loop.run.item()
        loop.run.now = number * 10 * MS + 9_600 * US
        loop.run.optimizer(1)
    report = analyze(loop.export, tmp_path)
    assert ids(report)[0] == "host-work"
    assert "reads 20 values back a step" in words_of(report.findings[0])
    assert "torch.stack" in report.findings[0].advice


@pytest.mark.parametrize("apart", [20 * US, 400 * US])
def test_a_stream_of_launches_outside_of_the_passes_is_launch_overhead(
    tmp_path: Path, apart: int
) -> None:
    """As of pictures that are augmented one by one on the GPU: one launch right after the other."""
    loop = Loop()
    for number in range(20):
        loop.step(
            number,
            ("model", PHASE, 0, 1),
            ("backward", PHASE, 1, 2),
            ("optimizer", PHASE, 9.5, 9.9),
        )
        loop.run.now = number * 10 * MS + 2 * MS
        while loop.run.now < number * 10 * MS + 9 * MS:
            loop.run.kernel(2 * US, "crop")
            loop.run.wait(apart)
        loop.run.now = number * 10 * MS + 9_600 * US
        loop.run.optimizer(1)
    first = ids(analyze(loop.export, tmp_path))[0]
    assert first == ("launch-bound" if apart < 100 * US else "host-work")


@pytest.mark.parametrize("every", [1, 5])
def test_work_in_few_steps_is_not_told_of_each(tmp_path: Path, every: int) -> None:
    run = Run()
    for number in range(41):
        start = run.now
        run.input_copy()
        run.model(10)
        run.synchronize()
        run.wait(0 if number % every else 20 * MS // (6 - every))
        run.model(10)
        run.synchronize()
        run.range(start, run.now, f"step {number}")
    found = finding_of(analyze(run, tmp_path), "host-work")
    few = "100% of it is in 8 of 40 steps (5, 10, 15, 20, 25, …, every 5)"
    assert ("of each step" in found.message) is (every == 1)
    assert (" of the time (" in found.message) is (every == 5)
    assert (few in found.details) is (every == 5)


def test_a_pause_is_not_promised_to_cuda_graphs(tmp_path: Path) -> None:
    loop = Loop()
    for number in range(20):
        loop.step(number, ("generation 2", COLLECTION, 4, 9.9))
    report = analyze(loop.export, tmp_path)
    assert report.findings[0].id == "garbage-collection"
    assert not [cure for cure in report.what_if if cure.id == "graphs"]


def test_waiting_for_a_rank_is_charged_with_what_that_rank_is_at(tmp_path: Path) -> None:
    plan = Plan(
        steps=16, ranks=3, allreduces=2, late_host_rank=1, late_host_ns=6 * MS, jitter=0,
        sync_every_step=True,
    )  # fmt: skip
    path = tmp_path / "run.sqlite"
    write_nsys(simulate(plan), path)
    with gputrace.open(path) as trace:
        report = trace.analyze()
    check(report)
    waits = [charge for charge in report.ledger if "waiting" in charge.path]
    of_late = [charge for charge in waits if charge.rank == 1]
    assert {charge.paid_by for charge in of_late} == {0, 2}
    assert sum(charge.ns for charge in of_late) > 0.8 * sum(charge.ns for charge in waits)


# ---- what holds of any recording ----


@pytest.mark.parametrize("name", recordings.SMALL)
def test_rows_sum_to_what_a_gpu_does_not_compute(
    name: str, analyzed: Callable[[str], Report]
) -> None:
    check(analyzed(name))


@settings(max_examples=few(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 100_000))
def test_rows_of_random_runs_sum_too(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run") / "run.sqlite"
    write_nsys(simulate(random_plan(seed)), path)
    with gputrace.open(path) as trace:
        check(trace.analyze())


class Asks:
    """Calls the rules of causes that are only told if enough is charged to them."""

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        """Does without them."""

    def facts_found(self, facts: Facts) -> None:
        self.facts = facts


@pytest.mark.parametrize("seed", range(3))
def test_a_rule_that_is_not_called_would_find_nothing(seed: int, tmp_path: Path) -> None:
    write_nsys(simulate(random_plan(seed)), tmp_path / "run.sqlite")
    asks = Asks()
    with open_trace(tmp_path / "run.sqlite") as trace:
        pipeline.analyze(trace, watcher=asks)
        for cause in CAUSES:
            if cause.least and cause.rule and not asks.facts.is_costly(cause.id, cause.least):
                assert list(cause.rule(asks.facts)) == []


# ---- what comes first ----


def finding(id: str, impact_ms: float, severity: str = "high") -> Finding:
    return Finding(id, severity, (0,), (0,), round(impact_ms * MS), "", "")


def first(*findings: Finding) -> list[tuple[str, str]]:
    return [(each.id, each.severity) for each in order(findings, (), 100 * MS)]


def test_findings_are_ordered_by_what_their_cures_gain() -> None:
    """Of launch overhead, half is sure; of computation, an eighth."""
    assert first(
        finding("launch-bound", 30),
        finding("garbage-collection", 20),
        finding("compute-bound", 60, "info"),
    ) == [("garbage-collection", "high"), ("launch-bound", "medium"), ("compute-bound", "info")]


def test_a_recorder_that_distorts_comes_first_and_information_last() -> None:
    assert [id for id, _ in first(
        finding("warmup", 90, "info"), finding("sync-bound", 30), finding("lost-records", 0)
    )] == ["lost-records", "sync-bound", "warmup"]  # fmt: skip


def test_a_trace_is_searched_for_what_its_events_can_prove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought: list[str] = []

    def account(causes: Sequence[Cause], kinds: Collection[Kind]) -> tuple[Cause, ...]:
        left = sought_in(causes, kinds)
        sought.extend(cause.id for cause in left if cause.claim or cause.amount)
        return left

    monkeypatch.setattr(pipeline, "sought_in", account)
    loop = Loop()
    for number in range(6):
        loop.step(number, ("generation 2", COLLECTION, 5, 9))
    assert "garbage-collection" in charged_ms(analyze(loop.export, tmp_path))
    assert "garbage-collection" in sought
    # Nothing was compiled, no loader, no sample and no counter recorded.
    lacking = {cause.id for cause in CAUSES if cause.needs} - set(sought)
    assert lacking == {
        *("recompilation", "loader-restart", "gil-wait", "page-faults", "slow-cores"),
        *("cpu-throttled", "cpu-starved"),
    }
    assert {cause.id for cause in sought_in(CAUSES, ())} == {cause.id for cause in CAUSES}
