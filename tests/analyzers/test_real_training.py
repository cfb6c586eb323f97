"""Real training runs that timed themselves: steps, causes and findings against their own clocks.

The recordings are too large for the repository; without them their tests are skipped. Parts of
them are here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from gputrace.api import Report
from tests.helpers.lookups import analyze
from tests.helpers.recordings import DATA, packed, unpack

Large = Callable[[str], Path]
Recording = Callable[[str], Path]
STARVED_BEGINS_AT: Final = 9
"""The first whole step of the part that is here, as the loop counted."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    folder = tmp_path_factory.mktemp("large")

    def find(name: str) -> Path:
        if not packed(f"{name}.sqlite").exists():
            pytest.skip(f"{name} is too large for the repository, and is not beside it")
        path = folder / f"{name}.sqlite"
        return path if path.exists() else unpack(path.name, folder)

    return find


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Seven steps of h200x4-ddp-starved."""
    folder = tmp_path_factory.mktemp("starved")
    return analyze(unpack("h200x4-ddp-starved-9-15.sqlite", folder))


def true_intervals(name: str, rank: int) -> NDArray[np.int64]:
    """Nanoseconds from each step to the next, by the loop's own clock."""
    rows = json.loads((DATA / "truth" / f"{name}.r{rank}.json").read_text())["rows"]
    return np.diff([row["t0"] for row in rows])


def found_intervals(report: Report, rank: int) -> NDArray[np.int64]:
    first = next(step.gpu for step in report.step_list if step.rank == rank)
    return np.diff([s.start_ns for s in report.step_list if (s.rank, s.gpu) == (rank, first)])


@pytest.mark.parametrize(
    ("name", "ranks", "steps"),
    [
        ("h200x4-ddp-starved", 4, 25),
        ("h200x2-ddp-validation", 2, 30),
        ("h200x4-dataparallel", 1, 25),
    ],
)
def test_every_interval_between_steps_is_the_loops_own_within_1_percent(
    large: Large, name: str, ranks: int, steps: int
) -> None:
    report = analyze(large(name))
    assert (report.steps.kind, report.steps.count) == ("training", steps)
    for rank in range(ranks):
        true, found = true_intervals(name, rank), found_intervals(report, rank)
        assert len(found) == len(true)
        assert np.abs(found - true)[1:] / true[1:] == pytest.approx(0, abs=0.01)


def test_a_starved_run_waits_for_data_two_fifths_of_its_time(large: Large) -> None:
    report = analyze(large("h200x4-ddp-starved"), steps="8:25")
    assert report.steps.mean_ns == pytest.approx(62.8e6, rel=0.02)
    assert {row.gpu for row in report.breakdown} == {0, 1, 2, 3}
    for row in report.breakdown:
        assert row.steps == 17
        assert row.share("data_feeding") == pytest.approx(0.40, abs=0.015)
        assert row.of("data_feeding") / row.steps == pytest.approx(25.1e6, rel=0.02)
        assert row.host_data_ns == pytest.approx(row.of("data_feeding"), rel=0.02)
    assert report.findings[0].id == "data-feeding"


def test_data_waits_are_proven_without_the_c_librarys_calls(large: Large, tmp_path: Path) -> None:
    path = tmp_path / "without-osrt.sqlite"
    path.write_bytes(large("h200x4-ddp-starved").read_bytes())
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE OSRT_API")
    database.close()
    for row in analyze(path, steps="8:25").breakdown:
        assert row.share("data_feeding") == pytest.approx(0.40, abs=0.015)


def test_validation_and_checkpoint_are_told_apart_from_the_step_before(large: Large) -> None:
    report = analyze(large("h200x2-ddp-validation"))
    assert_interludes(report, after=14)
    assert all(row.share("data_feeding") < 0.01 for row in report.breakdown)


def assert_interludes(report: Report, after: int) -> None:
    """Rank 0 saves and validates after a step, rank 1 waits for it; the step itself is short."""
    interludes = [p for p in report.phases if p.phase != "warmup"]
    assert [(p.rank, p.phase) for p in interludes] == [
        (0, "checkpoint"),
        (0, "validation"),
        (1, "validation"),
    ]
    for phase in interludes:
        before, following = (
            next(s for s in report.step_list if (s.rank, s.step) == (phase.rank, number))
            for number in (after, after + 1)
        )
        assert before.end_ns <= phase.start_ns < phase.end_ns <= following.start_ns
        assert before.end_ns - before.start_ns < 60e6, "it is no longer than the other steps"


def test_dataparallel_is_slow_since_it_searches_algorithms_in_every_step(large: Large) -> None:
    assert_searching(analyze(large("h200x4-dataparallel")))


def assert_searching(report: Report) -> None:
    """The search comes first, and the GPUs do next to nothing."""
    assert report.findings[0].id == "autotune-repeated"
    assert report.findings[0].impact_ns > 0.9 * (report.steps.mean_ns or 0)
    assert all(row.idle_ns > 0.97 * row.total_ns for row in report.breakdown)


@pytest.mark.parametrize(
    ("part", "whole", "ranks", "first", "steps"),
    [
        ("h200x2-ddp-validation-12-19", "h200x2-ddp-validation", 2, 12, 8),
        ("h200x4-dataparallel-7-9", "h200x4-dataparallel", 1, 7, 3),
    ],
)
def test_a_part_has_the_loops_own_steps_within_1_percent(
    recording: Recording, part: str, whole: str, ranks: int, first: int, steps: int
) -> None:
    report = analyze(recording(f"{part}.sqlite"))
    assert_steps(report, whole, ranks, first, steps)


def test_the_demo_has_the_loops_own_steps_within_1_percent(starved: Report) -> None:
    assert_steps(starved, "h200x4-ddp-starved", 4, STARVED_BEGINS_AT, 7)


def assert_steps(report: Report, whole: str, ranks: int, first: int, steps: int) -> None:
    """Steps that begin with the loop's step ``first``, with its intervals between them."""
    assert (report.steps.kind, report.steps.count) == ("training", steps)
    for rank in range(ranks):
        true = true_intervals(whole, rank)[first : first + steps - 1]
        found = found_intervals(report, rank)
        assert len(found) == len(true) == steps - 1
        assert np.abs(found - true) / true == pytest.approx(0, abs=0.01)


def test_the_demo_waits_for_data_two_fifths_of_its_time(starved: Report) -> None:
    assert {row.gpu for row in starved.breakdown} == {0, 1, 2, 3}
    for row in starved.breakdown:
        assert row.share("data_feeding") == pytest.approx(0.40, abs=0.015)
        assert row.of("data_feeding") / row.steps == pytest.approx(25.1e6, rel=0.02)
    assert starved.findings[0].id == "data-feeding"


def test_validation_and_checkpoint_are_told_apart_in_a_part(recording: Recording) -> None:
    assert_interludes(analyze(recording("h200x2-ddp-validation-12-19.sqlite")), after=14 - 12)


def test_dataparallel_searches_algorithms_in_three_steps_too(recording: Recording) -> None:
    assert_searching(analyze(recording("h200x4-dataparallel-7-9.sqlite")))


@pytest.mark.parametrize("name", ["nsys-ai-mfu_2gpu_before", "nsys-ai-mfu_2gpu_after"])
def test_layers_are_not_called_training_steps(recording: Recording, name: str) -> None:
    assert analyze(recording(f"{name}.sqlite")).steps.kind != "training"


def test_a_time_loop_is_not_called_training(recording: Recording) -> None:
    assert analyze(recording("pipit-cloverleaf.sqlite")).steps.kind in ("iterations", "none")


def test_five_kernels_are_no_loop(recording: Recording) -> None:
    report = analyze(recording("pipit-saxpy-mpi.sqlite"))
    assert (report.steps.kind, report.steps.count) == ("none", 0)
    assert report.breakdown[0].steps == 0
    assert report.breakdown[0].total_ns == report.gpus[0].span_ns
