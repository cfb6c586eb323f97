"""Training loops of many shapes, each with what is true of it: its steps, and where time goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.exports import STEP as MARKS
from tests.helpers.exports import Export, global_id
from tests.helpers.handmade import (
    MS,
    MULTI_TENSOR,
    STEP,
    US,
    Run,
    analyze,
    assert_steps_of,
    assert_training,
    ids,
    share,
    train,
)


class TestWhatEndsAStep:
    def test_foreach_copies_of_sharded_layers_are_no_optimizer(self, tmp_path: Path) -> None:
        """FSDP2 gathers and scatters every layer with kernels of the optimizers' template."""
        run = Run()
        copy = f"{MULTI_TENSOR}<TensorListMetadata<2>, CopyFunctor<bf16>>"
        for _ in range(12):
            run.input_copy(65_536, 20 * US)
            for way in ("forward", "backward"):
                for _layer in range(12):
                    run.kernel(10 * US, copy)
                    run.kernel(200 * US, "ncclDevKernel_AllGather_RING_LL")
                    run.kernels(30, f"gemm_{way}", 30 * US)
                    if way == "backward":
                        run.kernel(200 * US, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL")
            run.optimizer(20)
            run.synchronize()
        report = analyze(run, tmp_path)
        computing = 24 * (10 + 30 * 30) * US + 20 * 30 * US
        communicating = 36 * 200 * US
        assert_training(report, 12)
        assert_steps_of(report, 20 * US + computing + communicating)
        assert ids(report)[0] == "communication-exposed"
        total = 20 * US + computing + communicating
        assert share(report, "communication") == pytest.approx(communicating / total, abs=0.005)

    def test_two_optimizers_in_turn_make_one_step(self, tmp_path: Path) -> None:
        run = Run()
        for _ in range(20):
            run.input_copy()
            run.model(40, "discriminator")
            run.optimizer()
            run.model(60, "generator")
            run.optimizer()
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert_steps_of(report, 300 * US + 100 * 50 * US + 6 * 30 * US)
        assert "compute-bound" in ids(report)

    def test_gradients_set_to_zero_before_the_backward_pass_end_no_step(
        self, tmp_path: Path
    ) -> None:
        run = Run()
        for _ in range(20):
            run.input_copy()
            run.kernels(20, "gemm_forward")
            for _tensor in range(3):
                run.kernel(5 * US, f"{MULTI_TENSOR}<TensorListMetadata<1>, ZeroFunctor<float>>")
            run.kernels(25, "gemm_backward")
            run.optimizer(6)
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert_steps_of(report, 300 * US + 45 * 50 * US + 3 * 5 * US + 6 * 30 * US)

    def test_norms_before_and_averages_after_the_optimizer_belong_to_its_step(
        self, tmp_path: Path
    ) -> None:
        run = Run()
        for _ in range(20):
            run.input_copy()
            run.model()
            for _tensor in range(3):
                run.kernel(3 * US, f"{MULTI_TENSOR}<LpNormFunctor>")
            run.kernels(12, "reduce_norm", 3 * US)
            run.optimizer(4)
            run.kernels(12, "copy", 3 * US)
            for _tensor in range(3):
                run.kernel(3 * US, f"{MULTI_TENSOR}<LerpFunctor>")
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert_steps_of(report, 300 * US + 40 * 50 * US + 30 * 3 * US + 4 * 30 * US)
        assert report.phases == ()

    def test_whole_graphs_are_the_steps_after_a_few_eager_ones(self, tmp_path: Path) -> None:
        run = Run()
        train(run, 3)
        for _ in range(30):
            run.wait(1 * MS)
            run.input_copy(1_000_000, 200 * US)
            run.graph(3 * MS)
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 30)
        assert report.steps.mean_ns == pytest.approx(4.2 * MS, rel=0.01)
        assert ids(report)[0] == "data-feeding"
        assert "graph-opaque" in ids(report)
        assert share(report, "data_feeding") == pytest.approx(1 / 4.2, abs=0.01)

    @pytest.mark.parametrize("marked", [False, True])
    def test_one_graph_is_the_step_though_nothing_is_copied_or_read(
        self, tmp_path: Path, marked: bool
    ) -> None:
        """The steps that led to its capture are none, whether or not their optimizer was marked."""
        run = Run()
        values = {"globalTid": global_id(100), "nameId": run.export.string("SGD.step")}
        for step in range(4):
            begin = run.now
            train(run, 1)
            if marked:
                run.export.add(MARKS, start=begin, end=run.now, step=step, **values)
        for _ in range(30):
            run.copy(20 * US, to_host=False)
            run.graph(3 * MS)
        report = analyze(run, tmp_path)
        assert_training(report, 30)
        assert report.steps.mean_ns == pytest.approx(3.02 * MS, rel=0.01)
        assert ids(report)[0] == "compute-bound"

    def test_a_search_for_algorithms_before_them_hides_no_graphs(self, tmp_path: Path) -> None:
        """As of XLA: the kernels that it tries take longer than all launches of the graph."""
        run = Run()
        for tried in range(200):
            run.kernel(MS, f"gemm_fusion_dot_{tried % 40}")
        for _ in range(30):
            run.graph(3 * MS)
            run.copy(2 * US, to_host=True)
        steps = analyze(run, tmp_path).steps
        assert (steps.kind, steps.count) == ("iterations", 30)
        assert steps.mean_ns == pytest.approx(3 * MS, rel=0.01)

    def test_one_step_is_one_pass(self, tmp_path: Path) -> None:
        run = Run()
        train(run, 1)
        report = analyze(run, tmp_path)
        assert (report.steps.kind, report.steps.count) == ("pass", 1)
        assert "one training step" in report.steps.reason
        assert (report.breakdown[0].steps, report.breakdown[0].total_ns) == (1, STEP)

    def test_an_empty_step_range_does_not_cost_the_others(self, tmp_path: Path) -> None:
        run = Run()
        names = np.random.default_rng(1)
        for step in range(20):
            start = run.now
            for _ in range(20 + step % 3):  # nothing repeats but the ranges
                run.kernel(50 * US, f"kernel_{names.integers(400)}")
            run.synchronize()
            run.range(start, run.now, f"iteration {step}")
        run.range(run.now + 10, run.now + 1_000, "iteration 20")
        report = analyze(run, tmp_path)
        assert (report.steps.source, report.steps.count) == ("nvtx", 20)


class TestAfterTheOptimizer:
    def test_validations_are_no_steps_though_the_optimizer_is_one_kernel(
        self, tmp_path: Path
    ) -> None:
        run = Run()
        for step in range(20):
            run.input_copy()
            run.model()
            run.optimizer(1)
            run.synchronize()
            if step in (5, 11):
                for _batch in range(10):
                    run.input_copy()
                    run.kernels(20, "gemm_forward")
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert_steps_of(report, 300 * US + 40 * 50 * US + 30 * US)
        assert [phase.phase for phase in report.phases] == ["validation"] * 2
        for phase, step in zip(report.phases, (5, 11), strict=True):
            before, after = report.step_list[step : step + 2]
            assert before.end_ns <= phase.start_ns < phase.end_ns <= after.start_ns
            assert phase.end_ns - phase.start_ns == pytest.approx(13 * MS, rel=0.01)

    @pytest.mark.parametrize(
        "before", [lambda step: 40 if step in (9, 15) else 25, lambda step: 37 * step % 70]
    )
    def test_a_batch_that_comes_amid_the_kernels_is_no_validation(
        self, before: Callable[[int], int], tmp_path: Path
    ) -> None:
        """A prefetched one comes now after few kernels of a step, now after many."""
        run = Run()
        for step in range(24):
            run.kernels(before(step), "gemm_forward")
            run.input_copy()
            run.kernels(100 - before(step), "gemm_forward")
            run.optimizer()
            run.item()
        report = analyze(run, tmp_path)
        assert_training(report, 24)
        assert not {phase.phase for phase in report.phases} - {"warmup"}

    @pytest.mark.parametrize("pause", [0, 300 * US])
    def test_metrics_in_every_step_are_no_validation(self, pause: int, tmp_path: Path) -> None:
        run = Run()
        for _ in range(30):
            run.input_copy()
            run.model()
            run.optimizer()
            for _metric in range(5):
                run.item()
                run.wait(pause)
        report = analyze(run, tmp_path)
        assert_training(report, 30)
        assert report.phases == ()
        assert report.step_list[-1].end_ns - report.step_list[0].start_ns > 0.98 * report.span_ns
        # The fifth pause comes right before the input copy: that may be a wait for data.
        length = STEP + 5 * 22 * US + 5 * pause
        assert report.steps.mean_ns == pytest.approx(length, rel=0.04)
        assert share(report, "launch") == pytest.approx(4 * pause / length, abs=0.02)

    def test_a_pause_of_the_host_with_small_kernels_after_is_its_other_work(
        self, tmp_path: Path
    ) -> None:
        run = Run()
        for _ in range(30):
            run.input_copy()
            run.model()
            run.optimizer()
            run.synchronize()
            run.wait(4 * MS)
            run.kernels(4, "logging")
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 30)
        assert report.phases == ()
        assert ids(report)[0] == "host-work"
        length = STEP + 4 * MS + 4 * 50 * US
        assert share(report, "launch") == pytest.approx(4 * MS / length, abs=0.02)
        assert share(report, "data_feeding") < 0.01


class TestWaitingForData:
    def test_inputs_of_varying_size_prove_it_too(self, tmp_path: Path) -> None:
        run = Run()
        sizes = np.random.default_rng(1)
        for _ in range(20):
            run.wait(2 * MS)
            run.input_copy(int(sizes.integers(20_000, 60_000)))
            run.model()
            run.optimizer()
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert ids(report)[0] == "data-feeding"
        # The first step has no gap before it.
        assert share(report, "data_feeding") == pytest.approx(1.9 / (STEP / MS + 1.9), abs=0.01)
        assert all("loader" not in gap.evidence for gap in report.gaps.largest), "none was seen"

    def test_a_prefetching_thread_that_is_too_slow_starves_the_gpu(self, tmp_path: Path) -> None:
        report = analyze(prefetched(load=4 * MS), tmp_path)
        assert_training(report, 20)
        assert ids(report)[0] == "data-feeding"
        # A step lasts as long as loading and copying; the model and optimizer fill 2.09 ms of it.
        assert report.steps.mean_ns == pytest.approx(4.3 * MS, rel=0.03)
        assert share(report, "data_feeding") == pytest.approx(1 - 2.39 / 4.3, abs=0.03)

    def test_a_prefetching_thread_that_is_quick_enough_costs_nothing(self, tmp_path: Path) -> None:
        report = analyze(prefetched(load=500 * US), tmp_path)
        assert_training(report, 20)
        assert ids(report) == ["compute-bound"]
        assert share(report, "data_feeding") < 0.01

    def test_how_long_a_prefetching_thread_loads_is_not_known(self, tmp_path: Path) -> None:
        """It may as well wait until there is room for a batch."""
        report = analyze(prefetched(load=500 * US), tmp_path)
        assert report.breakdown[0].host_data_ns is None
        assert "in the data loader" not in report.render()


def prefetched(load: int) -> Export:
    """A thread that loads and copies batches, at most three ahead of the one that trains."""
    trainer = Run()
    loader = Run(trainer.export, thread=150, device=0)
    done: list[int] = []
    for step in range(20):
        loader.now = max(loader.now, done[step - 3] if step > 2 else 0)
        loader.wait(load)
        loader.gpu_free[0] = 0  # a stream of its own: the copy runs beside the kernels
        arrived = loader.input_copy()
        loader.synchronize()
        trainer.now = max(trainer.now, arrived)
        trainer.model()
        trainer.optimizer()
        trainer.synchronize()
        done.append(trainer.now)
    return trainer.export
