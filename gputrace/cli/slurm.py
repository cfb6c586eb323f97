"""The options of ``gputrace bench`` for Slurm, and the script that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cleaning import message
from gputrace.cli.telling import tell
from gputrace.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from gputrace.bench.work import Work

_F = TypeVar("_F", bound=Callable[..., Any])

_ASKED: Final = ("partition", "time", "account")
_PASSED_ON: Final = ("install", "uv", "retry", "skip_missing")
_SLURM_ONLY: Final = ("submit", "array", *_ASKED)


def slurm_options(function: _F) -> _F:
    """All of them; they arrive under their own names."""
    for option in reversed(
        [
            click.option(
                "--slurm", is_flag=True, help="Write a batch script for Slurm, and run nothing."
            ),
            click.option("--submit", is_flag=True, help="Of --slurm: give the script to sbatch."),
            click.option("--array", is_flag=True, help="Of --slurm: a job for each configuration."),
            click.option("--partition", metavar="NAME", help="Of --slurm: for sbatch."),
            click.option("--time", metavar="LIMIT", help="Of --slurm: for sbatch, as 02:00:00."),
            click.option("--account", metavar="NAME", help="Of --slurm: for sbatch."),
            click.option(
                "--nodes",
                type=click.IntRange(min=1),
                default=1,
                metavar="N",
                help="Nodes of the job; runs of more GPUs than one has are spread over them.",
            ),
            click.option(
                "--gpus-per-node",
                type=click.IntRange(min=1),
                metavar="N",
                help="GPUs of each node; with --slurm, what the largest run takes if not given.",
            ),
            click.option(
                "--mpi",
                type=click.Choice(["srun", "mpiexec"]),
                default="srun",
                show_default=True,
                help="What starts MPI ranks on several nodes.",
            ),
            click.option("--configuration", metavar="KEY", hidden=True),
        ]
    ):
        function = option(function)
    return function


def check_slurm(given: Mapping[str, Any]) -> None:
    """Raises UsageError for options that go with another one that is missing."""
    alone = [name for name in _SLURM_ONLY if given[name] and not given["slurm"]]
    if alone:
        raise UsageError(f"--{alone[0]} is of a batch script: give --slurm, too")
    if given["nodes"] > 1 and not given["gpus_per_node"]:
        raise UsageError("--nodes: say how many GPUs each has with --gpus-per-node")


def write_job(work: Work, given: Mapping[str, Any]) -> int:
    """Writes the script into the current folder, and submits it where that is asked for."""
    from gputrace.bench.slurm import submit, write_script
    from gputrace.views.exports.targets import check_target, unfinished_file

    study = work.request.study
    target = check_target(Path(f"{study.stem}.sbatch"), [study], given["force"])
    text = write_script(_job(work, given))
    with unfinished_file(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    tell(f"wrote {target}")
    if given["submit"]:
        click.echo(message(submit(target.absolute())))
    return ExitCode.DONE


def _job(work: Work, given: Mapping[str, Any]) -> Any:
    from gputrace.bench.nodes import Nodes
    from gputrace.bench.plan import configurations_of
    from gputrace.bench.slurm import Job

    configurations = configurations_of(work.chosen)
    most = max(each.gpus for each in configurations)
    per_node = given["gpus_per_node"] or most
    labels = {run.configuration.key: work.label(run) for run in work.chosen}
    return Job(
        name=work.request.study.stem,
        command=list(_command(work, given)),
        results=work.folder.path,
        folder=Path.cwd(),
        nodes=Nodes(given["nodes"], per_node, given["mpi"]),
        asked={name: given[name] for name in _ASKED},
        on_gpus=any(each.settings.get("device") != "cpu" for each in configurations),
        array=[(each, labels[each.key]) for each in configurations] if given["array"] else (),
    )


def _command(work: Work, given: Mapping[str, Any]) -> Iterator[str]:
    """The command without ``--slurm`` and what belongs to it."""
    yield from (sys.executable, "-m", "gputrace", "bench", str(work.request.study.resolve()))
    if given["workloads"] is not None:
        yield from ("--workloads", str(given["workloads"].resolve()))
    for text in given["pythons"]:
        name, _, path = text.partition("=")
        yield from ("--python", f"{name}={Path(path).absolute()}")
    for text in given["only"]:
        yield from ("--only", text)
    yield from (f"--{name.replace('_', '-')}" for name in _PASSED_ON if given[name])
    if given["backend"] != "auto":
        yield from ("--backend", given["backend"])
    if given["nodes"] > 1:
        yield from ("--nodes", str(given["nodes"]), "--gpus-per-node", str(given["gpus_per_node"]))
        yield from ("--mpi", given["mpi"])
