"""Recordings with the CUDA calls of some stretches alone: no call known is not no call made."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from gputrace.api import Report
from gputrace.collectors.spool.activity import Spool, call_windows_of, read_spool
from tests.analyzers.steps.test_windows import write_marked
from tests.helpers import command
from tests.helpers.lookups import analyze
from tests.helpers.sentences import words_of
from tests.native.build import Machine
from tests.synthetic import Plan, simulate

STEPS: Final = 60
_SMALL: Final = Plan(ranks=2, steps=STEPS, kernel_ns=2_500, h2d_ns=20_000, autograd_thread=False)
LAUNCH_BOUND: Final = replace(_SMALL, allreduces=2, allreduce_ns=20_000, seed=5)
FED_SLOWLY: Final = replace(_SMALL, data_wait_ns=3_000_000, data_wait="python", seed=6)
SPANS: Final = ((0, 12), (25, 33), (47, 55))
"""Steps in which calls are recorded, from the middle of one to that of another."""
WITH_CALLS: Final = {n for first, end in SPANS for n in range(first + 1, end)}
PLANS: Final = {"launch-bound": LAUNCH_BOUND, "data-feeding": FED_SLOWLY}


# ---- what analyses say ----


def sample_calls(path: Path) -> Path:
    """Leaves the calls of `SPANS`."""
    with closing(sqlite3.connect(path)) as trace, trace:
        trace.execute(
            "CREATE TABLE GPUTRACE_API_WINDOW (start INTEGER, end INTEGER, globalPid INTEGER)"
        )
        sql = "SELECT globalTid & ~0xFFFFFF, step, (start + end) / 2 FROM GPUTRACE_STEP"
        middle = {(process, step): moment for process, step, moment in trace.execute(sql)}
        for process in sorted({process for process, _ in middle}):
            for first, end in SPANS:
                begin = middle[process, first] if first else 0
                row = (begin, middle[process, end], process)
                trace.execute("INSERT INTO GPUTRACE_API_WINDOW VALUES (?, ?, ?)", row)
        calls = "CUPTI_ACTIVITY_KIND_RUNTIME"
        of = "w.globalPid = (r.globalTid & ~0xFFFFFF) AND r.start >= w.start AND r.end <= w.end"
        trace.execute(
            f"DELETE FROM {calls} WHERE rowid NOT IN "
            f"(SELECT r.rowid FROM {calls} r JOIN GPUTRACE_API_WINDOW w ON {of})"
        )
    return path


def write_plan(plan: Plan, path: Path) -> Path:
    write_marked(simulate(plan), path)
    with closing(sqlite3.connect(path)) as trace, trace:
        for table in ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "OSRT_API"):
            trace.execute(f"DROP TABLE IF EXISTS {table}")
    return path


@pytest.fixture(scope="module", params=list(PLANS))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a run with all calls, and with some."""
    folder = tmp_path_factory.mktemp("sampled")
    plan = PLANS[request.param]
    some = sample_calls(write_plan(plan, folder / "some.sqlite"))
    return [write_plan(plan, folder / "all.sqlite"), some]


@pytest.fixture(scope="module")
def reports(files: list[Path]) -> list[Report]:
    return [analyze(path) for path in files]


def test_steps_without_calls_are_found_by_what_begins_the_others(reports: list[Report]) -> None:
    whole, sampled = reports
    first, end = 0, SPANS[-1][1]
    for rank in (0, 1):
        full = {s.step: s for s in whole.step_list if s.rank == rank}
        some = {s.step: s for s in sampled.step_list if s.rank == rank}
        # After the last stretch with calls nothing tells that all steps were found.
        assert list(some) == list(range(first, end)), rank
        for number, step in some.items():
            assert (step.start_ns, step.end_ns) == (full[number].start_ns, full[number].end_ns)
            assert step.compute_ns == full[number].compute_ns
            assert step.h2d_ns == full[number].h2d_ns


def test_a_step_that_counts_has_the_causes_of_a_whole_recording(reports: list[Report]) -> None:
    whole, sampled = reports
    full = {(s.rank, s.step): s for s in whole.step_list}
    counted = [s for s in sampled.step_list if s.step in WITH_CALLS]
    assert len(counted) == 2 * len(WITH_CALLS)
    for step in counted:
        # Of the loader's time, what comes to light with a call after the stretch is not known.
        same = replace(full[step.rank, step.step], host_data_ns=step.host_data_ns)
        assert step == same


def test_the_breakdown_is_over_the_steps_with_calls_and_the_report_says_so(
    reports: list[Report],
) -> None:
    whole, sampled = reports
    told = sampled.recorded_calls
    assert told is not None
    measured = {s.step for s in sampled.step_list if s.phase == "steady"}
    assert (told.steps, told.of_steps) == (len(WITH_CALLS & measured), len(measured))
    assert [row.steps for row in sampled.breakdown] == [told.steps] * 2
    assert 0.2 < told.share < 0.6
    assert whole.recorded_calls is None
    assert sum("host calls were recorded in" in note for note in sampled.warnings) == 1


def test_findings_are_those_of_the_whole_recording(reports: list[Report]) -> None:
    whole, sampled = reports
    assert [f.id for f in sampled.findings][:1] == [f.id for f in whole.findings][:1]
    assert {f.id for f in sampled.findings} == {f.id for f in whole.findings}
    for full, some in zip(whole.breakdown, sampled.breakdown, strict=True):
        for cause in ("data_feeding", "sync", "launch", "other_idle", "compute"):
            assert some.share(cause) == pytest.approx(full.share(cause), abs=0.02), cause
    full_gains, gains = (
        {row.id: row.gain_ns / row.now_ns for row in report.what_if} for report in reports
    )
    assert full_gains
    for cure in full_gains | gains:
        assert gains.get(cure, 0.0) == pytest.approx(full_gains.get(cure, 0.0), abs=0.03), cure


def test_no_time_without_calls_is_a_wait_for_data(reports: list[Report]) -> None:
    whole, sampled = reports
    for cause in ("data_feeding", "sync", "alloc", "launch"):
        assert sampled.gaps.by_cause[cause] <= whole.gaps.by_cause[cause]
    full = {(gap.gpu, gap.start_ns): gap for gap in whole.gaps.largest}
    for gap in sampled.gaps.largest:
        if gap.evidence == "CUDA calls were not recorded at that time":
            assert gap.cause == "other_idle"
        elif (gap.gpu, gap.start_ns) in full:
            assert gap.cause in ("other_idle", full[gap.gpu, gap.start_ns].cause)


def test_of_steps_without_calls_nothing_is_said_of_the_host(files: list[Path]) -> None:
    report = analyze(files[1], steps=(36, 46))
    assert not {"launch-bound", "data-feeding"} & {f.id for f in report.findings}
    assert report.recorded_calls is not None
    assert (report.recorded_calls.steps, report.recorded_calls.of_steps) == (0, 10)
    (idle,) = [f for f in report.findings if f.id == "idle-unexplained"]
    assert "its CUDA API calls were not recorded" in words_of(idle)
    assert not report.what_if


@pytest.mark.parametrize("files", ["launch-bound"], indirect=True)
def test_without_marks_the_same_steps_count(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(files[1].read_bytes())
    with closing(sqlite3.connect(path)) as trace, trace:
        trace.execute("DELETE FROM GPUTRACE_STEP")
        trace.execute("DELETE FROM NVTX_EVENTS")
    report = analyze(path)
    assert report.steps.source == "inferred"
    assert report.recorded_calls is not None
    assert abs(report.recorded_calls.steps - len(WITH_CALLS)) <= 4
    assert report.findings[0].id == "launch-bound"


def test_steps_that_cannot_be_told_are_left_out(tmp_path: Path) -> None:
    """A validation between two stretches: its input copies are not those of steps."""
    plan = Plan(
        ranks=1, steps=STEPS, kernel_ns=3_000, validation_after=(40,), validation_batches=4, seed=5
    )
    report = analyze(sample_calls(write_plan(plan, tmp_path / "t.sqlite")))
    found = [step.step for step in report.step_list]
    assert len(found) == 33 + 8 - 2, found
    assert not report.phases or {phase.phase for phase in report.phases} == {"warmup"}


@pytest.mark.parametrize("files", ["launch-bound"], indirect=True)
def test_a_part_and_a_redacted_copy_say_which_calls_they_have(
    files: list[Path], tmp_path: Path
) -> None:
    """The window lies where no calls are."""
    step = next(s for s in analyze(files[1]).step_list if s.step == 36)
    for options in (["--time", f"{step.start_ns}ns:{step.end_ns}ns"], ["--redact"]):
        output = tmp_path / f"part{len(options)}.sqlite"
        ran = command.gputrace("export", files[1], "--to", "trace", *options, "-o", output)
        assert ran.code == 0, ran.err
        with closing(sqlite3.connect(output)) as trace:
            (count,) = trace.execute("SELECT count(*) FROM GPUTRACE_API_WINDOW").fetchone()
        assert count == 2 * len(SPANS)


# ---- what the collector does: of 10 launches a millisecond it keeps so many calls a second ----

SECOND: Final = 1_000_000_000
RATE: Final = 1_500
PERIOD_NS: Final = 250_000_000
SAMPLED: Final = {"GPUTRACE_API_RATE": str(RATE), "GPUTRACE_API_PERIOD_NS": str(PERIOD_NS)}
LIBRARIES: Final = ("libcupti.so.13", "old_cupti.so")


def only(folder: Path) -> Spool:
    (path,) = folder.glob("*.spool")
    return read_spool(path)


def run(machine: Machine, folder: Path, script: str, env: dict[str, str]) -> tuple[Spool, str]:
    done = machine.run(folder, script, env)
    assert (done.returncode, done.stderr) == (0, "")
    return only(folder), done.stdout


def are_in_parts(spool: Spool, windows: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return for each kernel if its call, from 1 to 0.1 µs before it, lies in a recorded part."""
    begins, ends = np.array(windows, np.int64).T
    kernels = spool.records[b"KERN"]["start"].astype(np.int64)
    place = np.searchsorted(begins, kernels - 1_000, "right") - 1
    inside: NDArray[np.bool_] = (place >= 0) & (kernels - 100 <= ends[place])
    return inside


def have_calls(spool: Spool) -> NDArray[np.bool_]:
    return np.isin(spool.records[b"KERN"]["correlation"], spool.records[b"API "]["correlation"])


def later_calls(spool: Spool, windows: list[tuple[int, int]]) -> int:
    """Count the calls after the end of the first part."""
    return int((spool.records[b"API "]["start"] > windows[0][1]).sum())


def later_seconds(spool: Spool, windows: list[tuple[int, int]]) -> float:
    return (int(spool.records[b"KERN"]["end"].max()) - windows[0][1]) / SECOND


def test_few_calls_are_all_recorded_without_a_word(machine: Machine, tmp_path: Path) -> None:
    spool, _ = run(
        machine, tmp_path, "inject run 700 1 1", {**SAMPLED, "GPUTRACE_API_RATE": "5000"}
    )
    assert not spool.switches["calls"]
    assert call_windows_of(spool) is None
    assert len(spool.records[b"API "]) == len(spool.records[b"KERN"]) > 20


def test_what_is_short_has_all_its_calls_however_many(machine: Machine, tmp_path: Path) -> None:
    spool, _ = run(machine, tmp_path, "inject run 300 1 20", {"GPUTRACE_API_RATE": "1"})
    assert not spool.switches["calls"]
    assert len(spool.records[b"API "]) == len(spool.records[b"KERN"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_of_too_many_calls_so_many_a_second_are_kept(
    machine: Machine, tmp_path: Path, library: str
) -> None:
    env = {**SAMPLED, "GPUTRACE_CUPTI": str(machine.folder / library)}
    spool, made = run(machine, tmp_path, "inject run 3000 1 10 calls", env)
    kernels, calls = spool.records[b"KERN"], spool.records[b"API "]
    numbers = kernels["grid"][:, 0].tolist()
    assert numbers == list(range(len(numbers))), "kernels are all there"
    windows = call_windows_of(spool)
    assert windows is not None
    assert len(windows) >= 2  # A busy machine lets few parts begin.
    # From the end of the first part, which comes after a period that has all calls.
    first = windows[0][1]
    assert first - spool.started >= 0.7 * PERIOD_NS
    later, seconds = later_calls(spool, windows), later_seconds(spool, windows)
    # A busy machine makes parts longer, and the program slower than its 9,000 calls a second.
    assert 0 < later < 2.5 * RATE * seconds
    assert int(made) >= len(kernels) > len(calls), "CUPTI makes records of all"


@pytest.mark.parametrize("late_ms", ["0", "700"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_in_the_parts_that_are_told_no_call_lacks_and_elsewhere_none_is(
    machine: Machine, tmp_path: Path, library: str, late_ms: str
) -> None:
    """Also where a buffer comes when several parts have begun and ended since."""
    env = {"GPUTRACE_CUPTI": str(machine.folder / library), "FAKE_CUPTI_LATE_MS": late_ms}
    spool, _ = run(machine, tmp_path, "inject run 2500 2 5", SAMPLED | env)
    windows = call_windows_of(spool)
    assert windows is not None
    assert len(windows) >= 2  # A busy machine lets few parts begin.
    has = have_calls(spool)
    assert (has == are_in_parts(spool, windows)).all()
    assert 100 < has.sum() < 0.9 * len(has)


@pytest.mark.parametrize("library", LIBRARIES)
def test_cupti_is_asked_to_record_other_calls_at_windows_alone(
    machine: Machine, tmp_path: Path, library: str
) -> None:
    script = "inject run 100 1 10 choices run 1500 1 10 choices capture 0 choices capture 1 choices"
    env = {"GPUTRACE_CUPTI": str(machine.folder / library), "GPUTRACE_HOLD_NS": str(10 * SECOND)}
    spool, said = run(machine, tmp_path, script, SAMPLED | env)
    begun, parts_later, ended, again = map(int, said.split())
    assert len(call_windows_of(spool) or ()) >= 3
    assert 0 < begun == parts_later < ended < again


def test_kernels_alone_are_recorded_without_calls(machine: Machine, tmp_path: Path) -> None:
    spool, made = run(machine, tmp_path, "inject run 300 1 10 calls", {"GPUTRACE_API": "none"})
    assert int(made) == 0
    assert len(spool.records[b"KERN"]) > 50
    windows = call_windows_of(spool)
    assert windows is not None
    assert all(start == end for start, end in windows)


def test_all_calls_are_recorded_where_that_is_asked_for(machine: Machine, tmp_path: Path) -> None:
    spool, _ = run(machine, tmp_path, "inject run 900 1 10", {**SAMPLED, "GPUTRACE_API": "all"})
    assert not spool.switches["calls"]
    assert len(spool.records[b"API "]) == len(spool.records[b"KERN"])


def test_a_part_has_whole_steps_where_they_are_long(machine: Machine, tmp_path: Path) -> None:
    """Steps of 20 ms, of which a part would else have a half; the next one is as much later."""
    script = "inject " + "run 20 1 10 step " * 130
    env = {"GPUTRACE_API_RATE": "1000", "GPUTRACE_API_PERIOD_NS": "100000000"}
    spool, _ = run(machine, tmp_path, script, env)
    windows = call_windows_of(spool)
    assert windows is not None
    whole = windows[1:-1]
    assert whole
    assert min(end - start for start, end in whole) >= 3 * 20_000_000
    assert later_calls(spool, windows) < 2_500 * later_seconds(spool, windows) + 1_000


def test_a_window_that_opens_again_begins_with_all_calls(machine: Machine, tmp_path: Path) -> None:
    script = "inject run 900 1 10 capture 0 capture 1 run 150 1 10 exit 0"
    env = {**SAMPLED, "GPUTRACE_HOLD_NS": str(10 * SECOND)}
    spool, _ = run(machine, tmp_path, script, env)
    last = spool.switches["captures"][-2][0]
    kernels, calls = spool.records[b"KERN"], spool.records[b"API "]
    again = kernels["correlation"][kernels["start"] > last + 2_000_000]
    assert len(again) > 200
    assert np.isin(again, calls["correlation"]).all()


def test_a_window_of_a_later_file_begins_with_all_calls(machine: Machine, tmp_path: Path) -> None:
    """Calls were left out as the window before ended, which is told in a file before."""
    script = "inject run 900 1 10 capture 0 sleep 2500 capture 1 run 100 1 10 exit 0"
    env = {**SAMPLED, "GPUTRACE_API_RATE": "1", "GPUTRACE_HOLD_NS": str(10 * SECOND)}
    env |= {"GPUTRACE_SEGMENT_NS": str(SECOND), "GPUTRACE_SEGMENTS": "20"}
    done = machine.run(tmp_path, script, env)
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = [read_spool(path) for path in sorted(tmp_path.glob("*.spool"))]
    assert not have_calls(first).all()
    assert len(last.records[b"KERN"]) > 100
    assert have_calls(last).all()


def test_each_file_of_a_ring_says_when_calls_were_recorded(
    machine: Machine, tmp_path: Path
) -> None:
    env = {**SAMPLED, "GPUTRACE_SEGMENT_NS": str(SECOND), "GPUTRACE_SEGMENTS": "20"}
    done = machine.run(tmp_path, "inject run 3300 1 10", env)
    assert (done.returncode, done.stderr) == (0, "")
    paths = sorted(tmp_path.glob("*.spool"))
    assert len(paths) >= 3
    told = 0
    for path in paths:
        spool = read_spool(path)
        windows = call_windows_of(spool)
        told += windows is not None
        # What was issued before the file began may have its call in the one before.
        own = spool.records[b"KERN"]["start"] > spool.started + 1_000
        inside = are_in_parts(spool, windows or [(0, 2**62)])
        assert have_calls(spool)[own & inside].all(), path
    assert told >= 2


# ---- all of it ----


TRIES: Final = 5
"""A busy machine may hold the program up between steps, which then is a wait for data."""
NOT_IN_IT: Final = {"data-feeding", "idle-unexplained", "sync-bound"}


def record_launches(machine: Machine, output: Path, how: str) -> Report:
    """1,500 steps."""
    keep = ("GPUTRACE_CUPTI", "LD_LIBRARY_PATH")
    env = {name: machine.environment(output.parent)[name] for name in keep}
    ran = command.gputrace(
        *("record", "--no-nvml", "--backend", "cupti", "--api", how, "-o", str(output), "--"),
        *machine.command("inject nvtx train 1500 40 25"),
        env=env | SAMPLED | {"GPUTRACE_API_RATE": "2000"},
    )
    assert ran.code == 0, ran.err
    return analyze(output)


@pytest.mark.parametrize("how", ["all", "auto"])
def test_a_launch_bound_training_is_told_with_some_of_its_calls(
    machine: Machine, tmp_path: Path, how: str
) -> None:
    """40 launches a step with 25 µs between them, and nothing else to wait for."""
    for trial in range(TRIES):
        report = record_launches(machine, tmp_path / f"{trial}.sqlite", how)
        (row,) = report.breakdown
        found = {finding.id for finding in report.findings}
        if row.share("launch") > 0.85 and not found & NOT_IN_IT:
            break
    # On a busy machine there may be slow steps as well.
    assert "launch-bound" in found
    assert not found & NOT_IN_IT
    assert row.share("launch") > 0.85
    assert row.share("other_idle") < 0.02
    assert report.steps.count >= (1500 if how == "all" else 700)
    told = report.recorded_calls
    assert (told is None) == (how == "all")
    if told is not None:
        assert 0.02 < told.steps / told.of_steps < 0.8
        assert row.steps == told.steps


@pytest.mark.parametrize("backend", ["nsys", "nvprof"])
def test_other_recorders_take_no_such_option(tmp_path: Path, backend: str) -> None:
    ran = command.gputrace(
        *("record", "--backend", backend, "--api", "none", "-o", tmp_path / "t", "--", "true")
    )
    assert ran.code == 125
    assert len(ran.err.splitlines()) == 1


def test_the_json_has_it(reports: list[Report]) -> None:
    whole, sampled = (json.loads(report.render("json"))["recorded_calls"] for report in reports)
    assert set(sampled) == {"share", "steps", "of_steps"}
    assert whole is None
