"""`gputrace arm`, `on`, `off`, `status` and `list`: a program is recorded while it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors import armed
from gputrace.store.sketches import FAMILY, read_sketches
from tests.faults.building import build
from tests.helpers import command
from tests.helpers.lookups import rows
from tests.helpers.programs import TORCH

TRAINS: Final = """
import time, gputrace
for _ in range(100000):
    with gputrace.annotate("forward"):
        time.sleep(0.005)
    gputrace.step()
"""
NOBODY: Final = 65534
_PATIENCE_S: Final = 60.0
ARM_WITH_DRIVER: Final = (
    "import sys; from gputrace.collectors import backends; backends.has_driver = lambda: True\n"
    "from gputrace import cli; sys.exit(cli.run(sys.argv[1:]))"
)


class Machine:
    """A folder of armed processes, and the programs that were started there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        self.env = {"GPUTRACE_ARM": str(folder)}

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        """Starts a program armed."""
        python = [sys.executable, "-m", "gputrace", "arm", "--"]
        program = subprocess.Popen(
            [*python, *words],
            env=command.environment(self.env | env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(program)
        return program

    def train(self, script: str = TRAINS, **env: str) -> subprocess.Popen[bytes]:
        """Starts one that trains, and waits until it does."""
        program = self.start(sys.executable, "-c", script, **env)
        wait_for(lambda: any(p.step for p in self.find() if p.pid == program.pid))
        return program

    def find(self) -> list[armed.ArmedProcess]:
        return armed.find()

    def gputrace(self, *words: str | Path) -> command.Ran:
        return command.gputrace(*words, env=self.env)


def wait_for(happens: Callable[[], object]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    # The path of a socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="gt", dir="/tmp"))
    monkeypatch.setenv("GPUTRACE_ARM", str(folder))
    machine = Machine(folder)
    yield machine
    for program in machine.started:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
    shutil.rmtree(folder)


def steps_of(trace: Path) -> list[int]:
    return [step for (step,) in rows(trace, "SELECT step FROM GPUTRACE_STEP ORDER BY step")]


def test_a_window_of_steps_becomes_a_trace_and_the_program_goes_on(
    machine: Machine, tmp_path: Path
) -> None:
    program = machine.train()
    trace = tmp_path / "t.sqlite"
    ran = machine.gputrace("on", str(program.pid), "--steps", "7", "-o", trace)
    assert ran.code == 0, ran.err
    said = re.search(r"recording steps (\d+) to (\d+): process", ran.err)
    assert said is not None
    assert steps_of(trace) == list(range(int(said[1]), int(said[2]) + 1))
    assert "the first of these steps is step 0" in ran.err
    assert len(steps_of(trace)) == 7
    (process,) = machine.find()
    assert (process.pid, process.state, process.windows) == (program.pid, "cold", 1)
    assert process.step > int(said[2])
    assert not list(tmp_path.glob("*.spool"))


def test_a_second_window_holds_nothing_of_the_first(machine: Machine, tmp_path: Path) -> None:
    machine.train()
    for name in ("a", "b"):
        machine.gputrace("on", "--steps", "3", "-o", tmp_path / f"{name}.sqlite")
    first, second = (steps_of(tmp_path / f"{name}.sqlite") for name in ("a", "b"))
    assert (len(first), len(second)) == (3, 3)
    assert second[0] > first[-1]


def test_all_ranks_of_a_job_record_the_same_steps(machine: Machine, tmp_path: Path) -> None:
    launcher = {"TORCHELASTIC_RUN_ID": "r7", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for rank in ("0", "1"):
        machine.train(RANK=rank, LOCAL_RANK=rank, **launcher)
    assert [(p.job, p.rank) for p in machine.find()] == [("torchrun r7", 0), ("torchrun r7", 1)]
    at = str(max(p.step for p in machine.find()) + 300)
    ran = machine.gputrace("on", "r7", "--steps", "5", "--at", at, "-o", tmp_path / "t.sqlite")
    assert "2 processes of job torchrun r7" in ran.err
    by_rank = rows(
        tmp_path / "t.sqlite",
        "SELECT globalTid >> 24, min(step), max(step), count(*) FROM GPUTRACE_STEP GROUP BY 1",
    )
    assert [row[1:] for row in by_rank] == [(int(at), int(at) + 4, 5)] * 2


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-ins of CUDA and CUPTI."""
    folder = tmp_path_factory.mktemp("machine")
    build(folder)
    return folder


def start_on_gpu(machine: Machine, libraries: Path, ledger: Path, **env: str) -> None:
    """Starts a program that launches two kernels in each step, and waits until it does."""
    env |= {
        "LD_LIBRARY_PATH": str(libraries),
        "GPUTRACE_CUPTI": str(libraries / "libcupti.so.13"),
        "SUBJECT_GPU": str(libraries / "gpu.so"),
        "LEDGER": str(ledger),
    }
    words = ("-m", "tests.faults.subject", "plain", "40")
    arm = [sys.executable, "-c", ARM_WITH_DRIVER, "arm", "--", sys.executable, *words]
    before = len(machine.find())
    machine.started.append(
        subprocess.Popen(arm, env=command.environment(machine.env | env), start_new_session=True)
    )
    wait_for(lambda: len([p for p in machine.find() if p.step and p.gpu == "ready"]) > before)


def test_kernels_of_the_window_alone_are_recorded(
    machine: Machine, libraries: Path, tmp_path: Path
) -> None:
    start_on_gpu(machine, libraries, tmp_path / "ledger")
    for name in ("a", "b"):
        ran = machine.gputrace("on", "--steps", "5", "-o", tmp_path / f"{name}.sqlite")
        assert f"{name}.sqlite: 10 kernels, 5 steps, processes: 1" in ran.err


def test_watch_opens_windows_of_kernels_at_the_same_steps_of_all_ranks(
    machine: Machine, libraries: Path, tmp_path: Path
) -> None:
    job = {"TORCHELASTIC_RUN_ID": "r7", "WORLD_SIZE": "2"}
    for rank in ("0", "1"):
        start_on_gpu(machine, libraries, tmp_path / rank, **job, RANK=rank, LOCAL_RANK=rank)
    words = ("watch", "--every", "500ms", "--for", "11s", "--kernels", "100", "-o")
    with subprocess.Popen(
        [sys.executable, "-m", "gputrace", *words, str(tmp_path / "s")],
        env=command.environment(machine.env),
        stderr=subprocess.PIPE,
    ) as watching:
        # Somebody else's recording takes the place of a window that is awaited, and none is lost.
        time.sleep(4)
        ran = machine.gputrace("on", "--steps", "5", "-o", tmp_path / "t.sqlite")
        assert "t.sqlite: 20 kernels, 10 steps, processes: 2" in ran.err, ran.err
        assert watching.wait(_PATIENCE_S) == 0
    windows = []
    for sketch in read_sketches(tmp_path / "s"):
        kernels = sketch.load_kernels()
        families = kernels[kernels["kind"] == FAMILY]
        assert {sketch.line(name) for name in families["name"].tolist()} == {"gemm"}
        assert set(families["count"].tolist()) == {6}
        assert not any(step % 100 for step in families["step"].tolist())
        windows.append(set(families["step"].tolist()))
    assert len(windows) == 2
    assert len(windows[0] & windows[1]) >= 2
    armed.keep_ring(machine.find(), tmp_path / "ring.spool")
    assert (
        machine.gputrace("recover", tmp_path / "ring.spool", "-o", tmp_path / "r.sqlite").code == 0
    )
    ((count,),) = rows(tmp_path / "r.sqlite", "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL")
    assert count >= 6 * len(windows[0]) + 6 * len(windows[1])


def test_a_window_can_be_ended_early(machine: Machine, tmp_path: Path) -> None:
    program = machine.train()
    on = [sys.executable, "-m", "gputrace", "on", "--steps", "100000", "-o", "t.sqlite"]
    env = command.environment(machine.env)
    with subprocess.Popen(on, env=env, cwd=tmp_path, stderr=subprocess.PIPE) as recorder:
        wait_for(lambda: machine.find()[0].state == "recording")
        assert json.loads(machine.gputrace("status", "--json").out)[0]["state"] == "recording"
        busy = machine.gputrace("on", "--steps", "3", "-o", tmp_path / "other.sqlite")
        command.assert_refused(busy, 2, "another `gputrace on` is recording there")
        ended = machine.gputrace("off", str(program.pid))
        assert "ended the recording in 1 of 1 processes" in ended.err
        assert recorder.wait(_PATIENCE_S) == 0
    assert len(steps_of(tmp_path / "t.sqlite")) >= 1
    nothing = machine.gputrace("off", str(program.pid))
    command.assert_refused(nothing, 2, "no recording is under way in job", "`gputrace on`")


def test_an_interrupted_recording_is_ended_and_becomes_a_trace(
    machine: Machine, tmp_path: Path
) -> None:
    machine.train()
    on = [sys.executable, "-m", "gputrace", "on", "--duration", "300s", "-o", "t.sqlite"]
    env = command.environment(machine.env)
    with subprocess.Popen(on, env=env, cwd=tmp_path, stderr=subprocess.PIPE) as recorder:
        wait_for(lambda: machine.find()[0].state == "recording")
        time.sleep(0.5)
        recorder.send_signal(signal.SIGINT)
        assert recorder.wait(_PATIENCE_S) == 0
    assert machine.find()[0].state == "cold"
    assert steps_of(tmp_path / "t.sqlite")


def test_a_window_whose_recorder_was_killed_ends_at_its_limit(machine: Machine) -> None:
    program = machine.train()
    (path,) = machine.folder.glob(f"*/{program.pid}.socket")
    assert armed.ask(path, "begin", 400_000_000)["state"] == "recording"
    wait_for(lambda: machine.find()[0].state == "cold")


def test_a_program_that_ends_meanwhile_leaves_its_steps(machine: Machine, tmp_path: Path) -> None:
    machine.train(TRAINS.replace("100000", "1500"))
    ran = machine.gputrace("on", "--steps", "100000", "-o", tmp_path / "t.sqlite")
    assert "has ended" in ran.err
    assert steps_of(tmp_path / "t.sqlite")[-1] == 1499
    assert list(machine.folder.iterdir()) == []


def test_a_program_without_steps_is_recorded_by_time(machine: Machine, tmp_path: Path) -> None:
    for name, text in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = """
import time, gputrace, torch.utils.data.dataloader
while True:
    with gputrace.annotate("answer"): time.sleep(0.01)
"""
    machine.start(sys.executable, "-c", script, PYTHONPATH=f"{command.ROOT}:{tmp_path}")
    wait_for(machine.find)
    command.assert_refused(machine.gputrace("on"), 2, "no step", "give --duration, e.g. 5s")
    ran = machine.gputrace("on", "--duration", "500ms", "-o", tmp_path / "t.sqlite")
    assert "recording for 0.5 s" in ran.err
    (answers,) = rows(tmp_path / "t.sqlite", "SELECT count(*) FROM GPUTRACE_HOST_RANGE")
    assert 3 <= answers[0] <= 60


def test_a_process_without_steps_records_for_as_long_as_the_steps_of_its_job(
    machine: Machine, tmp_path: Path
) -> None:
    """As one that generates for another that learns; it would wait for such a step forever."""
    for name, text in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    job = {"TORCHELASTIC_RUN_ID": "r7", "PYTHONPATH": f"{command.ROOT}:{tmp_path}"}
    machine.train(RANK="0", **job)
    answers = "import torch.utils.data.dataloader\n" + TRAINS.replace("gputrace.step()", "pass")
    machine.start(sys.executable, "-c", answers.replace("forward", "answer"), RANK="1", **job)
    wait_for(lambda: len(machine.find()) == 2)
    armed.record(machine.find(), armed.Window(20), tmp_path / "t.sqlite", False, print)
    ranges = dict(
        rows(
            tmp_path / "t.sqlite",
            "SELECT value, count(*) FROM GPUTRACE_HOST_RANGE, StringIds "
            "WHERE id = nameId GROUP BY 1",
        )
    )
    assert len(steps_of(tmp_path / "t.sqlite")) == 20
    assert 3 <= ranges["answer"] <= 200
    assert {process.state for process in machine.find()} == {"cold"}


@pytest.mark.parametrize("imports", ["time", "gputrace, time"])
def test_a_program_without_steps_is_listed_from_its_start_and_recorded_for_a_time(
    machine: Machine, tmp_path: Path, imports: str
) -> None:
    script = tmp_path / "lines.py"
    # What it starts may be a helper of any kind, and does not listen.
    helper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    works = "until = time.monotonic() + 60\nwhile time.monotonic() < until:\n    sum(range(999))\n"
    script.write_text(f"import {imports}, subprocess, sys\nsubprocess.Popen({helper})\n{works}")
    program = machine.start(sys.executable, str(script))
    wait_for(machine.find)
    assert [(p.pid, p.step, p.state) for p in machine.find()] == [(program.pid, 0, "cold")]
    assert "none yet" in machine.gputrace("list").out
    command.assert_refused(machine.gputrace("on"), 2, "no step of a training was seen so far")
    trace = tmp_path / "t.sqlite"
    ran = machine.gputrace("on", "--duration", "1s", "-o", trace)
    assert ran.code == 0, ran.err
    assert "lines.py:5" in command.gputrace("analyze", trace).out


def test_the_job_that_trains_is_meant_where_others_have_no_steps(machine: Machine) -> None:
    other = machine.start(sys.executable, "-c", "import time; time.sleep(60)")
    wait_for(machine.find)
    program = machine.train()
    assert [p.pid for p in armed.select(None, machine.find())] == [program.pid]
    assert [p.pid for p in armed.select(str(other.pid), machine.find())] == [other.pid]


def test_a_program_that_is_not_armed_is_told_what_can_be_had(machine: Machine) -> None:
    pid = str(os.getpid())
    ran = machine.gputrace("on", pid)
    command.assert_refused(ran, 2, f"process {pid} was not armed", "py-spy dump --pid", "arm --")
    command.assert_refused(machine.gputrace("on"), 2, "no armed process on this machine")
    command.assert_refused(machine.gputrace("on", "none"), 2, "no armed process or job none")


def test_one_of_several_jobs_has_to_be_named(machine: Machine) -> None:
    pids = sorted(str(machine.train().pid) for _ in range(2))
    command.assert_refused(machine.gputrace("on"), 2, "several jobs are armed", *pids)
    listed = json.loads(machine.gputrace("list", "--json").out)
    assert [each["job"] for each in listed] == pids
    assert listed[0].keys() == {
        *("job", "pid", "rank", "step", "state", "gpu", "windows", "command")
    }
    assert machine.gputrace("list").out.splitlines()[0].split()[:3] == ["job", "pid", "rank"]


# ---- what an armed program does ----


@pytest.mark.parametrize(
    ("script", "code", "out"),
    [
        ("import sys; print('a'); sys.exit(7)", 7, "a\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import signal; print(signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN)", 0, "True\n"),
        ("import gputrace, threading; gputrace.step(); print(threading.enumerate())", 0, None),
    ],
)
def test_an_armed_program_ends_as_it_would(
    machine: Machine, script: str, code: int, out: str | None
) -> None:
    bare = command.python("-c", script)
    program = machine.start(sys.executable, "-c", script)
    said, errors = program.communicate(timeout=_PATIENCE_S)
    assert (program.returncode, errors) == (code, b"") == (bare.code, bare.err.encode())
    assert re.sub("[0-9]", "", said.decode()) == re.sub(
        "[0-9]", "", bare.out if out is None else out
    )


def test_arm_is_replaced_by_the_program(machine: Machine) -> None:
    program = machine.start("sh", "-c", "echo $$; trap '' PIPE; grep SigIgn /proc/self/status")
    said, _ = program.communicate(timeout=_PATIENCE_S)
    pid, ignored = said.decode().splitlines()
    assert int(pid) == program.pid
    # As here, but for those that Python ignores.
    here = Path("/proc/self/status").read_text(encoding="ascii").partition("SigIgn:")[2].split()[0]
    pipe, size = (1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert int(ignored.split()[1], 16) == int(here, 16) & ~size | pipe


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("no-such-program",), 127, "no such program"),
        (("/etc/passwd",), 126, "cannot be run"),
        ((), 125, "give COMMAND, or --env"),
    ],
)
def test_what_cannot_be_armed_or_run_has_an_exit_code_of_its_own(
    machine: Machine, words: Sequence[str], code: int, problem: str
) -> None:
    program = machine.start(*words)
    _, errors = program.communicate(timeout=_PATIENCE_S)
    assert (program.returncode, problem in errors.decode()) == (code, True), errors


def test_a_script_without_a_first_line_is_run_by_the_shell(
    machine: Machine, tmp_path: Path
) -> None:
    script = tmp_path / "train"
    script.write_text("echo $1; exit 3\n")
    script.chmod(0o700)
    program = machine.start(str(script), "two words")
    said, _ = program.communicate(timeout=_PATIENCE_S)
    assert (said, program.returncode) == (b"two words\n", 3)


def test_a_shell_gets_the_environment_that_arms_its_programs(machine: Machine) -> None:
    arms = f'eval "$({sys.executable} -m gputrace arm --env)"; exec "$@"'
    words = ["sh", "-c", arms, "sh", sys.executable, "-c", TRAINS]
    program = subprocess.Popen(
        words, env=command.environment(machine.env), start_new_session=True, stdout=-1, stderr=-1
    )
    machine.started.append(program)
    wait_for(lambda: [p.pid for p in machine.find()] == [program.pid])


def test_a_program_can_arm_itself(machine: Machine, tmp_path: Path) -> None:
    script = "import gputrace; assert gputrace.arm() == ''\n" + TRAINS
    env = command.environment(machine.env)
    program = subprocess.Popen(
        [sys.executable, "-c", script], env=env, start_new_session=True, stdout=-1, stderr=-1
    )
    machine.started.append(program)
    wait_for(lambda: any(p.step for p in machine.find()))
    machine.gputrace("on", "--steps", "3", "-o", tmp_path / "t.sqlite")
    assert len(steps_of(tmp_path / "t.sqlite")) == 3


FORKS: Final = """
import os, sys, time, gputrace, warnings
warnings.simplefilter("error")
for step in range(100000):
    if step == 5 or step == 10:
        for _ in range(2):
            child = os.fork()
            if child == 0:
                time.sleep(0.3 if step == 5 else 1000)
                os._exit(0)
    gputrace.step()
    time.sleep(0.005)
"""


def test_forked_children_do_not_listen_and_no_fork_warns(machine: Machine) -> None:
    program = machine.train(FORKS)
    wait_for(lambda: machine.find()[0].step > 200)
    assert [p.pid for p in machine.find()] == [program.pid]
    assert len(list(machine.folder.glob("*/*.socket"))) == 1
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    for child in children:
        open_files = [str(file.readlink()) for file in Path(f"/proc/{child}/fd").iterdir()]
        assert not any(name.startswith("socket:") for name in open_files)


def test_a_program_without_steps_answers_after_it_forked(machine: Machine) -> None:
    script = (
        "import os, time, warnings\n"
        "warnings.simplefilter('error')\n"
        "os.fork() or os._exit(0)\n"
        "print('forked', flush=True)\n"
        "time.sleep(1000)\n"
    )
    program = machine.start(sys.executable, "-c", script)
    assert program.stdout is not None
    assert program.stdout.readline() == b"forked\n"
    assert [(p.pid, p.state) for p in machine.find()] == [(program.pid, "cold")]


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_RANK": "3"},
        {"RANK": "3", "LOCAL_RANK": "1"},
        {"SLURM_PROCID": "3"},
        {"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0", "RANK": ""},
    ],
)
def test_the_rank_is_that_of_any_launcher_also_if_the_program_sets_it(
    machine: Machine, environment: dict[str, str]
) -> None:
    machine.train(f"import os; os.environ.update({environment!r})\n{TRAINS}")
    assert [p.rank for p in machine.find()] == [3]


def test_spawned_workers_do_not_listen(machine: Machine, tmp_path: Path) -> None:
    for name, text in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing, time, torch.utils.data.dataloader, gputrace\n"
        "if __name__ == '__main__':\n"
        "    work = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(1000,))\n"
        "    work.start()\n    print(work.pid, flush=True)\n"
        "    while True: time.sleep(0.01), gputrace.step()\n"
    )
    path = f"{command.ROOT}:{tmp_path}"
    program = machine.start(sys.executable, str(script), PYTHONPATH=path)
    assert program.stdout is not None
    worker = int(program.stdout.readline())
    wait_for(lambda: any(p.step > 200 for p in machine.find()))
    assert Path(f"/proc/{worker}").exists()
    assert [p.pid for p in machine.find()] == [program.pid]


def test_a_program_that_is_executed_anew_listens_again(machine: Machine) -> None:
    anew = "import os, sys\nif 'again' not in sys.argv:\n"
    anew += (
        "    os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], sys.argv[1], 'again'])\n"
    )
    script = TRAINS.replace("range(100000)", "range(20)") + anew + TRAINS
    program = machine.start(sys.executable, "-c", script, script)
    wait_for(lambda: any(p.step > 50 for p in machine.find()))
    assert [p.pid for p in machine.find()] == [program.pid]


# ---- what attacks the socket ----


@pytest.fixture
def path(machine: Machine) -> Path:
    """The socket of a program that trains."""
    program = machine.train()
    (path,) = machine.folder.glob(f"*/{program.pid}.socket")
    return path


def call(path: Path, message: bytes, timeout: float = 5.0) -> bytes:
    """What a peer gets that says something."""
    with closing(socket.socket(socket.AF_UNIX)) as peer:
        peer.settimeout(timeout)
        peer.connect(str(path))
        with suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(message)
            return peer.recv(4096)
    return b""


def test_nobody_else_may_enter_the_folder(path: Path) -> None:
    token = path.with_suffix(".token")
    for each, mode in (
        (path.parent.parent, 0o700),
        (path.parent, 0o700),
        (path, 0o600),
        (token, 0o600),
    ):
        assert each.stat().st_mode & 0o777 == mode
        assert each.stat().st_uid == os.getuid()


NO_REQUESTS: Final = (
    b"",
    b"\n",
    b"0" * 64 + b" status\n",
    b"status\n",
    b"TOKEN",
    b"TOKEN \n",
    b"TOKEN nothing\n",
    b"TOKEN record 1\n",
    b"TOKEN record a b c\n",
    b"TOKEN record 9999999 9999998 1000\n",
    b"TOKEN record 9999999 99999999999 1000\n",
    b"TOKEN begin 0\n",
    b"TOKEN begin -1\n",
    b"TOKEN begin 99999999999999999999999999\n",
    b"\xff\x00" * 100 + b"\n",
    b"x" * (1 << 20),
)


def test_what_is_no_request_changes_nothing(path: Path) -> None:
    token = path.with_suffix(".token").read_bytes()
    for message in NO_REQUESTS:
        said = call(path, message.replace(b"TOKEN", token), 1.0) if message else b""
        assert said in (b"", b"error=request\n"), message
        assert armed.ask(path, "status")["state"] == "cold", message


def test_slow_peers_and_many_of_them_keep_nobody_out_for_long(path: Path) -> None:
    peers = [socket.socket(socket.AF_UNIX) for _ in range(80)]
    for peer in peers:
        peer.setblocking(False)
        with suppress(BlockingIOError):
            peer.connect(str(path))
    peers[0].setblocking(True)
    for peer in peers[1:]:
        peer.close()
    # This one says nothing, and goes on doing so.
    wait_for(lambda: _answers(path))
    with suppress(OSError):
        peers[0].send(path.with_suffix(".token").read_bytes() + b" begin 1000000000\n")
    assert armed.ask(path, "status")["state"] == "cold"
    peers[0].close()


def _answers(path: Path) -> bool:
    with suppress(OSError):
        return armed.ask(path, "status")["state"] == "cold"
    return False


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_sent_away_even_with_the_token(path: Path) -> None:
    token = path.with_suffix(".token").read_text()
    script = (
        "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "peer = socket.socket(socket.AF_UNIX); peer.settimeout(5); peer.connect(sys.argv[1])\n"
        "peer.sendall(sys.argv[2].encode() + b' begin 1000000000\\n'); print(peer.recv(100))\n"
    )
    refused = command.python("-c", script, str(path), token)
    assert "PermissionError" in refused.err
    for each in (path.parent.parent, path.parent, path):
        each.chmod(0o777)
    sent_away = command.python("-c", script, str(path), token)
    assert sent_away.out == "b''\n" or re.search("(BrokenPipe|ConnectionReset)Error", sent_away.err)
    path.parent.parent.chmod(0o700)
    assert armed.ask(path, "status")["state"] == "cold"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_the_answer_of_another_users_process_is_not_taken(machine: Machine, tmp_path: Path) -> None:
    folder = machine.folder / f"{os.getpid()}-0"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "1.token").write_text("0")
    script = (
        "import os, socket, sys\nos.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)\n"
        "it = socket.socket(socket.AF_UNIX); it.bind('1.socket'); it.listen(5)\n"
        "print('listens', flush=True); it.accept()[0].recv(100); it.accept()\n"
    )
    words = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(PermissionError):
            armed.ask(folder / "1.socket", "status")
        other.kill()


@pytest.mark.parametrize("what", ["mode", "link", "file"])
def test_nothing_is_armed_in_a_folder_that_others_may_enter(
    machine: Machine, tmp_path: Path, what: str
) -> None:
    folder = machine.folder / "f"
    if what == "mode":
        folder.mkdir()
        folder.chmod(0o755)
    elif what == "link":
        tmp_path.chmod(0o700)
        folder.symlink_to(tmp_path)
    else:
        folder.touch()
    program = machine.start("true", GPUTRACE_ARM=str(folder))
    _, errors = program.communicate(timeout=_PATIENCE_S)
    assert program.returncode == 125
    assert "not a folder of mode 0700 that belongs to you" in errors.decode()


def test_what_a_killed_process_leaves_is_removed(machine: Machine) -> None:
    program = machine.train(FORKS)
    wait_for(lambda: machine.find()[0].step > 20)
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    assert machine.find() == []
    (folder,) = machine.folder.iterdir()
    assert not [p for p in folder.iterdir() if p.suffix in (".socket", ".token")]
    for left in (*folder.iterdir(), folder):
        os.utime(left, (0, 0))
    assert machine.find() == []
    assert list(machine.folder.iterdir()) == []
