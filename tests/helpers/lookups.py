"""Reports of files, and what tests look up in them and in traces."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import gputrace
from gputrace.api import Report
from gputrace.model.results import Finding


def analyze(*paths: Path, steps: tuple[int, int] | str | None = None) -> Report:
    """Analyze files as one run."""
    with gputrace.open(*paths) as trace:
        return trace.analyze(steps=steps)


def finding_of(report: Report, id: str) -> Finding:
    """Return the first finding of an id."""
    return next(finding for finding in report.findings if finding.id == id)


def fields_of(row: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a result, without some."""
    return {name: getattr(row, name) for name in row.__slots__ if name not in without}


def rows(trace: Path, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query of an SQLite file."""
    with closing(sqlite3.connect(trace)) as database:
        return database.execute(sql).fetchall()
