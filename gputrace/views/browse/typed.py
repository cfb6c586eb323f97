"""What a person types, understood or refused: filters of gaps, and ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from gputrace.analyzers.results import IDLE_CAUSES
from gputrace.analyzers.scene.gap_table import GapFilter
from gputrace.units import format_ranges, parse_duration

_CONDITION: Final = re.compile(r"(gpu|cause|step|len)\s*([=>])\s*(\S+)")
_CAUSES: Final = {cause.replace("_", "")[:4]: cause for cause in IDLE_CAUSES} | {
    "unexplained": "other_idle",
    "unex": "other_idle",
    "idle": "other_idle",
}


def parse_filter(text: str, labels: list[str]) -> GapFilter:
    """A filter of what a person typed; raises ValueError that says what is not understood."""
    found = GapFilter()
    rest = _CONDITION.sub("", text).strip()
    if rest:
        raise ValueError(f"{rest!r} is not understood; write gpu=0 cause=data step=8:24 len>1ms")
    for name, _, value in _CONDITION.findall(text):
        if name == "gpu":
            wanted = set(value.split(","))
            lanes = [n for n, each in enumerate(labels) if wanted & {each, *each.split()}]
            if not lanes:
                raise ValueError(f"no lane is called {value}; there are {', '.join(labels)}")
            found = replace(found, lanes=lanes)
        elif name == "cause":
            found = replace(found, causes=[_cause(each) for each in value.split(",")])
        elif name == "step":
            first, _, last = value.partition(":")
            low = int(first or 0)
            found = replace(found, steps=(low, int(last or 1 << 30) if ":" in value else low + 1))
        else:
            found = replace(found, shortest_ns=parse_duration(value))
    return found


def _cause(text: str) -> str:
    """A cause by its name, or the beginning of it."""
    key = text.replace("_", "").replace("-", "").lower()
    cause = _CAUSES.get(key) or _CAUSES.get(key[:4])
    if cause is None:
        raise ValueError(f"{text!r} is no cause; there are {', '.join(IDLE_CAUSES)}")
    return cause


def parse_ranks(text: str, known: Collection[int]) -> frozenset[int] | None:
    """Ranks of ``0,2-3``; None, which is all, of nothing. Raises ValueError for others."""
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no rank; write 0,2-3, or nothing for all")
        low, high = int(first), int(last or first)
        ranks |= {rank for rank in known if low <= rank <= high}
        if not ranks:
            raise ValueError(f"no rank {part}; there are {_listed(sorted(known))}")
    return frozenset(ranks) or None


def _listed(ranks: Sequence[int]) -> str:
    return format_ranges(ranks)
