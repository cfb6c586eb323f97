"""A folder of Parquet files: events, steps, gaps, breakdown, findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gputrace.views.exports import Job


def write(job: Job) -> None:
    """Writes the folder; nanoseconds are integers, what is not known is null."""
    from gputrace.views.exports.tables import write_tables

    write_tables(job, "parquet", _write)


def _write(path: Path, schema: Any, batches: Iterator[Any]) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
