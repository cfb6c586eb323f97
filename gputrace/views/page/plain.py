"""Words of strangers made fit for a page; its template escapes them besides."""

from __future__ import annotations

from typing import Final

from gputrace.cleaning import clean

LONGEST: Final = 200
"""Letters of a name that are shown."""


def plain_text(text: str, most: int = LONGEST) -> str:
    """One line without control characters, cut; no ``$$``, that charts would take for TeX."""
    return clean(text, most).replace("$$", "$ $").replace("\\(", "\\ (").replace("\\[", "\\ [")
