"""Warm-up, validation, checkpoints and epochs of generated runs, whose truth is planted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.run_phases import find_epochs
from gputrace.api import Report
from gputrace.data import unpacked
from gputrace.model.results import Phase
from gputrace.report.wording import describe_parts, run_parts
from tests.analyzers.findings.test_host_compilations import add_range, give_host_ranges
from tests.analyzers.test_generated_training import run
from tests.helpers.examples import few
from tests.helpers.handmade import MS, US, Run, analyze, assert_training, ids
from tests.helpers.lookups import finding_of
from tests.helpers.sentences import words_of
from tests.synthetic import Plan, Recording

PHASES = {"validation-downtime", "checkpoint-stall"}
PLAN = Plan(steps=24, warmup_steps=0, kernels_per_step=60, seed=3, sync_every_step=True)
RANKS = replace(PLAN, ranks=3, allreduces=2)


def of(report: Report, name: str) -> list[Phase]:
    return [phase for phase in report.phases if phase.phase == name]


def steps_of(report: Report) -> int:
    """Count the steps after warm-up."""
    return report.steps.count - report.steps.warmup_count


def length(phase: Phase) -> int:
    return phase.end_ns - phase.start_ns


def planted(recording: Recording, name: str, rank: int = 0) -> int:
    """Nanoseconds of all phases of a name on a rank."""
    windows = [w for w in recording.truth.windows if (w.phase, w.rank) == (name, rank)]
    return sum(w.end - w.start for w in windows)


class TestValidation:
    plan = replace(RANKS, validation_after=(7, 15), validation_batches=12, validation_on_all=False)

    def test_kernels_between_two_steps_of_warm_up_are_part_of_it(self, tmp_path: Path) -> None:
        """XLA tries kernels between the first two steps."""
        plan = replace(PLAN, warmup_steps=3, validation_after=(0, 15), validation_batches=12)
        _, report = run(tmp_path, plan)
        assert report.steps.warmup_count >= 2
        assert [phase.step for phase in of(report, "validation")] == [15]

    def test_the_ranks_that_wait_are_named_with_the_one_they_wait_for(self, tmp_path: Path) -> None:
        recording, report = run(tmp_path, self.plan)
        found = of(report, "validation")
        assert [(p.rank, p.step) for p in found] == [
            (rank, step) for rank in range(3) for step in (7, 15)
        ]
        assert [p.waits_for for p in found] == [(), (), (0,), (0,), (0,), (0,)]
        for phase in found[2:]:
            assert (phase.communication_ns or 0) > 0.9 * length(phase)
            assert phase.evidence.startswith("waits for rank 0: ")
        told = finding_of(report, "validation-downtime")
        total = planted(recording, "validation")
        assert told.evidence["total_ns"] == pytest.approx(total, rel=0.02)
        assert told.evidence["lost_ns"] == pytest.approx(total * 2 / 3, rel=0.02)
        assert (told.evidence["working_ranks"], told.evidence["waiting_ranks"]) == ("0", "1-2")
        assert told.evidence["wait_ns"] == pytest.approx(total, rel=0.05)
        assert told.impact_ns == pytest.approx(total * 2 / 3 / steps_of(report), rel=0.02)
        assert "ranks 1-2 wait" in words_of(told)
        assert "validate on all ranks" in told.advice

    def test_each_lies_within_one_step_of_where_it_was(self, tmp_path: Path) -> None:
        recording, report = run(tmp_path, self.plan)
        true = [w for w in recording.truth.windows if (w.phase, w.rank) == ("validation", 0)]
        step = report.steps.mean_ns or 0
        for phase, window in zip(of(report, "validation")[:2], true, strict=True):
            assert abs(phase.start_ns - window.start) < step
            assert abs(phase.end_ns - window.end) < step

    def test_the_run_is_told_in_its_parts(self, tmp_path: Path) -> None:
        _, report = run(tmp_path, self.plan)
        parts = run_parts(report)
        assert [part.name for part in parts][-5:] == [*["measured", "validation"] * 2, "measured"]
        assert all(a.end == b.start for a, b in pairwise(parts))
        assert parts[-1].end == min(gpu.start_ns for gpu in report.gpus) + report.span_ns
        assert "validation" in describe_parts(parts)

    def test_ranks_that_wait_in_the_next_step_are_named_too(self, tmp_path: Path) -> None:
        """Nothing stops them before its first all-reduce."""
        plan = replace(self.plan, validation_barrier=False)
        recording, report = run(tmp_path, plan)
        assert [(p.rank, p.step, p.waits_for) for p in of(report, "validation")] == [
            (0, 7, ()), (0, 15, ()), (1, 7, (0,)), (1, 15, (0,)), (2, 7, (0,)), (2, 15, (0,)),
        ]  # fmt: skip
        held = {(s.rank, s.step) for s in report.step_list if s.phase == "validation"}
        assert held == {(rank, step) for rank in (1, 2) for step in (8, 16)}
        assert [row.steps for row in report.breakdown] == [steps_of(report) - n for n in (0, 2, 2)]
        told = finding_of(report, "validation-downtime")
        total = planted(recording, "validation")
        assert (told.evidence["working_ranks"], told.evidence["waiting_ranks"]) == ("0", "1-2")
        assert told.evidence["lost_ns"] == pytest.approx(total * 2 / 3, rel=0.02)
        assert "slow-steps" not in ids(report)

    def test_one_that_all_ranks_share_is_no_loss(self, tmp_path: Path) -> None:
        plan = replace(self.plan, validation_on_all=True, kernel_ns=200_000)
        _, report = run(tmp_path, plan)
        assert {phase.waits_for for phase in of(report, "validation")} == {()}
        assert not PHASES & set(ids(report))

    def test_gpus_that_idle_in_it_are_a_loss(self, tmp_path: Path) -> None:
        plan = replace(self.plan, validation_on_all=True, data_wait_ns=3 * MS)
        _, report = run(tmp_path, plan)
        told = finding_of(report, "validation-downtime")
        assert told.evidence["waiting_ranks"] == ""
        assert told.evidence["lost_ns"] == pytest.approx(2 * 12 * 3 * MS, rel=0.15)
        assert "run nothing for" in words_of(told)

    def test_the_line_that_the_host_is_at_is_told(self, tmp_path: Path) -> None:
        run = Run()
        for step in range(20):
            if step in (6, 12):
                for _batch in range(5):
                    run.kernels(20, "gemm_forward")
                    run.synchronize()
                    run.wait_at("train.py:30 evaluate")
            run.input_copy()
            run.model()
            run.optimizer()
            run.synchronize()
            run.wait_at("train.py:12 main")
        told = finding_of(analyze(run, tmp_path), "validation-downtime")
        assert "the host is at train.py:30 evaluate in 80% of 10 samples" in told.details

    def test_the_line_is_where_it_was_launched_not_where_the_host_waits_then(
        self, tmp_path: Path
    ) -> None:
        """The GPU evaluates for most of the time after the host has reached a barrier."""
        run = Run()
        for step in range(20):
            if step in (6, 12):
                for _batch in range(4):
                    run.kernels(20, "gemm_forward", 200 * US)
                    run.wait_at("train.py:30 evaluate")
                run.kernels(1, "gemm_forward")
                run.wait_at(*["train.py:40 main"] * 10)
                run.synchronize()
            run.input_copy()
            run.model()
            run.optimizer()
            run.synchronize()
            run.wait_at("train.py:12 main")
        told = finding_of(analyze(run, tmp_path), "validation-downtime")
        assert [line for line in told.details if "the host is at train.py:30 evaluate" in line]

    def test_of_a_single_one_it_is_not_known_how_often_it_comes(self, tmp_path: Path) -> None:
        plan = replace(self.plan, validation_after=(7,), validation_batches=100)
        told = finding_of(run(tmp_path, plan)[1], "validation-downtime")
        assert float(told.evidence["share_of_run"] or 0) > 0.2
        assert told.severity == "medium"
        twice = replace(plan, validation_after=(7, 15))
        assert finding_of(run(tmp_path, twice)[1], "validation-downtime").severity == "high"

    @pytest.mark.parametrize(("every", "told"), [(4, "rollouts"), (40, "validation takes")])
    def test_what_lasts_longer_than_a_few_updates_may_be_rollouts(
        self, every: int, told: str, tmp_path: Path
    ) -> None:
        run = Run()
        for step in range(4 * every):
            if step and not step % every:
                for _act in range(every * 2):
                    run.kernels(40, "gemm_forward", 30 * US)
                    run.synchronize()
                    run.wait(MS)
            run.input_copy()
            run.model()
            run.optimizer()
            run.synchronize()
        report = analyze(run, tmp_path)
        assert [phase.step for phase in of(report, "validation")] == [
            every * turn - 1 for turn in (1, 2, 3)
        ]
        found = finding_of(report, "validation-downtime")
        assert told in found.message
        assert ("annotate('rollout')" in found.advice) is (told == "rollouts")


@pytest.mark.parametrize(
    ("name", "kernels", "validations"),
    [
        ("vectorized_elementwise_kernel", 30, []),
        ("gemm_forward", 30, [3, 7, 11, 15, 19]),
        ("vectorized_elementwise_kernel", 120, [3, 7, 11, 15, 19]),
    ],
)
def test_averages_of_weights_are_a_part_of_the_next_step(
    name: str, kernels: int, validations: list[int], tmp_path: Path
) -> None:
    """Every few steps, by kernels that multiply nothing, and in less time than a step."""
    run = Run()
    for step in range(24):
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
        if step % 4 == 3:
            run.kernels(kernels, name, 25 * US)
            run.synchronize()
    report = analyze(run, tmp_path)
    assert_training(report, 24)
    found = [phase.step for phase in of(report, "validation")]
    assert found[:5] == validations


@pytest.mark.parametrize("compiled", [0.8, 0.2])
def test_kernels_that_run_while_the_host_compiles_are_no_validation(
    tmp_path: Path, compiled: float
) -> None:
    """XLA tries kernels for each new shape, after the step before it."""
    run = Run()
    give_host_ranges(run.export)
    for step in range(24):
        if step in (9, 15):
            start = run.now
            for _kernel in range(30):
                run.kernel(100 * US, "gemm_fusion_tried")
                run.wait(MS)
            run.synchronize()
            end = start + int(compiled * (run.now - start))
            add_range(run.export, start, end, "jit(update)")
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
    report = analyze(run, tmp_path)
    assert_training(report, 24)
    steps = [] if compiled > 0.5 else [8, 14]
    assert [phase.step for phase in of(report, "validation")] == steps
    lengths = [step.end_ns - step.start_ns for step in report.step_list]
    longer = [number for number, length in enumerate(lengths) if length > 2 * min(lengths)]
    assert longer == ([9, 15] if compiled > 0.5 else [])


class TestMarkedSteps:
    """A marker at each optimizer step sees what comes between two of them as part of a step."""

    @staticmethod
    def training(validates: bool, searches: bool = False) -> Run:
        run, start = Run(), 0
        for step in range(20):
            if validates and step in (6, 12):
                for _batch in range(5):
                    run.input_copy()
                    run.kernels(20, "gemm_forward")
                run.synchronize()
            run.input_copy()
            for _layer in range(4):
                run.model(10)
                if searches and step == 9:
                    run.kernels(20, "conv_tried")
            run.optimizer()
            run.synchronize()
            run.range(start, run.now, f"train step {step}")
            start = run.now
        return run

    def test_validation_at_the_start_of_a_step_is_told_apart(self, tmp_path: Path) -> None:
        report = analyze(self.training(validates=True), tmp_path)
        assert (report.steps.source, report.steps.count) == ("nvtx", 20)
        assert [phase.step for phase in of(report, "validation")] == [5, 11]
        for phase in of(report, "validation"):
            assert length(phase) == pytest.approx(5 * (300 + 20 * 50) * US, rel=0.02)
        lengths = [step.end_ns - step.start_ns for step in report.step_list]
        assert lengths == pytest.approx([(300 + 40 * 50 + 3 * 30) * US] * 20, rel=0.02)

    def test_a_search_for_algorithms_stays_in_its_step(self, tmp_path: Path) -> None:
        report = analyze(self.training(validates=False, searches=True), tmp_path)
        assert of(report, "validation") == []
        found = report.step_list[9]
        assert found.end_ns - found.start_ns > 80 * 50 * US


class TestCheckpoints:
    plan = replace(RANKS, checkpoint_after=(11,), checkpoint_ns=60 * MS)

    def test_the_time_that_training_stands_still_is_told(self, tmp_path: Path) -> None:
        recording, report = run(tmp_path, self.plan)
        told = finding_of(report, "checkpoint-stall")
        total = planted(recording, "checkpoint")
        assert told.evidence["total_ns"] == pytest.approx(total, rel=0.02)
        assert told.impact_ns == pytest.approx(total / steps_of(report), rel=0.02)
        assert (told.evidence["after_steps"], told.evidence["waiting_ranks"]) == ("11", "1-2")
        assert "async_save" in told.advice

    def test_one_that_takes_no_time_is_not_worth_a_word(self, tmp_path: Path) -> None:
        plan = replace(self.plan, kernel_ns=400_000, checkpoint_ns=100_000, ranks=1, allreduces=0)
        _, report = run(tmp_path, plan)
        assert [phase.step for phase in of(report, "checkpoint")] == [11]
        assert "checkpoint-stall" not in ids(report)


def test_the_edges_of_a_phase_are_where_its_gpu_runs_nothing(tmp_path: Path) -> None:
    run = Run()
    for step in range(20):
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
        if step == 9:
            run.wait(5 * MS)
            for _batch in range(10):
                run.input_copy()
                run.kernels(20, "gemm_forward")
            run.synchronize()
            run.wait(3 * MS)
    report = analyze(run, tmp_path)
    assert_training(report, 20)
    [phase] = of(report, "validation")
    assert phase.step == 9
    assert phase.before_ns == pytest.approx(5 * MS, abs=20 * US)
    assert phase.after_ns == pytest.approx(3 * MS, abs=20 * US)


class TestEpochs:
    plan = replace(PLAN, steps=40, epoch_steps=10, restart_ns=60 * MS, data_wait_ns=MS)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_loader_that_begins_anew_is_told_with_its_cost(
        self, tmp_path: Path, ranks: int
    ) -> None:
        plan = replace(self.plan, ranks=ranks, allreduces=ranks - 1)
        _, report = run(tmp_path, plan)
        found = of(report, "epoch")
        assert [(p.rank, p.step) for p in found] == [
            (rank, step) for rank in range(ranks) for step in (10, 20, 30)
        ]
        for phase in found:
            assert phase.cost_ns == pytest.approx(60 * MS, rel=0.02)
            assert length(phase) == pytest.approx(61 * MS, rel=0.05)
        slow = finding_of(report, "slow-steps")
        assert (slow.evidence["class"], slow.evidence["epoch_steps"]) == ("data_feeding", 10)
        assert "they come every 10 steps" in words_of(slow)
        assert "persistent_workers=True" in slow.advice

    def test_two_of_them_are_enough_after_validations(self, tmp_path: Path) -> None:
        plan = replace(self.plan, steps=30, validation_after=(9, 19), validation_batches=3)
        assert [p.step for p in of(run(tmp_path, plan)[1], "epoch")] == [10, 20]

    def test_a_restart_as_short_as_other_waits_is_none(self, tmp_path: Path) -> None:
        assert of(run(tmp_path, replace(self.plan, restart_ns=MS))[1], "epoch") == []

    @pytest.mark.parametrize("seed", range(few(3)))
    def test_a_loader_that_stutters_at_random_begins_no_epochs(
        self, tmp_path: Path, seed: int
    ) -> None:
        plan = replace(PLAN, steps=40, data_wait_ns=2 * MS, hiccup_rate=0.1, seed=seed)
        _, report = run(tmp_path, plan)
        assert of(report, "epoch") == []
        slow = [found for found in report.findings if found.id == "slow-steps"]
        assert all(found.evidence["epoch_steps"] is None for found in slow)

    @given(st.integers(3, 12), st.integers(0, 11), st.integers(3, 6), st.integers(0, 11), st.data())
    def test_long_waits_at_one_distance_are_epochs_wherever_the_run_is_cut(
        self, distance: int, before: int, epochs: int, after: int, data: st.DataObject
    ) -> None:
        first = min(before, distance - 1) + 1
        count = first + distance * (epochs - 1) + min(after, distance - 1) + 1
        waits = np.full(count, MS)
        begins = list(range(first, count, distance))[:epochs]
        waits[begins] = 50 * MS
        lengths = waits + 20 * MS
        assert find_epochs(waits, lengths) == begins
        other = data.draw(st.integers(1, count - 1).filter(lambda step: step not in begins))
        waits[other] = 50 * MS
        assert find_epochs(waits, waits + 20 * MS) == []


class TestWarmup:
    def test_what_the_first_steps_have_more_of_is_told(self, tmp_path: Path) -> None:
        recording, report = run(tmp_path, replace(PLAN, warmup_steps=2, ranks=2, allreduces=1))
        phases = of(report, "warmup")
        assert [phase.rank for phase in phases] == [0, 1]
        for phase in phases:
            names, calls = recording.names, recording.api[recording.api["rank"] == phase.rank]
            loads = calls[calls["name"] == names.index("cuLibraryLoadData")]
            loading = int((loads["end"] - loads["start"]).sum())
            assert phase.causes["module_loading"] == pytest.approx(loading, rel=0.01)
            assert phase.causes["allocation"] > 0
            assert phase.causes["autotuning"] > 0
            assert "compilation" not in phase.causes
            assert sum(phase.causes.values()) <= length(phase)
        told = finding_of(report, "warmup")
        assert "is allocating memory and" in words_of(told)
        assert "is trying algorithms" in words_of(told)
        assert told.evidence["module_loading_ns"] == phases[0].causes["module_loading"]

    def test_only_the_first_launch_of_a_kernel_loads_its_code(self, tmp_path: Path) -> None:
        """Others of the first steps wait as long, for a place in the queue of a GPU that is slow
        then.
        """

        class Bounded(Run):
            """A host that is at most 2 ms ahead of its GPU."""

            load_ns = 0

            def _call(self, start: int, end: int, name: str) -> None:
                if name == "cudaMemcpyAsync":
                    end += MS  # as of pageable memory
                if name == "cudaLaunchKernel":
                    ahead_ns = self.gpu_free.get(self.device, 0) - 2 * MS
                    end, self.load_ns = max(end + self.load_ns, ahead_ns), 0
                super()._call(start, end, name)

        run = Bounded()
        run.optimizer()
        for step in range(20):
            run.input_copy()
            if step == 0:
                run.load_ns = 7 * MS
            run.model()
            run.synchronize()
            run.kernels(20, "gemm_forward", MS if step == 0 else 50 * US)
            run.optimizer()
        report = analyze(run, tmp_path)
        assert report.steps.warmup_count == 1
        [phase] = of(report, "warmup")
        assert length(phase) > 25 * MS
        assert phase.causes["module_loading"] == pytest.approx(7 * MS, rel=0.01)

    def test_ranges_that_name_it_show_compilation(self, tmp_path: Path) -> None:
        run = Run()
        run.kernels(1, "gemm_forward_start")
        for step in range(20):
            if step == 0:
                start = run.now
                run.input_copy()
                run.wait(50 * MS)
                run.range(start, run.now, "CompiledFxGraph compile_inner")
            else:
                run.input_copy()
            run.model()
            run.optimizer()
            run.synchronize()
        report = analyze(run, tmp_path)
        assert report.steps.warmup_count == 1
        [phase] = of(report, "warmup")
        assert phase.causes["compilation"] == pytest.approx(50 * MS, rel=0.02)
        assert phase.cost_ns == pytest.approx(50 * MS, rel=0.05)
        assert "is compilation" in words_of(finding_of(report, "warmup"))


def test_warm_up_has_its_causes_in_a_part_of_the_trace_too() -> None:
    with unpacked("demo.sqlite.xz") as demo, gputrace.open(demo) as trace:
        whole = trace.analyze()
        part = trace.analyze(time="8.8s:9.0s")
    assert "is host work" in finding_of(whole, "warmup").message
    assert finding_of(part, "warmup").message == finding_of(whole, "warmup").message


@settings(max_examples=few(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.integers(1, 3),
    data_wait_ns=st.integers(0, 5_000_000),
    hiccup_rate=st.sampled_from([0.0, 0.05]),
    sync=st.booleans(),
    late=st.booleans(),
    seed=st.integers(0, 500),
)
def test_a_run_without_phases_has_none(
    tmp_path: Path,
    ranks: int,
    data_wait_ns: int,
    hiccup_rate: float,
    sync: bool,
    late: bool,
    seed: int,
) -> None:
    plan = replace(
        PLAN, ranks=ranks, allreduces=ranks - 1, data_wait_ns=data_wait_ns, seed=seed,
        hiccup_rate=hiccup_rate, sync_every_step=sync, late_host_rank=ranks - 1 if late else -1,
        late_host_ns=3 * MS,
    )  # fmt: skip
    _, report = run(tmp_path, plan)
    assert {phase.phase for phase in report.phases} <= {"warmup"}
    assert not PHASES & set(ids(report))
