"""Names of CUDA's calls; nvprof's files hold CUPTI's numbers for them (cbid) alone."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

RUNTIME: Final = 0
DRIVER: Final = 1
"""Which of CUDA's two interfaces a call is of, as nsys's ``eventClass`` says it."""

_WORDS: Final = {RUNTIME: "cuda", DRIVER: "cu"}


def call_name(event_class: int, number: int) -> str:
    """As CUPTI spells it, with the suffix of its version: ``cudaLaunchKernel_v7000``.

    A number that is in no CUDA up to 12.9 gets a name that says so.
    """
    return _names().get((event_class, number), f"{_WORDS[event_class]}(unknown call {number})")


def call_numbers() -> dict[tuple[int, str], int]:
    """CUPTI's numbers by interface and name; the way back, for who writes such files."""
    return {(event_class, name): number for (event_class, number), name in _names().items()}


@cache
def _names() -> dict[tuple[int, int], str]:
    text = files(__package__).joinpath("calls.txt").read_text(encoding="ascii")
    rows = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {(int(event_class), int(number)): name for event_class, number, name in rows}
