"""The results as one JSON object; its names are those of the result dataclasses."""

from __future__ import annotations

from gputrace.bench.answer import Summary
from gputrace.bench.database import Database
from gputrace.views.json import one_line, plain


def render(summary: Summary, database: Database | None = None) -> str:
    """One line of JSON, text as UTF-8; with a database, the runs as they are kept are in it too."""
    answer = plain(summary)
    assert isinstance(answer, dict)
    return one_line(answer if database is None else answer | _kept(database))


def _kept(database: Database) -> dict[str, object]:
    return {
        "study": plain(database.study()),
        "configurations": plain(database.configurations()),
        "runs": plain(database.runs()),
    }
