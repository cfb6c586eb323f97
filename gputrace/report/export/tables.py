"""Export as a folder of Parquet or CSV files: events, steps, gaps, breakdown, findings."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.errors import MissingError
from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Kind
from gputrace.model.results import Breakdown, Finding, Gap, Step
from gputrace.report import unfinished_folder
from gputrace.report.export import Job
from gputrace.sanitize import cell, cut

TABLES: Final = ("events", "steps", "gaps", "breakdown", "findings")
MOST_GAPS: Final = 10_000
"""Number of gaps listed, the largest ones."""

_ROWS_AT_ONCE: Final = 1 << 17
_TYPES: Final = {"int": "int64", "bool": "bool"}
EVENTS: Final = {"kind": "string", "name": "string", "pid": "int64"} | {
    name: "int64" for name in COLUMN_TYPES if name not in ("kind", "name")
}
"""Arrow's name for the type of each column of the events."""

_Columns = Mapping[str, Any]
"""Columns of a table, masked where a value is unknown."""
_Open = Callable[[Path, Mapping[str, str]], AbstractContextManager[Callable[[_Columns], object]]]
"""Opens a file with columns of these types for writing; gives what adds rows."""


def write_csv(job: Job) -> None:
    """Write a folder of CSV files with header lines; unknown values are empty."""
    _write_tables(job, "csv", _open_csv)


def write_parquet(job: Job) -> None:
    """Write a folder of Parquet files; nanoseconds are integers, unknown values null.

    Raises MissingError without pyarrow.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        hint = "install gputrace[arrow], or write --to csv"
        raise MissingError(f"Parquet files need pyarrow; {hint}") from None
    _write_tables(job, "parquet", _open_parquet)


def _write_tables(job: Job, suffix: str, open_file: _Open) -> None:
    """Write a folder with a file for each of `TABLES`."""
    analysis = job.read(MOST_GAPS).analysis
    assert analysis is not None
    results: dict[str, tuple[type, Sequence[Any]]] = {
        "steps": (Step, analysis.step_list),
        "gaps": (Gap, analysis.gaps.largest),
        "breakdown": (Breakdown, analysis.breakdown),
        "findings": (Finding, analysis.findings),
    }
    with unfinished_folder(job.target, [f"{table}.{suffix}" for table in TABLES]) as folder:
        for table in TABLES:
            types, batches = EVENTS, _events(job)
            if table in results:
                kind, rows = results[table]
                annotations = {
                    field.name: str(field.type).partition(" ")[0] for field in fields(kind)
                }
                types = {
                    name: _TYPES.get(annotation, "string")
                    for name, annotation in annotations.items()
                }
                results_columns = {
                    n: _column([_plain(getattr(row, n)) for row in rows]) for n in types
                }
                batches = iter([results_columns])
            with open_file(folder / f"{table}.{suffix}", types) as write:
                for columns in batches:
                    write(columns)


@contextmanager
def _open_csv(path: Path, types: Mapping[str, str]) -> Iterator[Callable[[_Columns], object]]:
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(types)

        def write(columns: _Columns) -> None:
            values = [column.tolist() for column in columns.values()]
            for index, type_ in enumerate(types.values()):
                if type_ == "string":  # A spreadsheet would take some for formulas.
                    values[index] = list(map(cell, values[index]))
                elif type_ == "bool":
                    values[index] = [{True: "true", False: "false"}[v] for v in values[index]]
            writer.writerows(zip(*values, strict=True))

        yield write


@contextmanager
def _open_parquet(path: Path, types: Mapping[str, str]) -> Iterator[Callable[[_Columns], object]]:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema(list(types.items()))
    with ParquetWriter(path, schema, compression="zstd") as writer:

        def write(columns: _Columns) -> None:
            arrays = [
                pyarrow.array(column.data, field.type, mask=np.ma.getmaskarray(column))
                for column, field in zip(columns.values(), schema, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))

        yield write


def _column(values: Sequence[object]) -> Any:
    return np.ma.array(np.array(values, object), mask=[value is None for value in values])


def _plain(value: object) -> object:
    """Return values other than numbers and strings as JSON."""
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return json.dumps(value) if isinstance(value, tuple) else value


def _events(job: Job) -> Iterator[_Columns]:
    """Yield all rows that overlap the window, one kind of events after another."""
    for done, kind in enumerate(Kind):
        if job.progress is not None:
            job.progress(done, len(Kind))
        if kind in job.trace.kinds:
            events = job.trace.events([kind], tuple(COLUMN_TYPES), job.window)
            for first in range(0, len(events), _ROWS_AT_ONCE):
                part = events.select(slice(first, first + _ROWS_AT_ONCE))
                ids, inverse = np.unique(part.name, return_inverse=True)
                texts = job.trace.names(ids[ids != UNKNOWN])
                names = _column([cut(texts[id]) if id in texts else None for id in ids.tolist()])
                pids = np.array([process.pid for process in job.trace.processes])
                columns = {
                    "kind": np.ma.array(np.full(len(part), kind.name.lower(), object)),
                    "name": names[inverse],
                    "pid": np.ma.array(pids[part.process]),
                }
                for name in list(EVENTS)[3:]:
                    values = getattr(part, name).astype(np.int64)
                    timed = name in ("start", "end")
                    columns[name] = np.ma.array(values, mask=False if timed else values == UNKNOWN)
                yield columns
