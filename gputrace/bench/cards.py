"""Which GPUs a run may see."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, takewhile
from typing import Final

from gputrace.bench.study import Cards
from gputrace.errors import MissingError

_COUNT: Final = """
import pynvml
try:
    pynvml.nvmlInit()
    print(pynvml.nvmlDeviceGetCount())
except pynvml.NVMLError:
    print(0)
"""

_COUNT_S: Final = 30

GROUPS: Final = {"each": 1, "pairs": 2}
"""How many GPUs are in each group that a word stands for."""


def find_gpus() -> list[str]:
    """This machine's GPUs as CUDA_VISIBLE_DEVICES names them: those that we may see ourselves."""
    count = _ask_driver()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return [str(gpu) for gpu in range(count)]
    names = (name.strip() for name in allowed.split(","))
    # CUDA shows none that come after one that cannot be, as -1.
    return list(takewhile(lambda name: name and not name.startswith("-"), names))[:count]


def _ask_driver() -> int:
    """How many GPUs NVML knows.

    In a process of its own: what the driver's library does there cannot disturb the study.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COUNT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(ran.stdout)


def groups(cards: Cards | None, gpus: int) -> list[tuple[int, ...]]:
    """The groups that a study on cards has one configuration for each; one of none for others."""
    if cards is None:
        return [()]
    if not isinstance(cards, str):
        return list(cards)
    size = GROUPS[cards]
    if gpus < size:
        raise MissingError(
            f'visible = "{cards}" takes {size} or more GPUs; there are {gpus} here '
            "(for another machine, say with --slurm how many --gpus-per-node it has)"
        )
    return list(combinations(range(gpus), size))
