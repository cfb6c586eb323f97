"""The results of a study: a SQLite file in its folder, which says what has been run.

A run has a row from the moment that it is over and its files are in place, and none before: what
was under way when the power went is run anew. Paths are below the folder, so that it can be moved.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
from sqlite_utils import Database as Tables

from gputrace.bench.rows import Configuration, Recording, Run, Settings, State, StudyRow
from gputrace.errors import InputError
from gputrace.traces import guard

__all__ = ["Configuration", "Database", "Recording", "Run", "Settings", "State", "StudyRow"]

FILE: Final = "results.sqlite"

VERSION: Final = 1
"""Of the tables; a file of a later one is not opened."""

_PLACE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Errors of the disk, not of what is on it."""

_APPLICATION: Final = 0x67707462  # "gptb", in the header of the file

_TABLES: Final[dict[str, tuple[dict[str, type], str | tuple[str, ...]]]] = {
    "studies": (
        {"id": int, "title": str, "question": str, "repeats": int, "recording": str, "file": str},
        "id",
    ),
    "configurations": (
        {"key": str, "position": int, "framework": str, "gpus": int, "settings": str},
        "key",
    ),
    "runs": (
        {"id": int, "configuration": str, "repeat": int, "recorded": int, "state": str, "why": str}
        | {"started_ns": int, "ended_ns": int, "exit_code": int}
        | {"result": str, "trace": str, "log": str},
        "id",
    ),
    "measures": ({"run": int, "name": str, "value": float, "text": str}, ("run", "name")),
}
"""Columns of each table, and its primary key."""

_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite says of a broken schema quotes it, which need not be UTF-8."""

_JSON: Final = {"settings", "result"}
"""Columns that hold it."""

_Row = TypeVar("_Row")

_REFERENCES: Final = {
    "runs": [("configuration", "configurations", "key")],
    "measures": [("run", "runs", "id")],
}

_SHOWN: Final = """
    SELECT runs.* FROM runs
    JOIN configurations ON configurations.key = runs.configuration
    JOIN studies
    WHERE position IS NOT NULL AND repeat <= repeats
    AND (recording = 'both' OR recorded = (recording = 'recorded'))
    ORDER BY repeat, position, recorded
"""
"""Runs that the study asks for as it is now; others are kept, in case it asks for them again."""


class Database:
    """The open file; close it, or use a ``with`` statement."""

    def __init__(self, folder: Path, create: bool = False) -> None:
        """Raises InputError for a folder without results, or with what cannot be read."""
        self.folder = folder
        self.path = folder / FILE
        if not create and not self.path.exists():
            raise InputError(folder, f"holds no {FILE}; `gputrace bench STUDY.toml` makes one")
        try:
            # Plugins of other programs have no business in here.
            connection = sqlite3.connect(self.path)
            guard.harden(connection)
            connection.set_authorizer(guard.copying)
            self._tables = Tables(connection, execute_plugins=False)
            self._check(create)
        except _ERRORS as error:
            raise self._unreadable(error) from None

    def _check(self, create: bool) -> None:
        """Makes the tables in a new file; raises InputError for one that is not ours."""
        application = self._number("application_id")
        if create and not application and not self._tables.table_names():
            self._create()
        elif application != _APPLICATION:
            raise InputError(self.path, "holds no results of `gputrace bench`; name another folder")
        elif (version := self._number("user_version")) != VERSION:
            raise InputError(
                self.path,
                f"has tables of version {version}, this gputrace knows {VERSION}; use a newer one",
            )
        elif lacking := _TABLES.keys() - set(self._tables.table_names()):
            raise InputError(self.path, f"has no table {min(lacking)}; name another folder")
        self._tables.execute("PRAGMA foreign_keys = ON")

    def _number(self, pragma: str) -> int:
        return int(self._tables.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _create(self) -> None:
        with self._atomic():
            for name, (columns, key) in _TABLES.items():
                self._tables.table(name).create(
                    columns, pk=key, foreign_keys=_REFERENCES.get(name, [])
                )
            self._tables.table("runs").create_index(
                ["configuration", "repeat", "recorded"], unique=True
            )
            self._tables.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._tables.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """All that is written meanwhile, or nothing of it."""
        try:
            with self._tables.atomic():
                yield
        except _ERRORS as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> InputError:
        # The lowest byte is the kind; those above it tell more.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PLACE:
            told = f"cannot be written ({error}); make room, or name another folder with -o"
            return InputError(self.path, told)
        return InputError(self.path, f"cannot be used as results ({error}); move it away")

    def set_study(self, study: StudyRow, configurations: Sequence[Configuration]) -> None:
        """From now on these are what the study asks for; runs of others stay, unseen."""
        row = {"id": 1, "title": study.title, "question": study.question, "file": study.file}
        row |= {"repeats": study.repeats, "recording": study.recording}
        with self._atomic():
            self._tables.table("studies").upsert(row, pk="id")
            self._tables.execute("UPDATE configurations SET position = NULL")
            self._tables.table("configurations").upsert_all(
                (
                    {
                        "key": each.key,
                        "position": position,
                        "framework": each.framework,
                        "gpus": each.gpus,
                        "settings": json.dumps(each.settings),
                    }
                    for position, each in enumerate(configurations)
                ),
                pk="key",
            )

    def study_file(self) -> str:
        """Of the study that was run last; empty where none has begun."""
        return next((str(row["file"]) for row in self._query("SELECT file FROM studies")), "")

    def study(self) -> StudyRow:
        """Raises InputError where no study has begun."""
        for row in self._query("SELECT * FROM studies"):
            return self._sensible(row, StudyRow)
        raise InputError(self.path, "holds no study; `gputrace bench STUDY.toml` begins one")

    def configurations(self) -> list[Configuration]:
        """Those of the study as it is now, in its order."""
        rows = self._query(
            "SELECT * FROM configurations WHERE position IS NOT NULL ORDER BY position"
        )
        return [self._sensible(row, Configuration) for row in rows]

    def runs(self) -> list[Run]:
        """Those of the study as it is now that are over, in the order in which they are run."""
        return [self._sensible(row, Run) for row in self._query(_SHOWN)]

    def save(self, run: Run) -> Run:
        """Keeps a run that is over, in place of an earlier try; its id is in what is given back."""
        row = {
            "configuration": run.configuration,
            "repeat": run.repeat,
            "recorded": int(run.recorded),
            "state": run.state,
            "why": run.why,
            "started_ns": run.started_ns,
            "ended_ns": run.ended_ns,
            "exit_code": run.exit_code,
            "result": None if run.result is None else json.dumps(run.result),
            "trace": run.trace,
            "log": run.log,
        }
        with self._atomic():
            self._drop([run])
            saved = self._tables.table("runs").insert(row, pk="id")
        return self._sensible(row | {"id": saved.last_pk}, Run)

    def drop(self, runs: Iterable[Run]) -> None:
        """Forgets runs, so that they are run again."""
        with self._atomic():
            self._drop(runs)

    def _drop(self, runs: Iterable[Run]) -> None:
        which = "configuration = ? AND repeat = ? AND recorded = ?"
        for run in runs:
            place = list(run.place)
            old = f"run IN (SELECT id FROM runs WHERE {which})"
            self._tables.table("measures").delete_where(old, place)
            self._tables.table("runs").delete_where(which, place)

    def save_measures(self, run: Run, measures: Mapping[str, float | str]) -> None:
        """Keeps figures and words on a saved run, in place of those it had."""
        rows = [
            {"run": run.id, "name": name, "text" if isinstance(value, str) else "value": value}
            for name, value in measures.items()
        ]
        with self._atomic():
            self._tables.table("measures").delete_where("run = ?", [run.id])
            self._tables.table("measures").insert_all(rows)

    def measures(self) -> dict[int, dict[str, float | str]]:
        """The figures and words of each run that has any, by its id."""
        found: dict[int, dict[str, float | str]] = {}
        for row in self._query("SELECT run, name, value, text FROM measures"):
            value = row["value"] if row["text"] is None else row["text"]
            found.setdefault(row["run"], {})[row["name"]] = value
        return self._sensible(found, dict[int, dict[str, float | str]])

    def _query(self, sql: str) -> list[dict[str, Any]]:
        try:
            return list(self._tables.query(sql))
        except _ERRORS as error:
            raise self._unreadable(error) from None

    def _sensible(self, row: dict[Any, Any], kind: type[_Row]) -> _Row:
        """A row as what it stands for; raises InputError for one that no study leaves."""
        try:
            for name in _JSON & row.keys():
                row[name] = None if row[name] is None else json.loads(row[name])
            return msgspec.convert(row, kind, strict="recorded" not in row)
        except (ValueError, TypeError, RecursionError) as error:
            told = f"holds a row that no study leaves ({error}); move it away"
            raise InputError(self.path, told) from None

    def close(self) -> None:
        """What was saved stays."""
        with suppress(sqlite3.Error):
            self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
