"""Storage of traces: SQLite access, writer, merge, slice, redaction, cache, spill file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gputrace.errors import MissingError


def cache_folder() -> Path:
    """Return gputrace's folder in the user's cache, for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrace"


LARGE: Final = 1 << 29
"""Bytes of SQLite files above which windows are sliced; rows take 1.5 times as much memory."""


MAGIC: Final = b"SQLite format 3\0"
"""Beginning of an SQLite database (sqlite.org/fileformat2.html, section 1.3)."""


def is_database(path: Path) -> bool:
    """Return True for a file that begins as an SQLite database; a pipe is not waited for."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
    return False


def cached_file(folder: str, identity: str, make: Callable[[Path], None]) -> Path:
    """Return the SQLite file made of an input, from a folder of the cache, making it if need be.

    Args:
        folder: name in the cache.
        identity: text that changes with the input.
        make: writes the file; what it raises is passed on.

    Raises MissingError if the folder cannot be created.
    """
    import hashlib

    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    target = cache_folder() / folder / f"{key}.sqlite"
    if target.exists():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.parent.chmod(0o700)
    except OSError as error:
        raise MissingError(
            f"{target.parent}: cannot be created ({error.strerror}), but converted and unpacked "
            "files are kept there; set XDG_CACHE_HOME to a writable folder"
        ) from error
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        make(unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target
