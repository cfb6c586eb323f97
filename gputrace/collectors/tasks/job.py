"""The job that a recorder is a task of, by the variables that launchers set for their tasks.

The innermost launcher counts: mpirun starts its daemons by srun, and torchrun may run under either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_SPECIAL_STEPS: Final = 0xFFFFFFF0
"""Steps of Slurm from here on are batch scripts and shells of salloc: one process."""
_BATCH_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_MOST: Final = 1 << 20
"""Tasks; a larger number is no number of tasks."""


@dataclass(frozen=True, slots=True)
class Task:
    """One of the tasks that a launcher started, each with its recorder."""

    job: str
    """The launcher's name of the run; nothing where it gave none that is the run's alone."""
    rank: int
    tasks: int
    """In all."""
    local_rank: int
    """Tells the tasks of this node apart."""
    local_tasks: int
    """On this node; 1 where that is not known."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher; the first of each that is set counts."""

    name: str
    job: tuple[str, ...]
    rank: tuple[str, ...]
    tasks: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_tasks: tuple[str, ...]
    needs: tuple[str, ...] = ()


_LAUNCHERS: Final = (
    _Launcher(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        # People set the others by hand.
        needs=("TORCHELASTIC_RUN_ID",),
    ),
    _Launcher(
        "mpi",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", *_BATCH_JOBS),
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "mpi",
        _BATCH_JOBS,
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        # srun sets PMI_RANK too, and knows more.
        needs=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)


def find_task(environment: Mapping[str, str]) -> Task | None:
    """The task that this process is; None where no launcher started it, or it started but one."""
    found = (_of_launcher(launcher, environment) for launcher in _LAUNCHERS)
    task = next(filter(None, found), None) or _of_slurm(environment)
    return task if task is not None and task.tasks > 1 else None


def _of_launcher(launcher: _Launcher, environment: Mapping[str, str]) -> Task | None:
    if launcher.needs and not any(name in environment for name in launcher.needs):
        return None
    rank, tasks = (_number(environment, *names) for names in (launcher.rank, launcher.tasks))
    if rank is None or tasks is None or rank >= tasks:
        return None
    local_rank = _number(environment, *launcher.local_rank)
    local_tasks = _number(environment, *launcher.local_tasks) or 1
    job = next((environment[name] for name in launcher.job if environment.get(name)), "none")
    return Task(
        # What torchrun calls a run that nobody named.
        "" if job == "none" else f"{launcher.name} {job}",
        rank,
        tasks,
        rank if local_rank is None else local_rank,
        min(local_tasks, tasks),
    )


def _of_slurm(environment: Mapping[str, str]) -> Task | None:
    """Of srun. In a script of sbatch the variables speak of the allocation, save for the step's."""
    step = _number(environment, "SLURM_STEP_ID", "SLURM_STEPID", most=1 << 32)
    if step is None or step >= _SPECIAL_STEPS:
        return None
    rank = _number(environment, "SLURM_PROCID")
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if rank is None or tasks is None or rank >= tasks:
        return None
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID", "")
    local_rank = _number(environment, "SLURM_LOCALID")
    return Task(
        f"slurm {job}.{step}" if job else "",
        rank,
        tasks,
        rank if local_rank is None else local_rank,
        min(_local_tasks(environment), tasks),
    )


def _local_tasks(environment: Mapping[str, str]) -> int:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = next((environment[name] for name in names if environment.get(name)), "")
    return tasks_on_node(text, _number(environment, "SLURM_NODEID") or 0) or 1


_TASKS: Final = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")


def tasks_on_node(text: str, node: int) -> int | None:
    """Tasks on the nth node by Slurm's ``4(x2),3``: 4, 4 and 3; None where it does not say."""
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _number(environment: Mapping[str, str], *names: str, most: int = _MOST) -> int | None:
    text = next((environment[name] for name in names if environment.get(name)), "")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None
    return None if number is None or number > most else number
