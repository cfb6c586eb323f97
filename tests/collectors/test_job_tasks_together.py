"""Several recorders of one job on one machine, as srun and mpirun start them: one trace.

The variables are set by hand and the recorders are real; no launcher is needed.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.job_tasks import Team, is_recording
from gputrace.collectors.session import unused
from gputrace.errors import UsageError
from tests.helpers import command
from tests.native.build import Machine

HOST: Final = os.uname().nodename
PATIENCE_S: Final = 60.0
STEP: Final = "import time, gputrace\nfor _ in range(5): time.sleep(0.001); gputrace.step()\n"
"""A program that leaves five step markers."""
PATIENT: Final = """
import sys
from gputrace import cli
from gputrace.collectors.job_tasks import Team
Team.__init__.__defaults__ = (*Team.__init__.__defaults__[:-1], 600.0)
sys.exit(cli.run(sys.argv[1:]))
"""
"""The command, whose patience with those that have not begun outlasts any test."""


def of_srun(rank: int, tasks: int = 2, job: int = 77, nodes: int = 1) -> dict[str, str]:
    """The variables of one of srun's tasks, all on this node, the last of ``nodes``."""
    first = tasks * (nodes - 1)
    return {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(first + rank),
        "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(tasks * nodes),
        "SLURM_NNODES": str(nodes), "SLURM_NODEID": str(nodes - 1),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})" if nodes > 1 else str(tasks),
    }  # fmt: skip


def of_mpirun(rank: int, tasks: int = 2) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(tasks), "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(tasks), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-1",
    }  # fmt: skip


def start(
    folder: Path, env: dict[str, str], program: str, *options: str
) -> subprocess.Popen[bytes]:
    """A recorder of a Python program in a folder; its output is run.sqlite."""
    words = [sys.executable, "-c", PATIENT, "record", "-o", "run.sqlite", *options, "--"]
    return subprocess.Popen(
        [*words, sys.executable, "-c", program],
        cwd=folder,
        env=command.environment(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@contextmanager
def running(
    folder: Path, env: dict[str, str], program: str, done: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A recorder whose program has begun, and done some of it; both are gone at the end."""
    recorder = start(folder, env, f"{done}print('ready', flush=True)\n{program}")
    try:
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == b"ready\n"
        yield recorder
    finally:
        if recorder.poll() is None:
            os.killpg(recorder.pid, signal.SIGKILL)
        recorder.communicate(timeout=PATIENCE_S)


def until_ended(recorder: subprocess.Popen[bytes]) -> None:
    """Waits until a recorder's program is there no more."""
    end = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{recorder.pid}/task/{recorder.pid}/children").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def ends(recorders: Iterable[subprocess.Popen[bytes]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each."""
    said = [
        (recorder, recorder.communicate(timeout=PATIENCE_S)[1].decode()) for recorder in recorders
    ]
    return [(recorder.returncode, err) for recorder, err in said]


def meta(trace: Path) -> dict[str, str]:
    with closing(sqlite3.connect(trace)) as database:
        return dict(database.execute("SELECT name, value FROM GPUTRACE_META"))


def rows(trace: Path, table: str = "CUPTI_ACTIVITY_KIND_KERNEL") -> int:
    with closing(sqlite3.connect(trace)) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def steps(trace: Path) -> int:
    return rows(trace, "GPUTRACE_STEP")


@pytest.mark.parametrize("launcher", [of_srun, of_mpirun])
def test_the_tasks_of_a_node_write_one_trace_and_keep_their_exit_codes(
    launcher: Callable[[int, int], dict[str, str]], tmp_path: Path
) -> None:
    late = "import time; time.sleep(0.3)\n"
    programs = [f"{STEP}raise SystemExit(3)", f"{late}{STEP}", f"{STEP}raise SystemExit(5)"]
    recorders = [start(tmp_path, launcher(rank, 3), text) for rank, text in enumerate(programs)]
    ended = ends(recorders)
    assert [code for code, _ in ended] == [3, 0, 5]
    assert [path.name for path in tmp_path.iterdir()] == [f"run.{HOST}.sqlite"]
    assert steps(tmp_path / f"run.{HOST}.sqlite") == 15
    assert sum("15 steps" in said for _, said in ended) == 1
    assert sum(said != "" for _, said in ended) == 1


def test_the_trace_says_which_part_of_the_run_it_is(tmp_path: Path) -> None:
    ends([start(tmp_path, of_srun(rank, 2, nodes=3), STEP) for rank in range(2)])
    found = meta(tmp_path / f"run.{HOST}.sqlite")
    told = {name: found[name] for name in ("hostname", "job", "world_size", "ranks")}
    assert told == {"hostname": HOST, "job": "slurm 77.0", "world_size": "6", "ranks": "4-5"}


def test_what_ends_at_once_waits_for_those_that_have_not_begun(tmp_path: Path) -> None:
    first = start(tmp_path, of_srun(0), STEP)
    time.sleep(1.0)
    assert first.poll() is None
    assert [code for code, _ in ends([first, start(tmp_path, of_srun(1), STEP)])] == [0, 0]
    assert steps(tmp_path / f"run.{HOST}.sqlite") == 10


def test_a_signal_to_end_ends_the_wait(tmp_path: Path) -> None:
    """srun ends the whole step when one task fails, those too that have not begun."""
    with running(tmp_path, of_srun(0), STEP) as first:
        until_ended(first)
        time.sleep(0.5)
        assert first.poll() is None
        first.terminate()
        assert first.wait(PATIENCE_S) == 0
    assert steps(tmp_path / f"run.{HOST}.sqlite") == 5


def test_what_was_cut_short_is_recovered_with_its_place_in_the_run(tmp_path: Path) -> None:
    with running(tmp_path, of_srun(1, nodes=2), "time.sleep(60)", done=STEP):
        pass
    trace = tmp_path / f"run.{HOST}.sqlite"
    assert command.gputrace("recover", f"{trace}.spool").code == 0
    found = meta(trace)
    assert (found["ranks"], found["world_size"], steps(trace)) == ("3", "4", 5)


def test_a_killed_recorder_costs_the_others_nothing(tmp_path: Path) -> None:
    with (
        running(tmp_path, of_srun(0), "time.sleep(60)", done=STEP) as killed,
        running(tmp_path, of_srun(1), "input()", done=STEP) as other,
    ):
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert other.stdin is not None
        other.stdin.write(b"\n")
        other.stdin.flush()
        assert other.wait(PATIENCE_S) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"run.{HOST}.sqlite"]
    assert 5 < steps(tmp_path / f"run.{HOST}.sqlite") <= 10


def test_the_others_need_not_wait_for_one_that_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, of_srun(0), "import time; time.sleep(60)") as longer:
        (code, said), *_ = ends([start(tmp_path, of_srun(1), "raise SystemExit(4)")])
        assert (code, said) == (4, "")
        assert longer.poll() is None
        assert not (tmp_path / f"run.{HOST}.sqlite").exists()
        refused = command.gputrace("recover", tmp_path / f"run.{HOST}.sqlite.spool")
        command.assert_refused(refused, 2, "still being recorded")


def test_alone_in_a_batch_script_nobody_is_waited_for(tmp_path: Path) -> None:
    """There, Slurm's variables tell of tasks that nobody has started."""
    env = of_srun(0, 4)
    del env["SLURM_STEP_ID"]
    ((code, _),) = ends([start(tmp_path, env, "pass")])
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.sqlite"]


def test_a_task_that_comes_when_the_trace_is_made_has_one_of_its_own(tmp_path: Path) -> None:
    trace = tmp_path / f"run.{HOST}.sqlite"
    ends([start(tmp_path, of_srun(rank), STEP) for rank in range(2)])
    before = trace.read_bytes()
    ((code, said),) = ends([start(tmp_path, of_srun(1), STEP, "--force")])
    assert (code, trace.read_bytes()) == (0, before)
    assert f"run.{HOST}.task1.sqlite: " in said


def test_the_trace_of_another_job_is_kept(tmp_path: Path) -> None:
    ends([start(tmp_path, of_srun(rank), STEP) for rank in range(2)])
    ended = ends([start(tmp_path, of_srun(rank, job=78), STEP) for rank in range(2)])
    assert [code for code, _ in ended] == [125, 125]
    assert all("--force" in said for _, said in ended)


def test_tasks_of_a_job_agree_on_a_numbered_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in of_srun(0, job=78).items():
        monkeypatch.setenv(name, value)
    for name, job in (("trace", "slurm 77.0"), ("trace-2", "slurm 78.0")):
        with closing(sqlite3.connect(f"{name}.{HOST}.sqlite")) as trace, trace:
            trace.execute("CREATE TABLE GPUTRACE_META (name, value)")
            trace.execute("INSERT INTO GPUTRACE_META VALUES ('job', ?)", [job])
    assert unused(Path("trace.sqlite"), ["true"]) == Path("trace-2.sqlite")


def test_a_folder_that_another_job_left_is_kept(tmp_path: Path) -> None:
    with running(tmp_path, of_srun(0), "import time; time.sleep(60)"):
        pass
    (folder,) = tmp_path.iterdir()
    ((code, said),) = ends([start(tmp_path, of_srun(0, job=78), STEP)])
    assert code == 125
    assert f"gputrace recover {folder.name}" in said


def test_tasks_with_names_of_their_own_write_their_own(tmp_path: Path) -> None:
    option = ("-o", "r%q{SLURM_PROCID}.sqlite")
    ended = ends([start(tmp_path, of_srun(0, 4), STEP, *option)])
    assert [code for code, _ in ended] == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["r0.sqlite"]


def test_a_variable_that_is_not_set_is_one_line(tmp_path: Path) -> None:
    ran = command.gputrace("record", "-o", tmp_path / "%q{NOT_SET_HERE}.sqlite", "--", "true")
    command.assert_refused(ran, 125, "'NOT_SET_HERE' is not set")


def test_a_file_for_each_rank_becomes_one_report(machine: Machine, tmp_path: Path) -> None:
    """Program that plays a GPU: tests/native/workload.c."""
    libraries = {
        "GPUTRACE_CUPTI": str(machine.folder / "libcupti.so.13"),
        "LD_LIBRARY_PATH": str(machine.folder),
    }
    words = [sys.executable, "-m", "gputrace", "record", "--backend", "cupti"]
    script = "inject " + "storm 100 1 sleep 10 " * 12 + "say ready line storm 9 1"
    recorders = [
        subprocess.Popen(
            [*words, "-o", "r%q{SLURM_PROCID}.sqlite", "--", *machine.command(script)],
            cwd=tmp_path,
            env=command.environment(of_srun(rank) | libraries),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    # Neither ends before the other has begun: they are of one run.
    for recorder in recorders:
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == b"ready\n"
    ended = ends(recorders)
    assert [code for code, _ in ended] == [0, 0]
    assert all("next: gputrace analyze r*.sqlite" in said for _, said in ended)
    ran = command.gputrace("analyze", "--json", tmp_path)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["paths"] == [str(tmp_path / f"r{rank}.sqlite") for rank in range(2)]
    # Both play with the same card.
    ((card,), (warning,)) = found["gpus"], found["warnings"]
    assert (card["host"], card["gpu_known"]) == (HOST, True)
    assert warning.startswith("kernels overlap")
    kernels = [rows(tmp_path / f"r{rank}.sqlite") for rank in range(2)]
    assert min(kernels) > 1000
    assert card["kernels"] == sum(kernels)


class TestTeam:
    """Two recorders in one process: locks are of open files, not of processes."""

    def test_the_last_one_makes_the_trace_whoever_it_is(self, tmp_path: Path) -> None:
        teams = [Team(tmp_path / "x.spool", "j", rank, 3) for rank in range(3)]
        said = []
        for team in (teams[1], teams[0], teams[2]):
            with team.leave() as is_last:
                said.append(is_last)
        assert said == [False, False, True]
        teams[2].dissolve()
        assert list(tmp_path.iterdir()) == []

    def test_what_killed_recorders_left_goes_with_the_next_one(self, tmp_path: Path) -> None:
        """One that was killed while it removed its folder had given it a name of its own."""
        with subprocess.Popen(["true"]) as ended:
            pass
        for pid in (ended.pid, os.getppid()):
            (tmp_path / f".x.spool.{pid}").mkdir()
            (tmp_path / f".x.spool.{pid}" / "h.1.spool").touch()
        Team(tmp_path / "x.spool").dissolve()
        assert [path.name for path in tmp_path.iterdir()] == [f".x.spool.{os.getppid()}"]

    @pytest.mark.parametrize("job", ["j", ""])
    def test_patience_ends(self, job: str, tmp_path: Path) -> None:
        team = Team(tmp_path / "x.spool", job, 0, 2, patience=0.2)
        began = time.monotonic()
        with team.leave() as is_last:
            assert is_last
        assert 0.1 < time.monotonic() - began < PATIENCE_S / 10

    def test_patience_is_counted_from_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        team = Team(tmp_path / "x.spool", "j", 0, 2, patience=PATIENCE_S)
        began, clock = time.monotonic(), time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + PATIENCE_S)
        with team.leave() as is_last:
            assert is_last
        assert clock() - began < PATIENCE_S / 2

    def test_one_place_is_given_once(self, tmp_path: Path) -> None:
        team = Team(tmp_path / "x.spool", "j", 0, 2)
        with pytest.raises(UsageError, match="another recording is under way"):
            Team(tmp_path / "x.spool", "j", 0, 2)
        assert is_recording(team.folder)

    @pytest.mark.parametrize("job", ["other", "", None])
    def test_strangers_do_not_get_in(self, job: str | None, tmp_path: Path) -> None:
        team = Team(tmp_path / "x.spool", "j", 0, 2)
        with pytest.raises(UsageError, match="another recording is under way"):
            Team(team.folder, job, 1, 2)

    def test_how_many_they_are_need_not_be_known(self, tmp_path: Path) -> None:
        teams = [Team(tmp_path / "x.spool", "j", rank) for rank in range(2)]
        said = []
        for team in teams:
            with team.leave() as is_last:
                said.append(is_last)
        assert said == [False, True]

    def test_a_folder_that_cannot_be_made_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be created"):
            Team(tmp_path / "no" / "x.spool")

    def test_work_for_one_goes_on_with_another(self, tmp_path: Path) -> None:
        """Which is known when the lock of the first is given back: its process ends."""
        program = (
            "import sys, time\nfrom pathlib import Path\n"
            "from gputrace.collectors.job_tasks import Team\n"
            f"team = Team(Path({str(tmp_path / 'x.spool')!r}), 'j', int(sys.argv[1]), 2)\n"
            "team.let_one('work', lambda: print('begins', flush=True))\n"
            "print('ready', flush=True)\ntime.sleep(30)"
        )
        words = [sys.executable, "-c", program]
        env = command.environment()
        with subprocess.Popen([*words, "0"], stdout=subprocess.PIPE, env=env) as first:
            assert first.stdout is not None
            assert [first.stdout.readline() for _ in range(2)] == [b"begins\n", b"ready\n"]
            with subprocess.Popen([*words, "1"], stdout=subprocess.PIPE, env=env) as second:
                assert second.stdout is not None
                assert second.stdout.readline() == b"ready\n"
                first.kill()
                assert second.stdout.readline() == b"begins\n"
                second.kill()


def test_a_full_disk_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=r"cannot be created \(No space left on device\)"):
        Team(tmp_path / "trace.sqlite.spool", None)
    assert list(tmp_path.iterdir()) == []
