"""How large a recording has become while its program runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Clock = Callable[[], int]
_BETWEEN_LOOKS_NS: Final = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """What a recording's folder holds.

    Attributes:
        bytes: of all its files.
        elapsed_ns: nanoseconds since the recording began.
    """

    bytes: int
    elapsed_ns: int

    @property
    def rate(self) -> float:
        """Bytes a second, from the beginning on."""
        return self.bytes / max(self.elapsed_ns, 1) * 1e9


class Growth:
    """Tells the size when it has passed a number of bytes, and when it has passed a doubling."""

    def __init__(
        self, folder: Path, first: int, tell: Callable[[Size], None], now: Clock = time.monotonic_ns
    ) -> None:
        self._folder, self._next, self._tell, self._now = folder, first, tell, now
        self._began = self._looked = now()

    def look_now_and_then(self) -> None:
        """Looks if it has not for some seconds."""
        if self._now() - self._looked >= _BETWEEN_LOOKS_NS:
            self._looked = self._now()
            self.look()

    def look(self) -> None:
        """Costs a stat of each file of the folder."""
        held = bytes_in(self._folder)
        if held < self._next:
            return
        while self._next <= held:
            self._next *= 2
        self._tell(Size(held, self._now() - self._began))


def bytes_in(folder: Path) -> int:
    """Of all files of a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # it was there a moment ago
            continue
    return total
