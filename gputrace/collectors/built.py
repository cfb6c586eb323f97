"""The C libraries that are built with the package, where there is a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HOW_TO_BUILD: Final = (
    "install a C compiler, and then gputrace again (pip install --force-reinstall --no-deps "
    "--no-cache-dir gputrace)"
)
"""Without the cache, where pip may keep what it built without a compiler."""


def built_library(name: str) -> Path | None:
    """The library of that name; None where the package was built without a compiler."""
    path = Path(__file__).with_name(f"{name}.so")
    return path if path.exists() else None
