"""From the results' database to what is shown of it: measures, the summary, the page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gputrace.bench.answer import Summary
from gputrace.bench.database import Database
from gputrace.bench.keeping import Telling, measure_runs, read_results
from gputrace.bench.summary import summarize

_PAGE: Final = "results.html"


def report(database: Database, telling: Telling) -> Summary:
    """What the results say; what is not measured yet is measured first."""
    measure_runs(database, telling)
    return summarize(read_results(database))


def write_page(summary: Summary, folder: Path) -> Path:
    """The page in the folder of results; raises OSError with its name where it cannot be there."""
    from gputrace.bench.views.page import render
    from gputrace.views.exports.targets import unfinished_file

    page = folder / _PAGE
    text = render(summary)
    try:
        with unfinished_file(page) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(page)) from None
    return page


def holds(summary: Summary) -> bool:
    """Whether all recordings agree with what their scripts say of themselves."""
    return all(check.ok is not False for check in summary.checks)
