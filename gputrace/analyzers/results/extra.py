"""A table of a plugin's analyzer. Field names are those of the JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExtraTable:
    """What a report shows after its own tables."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]
    """As many cells as the header has; the first is text. None is not known."""
