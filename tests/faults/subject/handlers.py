"""Programs with signal handlers of their own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gputrace import marks
from tests.faults.subject.common import ARGUMENTS, GPU, behaviour, say, the_ledger, turn, work


def _asked(number: int, _frame: Any) -> None:
    say(f"asked to end by {signal.Signals(number).name}")
    turn()
    sys.exit(9)


@behaviour
def handles(_seconds: float) -> None:
    """Ends well when asked to."""
    signal.signal(int(ARGUMENTS[0]), _asked)
    the_ledger().begin()
    work(60)


@behaviour
def saves(_seconds: float) -> None:
    """A trainer that saves at the first signal, and gives up at the second one."""
    number, code, children = map(int, ARGUMENTS)
    ends, held = os.pipe()
    # Before they are forked: a signal to the group may come while Python still forks.
    signal.signal(number, signal.SIG_IGN)
    for _ in range(children):
        if not os.fork():
            os.close(held)
            os.read(ends, 1)
            os._exit(0)
    begun: list[bool] = []

    def save(*_: Any) -> None:
        if begun:
            say("gives up")
            os._exit(1)
        begun.append(True)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            time.sleep(0.01)
        Path("checkpoint").write_text("saved\n")
        say("saved")
        sys.exit(code)

    signal.signal(number, save)
    the_ledger().begin()
    work(60)


@behaviour
def handles_in_work(seconds: float) -> None:
    """A handler that raises, and is called in the midst of everything, a recorder too."""
    caught = 0

    def handler(_number: int, _frame: Any) -> None:
        raise InterruptedError

    signal.signal(signal.SIGALRM, handler)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + caught % 40 * 0.0002)
            while True:
                with marks.annotate("load batch"):
                    pass
        except InterruptedError:
            caught += 1
    say("caught some" if caught else "caught none")
    work(0.1)


@behaviour
def own_stack(seconds: float) -> None:
    GPU.gpu_own_stack(int(ARGUMENTS[0]))
    work(seconds)
    os.kill(os.getpid(), int(ARGUMENTS[0]))
    time.sleep(5)


@behaviour
def waits_for_signals(seconds: float) -> None:
    """All blocked, and taken by a thread: none may end up with a thread of the recorder."""
    numbers = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    GPU.gpu_hurry()
    for number in sorted(numbers):
        work(seconds / 3)
        os.kill(os.getpid(), number)
        came = signal.sigtimedwait(numbers, 5)
        say(f"took {came and signal.Signals(came.si_signo).name}")


@behaviour
def ignores(seconds: float) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
        work(seconds / 3)
        os.kill(os.getpid(), number)
    work(0.02)
