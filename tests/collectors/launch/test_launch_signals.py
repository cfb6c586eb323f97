"""A program gets each signal as often as without its recorder, and is stopped as then."""

from __future__ import annotations

import ctypes
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from tests.collectors.backends.test_nvprof import Machine
from tests.helpers import command
from tests.helpers.on_terminal import OnTerminal

GRACE_S: Final = 0.2
"""How long recorders here wait for a signal to reach others, too."""
LOOK_S: Final = 0.2
"""How long the recorders here wait for a signal at a time."""
WAITS: Final = f"""
import signal
from gputrace.collectors.launch import wait_for
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
came = wait_for([signal.SIGUSR1], {LOOK_S})
print(came and (came.number, came.is_from_kernel))
"""
RECORDS: Final = f"""
import os, sys
from gputrace.collectors.launch import group_witness, run
group_witness.GRACE_S = {GRACE_S}
sys.exit(run(sys.argv[1:], os.environ, every_s={LOOK_S}))
"""
PROGRAM: Final = (sys.executable, "-c", "print('ready', flush=True); input(); raise SystemExit(7)")


def start(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A session of its own that has said that it is ready, and most likely waits."""
    running = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=command.environment(env),
        start_new_session=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"
    time.sleep(LOOK_S / 4)
    return running


def stop(running: subprocess.Popen[bytes], *meanwhile: signal.Signals) -> None:
    """Stops all of a session until its time to wait is over; signals come to its leader then."""
    os.killpg(running.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, running.pid, os.WSTOPPED)
    time.sleep(2 * LOOK_S)
    for number in meanwhile:
        running.send_signal(number)
    os.killpg(running.pid, signal.SIGCONT)


# ---- stopped for a while: Ctrl+Z and fg, `docker pause` ----


@pytest.mark.parametrize("come", [(), (signal.SIGUSR1,)], ids=["no signal", "a signal"])
def test_only_what_came_is_taken(come: tuple[signal.Signals, ...]) -> None:
    with start(sys.executable, "-c", WAITS) as running:
        stop(running, *come)
        told = str((int(signal.SIGUSR1), False)) if come else "None"
        assert running.communicate(timeout=60) == (f"{told}\n".encode(), b"")


def test_the_program_goes_on_too() -> None:
    with start(sys.executable, "-c", RECORDS, *PROGRAM) as running:
        for _ in range(3):
            stop(running)
        assert running.communicate(b"\n", timeout=60) == (b"", b"")
        assert running.returncode == 7


def test_so_it_does_below_a_tool(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with start(*machine.words("--", *PROGRAM), env=machine.env) as running:
        for _ in range(3):
            stop(running)
        out, err = running.communicate(b"\n", timeout=60)
        assert (running.returncode, out) == (7, b"")
        assert all(line.startswith(b"gputrace: ") for line in err.splitlines()[1:])
        assert b"Invalid argument" not in err


# ---- taken by no other thread ----


def count_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


HOST: Final = ("--backend", "host")


@pytest.mark.parametrize("options", [HOST, (*HOST, "--keep", "4s", "--when-slow", "20x")])
def test_no_thread_takes_what_comes_to_a_recorder(tmp_path: Path, options: tuple[str, ...]) -> None:
    """numpy's, of which there are as many as cores, would die of SIGTERM, and hide SIGCHLD."""
    words = [sys.executable, "-m", "gputrace", "record", *options, "-o", str(tmp_path / "t.sqlite")]
    with start(*words, "--", *PROGRAM, env={"OPENBLAS_NUM_THREADS": "2"}) as running:
        assert count_threads(running.pid) == 1
        running.communicate(b"\n", timeout=60)
    assert running.returncode == 7


def test_none_does_below_a_tool(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    env = machine.env | {"OPENBLAS_NUM_THREADS": "2"}
    with start(*machine.words("--", *PROGRAM), env=env) as running:
        assert count_threads(running.pid) == 1
        running.communicate(b"\n", timeout=60)


# ---- each signal as often as without a recorder ----

ALL: Final = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGWINCH, signal.SIGTSTP, signal.SIGRTMIN + 3),
)
"""Signals that can be sent at once: SIGCONT would cancel SIGTSTP."""
COUNTS: Final = """
import os, select, signal
def count(number, frame):
    os.write(1, f"{{os.getpid()}} {{number}}\\n".encode())
for number in {signals}:
    signal.signal(number, count)
{more}
os.write(1, f"ready {{os.getpid()}}\\n".encode())
# A handler that is due when a call begins to block runs after it.
while not select.select([0], [], [], 0.02)[0]:
    pass
"""


def counts(more: str = "") -> tuple[str, ...]:
    """A program that prints each signal that it gets until its input ends."""
    signals = [*map(int, ALL), int(signal.SIGCONT)]
    return sys.executable, "-c", COUNTS.format(signals=signals, more=more)


class Counting:
    """A recorded program that counts, with its child if it has one."""

    def __init__(self, *recorder: str, children: int = 0, more: str = "") -> None:
        # A group of its own in our session, as a shell makes it.
        self.recorder = subprocess.Popen(
            [*recorder, *counts("os.fork()" if children else more)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=command.environment(),
            process_group=0,
        )
        assert self.recorder.stdout is not None
        self._out = self.recorder.stdout.fileno()
        self._lines: list[str] = []
        self._rest = b""
        while len(self._ready()) < 1 + children:
            assert self._read(60), self._lines
        self.processes = self._ready()
        self.program = next(pid for pid in self.processes if parent_of(pid) == self.recorder.pid)
        self._seen = len(self._lines)

    def _ready(self) -> list[int]:
        return sorted(int(line.split()[1]) for line in self._lines if line.startswith("ready"))

    def _read(self, seconds: float) -> bool:
        if not select.select([self._out], [], [], seconds)[0]:
            return False
        *whole, self._rest = (self._rest + os.read(self._out, 1 << 16)).split(b"\n")
        self._lines += [line.decode() for line in whole]
        return True

    def got(self, least: int) -> Counter[tuple[int, int]]:
        """How often each process got each signal since the last call, and at least so many."""
        until = time.monotonic() + 60
        while len(self._lines) - self._seen < least and time.monotonic() < until:
            self._read(0.1)
        # One that is forwarded although it should not be comes later.
        while self._read(2 * GRACE_S):
            pass
        new, self._seen = self._lines[self._seen :], len(self._lines)
        pairs = [line.split() for line in new]
        return Counter((int(pid), int(number)) for pid, number in pairs)

    def end(self) -> None:
        _, err = self.recorder.communicate(timeout=60)
        assert (self.recorder.returncode, err) == (0, b"")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def members_of(group: int) -> list[int]:
    """All processes of a group, in the order of their start."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(path.name)) == group:
                found.append(int(path.name))
    return sorted(found)


def send_to_each(pids: Sequence[int], number: int) -> None:
    """As a supervisor does, a moment apart."""
    for pid in pids:
        os.kill(pid, number)
        time.sleep(0.002)


WAYS: Final[dict[str, Callable[[Counting, int], None]]] = {
    "the group": lambda ran, number: os.killpg(ran.recorder.pid, number),
    "the recorder": lambda ran, number: os.kill(ran.recorder.pid, number),
    "the program": lambda ran, number: os.kill(ran.program, number),
    "each": lambda ran, number: send_to_each(members_of(ran.recorder.pid), number),
    "each, the last first": lambda ran, number: send_to_each(
        members_of(ran.recorder.pid)[::-1], number
    ),
}
TO_ALL: Final = ("the group", "each", "each, the last first")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("children", [0, 1])
def test_the_program_gets_each_signal_once(way: str, children: int) -> None:
    ran = Counting(sys.executable, "-c", RECORDS, children=children)
    those = ran.processes if way in TO_ALL else [ran.program]
    for numbers in (ALL, (signal.SIGCONT,), ALL):
        for number in numbers:
            WAYS[way](ran, number)
        assert ran.got(len(those) * len(numbers)) == Counter(product(those, numbers))
    ran.end()


KEYS: Final = {signal.SIGINT: "\x03", signal.SIGQUIT: "\x1c", signal.SIGTSTP: "\x1a"}


def test_what_a_key_sends_comes_once() -> None:
    ran = OnTerminal("-c", RECORDS, *counts(), program=(sys.executable,))
    ran.until("ready")
    for number, key in KEYS.items():
        ran.type(key)
        ran.until(f" {int(number)}\r\n")
    time.sleep(2 * GRACE_S)
    ran.type("\x04")
    assert ran.end() == 0
    got = [int(line.split()[-1]) for line in ran.left.splitlines() if line[-1].isdecimal()]
    assert Counter(got[1:]) == Counter(map(int, KEYS))


def test_the_end_of_the_terminal_reaches_a_program_once() -> None:
    """It comes to the first process of the session alone, which is the recorder."""
    read, write = os.pipe()
    words = [sys.executable, "-c", RECORDS]
    words += counts(f"os.dup2({write}, 1); os.dup2(os.pipe()[0], 0)")
    pid, terminal = pty.fork()
    if not pid:
        os.set_inheritable(write, True)
        os.execve(words[0], words, command.environment())
    os.close(write)
    program = int(os.read(read, 100).split()[1])
    os.close(terminal)
    time.sleep(1)
    # The kernel also wakes who is stopped.
    got = Counter(int(line.split()[1]) for line in os.read(read, 1000).splitlines())
    assert got == Counter((signal.SIGHUP, signal.SIGCONT))
    os.kill(program, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)


def test_a_program_with_a_group_of_its_own_is_signalled_as_in_the_shells() -> None:
    """Started by a shell, it leads its group already, and to make one changes nothing."""
    ran = Counting(sys.executable, "-c", RECORDS, more="os.setpgid(0, 0)")
    os.killpg(ran.recorder.pid, signal.SIGTERM)
    assert ran.got(1) == {(ran.program, signal.SIGTERM): 1}
    ran.end()


def test_what_is_sent_at_once_to_the_recorder_and_its_group_comes_once() -> None:
    """As timeout(1) does."""
    ran = Counting(sys.executable, "-c", RECORDS)
    os.kill(ran.recorder.pid, signal.SIGTERM)
    os.killpg(ran.recorder.pid, signal.SIGTERM)
    assert sum(ran.got(1).values()) in (1, 2)
    ran.end()


def witness_of(ran: Counting) -> int:
    """The process that is there besides the recorder and its program."""
    (found,) = {*members_of(ran.recorder.pid)} - {ran.recorder.pid, *ran.processes}
    return found


def test_the_witness_has_the_name_of_the_program_and_not_ours() -> None:
    ran = Counting(sys.executable, "-c", RECORDS)
    line = Path(f"/proc/{witness_of(ran)}/cmdline").read_text()
    assert COUNTS[:20] in line
    assert "gputrace" not in line.removeprefix(sys.executable)
    ran.end()


def test_without_a_witness_the_program_gets_what_is_sent_to_the_recorder() -> None:
    ran = Counting(sys.executable, "-c", RECORDS)
    os.kill(witness_of(ran), signal.SIGKILL)
    os.kill(ran.recorder.pid, signal.SIGTERM)
    assert ran.got(1) == {(ran.program, signal.SIGTERM): 1}
    ran.end()


def test_a_value_that_comes_with_a_signal_is_passed_on() -> None:
    program = (
        "import signal, ctypes\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "print('ready', flush=True)\ninfo = (ctypes.c_int * 32)()\n"
        "mask = (ctypes.c_uint64 * 16)(1 << 39)\nctypes.CDLL(None).sigwaitinfo(mask, info)\n"
        "print(info[0], info[6])"
    )
    with start(sys.executable, "-c", RECORDS, sys.executable, "-c", program) as running:
        ctypes.CDLL(None).sigqueue(running.pid, 40, ctypes.c_void_p(1234))
        assert running.communicate(timeout=60) == (b"40 1234\n", b"")


TRAINER: Final = """
import os, signal, sys, time
saved = False
def save(number, frame):
    global saved
    if saved:
        os._exit(1)
    saved = True
    time.sleep(1.2)  # writes its checkpoint
    print("saved", flush=True)
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("option", ["--python", "--no-python"])
def test_a_trainer_that_aborts_at_a_second_signal_saves(tmp_path: Path, option: str) -> None:
    options = [*HOST, option, "-o", str(tmp_path / "t.sqlite")]
    words = [sys.executable, "-m", "gputrace", "record", *options, "--"]
    with start(*words, sys.executable, "-c", TRAINER) as running:
        os.killpg(running.pid, signal.SIGTERM)
        out, _ = running.communicate(timeout=60)
    assert (running.returncode, out) == (42, b"saved\n")


# ---- job control ----


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(states: Mapping[int, str]) -> None:
    """Waits until processes are stopped (T) or not (S)."""
    until = time.monotonic() + 30
    while {pid: state_of(pid) for pid in states} != states:
        assert time.monotonic() < until, {pid: state_of(pid) for pid in states}
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGTTIN])
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["the group", "the recorder"])
def test_who_stops_a_job_stops_both(send: Callable[[int, int], None], number: int) -> None:
    stops = f"signal.signal({int(signal.SIGTSTP)}, signal.SIG_DFL)"
    ran = Counting(sys.executable, "-c", RECORDS, more=stops)
    for _ in range(2):
        send(ran.recorder.pid, number)
        wait_until({ran.recorder.pid: "T", ran.program: "T"})
        send(ran.recorder.pid, signal.SIGCONT)
        wait_until({ran.recorder.pid: "S", ran.program: "S"})
        assert ran.got(1) == {(ran.program, signal.SIGCONT): 1}
    ran.end()


def test_a_program_that_handles_ctrl_z_keeps_its_recorder_going() -> None:
    ran = Counting(sys.executable, "-c", RECORDS)
    os.killpg(ran.recorder.pid, signal.SIGTSTP)
    assert ran.got(1) == {(ran.program, signal.SIGTSTP): 1}
    wait_until({ran.recorder.pid: "S", ran.program: "S"})
    ran.end()


def test_a_program_that_was_stopped_alone_goes_on_alone() -> None:
    ran = Counting(sys.executable, "-c", RECORDS)
    os.kill(ran.program, signal.SIGSTOP)
    wait_until({ran.recorder.pid: "S", ran.program: "T"})
    os.kill(ran.program, signal.SIGCONT)
    assert ran.got(1) == {(ran.program, signal.SIGCONT): 1}
    ran.end()


# ---- what is inherited ----

STATES: Final = """
import sys
wanted = ("SigBlk", "SigIgn", "SigCgt")
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith(wanted)))
sys.exit(9)
"""
INHERITED: Final = """
import os, signal, sys
for number in {ignored}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {blocked})
os.execv(sys.argv[1], sys.argv[1:])
"""
_OF_LIBC: Final = 3 << 31
"""Signals 32 and 33, which glibc's posix_spawn leaves ignored."""


def states(*recorder: str, ignored: Sequence[int], blocked: Sequence[int]) -> list[int]:
    source = INHERITED.format(ignored=[*map(int, ignored)], blocked=[*map(int, blocked)])
    program = (sys.executable, "-c", STATES)
    ran = command.python("-c", source, *recorder, *program)
    assert ran.code == 9, ran
    return [int(mask, 16) & ~_OF_LIBC for mask in ran.out.split()]


@pytest.mark.parametrize(
    ("ignored", "blocked"),
    [
        ((signal.SIGCHLD,), ()),
        ((signal.SIGHUP,), ()),
        ((signal.SIGINT, signal.SIGQUIT), (signal.SIGCHLD,)),
        ((signal.SIGCHLD, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)),
        ((), (signal.SIGTSTP, signal.SIGCONT, signal.SIGINT, signal.SIGRTMIN)),
    ],
)
def test_a_program_inherits_what_it_would_without_a_recorder(
    tmp_path: Path, ignored: Sequence[int], blocked: Sequence[int]
) -> None:
    record = (sys.executable, "-m", "gputrace", "record", *HOST, "-o", str(tmp_path / "t.sqlite"))
    mine = states(ignored=ignored, blocked=blocked)
    assert states(*record, "--", ignored=ignored, blocked=blocked) == mine
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]


def test_so_it_does_below_a_tool_that_needs_its_children(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    source = INHERITED.format(ignored=[int(signal.SIGCHLD)], blocked=[])
    program = (sys.executable, "-c", STATES)
    ran = command.python("-c", source, *machine.words("--", *program), env=machine.env)
    assert ran.code == 9
    assert int(ran.out.split()[1], 16) >> (signal.SIGCHLD - 1) & 1


def test_what_came_before_the_program_was_there_is_for_the_program() -> None:
    source = "import os, signal, sys\nfrom gputrace.collectors.launch import run\n"
    source += "signal.pthread_sigmask(signal.SIG_BLOCK, [10])\nos.killpg(0, 10)\n"
    source += "sys.exit(run(sys.argv[1:], os.environ))"
    program = "import signal; print(int(signal.sigtimedwait([10], 60).si_signo))"
    words = (sys.executable, "-c", source, sys.executable, "-c", program)
    ran = subprocess.run(
        words,
        env=command.environment(),
        capture_output=True,
        check=False,
        start_new_session=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, b"10\n")
