"""Storage of traces: SQLite access, writer, merge, slice, redaction, cache, spill file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final


def cache_folder() -> Path:
    """Return gputrace's folder in the user's cache, for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrace"


LARGE: Final = 1 << 29
"""Bytes of SQLite files above which windows are sliced; rows take 1.5 times as much memory."""
