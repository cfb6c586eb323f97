"""Programs of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gputrace import marks
from tests.faults.subject.common import (
    ARGUMENTS,
    GPU,
    SUBJECT,
    TURN_S,
    behaviour,
    mark_step,
    open_ledger,
    say,
    the_ledger,
    turn,
    work,
)


def _in_child(seconds: float, end: Callable[[int], object]) -> int:
    child = os.fork()
    if not child:
        open_ledger(f".{os.getpid()}")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(TURN_S)
            mark_step()
        end(5)
    return child


@behaviour
def forks(seconds: float) -> None:
    """Children that work, and end in each way, while the parent does too."""
    GPU.gpu_hurry()
    children = [_in_child(seconds / 2, end) for end in (os._exit, sys.exit, os._exit)]
    work(seconds)
    say(f"children: {[os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]}")


@behaviour
def forks_much(seconds: float) -> None:
    """Children that end at once, while threads launch."""
    GPU.gpu_hurry()
    end, failed = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        child = os.fork()
        if not child:
            os._exit(0)
        failed += os.waitpid(child, 0)[1]
        turn()
    say(f"failed: {failed}")


@behaviour
def multiprocesses(seconds: float) -> None:
    import multiprocessing

    multiprocessing.set_start_method(ARGUMENTS[0])
    worker = multiprocessing.Process(target=time.sleep, args=(0.1,))
    worker.start()
    work(seconds)
    worker.join()
    say(f"worker: {worker.exitcode}")


@behaviour
def starts_others(seconds: float) -> None:
    """Start programs as shells do, with and without the environment."""
    work(seconds)
    other = [sys.executable, "-c", "import gputrace; gputrace.step(); print(3)"]
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    for env in (None, {}, path):
        ran = subprocess.run(other, env=env, capture_output=True, check=False)
        say(f"{ran.returncode if env is None else ''} {ran.stdout.decode().strip()}")
    say(str(os.system("exit 3")))
    work(0.05)


@behaviour
def executes(seconds: float) -> None:
    """Becomes another program, which is this one."""
    work(seconds / 2)
    the_ledger().leave()
    os.execv(sys.executable, [sys.executable, *SUBJECT, "plain", str(seconds / 2)])


@behaviour
def becomes_a_daemon(seconds: float) -> None:
    """Its end is not the end of what it started."""
    work(seconds)
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for _ in range(40):
        time.sleep(0.01)
        marks.step()
    Path("daemon.txt").write_text("done\n")
    os._exit(0)


@behaviour
def launches(seconds: float) -> None:
    """A launcher of so many ranks, of which one ends badly; then it ends the others."""
    count, bad, how = int(ARGUMENTS[0]), int(ARGUMENTS[1]), int(ARGUMENTS[2])
    ranks = [_start_rank(rank, count, seconds, rank == bad, how) for rank in range(count)]
    code = ranks[bad].wait()
    say(f"rank {bad}: {code}")
    for rank in ranks:
        rank.terminate()
    say(f"others: {sorted({rank.wait() for rank in ranks if rank is not ranks[bad]})}")
    sys.exit(1)


def _start_rank(
    rank: int, count: int, seconds: float, dies: bool, how: int
) -> subprocess.Popen[bytes]:
    words = ("kills_itself", str(seconds), str(how)) if dies else ("until_killed", "0")
    told = {"RANK": str(rank), "WORLD_SIZE": str(count)}
    env = os.environ | told | {"LEDGER": f"{os.environ['LEDGER']}.rank{rank}"}
    return subprocess.Popen([sys.executable, *SUBJECT, *words], env=env)
