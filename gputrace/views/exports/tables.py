"""A trace and its analysis as tables of Arrow, which Parquet and CSV are written from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow

from gputrace.analyzers.results import Analysis, Breakdown, Finding, Gap, Step
from gputrace.cleaning import exported
from gputrace.traces.events import COLUMN_TYPES, UNKNOWN, Events, Kind
from gputrace.traces.trace import Trace
from gputrace.views.exports import Job
from gputrace.views.exports.targets import unfinished_folder

TABLES: Final = ("events", "steps", "gaps", "breakdown", "findings")
MOST_GAPS: Final = 10_000
"""The largest gaps are listed."""

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
"""Writes a file of a schema and record batches."""


def write_tables(job: Job, suffix: str, write: Write) -> None:
    """Writes a folder with a file for each of `TABLES`."""
    analysis = job.analyze(MOST_GAPS)
    names = [f"{table}.{suffix}" for table in TABLES]
    with unfinished_folder(job.target, names) as folder:
        write(folder / names[0], EVENTS, _events(job))
        for name, (kind, rows) in zip(names[1:], _results(analysis), strict=True):
            schema = _schema(kind)
            write(folder / name, schema, iter([_batch(schema, rows)]))


def _results(analysis: Analysis) -> list[tuple[type, Sequence[Any]]]:
    return [
        (Step, analysis.step_list),
        (Gap, analysis.gaps.largest),
        (Breakdown, analysis.breakdown),
        (Finding, analysis.findings),
    ]


def _schema(kind: type) -> Any:
    """The fields of a dataclass; what is neither a number nor a text is JSON in a text."""
    told = [(field.name, str(field.type).partition(" ")[0]) for field in fields(kind)]
    return pyarrow.schema([(name, _TYPES.get(type_, pyarrow.string())) for name, type_ in told])


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
    """All rows that touch the window, a kind after another."""
    for done, kind in enumerate(Kind):
        if job.progress is not None:
            job.progress(done, len(Kind))
        if kind in job.trace.kinds:
            events = job.trace.events([kind], tuple(COLUMN_TYPES), job.window)
            for first in range(0, len(events), _ROWS_AT_ONCE):
                part = events.select(slice(first, first + _ROWS_AT_ONCE))
                yield _event_batch(job.trace, kind, part)


def _event_batch(trace: Trace, kind: Kind, events: Events) -> Any:
    ids, place = np.unique(events.name, return_inverse=True)
    texts = trace.names(ids[ids != UNKNOWN])
    told = [exported(texts[id]) if id in texts else None for id in ids.tolist()]
    names = pyarrow.array(told, pyarrow.string())
    pids = np.array([process.pid for process in trace.processes])
    arrays = {
        "kind": pyarrow.array([kind.name.lower()] * len(events)),
        "name": names.take(pyarrow.array(place)),
        "pid": pyarrow.array(pids[events.process], pyarrow.int64()),
    }
    for name in EVENTS.names[3:]:
        values = getattr(events, name).astype(np.int64)
        timed = name in ("start", "end")
        arrays[name] = pyarrow.array(values, mask=None if timed else values == UNKNOWN)
    return pyarrow.record_batch([arrays[name] for name in EVENTS.names], schema=EVENTS)
