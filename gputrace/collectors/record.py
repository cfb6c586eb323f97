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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Merged, Plan
from gputrace.collectors.backends import BACKENDS, choose
from gputrace.collectors.child import find_program
from gputrace.collectors.cupti import CUPTI, has_driver
from gputrace.collectors.host import HOST
from gputrace.collectors.nvml import Sampler
from gputrace.errors import GputraceError, InputError, MissingError, UsageError

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
    folder: Path
    """What the processes write into; it exists."""
    launch: Launch


def prepare(plan: Plan, command: Sequence[str], force: bool) -> Prepared:
    """Makes all ready: the backend is chosen, the folder is there.

    Raises CannotRun where there is no such program, UsageError where something is in the way,
    MissingError where the backend asked for cannot work here.
    """
    find_program(command[0])
    backend = choose(plan, os.environ)
    folder = plan.output.with_name(f"{plan.output.name}.spool")
    if plan.output.exists() and not (force and plan.output.is_file()):
        raise UsageError(f"{plan.output}: exists; name another with -o, or give --force")
    if folder.exists():
        raise UsageError(
            f"{folder}: left by another recording; make its trace with "
            f"`gputrace recover {folder}`, or remove it"
        )
    environment = _with_hooks(plan, folder, os.environ)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror})") from None
    try:
        launch = backend.launch(plan, folder, command, environment)
    except GputraceError:
        folder.rmdir()
        raise
    return Prepared(plan, tuple(command), backend, folder, launch)


def _with_hooks(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's own environment, and what makes its host threads record themselves."""
    changed = dict(inherited) | {"GPUTRACE_DIR": str(folder.absolute())} | _sampling(plan)
    if (HOOKS / "sitecustomize.py").exists():
        paths = [str(HOOKS), inherited.get("PYTHONPATH", "")]
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if plan.steps is not None:
        changed["GPUTRACE_STEPS"] = f"{plan.steps[0]}:{plan.steps[1]}"
    return changed


def _sampling(plan: Plan) -> dict[str, str]:
    """What makes them sample where they are; raises MissingError where that was not built."""
    if not plan.python:
        return {}
    library = next(iter(sorted(Path(__file__).parent.glob("_ticker*.so"))), None)
    if library is None:
        raise MissingError(
            "--python needs a part of gputrace that was not built for want of a C compiler; "
            "install one and then gputrace again, or record without --python"
        )
    return {"GPUTRACE_PYTHON": str(library)}


def record(prepared: Prepared, tell: Callable[[str], object]) -> int:
    """Runs the program to its end; its exit code. ``tell`` tells a person a line.

    Raises CannotRun where the program does not start, MissingError where what records it does not.
    """
    meta = {
        "command": json.dumps(masked(prepared.command)),
        "hostname": socket.gethostname(),
        "backend": prepared.backend.name,
    }
    (prepared.folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    sampler = Sampler() if prepared.plan.nvml and has_driver() else None
    if sampler is not None:
        sampler.start(prepared.folder)
    try:
        return prepared.backend.run(prepared.launch, prepared.folder, tell)
    finally:
        if sampler is not None:
            sampler.stop()


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
    """Makes the trace of a folder and removes the folder.

    Raises InputError where nothing in it can be read, OSError where the trace cannot be written;
    the folder stays then.
    """
    if not folder.is_dir():
        raise InputError(folder, "no such folder of a recording")
    meta = _meta(folder)
    backend = BACKENDS.get(meta.get("backend", ""), CUPTI)
    merged = backend.merge(folder, output, meta)
    if not keep:
        shutil.rmtree(folder)
    notes = (*merged.notes, *_notes(merged, backend))
    return replace(merged, notes=notes)


def _notes(merged: Merged, backend: Backend) -> list[str]:
    if backend is HOST:
        return ["only the host's signals were recorded: nothing of a GPU is in the trace"]
    if not merged.processes and not merged.notes:
        return ["no process of the program started CUDA"]
    return []


def _meta(folder: Path) -> dict[str, str]:
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
