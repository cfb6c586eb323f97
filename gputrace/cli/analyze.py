"""``gputrace analyze``: show where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar

if TYPE_CHECKING:
    from gputrace.api import Report


@click.command("analyze")
@options.traces
@options.report_format
@options.steps
@options.window
@options.most_gaps
@options.keep_going
@options.scheduler
def command(
    traces: tuple[Path, ...],
    form: str,
    steps: str | None,
    time: str | None,
    gaps: int,
    keep_going: bool,
    scheduler: str | None,
) -> int:
    """Show where the time of TRACE went, and what to change.

    TRACE is what `gputrace record` wrote, an nsys export (SQLite, or a folder of Parquet or Arrow
    tables), an nsys report where nsys is installed, a file of nvprof, or a profile of PyTorch,
    TensorFlow, JAX or MXNet, packed or not. Several are the parts of one run, a file for each
    machine or rank; a folder stands for the traces in it. Logs of nvidia-smi beside them
    (--query-gpu as CSV, or dmon -o DT) add the clocks and the use of the GPUs. URLs of object
    stores (s3://, gs://) are fetched first.
    """
    import gputrace

    what = traces[0].name if len(traces) == 1 else f"{len(traces)} traces"
    with (
        progress_bar(f"reading {what}") as progress,
        gputrace.open(
            *traces,
            keep_going=keep_going,
            windows=time is not None,
            scheduler=scheduler,
            progress=progress,
        ) as opened,
    ):
        report = opened.analyze(steps=steps, time=time, gaps=gaps, progress=progress)
        code = options.tell_left_out(opened)
    show(report, form)
    return code


def show(report: Report, form: str) -> None:
    """Print a report, in the terminal's width and colours if there is a terminal."""
    if form != "text":
        click.echo(report.render(form), nl=False)
        return
    from gputrace.report import text

    shown = text.render(report, options.width(), options.use_color())
    click.echo(shown, nl=False, color=True)
