"""A comparison as people and programs want it."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.compare.results import Comparison
from gputrace.views.forms import render_as

FORMATS: Final = {
    "text": "gputrace.views.compare.text",
    "json": "gputrace.views.compare.json",
    "markdown": "gputrace.views.compare.markdown",
    "csv": "gputrace.views.compare.csv",
}


def render(comparison: Comparison, form: str) -> str:
    """The comparison in one of `FORMATS`; raises UsageError for any other."""
    return render_as(comparison, form, FORMATS)
