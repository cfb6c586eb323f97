"""Samples of the host's stack let gaps and findings name the line of the user's program."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputrace.api import Report
from tests.helpers.exports import STEP, global_id
from tests.helpers.handmade import MS, Run, analyze, train
from tests.helpers.sentences import words_of

LOAD = "/home/me/train.py:48 load_batch"
DECODE = "/home/me/train.py:52 decode"


def loop(run: Run, *lines: str, steps: int = 10, thread: int = 0) -> None:
    """Steps that spend a millisecond at each of the lines before the batch goes to the GPU."""
    for _ in range(steps):
        run.wait_at(*lines, thread=thread)
        train(run, 1)


def evidence(report: Report) -> list[str]:
    return [gap.evidence for gap in report.gaps.largest[:5]]


def message(report: Report, id: str = "data-feeding") -> str:
    [found] = [words_of(finding) for finding in report.findings if finding.id == id]
    return found


def test_a_gap_names_the_line_that_most_of_its_samples_are_at(tmp_path: Path) -> None:
    run = Run()
    loop(run, LOAD, DECODE, LOAD, LOAD)
    for told in evidence(analyze(run, tmp_path)):
        assert told.startswith("no CUDA call 4.0")
        assert told.endswith("(thread 100), at train.py:48 load_batch (3 of 4 samples)")


def test_a_finding_names_the_line_that_dominates_and_how_much(tmp_path: Path) -> None:
    run = Run()
    loop(run, LOAD, DECODE, LOAD, LOAD)
    report = analyze(run, tmp_path)
    # The wait before the first step is before the first GPU operation: no gap.
    assert message(report).endswith("the host is at train.py:48 load_batch in 75% of 36 samples")
    [finding] = [f for f in report.findings if f.id == "data-feeding"]
    assert finding.evidence["line"] == "train.py:48 load_batch"


@pytest.mark.parametrize("loads", [True, False])
def test_a_loop_that_was_seen_to_have_no_loader_is_not_told_to_give_it_workers(
    tmp_path: Path, loads: bool
) -> None:
    """The hooks, which recorded the passes, would have recorded a loader's batches."""
    run = Run()
    columns = ("start", "end", "globalTid", "nameId", "kind", "number")
    run.export.give("GPUTRACE_META", "name", "value").give("GPUTRACE_HOST_RANGE", *columns)
    run.export.rows["GPUTRACE_META"] = []
    who = {"globalTid": global_id(100, thread=100), "number": 0}
    data, passes = run.export.string("torch.DataLoader"), run.export.string("forward")
    for _ in range(10):
        start = run.now
        run.wait_at(*[LOAD] * 4)
        if loads:
            row = {"start": start, "end": run.now, "nameId": data, "kind": 1}
            run.export.add("GPUTRACE_HOST_RANGE", **row, **who)
        start = run.now
        train(run, 1)
        row = {"start": start + MS // 10, "end": run.now, "nameId": passes, "kind": 4}
        run.export.add("GPUTRACE_HOST_RANGE", **row, **who)
    [found] = [f for f in analyze(run, tmp_path).findings if f.id == "data-feeding"]
    assert ("num_workers" in found.advice) == loads
    assert ("such as logging" in found.advice) == (not loads)


def test_a_finding_names_none_of_lines_that_share_the_time(tmp_path: Path) -> None:
    run = Run()
    loop(run, LOAD, DECODE, "/home/me/train.py:60 augment")
    report = analyze(run, tmp_path)
    assert "samples" not in message(report)
    assert all("1 of 3 samples" in told for told in evidence(report))


def test_a_finding_names_no_line_for_a_handful_of_samples(tmp_path: Path) -> None:
    run = Run()
    loop(run, LOAD, steps=4)
    train(run, 10, wait=MS)
    assert "samples" not in message(analyze(run, tmp_path))


def test_other_work_of_the_host_names_its_line_too(tmp_path: Path) -> None:
    run = Run()
    for _ in range(10):
        train(run, 1)
        run.model(2)
        run.wait_at(*["/home/me/train.py:70 log"] * 3)
        run.kernel(MS, "late")
        run.synchronize()
    report = analyze(run, tmp_path)
    assert "while the host does other work at train.py:70 log" in message(report, "host-work")


def test_lines_of_one_function_are_named_together_with_the_share_of_the_first(
    tmp_path: Path,
) -> None:
    run = Run()
    for number in range(10):
        train(run, 1)
        run.model(2)
        lines = (f"/home/me/train.py:{70 + min(part, number % 5)} log" for part in range(5))
        run.wait_at(*lines, *["/home/me/train.py:90 main"] * 2)
        run.kernel(MS, "late")
        run.synchronize()
    told = message(analyze(run, tmp_path), "host-work")
    assert "at train.py:70 log in 27% of 63 samples, 71% in log" in told


@pytest.mark.parametrize("others", [0, 1])
def test_a_line_that_calls_a_library_s_loop_names_the_library_s_frame(
    tmp_path: Path, others: int
) -> None:
    """As all of the thread's samples are at it, it tells nothing of the host's work."""
    run = Run()
    for _ in range(10):
        train(run, 1)
        run.model(2)
        run.wait_at(*["/home/me/train.py:47 main"] * 3, inner="/lib/trainer.py:310 count")
        run.kernel(MS, "late")
        run.synchronize()
    run.wait_at(*["/home/me/train.py:12 read"] * 9 * others)
    told = message(analyze(run, tmp_path), "host-work")
    where = "train.py:47 main" if others else "trainer.py:310 count, called from train.py:47 main"
    assert f"while the host does other work at {where}" in told


def test_as_much_of_a_path_is_shown_as_tells_files_apart(tmp_path: Path) -> None:
    run = Run()
    other, whole = "/home/me/val/data.py:3 read", "/home/me/train/data.py:5 read"
    loop(run, other, whole, LOAD, whole)
    found = evidence(analyze(run, tmp_path))
    assert all("at train/data.py:5 read (2 of 4" in told for told in found)


def test_names_that_are_no_file_and_line_stay_as_they_are(tmp_path: Path) -> None:
    run = Run()
    loop(run, "(more lines)")
    assert all("at (more lines) (1 of 1" in told for told in evidence(analyze(run, tmp_path)))


def test_the_main_thread_tells_for_a_thread_that_runs_no_python(tmp_path: Path) -> None:
    run = Run(pid=100, thread=200)
    loop(run, LOAD, thread=100)
    for told in evidence(analyze(run, tmp_path)):
        assert told.endswith("(thread 200), thread 100 at train.py:48 load_batch (1 of 1 samples)")


def test_the_main_thread_tells_nothing_where_another_one_trains(tmp_path: Path) -> None:
    run = Run(pid=100, thread=200)
    loop(run, LOAD, thread=100)
    who = global_id(100, thread=200)
    run.export.add(STEP, start=0, end=MS, globalTid=who, nameId=run.export.string("s"), step=0)
    report = analyze(run, tmp_path)
    assert not any("samples" in told for told in evidence(report))


def test_without_samples_nothing_is_said_of_lines(tmp_path: Path) -> None:
    run = Run()
    train(run, 10, wait=4 * MS)
    report = analyze(run, tmp_path)
    assert not any("samples" in told for told in evidence(report))
    assert "samples" not in message(report)
