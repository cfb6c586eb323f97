"""Attempts and early ends: recorded with real processes, and told in output, trace and analysis."""

from __future__ import annotations

import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

import gputrace
from gputrace.collectors.exit_watch import read_exits
from tests.helpers import command

TORCHRUN = """
import os, subprocess, sys, time
ranks, attempts, *words = sys.argv[1:]
for count in range(int(attempts)):
    workers = [
        subprocess.Popen([sys.executable, *words], env={**os.environ, "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "TORCHELASTIC_RESTART_COUNT": str(count)})
        for rank in range(int(ranks))
    ]
    while not any(worker.poll() for worker in workers):
        if all(worker.poll() == 0 for worker in workers):
            sys.exit()
        time.sleep(0.02)
    for worker in workers:
        worker.terminate()
        worker.wait()
    time.sleep(0.3)
sys.exit(1)
"""
"""Starts all workers anew when one of them fails, as torchrun does."""
# Ranks wait for each other before their first steps, as in training, however late one started.
TRAIN = """
import gputrace, os, signal, sys, time
rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
ready = [f"{{sys.argv[0]}}.{{count}}.{{r}}" for r in range(int(os.environ["WORLD_SIZE"]))]
open(ready[rank], "w").close()
while not all(map(os.path.exists, ready)):
    time.sleep(0.001)
for number in range(40):
    time.sleep(0.02)
    gputrace.step()
    if (rank, count, number) == (1, 0, 30):
        {end}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def record(folder: Path, source: str, *words: str) -> tuple[Path, str]:
    """Record a program; return the trace and what the recorder said."""
    (folder / "launch.py").write_text(TORCHRUN)
    (folder / "train.py").write_text(source)
    trace = folder / "t.sqlite"
    program = (sys.executable, *(folder / w if w.endswith(".py") else w for w in words))
    return trace, command.gputrace("record", "--force", "-o", trace, "--", *program).err


def rows(trace: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(trace)) as database:
        return database.execute(sql).fetchall()


LIVES = (
    "SELECT rank, attempt, exitCode FROM GPUTRACE_LIFE JOIN GPUTRACE_PROCESS USING (globalPid) "
    "ORDER BY attempt, rank"
)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("restarted")
    return record(folder, TRAIN.format(end=KILLED), "launch.py", "2", "2", "train.py")


def test_a_restart_is_told_with_who_ended_first_and_how(restarted: tuple[Path, str]) -> None:
    trace, said = restarted
    assert "ranks 0-1: 2 attempts: attempt 1 ended after " in said
    assert " by SIGKILL of rank 1 (" in said
    assert "; the analysis covers attempt 2, `--time 0.000s:" in said
    assert rows(trace, LIVES) == [(0, 1, -15), (1, 1, -9), (0, 2, 0), (1, 2, 0)]


def test_only_one_attempt_is_analyzed_and_the_time_between_is_a_finding(
    restarted: tuple[Path, str],
) -> None:
    trace, said = restarted
    ((window, end_s),) = re.findall(r"`--time (0\.000s:(\d+\.\d+)s)` shows attempt 1", said)
    with gputrace.open(trace) as opened:
        report = opened.analyze()
        first = opened.analyze(time=window)
    assert report.steps.count == 39  # Of 40, the first has no mark of its start.
    assert {row.rank for row in report.breakdown} == {0, 1}
    assert min(step.start_ns for step in report.step_list) >= float(end_s) * 1e9
    (found,) = [finding for finding in report.findings if finding.id == "restarts"]
    assert found.evidence["restarts"] == 1
    assert found.evidence["exit_code"] == -9
    assert 300_000_000 < found.evidence["lost_ns"] < 10_000_000_000  # type: ignore[operator]
    assert any("the analysis covers attempt 2" in note for note in report.warnings)
    assert any("the analysis covers attempt 1" in note for note in first.warnings)
    assert not any(finding.id == "restarts" for finding in first.findings)


def test_an_attempt_that_left_nothing_is_counted(tmp_path: Path) -> None:
    source = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(7)\n"
    trace, said = record(
        tmp_path, source + TRAIN.format(end=KILLED), "launch.py", "2", "2", "train.py"
    )
    assert "ranks 0-1: 2 attempts: attempt 2 ended after " in said
    assert "; attempt 1 left nothing" in said
    assert rows(trace, LIVES) == [(0, 2, 0), (1, 2, 0)]


def test_an_attempt_too_short_to_analyze_is_not_covered(tmp_path: Path) -> None:
    source = TRAIN.format(end=KILLED) + "    if count == 1 and number == 1: sys.exit(3)\n"
    _, said = record(tmp_path, source, "launch.py", "2", "2", "train.py")
    assert " with exit code 3 of rank " in said
    assert "; the analysis covers attempt 1, `--time " in said


@pytest.mark.parametrize(
    ("end", "how"), [(KILLED, "by SIGKILL"), ("os._exit(5)", "with exit code 5"), ("break", "")]
)
def test_a_rank_that_ended_early_is_told_with_how(tmp_path: Path, end: str, how: str) -> None:
    launch = (
        "import os, subprocess, sys\n"
        "workers = [subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, 'RANK': r,"
        "'WORLD_SIZE': '3'}) for r in '012']\n"
        "[worker.wait() for worker in workers]\n"
    )
    (tmp_path / "plain.py").write_text(launch)
    source = TRAIN.format(end=end).replace("range(40)", "range(100 if rank != 1 else 60)")
    trace, said = record(tmp_path, source, "plain.py", "train.py")
    (line,) = [line for line in said.splitlines() if "ended early" in line]
    assert line.startswith("gputrace: rank 1 ended early: its last recorded step, ")
    assert " of 100, was " in line
    assert (f"and it ended {how}" in line) == bool(how)
    assert "attempts" not in said
    report = gputrace.open(trace).analyze()
    assert any("rank 1 ended early" in note for note in report.warnings)
    assert {row.rank for row in report.breakdown} == {0, 1, 2}


def test_a_failed_program_that_a_script_starts_again_is_another_attempt(tmp_path: Path) -> None:
    source = (
        "import gputrace, os, sys, time\n"
        "for _ in range(20): time.sleep(0.01); gputrace.step()\n"
        f"path = {str(tmp_path / 'again')!r}\n"
        "if not os.path.exists(path): open(path, 'w'); sys.exit(1)\n"
    )
    (tmp_path / "train.py").write_text(source)
    trace = tmp_path / "t.sqlite"
    loop = f"until {sys.executable} {tmp_path / 'train.py'}; do sleep 0.2; done"
    said = command.gputrace("record", "-o", trace, "--", "sh", "-c", loop).err
    assert "gputrace: the program: 2 attempts: attempt 1 ended after " in said
    assert " with exit code 1 (20 steps recorded)" in said
    assert gputrace.open(trace).analyze().steps.count == 19


def test_runs_that_succeed_one_after_another_are_no_attempts(tmp_path: Path) -> None:
    source = "import gputrace, time\nfor _ in range(9): time.sleep(0.01); gputrace.step()\n"
    (tmp_path / "train.py").write_text(source)
    loop = f"for seed in 1 2; do {sys.executable} {tmp_path / 'train.py'}; done"
    said = command.gputrace("record", "-o", tmp_path / "t.sqlite", "--", "sh", "-c", loop).err
    assert "attempt" not in said


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    assert read_exits(tmp_path) == {}
    (tmp_path / "processes.exits").write_text("17 100 -9 node 1\n18 100")
    assert read_exits(tmp_path) == {("node 1", 17): (100, -9)}
