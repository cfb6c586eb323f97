"""Recordings in windows: what lies between them is not known, and is no idle time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.errors import UsageError
from gputrace.report.html.timeline import timeline_charts
from tests.helpers import command
from tests.helpers.lookups import analyze
from tests.synthetic import Plan, Recording, simulate, write_nsys

MS: Final = 1_000_000
STEPS: Final = 60
WINDOWS: Final = ((9, 15), (29, 35), (49, 55))
"""Steps that are recorded, the end not included: one, of which the first gap lacks, and five."""
WHOLE: Final = {number for first, end in WINDOWS for number in range(first + 1, end)}
_TID: Final = 0xFFFFFF000000


@pytest.fixture(scope="module")
def recording() -> Recording:
    return simulate(Plan(ranks=2, steps=STEPS, data_wait_ns=2 * MS, seed=7))


def write_marked(recording: Recording, path: Path) -> Path:
    """All of it, with the steps as the hooks mark them: each begins where the one before ended."""
    write_nsys(recording, path, nvtx=("nccl", "step"))
    with closing(sqlite3.connect(path)) as trace, trace:
        trace.execute("CREATE TABLE GPUTRACE_META (name TEXT, value TEXT)")
        trace.execute(
            "CREATE TABLE GPUTRACE_STEP (start INTEGER, end INTEGER, globalTid INTEGER, "
            "nameId INTEGER, step INTEGER)"
        )
        sql = "SELECT globalTid, end, nameId FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
        sql += "WHERE coalesce(value, text) GLOB 'step *' ORDER BY globalTid, start"
        (name,) = trace.execute("SELECT max(id) + 1 FROM StringIds").fetchone()
        trace.execute("INSERT INTO StringIds VALUES (?, 'gputrace.step')", (name,))
        ends: dict[int, list[int]] = {}
        for thread, end, *_ in trace.execute(sql.replace(", nameId", "")):
            ends.setdefault(thread, []).append(end)
        for thread, own in ends.items():
            assert len(own) == STEPS
            begins = [1, *own[:-1]]
            rows = [
                (*span, thread, name, i) for i, span in enumerate(zip(begins, own, strict=True))
            ]
            trace.executemany("INSERT INTO GPUTRACE_STEP VALUES (?, ?, ?, ?, ?)", rows)
        trace.execute("DELETE FROM NVTX_EVENTS WHERE eventType = 59 AND domainId IS NULL")
    return path


def cut_into_windows(path: Path, extra: dict[int, int]) -> None:
    """Leaves what was issued in `WINDOWS`; by rank, so many steps more at the end of each."""
    with closing(sqlite3.connect(path)) as trace, trace:
        trace.execute(
            "CREATE TABLE GPUTRACE_WINDOW (start INTEGER, end INTEGER, globalPid INTEGER)"
        )
        sql = "SELECT globalTid & ~0xFFFFFF, step, end FROM GPUTRACE_STEP"
        ends = {(process, step): end for process, step, end in trace.execute(sql)}
        for rank, process in enumerate(sorted({process for process, _ in ends})):
            for first, end in WINDOWS:
                span = ends[process, first - 1], ends[process, end - 1 + extra.get(rank, 0)]
                row = (span[0] + 1, span[1] + 1, process)
                trace.execute("INSERT INTO GPUTRACE_WINDOW VALUES (?, ?, ?)", row)
        of = "w.globalPid = (r.globalTid & ~0xFFFFFF) AND r.start >= w.start AND r.start < w.end"
        calls = "CUPTI_ACTIVITY_KIND_RUNTIME"
        trace.execute(
            f"DELETE FROM {calls} AS r "
            f"WHERE NOT EXISTS (SELECT 1 FROM GPUTRACE_WINDOW w WHERE {of})"
        )
        issued = {*trace.execute(f"SELECT globalTid & ~0xFFFFFF, correlationId FROM {calls}")}
        for kind in ("KERNEL", "MEMCPY", "MEMSET"):
            table = f"CUPTI_ACTIVITY_KIND_{kind}"
            rows = trace.execute(f"SELECT rowid, globalPid, correlationId FROM {table}").fetchall()
            gone = [(row,) for row, *call in rows if tuple(call) not in issued]
            trace.executemany(f"DELETE FROM {table} WHERE rowid = ?", gone)
        for table in ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "OSRT_API"):
            trace.execute(f"DROP TABLE IF EXISTS {table}")


@pytest.fixture(scope="module")
def whole(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = write_marked(recording, tmp_path_factory.mktemp("whole") / "t.sqlite")
    with closing(sqlite3.connect(path)) as trace, trace:
        for table in ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "OSRT_API"):
            trace.execute(f"DROP TABLE IF EXISTS {table}")
    return analyze(path)


@pytest.fixture(scope="module")
def path(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_marked(recording, tmp_path_factory.mktemp("windows") / "t.sqlite")
    cut_into_windows(path, {})
    return path


def classes(step: Any) -> tuple[Any, ...]:
    names = ("compute", "communication", "h2d", "other_copy", "memset", "data_feeding", "launch")
    return (step.start_ns, step.end_ns, *(getattr(step, f"{name}_ns") for name in names))


def test_steps_of_windows_are_those_of_the_whole_recording(path: Path, whole: Report) -> None:
    found = analyze(path)
    expected = [classes(step) for step in whole.step_list if step.step in WHOLE]
    assert len(expected) == 2 * len(WHOLE)
    assert [classes(step) for step in found.step_list] == expected


def test_what_lies_between_is_no_gap_no_idle_time_and_no_phase(path: Path) -> None:
    found = analyze(path)
    longest = max(step.end_ns - step.start_ns for step in found.step_list)
    assert max(gap.end_ns - gap.start_ns for gap in found.gaps.largest) < longest
    for gpu in found.gpus:
        classes = ("compute", "communication", "h2d", "other_copy", "memset", "idle")
        assert sum(getattr(gpu, f"{name}_ns") for name in classes) == gpu.span_ns
        assert gpu.span_ns < 1.05 * longest * sum(end - first for first, end in WINDOWS)
    assert {phase.phase for phase in found.phases} <= {"warmup"}
    assert "slow-steps" not in {finding.id for finding in found.findings}


def test_the_report_says_how_many_windows_of_how_many_steps(path: Path) -> None:
    told = "recorded in 3 windows of 5 steps; nothing between them was recorded"
    assert told in analyze(path).warnings


def test_steps_have_the_program_s_numbers_beside_their_own(path: Path, whole: Report) -> None:
    report = analyze(path)
    assert [step.number for step in report.step_list] == 2 * sorted(WHOLE)
    said = "Steps 0-14 here are the program's steps 10-14, 30-34, 50-54."
    assert said in " ".join(report.render("text").split("\n\n")[0].split())
    with gputrace.open(path) as opened:
        by_program, by_position = opened.explain_step(31), opened.explain_step(6)
    assert by_program == by_position
    assert by_program.message.startswith("step 6 (the program's 31) took ")
    with pytest.raises(UsageError, match=r"0 to 14, which are the program's 10-14, 30-34, 50-54"):
        analyze(path, steps="30:33")
    assert [step.number for step in whole.step_list] == 2 * list(range(STEPS))
    assert "are the program's steps" not in whole.render("text")


def test_a_page_finds_steps_by_the_program_s_numbers_too(path: Path) -> None:
    with gputrace.open(path) as opened:
        figure = timeline_charts(opened.material())["timeline"]
    (steps,) = (tag.data for tag in figure.tags if tag.name == "step-list")
    assert (steps["number"][6], steps["named"][6]) == (6, 31)


def test_what_cures_save_is_told_of_steps_that_follow_each_other(path: Path, whole: Report) -> None:
    saved, expected = (
        {cure.id: cure.gain_ns for cure in run.what_if} for run in (analyze(path), whole)
    )
    assert expected
    assert saved == pytest.approx(expected, rel=0.05)


def test_ranks_are_compared_over_the_steps_that_all_of_them_have(
    recording: Recording, tmp_path: Path
) -> None:
    path = write_marked(recording, tmp_path / "t.sqlite")
    cut_into_windows(path, {1: 2})
    steps: dict[int, list[int]] = {}
    for step in analyze(path).step_list:
        steps.setdefault(step.rank, []).append(step.start_ns)
    assert len(steps[0]) == len(steps[1]) == len(WHOLE)
    # Ranks that wait for each other begin a step at about the same time.
    assert all(abs(a - b) < 2 * MS for a, b in zip(steps[0], steps[1], strict=True))


def test_a_cut_out_part_keeps_its_windows(path: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.sqlite"
    ran = command.gputrace("export", path, "--to", "trace", "--redact", "-o", part)
    assert ran.code == 0, ran.err
    assert "recorded in 3 windows of 5 steps" in " ".join(analyze(part).warnings)


def test_a_window_whose_steps_nobody_asks_for_is_no_step(path: Path) -> None:
    with pytest.raises(UsageError, match="it has steps 0 to 14"), gputrace.open(path) as trace:
        trace.analyze(steps=(15, 20))
