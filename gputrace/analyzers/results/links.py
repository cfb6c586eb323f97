"""What lies between two GPUs and what went over it, as the JSON's ``links`` has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuLink:
    """One direction between two GPUs of a host, over the whole recording.

    Bandwidths are bytes per second; None is what is not known.
    """

    from_: int
    """Index of the one GPU, as in all results; the JSON calls it ``from``."""
    to: int
    from_rank: int
    to_rank: int
    """Ranks of the processes; they tell GPUs apart whose indices are equal."""
    host: str
    """The machine's name; nothing where it is not known."""
    link: str
    """``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``; nothing where it is not known."""
    peer_access: str
    """``OK``, or NVML's reason why there is none (CNS, GNS, TNS, DR, NS, U); nothing if unknown."""
    able: int | None
    """What the link can carry in this direction."""
    copies: int
    """Copies from the one GPU to the other."""
    bytes: int
    busy_ns: int
    """Their durations together."""
    bandwidth: int | None
    """The middle one of large copies' own; None where there were fewer than three."""
    staged_copies: int
    """Copies to the host that were followed by one of the same size from it to the other GPU."""
    staged_bytes: int
    staged_ns: int
    """From the begin of each to the end of its second half, together."""
    collectives: int
    """In which both took part."""
