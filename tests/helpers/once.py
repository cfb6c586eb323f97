"""What takes long to make, made by one of the processes that test at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path


def once(target: Path, make: Callable[[Path], object]) -> Path:
    """Make a file or a folder unless it is there; other processes wait for the one that does."""
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_name(f"unfinished-{target.name}")
            make(unfinished)
            unfinished.rename(target)
    return target
