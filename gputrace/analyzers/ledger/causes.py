"""Causes of lost time, as one tree from the general to the specific."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gputrace.analyzers.ledger.host import Host
from gputrace.model.intervals import Intervals
from gputrace.model.results import CauseNode

Claim = Callable[[Host], Intervals]
"""Proves from the rows of one GPU and its host when a cause applies."""
Amount = Callable[[Any], Mapping[int | None, int]]
"""Gives the nanoseconds that a cause takes from others, in all measured steps, by rank or for each
GPU; for causes that are known by how long they last, but not when."""

IDLE: Final = ("data_feeding", "sync", "alloc", "launch", "other_idle")
WAITS: Final = ("data_feeding", "sync", "alloc", "launch")
"""Classes of idle time from which causes of the host are taken."""


class Cause(CauseNode, frozen=True):
    """One node of the tree, and what proves it."""

    takes: tuple[str, ...] = ()
    """Classes of time, or causes that come before, of which it may be a part."""
    claim: Claim | None = None
    amount: Amount | None = None
    rule: Callable[[Any], Any] | None = None
    """Makes its finding."""
    certain: float = 1.0
    """Part of its time that its cure gains for certain, where no replay shows what it gains."""
    in_all: bool = False
    """True if it explains the host's time whether or not a GPU waits, so that a replay can take it
    away."""


ROOTS: Final = (
    Cause("data", "", "input"),
    Cause("host", "", "host"),
    Cause("communication", "", "communication"),
    Cause("waiting", "communication", "waiting for another rank"),
    Cause("copies", "", "copies"),
    Cause("work", "", "work that need not be"),
    Cause("unexplained", "", "unexplained"),
)
"""General causes, which group the others."""

DEFAULTS: Final[Mapping[str, str]] = {
    "communication": "communication-exposed",
    "h2d": "h2d-exposed",
    "other_copy": "copies-exposed",
    "memset": "memset",
    "recorder": "recorder-overhead",
    "data_feeding": "data-feeding",
    "sync": "sync-bound",
    "alloc": "alloc-stall",
    "launch": "launch-bound",
    "other_idle": "idle-unexplained",
}
"""Cause of what no more specific one is proven for, by class of time."""


def tree_of(causes: Sequence[Cause]) -> tuple[CauseNode, ...]:
    """Return the tree of some causes for reports, without what proves them."""
    return tuple(CauseNode(each.id, each.parent, each.label) for each in (*ROOTS, *causes))


def path_of(cause: str, causes: Sequence[Cause]) -> tuple[str, ...]:
    """Return the ids from the root of the tree to a cause."""
    parents = {each.id: each.parent for each in (*ROOTS, *causes)}
    path = [cause]
    while parents.get(path[0]):
        path.insert(0, parents[path[0]])
    return tuple(path)
