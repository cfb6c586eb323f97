"""Common parts of all behaviours: work, and an account of it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gputrace import marks
from tests.faults.ledger import Ledger

TURN_S: Final = 0.005
NOBODY: Final = 65534
ARGUMENTS: Final = sys.argv[3:]
SUBJECT: Final = ("-m", "tests.faults.subject")
BEHAVIOURS: Final[dict[str, Callable[[float], object]]] = {}
GPU: Final = ctypes.CDLL(os.environ["SUBJECT_GPU"])
_ledger: Ledger


def behaviour(function: Callable[[float], object]) -> Callable[[float], object]:
    """Offers a function by its name; it takes the seconds that the program is to work."""
    BEHAVIOURS[function.__name__] = function
    return function


def say(text: str) -> None:
    """On both streams, in one piece each."""
    for stream in (1, 2):
        os.write(stream, f"{text}\n".encode())


def open_ledger(ending: str = "") -> None:
    """A new one, or that of the program which this process was before."""
    global _ledger
    _ledger = Ledger(Path(os.environ["LEDGER"] + ending), os.getpid())


def the_ledger() -> Ledger:
    return _ledger


def start_gpu() -> None:
    GPU.gpu_start(os.environ["LEDGER"].encode())


def mark_step() -> None:
    moment = time.monotonic_ns()
    marks.step()
    the_ledger().step(moment)


def turn() -> None:
    """A step of two kernels."""
    with marks.annotate("load batch"):
        time.sleep(TURN_S)
    GPU.gpu_launch()
    GPU.gpu_launch()
    mark_step()


def work(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        turn()
