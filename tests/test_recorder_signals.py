"""Signals that come to a recorder are the program's; one that is stopped goes on as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests import command
from tests.test_nvprof_recorder import Machine

LOOK_S: Final = 0.2
"""How long the recorders here wait for a signal at a time."""
WAITS: Final = f"""
import signal
from gputrace.collectors.launch import wait_for
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
came = wait_for([signal.SIGUSR1], {LOOK_S})
print(came and (came.number, came.is_typed))
"""
RECORDS: Final = f"""
import os, sys
from gputrace.collectors.launch import run
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
