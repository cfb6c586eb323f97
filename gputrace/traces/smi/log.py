"""What a log of nvidia-smi says, before anything is known of the trace that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20

_SCALES: Final = {
    "B": 1.0, "KiB": 1024.0, "MiB": float(MIB), "MB": float(MIB), "GiB": 1024.0 * MIB,
    "mW": 1.0, "W": 1000.0, "kHz": 1e-3, "MHz": 1.0, "GHz": 1000.0,
}  # fmt: skip
"""What one of a unit is in bytes, mW and MHz; nvidia-smi's MB are MiB."""

_TOO_LARGE: Final = 2.0**62
_YEARS: Final = range(1970, 2200)
_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]+|%)?")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")


@dataclass(slots=True)
class Row:
    """A GPU at a moment."""

    time: int
    """Nanoseconds since 1970 of the local time that was written, whatever the zone is."""
    values: dict[str, float]
    """By column of `gputrace.traces.nvml.model.VALUES`."""
    card: Mapping[str, object]
    """By field of `gputrace.traces.nvml.model.Card`; ``gpu`` where the log has an index."""


@dataclass(slots=True)
class SmiLog:
    """A log, its rows in the order written."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    bad: int = 0
    """Lines that are no row: cut short, messages of the driver."""
    notes: list[str] = field(default_factory=list)
    """What was guessed."""
    has_date: bool = True
    """Else times count from 1970-01-01."""


def number(text: str, unit: str = "") -> float | None:
    """A cell as bytes, mW, MHz or a plain number; None for ``[N/A]`` and the like.

    ``unit`` is what the header says, where the cell has none.
    """
    if (found := _NUMBER.fullmatch(text)) is not None:
        value = float(found[1]) * _SCALES.get(found[2] or unit, 1.0)
    elif _HEX.fullmatch(text):
        value = float(int(text, 16))
    else:
        return None
    return round(value, 3) if abs(value) < _TOO_LARGE else None


def nanoseconds(text: str, form: str) -> int | None:
    """A written moment since 1970; None for what is none, or of another century."""
    try:
        when = datetime.strptime(text, form).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(when.timestamp()) * 10**9 if when.year in _YEARS else None


def is_unknown(text: str) -> bool:
    """Whether a cell says that there is no value, in one of the ways of nvidia-smi."""
    return text in ("", "-") or text.strip("[]").lower() in _UNKNOWN


_UNKNOWN: Final = frozenset(
    {"n/a", "not supported", "unknown error", "insufficient permissions", "requested functionality "
     "has been deprecated", "gpu is lost", "gpu requires reset", "no data", "unknown"}
)  # fmt: skip
