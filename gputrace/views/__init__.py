"""Results as people and programs want them. Views compute nothing.

A view is a module with ``render(analysis) -> str`` and an entry in `FORMATS`, or a plugin.
"""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.errors import UsageError
from gputrace.plugins import call, expect, load_function, named, names
from gputrace.views.forms import render_as

FORMATS: Final = {
    "text": "gputrace.views.text",
    "json": "gputrace.views.json",
    "markdown": "gputrace.views.markdown",
    "csv": "gputrace.views.csv",
}


def render(analysis: Analysis, form: str) -> str:
    """The analysis in one of `FORMATS`, or by a plugin; raises UsageError for any other form."""
    if form in FORMATS:
        return render_as(analysis, form, FORMATS)
    plugin = named("views", form)
    if plugin is None:
        there = ", ".join((*FORMATS, *names("views")))
        raise UsageError(f"no format is called {form!r}; there are {there}")
    rendered: str = expect(plugin, call(plugin, load_function(plugin), analysis), str)
    return rendered
