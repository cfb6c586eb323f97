"""A comparison as people and programs want it."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from gputrace.analyzers.compare.results import Comparison
from gputrace.errors import UsageError

FORMATS: Final = {
    "text": "gputrace.views.compare.text",
    "json": "gputrace.views.compare.json",
    "markdown": "gputrace.views.compare.markdown",
    "csv": "gputrace.views.compare.csv",
}


def render(comparison: Comparison, form: str) -> str:
    """The comparison in one of `FORMATS`; raises UsageError for any other."""
    if form not in FORMATS:
        raise UsageError(f"no format is called {form!r}; there are {', '.join(FORMATS)}")
    rendered: str = import_module(FORMATS[form]).render(comparison)
    return rendered
