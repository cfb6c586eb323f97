"""How much of a long recording stays on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SEGMENTS: Final = 10
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """The same for every process that writes into a recording's folder.

    In a ring each process begins a new file every so often, and removes the oldest of its own.
    """

    segment_ns: int = 0
    """After how many nanoseconds a new file follows; 0 where all goes into one."""
    keep: int = 0
    """How many of the older files stay."""
    max_bytes: int = 0
    """What the folder may hold; 0 where there is no limit."""

    @property
    def kept_ns(self) -> int:
        """What of a ring is kept at least."""
        return self.segment_ns * self.keep

    @property
    def longest_ns(self) -> int:
        """What is on disk of a ring at most; processes look each second whether it is time."""
        return self.segment_ns * (self.keep + 1) + SECOND_NS if self.segment_ns else 0

    def variables(self) -> dict[str, str]:
        """What tells the processes of a program."""
        ring = {
            "GPUTRACE_SEGMENT_NS": str(self.segment_ns),
            "GPUTRACE_SEGMENTS": str(self.keep),
        }
        size = {"GPUTRACE_MAX_BYTES": str(self.max_bytes)}
        return (ring if self.segment_ns else {}) | (size if self.max_bytes else {})


NONE: Final = Limits()


def ring(keep_ns: int, max_bytes: int) -> Limits:
    """A ring of so many nanoseconds, and a tenth more at most; or a limit of bytes; or none."""
    if not keep_ns:
        return Limits(max_bytes=max_bytes)
    segment = max(-(-keep_ns // _SEGMENTS), SECOND_NS)
    return Limits(segment, -(-keep_ns // segment), max_bytes)
