"""All kinds of faults, and the plan of a run of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from tests.faults import devices, machine, programs, signals
from tests.faults.model import Fault, Kind

KINDS: Final[tuple[Kind, ...]] = (
    *signals.KINDS,
    *programs.KINDS,
    *machine.KINDS,
    *devices.KINDS,
)


def plan(seed: int, only: str = "", share: float = 1.0) -> Iterator[tuple[Kind, int, Fault]]:
    """Each kind's faults with their numbers: the same for the same seed, whatever is left out.

    Args:
        seed: of all random numbers.
        only: a part of the name or of the group of the kinds wanted.
        share: of the times of each kind, one at least.
    """
    for kind in KINDS:
        if only.lower() in f"{kind.group}: {kind.name}".lower():
            for number in range(max(1, round(kind.times * share))):
                yield kind, number, kind.make(random.Random(f"{seed} {kind.name} {number}"))
