"""What is to be ready before a program is recorded: a folder, a backend, and the environment."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Plan
from gputrace.collectors.backends import choose
from gputrace.collectors.built import HOW_TO_BUILD, built_library
from gputrace.collectors.program.child import find_program
from gputrace.collectors.tasks.job import Task, find_task
from gputrace.collectors.tasks.naming import Name, name_output, of_task
from gputrace.collectors.tasks.team import CannotShare, Team
from gputrace.errors import GputraceError, MissingError, UsageError
from gputrace.traces import guard

HOOKS: Final = Path(__file__).parent / "hooks"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recording that may begin."""

    plan: Plan
    command: tuple[str, ...]
    """The program as the user wrote it."""
    backend: Backend
    team: Team
    """The recorders of this machine that write one trace together."""
    launch: Launch
    task: Task | None
    traces: str
    """What names the traces of all machines in a shell."""

    @property
    def folder(self) -> Path:
        """What the processes write into; it exists."""
        return self.team.folder


def prepare(plan: Plan, command: Sequence[str], force: bool) -> Prepared:
    """Makes all ready: the backend is chosen, the folder is there.

    Raises CannotRun where there is no such program, UsageError where something is in the way,
    MissingError where the backend asked for cannot work here.
    """
    find_program(command[0])
    backend = choose(plan, os.environ)
    _check_heeded(plan, backend)
    task = find_task(os.environ)
    host, pid = socket.gethostname(), os.getpid()
    name = name_output(str(plan.output), task, command, os.environ, host, pid)
    team, output = _gather(name, task, backend, force)
    plan = replace(plan, output=output)
    try:
        environment = _with_hooks(plan, team.folder, os.environ)
        launch = backend.launch(plan, team.folder, command, environment)
    except GputraceError:
        with team.leave() as is_last:
            if is_last:
                team.dissolve()
        raise
    return Prepared(plan, tuple(command), backend, team, launch, task, name.pattern)


def _check_heeded(plan: Plan, backend: Backend) -> None:
    given = {
        "--every": plan.every is not None,
        "--keep": plan.limits.segment_ns > 0,
        "--max-size": plan.limits.max_bytes > 0,
        "--api": plan.api != "all",
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    if names and not backend.heeds_long:
        raise UsageError(f"{names}: not with --backend {backend.name}; record with --backend cupti")


def _gather(name: Name, task: Task | None, backend: Backend, force: bool) -> tuple[Team, Path]:
    """The recorder's place among those of its machine, and the trace that they write."""
    if task is None or name.is_tasks_own:
        return _alone(name.path, task, force)
    try:
        if not backend.shares or _is_of(name.path, task.job):
            raise CannotShare
        _check_free(name.path, force)
        folder = _folder(name.path)
        return Team(folder, task.job, task.rank, task.local_tasks), name.path
    except CannotShare:
        return _alone(of_task(name.path, task), task, force)


def _alone(output: Path, task: Task | None, force: bool) -> tuple[Team, Path]:
    _check_free(output, force)
    return Team(_folder(output), rank=0 if task is None else task.rank), output


def _folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.spool")


def _check_free(output: Path, force: bool) -> None:
    if output.exists() and not (force and output.is_file()):
        raise UsageError(f"{output}: exists; name another with -o, or give --force")


def _is_of(output: Path, job: str) -> bool:
    """Whether tasks of the job have already written the trace: this one is late."""
    try:
        with closing(guard.connect(f"{output.absolute().as_uri()}?mode=ro")) as trace:
            sql = "SELECT value FROM GPUTRACE_META WHERE name = 'job'"
            return bool(job) and trace.execute(sql).fetchone() == (job,)
    except sqlite3.Error:
        return False


def _with_hooks(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's own environment, and what makes its host threads record themselves."""
    changed = dict(inherited) | {"GPUTRACE_DIR": str(folder.absolute())} | _sampling(plan)
    if (HOOKS / "sitecustomize.py").exists():
        paths = [str(HOOKS), inherited.get("PYTHONPATH", "")]
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if plan.steps is not None:
        changed["GPUTRACE_STEPS"] = f"{plan.steps[0]}:{plan.steps[1]}"
    if plan.every is not None and plan.every.in_steps:
        changed["GPUTRACE_EVERY"] = f"{plan.every.distance}:{plan.every.length}"
    return changed | plan.limits.variables()


def _sampling(plan: Plan) -> dict[str, str]:
    """What makes them sample where they are; raises MissingError where that was not built."""
    if not plan.python:
        return {}
    library = built_library("_ticker")
    if library is None:
        raise MissingError(
            "--python needs a part of gputrace that was not built for want of a C compiler; "
            f"{HOW_TO_BUILD}, or record without --python"
        )
    return {"GPUTRACE_PYTHON": str(library)}
