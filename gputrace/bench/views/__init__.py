"""The results of a study as people and programs want them."""

from __future__ import annotations

from typing import Final

from gputrace.bench.answer import Summary
from gputrace.bench.database import Database
from gputrace.views.forms import render_as

FORMATS: Final = {
    "text": "gputrace.bench.views.text",
    "json": "gputrace.bench.views.json",
    "markdown": "gputrace.bench.views.markdown",
    "csv": "gputrace.bench.views.csv",
}


def render(summary: Summary, database: Database, form: str) -> str:
    """The results in one of `FORMATS`; the JSON has the runs themselves beside what they say."""
    if form == "json":
        from gputrace.bench.views.json import render as as_json

        return as_json(summary, database)
    return render_as(summary, form, FORMATS)
