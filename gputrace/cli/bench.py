"""``gputrace bench``: runs a study, and goes on with it where it stopped."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gputrace.cli import options
from gputrace.cli.progress import progress_bar
from gputrace.cli.slurm import check_slurm, slurm_options, write_job
from gputrace.cli.telling import tell
from gputrace.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from gputrace.bench.answer import Summary
    from gputrace.bench.database import Run
    from gputrace.bench.folder import Folder
    from gputrace.bench.work import Request, Work

_F = TypeVar("_F", bound=Callable[..., Any])


def _choices(function: _F) -> _F:
    """Options on what is run; what is given several times arrives as a tuple."""
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
    """Options on where things are."""
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
    """Runs every combination of settings that STUDY.toml asks for, and keeps the results.

    A study that was interrupted, or killed, goes on where it stopped when it is started again. The
    exit code is 5 where some runs failed or could not be made, 4 where none could be, and 1 where a
    recording does not agree with what its script says of itself.
    """
    from gputrace.bench.folder import Folder
    from gputrace.bench.work import prepare

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
    """Prints the results; a recording that does not hold is a gate not met."""
    from gputrace.bench.database import Database
    from gputrace.bench.gathering import gather
    from gputrace.bench.reporting import holds, report

    gather(folder, _tell)
    with Database(folder.path) as database:
        summary = report(database, lambda name: progress_bar(f"measuring {name}"))
        page = _write_page(summary, folder.path)
        if form == "text":
            from gputrace.bench.views import text

            shown = text.render(summary, options.width(), options.use_color())
            shown += f"page: {page}\n" if page else ""
        else:
            from gputrace.bench.views import render

            shown = render(summary, database, form)
    click.echo(shown, nl=False, color=True)
    return code if code != ExitCode.DONE or holds(summary) else ExitCode.GATE_NOT_MET


def _write_page(summary: Summary, folder: Path) -> Path | None:
    """The page; the results can be seen without one, in a folder of somebody else's, say."""
    from gputrace.bench.reporting import write_page

    try:
        return write_page(summary, folder)
    except OSError as error:
        _tell(f"{error.filename}: {error.strerror}; there is no page of these results")
        return None


def _tell(line: str) -> None:
    tell(line)


def _request(study: Path, given: dict[str, Any]) -> Request:
    from gputrace.bench.nodes import Nodes
    from gputrace.bench.work import Request

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
    from gputrace.bench.work import carry_out
    from gputrace.cli.watching import watch

    with watch() as watcher:
        try:
            return carry_out(work, watcher)
        except KeyboardInterrupt:
            told = f"interrupted; what is over is kept in {work.folder.path}"
    _tell(f"{told}, the same command goes on")
    return ExitCode.INTERRUPTED


def _plan(work: Work) -> str:
    """A line for each run: whether it is still to be made, and how."""
    from gputrace.bench.plan import arguments_of, why_not

    found = _over(work)
    pending = {planned.place for planned in work.pending(found)}
    lines = []
    for number, planned in enumerate(work.chosen, 1):
        reason = why_not(planned, len(work.gpus))
        state = f"skipped: {reason}" if reason else "to run"
        how = "recorded" if planned.recorded else "bare"
        lines.append(
            f"{number}/{len(work.chosen)}  repeat {planned.repeat}  {how}  "
            f"{state if planned.place in pending else found[planned.place].state}  "
            f"{shlex.join([planned.framework.script.name, *arguments_of(planned)])}\n"
        )
    return "".join(lines)


def _over(work: Work) -> dict[Any, Run]:
    from gputrace.bench.database import FILE, Database
    from gputrace.bench.work import over

    if not (work.folder.path / FILE).exists():
        return {}
    with Database(work.folder.path) as database:
        return over(database)
