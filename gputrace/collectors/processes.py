"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PARENT: Final = 1
"""Number of the field of `read_stat` that has the parent's pid."""


def pids() -> Iterator[int]:
    """Yield the pids of all processes that can be seen here."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208


def read_stat(pid: int) -> list[bytes] | None:
    """Return the fields of a process in /proc/PID/stat from its state on, which proc(5) counts as
    the third; None if it is gone.
    """
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            return os.read(file, 1024).rpartition(b")")[2].split()
        finally:
            os.close(file)
    except OSError:
        return None


def has_ended(pid: int) -> bool:
    """Return whether there is no such process here, or a zombie."""
    status = read_stat(pid)
    return status is None or status[0] in b"ZX"


def read_environment(pid: int) -> dict[str, str] | None:
    """Return the environment that a process was started in; None if it may not be read."""
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)


def name_of(pid: int, any_user: bool = False) -> str | None:
    """Return the name of a process's command; None if it is another user's, or not to be seen."""
    process = Path(f"/proc/{pid}")
    try:
        if not any_user and process.stat().st_uid != os.getuid():
            return None
        return (process / "comm").read_text("utf-8", "replace").rstrip("\n")
    except OSError:
        return None


def orphans_of(folder: Path, variable: str = "GPUTRACE_DIR") -> list[int]:
    """Return the pids of this user's processes with a variable that names the folder, in order."""
    wanted = os.path.realpath(folder)
    named = ((pid, (read_environment(pid) or {}).get(variable)) for pid in pids())
    return sorted(pid for pid, name in named if name and os.path.realpath(name) == wanted)
