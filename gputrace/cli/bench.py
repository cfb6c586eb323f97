"""``gputrace bench``: run a study or resume it, here or as a batch job of Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gputrace.cli import options
from gputrace.cli.console import log, note, progress_bar, signals_as_interrupt
from gputrace.errors import ExitCode, MissingError, UsageError
from gputrace.sanitize import clean, message
from gputrace.tools import ask_tool
from gputrace.units import format_ns

if TYPE_CHECKING:
    from rich.progress import Progress

    from gputrace.studies.database import Configuration, Folder, Run
    from gputrace.studies.plan import PlannedRun
    from gputrace.studies.runner import Request, Work


_ASKED: Final = ("partition", "time", "account")
_PASSED_ON: Final = ("install", "uv", "retry", "skip_missing")
_SLURM_ONLY: Final = ("submit", "array", *_ASKED)
_FLAG: Final = {"is_flag": True}
_FOLDER: Final = {"type": click.Path(path_type=Path)}
_COUNT: Final = {"type": click.IntRange(min=1), "metavar": "N"}
_OPTIONS: Final[tuple[tuple[tuple[str, ...], Mapping[str, Any], str], ...]] = (
    (("-o", "--output"), _FOLDER, "Folder of results; by default STUDY.bench."),
    (
        ("--workloads",),
        _FOLDER,
        "Folder of the scripts and frameworks.toml; by default the folder of STUDY, or the one "
        "above.",
    ),
    (
        ("--python", "pythons"),
        {"multiple": True, "metavar": "NAME=PATH"},
        "Python, or folder of its environment, that runs a framework.",
    ),
    (("--install",), _FLAG, "Create missing environments with pip."),
    (("--uv",), _FLAG, "Like --install, with uv."),
    (
        ("--backend",),
        {"type": click.Choice(options.BACKENDS), "default": "auto", "show_default": True},
        "Backend, as in `gputrace record`.",
    ),
    (
        ("--only",),
        {"multiple": True, "metavar": "SETTING=VALUE"},
        "Only runs with this setting, e.g. framework=torch; may be given several times.",
    ),
    (("--dry-run",), _FLAG, "Print the plan and run nothing."),
    (("--show",), _FLAG, "Print the results so far and run nothing."),
    (("--retry",), _FLAG, "Repeat the runs that failed."),
    (("--force",), _FLAG, "Repeat all runs."),
    (
        ("--skip-missing",),
        _FLAG,
        "Ignore runs that this machine cannot make in the exit code.",
    ),
    (("--slurm",), _FLAG, "Write a batch script for Slurm and run nothing."),
    (("--submit",), _FLAG, "With --slurm: submit the script with sbatch."),
    (("--array",), _FLAG, "With --slurm: one job per configuration."),
    (("--partition",), {"metavar": "NAME"}, "With --slurm: passed to sbatch."),
    (("--time",), {"metavar": "LIMIT"}, "With --slurm: passed to sbatch, e.g. 02:00:00."),
    (("--account",), {"metavar": "NAME"}, "With --slurm: passed to sbatch."),
    (
        ("--nodes",),
        {**_COUNT, "default": 1},
        "Nodes of the job; a run with more GPUs than a node has is spread over several.",
    ),
    (
        ("--gpus-per-node",),
        _COUNT,
        "GPUs per node; with --slurm, by default as many as the largest run needs.",
    ),
    (
        ("--mpi",),
        {"type": click.Choice(["srun", "mpiexec"]), "default": "srun", "show_default": True},
        "Launcher of MPI ranks on several nodes.",
    ),
    (("--configuration",), {"metavar": "KEY", "hidden": True}, ""),
)
"""Names, attributes and help of the options, in the order of the help."""


@click.command(
    "bench",
    cls=options.Grouped,
    sections={
        "Slurm": "slurm submit array partition time account nodes gpus_per_node mpi",
    },
    params=[
        click.Argument(["study"], metavar="STUDY.toml", type=options.UNCHECKED),
        *(click.Option(names, help=text, **attributes) for names, attributes, text in _OPTIONS),
    ],
)
@options.output_format
def command(study: Path, form: str, dry_run: bool, show: bool, **given: Any) -> int:
    """Run every combination of settings that STUDY.toml asks for, and keep the results.

    A study that was interrupted or killed resumes where it stopped when it is started again. The
    exit code is 5 if some runs failed or could not be started, 4 if none could, and 1 if a
    recording contradicts what its script reports.
    """
    from gputrace.studies.database import Folder
    from gputrace.studies.runner import prepare

    alone = [name for name in _SLURM_ONLY if given[name] and not given["slurm"]]
    if alone:
        raise UsageError(f"--{alone[0]} needs --slurm")
    if given["nodes"] > 1 and not given["gpus_per_node"]:
        raise UsageError("--nodes needs --gpus-per-node")
    request = _request(study, given)
    if show:
        return _show(Folder(request.output), form, ExitCode.DONE)
    work = prepare(request)
    if dry_run:
        click.echo(_plan(work), nl=False)
        return ExitCode.DONE
    if given["slurm"]:
        return _write_job(work, given)
    code = _carry_out(work)
    return code if code == ExitCode.INTERRUPTED else _show(work.folder, form, code)


def _write_job(work: Work, given: Mapping[str, Any]) -> int:
    """Write the batch script into the current folder, and submit it with ``--submit``."""
    from gputrace.report import check_target, write_for_people

    study = work.request.study
    target = check_target(Path(f"{study.stem}.sbatch"), [study], given["force"])
    write_for_people(target, _batch_script(work, given))
    note(f"wrote {target}")
    if given["submit"]:
        click.echo(message(_submit(target.absolute())))
    return ExitCode.DONE


def _batch_script(work: Work, given: Mapping[str, Any]) -> str:
    """Return the batch script; submitted again, it resumes the study."""
    from gputrace.studies.database import PARTS
    from gputrace.studies.plan import configurations_of

    configurations, command = configurations_of(work.chosen), shlex.join(_command(work, given))
    lines = ["#!/bin/bash", *_directives(work, given, configurations), "", "set -euo pipefail"]
    lines += [f"cd {shlex.quote(str(Path.cwd()))}", ""]
    if given["array"]:
        labels = {run.configuration.key: work.label(run) for run in work.chosen}
        part = f'{shlex.quote(str(work.folder.path / PARTS))}/"$key"'
        lines += [
            "# One configuration each. `gputrace bench STUDY.toml --show` puts their results "
            "together.",
            "configurations=(",
            *(f"  {each.key}  # {' '.join(labels[each.key].split())}" for each in configurations),
            ")",
            "key=${configurations[$SLURM_ARRAY_TASK_ID]}",
            f'exec {command} \\\n  --configuration "$key" -o {part}',
        ]
    else:
        lines += [
            "# Runs all that is not done yet; a run on several nodes is started by srun from here.",
            f"exec {command} \\\n  -o {shlex.quote(str(work.folder.path))}",
        ]
    return "\n".join(lines) + "\n"


def _directives(
    work: Work, given: Mapping[str, Any], configurations: Sequence[Configuration]
) -> Iterator[str]:
    """Yield the #SBATCH lines: exclusive nodes, since other jobs would disturb the runs."""
    name, array = re.sub(r"[^\w.-]", "-", work.request.study.stem), given["array"]
    gpus = given["gpus_per_node"] or max(each.gpus for each in configurations)
    per_gpu = given["mpi"] == "mpiexec" and given["nodes"] > 1
    on_gpus = any(each.settings.get("device") != "cpu" for each in configurations)
    settings = {
        "job-name": f"gputrace-{name}",
        "nodes": str(given["nodes"]),
        "ntasks-per-node": str(gpus if per_gpu else 1),
        "gpus-per-node": str(gpus) if on_gpus else None,
        "output": f"{name}-%A_%a.out" if array else f"{name}-%j.out",
        "array": f"0-{len(configurations) - 1}" if array else None,
        **{key: given[key] for key in _ASKED},
    }
    for key, value in settings.items():
        if value and not re.fullmatch(r"[\w.,:@%+/=-]+", value):
            problem = "not a value for Slurm; write it without spaces"
            raise UsageError(f"--{key} {value!r}: {problem}")
        if value:
            yield f"#SBATCH --{key}={value}"
    yield "#SBATCH --exclusive"


def _submit(script: Path) -> str:
    """Submit the script with sbatch; return its answer. Raises MissingError without an sbatch."""
    program = shutil.which("sbatch")
    if program is None:
        raise MissingError(f"there is no sbatch here; submit {script} where Slurm is installed")
    ran = ask_tool([program, str(script)])
    if ran.returncode:
        problem = " ".join(ran.stderr.split()) or f"exit code {ran.returncode}"
        raise MissingError(f"sbatch refuses {script}: {problem}")
    return ran.stdout.strip()


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
    from gputrace.report import write_for_people
    from gputrace.studies.database import Database, gather
    from gputrace.studies.measures import measure_runs, read_results
    from gputrace.studies.report import render, render_html
    from gputrace.studies.summary import summarize

    gather(folder, log)
    with Database(folder.path) as database:
        measure_runs(database, lambda name: progress_bar(f"measuring {name}"))
        summary = summarize(read_results(database))
        page = folder.path / "results.html"
        written = f"page: {page}\n"
        try:
            write_for_people(page, render_html(summary))
        except OSError as error:
            # The results may be in a folder of another user.
            written = ""
            log(f"{page}: {error.strerror}; the results page was not written")
        shown = render(summary, form, options.width(), options.use_color(), database)
        shown += written if form == "text" else ""
    click.echo(shown, nl=False, color=True)
    return code if code != ExitCode.DONE or summary.holds else ExitCode.GATE_NOT_MET


def _request(study: Path, given: dict[str, Any]) -> Request:
    from gputrace.studies.plan import Nodes
    from gputrace.studies.runner import Request
    from gputrace.trials.runs import CuredStudy

    pythons = dict(_pair("--python", text, "torch=/path/to/python") for text in given["pythons"])
    uv, install = given["uv"], given["install"]
    return Request(
        study,
        given["output"] or Path(f"{study.stem}.bench"),
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
        CuredStudy(),
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
    kept = f"finished runs are kept in {work.folder.path}"
    log(f"interrupted; {kept}; the same command continues")
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
    pending = {planned.key for planned in work.pending(finished)}
    lines = []
    for number, planned in enumerate(work.chosen, 1):
        reason = why_not(planned, len(work.gpus))
        state = f"skipped: {reason}" if reason else "to run"
        how = "recorded" if planned.recorded else "bare"
        lines.append(
            f"{number}/{len(work.chosen)}  repeat {planned.repeat}  {how}  "
            f"{state if planned.key in pending else finished[planned.key].state}  "
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

    def log(self, line: str) -> None:
        log(line)

    def begin(self, planned: PlannedRun, label: str, number: int, total: int) -> None:
        bare = "" if planned.recorded else ", bare"
        self._begun = f"[{number}/{total}] {label}, repeat {planned.repeat}{bare}"

    def end(self, run: Run) -> None:
        if run.state == "skipped":
            if (run.configuration, run.why) in self._skipped:
                return
            self._skipped.add((run.configuration, run.why))
        outcome = f"{run.state}: {run.why}"
        if run.result is not None and run.started_ns is not None and run.ended_ns is not None:
            rate = run.result["samples_per_second"]
            time = format_ns(run.ended_ns - run.started_ns)
            outcome = f"{rate:,.1f} samples/s, done in {time}"
        self.log(f"{self._begun}: {outcome}")


class Bar(Lines):
    """Print the lines above a progress bar of the runs."""

    def __init__(self, bar: Progress) -> None:
        super().__init__()
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def log(self, line: str) -> None:
        self._bar.console.print(
            f"gputrace: {message(line)}", markup=False, highlight=False, soft_wrap=True
        )

    def begin(self, planned: PlannedRun, label: str, number: int, total: int) -> None:
        from rich.markup import escape

        super().begin(planned, label, number, total)
        self._bar.update(
            self._task, description=escape(clean(label)), completed=number - 1, total=total
        )

    def end(self, run: Run) -> None:
        super().end(run)
        self._bar.advance(self._task)
