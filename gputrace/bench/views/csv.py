"""The results as CSV: a row per configuration, its settings first."""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from typing import Any, Final

from gputrace.analyzers.results import CLASSES
from gputrace.bench.answer import Row, Spread, Summary
from gputrace.cleaning import cell

_SPREADS: Final = ("rate", "rate_of_median", "step_ns", "target_s")
_LEFT_OUT: Final = ("label", "settings", "gpus", "classes", *_SPREADS)
_PLAIN: Final = tuple(field.name for field in fields(Row) if field.name not in _LEFT_OUT)


def render(summary: Summary) -> str:
    """RFC 4180 with a header line; times in nanoseconds, unknown values empty."""
    settings = tuple(dict.fromkeys(name for row in summary.rows for name in row.settings))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    spreads = [f"{name}{end}" for name in _SPREADS for end in ("", "_low", "_high")]
    writer.writerow([*map(cell, settings), *spreads, *_PLAIN, *(f"{name}_ns" for name in CLASSES)])
    for row in summary.rows:
        values = (
            *(row.settings.get(name) for name in settings),
            *(value for name in _SPREADS for value in _spread(getattr(row, name))),
            *(getattr(row, name) for name in _PLAIN),
            *((row.classes or {}).get(name) for name in CLASSES),
        )
        writer.writerow(map(cell, values))
    return out.getvalue()


def _spread(figure: Spread | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if figure is None else (figure.median, figure.low, figure.high)
