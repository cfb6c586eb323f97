"""Control stretches: steps without the recorder, by which `analyze` knows what recording costs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.idle_causes import charge_of_each
from gputrace.analyzers.steps.windows import MarkedSteps, estimate_cost
from gputrace.api import Report
from gputrace.collectors.finalize import merge
from gputrace.collectors.session import HOOKS
from gputrace.model.events import Mask
from gputrace.model.intervals import Times
from gputrace.model.results import RecorderCost
from tests.helpers.command import ROOT
from tests.helpers.exports import STEP, Export, global_id
from tests.helpers.handmade import BEFORE_CALL, CALL, US, Run, analyze
from tests.native.build import Machine

KERNELS: Final = 50
COST: Final = 4 * US
"""What recording adds to a launch."""
BARE: Final = KERNELS * (BEFORE_CALL + CALL)
RECORDED: Final = BARE + KERNELS * COST
STEPS: Final = 200
SEEN: Final = 0.6
"""Part of the cost that stretches with an idle CUPTI are taken to show."""
CONTROL: Final = range(100, 140)
PID: Final = 100


def marked(export: Export, pid: int, thread: int, spans: list[tuple[int, int]]) -> None:
    """The marks of the hooks, and the windows of the collector, of steps that lie in `CONTROL`."""
    name = export.string("gputrace.step")
    for number, (start, end) in enumerate(spans):
        row = {"globalTid": global_id(pid, thread=thread), "nameId": name, "step": number}
        export.add(STEP, start=start, end=end, **row)
    off, on = spans[CONTROL.start][0], spans[CONTROL.stop - 1][1]
    export.give("GPUTRACE_META", "name", "value")
    export.give("GPUTRACE_WINDOW", "start", "end", "globalPid")
    export.give("GPUTRACE_CONTROL", "start", "end", "globalPid")
    export.rows.setdefault("GPUTRACE_META", [])
    process = global_id(pid)
    export.add("GPUTRACE_WINDOW", start=0, end=off, globalPid=process)
    export.add("GPUTRACE_WINDOW", start=on, end=spans[-1][1] + 1, globalPid=process)
    export.add("GPUTRACE_CONTROL", start=off, end=on, globalPid=process)


def launching(kernel: int) -> Run:
    """A loop that launches kernels of some length one by one, at most a step ahead of the GPU."""
    run, spans = Run(pid=PID), []
    run.gpu_free[0] = 0
    for step in range(STEPS):
        start, behind = run.now, run.gpu_free[0]
        for index in range(KERNELS):
            if step in CONTROL:
                run.wait(BEFORE_CALL + CALL)
                run.gpu_free[0] = max(run.gpu_free[0], run.now) + kernel
            else:
                run.wait(COST)
                run.kernel(kernel, f"gemm_{index % 5}")
        run.now = max(run.now, behind)
        spans.append((start + 1, run.now))
    marked(run.export, PID, PID, spans)
    return run


@pytest.fixture(scope="module")
def bound_by_host(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return analyze(launching(2 * US), tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def bound_by_gpu(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return analyze(launching(20 * US), tmp_path_factory.mktemp("gpu"))


def test_the_unrecorded_step_is_that_of_the_program(bound_by_host: Report) -> None:
    cost = bound_by_host.recorder
    assert cost is not None
    assert (cost.step_ns, cost.unrecorded_step_ns) == pytest.approx((RECORDED, BARE), rel=0.01)
    assert cost.low_ns <= cost.unrecorded_step_ns <= cost.high_ns
    assert (cost.stretches, cost.steps) == (1, len(CONTROL))
    (found,) = (f for f in bound_by_host.findings if f.id == "recorder-overhead")
    assert found.message == "recording lengthens each step by 50% (from 400 to 600 µs)"
    assert found.details[0] == "50% to 50%, by 40 steps without the recorder"
    assert json.loads(bound_by_host.render("json"))["recorder"]["steps"] == len(CONTROL)


def test_what_recording_adds_is_the_recorders_and_nobody_elses(bound_by_host: Report) -> None:
    (row,) = bound_by_host.breakdown
    assert row.recorder_ns / row.steps == pytest.approx(KERNELS * COST, rel=0.02)
    idle = BARE - KERNELS * 2 * US
    assert row.launch_ns / row.steps == pytest.approx(idle, rel=0.02)
    assert sum(getattr(row, f"{name}_ns") for name in ("compute", "recorder", "launch")) == (
        row.total_ns
    )


def test_no_step_without_records_counts(bound_by_host: Report) -> None:
    assert {step.step for step in bound_by_host.step_list} == set(range(STEPS - len(CONTROL) - 1))
    assert bound_by_host.steps.count == STEPS
    assert max(gap.end_ns - gap.start_ns for gap in bound_by_host.gaps.largest) < BARE


def test_findings_and_predictions_are_of_the_program_without_the_recorder(
    bound_by_host: Report,
) -> None:
    first, *others = bound_by_host.findings
    assert first.id == "launch-bound"
    assert first.evidence["total_ns"] == pytest.approx(BARE, rel=0.01)
    assert first.impact_ns < BARE
    told = next(finding for finding in others if finding.id == "recorder-overhead")
    assert told.severity == "info"
    assert told.impact_ns == pytest.approx(KERNELS * COST, rel=0.02)
    for cure in bound_by_host.what_if:
        assert cure.now_ns == pytest.approx(BARE, rel=0.01)
    graphs = next(cure for cure in bound_by_host.what_if if cure.id == "graphs")
    assert KERNELS * 2 * US <= graphs.step_ns < BARE


def test_a_step_that_is_bound_by_its_gpu_loses_nothing(bound_by_gpu: Report) -> None:
    cost = bound_by_gpu.recorder
    assert cost is not None
    assert cost.added_ns == 0
    (row,) = bound_by_gpu.breakdown
    assert row.recorder_ns == 0
    assert "recorder-overhead" not in {finding.id for finding in bound_by_gpu.findings}
    assert any("lengthens no step measurably" in text for text in bound_by_gpu.warnings)


# ---- the estimate ----


def steps(
    lengths: Times, control: range, *, attach_ns: int = 0, recorded: range | None = None
) -> MarkedSteps:
    number = np.arange(len(lengths))
    is_control = np.isin(number, control)
    is_recorded = ~is_control if recorded is None else np.isin(number, recorded)
    lengths = lengths.copy()
    lengths[control.stop] += attach_ns
    return MarkedSteps(number, lengths, is_recorded, is_control, out_of(lengths))


def out_of(steps: Times) -> Mask:
    """CUPTI left the process in all stretches."""
    return np.zeros(len(steps), bool)


def noisy(rng: np.random.Generator, cost: float) -> Times:
    lengths = rng.normal(10_000_000, 300_000, 200)
    lengths[100:130] /= cost
    return lengths.astype(np.int64)


@pytest.mark.parametrize("cost", [1.0, 1.02, 1.2, 1.5])
def test_the_interval_holds_the_truth_nearly_as_often_as_two_errors_say(cost: float) -> None:
    rng, held = np.random.default_rng(3), 0
    for _ in range(200):
        found = estimate_cost([steps(noisy(rng, cost), range(100, 130), attach_ns=10**9)])
        assert found is not None
        held += found.low_ns <= min(10_000_000, 10_000_000 / cost * 1.001) <= found.high_ns
    assert held >= 186


def test_the_unrecorded_step_is_that_of_the_whole_run_and_not_of_its_slow_beginning() -> None:
    """Stretches come early, when caches of the machine and the program still fill."""
    number = np.arange(1000)
    bare = 8_000_000 * np.where(number < 300, 1.1 - number / 3000, 1.0)
    lengths = (1.25 * bare).astype(np.int64)
    is_control = np.isin(number, [*range(64, 80), *range(128, 160), *range(256, 320)])
    lengths[is_control] = bare[is_control]
    found = estimate_cost([MarkedSteps(number, lengths, ~is_control, is_control, out_of(number))])
    assert found is not None
    assert found.step_ns == pytest.approx(lengths[~is_control].mean(), rel=0.01)
    assert found.unrecorded_step_ns == pytest.approx(bare[~is_control].mean(), rel=0.01)


def test_steps_that_cost_more_where_recording_is_sampled_are_corrected_by_more() -> None:
    """As CUPTI is taken out of the process, to come back makes its records dearer."""
    number = np.arange(6000)
    idle = np.isin(number, [*range(128, 160), *range(512, 576), *range(1024, 1088)])
    is_control = idle | (number >= 2083) & (number % 512 >= 35)
    cost = np.where(is_control, 1.0, np.where(number < 2083, 1.2, 1.4))
    cost[idle] += 0.2 * (1 - SEEN)
    lengths = (8_000_000 * cost).astype(np.int64)
    found = estimate_cost([MarkedSteps(number, lengths, ~is_control, is_control, idle)])
    assert found is not None
    assert found.unrecorded_step_ns == pytest.approx(8_000_000, rel=0.005)


def test_stretches_with_an_idle_cupti_show_a_part_of_the_cost() -> None:
    """Half of it and more, or less: the bounds hold both."""
    number = np.arange(1000)
    is_control = np.isin(number, [*range(64, 80), *range(128, 160), *range(256, 320)])
    for seen in (0.45, SEEN, 0.8):
        cost = np.where(is_control, 1.3 - 0.3 * seen, 1.3)
        lengths = (8_000_000 * cost).astype(np.int64)
        found = estimate_cost([MarkedSteps(number, lengths, ~is_control, is_control, is_control)])
        assert found is not None
        assert found.low_ns < 8_000_000 < found.high_ns
        assert found.unrecorded_step_ns == pytest.approx(8_000_000, rel=0.1)
        assert (found.unrecorded_step_ns == pytest.approx(8_000_000, rel=0.001)) is (seen == SEEN)


def test_steps_that_an_idle_cupti_makes_too_cheap_are_not_told_to_take_less_than_nothing() -> None:
    number = np.arange(400)
    is_control = np.isin(number, [*range(64, 80), *range(128, 160)])
    lengths = np.where(is_control, 1_000_000, 8_000_000)
    found = estimate_cost([MarkedSteps(number, lengths, ~is_control, is_control, is_control)])
    assert found is not None
    assert 0 < found.low_ns <= found.unrecorded_step_ns <= found.high_ns < 8_000_000


def test_the_interval_holds_the_truth_where_the_pace_of_the_host_wanders() -> None:
    """By a tenth and more in the course of a run, as on machines that others share."""
    rng, held, number = np.random.default_rng(7), 0, np.arange(1500)
    is_control = np.isin(number, [*range(144, 160), *range(272, 288), *range(528, 544)])
    is_control |= np.isin(number, range(1040, 1072))
    for _ in range(100):
        pace = np.exp(np.cumsum(rng.normal(0, 0.004, 1500)) + rng.normal(0, 0.06, 1500))
        lengths = (8_000_000 * pace * np.where(is_control, 1.0, 1.2)).astype(np.int64)
        found = estimate_cost(
            [MarkedSteps(number, lengths, ~is_control, is_control, out_of(number))]
        )
        assert found is not None
        truth = 8_000_000 * pace[~is_control].mean()
        held += found.low_ns <= truth <= found.high_ns
        assert found.unrecorded_step_ns == pytest.approx(truth, rel=0.1)
    assert held >= 90


def test_without_a_cost_one_is_rarely_claimed() -> None:
    rng = np.random.default_rng(5)
    found = [estimate_cost([steps(noisy(rng, 1.0), range(100, 130))]) for _ in range(200)]
    assert sum(cost is not None and cost.added_ns > 0 for cost in found) <= 10


def test_of_several_ranks_the_steps_count_that_none_recorded() -> None:
    lengths = np.full(200, 10_000, np.int64)
    slow, quick = lengths.copy(), lengths.copy()
    slow[100:120] = quick[100:120] = 8_000
    late = steps(quick, range(104, 120))
    found = estimate_cost([steps(slow, range(100, 120)), late])
    assert found is not None
    assert (found.steps, found.unrecorded_step_ns) == (16, 8_000)


def test_a_rank_without_control_steps_leaves_the_cost_unknown() -> None:
    lengths = np.full(200, 10_000, np.int64)
    assert estimate_cost([steps(lengths, range(100, 120)), None]) is None
    assert estimate_cost([]) is None
    assert estimate_cost([steps(lengths, range(100, 103))]) is None


@pytest.mark.parametrize("nothing", [slice(0, 200), slice(100, 120), slice(80, 140)])
def test_marks_at_one_and_the_same_time_say_nothing_of_the_cost(nothing: slice) -> None:
    lengths = np.full(200, 10_000, np.int64)
    lengths[nothing] = 0
    assert estimate_cost([steps(lengths, range(100, 120))]) is None


Gaps = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 50)), min_size=1, max_size=60)


@given(Gaps, st.floats(0, 10**8))
def test_charges_are_alike_and_sum_to_the_total_or_to_all(
    gaps: list[tuple[int, int]], total: float
) -> None:
    lengths, launches = np.array(gaps, np.int64).T
    each = charge_of_each(lengths, launches, total)
    charged = np.minimum(lengths, launches * each)
    assert charged.sum() == pytest.approx(min(total, lengths.sum()), rel=1e-6, abs=1)


def test_a_cost_is_put_into_words() -> None:
    cost = RecorderCost(33_800_000, 25_600_000, 25_000_000, 26_200_000, 3, 120)
    assert str(cost) == "recording lengthens each step by 32% (from 25.6 to 33.8 ms)"
    assert cost.basis == "29% to 35%, by 120 steps without the recorder"


# ---- a real process, with hooks, the collector, and a CUPTI of our own ----

PROGRAM: Final = """
import ctypes, os, struct, sys, time
import gputrace

collector = ctypes.CDLL(os.environ["GPUTRACE_LIBRARY"])
collector.InitializeInjection()
cupti = ctypes.CDLL(os.environ["GPUTRACE_CUPTI"])
name = ctypes.create_string_buffer(b"gemm")

def emit(size, end, *values):
    record = bytearray(size)
    for at, form, value in values:
        struct.pack_into(form, record, at, value)
    cupti.fake_emit(bytes(record), ctypes.c_uint64(end))

def launch(correlation):
    begin = time.time_ns()
    until = begin + (480_000 if cupti.fake_records() else 380_000)
    while time.time_ns() < until:
        pass
    emit(256, until, (0, "<I", 5), (4, "<I", 211), (8, "<Q", until - 5000), (16, "<Q", until),
         (24, "<I", os.getpid()), (32, "<I", correlation))
    emit(256, until + 20_000, (0, "<I", 10), (16, "<Q", until), (24, "<Q", until + 20_000),
         (44, "<I", 1), (48, "<I", 7), (92, "<I", correlation),
         (104, "<Q", ctypes.addressof(name)))

for step in range(int(sys.argv[1])):
    for index in range(5):
        launch(5 * step + index)
    gputrace.step()
"""


def run(machine: Machine, spools: Path, steps: int, **variables: str) -> None:
    spools.mkdir()
    env = machine.environment(spools, {"GPUTRACE_CONTROL": "1", **variables})
    env |= {"GPUTRACE_LIBRARY": str(machine.folder / "collector.so")}
    env |= {"PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(steps)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_in_programs_of_xla_cupti_stays(machine: Machine, tmp_path: Path) -> None:
    """It may crash programs that have CUDA graphs if it is let go of."""
    run(machine, tmp_path / "spools", 1400, **machine.with_library(tmp_path))
    merge(tmp_path / "spools", tmp_path / "trace.sqlite", {})
    with closing(sqlite3.connect(tmp_path / "trace.sqlite")) as rows:
        tables = {name for (name,) in rows.execute("SELECT name FROM sqlite_master")}
        (kernels,) = rows.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    assert kernels == 5 * 1400
    assert "GPUTRACE_CONTROL" not in tables


def test_a_recording_has_a_stretch_without_cupti_and_knows_its_cost(
    machine: Machine, tmp_path: Path
) -> None:
    # A busy machine would have it sample.
    run(machine, tmp_path / "spools", 1400, GPUTRACE_SAMPLE="all")
    trace = tmp_path / "trace.sqlite"
    merge(tmp_path / "spools", trace, {})
    with closing(sqlite3.connect(trace)) as rows:
        stretches = rows.execute("SELECT start, end FROM GPUTRACE_CONTROL").fetchall()
        control = []
        for stretch in stretches:
            sql = "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE start BETWEEN ? AND ?"
            assert rows.execute(sql, stretch).fetchone() == (0,)
            sql = "SELECT step FROM GPUTRACE_STEP WHERE start >= ? AND end <= ?"
            control.append([step for (step,) in rows.execute(sql, stretch)])
        sql = "SELECT count(DISTINCT correlationId) FROM CUPTI_ACTIVITY_KIND_KERNEL"
        (numbers,) = rows.execute(sql).fetchone()
        (kernels,) = rows.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    assert numbers == kernels, "CUPTI numbers calls from 1 on again when it comes back"
    begins = [2 ** int(np.log2(own[0])) for own in control]
    assert begins == sorted(set(begins))
    # Where steps are short, CUPTI would be held for too many of them before.
    assert begins[-1] == 1024
    assert all(own[-1] < 1.25 * first for own, first in zip(control, begins, strict=True))
    with gputrace.open(trace) as opened:
        report = opened.analyze()
    cost = report.recorder
    assert cost is not None
    assert cost.steps == sum(map(len, control))
    # Steps that others on the machine interrupt scatter, and the bounds are as wide.
    assert cost.low_ns / cost.step_ns < 0.85
    assert cost.high_ns / cost.step_ns > 0.7
    (row,) = report.breakdown
    # It is charged as a share of the typical step, which a busy machine parts from the mean one.
    charged = row.recorder_ns / row.steps
    assert cost.added_ns / 2 - 10_000 <= charged <= 2 * cost.added_ns + 10_000
