"""Storage of traces: SQLite access, writer, merge, slice, redaction, cache, spill file."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return gputrace's folder in the user's cache, for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrace"
