"""What a recording's output is called: ``-o run-%h.sqlite``, and the host where it must be told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.collectors.tasks.job import Task
from gputrace.errors import UsageError

_WORD: Final = re.compile(r"%(?:q\{(?P<variable>[^}]*)\}|(?P<letter>[hp%]))")

_TASKS_DIFFER_IN: Final = {
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "RANK", "LOCAL_RANK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMIX_RANK"),
    *("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
}
_NODES_DIFFER_IN: Final = {
    *("SLURM_NODEID", "SLURMD_NODENAME", "HOSTNAME", "GROUP_RANK", "NODE_RANK"),
    *("SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
}
_NODES_OPTION: Final = re.compile(r"--(nnodes|num[-_]machines)(=(?P<count>.*))?")


@dataclass(frozen=True, slots=True)
class Name:
    """The output of this recorder.

    Attributes:
        path: the file.
        pattern: what names the files of all nodes in a shell; the file where it is the only one.
        is_tasks_own: whether each task of a node has a name of its own.
    """

    path: Path
    pattern: str
    is_tasks_own: bool


def name_output(
    text: str,
    task: Task | None,
    command: Sequence[str],
    environment: Mapping[str, str],
    host: str,
    pid: int,
) -> Name:
    """Replaces ``%h`` (host), ``%p`` (pid), ``%q{VARIABLE}`` and ``%%`` in what was given to -o.

    Where several hosts, or several tasks of one, would write one file, the host is put into the
    name. Any other ``%`` stays: folders may have it in their names.

    Raises UsageError for a variable that is not set.
    """
    used = {match["variable"] or match["letter"] for match in _WORD.finditer(text)}
    shown = {"h": host, "p": str(pid), "%": "%"}
    path = Path(_WORD.sub(lambda match: _value(text, match, shown, environment), text))
    if not path.name:
        raise UsageError(f"{text}: names no file")
    several = task is not None or spans_nodes(command, environment)
    if not several:
        return Name(path, str(path), False)
    differs = _TASKS_DIFFER_IN | _NODES_DIFFER_IN | {"h", "p"}
    anyones = {"h": "*", "p": "*", "%": "%"}
    same = {name: value for name, value in environment.items() if name not in differs}
    pattern = Path(_WORD.sub(lambda match: _value(text, match, anyones, same, "*"), text))
    if not used & (_NODES_DIFFER_IN | {"h"}):
        path, pattern = _with(path, host), _with(pattern, "*")
    return Name(path, str(pattern), bool(used & (_TASKS_DIFFER_IN | {"p"})))


def _with(path: Path, part: str) -> Path:
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


def of_task(path: Path, task: Task) -> Path:
    """The output of a task that cannot share one with the other tasks of its node."""
    return _with(path, f"task{task.rank}")


def spans_nodes(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the program is a launcher (torchrun, accelerate) of more than one node."""
    counts = [environment.get("PET_NNODES", "")]
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if (match := _NODES_OPTION.fullmatch(word)) is not None:
            counts.append(following if match["count"] is None else match["count"])
    # Elastic ones have a least and a most, as 1:4.
    most = [count.rpartition(":")[2] for count in counts]
    return any(count.isdecimal() and int(count) > 1 for count in most)


def _value(
    text: str,
    match: re.Match[str],
    letters: Mapping[str, str],
    variables: Mapping[str, str],
    otherwise: str | None = None,
) -> str:
    variable, letter = match["variable"], match["letter"]
    if variable is None:
        return letters[letter]
    value = variables.get(variable, otherwise)
    if value is None:
        raise UsageError(f"{text}: the environment variable {variable!r} is not set")
    return value.replace("/", "_")
