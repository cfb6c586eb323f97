"""Trainings of several processes and GPUs, of searches for algorithms, and parts of traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputrace.model.time_class import CLASSES
from tests.helpers.exports import Export
from tests.helpers.handmade import MS, STEP, US, Run, analyze, assert_training, ids, share, train


class TestSeveralProcessesAndGpus:
    def test_another_training_does_not_make_steps_slow(self, tmp_path: Path) -> None:
        short, long = Run(), Run(pid=200, device=1)
        long.export = short.export
        train(short, 40, wait=3 * MS)
        train(long, 8, kernels=400)
        report = analyze(short, tmp_path)
        assert [row.steps for row in report.breakdown] == [40, 8]
        assert "slow-steps" not in ids(report)
        assert share(report, "data_feeding", 0) == pytest.approx(2.9 / (STEP / MS + 2.9), abs=0.01)
        assert share(report, "data_feeding", 1) < 0.01

    def test_a_process_with_another_job_does_not_dilute_the_mean(self, tmp_path: Path) -> None:
        trainer, other = Run(), Run(pid=200, device=1)
        other.export = trainer.export
        train(trainer, 40)
        numbers = np.random.default_rng(1)
        for _ in range(8):
            other.wait(5 * MS)
            for _request in range(30):
                other.kernel(int(numbers.integers(10, 50)) * US, f"infer_{numbers.integers(60)}")
        report = analyze(trainer, tmp_path)
        assert_training(report, 40)
        assert [row.steps for row in report.breakdown] == [40, 0]
        compute = next(finding for finding in report.findings if finding.id == "compute-bound")
        assert compute.impact_ns == pytest.approx(40 * 50 * US + 90 * US, rel=0.01)
        assert compute.gpus == (0,)
        assert "launch-bound" not in ids(report)

    def test_a_gpu_that_a_process_only_touches_is_not_the_verdict(self, tmp_path: Path) -> None:
        run = Run()
        run.device = 1
        run.memset()
        run.device = 0
        train(run)
        run.device = 1
        run.memset()
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert [row.device for row in report.breakdown] == [0, 1]
        assert report.breakdown[1].idle_ns > 0.99 * report.breakdown[1].total_ns
        assert "compute-bound" in ids(report)
        assert not {"launch-bound", "idle-unexplained"} & set(ids(report))
        assert all(finding.gpus == (0,) for finding in report.findings)

    def test_classes_sum_to_the_step_on_a_gpu_that_ends_before_it(self, tmp_path: Path) -> None:
        """One process feeds two GPUs; the second one's last step is shorter than the rank's."""
        run = Run()
        for _ in range(20):
            run.device = 0
            run.input_copy()
            run.model()
            run.device = 1
            run.kernels(10, "gemm")
            run.device = 0
            run.optimizer()
            run.synchronize()
        report = analyze(run, tmp_path)
        assert_training(report, 20)
        assert [row.device for row in report.breakdown] == [0, 1]
        for row in report.breakdown:
            assert sum(row.of(name) for name in CLASSES) == row.total_ns
        for step in report.step_list:
            parts = [getattr(step, f"{name}_ns") for name in CLASSES]
            assert sum(parts) == step.end_ns - step.start_ns


def convolutions(
    ranks: int = 1, allocation: str = "cudaMalloc", name: str = "conv", only: int | None = None
) -> Export:
    """Every kernel preceded by an allocation and followed by a wait, in one step or in all."""
    export = Export()
    for rank in range(ranks):
        run = Run(export, pid=100 + rank, device=rank)
        for step in range(12):
            run.input_copy()
            for _ in range(30):
                if only in (None, step):
                    run.allocate(200 * US, allocation)
                run.kernels(1, name)
                if only in (None, step):
                    run.synchronize()
            run.optimizer()
    return export


class TestSearchingAlgorithms:
    @pytest.mark.parametrize("ranks", [1, 4])
    def test_a_search_in_every_step_is_the_first_thing_told(
        self, ranks: int, tmp_path: Path
    ) -> None:
        report = analyze(convolutions(ranks), tmp_path)
        assert_training(report, 12)
        # What it allocates is charged to the search.
        assert ids(report)[0] == "autotune-repeated"
        assert "alloc-stall" not in ids(report)
        assert report.findings[0].evidence["allocations"] == 30
        assert report.findings[0].evidence["synchronisations"] == 30
        # One of 30 allocations of 200 µs hides under the input copy; a turn takes some 265 µs.
        for row in range(ranks):
            assert share(report, "alloc", row) == pytest.approx(5.8 / 8, abs=0.01)

    def test_a_gpu_that_is_only_touched_does_not_hide_a_search(self, tmp_path: Path) -> None:
        run = Run(convolutions(), pid=100, device=1, thread=101)
        run.memset()
        run.wait(97 * MS)
        run.memset()
        report = analyze(run, tmp_path)
        assert len(report.breakdown) == 2
        assert ids(report)[0] == "autotune-repeated"
        assert report.findings[0].gpus == (0,)
        assert report.findings[0].impact_ns == pytest.approx(6.1 * MS, rel=0.02)

    def test_allocations_in_stream_order_are_no_search(self, tmp_path: Path) -> None:
        report = analyze(convolutions(allocation="cudaMallocAsync_v11020"), tmp_path)
        assert_training(report, 12)
        assert "autotune-repeated" not in ids(report)

    @pytest.mark.parametrize("name", ["convert_gemm", "cudnn_generated_sdpa_flash_fprop"])
    def test_neither_kernels_that_convert_nor_attention_are_convolutions(
        self, name: str, tmp_path: Path
    ) -> None:
        report = analyze(convolutions(name=name), tmp_path)
        assert_training(report, 12)
        assert ids(report)[0] == "alloc-stall"
        assert "autotune-repeated" not in ids(report)

    def test_a_search_in_the_first_step_alone_is_warmup(self, tmp_path: Path) -> None:
        report = analyze(convolutions(only=0), tmp_path)
        assert_training(report, 12)
        assert report.steps.warmup_count == 1
        assert not {"autotune-repeated", "alloc-stall"} & set(ids(report))


class TestAPartOfTheTrace:
    def test_a_window_inside_one_step_is_said_to_hold_no_whole_step(self, tmp_path: Path) -> None:
        run = Run()
        train(run)
        report = analyze(run, tmp_path, time=(10 * MS, 11 * MS))
        assert (report.steps.count, report.steps.steady_count) == (20, 0)
        assert (report.breakdown[0].steps, report.breakdown[0].total_ns) == (0, 1 * MS)
        assert "no whole step in it" in report.render("text")

    def test_pageable_copies_count_only_inside_the_window(self, tmp_path: Path) -> None:
        run = Run()
        for step in range(20):
            run.input_copy(length=600 * US if step < 5 else 300 * US, pageable=step < 5)
            run.model()
            run.optimizer()
            run.synchronize()
        whole = analyze(run, tmp_path)
        assert_training(whole, 20)
        assert [f.evidence["copies"] for f in whole.findings if f.id == "h2d-pageable"] == [5]
        begin, end = whole.step_list[2].start_ns, whole.step_list[10].end_ns
        early = analyze(run, tmp_path, time=(begin, end))
        assert [f.evidence["copies"] for f in early.findings if f.id == "h2d-pageable"] == [3]
        late = analyze(run, tmp_path, time=(whole.step_list[6].start_ns, end))
        assert "h2d-pageable" not in ids(late)
