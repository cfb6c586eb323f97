"""Without a GPU: a program's work outside its passes, its checkpoints, and its loader's starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.analyzers.findings.test_host_threads import (
    COUNTERS,
    PERIOD,
    PID,
    STEPS,
    counted,
    the,
    with_counters,
)
from tests.helpers.exports import SAMPLE, Export, global_id
from tests.helpers.handmade import MS, analyze, ids
from tests.helpers.sentences import words_of

RANGES: Final = "GPUTRACE_HOST_RANGE"
DATA_WAIT, PHASE, LOADER = 1, 4, 5
PASSES: Final[dict[str, tuple[float, float]]] = {
    "forward": (0, 3),
    "backward": (3, 5),
    "optimizer": (5, 6),
}
"""Milliseconds of each step of ten."""
MAIN: Final = {"globalTid": global_id(PID, thread=PID)}


def trained(passes: Mapping[str, tuple[float, float]], **per_step: int) -> Export:
    """Steps of 10 ms with passes, on a core unless it is said otherwise."""
    export = with_counters()
    export.give(RANGES, "start", "end", "globalTid", "nameId", "kind", "number")
    names = {name.replace("_", " "): ms * MS for name, ms in per_step.items()}
    counted(export, {"on core": 10 * MS} | names, {})
    for step in range(STEPS):
        for name, (start, end) in passes.items():
            add_range(export, name, PHASE, step, start, end)
    return export


def add_range(
    export: Export, name: str, kind: int, step: int, start: float, end: float, number: int = 0
) -> None:
    span = {"start": step * PERIOD + round(start * MS), "end": step * PERIOD + round(end * MS)}
    export.add(RANGES, **span, **MAIN, nameId=export.string(name), kind=kind, number=number)


def sampled(
    export: Export, line: str, at: float, inner: str | None = None, *, asleep: bool = False
) -> None:
    """A sample of each step at a line, so many milliseconds after its start."""
    name, frame = export.string(line), export.string(inner or line)
    for step in range(STEPS):
        moment = step * PERIOD + round(at * MS)
        row = {"start": moment, "nameId": name, "innerNameId": frame, "waitedNs": 0}
        export.add(SAMPLE, **row, **MAIN)
        # What no sample met asleep says nothing: one look long after it does.
        start = moment - 1000 if asleep else moment + 1000
        end, what = start + 1500, export.string("asleep")
        export.add(COUNTERS, start=start, end=end, value=1, nameId=what, **MAIN)


def test_work_outside_the_passes_is_named_by_its_line(tmp_path: Path) -> None:
    export = trained(PASSES)
    sampled(export, "train.py:9 main", 2)
    sampled(export, "train.py:31 count", 8)
    found = the(analyze(export, tmp_path), "host-work")
    assert found.impact_ns == pytest.approx(4 * MS, rel=0.01)
    assert found.message.endswith("at train.py:31 count")
    assert found.message.startswith("the program's own work takes 40% of each step")
    assert "on the GPU" not in found.advice


def test_what_it_waits_or_lacks_a_core_for_is_not_its_work(tmp_path: Path) -> None:
    """Half of its samples are asleep, and half of the time for which it is not it is queued."""
    export = trained(PASSES, on_core=5, queued=5)
    sampled(export, "train.py:31 count", 7)
    sampled(export, "train.py:32 send", 9, asleep=True)
    assert the(analyze(export, tmp_path), "host-work").impact_ns == pytest.approx(MS, rel=0.01)


@pytest.mark.parametrize(
    "passes",
    [
        {"optimizer": (5, 6)},
        {"forward": (0, 5), "backward": (5, 9), "optimizer": (9, 9.8)},
    ],
)
def test_no_work_is_blamed_where_passes_are_unknown_or_take_nearly_all(
    passes: Mapping[str, tuple[float, float]], tmp_path: Path
) -> None:
    assert "host-work" not in ids(analyze(trained(passes), tmp_path))


def test_what_writes_logs_is_said_to(tmp_path: Path) -> None:
    export = trained(PASSES)
    sampled(export, "train.py:31 log", 8, "/lib/tensorboard/summary.py:51 histogram")
    assert "it writes logs" in the(analyze(export, tmp_path), "host-work").details


def test_checkpoints_within_steps_are_what_a_host_loses_time_to(tmp_path: Path) -> None:
    report = analyze(trained(PASSES | {"checkpoint": (6, 10)}), tmp_path)
    saves = the(report, "checkpoint-stall")
    assert saves.impact_ns == pytest.approx(4 * MS, rel=0.01)
    assert saves.message.startswith("saving checkpoints takes 40% of the run")
    assert report.findings[0] is saves
    assert "host-work" not in ids(report)


def test_a_loader_that_starts_anew_is_no_late_data(tmp_path: Path) -> None:
    export = trained(PASSES)
    for step in range(0, STEPS, 4):
        add_range(export, "start workers", LOADER, step, 6, 6.5, number=step << 32 | 2)
        add_range(export, "next", DATA_WAIT, step, 6.5, 10)
    report = analyze(export, tmp_path)
    restart = the(report, "loader-restart")
    assert restart.impact_ns == pytest.approx(MS, rel=0.05)
    assert "for the loader to start its workers anew" in words_of(restart)
    assert "data-feeding" not in ids(report)
