"""Breakdown as CSV: a row per GPU, with the column names of the JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from gputrace.model.results import Analysis, Breakdown
from gputrace.sanitize import cell


def render(analysis: Analysis) -> str:
    """Render the breakdown; times in nanoseconds."""
    return render_rows([field.name for field in fields(Breakdown)], analysis.breakdown)


def render_rows(names: Sequence[str], rows: Iterable[Any]) -> str:
    """Render attributes of objects as RFC 4180 CSV with a header line; unknown values empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([cell(getattr(row, name)) for name in names] for row in rows)
    return out.getvalue()
