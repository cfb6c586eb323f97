"""Results as people and programs want them. Views compute nothing.

A view is a module with ``render(analysis) -> str`` and an entry in `FORMATS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.errors import UsageError

FORMATS: Final = {
    "text": "gputrace.views.text",
    "json": "gputrace.views.json",
    "markdown": "gputrace.views.markdown",
    "csv": "gputrace.views.csv",
}


def render(analysis: Analysis, form: str) -> str:
    """The analysis in one of `FORMATS`; raises UsageError for any other."""
    if form not in FORMATS:
        raise UsageError(f"no format is called {form!r}; there are {', '.join(FORMATS)}")
    rendered: str = import_module(FORMATS[form]).render(analysis)
    return rendered
