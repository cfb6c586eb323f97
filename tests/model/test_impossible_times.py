"""GPU operations at times that no GPU can produce are left out and counted, and no others."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import gputrace
from gputrace.model.events import GPU_KINDS, UNKNOWN, Events, Kind
from gputrace.model.impossible_times import MISTIMED, find_launches, find_possible
from gputrace.model.trace import Quality
from gputrace.readers.registry import open_trace
from tests.helpers.kineto import event, kernel, write
from tests.helpers.recordings import unpack

EARLY = "GPU work that starts before its launch"
LONG = "longer than an hour and than the run"
OVERLAPPING = "kernels that run during others of their stream"
HOUR: Final = 3_600_000_000
"""In microseconds."""


def run(path: Path, changes: Mapping[int, dict[str, Any]], count: int = 60) -> Path:
    """Kernels of 80 us every 100 us, each launched 50 us before; ``changes`` of some, by number."""
    events: list[Any] = []
    for number in range(count):
        at = 100 * number + 5_000_000
        events.append(
            event("cuda_runtime", "cudaLaunchKernel", at - 50, 5, args={"correlation": number})
        )
        events.append(kernel(at, 80, correlation=number) | changes.get(number, {}))
    return write(path, *events)


def left(path: Path) -> tuple[int, dict[str, int]]:
    """Number of kernels left, and of those left out by reason."""
    with open_trace(path) as trace:
        return len(trace.events([Kind.KERNEL], ["start"])), trace.quality.dropped


AT = 5_000_000


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({}, {}),
        ({30: {"dur": 336 * 24 * HOUR}}, {LONG: 1}),
        ({59: {"dur": 2 * HOUR}}, {LONG: 1}),
        ({30: {"dur": 20_000_000}}, {OVERLAPPING: 1}),
        ({30: {"dur": 202}}, {OVERLAPPING: 1}),
        ({58: {"dur": 182}}, {OVERLAPPING: 1}),
        ({30: {"ts": AT - 2_500_000}}, {EARLY: 1}),
        ({0: {"ts": AT - 2_500_000}, 1: {"ts": AT - 2_400_000}}, {EARLY: 2}),
        # The next kernel may begin early (programmatic dependent launch), and recorders round.
        ({30: {"dur": 170}}, {}),
        ({30: {"dur": 180.9}}, {}),
        ({30: {"ts": AT + 3_000 - 51}}, {}),
        ({59: {"dur": 60_000_000}}, {}),
    ],
)
def test_an_impossible_time_costs_its_row_alone(
    changes: Mapping[int, dict[str, Any]], dropped: dict[str, int], tmp_path: Path
) -> None:
    path = run(tmp_path / "run.json", changes)
    assert left(path) == (60 - sum(dropped.values()), dropped)
    with gputrace.open(path) as trace:
        assert json.loads(trace.analyze().render("json"))["dropped_rows"] == dropped


def rows(**columns: Iterable[int]) -> Events:
    arrays = {name: np.array([*values]) for name, values in columns.items()}
    count = len(arrays["start"])
    whole = {"kind": Kind.KERNEL, "process": 0, "device": 0, "stream": 7, "correlation": UNKNOWN}
    return Events({name: np.full(count, value) for name, value in whole.items()} | arrays)


@pytest.mark.parametrize("early", [range(20), range(0, 60, 2)], ids=["the first", "every other"])
def test_much_work_before_its_launch_leaves_idle_time_unknown(
    early: Iterable[int], tmp_path: Path
) -> None:
    moved = {number: {"ts": 100 * number + AT - 3_000_000} for number in early}
    path = run(tmp_path / "run.pt.trace.json", moved)
    with open_trace(path) as whole:
        assert not whole.quality.dropped
        assert MISTIMED in whole.quality.notes
    with gputrace.open(path) as trace:
        report = trace.analyze()
    assert {"idle-unexplained", "launch-bound", "host-work"}.isdisjoint(
        finding.id for finding in report.findings
    )


def test_kernels_of_several_streams_and_of_one_graph_may_overlap() -> None:
    start = np.arange(0, 900_000, 10_000)
    quality = Quality()
    for more in (
        {"stream": np.arange(90)},
        {"stream": np.full(90, UNKNOWN)},
        {"correlation": np.full(90, 5)},
        {"process": np.arange(90)},
        {"kind": np.full(90, Kind.COPY_H2D)},
    ):
        events = rows(start=start, end=start + 500_000, **more)
        assert find_possible(events, quality, "", lambda found: found.start) is None
    assert not quality.dropped


def test_streams_whose_kernels_overlap_all_the_time_are_not_what_they_are_taken_for() -> None:
    start = np.arange(0, 900_000, 10_000)
    quality = Quality()
    events = rows(start=start, end=start + 50_000)
    assert find_possible(events, quality, "", lambda found: found.start) is None


def test_a_launch_is_that_of_the_process() -> None:
    calls = rows(start=[50, 40, 30], end=[60, 50, 40], process=[0, 0, 1], correlation=[7, 7, 8])
    operations = rows(start=[0] * 4, end=[1] * 4, process=[0, 1, 0, 1], correlation=[7, 7, 8, 8])
    assert find_launches(calls, operations).tolist() == [40, UNKNOWN, UNKNOWN, 30]


def test_an_export_of_nsys_is_checked_in_whole_and_in_chunks(tmp_path: Path) -> None:
    path = unpack("pipit-cloverleaf.sqlite", tmp_path)
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    with closing(sqlite3.connect(path)) as database, database:
        order = f"(SELECT rowid FROM {table} ORDER BY start LIMIT 1 OFFSET"
        database.execute(
            f'UPDATE {table} SET "end" = "end" + 9000000000 WHERE rowid = {order} 600)'
        )
        moved = 'start = start - 3000000000, "end" = "end" - 3000000000'
        database.execute(f"UPDATE {table} SET {moved} WHERE rowid = {order} 900)")
    for read in ("events", "parts"):
        with open_trace(path) as trace:
            found = getattr(trace, read)(GPU_KINDS, ["start", "kind"])
            parts = [found] if read == "events" else list(found)
            kernels = sum(np.count_nonzero(part.kind == Kind.KERNEL) for part in parts)
            assert trace.quality.dropped == {OVERLAPPING: 1, EARLY: 1}
            assert kernels == 1310
