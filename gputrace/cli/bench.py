"""``gputrace bench``: run a study, or resume it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar, signals_as_interrupt, tell
from gputrace.errors import ExitCode, UsageError
from gputrace.sanitize import clean, message
from gputrace.units import format_ns

if TYPE_CHECKING:
    from rich.progress import Progress

    from gputrace.studies.database import Folder, Run
    from gputrace.studies.plan import Planned
    from gputrace.studies.results import Summary
    from gputrace.studies.runner import Request, Work


_ASKED: Final = ("partition", "time", "account")
_PASSED_ON: Final = ("install", "uv", "retry", "skip_missing")
_SLURM_ONLY: Final = ("submit", "array", *_ASKED)


def slurm_options(function: _F) -> _F:
    """Add the options for Slurm; they arrive under their own names."""
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
    """Raise UsageError for options whose prerequisite is missing."""
    alone = [name for name in _SLURM_ONLY if given[name] and not given["slurm"]]
    if alone:
        raise UsageError(f"--{alone[0]} is of a batch script: give --slurm, too")
    if given["nodes"] > 1 and not given["gpus_per_node"]:
        raise UsageError("--nodes: say how many GPUs each has with --gpus-per-node")


def write_job(work: Work, given: Mapping[str, Any]) -> int:
    """Write the batch script into the current folder, and submit it with ``--submit``."""
    from gputrace.report.output_file import check_target, unfinished_file
    from gputrace.studies.slurm import submit, write_script

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
    from gputrace.studies.plan import configurations_of
    from gputrace.studies.slurm import Job, Nodes

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
    """Yield the words of the command without ``--slurm`` and its options."""
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


_F = TypeVar("_F", bound=Callable[..., Any])


def _choices(function: _F) -> _F:
    """Add the options that select runs; repeatable ones arrive as tuples."""
    for option in reversed(
        [
            click.option(
                "--only",
                multiple=True,
                metavar="SETTING=VALUE",
                help="Only runs with this, as framework=torch; may be given several times.",
            ),
            click.option("--dry-run", is_flag=True, help="Print the plan, and run nothing."),
            click.option("--show", is_flag=True, help="Print the results there are; run nothing."),
            click.option("--retry", is_flag=True, help="Run again what failed."),
            click.option("--force", is_flag=True, help="Run everything again."),
            click.option(
                "--skip-missing",
                is_flag=True,
                help="What this machine cannot run does not count in the exit code.",
            ),
        ]
    ):
        function = option(function)
    return function


def _places(function: _F) -> _F:
    """Add the options for paths."""
    folder = click.Path(path_type=Path)
    for option in reversed(
        [
            click.option(
                "-o",
                "--output",
                type=folder,
                help="The folder of results; STUDY.bench if not given.",
            ),
            click.option(
                "--workloads",
                type=folder,
                help="The folder of the scripts and frameworks.toml; that of STUDY, or the one "
                "above, if not given.",
            ),
            click.option(
                "--python",
                "pythons",
                multiple=True,
                metavar="NAME=PATH",
                help="The Python, or its environment's folder, that runs a framework.",
            ),
        ]
    ):
        function = option(function)
    return function


@click.command("bench")
@click.argument("study", metavar="STUDY.toml", type=click.Path(path_type=Path, readable=False))
@_places
@click.option("--install", is_flag=True, help="Make the environments that are missing, with pip.")
@click.option("--uv", is_flag=True, help="As --install, with uv.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "cupti", "nsys", "nvprof", "host"]),
    default="auto",
    show_default=True,
    help="What records, as in `gputrace record`.",
)
@_choices
@slurm_options
@options.output_format
def command(study: Path, form: str, dry_run: bool, show: bool, **given: Any) -> int:
    """Run every combination of settings that STUDY.toml asks for, and keep the results.

    A study that was interrupted, or killed, resumes where it stopped when it is started again. The
    exit code is 5 if some runs failed or could not be made, 4 if none could be, and 1 if a
    recording does not agree with what its script reports.
    """
    from gputrace.studies.database import Folder
    from gputrace.studies.runner import prepare

    check_slurm(given)
    request = _request(study, given)
    if show:
        return _show(Folder(request.results), form, ExitCode.DONE)
    work = prepare(request)
    if dry_run:
        click.echo(_plan(work), nl=False)
        return ExitCode.DONE
    if given["slurm"]:
        return write_job(work, given)
    code = _carry_out(work)
    return code if code == ExitCode.INTERRUPTED else _show(work.folder, form, code)


def _show(folder: Folder, form: str, code: int) -> int:
    """Print the results; a recording that contradicts its script fails as an unmet gate."""
    from gputrace.studies.database import Database, gather
    from gputrace.studies.runner import holds, report

    gather(folder, _tell)
    with Database(folder.path) as database:
        summary = report(database, lambda name: progress_bar(f"measuring {name}"))
        page = _write_page(summary, folder.path)
        if form == "text":
            from gputrace.studies import report as study_report

            shown = study_report.render_text(summary, options.width(), options.use_color())
            shown += f"page: {page}\n" if page else ""
        else:
            from gputrace.studies.report import render

            shown = render(summary, database, form)
    click.echo(shown, nl=False, color=True)
    return code if code != ExitCode.DONE or holds(summary) else ExitCode.GATE_NOT_MET


def _write_page(summary: Summary, folder: Path) -> Path | None:
    """Write the page, if possible: results may be in a folder of another user."""
    from gputrace.studies.runner import write_page

    try:
        return write_page(summary, folder)
    except OSError as error:
        _tell(f"{error.filename}: {error.strerror}; there is no page of these results")
        return None


def _tell(line: str) -> None:
    tell(line)


def _request(study: Path, given: dict[str, Any]) -> Request:
    from gputrace.studies.runner import Request
    from gputrace.studies.slurm import Nodes

    pythons = dict(_pair("--python", text, "torch=/path/to/python") for text in given["pythons"])
    uv, install = given["uv"], given["install"]
    return Request(
        study,
        given["output"],
        given["workloads"],
        {name: Path(path) for name, path in pythons.items()},
        "uv" if uv else "pip" if install else None,
        [_pair("--only", text, "framework=torch") for text in given["only"]],
        given["backend"],
        given["retry"],
        given["force"],
        given["skip_missing"],
        Nodes(given["nodes"], given["gpus_per_node"] or 0, given["mpi"]),
        given["configuration"],
        given["gpus_per_node"] if given["slurm"] else None,
    )


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise UsageError(f"{option} {text}: write it as {example}")
    return name, value


def _carry_out(work: Work) -> int:
    from gputrace.studies.runner import carry_out

    with signals_as_interrupt(), watch() as watcher:
        try:
            return carry_out(work, watcher)
        except KeyboardInterrupt:
            state = f"interrupted; what is over is kept in {work.folder.path}"
    _tell(f"{state}, the same command goes on")
    return ExitCode.INTERRUPTED


def _plan(work: Work) -> str:
    """Return a line for each run: its state and its command."""
    from gputrace.studies.plan import arguments_of, why_not

    finished = _over(work)
    pending = {planned.place for planned in work.pending(finished)}
    lines = []
    for number, planned in enumerate(work.chosen, 1):
        reason = why_not(planned, len(work.gpus))
        state = f"skipped: {reason}" if reason else "to run"
        how = "recorded" if planned.recorded else "bare"
        lines.append(
            f"{number}/{len(work.chosen)}  repeat {planned.repeat}  {how}  "
            f"{state if planned.place in pending else finished[planned.place].state}  "
            f"{shlex.join([planned.framework.script.name, *arguments_of(planned)])}\n"
        )
    return "".join(lines)


def _over(work: Work) -> dict[Any, Run]:
    from gputrace.studies.database import FILE, Database
    from gputrace.studies.runner import finished_runs

    if not (work.folder.path / FILE).exists():
        return {}
    with Database(work.folder.path) as database:
        return finished_runs(database)


@contextmanager
def watch() -> Iterator[Lines]:
    """Yield the watcher that reports progress: a bar at a terminal, else lines."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar)


class Lines:
    """Print a line per finished run; one for all repeats skipped for the same reason."""

    def __init__(self) -> None:
        self._begun = ""
        self._skipped: set[tuple[str, str]] = set()

    def tell(self, line: str) -> None:
        tell(line)

    def begin(self, planned: Planned, label: str, number: int, total: int) -> None:
        bare = "" if planned.recorded else ", bare"
        self._begun = f"[{number}/{total}] {label}, repeat {planned.repeat}{bare}"

    def end(self, run: Run) -> None:
        if run.state == "skipped":
            if (run.configuration, run.why) in self._skipped:
                return
            self._skipped.add((run.configuration, run.why))
        self.tell(f"{self._begun}: {_came(run)}")


class Bar(Lines):
    """Print the lines above a progress bar of the runs."""

    def __init__(self, bar: Progress) -> None:
        super().__init__()
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def tell(self, line: str) -> None:
        self._bar.console.print(
            f"gputrace: {message(line)}", markup=False, highlight=False, soft_wrap=True
        )

    def begin(self, planned: Planned, label: str, number: int, total: int) -> None:
        from rich.markup import escape

        super().begin(planned, label, number, total)
        self._bar.update(
            self._task, description=escape(clean(label)), completed=number - 1, total=total
        )

    def end(self, run: Run) -> None:
        super().end(run)
        self._bar.advance(self._task)


def _came(run: Run) -> str:
    """Describe the outcome of a run in a few words."""
    if run.result is None or run.started_ns is None or run.ended_ns is None:
        return f"{run.state}: {run.why}"
    rate = run.result["samples_per_second"]
    return f"{rate:,.1f} samples/s, done in {format_ns(run.ended_ns - run.started_ns)}"
