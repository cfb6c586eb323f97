"""One step against the median step, on generated runs and on the host alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import gputrace
from gputrace.analyzers.timeline_model import gaps
from gputrace.data import unpacked
from gputrace.errors import UsageError
from gputrace.report import Limits
from gputrace.report.step import document, worth_listing
from tests.helpers import command
from tests.helpers.exports import SAMPLE, STEP, Export, global_id
from tests.synthetic import Plan, simulate, write_nsys

MS = 1_000_000
SLOW, LATE_NS = 9, 30 * MS


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks; the host of rank 1 is 30 ms late in one step, and rank 0 waits for it."""
    path = tmp_path_factory.mktemp("steps") / "late.sqlite"
    plan = Plan(ranks=2, steps=16, allreduces=2, sync_every_step=True, jitter=0.0)
    plan = replace(plan, late_host_rank=1, late_host_ns=LATE_NS, odd_steps=(SLOW,))
    write_nsys(simulate(plan), path)
    return path


def test_the_parts_of_a_step_sum_to_its_length_and_first_comes_the_gpu_that_was_late(
    late: Path,
) -> None:
    with gputrace.open(late) as trace:
        report, found = trace.analyze(), trace.explain_step(SLOW)
    lengths = {(s.gpu, s.step): s.end_ns - s.start_ns for s in report.step_list}
    assert [row.rank for row in found.gpus] == [1, 0]
    for row in found.gpus:
        assert sum(part.ns for part in row.parts) == lengths[row.gpu, SLOW]
        assert sum(part.usual_ns for part in row.parts) == lengths[row.gpu, row.usual_step]
        assert sum(part.more_ns for part in row.parts) == row.more_ns
        steady = {s.step for s in report.step_list if s.phase == "steady"} - {SLOW}
        ordered = sorted(lengths[row.gpu, step] for step in steady)
        assert row.usual_ns == ordered[(len(ordered) - 1) // 2]
    first, waits = found.gpus
    # The GPU still runs for a while what was launched before.
    assert LATE_NS - MS < first.parts[0].more_ns <= LATE_NS
    assert first.parts[0].cause != "communication-exposed"
    assert waits.parts[0].cause == "communication-exposed"
    assert first.longest_gap is not None
    assert LATE_NS - MS < first.longest_gap.length_ns <= LATE_NS
    assert found.message.startswith(f"step {SLOW} took ")
    assert f"{first.parts[0].label} +" in found.message


def test_a_step_that_is_not_there_is_refused(late: Path) -> None:
    with gputrace.open(late) as trace, pytest.raises(UsageError, match="it has steps 0 to "):
        trace.explain_step(99)


def test_the_slowest_step_need_not_be_known_by_its_number(late: Path) -> None:
    by_number = command.gputrace("analyze", late, "--step", str(SLOW)).out
    assert command.gputrace("analyze", late, "--step", "slowest").out == by_number
    ran = command.gputrace("analyze", late, "--step", "last")
    command.assert_refused(ran, 2, "'last' is neither a step's number nor slowest")


def test_the_command_says_it_in_every_format(late: Path) -> None:
    ran = command.gputrace("analyze", late, "--step", str(SLOW))
    assert ran.code == 0
    assert ran.out.startswith(f"Step {SLOW} took ")
    assert f"What step {SLOW} differs in from step " in ran.out
    assert "The longest gap in it takes " in ran.out
    as_json = command.gputrace("analyze", late, "--step", str(SLOW), "--json")
    found = json.loads(as_json.out)
    assert (found["step"], found["phase"], len(found["gpus"])) == (SLOW, "steady", 2)
    csv = command.gputrace("analyze", late, "--step", str(SLOW), "--format", "csv").out.splitlines()
    assert csv[0] == "step,gpu,rank,cause,ns,usual_ns,more_ns"
    assert len(csv) == 1 + sum(len(row["parts"]) for row in found["gpus"])


def test_the_finding_of_slow_steps_lists_them_all_and_names_the_command(late: Path) -> None:
    with gputrace.open(late) as trace:
        finding = next(f for f in trace.analyze().findings if f.id == "slow-steps")
    assert finding.evidence["steps"] == str(SLOW)
    assert f"gputrace analyze TRACE --step {SLOW}" in finding.advice


PROGRAM = """
import gputrace, time
def load(i):
    time.sleep(0.3 if i == 20 else 0.005)
for i in range(30):
    load(i)
    gputrace.step()
"""


def test_without_a_gpu_the_line_that_slept_is_named(tmp_path: Path) -> None:
    program, trace = tmp_path / "train.py", tmp_path / "t.sqlite"
    program.write_text(PROGRAM)
    given = ("record", "--backend", "host", "--python", "-o", trace, "--", sys.executable, program)
    assert command.gputrace(*given).code == 0
    with gputrace.open(trace) as opened:
        lengths = [step.end_ns - step.start_ns for step in opened.analyze().step_list]
        found = opened.explain_step(lengths.index(max(lengths)))
    (row,) = found.gpus
    assert row.gpu is None
    assert row.more_ns > 250 * MS
    assert row.line is not None
    assert row.line.startswith("train.py:4 load")
    assert "train.py:4 load" in found.message
    assert "look at train.py:4 load" in found.advice
    for counts, said in ("3 of 3", "All 3 samples of it are at x.py:4 f."), ("2 of 3", "Most sam"):
        one = replace(found, gpus=(replace(row, line=f"x.py:4 f ({counts} samples)"),))
        assert any(said in line.text for line in document(one, Limits()).notes)


def test_the_line_of_a_longer_step_lies_where_it_is_longer(tmp_path: Path) -> None:
    """Each step waits for data for twice as long as the slow one does anything else."""
    program, trace = tmp_path / "train.py", tmp_path / "t.sqlite"
    program.write_text("""
import gputrace, time
for i in range(8):
    with gputrace.annotate("data"):
        time.sleep(0.2)
    time.sleep(0.1 if i == 6 else 0.001)
    gputrace.step()
""")
    given = ("record", "--backend", "host", "--python", "-o", trace, "--", sys.executable, program)
    assert command.gputrace(*given).code == 0
    with gputrace.open(trace) as opened:
        (row,) = opened.explain_step("slowest").gpus
    assert row.parts[0].cause == "host_rest"
    assert row.line is not None
    assert row.line.startswith("train.py:6 ")


@pytest.mark.parametrize("waits", [1, 2])
def test_a_line_is_named_from_more_than_half_of_the_samples_on(tmp_path: Path, waits: int) -> None:
    """The slow step is met once in its forward pass, and once or twice where it waits."""
    export, who = Export().give("GPUTRACE_META", "name", "value"), {"globalTid": global_id(100)}
    export.rows.setdefault("GPUTRACE_META", [])
    edges = [1, *(1 + at * MS for at in (5, 10, 15, 20, 25, 40, 45))]
    for step, (start, end) in enumerate(pairwise(edges)):
        export.add(STEP, start=start, end=end, nameId=export.string("s"), step=step, **who)
    for at, place in enumerate(["train.py:9 wait"] * waits + ["train.py:3 forward"]):
        name = export.string(place)
        row = {"start": (30 + at) * MS, "nameId": name, "innerNameId": name, "waitedNs": MS}
        export.add(SAMPLE, **row, **who)
    with gputrace.open(export.write(tmp_path / "t.sqlite")) as trace:
        found = trace.explain_step("slowest")
    assert "took 15.0 ms" in found.message
    assert ("train.py:9 wait" in found.message) == (waits == 2)


def test_the_longest_gap_of_a_step_says_that_the_loader_was_waited_for() -> None:
    with unpacked("demo.sqlite.xz") as demo, gputrace.open(demo) as trace:
        first, *_ = trace.explain_step("slowest").gpus
    assert first.longest_gap is not None
    same = "in the data loader for all 150 ms, without a CUDA call"
    assert first.longest_gap.evidence.startswith(same)
    listed = worth_listing(first)
    assert 0 < len(listed) < len(first.parts)
    assert min(abs(part.more_ns) for part in listed) > 50_000


def test_the_advice_on_a_slow_step_is_that_on_slow_steps_and_a_usual_one_needs_none() -> None:
    with unpacked("demo.sqlite.xz") as demo, gputrace.open(demo) as trace:
        slowest, usual = trace.explain_step("slowest"), trace.explain_step(12)
    steps = "it is one of the slow steps (9-10, 13-14, 17-18, 21-22)"
    assert slowest.advice.startswith(f"{steps}: check the batches of these steps")
    assert usual.advice == ""
    assert document(usual, Limits()).notes[-1].text == "Nothing stands out in it."


@pytest.mark.parametrize(
    ("launches", "advice"), [(4, "look at the card"), (5, "check the batches")]
)
def test_the_same_kernels_take_longer_because_of_the_card(launches: int, advice: str) -> None:
    card: Any = SimpleNamespace(id="throttling", gpus=(0,), message="GPU 0 is throttled")
    row: Any = SimpleNamespace(
        gpu=0, rank=0, line=None, more_ns=MS, usual_ns=9 * MS,
        parts=(SimpleNamespace(cause="compute"),),
        kernels=(SimpleNamespace(more_ns=MS, launches=launches, usual_launches=4),),
    )  # fmt: skip
    told = gaps._advice(cast("Any", SimpleNamespace(findings=[card])), 3, row)
    assert told.startswith(advice)
    assert told.endswith("; GPU 0 is throttled") == (launches == 4)


@pytest.mark.parametrize(("queued_ms", "data_ms", "rest_ms"), [(8, 20, 2), (14, 16, 0)])
def test_a_wait_for_data_is_one_for_a_core_only_where_the_rest_has_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch, queued_ms: int, data_ms: int, rest_ms: int
) -> None:
    """A thread that waits for data may sleep, which needs no core."""
    spent = {"host_data": 20 * MS, "host_rest": 10 * MS}
    monkeypatch.setattr(gaps, "_by_proof", lambda *_: spent)
    counters: Any = SimpleNamespace(queued_in=lambda _: queued_ms * MS)
    step: Any = SimpleNamespace(start_ns=0, end_ns=30 * MS)
    found = gaps._by_cause(cast("Any", None), step, counters)
    assert found == {
        "host_data": data_ms * MS,
        "host_rest": rest_ms * MS,
        "cpu-starved": queued_ms * MS,
    }
