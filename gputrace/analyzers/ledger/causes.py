"""Causes of lost time, as one tree from the general to the specific."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from gputrace.analyzers.ledger.feeding_host import Host
from gputrace.errors import PluginError
from gputrace.model.intervals import EMPTY, Intervals
from gputrace.model.results import CauseNode
from gputrace.plugins import Plugin, call, expect, load, plugins, warn

Claim = Callable[[Host], Intervals]
"""Proves from the rows of one GPU and its host when a cause applies."""
Amount = Callable[[Any], Mapping[int | None, int]]
"""Gives the nanoseconds of a step that a cause takes from others, by rank, or, of None, for each
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
    work: Callable[[Any], Mapping[tuple[int, int], int]] | None = None
    """Gives the nanoseconds of computation that need not be, in all measured steps, by GPU and its
    rank; for causes that are charged against computation."""
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
    Cause("neighbours", "", "other programs"),
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


def tree_of(causes: Sequence[Cause], *, waits_known: bool = True) -> tuple[CauseNode, ...]:
    """Return the tree of some causes for reports, without what proves them.

    Unless it is known when ranks wait for each other, communication may be waiting for others.
    """
    labels = {} if waits_known else {"communication-exposed": "transfer, or waiting for ranks"}
    return tuple(
        CauseNode(each.id, each.parent, labels.get(each.id, each.label))
        for each in (*ROOTS, *causes)
    )


def with_plugins(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Return the causes of plugins, which are claimed first, and then the given ones.

    A plugin that does not work is reported, and claims nothing.
    """
    plugged: list[Cause] = []
    for plugin in plugins("causes"):
        try:
            cause: Cause = load(plugin, Cause)
            if problem := _problem(cause, plugin.name, (*ROOTS, *causes, *plugged)):
                raise PluginError(f"{plugin} does not work: {problem}")
            plugged.append(replace(cause, claim=partial(_claim, plugin, cause.claim)))
        except PluginError as error:
            warn(error)
    return (*plugged, *causes)


def _problem(cause: Cause, name: str, known: Sequence[Cause]) -> str:
    """Return what is wrong with the cause of a plugin; empty if all is well."""
    ids = [each.id for each in known]
    if cause.id != name or name in ids:
        return f"its id is {cause.id!r}; it must be the entry point's name, and one of its own"
    if cause.parent not in ids:
        return f"its parent {cause.parent!r} is none of {', '.join(ids)}"
    wrong = set(cause.takes) - set(DEFAULTS)
    return f"it takes {', '.join(sorted(wrong))}; there are {', '.join(DEFAULTS)}" if wrong else ""


def _claim(plugin: Plugin, claim: Any, host: Host) -> Intervals:
    """Call the function of a plugin; return no time if it fails."""
    try:
        return expect(plugin, call(plugin, claim, host), Intervals)  # type: ignore[no-any-return]
    except PluginError as error:
        warn(error)
        return EMPTY


def path_of(cause: str, causes: Sequence[Cause]) -> tuple[str, ...]:
    """Return the ids from the root of the tree to a cause."""
    parents = {each.id: each.parent for each in (*ROOTS, *causes)}
    path = [cause]
    while parents.get(path[0]):
        path.insert(0, parents[path[0]])
    return tuple(path)
