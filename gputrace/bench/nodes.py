"""Runs that take more GPUs than a machine has: which launcher starts their ranks on several nodes.

`gputrace bench` itself runs on the first node of an allocation of Slurm, and starts each run from
there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.bench.plan import Planned
from gputrace.bench.settings import LAUNCHERS

_PORT: Final = 29400
"""Where the ranks of PyTorch meet, on the first node."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of an allocation.

    Attributes:
        count: of nodes.
        gpus: of each.
        mpi: what starts ranks of MPI: ``srun`` or ``mpiexec``.
    """

    count: int = 1
    gpus: int = 0
    mpi: str = "srun"

    def spreads(self, planned: Planned) -> bool:
        """Whether a run takes several of them."""
        return self.count > 1 and planned.configuration.gpus > self.gpus > 0

    def why_not(self, planned: Planned) -> str:
        """Why a run that takes several nodes cannot be made; empty where it can."""
        gpus = planned.configuration.gpus
        if gpus > self.count * self.gpus:
            return f"takes {gpus} GPUs, and {self.count} nodes have {self.count * self.gpus}"
        if gpus % self.gpus:
            return f"takes {gpus} GPUs, which are no whole nodes of {self.gpus}"
        if not launcher(planned):
            return f"{planned.framework.title} has no placement that spans several nodes here"
        return ""

    def command(self, planned: Planned, record: Sequence[str], script: Sequence[str]) -> list[str]:
        """Starts the run on as many nodes as it takes.

        Args:
            planned: the run.
            record: what a recording is started by, up to ``--``; nothing of a bare run.
            script: the Python, the script, its options.
        """
        nodes = planned.configuration.gpus // self.gpus
        if launcher(planned) == "torchrun":
            return [
                *self._srun(planned, nodes, 1),
                *record,
                *self._torchrun(planned, nodes, script),
            ]
        if self.mpi == "mpiexec":
            return ["mpiexec", "-n", str(planned.configuration.gpus), *record, *script]
        return [*self._srun(planned, nodes, self.gpus), *record, *script]

    def _srun(self, planned: Planned, nodes: int, tasks: int) -> list[str]:
        """So many tasks on each node, which share its cores: by itself srun gives each but one."""
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

    def _torchrun(self, planned: Planned, nodes: int, script: Sequence[str]) -> list[str]:
        python, *rest = script
        return [
            *(python, "-m", "torch.distributed.run", f"--nnodes={nodes}"),
            f"--nproc-per-node={self.gpus}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={socket.gethostname()}:{_PORT}",
            f"--rdzv-id={planned.name}",
            *rest,
        ]


def launcher(planned: Planned) -> str:
    """``torchrun`` or ``mpi``; nothing for a framework whose devices are all of one process."""
    asked = planned.configuration.settings.get("update")
    able = [asked] if asked is not None else planned.framework.updates
    return next((LAUNCHERS[name] for name in able if name in LAUNCHERS), "")
