"""Clocks of hosts that disagree are brought together by the collectives that end at once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.clocks import ClockFit, fit_clocks
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.api import Report
from gputrace.model.events import Events, Kind
from gputrace.model.trace import Process
from gputrace.readers.in_memory import MemoryTrace
from tests.helpers.lookups import analyze
from tests.helpers.per_gpu import handmade
from tests.helpers.rank_files import Node, write_parts, write_whole
from tests.synthetic import Plan, Recording, simulate, write_nvprof

MS = 1_000_000
ALIGNED = "the clocks of hosts are aligned by "
WALL = "wall clocks only"


@pytest.fixture(scope="module")
def recording() -> Recording:
    plan = Plan(steps=10, ranks=4, allreduces=2, late_host_rank=2, late_host_ns=2 * MS, streams=2)
    return simulate(plan)


def starts(report: Report) -> list[tuple[int, int, int]]:
    first = min(step.start_ns for step in report.step_list)
    return sorted((s.rank, s.start_ns - first, s.end_ns - first) for s in report.step_list)


@pytest.mark.parametrize("ahead", [-7 * MS, 3_200_001, 40 * MS])
def test_a_clock_that_is_wrong_changes_no_figure(
    recording: Recording, tmp_path: Path, ahead: int
) -> None:
    whole = analyze(write_whole(recording, tmp_path / "whole.sqlite"))
    nodes = [Node("node0", (0, 1)), Node("node1", (2, 3), clock_ahead_ns=ahead)]
    merged = analyze(*write_parts(recording, tmp_path / "parts", nodes))
    assert starts(merged) == starts(whole)
    assert [row.total_ns for row in merged.breakdown] == [row.total_ns for row in whole.breakdown]
    assert merged.span_ns == whole.span_ns
    assert merged.warnings[0].startswith(ALIGNED)
    assert merged.warnings[0].endswith("to within 0 ns (95 % of them)")


def test_a_window_of_time_counts_on_the_corrected_clock(
    recording: Recording, tmp_path: Path
) -> None:
    whole = write_whole(recording, tmp_path / "whole.sqlite")
    nodes = [Node("node0", (0, 1)), Node("node1", (2, 3), clock_ahead_ns=9 * MS)]
    parts = write_parts(recording, tmp_path / "parts", nodes)
    with gputrace.open(whole) as one, gputrace.open(*parts) as several:
        report = one.analyze()
        window = (report.step_list[2].start_ns, report.step_list[5].end_ns)
        assert starts(several.analyze(time=window)) == starts(one.analyze(time=window))


def test_without_collectives_the_wall_clocks_count_and_that_is_said(tmp_path: Path) -> None:
    recording = simulate(Plan(steps=6, ranks=2, kernels_per_step=20, allreduces=0))
    nodes = [Node("node0", (0,)), Node("node1", (1,), clock_ahead_ns=MS)]
    merged = analyze(*write_parts(recording, tmp_path, nodes))
    assert WALL in merged.warnings[0]


def of_host(host: int, ends: list[int]) -> GpuOperations:
    end = np.array(ends)
    columns = {"start": end - 1000, "end": end, "kind": np.full(len(end), Kind.KERNEL)}
    columns["name"] = np.zeros(len(end), np.int32)
    gpu = Gpu(0, True, 0, host, host, True, "", host, f"node{host}", ((host, 0),))
    classes = np.full(len(end), OperationClass.COMMUNICATION, np.int8)
    return GpuOperations(gpu, Events(columns), classes)


def trace_of(*operations: GpuOperations) -> MemoryTrace:
    parts = [own.events for own in operations]
    names = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"]
    processes = [Process(1, host=own.gpu.host, rank=own.gpu.rank) for own in operations]
    return MemoryTrace(Path("made"), "kineto", parts, names, processes)


def fit(*operations: GpuOperations) -> ClockFit | None:
    return fit_clocks(handmade(trace_of(*operations), operations))


@given(
    shift=st.integers(-(10**12), 10**12),
    gaps=st.lists(st.integers(10**5, 10**8), min_size=5, max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_shift_is_found_as_exactly_as_the_ends_agree(
    shift: int, gaps: list[int], seed: int
) -> None:
    ends = 10**13 + np.cumsum(gaps)
    jitter = np.random.default_rng(seed).integers(-20_000, 20_000, len(gaps))
    operations = [of_host(0, ends.tolist()), of_host(1, (ends - shift + jitter).tolist())]
    found = fit(*operations)
    assert found is not None
    assert abs(found.shifts[1] - shift) <= 20_000
    assert found.residual_ns <= 40_000


def test_collectives_that_are_not_the_same_tell_nothing() -> None:
    random = np.random.default_rng(0)
    ends = [np.sort(random.integers(10**10, 10**11, 30)).tolist() for _ in range(2)]
    operations = [of_host(host, own) for host, own in enumerate(ends)]
    assert fit(*operations) is None


def test_ranks_with_unequal_numbers_of_collectives_are_not_compared() -> None:
    ends = list(range(10**9, 2 * 10**9, 10**8))
    operations = [of_host(0, ends), of_host(1, ends[:-1])]
    assert fit(*operations) is None


@pytest.mark.parametrize("collective", ["AllReduce", "SendRecv"])
def test_files_of_one_host_whose_clocks_differ_are_aligned(tmp_path: Path, collective: str) -> None:
    """As nvprof's: each process converts the times of its GPU by itself, and clocks drift."""
    plan = Plan(
        steps=12, ranks=2, kernels_per_step=30, allreduces=2, slow_rank=1, slow_factor=1.4,
        h2d_ns=50_000, collective=collective,
    )  # fmt: skip
    first, second = write_nvprof(simulate(plan), tmp_path / "files")
    _move_clock(second, 3 * MS, 5e-5)
    report = analyze(first, second)
    assert report.findings[0].id == "straggler"
    assert report.findings[0].ranks == (1,)
    assert any(note.startswith("the clocks of files are aligned by") for note in report.warnings)
    assert all(total.wait_ns is not None for total in report.collectives)


def _move_clock(path: Path, ahead: int, drift: float) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        (begin,) = database.execute("SELECT min(start) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()
        for (table,) in database.execute("SELECT name FROM sqlite_master").fetchall():
            names = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
            for name in names & {"start", "end", "completed", "timestamp"}:
                database.execute(
                    f"UPDATE {table} SET {name} = {name} + {ahead} + "
                    f"CAST(({name} - {begin}) * {drift} AS INTEGER)"
                )
