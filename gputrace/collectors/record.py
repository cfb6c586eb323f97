"""Recording a program: the environment that makes it record itself, and the trace of that.

While the program runs, each of its processes appends to a file of its own in a folder beside the
output; what is in that folder can be made a trace at any time (`recover`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Merged, Plan
from gputrace.collectors.backends import BACKENDS, choose
from gputrace.collectors.child import find_program
from gputrace.collectors.cupti import CUPTI, has_driver
from gputrace.collectors.growth import Growth, Size
from gputrace.collectors.host import HOST
from gputrace.collectors.job import Task, find_task
from gputrace.collectors.naming import Name, name_output, of_task
from gputrace.collectors.nvml import Sampler
from gputrace.collectors.team import CannotShare, Team, ranks_in
from gputrace.errors import GputraceError, InputError, UsageError
from gputrace.units import format_ranges

HOOKS: Final = Path(__file__).parent / "hooks"
_SECRET: Final = re.compile(
    r"(?i)(pass(word|wd|phrase)?|secret|token|api.?key|auth|credentials?)(?![a-z])[\w-]*(=|$)"
)


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
    task = find_task(os.environ)
    host, pid = socket.gethostname(), os.getpid()
    name = name_output(str(plan.output), task, command, os.environ, host, pid)
    team, output = _gather(name, task, backend, force)
    plan = replace(plan, output=output)
    environment = _with_hooks(plan, team.folder, os.environ)
    try:
        launch = backend.launch(plan, team.folder, command, environment)
    except GputraceError:
        with team.leave() as is_last:
            if is_last:
                team.dissolve()
        raise
    return Prepared(plan, tuple(command), backend, team, launch, task, name.pattern)


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
        with closing(sqlite3.connect(f"{output.absolute().as_uri()}?mode=ro", uri=True)) as trace:
            sql = "SELECT value FROM GPUTRACE_META WHERE name = 'job'"
            return bool(job) and trace.execute(sql).fetchone() == (job,)
    except sqlite3.Error:
        return False


def _with_hooks(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's own environment, and what makes its host threads record themselves."""
    changed = dict(inherited) | {"GPUTRACE_DIR": str(folder.absolute())}
    if (HOOKS / "sitecustomize.py").exists():
        paths = [str(HOOKS), inherited.get("PYTHONPATH", "")]
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if plan.steps is not None:
        changed["GPUTRACE_STEPS"] = f"{plan.steps[0]}:{plan.steps[1]}"
    return changed


def record(
    prepared: Prepared,
    tell: Callable[[str], object],
    tell_size: Callable[[Size], None],
    from_bytes: int,
) -> int:
    """Runs the program to its end; its exit code.

    ``tell`` tells a person a line, ``tell_size`` is called when the recording has so many bytes,
    and each time they have doubled.

    Raises CannotRun where the program does not start, MissingError where what records it does not.
    """
    meta = {
        "command": json.dumps(masked(prepared.command)),
        "hostname": socket.gethostname(),
        "backend": prepared.backend.name,
        "driver": "yes" if has_driver() else "no",
    }
    if (task := prepared.task) is not None:
        meta |= {"job": task.job, "world_size": str(task.tasks)}
    _write_meta(prepared.folder, meta)
    sampler = Sampler() if prepared.plan.nvml and has_driver() and _samples(prepared) else None
    if sampler is not None:
        prepared.team.let_one("nvml", partial(sampler.start, prepared.folder))
    try:
        growth = Growth(prepared.folder, from_bytes, tell_size)
        meanwhile = growth.look_now_and_then
        return prepared.backend.run(prepared.launch, prepared.folder, tell, meanwhile)
    finally:
        if sampler is not None:
            sampler.stop()


def _samples(prepared: Prepared) -> bool:
    """Whether this recorder may sample the GPUs: of tasks that share no folder, the first."""
    return prepared.task is None or prepared.team.shares or prepared.task.local_rank == 0


def conclude(prepared: Prepared, has_run: bool = True) -> Merged | None:
    """Makes the trace, if this recorder is the last of its machine's; None if it is not.

    Where the program did not start and nobody else recorded, nothing is made. Raises InputError
    where nothing recorded can be read, OSError where the trace cannot be written; the folder stays.
    """
    team = prepared.team
    with team.leave() as is_last:
        if not is_last:
            return None
        merged = None
        if has_run or len(ranks_in(team.folder)) > 1:
            merged = finish(team.folder, prepared.plan.output, keep=True)
        if merged is None or not merged.unread:
            team.dissolve()
        return merged


def masked(command: Sequence[str]) -> list[str]:
    """The command line with the values of options that look secret replaced."""
    shown: list[str] = []
    hide = False
    for word in command:
        secret = (word.startswith("-") or "=" in word) and _SECRET.search(word) is not None
        name, equals, _ = word.partition("=")
        shown.append("***" if hide else f"{name}=***" if secret and equals else word)
        hide = secret and not equals and not hide
    return shown


def finish(folder: Path, output: Path, keep: bool = False) -> Merged:
    """Makes the trace of a folder and removes the folder, unless it has what could not be read.

    Raises InputError where nothing in it can be read, OSError where the trace cannot be written;
    the folder stays then.
    """
    if not folder.is_dir():
        raise InputError(folder, "no such folder of a recording")
    meta = _meta(folder)
    if "world_size" in meta:
        meta["ranks"] = format_ranges(ranks_in(folder))
    backend = BACKENDS.get(meta.get("backend", ""), CUPTI)
    merged = backend.merge(folder, output, meta)
    if not keep and not merged.unread:
        shutil.rmtree(folder)
    notes = merged.notes
    if backend is HOST:
        notes += ("only the host's signals were recorded: nothing of a GPU is in the trace",)
    if merged.unread:
        notes += (f"{folder} is kept, for what could not be read",)
    return replace(merged, notes=notes)


def _write_meta(folder: Path, meta: Mapping[str, str]) -> None:
    """At once: other recorders may be at it too."""
    new = folder / f"meta.{os.getpid()}"
    new.write_text(json.dumps(meta), encoding="utf-8")
    new.replace(folder / "meta.json")


def _meta(folder: Path) -> dict[str, str]:
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
