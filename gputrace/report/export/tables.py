"""Export as a folder of Parquet or CSV files: events, steps, gaps, breakdown, findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow

from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Events, Kind
from gputrace.model.results import Breakdown, Finding, Gap, Step
from gputrace.model.trace import Trace
from gputrace.report.export import Job
from gputrace.report.output_file import unfinished_folder
from gputrace.sanitize import cell, exported

TABLES: Final = ("events", "steps", "gaps", "breakdown", "findings")
MOST_GAPS: Final = 10_000
"""Number of gaps listed, the largest ones."""

_ROWS_AT_ONCE: Final = 1 << 17
_TYPES: Final[Mapping[str, Any]] = {
    "int": pyarrow.int64(),
    "bool": pyarrow.bool_(),
    "str": pyarrow.string(),
}
EVENTS: Final = pyarrow.schema(
    [("kind", pyarrow.string()), ("name", pyarrow.string()), ("pid", pyarrow.int64())]
    + [(name, pyarrow.int64()) for name in COLUMN_TYPES if name not in ("kind", "name")]
)

Write = Callable[[Path, Any, Iterator[Any]], None]
"""Writer of a file from a schema and record batches."""


def write_tables(job: Job, suffix: str, write: Write) -> None:
    """Write a folder with a file for each of `TABLES`."""
    analysis = job.analyze(MOST_GAPS)
    names = [f"{table}.{suffix}" for table in TABLES]
    results: list[tuple[type, Sequence[Any]]] = [
        (Step, analysis.step_list),
        (Gap, analysis.gaps.largest),
        (Breakdown, analysis.breakdown),
        (Finding, analysis.findings),
    ]
    with unfinished_folder(job.target, names) as folder:
        write(folder / names[0], EVENTS, _events(job))
        for name, (kind, rows) in zip(names[1:], results, strict=True):
            schema = _schema(kind)
            write(folder / name, schema, iter([_batch(schema, rows)]))


def _schema(kind: type) -> Any:
    """Return the schema of a dataclass; values other than numbers and strings become JSON."""
    types = [(field.name, str(field.type).partition(" ")[0]) for field in fields(kind)]
    return pyarrow.schema([(name, _TYPES.get(type_, pyarrow.string())) for name, type_ in types])


def _batch(schema: Any, rows: Sequence[Any]) -> Any:
    return pyarrow.record_batch(
        [
            pyarrow.array([_plain(getattr(row, field.name)) for row in rows], field.type)
            for field in schema
        ],
        schema=schema,
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return json.dumps(value) if isinstance(value, tuple) else value


def _events(job: Job) -> Iterator[Any]:
    """Yield all rows that overlap the window, one kind of events after another."""
    for done, kind in enumerate(Kind):
        if job.progress is not None:
            job.progress(done, len(Kind))
        if kind in job.trace.kinds:
            events = job.trace.events([kind], tuple(COLUMN_TYPES), job.window)
            for first in range(0, len(events), _ROWS_AT_ONCE):
                part = events.select(slice(first, first + _ROWS_AT_ONCE))
                yield _event_batch(job.trace, kind, part)


def _event_batch(trace: Trace, kind: Kind, events: Events) -> Any:
    ids, inverse = np.unique(events.name, return_inverse=True)
    texts = trace.names(ids[ids != UNKNOWN])
    exported_names = [exported(texts[id]) if id in texts else None for id in ids.tolist()]
    names = pyarrow.array(exported_names, pyarrow.string())
    pids = np.array([process.pid for process in trace.processes])
    arrays = {
        "kind": pyarrow.array([kind.name.lower()] * len(events)),
        "name": names.take(pyarrow.array(inverse)),
        "pid": pyarrow.array(pids[events.process], pyarrow.int64()),
    }
    for name in EVENTS.names[3:]:
        values = getattr(events, name).astype(np.int64)
        timed = name in ("start", "end")
        arrays[name] = pyarrow.array(values, mask=None if timed else values == UNKNOWN)
    return pyarrow.record_batch([arrays[name] for name in EVENTS.names], schema=EVENTS)


def write_csv(job: Job) -> None:
    """Write a folder of CSV files with header lines; unknown values are empty."""
    write_tables(job, "csv", _write_csv)


def _write_csv(path: Path, schema: Any, batches: Iterator[Any]) -> None:
    import pyarrow.csv

    with pyarrow.csv.CSVWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(_harmless(batch))


def _harmless(batch: Any) -> Any:
    """Escape strings that a spreadsheet would take for formulas."""

    def escape(texts: Any) -> Any:
        coded = texts.dictionary_encode()
        shown = pyarrow.array([cell(text) for text in coded.dictionary.to_pylist()], texts.type)
        return shown.take(coded.indices)

    columns = [escape(column) if column.type == pyarrow.string() else column for column in batch]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def write_parquet(job: Job) -> None:
    """Write a folder of Parquet files; nanoseconds are integers, unknown values null."""
    write_tables(job, "parquet", _write_parquet)


def _write_parquet(path: Path, schema: Any, batches: Iterator[Any]) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
