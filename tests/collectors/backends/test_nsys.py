"""`gputrace record --backend nsys`: nsys records, the program does not notice, a trace comes out.

An nsys of our own (tests/helpers/fake_nsys.py) stands for NVIDIA's.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace.collectors.backends import nsys as nsys_run
from gputrace.collectors.launch import Launch
from gputrace.collectors.launch.supervised import prefix
from tests.helpers import command, lookups
from tests.helpers.command import Ran, assert_refused
from tests.helpers.fake_nsys import MACHINE, SECRETS

MARKED: Final = """
import time, gputrace
for _ in range(4):
    with gputrace.annotate("forward"):
        time.sleep(0.002)
    gputrace.step()
"""


class Machine:
    """A folder with an nsys in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "100% of it" / "t.sqlite"
        self.spool = self.output.with_name("t.sqlite.spool")
        self.output.parent.mkdir()
        self.nsys = folder / "nsight" / "target-linux-x64" / "nsys"
        self.nsys.parent.mkdir(parents=True)
        script = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(command.ROOT)!r})\n"
        script += "from tests.helpers.fake_nsys import main\nsys.exit(main(sys.argv[1:]))\n"
        self._install(self.nsys, script)
        self.env = {"GPUTRACE_NSYS": str(self.nsys), "FAKE_LOG": str(folder / "log")}

    def importer(self, shell: str) -> None:
        """Installs a QdstrmImporter where Nsight Compute has its own."""
        path = self.nsys.parents[1] / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter"
        path.parent.mkdir()
        self._install(path, f"#!/bin/sh\n{shell}\n")

    def _install(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def words(self, *words: str) -> list[str]:
        options = ["--backend", "nsys", "--no-nvml", "-o", str(self.output)]
        return [sys.executable, "-m", "gputrace", "record", *options, *words]

    def record(self, *words: str, **variables: str) -> Ran:
        return command.gputrace(*self.words(*words)[3:], env=self.env | variables)

    def start(self, *words: str, **streams: Any) -> subprocess.Popen[bytes]:
        env = command.environment(self.env)
        running: subprocess.Popen[bytes] = subprocess.Popen(self.words(*words), env=env, **streams)
        return running

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of each call of a command of nsys."""
        lines = (self.folder / "log").read_text(encoding="utf-8").splitlines()
        return [words[1:] for words in map(json.loads, lines) if words[0] == name]

    def options(self) -> dict[str, str]:
        """The options of `nsys profile`."""
        (words,) = self.calls("profile")
        return dict(word.split("=", 1) for word in words if word.startswith("--"))

    def rows(self, sql: str) -> list[tuple[object, ...]]:
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


def test_standard_streams_are_the_programs_and_nothing_of_nsys_is_in_them(machine: Machine) -> None:
    with machine.start(
        "--",
        "sh",
        "-c",
        "cat; printf err >&2; ls /proc/self/fd | wc -l >&2",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        out, err = running.communicate(b"hello", timeout=60)
    assert out == b"hello"
    # Three streams and the folder that ls reads: what was handed down is closed again.
    assert err.startswith(b"err4\n\ngputrace: ")


def test_a_closed_stream_stays_closed(machine: Machine) -> None:
    words = " ".join(f"'{word}'" for word in machine.words("--", "sh", "-c", "cat || exit 7"))
    ran = subprocess.run(
        ["sh", "-c", f"{words} <&-"],
        env=command.environment(machine.env),
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 7


def test_a_pipe_that_nobody_reads_ends_the_program_as_it_would(machine: Machine) -> None:
    script = "(yes; echo $? >&2) | head -n 1"
    assert machine.record("--", "bash", "-c", script).err.startswith("141\n")


def test_signals_go_to_the_program_alone(machine: Machine) -> None:
    program = "import signal, sys, time\n"
    program += "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\nprint('ready', flush=True)\n"
    program += "time.sleep(120)"
    with machine.start("--", sys.executable, "-c", program, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGUSR1)
        assert running.wait(60) == 9
    assert machine.output.exists()


def test_what_is_typed_at_the_terminal_reaches_all_of_the_program(machine: Machine) -> None:
    # A session whose terminal is ours, as a shell has it.
    child = "trap 'echo child; exit' INT; echo ready; while :; do sleep 0.1; done"
    program = f"trap 'echo shell; exit 5' INT; sh -c \"{child}\"; exit 7"
    pid, terminal = pty.fork()
    if pid == 0:
        words = machine.words("--", "sh", "-c", program)
        os.execve(words[0], words, command.environment(machine.env))
    said = _read_until(terminal, "ready")
    os.write(terminal, b"\x03")
    said += _read_until(terminal, "kernels")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5
    assert "child" in said
    assert "shell" in said


def test_what_is_sent_to_the_group_reaches_all_of_the_program_once(machine: Machine) -> None:
    count = "import os, signal, sys, time\nchild = os.fork()\n"
    count += "def count(*_): os.write(1, b'parent\\n' if child else b'child\\n')\n"
    count += "signal.signal(signal.SIGTERM, count)\nos.write(1, b'ready\\n')\n"
    count += "end = time.monotonic() + 3\nwhile time.monotonic() < end: time.sleep(0.1)"
    words = machine.words("--", sys.executable, "-c", count)
    with subprocess.Popen(
        words, env=command.environment(machine.env), stdout=subprocess.PIPE, process_group=0
    ) as running:
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        os.killpg(running.pid, signal.SIGTERM)
        assert sorted(running.stdout.read().split()) == [b"child", b"parent"]


def test_a_program_is_known_before_its_first_word(machine: Machine) -> None:
    pid = str(machine.spool / "program.pid")
    assert machine.record("--", "sh", "-c", f"test \"$(cat '{pid}')\" = $$").code == 0


def _read_until(terminal: int, word: str) -> str:
    said = ""
    while word not in said:
        try:
            said += os.read(terminal, 1000).decode()
        except OSError:
            break
    return said


def test_a_program_that_cannot_be_run_is_126(machine: Machine) -> None:
    program = machine.folder / "program"
    program.write_text("no program")
    program.chmod(0o755)
    ran = machine.record("--", str(program))
    assert (ran.code, ran.err.count("\n")) == (126, 1)
    assert not machine.spool.exists()


# ---- what nsys is asked for ----


def test_options_are_those_that_the_installed_nsys_knows(machine: Machine) -> None:
    machine.record("--", "true")
    assert machine.options() == {
        "--trace": "cuda,nvtx",
        "--sample": "none",
        "--cpuctxsw": "none",
        "--cuda-graph-trace": "graph",
        "--wait": "primary",
        "--kill": "none",
        "--stop-on-exit": "true",
        "--export": "none",
        "--force-overwrite": "true",
        "--output": str(machine.spool / "report").replace("%", "%%"),
    }


def test_options_that_it_does_not_know_are_left_out(machine: Machine) -> None:
    machine.record("--", "true", FAKE_OPTIONS="old")
    assert list(machine.options()) == ["--trace", "--force-overwrite", "--output"]


def test_values_that_it_does_not_know_are_left_out(machine: Machine) -> None:
    machine.record("--", "true", FAKE_OPTIONS="graphs by node")
    assert "--cuda-graph-trace" not in machine.options()


@pytest.mark.parametrize("words", [("--profiler-api",), ("--steps", "2:3")])
def test_steps_and_cuda_s_profiler_api_are_its_capture_range(
    machine: Machine, words: tuple[str, ...]
) -> None:
    ran = machine.record(*words, "--", "sh", "-c", "echo $GPUTRACE_PROFILER_API")
    options = machine.options()
    assert options["--capture-range"] == "cudaProfilerApi"
    assert options["--capture-range-end"] == "stop"
    assert options["--kill"] == "none"
    assert ran.out == ("1\n" if words[0] == "--steps" else "\n")


def test_a_window_of_time_ends_while_the_program_goes_on(machine: Machine) -> None:
    stopped = f"grep -q '\"stop\"' '{machine.folder}/log'"
    program = f"until {stopped}; do sleep 0.05; done; exit 4"
    words = ("--delay", "1s", "--duration", "200ms", "--", "sh", "-c", program)
    assert machine.record(*words).code == 4
    options = machine.options()
    assert (options["--delay"], "--duration" in options) == ("1", False)
    assert machine.calls("stop") == [[f"--session={options['--session-new']}"]]


# ---- the trace ----


def test_kernels_of_nsys_and_steps_of_ours_are_of_one_process_on_one_clock(
    machine: Machine,
) -> None:
    program = MARKED + "import os; print(os.getpid())"
    ran = machine.record("--", sys.executable, "-c", program, RANK="1", WORLD_SIZE="2")
    assert "5 kernels, 4 steps" in ran.err
    process = MACHINE << 48 | int(ran.out) << 24
    sql = "SELECT DISTINCT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL"
    assert machine.rows(sql) == [(process,)]
    sql = "SELECT globalPid, rank, worldSize FROM GPUTRACE_PROCESS"
    assert machine.rows(sql) == [(process, 1, 2)]
    steps = "SELECT count(*), max(globalTid >> 24 << 24) FROM GPUTRACE_STEP"
    assert machine.rows(steps) == [(4, process)]
    # The session began 60 s before the report was written.
    sql = "SELECT min(start) > 50e9 AND max(end) < 60e9, max(end - start) > 2e6 FROM GPUTRACE_STEP"
    assert machine.rows(sql) == [(1, 1)]
    sql = "SELECT DISTINCT value FROM GPUTRACE_HOST_RANGE JOIN StringIds ON id = nameId"
    assert machine.rows(sql) == [("forward",)]
    assert not machine.spool.exists()


def test_the_trace_is_analyzed_as_any_other(machine: Machine) -> None:
    machine.record("--", sys.executable, "-c", MARKED, RANK="1", WORLD_SIZE="2")
    found = json.loads(command.gputrace("analyze", machine.output, "--json").out)
    (gpu,) = found["gpus"]
    assert (found["source"], gpu["rank"], gpu["kernels"]) == ("gputrace", 1, 5)
    assert (gpu["compute_ns"], gpu["idle_ns"]) == (5 * 400, 4 * 600)


def test_nothing_of_the_environment_the_arguments_or_the_output_is_in_the_trace(
    machine: Machine,
) -> None:
    machine.record("--", "true")
    data = machine.output.read_bytes()
    assert [secret for secret in SECRETS if secret.encode() in data] == []
    assert machine.rows("SELECT name FROM PROCESSES") == [("python",)]
    assert machine.rows("SELECT value FROM META_DATA_EXPORT") == [("3.7.2",)]
    assert b"gemm" in data


def test_a_file_system_without_locks_is_no_obstacle(machine: Machine) -> None:
    ran = machine.record("--", "true", FAKE_MODE="locked")
    assert (ran.code, machine.output.exists()) == (0, True)
    beside, local = (call[call.index("-o") + 1] for call in machine.calls("export"))
    assert Path(beside).parent != Path(local).parent


# ---- what can go wrong ----


def test_without_an_nsys_it_says_what_to_install(machine: Machine) -> None:
    empty = machine.folder / "empty"
    empty.mkdir()
    ran = machine.record("--", "/bin/true", GPUTRACE_NSYS="", PATH=str(empty))
    if ran.code == 0:
        pytest.skip("an nsys is installed on this machine")
    assert_refused(ran, 125, "nsight-systems-cli", "GPUTRACE_NSYS")


@pytest.mark.parametrize("words", [("--profiler-api",), ("--duration", "1s")])
def test_an_nsys_too_old_for_a_window(machine: Machine, words: tuple[str, ...]) -> None:
    ran = machine.record(*words, "--", "true", FAKE_OPTIONS="old")
    assert_refused(ran, 125, str(machine.nsys), "2022.4.2.1", "too old", "2022.1 or newer")
    assert not machine.spool.exists()


@pytest.mark.parametrize("name", ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_another_recorder_in_the_environment(machine: Machine, name: str) -> None:
    ran = machine.record("--", "true", **{name: "/opt/tool.so"})
    assert_refused(ran, 125, "CUDA")


def test_an_nsys_that_does_not_start_the_program(machine: Machine) -> None:
    ran = machine.record("--", "true", FAKE_MODE="refuses")
    assert_refused(ran, 125, "unrecognised option '--trace'")
    assert not machine.spool.exists()


def test_a_window_that_never_began_leaves_the_host_s_signals(machine: Machine) -> None:
    words = ("--steps", "7:9", "--", sys.executable, "-c", MARKED)
    ran = machine.record(*words, FAKE_MODE="no report")
    assert (ran.code, "the window never began" in ran.err) == (0, True)
    assert machine.rows("SELECT count(*) FROM GPUTRACE_STEP") == [(4,)]


def test_a_report_that_nsys_cannot_export_is_kept(machine: Machine) -> None:
    ran = machine.record("--", "true", FAKE_MODE="too new")
    assert_refused(ran, 125, "of a newer version", f"gputrace recover {machine.spool}")
    ran = command.gputrace("recover", machine.spool, env=machine.env)
    assert (ran.code, "5 kernels" in ran.err) == (0, True)


def test_a_raw_recording_is_imported(machine: Machine) -> None:
    machine.importer('cp "$2" "$4"')
    ran = machine.record("--", "true", FAKE_MODE="raw")
    assert (ran.code, "5 kernels" in ran.err) == (0, True)


def test_a_raw_recording_without_an_importer_is_kept(machine: Machine) -> None:
    ran = machine.record("--", "true", FAKE_MODE="raw")
    assert_refused(ran, 125, "QdstrmImporter", "recover")
    assert (machine.spool / "report.qdstrm").exists()


def test_an_importer_that_lacks_a_library(machine: Machine) -> None:
    machine.importer(
        'echo "$0: error while loading shared libraries: libdw.so.1: cannot open shared object '
        'file: No such file or directory" >&2; exit 127'
    )
    ran = machine.record("--", "true", FAKE_MODE="raw")
    assert_refused(ran, 125, "libdw.so.1", "libdw1", "recover")


def test_errors_that_nsys_writes_into_its_report_are_said(machine: Machine) -> None:
    ran = machine.record("--", "true")
    assert "gputrace: nsys: This driver is not supported\n" in ran.err
    assert "No NVTX" not in ran.err


def test_a_recording_that_goes_on_without_us_is_not_taken_apart(machine: Machine) -> None:
    over = machine.folder / "over"
    program = MARKED + "import os\nprint('ready', flush=True)\n"
    program += f"while not os.path.exists({str(over)!r}): time.sleep(0.01)"
    with machine.start("--", sys.executable, "-c", program, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.kill()
        running.wait()
        ran = command.gputrace("recover", machine.spool, env=machine.env)
        assert_refused(ran, 3, "still recording")
        over.touch()
    deadline = time.monotonic() + 60
    while command.gputrace("recover", machine.spool, env=machine.env).code:
        assert time.monotonic() < deadline
    assert machine.rows("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL") == [(5,)]
    assert machine.rows("SELECT count(*) FROM GPUTRACE_STEP") == [(4,)]


def test_it_says_so_where_nsys_takes_long_to_write(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys_run, "_PATIENCE_S", 0.0)
    machine.spool.mkdir()
    words = (str(machine.nsys), "profile", "--output=x", *prefix(machine.spool))
    told: list[str] = []
    env = command.environment(machine.env | {"FAKE_FINISH_S": "1", "FAKE_MODE": "no report"})
    began = time.monotonic()
    looks: list[None] = []
    launch = Launch((*words, "true"), env)
    code = nsys_run.run_under_nsys(launch, machine.spool, told.append, lambda: looks.append(None))
    assert code == 0
    assert looks
    assert time.monotonic() - began > 1
    assert told == ["the program has ended; nsys is still writing its report"]
