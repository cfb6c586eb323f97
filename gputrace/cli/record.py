"""``gputrace record``: runs a program and records what its GPUs and host threads do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.errors import GputraceError, UsageError

if TYPE_CHECKING:
    from gputrace.collectors.merge import Merged
    from gputrace.collectors.record import Plan

OWN_FAILURE: Final = 125
"""As of ``timeout`` and ``docker run``: not the program failed, but its recording."""


@click.command(
    "record",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    options_metavar="[OPTIONS] --",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("trace.sqlite"),
    show_default=True, help="The trace to write.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--backend", type=click.Choice(["auto", "cupti", "host"]), default="auto", show_default=True,
    help="What records: the embedded CUPTI collector, or the host's signals alone.",
)  # fmt: skip
@click.option("--delay", metavar="TIME", default="0", help="Start so long after CUDA does, as 30s.")
@click.option("--duration", metavar="TIME", default="0", help="Record only so long, as 10s.")
@click.option("--steps", metavar="A:B", help="Record only these training steps, counted from 0.")
@click.option(
    "--profiler-api", is_flag=True, help="Record from cudaProfilerStart to cudaProfilerStop."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def command(
    output: Path,
    force: bool,
    backend: str,
    delay: str,
    duration: str,
    steps: str | None,
    profiler_api: bool,
    command: tuple[str, ...],
) -> int:
    """Runs COMMAND and records its GPUs into a trace file.

    The exit code is COMMAND's own; 125 says that the recording failed, 126 that COMMAND cannot be
    run, 127 that it is not found.
    """
    from gputrace.collectors import record
    from gputrace.collectors.child import CannotRun, find_program

    try:
        plan = record.Plan(output, backend, *_times(delay, duration), _steps(steps), profiler_api)
        find_program(command[0])
        folder = record.prepare(plan, force)
        record.environment(plan, folder, {}) if backend == "cupti" else None
    except CannotRun as error:
        return _say(str(error), error.code)
    except GputraceError as error:
        return _say(str(error), OWN_FAILURE)
    return _record(plan, command, folder)


def _record(plan: Plan, command: tuple[str, ...], folder: Path) -> int:
    from gputrace.collectors import record
    from gputrace.collectors.child import CannotRun

    try:
        code = record.record(plan, command, folder)
    except (CannotRun, GputraceError) as error:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        return _say(str(error), getattr(error, "code", OWN_FAILURE))
    try:
        merged = record.finish(folder, plan.output)
    except (OSError, GputraceError) as error:
        _say(f"{error}; what was recorded is in {folder} (gputrace recover {folder})", 0)
        return code or OWN_FAILURE
    _tell(merged, plan.output)
    return code


def _tell(merged: Merged, output: Path) -> None:
    size = output.stat().st_size / 1e6
    _say(
        f"{output}: {merged.kernels:,} kernels of {merged.processes} "
        f"process{'' if merged.processes == 1 else 'es'}, {size:,.1f} MB",
        0,
    )
    for note in merged.notes:
        _say(f"no GPU activity from some process: {note}", 0)
    if merged.cut:
        _say(f"{merged.cut} ended without warning; at most their last second is missing", 0)
    _say(f"next: gputrace analyze {output}", 0)


def _say(message: str, code: int) -> int:
    click.echo(f"gputrace: {message}", err=True)
    return code


def _times(delay: str, duration: str) -> tuple[int, int]:
    from gputrace.units import parse_duration

    try:
        return parse_duration(delay), parse_duration(duration)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise UsageError(f"{text!r} does not name steps; write FIRST:END, as 20:40")
    return int(first), int(end)
