"""Limits on the size of a long recording, and its growth."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SEGMENTS: Final = 10
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every process that writes into a recording's folder.

    In a ring, each process starts a new file periodically and removes its oldest one.
    """

    segment_ns: int = 0
    """Nanoseconds after which a new file follows; 0 for a single file."""
    keep: int = 0
    """Number of older files that stay."""
    max_bytes: int = 0
    """Maximum bytes of the folder; 0 for no limit."""

    @property
    def kept_ns(self) -> int:
        """Minimum nanoseconds kept by a ring."""
        return self.segment_ns * self.keep

    @property
    def longest_ns(self) -> int:
        """Maximum nanoseconds of a ring on disk; processes check once a second."""
        return self.segment_ns * (self.keep + 1) + SECOND_NS if self.segment_ns else 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables that pass the limits to the processes of a program."""
        ring = {"GPUTRACE_SEGMENT_NS": str(self.segment_ns), "GPUTRACE_SEGMENTS": str(self.keep)}
        size = {"GPUTRACE_MAX_BYTES": str(self.max_bytes)}
        return (ring if self.segment_ns else {}) | (size if self.max_bytes else {})


NONE: Final = Limits()


def ring(keep_ns: int, max_bytes: int) -> Limits:
    """Return a ring that keeps ``keep_ns`` to a tenth more; else the limit of bytes, 0 for none."""
    if not keep_ns:
        return Limits(max_bytes=max_bytes)
    segment = max(-(-keep_ns // _SEGMENTS), SECOND_NS)
    return Limits(segment, -(-keep_ns // segment), max_bytes)


_BETWEEN_LOOKS_NS: Final = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a recording's folder, and nanoseconds since the recording began."""

    bytes: int
    elapsed_ns: int

    @property
    def rate(self) -> float:
        """Mean bytes per second."""
        return self.bytes / max(self.elapsed_ns, 1) * 1e9


class Growth:
    """Watch that reports the size at a number of bytes, and each time it has doubled."""

    def __init__(
        self,
        folder: Path,
        first: int,
        report: Callable[[Size], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._folder, self._next, self._report, self._now = folder, first, report, now
        self._began = self._looked = now()

    def look_now_and_then(self) -> None:
        """Check the size if the last check was some seconds ago."""
        if self._now() - self._looked >= _BETWEEN_LOOKS_NS:
            self._looked = self._now()
            self.look()

    def look(self) -> None:
        """Check the size, at the cost of a stat of each file."""
        held = bytes_in(self._folder)
        if held < self._next:
            return
        while self._next <= held:
            self._next *= 2
        self._report(Size(held, self._now() - self._began))


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was there a moment ago
            total += path.stat().st_size
    return total
