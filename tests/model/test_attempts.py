"""Which attempt of a run is analyzed, and what is said of the others and of early ends."""

from __future__ import annotations

from pathlib import Path

import gputrace
from gputrace.model.attempts import (
    Life,
    attempts_of,
    choose_attempt,
    describe_lives,
    of_other_attempts,
)
from tests.helpers.exports import Export, global_id

MS = 1_000_000
S = 1000 * MS


def life(
    rank: int,
    attempt: int,
    steps: int,
    code: int | None = 0,
    *,
    start: int = 0,
    step: int = 100 * MS,
    lingers: int = 0,
) -> Life:
    """A process whose steps take 100 ms and begin a second after its start."""
    first = start + S + step if steps else 0
    last = start + S + steps * step if steps else 0
    end = (last or start + S) + lingers
    return Life(10 * attempt + rank, rank, attempt, start, end, steps, first, last, code)


def test_a_single_attempt_that_ends_well_says_nothing() -> None:
    lives = [life(0, 1, 50), life(1, 1, 50)]
    assert list(describe_lives(lives, choose_attempt(lives))) == []
    assert of_other_attempts(lives, 1) == set()


def test_a_job_that_fails_says_who_ended_first() -> None:
    lives = [life(0, 1, 50, -15, lingers=S), life(1, 1, 50, -9)]
    (line,) = describe_lives(lives, 1)
    assert line == "the run ended after 7.00 s by SIGKILL of rank 1 (50 steps recorded)"


def test_the_last_attempt_with_enough_steps_is_chosen() -> None:
    lives = [life(0, 1, 500, 1), life(0, 2, 40, 1, start=60 * S), life(0, 3, 1, 1, start=70 * S)]
    assert choose_attempt(lives) == 2
    assert choose_attempt(lives, until=60 * S) == 1
    assert choose_attempt(lives[2:]) == 3
    assert choose_attempt([]) == 0
    assert of_other_attempts(lives, 2) == {10, 30}


def test_a_rank_that_was_not_restarted_keeps_its_process() -> None:
    lives = [life(0, 1, 900), life(1, 1, 50, -9), life(1, 2, 40, start=10 * S)]
    assert choose_attempt(lives) == 2
    assert of_other_attempts(lives, 2) == {11}
    line, *_ = describe_lives(lives, 2)
    assert line.startswith("rank 1: 2 attempts: ")


def test_a_rank_that_was_given_up_does_not_belong_to_the_next_attempt() -> None:
    lives = [life(0, 1, 50, -15), life(1, 1, 50, -9), life(0, 2, 40, start=10 * S)]
    assert of_other_attempts(lives, 2) == {10, 11}
    assert next(describe_lives(lives, 2)).startswith("ranks 0-1: 2 attempts: ")


def test_processes_of_all_attempts_stay() -> None:
    launcher = Life(7, -1, 0, 0, 99 * S)
    lives = [launcher, life(0, 1, 50, 1), life(0, 2, 50, start=20 * S)]
    assert of_other_attempts(lives, 2) == {10}


def test_ranks_that_are_killed_together_did_not_end_early() -> None:
    # The last second of a killed process may be unwritten.
    lives = [life(0, 1, 60, -15), life(1, 1, 52, -15, lingers=800 * MS)]
    assert not any("early" in line for line in describe_lives(lives, 1))


def test_many_early_ends_are_counted() -> None:
    lives = [life(0, 1, 100), *(life(rank, 1, rank, -9) for rank in range(1, 9))]
    lines = [line for line in describe_lives(lives, 1) if "ended early" in line]
    assert len(lines) == 6
    assert lines[0].startswith("rank 1 ended early: its last recorded step, 1 of 100, was 9.90 s")
    assert lines[-1] == "3 more ended early"


def test_time_lost_to_a_restart_is_from_the_last_step_to_the_first() -> None:
    lives = [life(0, 1, 50, 1), life(1, 1, 48, 1), life(0, 2, 50, start=20 * S)]
    first, second = attempts_of(lives)
    assert (first.stopped, second.resumed) == (6 * S, 21 * S + 100 * MS)


def own(folder: Path, rank: int = 0) -> Path:
    """A trace of two processes on one card, of which the second was started for the first."""
    made = Export().card(0, "0000:01:00.0")
    made.give("GPUTRACE_META", "name", "value").add("GPUTRACE_META", name="format", value="1")
    made.add("GPUTRACE_META", name="start_realtime_ns", value="1")
    made.give("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    made.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000 * S + rank)
    made.give("GPUTRACE_PROCESS", "globalPid", "pid", "host", "rank", "worldSize")
    life_columns = "globalPid attempt startNs endNs exitCode steps firstStepNs lastStepNs"
    made.give("GPUTRACE_LIFE", *life_columns.split())
    name = made.string("gputrace.step")
    for attempt, start, code in ((1, S, -9), (2, 20 * S, 0)):
        pid = 100 * attempt
        made.ordinal(pid, 0, 0)
        who = {"globalPid": global_id(pid)}
        made.add("GPUTRACE_PROCESS", **who, pid=pid, host=f"n{rank}", rank=rank, worldSize=2)
        edges = {"startNs": start, "endNs": start + 2 * S, "exitCode": code, "steps": 20}
        steps = {"firstStepNs": start + 50 * MS, "lastStepNs": start + S}
        made.add("GPUTRACE_LIFE", **who, attempt=attempt, **edges, **steps)
        for step in range(20):
            at = start + step * 50 * MS
            correlation = 1000 * attempt + step
            made.call(at, at + 1 * MS, "cudaLaunchKernel", pid=pid, correlation=correlation)
            made.kernel(at + 2 * MS, at + 48 * MS, pid=pid, correlationId=correlation)
            step_of = {"globalTid": global_id(pid, thread=pid), "nameId": name, "step": step}
            made.add("GPUTRACE_STEP", start=at, end=at + 50 * MS, **step_of)
    return made.write(folder / f"rank{rank}.sqlite")


def test_the_card_of_two_attempts_has_the_time_of_one(tmp_path: Path) -> None:
    with gputrace.open(own(tmp_path)) as opened:
        second, first = opened.analyze(), opened.analyze(time=(S, 2 * S))
    for report, start in ((second, 20 * S), (first, S)):
        (gpu,) = report.gpus
        assert (gpu.rank, gpu.kernels) == (0, 20)
        assert gpu.start_ns == start + 2 * MS
        assert gpu.span_ns < S
        assert report.gaps.largest[0].end_ns - report.gaps.largest[0].start_ns < 10 * MS
        assert report.steps.count == 20
    assert {finding.id for finding in second.findings} >= {"restarts"}
    assert any("the analysis covers attempt 2" in line for line in second.warnings)


def test_files_of_two_machines_agree_on_the_attempt(tmp_path: Path) -> None:
    with gputrace.open(own(tmp_path), own(tmp_path, 1)) as opened:
        report = opened.analyze()
    assert [(gpu.rank, gpu.kernels) for gpu in report.gpus] == [(0, 20), (1, 20)]
    (line,) = [line for line in report.warnings if "attempts" in line]
    assert line.startswith("ranks 0-1: 2 attempts: attempt 1 ended after 2.00 s by SIGKILL")
