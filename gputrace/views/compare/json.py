"""The comparison as one JSON object; its names are those of the result dataclasses."""

from __future__ import annotations

from gputrace.analyzers.compare.results import Comparison
from gputrace.views.json import one_line, plain


def render(comparison: Comparison) -> str:
    """One line of JSON, text as UTF-8."""
    return one_line(plain(comparison))
