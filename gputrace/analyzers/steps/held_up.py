"""Steps in which a rank waits for others that validate or save meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.steps.windows import Interlude, StepWindows

_COVERED: Final = 0.5
"""Part of another rank's interlude that lies in the step of a rank that is held up by it."""


@dataclass(frozen=True)
class HeldUp:
    """A step of a rank that has no interlude before it, though another rank has."""

    rank: int
    step: int
    by: int
    """The rank that has."""
    interlude: Interlude
    start: int
    end: int
    """The part of the interlude that lies in the step."""


def held_up(by_rank: Mapping[int, StepWindows]) -> Iterator[HeldUp]:
    """The steps that follow another rank's interlude and mostly last as long as it.

    Where nothing stops the other ranks, they go on to the next step's first collective, and wait
    there.
    """
    for by, windows in by_rank.items():
        for interlude in windows.interludes:
            step = interlude.after + 1
            for rank, own in by_rank.items():
                if rank == by or step >= len(own) or _pauses(own, interlude.after):
                    continue
                start = max(interlude.start, int(own.start[step]))
                end = min(interlude.end, int(own.end[step]))
                if end - start >= _COVERED * (interlude.end - interlude.start):
                    yield HeldUp(rank, step, by, interlude, start, end)


def _pauses(windows: StepWindows, after: int) -> bool:
    return any(interlude.after == after for interlude in windows.interludes)
