"""Studies under Slurm: the batch script, and launchers for runs that span nodes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.errors import MissingError, UsageError
from gputrace.studies.database import PARTS, Configuration
from gputrace.studies.environments import LAUNCHERS
from gputrace.studies.plan import Planned


@dataclass(frozen=True, slots=True)
class Job:
    """Content of a batch script.

    Attributes:
        name: name of the study.
        command: ``gputrace bench STUDY.toml`` and its options, without ``-o``.
        results: the folder of results.
        asked: the user's options of sbatch, such as ``partition``.
        on_gpus: True if any run takes GPUs.
        array: the configurations with their labels, if each is a job.
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
    """Return the script; submitted again, it resumes the study."""
    lines = ["#!/bin/bash", *_directives(job), "", "set -euo pipefail"]
    lines += [f"cd {shlex.quote(str(job.folder))}", ""]
    if job.array:
        part = f'{shlex.quote(str(job.results / PARTS))}/"$key"'
        lines += [
            "# One configuration each. `gputrace bench STUDY.toml --show` puts their results "
            "together.",
            "configurations=(",
            *(f"  {each.key}  # {' '.join(label.split())}" for each, label in job.array),
            ")",
            "key=${configurations[$SLURM_ARRAY_TASK_ID]}",
            f'exec {shlex.join(job.command)} \\\n  --configuration "$key" -o {part}',
        ]
    else:
        lines += [
            "# Runs all that is not done yet; a run on several nodes is started by srun from here.",
            f"exec {shlex.join(job.command)} \\\n  -o {shlex.quote(str(job.results))}",
        ]
    return "\n".join(lines) + "\n"


def _directives(job: Job) -> list[str]:
    """Return the #SBATCH lines: exclusive nodes, since other jobs would disturb the runs."""
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
    """Check that a value is a single word; raises UsageError if not."""
    if not re.fullmatch(r"[\w.,:@%+/=-]+", value):
        raise UsageError(f"--{key} {value!r}: Slurm knows no such value; write it without spaces")
    return value


def submit(script: Path) -> str:
    """Submit the script with sbatch; return its answer. Raises MissingError without an sbatch."""
    program = shutil.which("sbatch")
    if program is None:
        raise MissingError(f"there is no sbatch here; submit {script} where Slurm is installed")
    command = [program, str(script)]
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        problem = " ".join(ran.stderr.split()) or f"exit code {ran.returncode}"
        raise MissingError(f"sbatch refuses {script}: {problem}")
    return ran.stdout.strip()


_PORT: Final = 29400
"""Rendezvous port of torchrun on the first node."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of an allocation.

    Attributes:
        count: number of nodes.
        gpus: GPUs per node.
        mpi: launcher of MPI ranks: ``srun`` or ``mpiexec``.
    """

    count: int = 1
    gpus: int = 0
    mpi: str = "srun"

    def spreads(self, planned: Planned) -> bool:
        """Return whether a run spans several nodes."""
        return self.count > 1 and planned.configuration.gpus > self.gpus > 0

    def why_not(self, planned: Planned) -> str:
        """Return why a run on several nodes is impossible; empty if it is possible."""
        gpus = planned.configuration.gpus
        if gpus > self.count * self.gpus:
            return f"takes {gpus} GPUs, and {self.count} nodes have {self.count * self.gpus}"
        if gpus % self.gpus:
            return f"takes {gpus} GPUs, which are no whole nodes of {self.gpus}"
        if not launcher(planned):
            return f"{planned.framework.title} has no placement that spans several nodes here"
        return ""

    def command(self, planned: Planned, record: Sequence[str], script: Sequence[str]) -> list[str]:
        """Return the command that launches a run on its nodes.

        Args:
            planned: the run.
            record: prefix for recording, up to ``--``; empty for a bare run.
            script: the Python, the script and its options.
        """
        nodes = planned.configuration.gpus // self.gpus
        if launcher(planned) == "torchrun":
            python, *rest = script
            return [
                *self._srun(planned, nodes, 1),
                *record,
                *(python, "-m", "torch.distributed.run", f"--nnodes={nodes}"),
                f"--nproc-per-node={self.gpus}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={socket.gethostname()}:{_PORT}",
                f"--rdzv-id={planned.name}",
                *rest,
            ]
        if self.mpi == "mpiexec":
            return ["mpiexec", "-n", str(planned.configuration.gpus), *record, *script]
        return [*self._srun(planned, nodes, self.gpus), *record, *script]

    def _srun(self, planned: Planned, nodes: int, tasks: int) -> list[str]:
        """Return srun's words; tasks share a node's cores, as srun's default is one core each."""
        words = [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes * tasks}",
            f"--ntasks-per-node={tasks}",
            "--kill-on-bad-exit=1",
        ]
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE", 0)) // tasks
        words += [f"--cpus-per-task={cores}"] if cores else []
        on_cpu = planned.configuration.settings.get("device") == "cpu"
        return words if on_cpu else [*words, f"--gpus-per-node={self.gpus}"]


def launcher(planned: Planned) -> str:
    """Return ``torchrun`` or ``mpi``; empty for a framework with one process for all devices."""
    asked = planned.configuration.settings.get("update")
    able = [asked] if asked is not None else planned.framework.updates
    return next((LAUNCHERS[name] for name in able if name in LAUNCHERS), "")
