"""A real recording of gputrace's own: two ranks whose data loader is too slow (tests/data/own).

Two workers take 4 ms, and the time to draw random numbers, for each of the 16 pictures of a batch:
one comes every 32 ms or a little more, once those are used up that were made during the warm-up.
"""

from __future__ import annotations

import lzma
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gputrace.api import Report
from tests.helpers.lookups import analyze
from tests.helpers.recordings import DATA

MS = 1_000_000
STEPS = 10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("own") / "t.sqlite"
    packed = DATA / "own" / "h200x2-resnet18-slow-loader.sqlite.xz"
    target.write_bytes(lzma.decompress(packed.read_bytes()))
    return target


@pytest.fixture(scope="module")
def report(path: Path) -> Report:
    return analyze(path)


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as opened:
        yield opened


def test_steps_are_those_that_the_hooks_marked_on_each_rank(report: Report) -> None:
    assert (report.source, report.steps.source, report.steps.count) == (
        "gputrace",
        "markers",
        STEPS,
    )
    found = sorted((step.rank, step.step) for step in report.step_list)
    assert found == [(rank, step) for rank in range(2) for step in range(STEPS)]


def test_gpus_are_the_physical_ones_of_their_ranks(report: Report) -> None:
    found = [(gpu.gpu, gpu.gpu_known, gpu.rank, gpu.name) for gpu in report.gpus]
    assert found == [(0, True, 0, "NVIDIA H200"), (1, True, 1, "NVIDIA H200")]


def test_the_first_finding_is_the_slow_loader(report: Report) -> None:
    assert report.findings[0].id == "data-feeding"
    for row in report.breakdown:
        assert row.share("data_feeding") > 0.5
        classes = ("compute", "communication", "h2d", "other_copy", "memset", "recorder")
        idle = ("data_feeding", "sync", "alloc", "launch", "other_idle")
        assert sum(row.of(name) for name in (*classes, *idle)) == row.total_ns


def test_batches_come_as_fast_as_two_workers_make_them(report: Report) -> None:
    starts = np.array([step.start_ns for step in report.step_list if step.rank == 0])
    assert 32 * MS < (starts[-1] - starts[-5]) / 4 < 38 * MS


def test_long_gaps_say_that_the_program_was_in_its_loader(report: Report) -> None:
    long = [gap for gap in report.gaps.largest if gap.step and gap.end_ns - gap.start_ns > 20 * MS]
    assert len(long) >= 6
    assert all(gap.cause == "data_feeding" for gap in long)
    assert all(gap.evidence.startswith("in the data loader ") for gap in long)


def test_every_kernel_and_copy_has_the_call_that_issued_it(database: sqlite3.Connection) -> None:
    for table in ("KERNEL", "MEMCPY", "MEMSET"):
        sql = f"""SELECT count(*), count(r.start) FROM CUPTI_ACTIVITY_KIND_{table} AS g
                  LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS r
                  ON r.correlationId = g.correlationId AND r.globalTid >> 24 = g.globalPid >> 24"""
        operations, issued = database.execute(sql).fetchone()
        assert operations == issued > 0, table


def test_clocks_and_links_of_the_cards_are_there(database: sqlite3.Connection) -> None:
    sql = "SELECT gpu, peer, link, ancestor FROM GPUTRACE_TOPOLOGY WHERE gpu < peer"
    assert database.execute(sql).fetchall() == [(0, 1, "NV18", "PHB")]
    sql = "SELECT gpu, max(smClock) FROM GPUTRACE_NVML_SAMPLE GROUP BY gpu"
    assert database.execute(sql).fetchall() == [(0, 1980), (1, 1980)]
