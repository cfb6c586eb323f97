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
    from gputrace.studies.runner import Request, Work


_F = TypeVar("_F", bound=Callable[..., Any])
_ASKED: Final = ("partition", "time", "account")
_PASSED_ON: Final = ("install", "uv", "retry", "skip_missing")
_SLURM_ONLY: Final = ("submit", "array", *_ASKED)
_FLAG: Final = {"is_flag": True}
_FOLDER: Final = {"type": click.Path(path_type=Path)}
_COUNT: Final = {"type": click.IntRange(min=1), "metavar": "N"}
_OPTIONS: Final[tuple[tuple[tuple[str, ...], Mapping[str, Any], str], ...]] = (
    (("-o", "--output"), _FOLDER, "The folder of results; STUDY.bench if not given."),
    (
        ("--workloads",),
        _FOLDER,
        "The folder of the scripts and frameworks.toml; that of STUDY, or the one above, if not "
        "given.",
    ),
    (
        ("--python", "pythons"),
        {"multiple": True, "metavar": "NAME=PATH"},
        "The Python, or its environment's folder, that runs a framework.",
    ),
    (("--install",), _FLAG, "Make the environments that are missing, with pip."),
    (("--uv",), _FLAG, "As --install, with uv."),
    (
        ("--backend",),
        {
            "type": click.Choice(["auto", "cupti", "nsys", "nvprof", "host"]),
            "default": "auto",
            "show_default": True,
        },
        "What records, as in `gputrace record`.",
    ),
    (
        ("--only",),
        {"multiple": True, "metavar": "SETTING=VALUE"},
        "Only runs with this, as framework=torch; may be given several times.",
    ),
    (("--dry-run",), _FLAG, "Print the plan, and run nothing."),
    (("--show",), _FLAG, "Print the results there are; run nothing."),
    (("--retry",), _FLAG, "Run again what failed."),
    (("--force",), _FLAG, "Run everything again."),
    (
        ("--skip-missing",),
        _FLAG,
        "What this machine cannot run does not count in the exit code.",
    ),
    (("--slurm",), _FLAG, "Write a batch script for Slurm, and run nothing."),
    (("--submit",), _FLAG, "Of --slurm: give the script to sbatch."),
    (("--array",), _FLAG, "Of --slurm: a job for each configuration."),
    (("--partition",), {"metavar": "NAME"}, "Of --slurm: for sbatch."),
    (("--time",), {"metavar": "LIMIT"}, "Of --slurm: for sbatch, as 02:00:00."),
    (("--account",), {"metavar": "NAME"}, "Of --slurm: for sbatch."),
    (
        ("--nodes",),
        {**_COUNT, "default": 1},
        "Nodes of the job; runs of more GPUs than one has are spread over them.",
    ),
    (
        ("--gpus-per-node",),
        _COUNT,
        "GPUs of each node; with --slurm, what the largest run takes if not given.",
    ),
    (
        ("--mpi",),
        {"type": click.Choice(["srun", "mpiexec"]), "default": "srun", "show_default": True},
        "What starts MPI ranks on several nodes.",
    ),
    (("--configuration",), {"metavar": "KEY", "hidden": True}, ""),
)
"""Names, attributes and help of the options, in the order of the help."""


def _options(function: _F) -> _F:
    for names, attributes, text in reversed(_OPTIONS):
        function = click.option(*names, **attributes, help=text)(function)
    return function


@click.command("bench")
@click.argument("study", metavar="STUDY.toml", type=click.Path(path_type=Path, readable=False))
@_options
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


def _show(folder: Folder, form: str, code: int) -> int:
    """Print the results; a recording that contradicts its script fails as an unmet gate."""
    from gputrace.studies.database import Database, gather
    from gputrace.studies.report import render, render_text
    from gputrace.studies.runner import report, write_page

    gather(folder, tell)
    with Database(folder.path) as database:
        summary = report(database, lambda name: progress_bar(f"measuring {name}"))
        page = ""
        try:
            page = f"page: {write_page(summary, folder.path)}\n"
        except OSError as error:
            # The results may be in a folder of another user.
            tell(f"{error.filename}: {error.strerror}; there is no page of these results")
        if form == "text":
            shown = render_text(summary, options.width(), options.use_color()) + page
        else:
            shown = render(summary, database, form)
    click.echo(shown, nl=False, color=True)
    return code if code != ExitCode.DONE or summary.holds else ExitCode.GATE_NOT_MET


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
            pass
    kept = f"what is over is kept in {work.folder.path}"
    tell(f"interrupted; {kept}, the same command goes on")
    return ExitCode.INTERRUPTED


def _plan(work: Work) -> str:
    """Return a line for each run: its state and its command."""
    from gputrace.studies.database import FILE, Database
    from gputrace.studies.plan import arguments_of, why_not
    from gputrace.studies.runner import finished_runs

    finished: Mapping[Any, Run] = {}
    if (work.folder.path / FILE).exists():
        with Database(work.folder.path) as database:
            finished = finished_runs(database)
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
