"""A folder of CSV files: events, steps, gaps, breakdown, findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gputrace.views.exports import Job


def write(job: Job) -> None:
    """Writes the folder; each file has a header line, what is not known is empty."""
    from gputrace.views.exports.tables import write_tables

    write_tables(job, "csv", _write)


def _write(path: Path, schema: Any, batches: Iterator[Any]) -> None:
    import pyarrow.csv

    with pyarrow.csv.CSVWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
