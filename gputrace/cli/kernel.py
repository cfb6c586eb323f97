"""``gputrace kernel``: profile a slow kernel with Nsight Compute."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar, tell
from gputrace.errors import ExitCode, MissingError, UsageError

if TYPE_CHECKING:
    from gputrace.analyzers.kernel_launches import Launches
    from gputrace.collectors.ncu import Filter

_REPORT: Final = Path("kernel.ncu-rep")


@click.command("kernel")
@click.argument("trace", type=click.Path(path_type=Path, readable=False))
@click.argument("kernel")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=_REPORT,
    show_default=True,
    help="The report of Nsight Compute.",
)
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--count", type=click.IntRange(min=1), default=1, show_default=True, help="Launches to profile."
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    help="Launches of it to leave out first, instead of those before a steady step.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the kernel and its launches as JSON.")
def command(
    trace: Path,
    kernel: str,
    command: tuple[str, ...],
    output: Path,
    force: bool,
    count: int,
    skip: int | None,
    as_json: bool,
) -> int:
    """Show where a kernel of TRACE is launched, and profile it in COMMAND with Nsight Compute.

    KERNEL is a name, a part of one, or a rank by total time (1 takes most). COMMAND runs the
    program of the trace again, under ncu; without one, the command to run is printed.
    """
    import gputrace
    from gputrace.collectors.launch import load_numpy
    from gputrace.collectors.ncu import Filter, words

    load_numpy()
    if command and not force and output.exists():
        raise UsageError(f"{output}: exists; name another with -o, or give --force")
    with (
        progress_bar(f"reading {trace.name}") as progress,
        gputrace.open(trace) as opened,
    ):
        launches = opened.launches(kernel, progress=progress)
    first = launches.skip if skip is None else skip
    chosen = Filter(launches.pattern, first, count, launches.device)
    ready = shlex.join(words(chosen, output, command or ("COMMAND",)))
    _show(launches, ready, as_json, bool(command))
    return _profile(chosen, output, command) if command else ExitCode.DONE


def _show(launches: Launches, ready: str, as_json: bool, runs: bool) -> None:
    if as_json:
        from gputrace.report.json import one_line, plain

        click.echo(one_line({"launches": plain(launches), "command": ready}), nl=False)
        return
    from gputrace.report import kernel as view

    click.echo(view.text(launches, options.width(), options.use_color()), nl=False, color=True)
    if not runs:
        click.echo(f"\n{ready}")


def _profile(chosen: Filter, output: Path, command: tuple[str, ...]) -> int:
    from gputrace.collectors.launch import CannotRun
    from gputrace.collectors.ncu import profile, read_report, show_report
    from gputrace.report import kernel as view

    try:
        profile(chosen, output, command)
    except CannotRun as error:
        raise MissingError(str(error)) from None
    kernels = read_report(output)
    if kernels is None:
        click.echo(show_report(output), nl=False)
    for kernel in kernels or ():
        rows = [(label, *value) for label, value in kernel.figures.items()]
        click.echo(view.figures(kernel.name, rows, kernel.verdict), nl=False)
    tell(f"wrote {output}")
    return ExitCode.DONE
