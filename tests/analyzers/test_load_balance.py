"""Work that one GPU has and the others have not, and what it costs them."""

from __future__ import annotations

from pathlib import Path

import pytest

import gputrace
from gputrace.api import Report
from gputrace.model.results import Load
from tests.helpers.examples import few
from tests.helpers.handmade import MS, US, Run, analyze, ids
from tests.helpers.lookups import finding_of
from tests.helpers.recordings import packed, unpack
from tests.helpers.sentences import words_of
from tests.synthetic import Kind, Plan, Recording, simulate, write_nsys, write_nvml

PARALLEL = Plan(steps=12, warmup_steps=0, kernels_per_step=60, gpus_per_process=4, seed=3)
RANKS = Plan(steps=12, warmup_steps=0, kernels_per_step=60, ranks=4, allreduces=3, seed=3)


def run(tmp_path: Path, plan: Plan, *, nvml: bool = False) -> tuple[Recording, Report]:
    recording, path = simulate(plan), tmp_path / "run.sqlite"
    write_nsys(recording, path)
    if nvml:
        write_nvml(recording, path)
    with gputrace.open(path) as trace:
        return recording, trace.analyze()


def load(report: Report, gpu: int) -> Load:
    return next(load for load in report.balance if load.gpu == gpu)


class TestOneProcessWithSeveralGpus:
    def test_the_first_gpu_alone_copies_the_input_in_and_exchanges_with_all(
        self, tmp_path: Path
    ) -> None:
        recording, report = run(tmp_path, PARALLEL)
        copies = recording.of_kind(Kind.H2D)
        spent = int((copies["end"] - copies["start"]).sum())
        assert load(report, 0).h2d_ns == spent
        assert load(report, 0).extra_ns["h2d"] == spent
        assert [load(report, gpu).h2d_ns for gpu in (1, 2, 3)] == [0, 0, 0]
        # Of three equal shares of what it exchanges, two are beyond what any other GPU has.
        peer = load(report, 0).peer_ns
        assert load(report, 0).extra_ns["peer"] == pytest.approx(peer * 2 / 3, rel=0.01)

    def test_it_is_named_with_its_cost_and_a_better_way(self, tmp_path: Path) -> None:
        _, report = run(tmp_path, PARALLEL)
        found = finding_of(report, "gpu0-skew")
        assert (found.gpus, found.ranks) == ((0,), (0,))
        assert 0 < found.impact_ns <= found.evidence["extra_ns"]  # type: ignore[operator]
        assert "DistributedDataParallel" in found.advice
        assert "input copies" in words_of(found)

    def test_a_server_on_the_gpu_is_skewed_and_one_on_the_cpu_is_not(self, tmp_path: Path) -> None:
        plan = {**PARALLEL.__dict__, "exchange": "gpu-server", "seed": 7}
        _, report = run(tmp_path, Plan(**plan))
        assert report.findings[0].id == "gpu0-skew"
        assert load(report, 0).extra_ns["peer"] > 0.5 * load(report, 0).peer_ns
        (tmp_path / "run.sqlite").unlink()
        _, report = run(tmp_path, Plan(**{**plan, "exchange": "cpu-server"}))
        assert "gpu0-skew" not in ids(report)

    def test_memory_is_told_where_it_was_sampled(self, tmp_path: Path) -> None:
        _, report = run(tmp_path, PARALLEL, nvml=True)
        assert [row.memory_bytes for row in report.balance] == [40_000 << 20] * 4
        assert finding_of(report, "gpu0-skew").evidence["memory_bytes"] == 40_000 << 20


class TestSeveralRanks:
    @pytest.mark.parametrize("seed", range(few(2)))
    def test_equal_ranks_are_balanced(self, tmp_path: Path, seed: int) -> None:
        _, report = run(tmp_path, Plan(**{**RANKS.__dict__, "seed": seed, "jitter": 0.15}))
        assert "gpu0-skew" not in ids(report)
        assert [sum(row.extra_ns.values()) for row in report.balance] == [0, 0, 0, 0]

    def test_a_rank_with_slower_kernels_is_not_skewed(self, tmp_path: Path) -> None:
        plan = {**RANKS.__dict__, "slow_rank": 0, "slow_factor": 1.5}
        _, report = run(tmp_path, Plan(**plan))
        assert load(report, 0).kernel_ns > 1.4 * load(report, 1).kernel_ns
        assert "gpu0-skew" not in ids(report)

    def test_one_gpu_has_nothing_beside_it(self, tmp_path: Path) -> None:
        _, report = run(tmp_path, Plan(steps=12, kernels_per_step=60))
        assert report.balance == ()


def two_ranks(extra: str = "", *, feeding: bool = False, own: tuple[str, str] = ("", "")) -> Run:
    """Rank 0 runs ten kernels of 100 µs after the model; rank 1 meanwhile idles for 1 ms."""
    first = Run()
    second = Run(first.export, pid=200, device=1)
    for _ in range(20):
        for rank, run in enumerate((first, second)):
            if feeding and rank and extra:
                run.wait(1 * MS)
            run.input_copy()
            run.model()
            run.kernels(10, own[rank] or "head")
            if extra and not rank:
                for _ in range(10):
                    run.kernel(100 * US, extra)
            elif extra and not feeding:
                run.synchronize()
                run.wait(1 * MS)
            run.optimizer()
            run.synchronize()
    return first


class TestWhatCountsAsMore:
    def test_kernels_that_one_rank_runs_alone_cost_what_the_other_idles(
        self, tmp_path: Path
    ) -> None:
        report = analyze(two_ranks("void at::native::metrics"), tmp_path)
        row = load(report, 0)
        assert (row.own_kernels, row.own_kernel_ns) == (20 * 10, 20 * MS)
        assert row.extra_ns["kernels"] == 20 * MS
        # Rank 1 waits for its GPU besides, 7 µs a step, so that the two drift apart.
        assert finding_of(report, "gpu0-skew").impact_ns == pytest.approx(1 * MS, rel=0.1)
        assert "rank 0 does alone" in finding_of(report, "gpu0-skew").advice

    def test_more_launches_of_a_kernel_of_all_ranks_count_by_their_number(
        self, tmp_path: Path
    ) -> None:
        report = analyze(two_ranks("void at::native::head_0"), tmp_path)
        # Each rank runs head_0 twice a step for 50 µs; rank 0 ten times more for 100 µs.
        row = load(report, 0)
        assert row.own_kernels == 0
        assert row.extra_ns["kernels"] == pytest.approx(20 * 1.1 * MS * 10 / 12, rel=0.01)

    def test_a_gpu_that_waits_for_its_own_data_does_not_wait_for_the_other(
        self, tmp_path: Path
    ) -> None:
        """Its wait comes at another time than the extra kernels, or beside them."""
        report = analyze(two_ranks("void at::native::metrics", feeding=True), tmp_path)
        assert load(report, 0).extra_ns["kernels"] == 20 * MS
        assert load(report, 0).alone_ns < 2 * MS

    def test_a_kernel_in_place_of_another_is_not_more(self, tmp_path: Path) -> None:
        report = analyze(two_ranks(own=("winograd", "implicit_gemm")), tmp_path)
        assert load(report, 0).own_kernels == 20 * 10
        assert sum(load(report, 0).extra_ns.values()) == 0
        assert "gpu0-skew" not in ids(report)


class TestRealRecordings:
    def test_dataparallel_is_skewed_at_little_cost(self, tmp_path: Path) -> None:
        with gputrace.open(unpack("h200x4-dataparallel-7-9.sqlite", tmp_path)) as trace:
            report = trace.analyze(steps="0:3")
        assert report.findings[0].id == "autotune-repeated"
        found = finding_of(report, "gpu0-skew")
        assert (found.severity, found.gpus) == ("low", (0,))
        # 2.8 ms a step at 55 GB/s, and next to nothing on the others.
        assert found.evidence["h2d_ns"] == pytest.approx(2.8 * MS, rel=0.03)
        assert found.evidence["others_h2d_run_ns"] < 10 * US  # type: ignore[operator]
        assert found.evidence["share"] < 0.01  # type: ignore[operator]

    def test_a_starved_run_is_balanced(self, tmp_path: Path) -> None:
        with gputrace.open(unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)) as trace:
            report = trace.analyze()
        assert len(report.balance) == 4
        assert "gpu0-skew" not in ids(report)

    def test_over_a_whole_run_the_first_gpu_copies_400_times_as_long(self, tmp_path: Path) -> None:
        name = "h200x4-dataparallel.sqlite"
        if not packed(name).exists():
            pytest.skip(f"{name} is too large for the repository, and is not beside it")
        with gputrace.open(unpack(name, tmp_path)) as trace:
            report = trace.analyze()
        assert report.findings[0].id == "autotune-repeated"
        found = finding_of(report, "gpu0-skew")
        assert found.evidence["h2d_run_ns"] == pytest.approx(77 * MS, rel=0.01)
        assert found.evidence["others_h2d_run_ns"] == pytest.approx(0.2 * MS, rel=0.2)
        assert found.severity == "low"
