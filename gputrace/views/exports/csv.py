"""A folder of CSV files: events, steps, gaps, breakdown, findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gputrace.cleaning import cell
from gputrace.views.exports import Job


def write(job: Job) -> None:
    """Writes the folder; each file has a header line, what is not known is empty."""
    from gputrace.views.exports.tables import write_tables

    write_tables(job, "csv", _write)


def _write(path: Path, schema: Any, batches: Iterator[Any]) -> None:
    import pyarrow.csv

    with pyarrow.csv.CSVWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(_harmless(batch))


def _harmless(batch: Any) -> Any:
    """The rows, of which no text begins as a formula of a spreadsheet does."""
    import pyarrow

    columns = [_cells(column) if column.type == pyarrow.string() else column for column in batch]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def _cells(texts: Any) -> Any:
    import pyarrow

    coded = texts.dictionary_encode()
    shown = pyarrow.array([cell(text) for text in coded.dictionary.to_pylist()], texts.type)
    return shown.take(coded.indices)
