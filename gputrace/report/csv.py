"""Breakdown as CSV: a row per GPU, with the column names of the JSON."""

from __future__ import annotations

import csv
import io
from dataclasses import fields

from gputrace.model.results import Analysis, Breakdown
from gputrace.sanitize import cell


def render(analysis: Analysis) -> str:
    """Render RFC 4180 CSV with a header line; times in nanoseconds, unknown values empty."""
    out = io.StringIO()
    names = [field.name for field in fields(Breakdown)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in analysis.breakdown:
        writer.writerow([cell(getattr(row, name)) for name in names])
    return out.getvalue()
