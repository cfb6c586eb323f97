"""Other programs on the cores of a recording, as /proc shows them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

import gputrace
from gputrace.collectors import neighbours, processes
from gputrace.collectors.neighbours import PROCESS, CoreNeighbours, Pace, RunProcesses
from tests.helpers import command

SPIN: Final = "while True: pass"
CORE: Final = min(os.sched_getaffinity(0))


@contextmanager
def running(code: str, *before: str, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program on one core, as a child of this process."""
    command = [*before, "taskset", "-c", str(CORE), sys.executable, "-c", code]
    with subprocess.Popen(command, **how) as process:
        yield process
        process.kill()


def looked(folder: Path, watch: CoreNeighbours, seconds: float = 1.5) -> list[dict[str, Any]]:
    """Look twice; return the rows."""
    for _ in range(2):
        watch._pace._due = 0
        watch.look()
        time.sleep(seconds)
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.cores.jsonl")]
    lines = [line for text in texts for line in text.splitlines()]
    rows = [row for line in lines for row in json.loads(line)["processes"]]
    return [dict(zip(PROCESS, row, strict=True)) for row in rows]


def of(rows: Sequence[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["pid"] == pid]


@pytest.fixture(autouse=True)
def _however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_OURS_CORES", "_NAMED_CORES", "_HIDDEN_CORES"):
        monkeypatch.setattr(neighbours, limit, 0.01)


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """Return the id of a program on the core that this process has not started."""
    command = ["setsid", "-f", "taskset", "-c", str(CORE), sys.executable, "-c"]
    code = f"import os, time; print(os.getpid(), flush=True); os.close(1)\n{SPIN}"
    with subprocess.Popen([*command, code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        yield pid
        os.kill(pid, 9)


def test_a_program_on_the_cores_of_the_recording_is_named(tmp_path: Path, elsewhere: int) -> None:
    watch = CoreNeighbours(tmp_path)
    with running(SPIN) as ours:
        rows = looked(tmp_path, watch)
    assert of(rows, ours.pid) == []
    (row,) = of(rows, elsewhere)
    assert 0.01 <= row["use"] <= 0.9
    assert (row["gpu"], row["cpus"], row["isRecorded"]) == (None, str(CORE), 0)
    assert row["name"] == Path(f"/proc/{elsewhere}/comm").read_text().strip()
    nodes = [n for n in Path("/sys/devices/system/node").glob("node*/cpulist") if n.exists()]
    assert row["numaNode"] == (0 if len(nodes) == 1 else row["numaNode"])


def test_a_program_on_other_cores_is_no_neighbour(
    tmp_path: Path, elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_affinity", lambda pid: {7} if pid == elsewhere else {CORE})
    monkeypatch.setattr(neighbours, "_siblings", lambda _: frozenset())
    with running(SPIN):
        assert of(looked(tmp_path, CoreNeighbours(tmp_path)), elsewhere) == []


def test_a_program_on_the_other_threads_of_its_cores_is_kept_as_such(
    tmp_path: Path, elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_affinity", lambda pid: {7} if pid == elsewhere else {CORE})
    monkeypatch.setattr(neighbours, "_siblings", lambda cpu: frozenset({cpu, 7}))
    with running(SPIN):
        (row,) = of(looked(tmp_path, CoreNeighbours(tmp_path)), elsewhere)
    assert (row["sharing"], row["cpus"]) == ("SMT", "7")


def test_programs_that_cannot_be_seen_have_no_pid(
    tmp_path: Path, elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: the cores are busy, and not by any process there."""
    read = processes.read_stat
    with running(SPIN) as ours:
        seen = {os.getpid(), ours.pid}
        monkeypatch.setattr(neighbours, "read_stat", lambda p: read(p) if p in seen else None)
        rows = looked(tmp_path, CoreNeighbours(tmp_path), 2)
    assert [row["name"] for row in rows if row["pid"] is None] == [None]


def test_children_of_the_recording_that_come_and_go_are_its_own(tmp_path: Path) -> None:
    child = "subprocess.run([sys.executable, '-c', 'sum(range(9**6))'])"
    code = f"import subprocess, sys\nwhile True: {child}"
    with running(code) as ours:
        rows = looked(tmp_path, CoreNeighbours(tmp_path), 2)
        assert ours.poll() is None
    assert sum(row["use"] for row in rows if row["pid"] is None) < 0.2


@pytest.mark.parametrize("patience", [4000, 5000])
def test_looks_take_a_bounded_part_of_a_core(
    monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    """The fourth one is slow, as when a program starts CUDA meanwhile."""
    wall, core, looks = 10**12, 10**9, list[int]()
    clock = SimpleNamespace(monotonic_ns=lambda: wall, process_time_ns=lambda: core)
    monkeypatch.setattr(neighbours, "time", clock)
    pace = Pace(patience)
    while wall < 10**12 + 600 * 10**9:
        if pace.is_due():
            core += 70_000_000 if len(looks) == 3 else 1_300_000
            looks.append(wall - 10**12)
            pace.end()
        wall += 250_000_000
    assert looks[:3] == [0, 10**9, 3 * 10**9], "few at the start, however long each takes"
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert max(gap / max(at, 10**9) for at, gap in zip(looks, gaps, strict=False)) < 2.2
    assert min(gaps) >= 10**9
    assert (core - 10**9) / (wall - 10**12) <= 1.01 / patience


def test_a_process_is_known_by_the_folder_that_it_inherited(tmp_path: Path, elsewhere: int) -> None:
    code = "import time; time.sleep(60)"
    with ExitStack() as stack:
        here, other = (
            stack.enter_context(running(code, env=os.environ | {"GPUTRACE_DIR": str(folder)}))
            for folder in (tmp_path, tmp_path / "other")
        )
        time.sleep(0.2)
        run = RunProcesses(tmp_path, elsewhere)
        assert [run.has(pid) for pid in (here.pid, other.pid, elsewhere, 0)] == [
            *(True, False, True, False)
        ]
        assert RunProcesses(tmp_path, os.getpid()).has(other.pid), "its child"


def test_tasks_of_one_job_are_no_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: int
) -> None:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with running("import time; time.sleep(60)", env=os.environ | slurm) as task:
        time.sleep(0.2)
        assert not RunProcesses(tmp_path, elsewhere).has(task.pid)
        for name, value in slurm.items():
            monkeypatch.setenv(name, value)
        assert RunProcesses(tmp_path, elsewhere).has(task.pid)


TRAIN: Final = """
import os, time
import gputrace
os.sched_setaffinity(0, {CORE})
end = time.monotonic() + 9
while time.monotonic() < end:
    until = time.thread_time() + 0.01
    while time.thread_time() < until: pass
    gputrace.step()
""".replace("CORE", str(CORE))


def test_the_program_that_has_the_cores_is_named(tmp_path: Path, elsewhere: int) -> None:
    trace = tmp_path / "t.sqlite"
    program = tmp_path / "train.py"
    program.write_text(TRAIN, encoding="utf-8")
    ran = command.gputrace("record", "-o", trace, "--", sys.executable, program)
    assert ran.code == 0, ran.err
    with gputrace.open(trace) as opened:
        found = opened.analyze().findings[0]
    assert found.id == "cpu-starved"
    assert found.message.startswith("too few cores cost ")
    evidence = ". ".join(found.details)
    assert f"pid {elsewhere}" in evidence
    assert "of its core" in evidence
