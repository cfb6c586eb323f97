"""`gputrace record --backend nvprof`: the program does not notice, a trace comes out.

An nvprof of our own (tests/helpers/fake_nvprof.py) stands for NVIDIA's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers import command, lookups
from tests.helpers.command import Ran, assert_refused

MARKED: Final = """
import os, threading, time, gputrace
open(os.environ["FAKE_THREAD"], "w").write(str(threading.get_ident()))
for _ in range(4):
    with gputrace.annotate("forward"):
        time.sleep(0.002)
    gputrace.step()
"""


class Machine:
    """A folder with an nvprof in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "100% of it" / "t.sqlite"
        self.spool = self.output.with_name("t.sqlite.spool")
        self.output.parent.mkdir()
        self.nvprof = folder / "nvprof"
        script = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(command.ROOT)!r})\n"
        script += "from tests.helpers.fake_nvprof import main\nsys.exit(main(sys.argv[1:]))\n"
        self.nvprof.write_text(script, encoding="utf-8")
        self.nvprof.chmod(0o755)
        self.env = {"GPUTRACE_NVPROF": str(self.nvprof), "FAKE_LOG": str(folder / "log")}
        self.env["FAKE_THREAD"] = str(folder / "thread")

    def words(self, *words: str) -> list[str]:
        options = ["--backend", "nvprof", "--no-nvml", "-o", str(self.output)]
        return [sys.executable, "-m", "gputrace", "record", *options, *words]

    def record(self, *words: str, **variables: str) -> Ran:
        return command.gputrace(*self.words(*words)[3:], env=self.env | variables)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        env, pipe = command.environment(self.env), subprocess.PIPE
        return subprocess.Popen(self.words(*words), env=env, stdin=pipe, stdout=pipe, stderr=pipe)

    def options(self) -> list[str]:
        """The options that nvprof got; what follows starts the program."""
        words: list[str] = json.loads((self.folder / "log").read_text(encoding="utf-8"))
        return words[: words.index(sys.executable)]

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return lookups.rows(self.output, sql)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- the program does not notice ----


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_programs(machine: Machine, code: int) -> None:
    assert machine.record("--", "sh", "-c", f"exit {code}").code == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_that_ends_the_program_ends_the_recorder_too(
    machine: Machine, number: signal.Signals
) -> None:
    assert machine.record("--", "sh", "-c", f"kill -{int(number)} $$").code == -number


def test_standard_streams_are_the_programs_and_nothing_of_nvprof_is_in_them(
    machine: Machine,
) -> None:
    with machine.start("--", "sh", "-c", "cat; printf err >&2") as running:
        out, err = running.communicate(b"hello", timeout=60)
    assert out == b"hello"
    assert err.startswith(b"err\ngputrace: ")
    assert all(line.startswith(b"gputrace: ") for line in err.splitlines()[1:])


def test_a_program_dies_of_a_closed_pipe_as_it_would(machine: Machine) -> None:
    ran = machine.record("--", "sh", "-c", "kill -PIPE $$; echo survived")
    assert (ran.code, ran.out) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_go_on_to_the_program(machine: Machine, number: signal.Signals) -> None:
    program = f"import signal, sys, time\nsignal.signal({int(number)}, lambda *_: sys.exit(9))\n"
    program += "print('ready', flush=True)\ntime.sleep(120)"
    with machine.start("--", sys.executable, "-c", program) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(number)
        assert running.wait(60) == 9
    assert machine.rows("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL") == [(2,)]


def test_a_signal_to_the_group_comes_to_the_program_once(machine: Machine) -> None:
    program = "import os, signal, sys, time\n"
    program += "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'got it\\n'))\n"
    program += "print('ready', flush=True)\nend = time.monotonic() + 2\n"
    program += "while time.monotonic() < end: time.sleep(0.1)"
    words = machine.words("--", sys.executable, "-c", program)
    env = command.environment(machine.env)
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, process_group=0) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        os.killpg(running.pid, signal.SIGTERM)
        assert running.stdout.read() == b"got it\n"


def test_a_program_that_is_not_there_is_127(machine: Machine) -> None:
    assert_refused(machine.record("--", "no-such-program"), 127, "no-such-program")


# ---- what nvprof is told ----


def test_the_options(machine: Machine) -> None:
    machine.record("--", "true")
    place = str(machine.spool).replace("%", "%%")
    assert machine.options() == [
        *("--profile-child-processes", "--force-overwrite"),
        *("--export-profile", f"{place}/%p.nvvp", "--log-file", f"{place}/nvprof.%p.log"),
        *("--openacc-profiling", "off", "--openmp-profiling", "off"),
        *("--unified-memory-profiling", "off"),
    ]


def test_options_that_it_does_not_know_are_left_out(machine: Machine) -> None:
    machine.record("--", "true", FAKE_OPTIONS="--openacc-profiling --openmp-profiling")
    assert not {"--openacc-profiling", "--openmp-profiling"} & set(machine.options())


@pytest.mark.parametrize(
    ("words", "later", "followed"),
    [
        (["--profiler-api"], True, ""),
        (["--steps", "2:3"], True, "1"),
        (["--steps", "0:3"], False, "1"),
    ],
)
def test_windows_are_cuda_s_profiler_api(
    machine: Machine, words: list[str], later: bool, followed: str
) -> None:
    ran = machine.record(*words, "--", "sh", "-c", "printf %s $GPUTRACE_PROFILER_API")
    assert ("--profile-from-start" in machine.options()) == later
    assert ran.out == followed


@pytest.mark.parametrize("option", ["--delay", "--duration"])
def test_windows_of_time_are_refused(machine: Machine, option: str) -> None:
    ran = machine.record(option, "3s", "--", "true")
    assert_refused(ran, 125, "nvprof", option, "--steps", "--backend cupti")
    assert not machine.spool.exists()


# ---- the trace ----


def test_calls_and_steps_of_one_thread_have_one_id(machine: Machine) -> None:
    ran = machine.record("--", sys.executable, "-c", MARKED, RANK="1", WORLD_SIZE="2")
    assert "2 kernels, 4 steps" in ran.err
    (thread,) = machine.rows("SELECT DISTINCT globalTid FROM GPUTRACE_STEP")
    assert machine.rows("SELECT DISTINCT globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME") == [thread]
    sql = "SELECT DISTINCT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL"
    assert machine.rows(sql) == [(thread[0] >> 24 << 24,)]
    assert machine.rows("SELECT rank, worldSize FROM GPUTRACE_PROCESS") == [(1, 2)]
    # The kernels ran a second before nvprof wrote them down, the steps just before.
    (apart,) = machine.rows(
        "SELECT min(s.start) - min(k.start) FROM GPUTRACE_STEP AS s, "
        "CUPTI_ACTIVITY_KIND_KERNEL AS k"
    )[0]
    assert 0 < apart < 1e9
    assert not machine.spool.exists()


def test_the_trace_is_analyzed_as_any_other(machine: Machine) -> None:
    machine.record("--", "true")
    found = json.loads(command.gputrace("analyze", machine.output, "--json").out)
    (gpu,) = found["gpus"]
    assert (found["source"], gpu["name"], gpu["kernels"]) == ("gputrace", "Tesla T4", 2)
    assert (gpu["compute_ns"], gpu["idle_ns"]) == (6_000, 7_000)


# ---- what can go wrong ----


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("too new a card", ["compute capability 8.0", "--backend cupti"]),
        ("no library", ["OpenACC", "CUDA toolkit"]),
        ("bad option", ["--openacc-profiling", "GPUTRACE_NVPROF"]),
    ],
)
def test_an_nvprof_that_does_not_start_the_program(
    machine: Machine, mode: str, told: list[str]
) -> None:
    assert_refused(machine.record("--", "echo", "ran", FAKE_MODE=mode), 125, *told)
    assert not machine.spool.exists()
    assert not machine.output.exists()


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("no driver", ["libcuda.so.1", "--gpus all"]),
        ("no permission", ["--cap-add=SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0"]),
        ("nothing", ["no process of the program started CUDA"]),
        ("skipped", ["GPU profiling skipped", "gputrace doctor"]),
    ],
)
def test_without_a_file_the_host_s_signals_stay(
    machine: Machine, mode: str, told: list[str]
) -> None:
    ran = machine.record("--", sys.executable, "-c", MARKED, FAKE_MODE=mode)
    assert ran.code == 0
    assert [words for words in told if words not in ran.err] == []
    assert machine.rows("SELECT count(*) FROM GPUTRACE_STEP") == [(4,)]


def test_without_an_nvprof_it_says_what_to_install(machine: Machine) -> None:
    empty = machine.folder / "empty"
    empty.mkdir()
    ran = machine.record("--", "/bin/true", GPUTRACE_NVPROF="", PATH=str(empty))
    if ran.code == 0:
        pytest.skip("an nvprof is installed on this machine")
    assert_refused(ran, 125, "CUDA toolkit", "GPUTRACE_NVPROF")


def test_a_program_that_is_no_nvprof(machine: Machine) -> None:
    ran = machine.record("--", "true", GPUTRACE_NVPROF="/bin/false")
    assert_refused(ran, 125, "/bin/false", "GPUTRACE_NVPROF")


def test_nvprof_within_nvprof(machine: Machine) -> None:
    assert_refused(machine.record("--", "true", NVPROF_ID="1"), 125, "under nvprof already")


def test_a_recording_that_goes_on_without_us_is_not_recovered_yet(machine: Machine) -> None:
    with machine.start("--", "sh", "-c", "echo ready; read line") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.kill()
        running.wait(60)
        ran = command.gputrace("recover", machine.spool)
        assert_refused(ran, 3, "still recording")
        running.communicate(b"line\n", timeout=60)
    for _ in range(100):
        if command.gputrace("recover", machine.spool).code == 0:
            break
    assert machine.rows("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL") == [(2,)]
