"""``gputrace browse``: the timeline and the gaps, in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gputrace.errors import MissingError, UsageError


@click.command("browse")
@click.argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, readable=False),
)
@click.option(
    "--beside",
    metavar="TRACE",
    multiple=True,
    type=click.Path(path_type=Path, readable=False),
    help="A trace of another run, on the same time axis; several are the parts of that run.",
)
def command(traces: tuple[Path, ...], beside: tuple[Path, ...]) -> int:
    """Shows TRACE: what each GPU did when, and the gaps between the batches.

    TRACE is whatever `gputrace analyze` takes; several are the parts of one run. The worst gap is
    shown first. Press ? for the keys, q to leave.
    """
    if not _at_terminal():
        raise UsageError(
            "browse draws on a terminal, and stdin or stdout is none; "
            "use `gputrace analyze` where there is none"
        )
    try:
        from gputrace.views.browse.app import browse
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("textual"):
            raise
        raise MissingError("browse needs textual; install it with `pip install textual`") from None
    return browse(traces, beside)


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
