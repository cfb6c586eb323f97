"""Results as people and programs want them. Views compute nothing.

A view is a module with ``render(analysis) -> str`` and an entry in `FORMATS`.
"""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.views.forms import render_as

FORMATS: Final = {
    "text": "gputrace.views.text",
    "json": "gputrace.views.json",
    "markdown": "gputrace.views.markdown",
    "csv": "gputrace.views.csv",
}


def render(analysis: Analysis, form: str) -> str:
    """The analysis in one of `FORMATS`; raises UsageError for any other."""
    return render_as(analysis, form, FORMATS)
