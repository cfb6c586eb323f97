"""What the names of copies say: direction, and the kinds of memory at both ends."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gputrace.traces.events import Kind, Memory


class Copy(NamedTuple):
    """A copy of one name."""

    kind: Kind
    source: Memory
    destination: Memory


_DIRECTION: Final = re.compile(r"([HDAP])(?:ost|evice|rray|eer)?to([HDAP])", re.IGNORECASE)
_ENDS: Final = re.compile(r"\(([\w ]+) -> ([\w ]+)\)")

_KINDS: Final = {
    "HD": Kind.COPY_H2D,
    "HA": Kind.COPY_H2D,
    "DH": Kind.COPY_D2H,
    "AH": Kind.COPY_D2H,
    "DD": Kind.COPY_D2D,
    "DA": Kind.COPY_D2D,
    "AD": Kind.COPY_D2D,
    "AA": Kind.COPY_D2D,
    "PP": Kind.COPY_PEER,
}

_MEMORY: Final = {memory.name.replace("_", " ").lower(): memory for memory in Memory}


def copy_of(name: str) -> Copy:
    """``Memcpy HtoD (Pinned -> Device)``, ``CopyHostToDevice``; what it leaves open is unknown."""
    direction, ends = _DIRECTION.search(name), _ENDS.search(name)
    kind = _KINDS.get("".join(direction.groups()).upper(), Kind.COPY_OTHER) if direction else None
    source, destination = (
        _MEMORY.get(end.lower(), Memory.UNKNOWN) for end in (ends.groups() if ends else ("", ""))
    )
    return Copy(Kind.COPY_OTHER if kind is None else kind, source, destination)
