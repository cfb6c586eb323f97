"""Folder of a study's results, its lock, and its SQLite database of finished runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

import msgspec

from gputrace.errors import InputError, UsageError
from gputrace.store import sqlite_security

FILE: Final = "results.sqlite"

VERSION: Final = 2
"""Version of the schema; files of other versions are not opened."""

_DISK_ERRORS: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Primary error codes of the disk, not of the content."""

_APPLICATION: Final = 0x67707462  # "gptb", in the header of the file

_RUNS: Final = {
    **{"id": int, "configuration": str, "repeat": int, "recorded": int},
    **{"state": str, "why": str, "started_ns": int, "ended_ns": int, "exit_code": int},
    **{"result": str, "trace": str, "log": str, "measure": str},
}
"""Columns of the runs; ``result`` and ``measure`` are JSON."""
_KEY: Final = ("configuration", "repeat", "recorded")

_T = TypeVar("_T")


class Database:
    """Database of a study; close it, or use a ``with`` statement."""

    def __init__(self, folder: Path, create: bool = False) -> None:
        """Open a database; raises InputError if it is missing or unreadable."""
        self.folder = folder
        self.path = folder / FILE
        if not create and not self.path.exists():
            raise InputError(folder, f"holds no {FILE}; `gputrace bench STUDY.toml` makes one")
        with self._errors():
            self._database, application, version = sqlite_security.open_own(self.path)
            tables = set(self._database.table_names())
            if create and not application and not tables:
                with self._database.atomic():
                    self._database.table("plans").create({"id": int, "plan": str}, pk="id")
                    runs = self._database.table("runs").create(_RUNS, pk="id")
                    runs.create_index(_KEY, unique=True)
                    self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
                    self._database.execute(f"PRAGMA user_version = {VERSION}")
            elif application != _APPLICATION:
                raise InputError(
                    self.path, "holds no results of `gputrace bench`; name another folder"
                )
            elif version != VERSION:
                newer = (
                    "use a newer one" if version > VERSION else "run the study in another folder"
                )
                raise InputError(
                    self.path,
                    f"has tables of version {version}, this gputrace knows {VERSION}; {newer}",
                )
            elif missing := {"plans", "runs"} - tables:
                raise InputError(self.path, f"has no table {min(missing)}; name another folder")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise InputError for what SQLite reports."""
        try:
            yield
        except sqlite_security.ERRORS as error:
            # The lowest byte is the primary code.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK_ERRORS:
                problem = f"cannot be written ({error}); make room, or name another folder with -o"
            else:
                problem = f"cannot be used as results ({error}); move it away"
            raise InputError(self.path, problem) from None

    def _rows(self, query: str) -> list[dict[str, Any]]:
        with self._errors():
            return list(self._database.query(f"SELECT {query}"))

    def convert(self, value: Any, kind: type[_T]) -> _T:
        """Convert what the database holds to a type; raises InputError if it is invalid."""
        try:
            return msgspec.convert(value, kind, strict=False, str_keys=True)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._invalid(error) from None

    def _parse(self, text: Any) -> Any:
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._invalid(error) from None

    def _invalid(self, error: Exception) -> InputError:
        return InputError(self.path, f"holds a row that no study leaves ({error}); move it away")

    def set_plan(self, plan: StudyPlan) -> None:
        """Replace the current plan; runs of other configurations stay, but are not returned."""
        text = json.dumps(msgspec.to_builtins(plan))
        with self._errors():
            self._database.table("plans").insert({"id": 1, "plan": text}, replace=True)

    def plan(self) -> StudyPlan:
        """Return the current plan; raises InputError if no study has begun."""
        if (plan := self.find_plan()) is None:
            raise InputError(self.path, "holds no study; `gputrace bench STUDY.toml` begins one")
        return plan

    def find_plan(self) -> StudyPlan | None:
        """Return the current plan; None if no study has begun."""
        for row in self._rows("plan FROM plans"):
            return self.convert(self._parse(row["plan"]), StudyPlan)
        return None

    def runs(self) -> list[Run]:
        """Return the finished runs of the current plan, in its order.

        Others are kept in case they are planned again.
        """
        if (plan := self.find_plan()) is None:
            return []
        study, order = plan.study, {each.key: n for n, each in enumerate(plan.configurations)}
        runs = [
            self.convert(row | {"result": self._parse(row["result"])}, Run)
            for row in self._rows("*, configuration, result FROM runs")
            if row["configuration"] in order
        ]
        shown = [
            run
            for run in runs
            if run.repeat <= study.repeats
            and study.recording in ("both", "recorded" if run.recorded else "bare")
        ]
        return sorted(shown, key=lambda run: (run.repeat, order[run.configuration], run.recorded))

    def save(self, run: Run) -> Run:
        """Save a finished run in place of an earlier try; return it with its id."""
        row = msgspec.to_builtins(run) | {"id": None, "result": json.dumps(run.result)}
        with self._errors():
            saved = self._database.table("runs").insert(row, replace=True)
        return replace(run, id=saved.last_pk)

    def drop(self, runs: Iterable[Run]) -> None:
        """Delete runs, so that they are run again."""
        where = " AND ".join(f"{name} = ?" for name in _KEY)
        with self._errors(), self._database.atomic():
            for run in runs:
                self._database.table("runs").delete_where(where, run.key)

    def save_measure(self, run: Run, measure: object) -> None:
        """Save the measure of a saved run in place of an earlier one."""
        text = json.dumps(msgspec.to_builtins(measure, str_keys=True))
        with self._errors():
            self._database.execute("UPDATE runs SET measure = ? WHERE id = ?", [text, run.id])

    def measures(self) -> dict[int, Any]:
        """Return the measure of each run that has one, as JSON values, by run id."""
        rows = self._rows("id, measure FROM runs WHERE measure IS NOT NULL")
        return {row["id"]: self._parse(row["measure"]) for row in rows}

    def close(self) -> None:
        """Close the file; all saved runs persist."""
        with suppress(sqlite3.Error):
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


State = Literal["done", "failed", "skipped"]
Recording = Literal["recorded", "bare", "both"]
Settings = Mapping[str, Any]
"""Settings of a run by their names in the study file: framework, gpus, batch, ..."""


@dataclass(frozen=True, slots=True)
class StudyHeader:
    """Header of the study file when it was last run."""

    title: str
    question: str
    repeats: int
    recording: Recording
    file: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """Combination of settings."""

    key: str
    """Hash of the settings, independent of the rest of the study."""
    framework: str
    gpus: int
    settings: Settings
    """Settings of the study, with ``framework``, ``gpus`` and ``visible``."""


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """Study with its configurations, in order."""

    study: StudyHeader
    configurations: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Repeat of a configuration that is over, or cannot be run."""

    configuration: str
    """Key of the configuration."""
    repeat: int
    """Counted from 1."""
    recorded: bool
    """True under `gputrace record`, False for a bare run."""
    state: State
    why: str = ""
    """One line on why it failed or was skipped."""
    started_ns: int | None = None
    ended_ns: int | None = None
    exit_code: int | None = None
    result: Mapping[str, Any] | None = None
    """Object that the script printed last; None unless done."""
    trace: str | None = None
    log: str | None = None
    """Paths relative to the folder of results."""
    id: int | None = None
    """None until saved."""

    @property
    def key(self) -> tuple[str, int, bool]:
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
            raise UsageError(f"{self.path}: not a folder; name another with -o")
        ours = any((self.path / name).exists() for name in (FILE, _LOCK, "underway", PARTS))
        if not ours and self.path.is_dir() and any(self.path.iterdir()):
            raise UsageError(f"{self.path}: holds other files; name another folder with -o")
        try:
            for folder in (self.traces, self.logs, self.images, self.underway):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(self.path, f"cannot be made ({error.strerror})") from None

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


def gather(folder: Folder, log: Callable[[str], None]) -> None:
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
                log(f"{path.name} is not over; its results are left for later")


def _take(part: Database, whole: Database) -> None:
    """Merge a part; every job plans the whole study, so each part has its description."""
    whole.set_plan(part.plan())
    known = {run.key: run for run in whole.runs()}
    measures = part.measures()
    for run in part.runs():
        old = known.get(run.key)
        if old is None or old.state == "skipped" or (run.ended_ns or 0) > (old.ended_ns or 0):
            moved = replace(
                run,
                trace=_move(run.trace, part.folder, whole.folder),
                log=_move(run.log, part.folder, whole.folder),
                id=None,
            )
            saved = whole.save(moved)
            if run.id in measures:
                whole.save_measure(saved, measures[run.id])


def _move(name: str | None, old: Path, new: Path) -> str | None:
    if name is None or not (old / name).exists():
        return None
    (new / name).parent.mkdir(parents=True, exist_ok=True)
    (old / name).replace(new / name)
    return name
