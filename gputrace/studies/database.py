"""Folder of a study's results, its lock, and its SQLite database of finished runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import msgspec
from sqlite_utils import Database as Tables

from gputrace.errors import InputError, UsageError
from gputrace.store import sqlite_security

__all__ = ["Configuration", "Database", "Recording", "Run", "Settings", "State", "StudyRow"]

FILE: Final = "results.sqlite"

VERSION: Final = 1
"""Version of the schema; files of other versions are not opened."""

_PLACE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Primary error codes of the disk, not of the content."""

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
"""Errors of a corrupt file; SQLite quotes a corrupt schema, which need not be UTF-8."""

_JSON: Final = {"settings", "result"}
"""Columns that hold JSON."""

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
"""Runs of the study's current plan; others are kept in case they are planned again."""


class Database:
    """Database of a study; close it, or use a ``with`` statement."""

    def __init__(self, folder: Path, create: bool = False) -> None:
        """Open a database; raises InputError if it is missing or unreadable."""
        self.folder = folder
        self.path = folder / FILE
        if not create and not self.path.exists():
            raise InputError(folder, f"holds no {FILE}; `gputrace bench STUDY.toml` makes one")
        try:
            # No plugins of sqlite-utils, and no extensions.
            connection = sqlite3.connect(self.path)
            sqlite_security.harden(connection)
            connection.set_authorizer(sqlite_security.copying)
            self._tables = Tables(connection, execute_plugins=False)
            self._check(create)
        except _ERRORS as error:
            raise self._unreadable(error) from None

    def _check(self, create: bool) -> None:
        """Create the tables in a new file; raises InputError for a file of another kind."""
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
        """Run a transaction."""
        try:
            with self._tables.atomic():
                yield
        except _ERRORS as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> InputError:
        # The lowest byte is the primary code.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PLACE:
            problem = f"cannot be written ({error}); make room, or name another folder with -o"
            return InputError(self.path, problem)
        return InputError(self.path, f"cannot be used as results ({error}); move it away")

    def set_study(self, study: StudyRow, configurations: Sequence[Configuration]) -> None:
        """Replace the current plan; runs of other configurations stay, but are not returned."""
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
        """Return the file of the study that was run last; empty if there is none."""
        return next((str(row["file"]) for row in self._query("SELECT file FROM studies")), "")

    def study(self) -> StudyRow:
        """Return the study; raises InputError if none has begun."""
        for row in self._query("SELECT * FROM studies"):
            return self._sensible(row, StudyRow)
        raise InputError(self.path, "holds no study; `gputrace bench STUDY.toml` begins one")

    def configurations(self) -> list[Configuration]:
        """Return the configurations of the current plan, in its order."""
        rows = self._query(
            "SELECT * FROM configurations WHERE position IS NOT NULL ORDER BY position"
        )
        return [self._sensible(row, Configuration) for row in rows]

    def runs(self) -> list[Run]:
        """Return the finished runs of the current plan, in the order of the plan."""
        return [self._sensible(row, Run) for row in self._query(_SHOWN)]

    def save(self, run: Run) -> Run:
        """Save a finished run in place of an earlier try; return it with its id."""
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
        """Delete runs, so that they are run again."""
        with self._atomic():
            self._drop(runs)

    def _drop(self, runs: Iterable[Run]) -> None:
        which = "configuration = ? AND repeat = ? AND recorded = ?"
        for run in runs:
            key = list(run.place)
            old = f"run IN (SELECT id FROM runs WHERE {which})"
            self._tables.table("measures").delete_where(old, key)
            self._tables.table("runs").delete_where(which, key)

    def save_measures(self, run: Run, measures: Mapping[str, float | str]) -> None:
        """Save the measures of a saved run in place of earlier ones."""
        rows = [
            {"run": run.id, "name": name, "text" if isinstance(value, str) else "value": value}
            for name, value in measures.items()
        ]
        with self._atomic():
            self._tables.table("measures").delete_where("run = ?", [run.id])
            self._tables.table("measures").insert_all(rows)

    def measures(self) -> dict[int, dict[str, float | str]]:
        """Return the measures of each run that has any, by run id."""
        measures: dict[int, dict[str, float | str]] = {}
        for row in self._query("SELECT run, name, value, text FROM measures"):
            value = row["value"] if row["text"] is None else row["text"]
            measures.setdefault(row["run"], {})[row["name"]] = value
        return self._sensible(measures, dict[int, dict[str, float | str]])

    def _query(self, sql: str) -> list[dict[str, Any]]:
        try:
            return list(self._tables.query(sql))
        except _ERRORS as error:
            raise self._unreadable(error) from None

    def _sensible(self, row: dict[Any, Any], kind: type[_Row]) -> _Row:
        """Convert a row to its dataclass; raises InputError for an invalid one."""
        try:
            for name in _JSON & row.keys():
                row[name] = None if row[name] is None else json.loads(row[name])
            return msgspec.convert(row, kind, strict="recorded" not in row)
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"holds a row that no study leaves ({error}); move it away"
            raise InputError(self.path, problem) from None

    def close(self) -> None:
        """Close the file; all saved runs persist."""
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


State = Literal["done", "failed", "skipped"]
Recording = Literal["recorded", "bare", "both"]
Settings = Mapping[str, Any]
"""Settings of a run by their names in the study file: framework, gpus, batch, ..."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """Header of the study file when it was last run."""

    title: str
    question: str
    repeats: int
    recording: Recording
    file: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """Combination of settings.

    Attributes:
        key: hash of the settings, independent of the rest of the study.
        settings: as in the study, with ``framework``, ``gpus`` and ``visible``.
    """

    key: str
    framework: str
    gpus: int
    settings: Settings


@dataclass(frozen=True, slots=True)
class Run:
    """Repeat of a configuration that is over, or cannot be run.

    Attributes:
        configuration: key of the configuration.
        repeat: counted from 1.
        recorded: True under `gputrace record`, False for a bare run.
        why: one line on why it failed or was skipped.
        result: the object that the script printed last; None unless done.
        trace, log: paths relative to the folder of results.
        id: None until saved.
    """

    configuration: str
    repeat: int
    recorded: bool
    state: State
    why: str = ""
    started_ns: int | None = None
    ended_ns: int | None = None
    exit_code: int | None = None
    result: Mapping[str, Any] | None = None
    trace: str | None = None
    log: str | None = None
    id: int | None = None

    @property
    def place(self) -> tuple[str, int, bool]:
        """Return the key that identifies the run in its study."""
        return self.configuration, self.repeat, self.recorded


_LOCK: Final = "lock"
PARTS: Final = "parts"
"""Subfolder with a folder of results for each job of a Slurm array."""


class Folder:
    """Folder of results; finished files in ``traces`` and ``logs``, others in ``underway``.

    Attributes:
        path: absolute, with links resolved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.traces = self.path / "traces"
        self.logs = self.path / "logs"
        self.images = self.path / "images"
        self.underway = self.path / "underway"

    def make(self) -> None:
        """Create the folder; raises UsageError if it holds other files, InputError if it fails."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: is no folder; name another with -o")
        if self.path.is_dir() and any(self.path.iterdir()) and not self._is_ours():
            raise UsageError(f"{self.path}: holds other files; name another folder with -o")
        try:
            for folder in (self.traces, self.logs, self.images, self.underway):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(self.path, f"cannot be made ({error.strerror})") from None

    def _is_ours(self) -> bool:
        return any((self.path / name).exists() for name in (FILE, _LOCK, "underway", PARTS))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the folder; raises UsageError if another process has it."""
        with (self.path / _LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"{self.path}: another gputrace bench (process {file.read().strip()}) "
                    "runs there; wait for it, or name another folder with -o"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def clean(self) -> None:
        """Remove the files of an unfinished run."""
        for path in self.underway.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def gather(folder: Folder, tell: Callable[[str], None]) -> None:
    """Merge newer runs from the parts of a Slurm array; parts whose job still runs are skipped."""
    parts = sorted(path for path in (folder.path / PARTS).glob("*") if (path / FILE).exists())
    if not parts:
        return
    folder.make()
    with folder.held(), Database(folder.path, create=True) as whole:
        for path in parts:
            try:
                with Folder(path).held(), Database(path) as part:
                    _take(part, whole)
            except UsageError:
                tell(f"{path.name} is not over; its results are left for later")


def _take(part: Database, whole: Database) -> None:
    """Merge a part; every job plans the whole study, so each part has its description."""
    whole.set_study(part.study(), part.configurations())
    known = {run.place: run for run in whole.runs()}
    figures = part.measures()
    for run in part.runs():
        if _is_newer(run, known.get(run.place)):
            moved = replace(
                run,
                trace=_move(run.trace, part.folder, whole.folder),
                log=_move(run.log, part.folder, whole.folder),
                id=None,
            )
            saved = whole.save(moved)
            if run.id is not None and run.id in figures:
                whole.save_measures(saved, figures[run.id])


def _is_newer(run: Run, old: Run | None) -> bool:
    if old is None or old.state == "skipped":
        return True
    return (run.ended_ns or 0) > (old.ended_ns or 0)


def _move(name: str | None, old: Path, new: Path) -> str | None:
    if name is None or not (old / name).exists():
        return None
    (new / name).parent.mkdir(parents=True, exist_ok=True)
    (old / name).replace(new / name)
    return name
