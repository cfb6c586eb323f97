"""The plain program, and ways to end."""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from gputrace import marks
from tests.faults.subject.common import ARGUMENTS, GPU, behaviour, say, turn, work


@behaviour
def plain(seconds: float) -> None:
    work(seconds)


@behaviour
def until_killed(_seconds: float) -> None:
    work(60)


@behaviour
def hurried(seconds: float) -> None:
    """Kernels of a thread that is at it when the process ends."""
    GPU.gpu_hurry()
    work(seconds)


@behaviour
def short_of_memory(seconds: float) -> None:
    """No address space beyond what there is and so many MiB."""
    work(0.05)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * mmap_page() + (int(ARGUMENTS[0]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    GPU.gpu_hurry() if seconds > 1.5 else None
    work(seconds)


def mmap_page() -> int:
    return resource.getpagesize()


@behaviour
def leaves(seconds: float) -> None:
    work(seconds)
    say("leaving")
    os._exit(int(ARGUMENTS[0]))


@behaviour
def exits(seconds: float) -> None:
    atexit.register(say, "at exit")
    atexit.register(turn)
    work(seconds)
    sys.exit(int(ARGUMENTS[0]))


@behaviour
def exits_with_words(seconds: float) -> None:
    work(seconds)
    sys.exit("nothing works")


@behaviour
def raises(seconds: float) -> None:
    """An exception that nobody catches, from within what is annotated."""
    work(seconds)
    with marks.annotate("load batch"):
        raise RuntimeError("uncaught")


@behaviour
def aborts(seconds: float) -> None:
    work(seconds)
    os.abort()


@behaviour
def kills_itself(seconds: float) -> None:
    work(seconds)
    signal.signal(int(ARGUMENTS[0]), signal.SIG_DFL)
    os.kill(os.getpid(), int(ARGUMENTS[0]))
    time.sleep(5)


@behaviour
def reads_nowhere(seconds: float) -> None:
    """A true fault of memory."""
    work(seconds)
    ctypes.string_at(8)


@behaviour
def threads_at_exit(seconds: float) -> None:
    """The main thread is gone before the others, one of which nobody waits for."""
    GPU.gpu_hurry()
    threading.Thread(target=work, args=(seconds + 0.2,)).start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
