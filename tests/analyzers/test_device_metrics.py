"""Figures of the cards while their GPUs worked, and the findings in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gputrace
from gputrace.analyzers.device_metrics import add_use, peak_of
from gputrace.analyzers.host_state import measure_throughput
from gputrace.api import Report
from gputrace.model.kernels import Product
from gputrace.model.results import Finding, Throughput
from tests.helpers import command
from tests.helpers.sentences import words_of
from tests.synthetic import NvmlCard, Plan, simulate, write_nsys, write_nvml
from tests.synthetic.nvml import MIB

MS = 1_000_000
BALANCED = Plan(steps=12, ranks=4, allreduces=2)
CARDS_ALONE = {"clock-mismatch", "throttling", "pcie-degraded", "memory-imbalance"}


def analyzed(
    path: Path, plan: Plan, cards: Mapping[int, NvmlCard] | None = None, **options: Any
) -> Report:
    recording = simulate(plan)
    write_nsys(recording, path)
    write_nvml(recording, path, cards, **options)
    with gputrace.open(path) as trace:
        return trace.analyze()


def of_cards(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.id in CARDS_ALONE]


def only(report: Report) -> Finding:
    found = of_cards(report)
    assert len(found) == 1, found
    return found[0]


def busy(**values: float) -> NvmlCard:
    return NvmlCard(busy=values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.sqlite"


def counting(watts: int) -> Any:
    """A counter of energy that grows by so many watts on GPU 0, twice as many on GPU 1."""
    return lambda gpu, time, _row: {"energy": 10**6 + time * watts * (gpu + 1) // MS}


def unrecorded(database: sqlite3.Connection, off_ms: int) -> None:
    """Make a control stretch of so many milliseconds after the second sample."""
    (first,) = database.execute("SELECT min(timeNs) FROM GPUTRACE_NVML_SAMPLE").fetchone()
    start = first + 220 * MS
    end = start + off_ms * MS
    for kind in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME"):
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        database.execute(f"DELETE FROM {table} WHERE end > ? AND start < ?", (start, end))
    (pid,) = database.execute("SELECT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    database.execute("CREATE TABLE GPUTRACE_META (name, value)")
    for table, rows in (
        ("WINDOW", [(0, start, pid), (end, 2 * end, pid)]),
        ("CONTROL", [(start, end, pid)]),
    ):
        database.execute(f"CREATE TABLE GPUTRACE_{table} (start, end, globalPid)")
        database.executemany(f"INSERT INTO GPUTRACE_{table} VALUES (?, ?, ?)", rows)


class TestTheEnergy:
    def test_of_the_classes_is_the_counters(self, path: Path) -> None:
        report = analyzed(path, Plan(steps=12, ranks=2, allreduces=2), value=counting(500))
        assert [row.rank for row in report.energy] == [0, 1]
        for row, breakdown in zip(report.energy, report.breakdown, strict=True):
            assert sum(row.classes_mj.values()) == row.total_mj
            assert row.total_mj == pytest.approx(row.measured_ns / MS * 500 * (row.rank + 1), 1e-3)
            assert row.measured_ns > 0.8 * breakdown.total_ns
            share = breakdown.compute_ns / breakdown.total_ns
            assert row.classes_mj["compute"] == pytest.approx(share * row.total_mj, rel=0.1)
            assert row.communication_wait_mj is not None
            assert row.communication_wait_mj <= row.classes_mj["communication"]
            mean = breakdown.total_ns / breakdown.steps
            assert row.step_mj == pytest.approx(mean / MS * 500 * (row.rank + 1), rel=1e-3)

    def test_of_a_card_that_ranks_share_is_counted_once(self, path: Path) -> None:
        recording = simulate(Plan(steps=40, ranks=2, isolated=True, busy_rank=1, busy_share=0.5))
        write_nsys(recording, path)
        write_nvml(recording, path, value=counting(500))
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("DELETE FROM TARGET_INFO_CUDA_DEVICE")
        with gputrace.open(path) as trace:
            few, many = trace.analyze().energy
        assert (few.gpu, many.gpu) == (0, 0)
        longer = max(few.measured_ns, many.measured_ns)
        assert few.total_mj + many.total_mj == pytest.approx(longer / MS * 500, rel=0.1)
        assert few.total_mj < many.total_mj
        for row in (few, many):
            assert sum(row.classes_mj.values()) == row.total_mj

    def test_of_a_counter_that_falls_back_is_left_out_there(self, path: Path) -> None:
        def reset(_gpu: int, time: int, _row: object) -> Mapping[str, float]:
            return {"energy": time // MS % 100 * 1000}

        report = analyzed(path, Plan(steps=12, ranks=1), value=reset)
        (row,) = report.energy
        assert row.total_mj == pytest.approx(row.measured_ns / MS * 1000, rel=1e-3)

    @pytest.mark.parametrize(("off", "counted"), [(90, 110), (150, 0)])
    def test_of_what_was_not_recorded_between_two_readings_is_left_out(
        self, path: Path, off: int, counted: int
    ) -> None:
        """Of 200 ms: all of it where that is more than half."""
        recording = simulate(Plan(steps=70, ranks=1))
        write_nsys(recording, path)
        write_nvml(recording, path, every_ns=200 * MS, value=counting(500))
        with closing(sqlite3.connect(path)) as database, database:
            unrecorded(database, off)
        with gputrace.open(path) as trace:
            rows = trace.analyze().energy
        assert len(rows) == bool(counted)
        for row in rows:
            assert row.measured_ns == pytest.approx(counted * MS, rel=0.01)
            assert row.total_mj == pytest.approx(row.measured_ns / MS * 500, rel=1e-3)
            assert sum(row.classes_mj.values()) == row.total_mj

    def test_is_unknown_without_a_counter(self, path: Path) -> None:
        assert analyzed(path, BALANCED).energy == ()

    def test_is_in_the_report_and_the_json(self, path: Path) -> None:
        analyzed(path, Plan(steps=12, ranks=2), value=counting(500))
        text = command.gputrace("analyze", path).out
        assert "Energy by class (NVML's counter)" in text


@pytest.mark.parametrize(
    ("card", "precision", "tera"),
    [
        ("NVIDIA GB300", "fp4", 15_000),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA A10G", "fp16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_the_peak_of_a_card_is_its_data_sheets(
    card: str, precision: str, tera: float | None
) -> None:
    assert peak_of(card, precision) == (None if tera is None else tera * 1e12)


def test_flops_of_a_step_are_set_beside_the_peak_of_the_precision_that_is_multiplied() -> None:
    lane: Any = SimpleNamespace(gpu=SimpleNamespace(rank=0, name="NVIDIA H200"))
    kernels: Any = SimpleNamespace(products=[Product("yes", "bf16", 10, 10**9, 0.5)])
    rows = [Throughput(0, None, None, 1e14, None, None, 4.945e14)]
    (row,) = add_use(rows, [lane], kernels)
    assert (row.precision, row.peak_flop_per_s, row.mfu) == ("bf16", 989e12, 0.5)
    (row,) = add_use(rows, [lane, lane], kernels)
    assert row.mfu == 0.25, "a rank with two cards"


def test_rates_are_those_of_the_program_without_the_recorder() -> None:
    steps: Any = [
        SimpleNamespace(gpu=0, rank=0, step=n, start_ns=n * MS, end_ns=(n + 1) * MS)
        for n in range(4)
    ]
    work = {7: {"tokens": 100.0, "flop": 1e6}}
    (row,) = measure_throughput(work, {}, {0: 7}, steps, unrecorded=0.8)
    assert row.tokens_per_step == 100
    assert row.tokens_per_s == pytest.approx(100 * 1000 / 0.8)
    assert row.flop_per_s == pytest.approx(1e6 * 1000 / 0.8)


class TestTheSteadyStepsOfABusyGpu:
    def test_tell_the_clocks_the_power_and_the_memory(self, path: Path) -> None:
        report = analyzed(path, BALANCED, {2: busy(smClock=1500, power=650_000)})
        card = report.cards[2]
        assert (card.gpu, card.rank, card.name) == (2, 2, "NVIDIA H200")
        assert (card.sm_clock_mhz, card.sm_clock_max_mhz, card.sm_below_max) == (1500, 1980, 1.0)
        assert (card.memory_clock_mhz, card.memory_below_max) == (3201, 0.0)
        assert (card.power_mw, card.power_limit_mw, card.temperature_c) == (650_000, 700_000, 60)
        assert card.memory_used_bytes == 40_000 * MIB

    def test_are_all_that_counts(self, path: Path) -> None:
        """Idle cards lower clocks and links, which says nothing of the run."""
        idle = {"smClock": 345, "memoryClock": 400, "pcieGen": 1, "pcieWidth": 1}
        report = analyzed(path, BALANCED, {0: NvmlCard(idle=idle)}, around_ns=2_000 * MS)
        assert report.cards[0].sm_clock_mhz == 1980
        assert report.cards[0].pcie_gen == 5
        assert not of_cards(report)

    def test_leave_out_samples_of_a_gpu_that_waits_in_them(self, path: Path) -> None:
        """The driver's own word for idle counts too."""

        def idles(gpu: int, time: int, _row: object) -> Mapping[str, float]:
            lowered = gpu == 1 and time // (2 * MS) % 2
            return {"smClock": 345, "clocksEventReasons": 1} if lowered else {}

        report = analyzed(path, BALANCED, value=idles)
        assert report.cards[1].sm_clock_mhz == 1980
        assert report.cards[1].samples < 0.6 * report.cards[0].samples


class TestABalancedRun:
    @pytest.mark.parametrize("ranks", [1, 2, 8])
    def test_has_no_finding_about_its_cards(self, path: Path, ranks: int) -> None:
        assert not of_cards(analyzed(path, Plan(steps=12, ranks=ranks, allreduces=ranks > 1)))

    def test_nor_with_clocks_that_scatter_as_those_of_equal_cards_do(self, path: Path) -> None:
        cards = {gpu: busy(smClock=1980 - 15 * gpu, temperature=55 + 5 * gpu) for gpu in range(4)}
        assert not of_cards(analyzed(path, BALANCED, cards))

    def test_nor_with_a_lower_clock_that_costs_nothing(self, path: Path) -> None:
        """Kernels are believed: a run that is limited by memory need not care."""
        assert not of_cards(analyzed(path, BALANCED, {3: busy(smClock=1700)}))

    def test_nor_at_a_power_cap_that_hardly_lowers_the_clocks(self, path: Path) -> None:
        capped = {gpu: busy(smClock=1935, clocksEventReasons=4) for gpu in range(4)}
        assert not of_cards(analyzed(path, BALANCED, capped))


class TestClockMismatch:
    def test_is_a_lower_clock_with_kernels_that_take_longer(self, path: Path) -> None:
        slow = Plan(steps=12, ranks=4, allreduces=2, slow_rank=2, slow_factor=1.3)
        report = analyzed(path, slow, {2: busy(smClock=1523)})
        finding = only(report)
        assert (finding.id, finding.gpus, finding.ranks) == ("clock-mismatch", (2,), (2,))
        compute = report.breakdown[2].compute_ns or 0
        expected = compute / report.breakdown[2].steps * (1 - 1 / 1.3)
        assert finding.impact_ns == pytest.approx(expected, rel=0.1)
        assert finding.evidence["clock_mhz"] == 1523
        assert finding.evidence["kernel_ratio"] == pytest.approx(1.3, rel=0.02)

    def test_is_none_where_a_rank_is_slower_at_the_same_clocks(self, path: Path) -> None:
        slow = Plan(steps=12, ranks=4, allreduces=2, slow_rank=2, slow_factor=1.3)
        report = analyzed(path, slow)
        assert not of_cards(report)
        assert "its clock is as high as the others'" in words_of(report.findings[0])
        assert report.findings[0].advice.startswith("share the work equally")

    def test_of_three_of_six_cards_is_as_it_was_published(self, path: Path) -> None:
        """GTX 1070s whose memory ran at 1.683 instead of 1.7715 GHz trained at 85 to 99 %."""
        factors = {1: 1 / 0.8465, 3: 1 / 0.95, 4: 1 / 0.9883}
        plan = Plan(steps=12, ranks=6, allreduces=2, slow_ranks=tuple(factors.items()))
        recording = simulate(plan)
        write_nsys(recording, path)
        card: dict[str, str | int] = {"name": "GeForce GTX 1070", "smClockMax": 1911}
        cards = {
            gpu: NvmlCard(
                card, {"memoryClock": 1683 if gpu in factors else 1771.5, "smClock": 1683}
            )
            for gpu in range(6)
        }
        write_nvml(recording, path, cards)
        with gputrace.open(path) as trace:
            report = trace.analyze()
        finding = only(report)
        assert (finding.id, finding.gpus) == ("clock-mismatch", (1, 3, 4))
        assert (finding.evidence["clock"], finding.evidence["clock_mhz"]) == ("memory", 1683)
        assert finding.evidence["others_mhz"] == 1771.5
        assert finding.evidence["kernel_ratio"] == pytest.approx(1 / 0.8465, rel=0.01)


class TestThrottling:
    def test_is_told_by_the_bits_with_its_reason_and_share(self, path: Path) -> None:
        hot = busy(smClock=1200, clocksEventReasons=0x20, temperature=91)
        finding = only(analyzed(path, BALANCED, {1: hot}))
        assert (finding.id, finding.severity, finding.gpus) == ("throttling", "medium", (1,))
        assert (finding.evidence["reason"], finding.evidence["share"]) == ("software thermal", 1.0)
        assert "91 °C" in words_of(finding)

    def test_is_told_by_the_counters_where_no_sample_shows_it(self, path: Path) -> None:
        """A quarter of the time, in stretches that fall between the samples."""

        def counted(gpu: int, time: int, _row: object) -> Mapping[str, float]:
            return {"powerCapTime": time // 4, "smClock": 1800} if gpu == 0 else {}

        report = analyzed(path, BALANCED, value=counted)
        assert report.cards[0].throttled == {"power cap": pytest.approx(0.25, abs=0.001)}
        assert only(report).evidence["reason"] == "power cap"

    def test_that_makes_kernels_slower_has_its_cost(self, path: Path) -> None:
        slow = Plan(steps=12, ranks=4, allreduces=2, slow_rank=1, slow_factor=1.5)
        report = analyzed(path, slow, {1: busy(smClock=1320, clocksEventReasons=0x40)})
        found = {finding.id: finding for finding in of_cards(report)}
        assert found.keys() == {"clock-mismatch", "throttling"}
        assert found["throttling"].impact_ns == found["clock-mismatch"].impact_ns > 0


class TestPcieDegraded:
    def test_is_a_busy_link_below_what_card_and_slot_can(self, path: Path) -> None:
        finding = only(analyzed(path, BALANCED, {3: busy(pcieGen=3, pcieWidth=8)}))
        assert (finding.id, finding.gpus) == ("pcie-degraded", (3,))
        assert "generation 3 with 8 lanes" in words_of(finding)
        assert (finding.evidence["gb_s"], finding.evidence["best_gb_s"]) == (7.9, 63.0)

    def test_costs_what_exposed_copies_take_longer(self, path: Path) -> None:
        """A link of half the width: half of the 4 ms that a step's copy takes."""
        plan = Plan(steps=12, ranks=2, h2d_ns=4 * MS)
        report = analyzed(path, plan, {0: busy(pcieWidth=8)})
        finding = next(f for f in report.findings if f.id == "pcie-degraded")
        assert finding.impact_ns == pytest.approx(2 * MS, rel=0.1)

    def test_counts_a_slot_that_is_slower_than_those_of_the_others(self, path: Path) -> None:
        card = NvmlCard({"pcieWidthMax": 4}, {"pcieWidth": 4})
        assert only(analyzed(path, BALANCED, {1: card})).gpus == (1,)


class TestMemoryImbalance:
    def test_is_a_card_with_far_more_in_it(self, path: Path) -> None:
        finding = only(analyzed(path, BALANCED, {0: busy(memoryUsed=60_000 * MIB)}))
        assert (finding.id, finding.severity, finding.gpus) == ("memory-imbalance", "low", (0,))
        assert finding.impact_ns == 0
        assert finding.advice.startswith("give this rank no more of the work than the others have")

    def test_weighs_more_where_that_card_is_full(self, path: Path) -> None:
        finding = only(analyzed(path, BALANCED, {0: busy(memoryUsed=140_000 * MIB)}))
        assert finding.severity == "medium"

    def test_is_none_where_little_is_used_at_all(self, path: Path) -> None:
        cards = {gpu: busy(memoryUsed=(900 if gpu else 1_800) * MIB) for gpu in range(4)}
        assert not of_cards(analyzed(path, BALANCED, cards))


def test_the_text_has_a_line_for_each_card(path: Path) -> None:
    recording = simulate(BALANCED)
    write_nsys(recording, path)
    write_nvml(recording, path, {1: busy(power=650_000)})
    ran = command.gputrace("analyze", path)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("The cards in these steps"))
    assert lines[at + 3].split() == [
        "gpu", "1", "39.1/140", "GiB", "650/700", "W", "1,980/1,980", "MHz",
        "3,201/3,201", "MHz", "60", "°C",
    ]  # fmt: skip


def test_a_trace_without_samples_has_no_cards(path: Path) -> None:
    write_nsys(simulate(BALANCED), path)
    with gputrace.open(path) as trace:
        report = trace.analyze()
    assert report.cards == ()
    assert "The cards" not in str(report)
