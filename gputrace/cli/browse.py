"""``gputrace browse``: show the timeline and the gaps in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gputrace.cli.options import UNCHECKED
from gputrace.errors import MissingError, UsageError


@click.command("browse")
@click.argument("traces", metavar="TRACE...", nargs=-1, type=UNCHECKED)
@click.option(
    "--beside",
    metavar="TRACE",
    multiple=True,
    type=UNCHECKED,
    help="A trace of another run, on the same time axis; several are the parts of that run.",
)
@click.option("--demo", is_flag=True, help="Show the recording that `gputrace demo` analyses.")
def command(traces: tuple[Path, ...], beside: tuple[Path, ...], demo: bool) -> int:
    """Show TRACE: what each GPU did when, and the gaps between the batches.

    TRACE is whatever `gputrace analyze` takes; several are the parts of one run. The worst gap is
    shown first. Press ? for the keys, q to leave.

    For a recording under way (NAME.sqlite.spool), the current speed of the steps, the last steps'
    time and the GPUs' clocks are shown.
    """
    if bool(traces) == demo:
        raise UsageError("browse takes either a TRACE or --demo (see gputrace browse --help)")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_terminal or os.environ.get("TERM") == "dumb":
        raise UsageError(
            "browse draws on a terminal, and stdin or stdout is none; "
            "use `gputrace analyze` where there is none"
        )
    try:
        return _browse(traces, beside, demo)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("textual"):
            raise
        raise MissingError("browse needs textual; install it with `pip install textual`") from None


def _browse(traces: tuple[Path, ...], beside: tuple[Path, ...], demo: bool) -> int:
    from gputrace.report.tui.app import browse

    if demo:
        from gputrace.data import unpacked

        with unpacked("demo.sqlite.xz") as path:
            return browse((path,), beside)
    if (folder := _under_way(traces)) is None:
        return browse(traces, beside)
    from gputrace.cli.record_live import RecordingFeed
    from gputrace.report.tui.live import watch

    code, trace = watch(RecordingFeed(folder))
    return code if trace is None else browse((trace,))


def _under_way(traces: tuple[Path, ...]) -> Path | None:
    """Return the folder of a recording under way, given its own path or the trace's; else None.

    Raises UsageError if the recording has ended without a trace.
    """
    if len(traces) != 1:
        return None
    from gputrace.collectors.job_tasks import is_ours
    from gputrace.collectors.live import RecordingFollower

    trace = traces[0]
    folder = trace if trace.is_dir() else trace.with_name(f"{trace.name}.spool")
    if (trace.exists() and folder != trace) or not is_ours(folder):
        return None
    if not RecordingFollower(folder).is_under_way:
        raise UsageError(
            f"{folder}: the recorder has ended without making a trace; "
            f"`gputrace recover {folder}` makes one"
        )
    return folder
