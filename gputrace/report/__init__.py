"""Renderers of an analysis, one per format and imported on demand, and plugins' views."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from gputrace.errors import UsageError
from gputrace.model.results import Analysis
from gputrace.plugins import call, expect, load_function, named, names

FORMATS: Final = {
    "text": "gputrace.report.text.render",
    "json": "gputrace.report.json.render",
    "markdown": "gputrace.report.markdown.render",
    "csv": "gputrace.report.csv.render",
}


def render(analysis: Analysis, form: str) -> str:
    """Render an analysis in one of `FORMATS` or by a plugin; raise UsageError for other forms."""
    if form in FORMATS:
        return render_as(analysis, form, FORMATS)
    plugin = named("views", form)
    if plugin is None:
        there = ", ".join((*FORMATS, *names("views")))
        raise UsageError(f"no format is called {form!r}; there are {there}")
    rendered: str = expect(plugin, call(plugin, load_function(plugin), analysis), str)
    return rendered


def render_as(result: object, form: str, forms: Mapping[str, str]) -> str:
    """Render a result in one of several formats; raise UsageError for an unknown one.

    Args:
        result: the only argument of every renderer.
        form: a key of ``forms``.
        forms: dotted names of renderer functions by format; only the requested one is imported.
    """
    if form not in forms:
        raise UsageError(f"no format is called {form!r}; there are {', '.join(forms)}")
    module, _, function = forms[form].rpartition(".")
    rendered: str = getattr(import_module(module), function)(result)
    return rendered
