"""A batch script for Slurm that runs a study: one job, or an array with a job a configuration."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gputrace.bench.database import Configuration
from gputrace.bench.folder import PARTS
from gputrace.bench.nodes import Nodes
from gputrace.errors import MissingError, UsageError


@dataclass(frozen=True, slots=True)
class Job:
    """What a batch script is made of.

    Attributes:
        name: of the study.
        command: ``gputrace bench STUDY.toml`` and its options, but for ``-o``.
        results: the folder of results.
        asked: options of sbatch that a person gave, such as ``partition``.
        on_gpus: whether any run takes GPUs.
        array: the configurations, where each is a job, with what tells them apart.
    """

    name: str
    command: Sequence[str]
    results: Path
    folder: Path
    nodes: Nodes
    asked: Mapping[str, str | None]
    on_gpus: bool
    array: Sequence[tuple[Configuration, str]] = ()


def write_script(job: Job) -> str:
    """The script; it may be submitted again, and goes on where it stopped."""
    lines = ["#!/bin/bash", *_directives(job), "", "set -euo pipefail"]
    lines += [f"cd {shlex.quote(str(job.folder))}", ""]
    lines += _array(job) if job.array else _whole(job)
    return "\n".join(lines) + "\n"


def _directives(job: Job) -> list[str]:
    """What is asked of Slurm: whole nodes, as others on them would be measured too."""
    name = re.sub(r"[^\w.-]", "-", job.name)
    per_gpu = job.nodes.mpi == "mpiexec" and job.nodes.count > 1
    settings = {
        "job-name": f"gputrace-{name}",
        "nodes": str(job.nodes.count),
        "ntasks-per-node": str(job.nodes.gpus if per_gpu else 1),
        "gpus-per-node": str(job.nodes.gpus) if job.on_gpus else None,
        "output": f"{name}-%A_%a.out" if job.array else f"{name}-%j.out",
        "array": f"0-{len(job.array) - 1}" if job.array else None,
        **job.asked,
    }
    given = (f"#SBATCH --{key}={_word(key, value)}" for key, value in settings.items() if value)
    return [*given, "#SBATCH --exclusive"]


def _word(key: str, value: str) -> str:
    """A value that stays one word in a directive."""
    if not re.fullmatch(r"[\w.,:@%+/=-]+", value):
        raise UsageError(f"--{key} {value!r}: Slurm knows no such value; write it without spaces")
    return value


def _whole(job: Job) -> list[str]:
    return [
        "# Runs all that is not done yet; a run on several nodes is started by srun from here.",
        f"exec {shlex.join(job.command)} \\\n  -o {shlex.quote(str(job.results))}",
    ]


def _array(job: Job) -> list[str]:
    keys = [f"  {own.key}  # {_comment(label)}" for own, label in job.array]
    part = f'{shlex.quote(str(job.results / PARTS))}/"$key"'
    return [
        "# One configuration each. `gputrace bench STUDY.toml --show` puts their results together.",
        "configurations=(",
        *keys,
        ")",
        "key=${configurations[$SLURM_ARRAY_TASK_ID]}",
        f'exec {shlex.join(job.command)} \\\n  --configuration "$key" -o {part}',
    ]


def _comment(text: str) -> str:
    return " ".join(text.split())


def submit(script: Path) -> str:
    """Gives the script to sbatch; what that answers. Raises MissingError without an sbatch."""
    program = shutil.which("sbatch")
    if program is None:
        raise MissingError(f"there is no sbatch here; submit {script} where Slurm is installed")
    command = [program, str(script)]
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        told = " ".join(ran.stderr.split()) or f"exit code {ran.returncode}"
        raise MissingError(f"sbatch refuses {script}: {told}")
    return ran.stdout.strip()
