"""Measures as rows of the results' database, and the results read back from it.

A row has a name such as ``step_ns``, ``classes.compute`` or ``gpus.0.sm_clock_mhz``; what is not
known has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import msgspec

from gputrace.analyzers.results import CLASSES
from gputrace.bench.database import Database
from gputrace.bench.measure import measure
from gputrace.bench.results import Measure, Results, RunResult
from gputrace.errors import InputError

Figures = Mapping[str, float | str]
Telling = Callable[[str], AbstractContextManager[Any]]

_LISTS: Final = ("findings", "gpus", "links", "predictions")


def to_rows(own: Measure) -> dict[str, float | str]:
    """A measure as names and values."""
    return dict(_flat("", msgspec.to_builtins(own)))


def _flat(name: str, value: Any) -> Iterator[tuple[str, float | str]]:
    """The leaves of nested mappings and lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        yield from _flat(name, dict(enumerate(value)))
    elif value is not None:
        yield name, value


def from_rows(rows: Figures) -> Measure:
    """The measure that `to_rows` was given."""
    tree: dict[str, Any] = {}
    for name, value in rows.items():
        *above, leaf = name.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[leaf] = value
    for name in _LISTS:
        items = tree.get(name, {})
        tree[name] = [items[key] for key in sorted(items, key=int)]
    return msgspec.convert(tree, Measure, strict=False)


def measure_runs(database: Database, telling: Telling = lambda _: nullcontext()) -> None:
    """Measures the recordings that have not been measured yet.

    ``telling`` gets the name of each, and gives what is to be told how far its reading is.
    """
    known = database.measures()
    for run in database.runs():
        if run.trace is not None and run.state == "done" and run.id not in known:
            with telling(run.trace) as progress:
                own = measure(database.folder / run.trace, progress)
            database.save_measures(run, to_rows(own))


def _kept(database: Database, rows: Figures) -> Measure:
    try:
        found = from_rows(rows)
        if found.classes is not None and found.classes.keys() != set(CLASSES):
            raise ValueError("classes of a step are missing")
    except (ValueError, TypeError, AttributeError) as error:
        told = f"holds measures that no study leaves ({error}); move it away"
        raise InputError(database.path, told) from None
    return found


def read_results(database: Database) -> Results:
    """All runs of the study as it is now, with their measures; raises InputError without one."""
    study = database.study()
    settings = {each.key: each.settings for each in database.configurations()}
    places = {key: place for place, key in enumerate(settings)}
    found = database.runs()
    if any(run.configuration not in places for run in found):
        raise InputError(database.path, "holds runs of no configuration; move it away")
    runs = sorted(found, key=lambda run: (places[run.configuration], run.repeat))
    known = {id: _kept(database, rows) for id, rows in database.measures().items()}
    results = (
        RunResult(
            settings=settings[run.configuration],
            repeat=run.repeat,
            recorded=run.recorded,
            state=run.state,
            reason=run.why,
            told=run.result,
            measure=None if run.id is None else known.get(run.id),
        )
        for run in runs
    )
    planned = len(settings) * study.repeats * (2 if study.recording == "both" else 1)
    return Results(study.title, study.question, tuple(results), planned - len(runs))
