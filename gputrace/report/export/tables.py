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
from gputrace.report import unfinished_folder
from gputrace.report.export import Job
from gputrace.sanitize import cell, cut

TABLES: Final = ("events", "steps", "gaps", "breakdown", "findings")
MOST_GAPS: Final = 10_000
"""Number of gaps listed, the largest ones."""

_ROWS_AT_ONCE: Final = 1 << 17
_TYPES: Final[Mapping[str, Any]] = {"int": pyarrow.int64(), "bool": pyarrow.bool_()}
EVENTS: Final = pyarrow.schema(
    [("kind", pyarrow.string()), ("name", pyarrow.string()), ("pid", pyarrow.int64())]
    + [(name, pyarrow.int64()) for name in COLUMN_TYPES if name not in ("kind", "name")]
)


def write_csv(job: Job) -> None:
    """Write a folder of CSV files with header lines; unknown values are empty."""
    from pyarrow.csv import CSVWriter

    _write_tables(job, "csv", lambda path, schema: CSVWriter(path, schema))


def write_parquet(job: Job) -> None:
    """Write a folder of Parquet files; nanoseconds are integers, unknown values null."""
    from pyarrow.parquet import ParquetWriter

    _write_tables(
        job, "parquet", lambda path, schema: ParquetWriter(path, schema, compression="zstd")
    )


def _write_tables(job: Job, suffix: str, open_writer: Callable[[Path, Any], Any]) -> None:
    """Write a folder with a file for each of `TABLES`."""
    analysis = job.analyze(MOST_GAPS)
    results: dict[str, tuple[type, Sequence[Any]]] = {
        "steps": (Step, analysis.step_list),
        "gaps": (Gap, analysis.gaps.largest),
        "breakdown": (Breakdown, analysis.breakdown),
        "findings": (Finding, analysis.findings),
    }
    with unfinished_folder(job.target, [f"{table}.{suffix}" for table in TABLES]) as folder:
        for table in TABLES:
            made = [_batch(*results[table])] if table in results else []
            schema = made[0].schema if made else EVENTS
            with open_writer(folder / f"{table}.{suffix}", schema) as writer:
                for batch in made or _events(job):
                    writer.write_batch(_harmless(batch) if suffix == "csv" else batch)


def _batch(kind: type, rows: Sequence[Any]) -> Any:
    """Return results as a batch; values other than numbers and strings become JSON."""
    types = {
        field.name: _TYPES.get(str(field.type).partition(" ")[0], pyarrow.string())
        for field in fields(kind)
    }
    columns = [
        pyarrow.array([_plain(getattr(row, name)) for row in rows], type_)
        for name, type_ in types.items()
    ]
    return pyarrow.record_batch(columns, schema=pyarrow.schema(types))


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
    exported_names = [cut(texts[id]) if id in texts else None for id in ids.tolist()]
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


def _harmless(batch: Any) -> Any:
    """Escape strings that a spreadsheet would take for formulas."""

    def escape(texts: Any) -> Any:
        coded = texts.dictionary_encode()
        shown = pyarrow.array([cell(text) for text in coded.dictionary.to_pylist()], texts.type)
        return shown.take(coded.indices)

    columns = [escape(column) if column.type == pyarrow.string() else column for column in batch]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)
