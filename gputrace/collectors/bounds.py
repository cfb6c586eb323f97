"""What a recorder does for the bounds of a long recording; processes keep to them by themselves."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from struct import unpack
from typing import Final

from gputrace.collectors.files.chunks import CHUNK, HEADER
from gputrace.collectors.limits import Limits

_OF_A_PROCESS: Final = re.compile(r"\.(\d+)(?:[-.]\d+)?(?:~\d+)?\.(spool|host)")


class Bounds:
    """Removes what processes that ended have left of a ring, and tells that a limit was met."""

    def __init__(self, folder: Path, limits: Limits, tell: Callable[[str], object]) -> None:
        self._folder, self._limits, self._tell = folder, limits, tell
        self._began, self._told = time.monotonic(), False

    def look(self) -> None:
        """Costs a stat of each file, or a read of its first bytes."""
        if self._limits.segment_ns:
            prune(self._folder, self._limits.kept_ns, time.time_ns())
        if self._limits.max_bytes and not self._told and has_stopped(self._folder):
            self._told = True
            after = time.monotonic() - self._began
            self._tell(
                f"the recording is as large as --max-size lets it, after {after:,.0f} s; the "
                "program goes on, not recorded"
            )


def prune(folder: Path, older_ns: int, now: int) -> None:
    """Removes files that nobody writes any more and that were last written so long ago.

    The newest one of a process that is alive stays: it may go on after a long silence.
    """
    by_process: dict[tuple[str, str], list[tuple[int, Path]]] = defaultdict(list)
    for path in folder.iterdir():
        found = _OF_A_PROCESS.search(path.name)
        if found is None:
            continue
        try:
            by_process[found[1], found[2]].append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:
            continue
    for (pid, _), files in by_process.items():
        newest = max(files)
        for changed, path in files:
            if now - changed > older_ns and ((changed, path) != newest or _is_gone(pid)):
                path.unlink(missing_ok=True)


def _is_gone(pid: str) -> bool:
    return not Path("/proc", pid).exists()


def has_stopped(folder: Path) -> bool:
    """Whether any process says that it writes no more."""
    place = HEADER.size + CHUNK.size
    for path in (*folder.glob("*.spool"), *folder.glob("*.host")):
        try:
            with path.open("rb") as file:
                file.seek(place)
                body = file.read(8)
        except OSError:
            continue
        if len(body) == 8 and unpack("<Q", body)[0]:
            return True
    return False
