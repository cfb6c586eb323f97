"""``gputrace compare``: show what differs between runs."""

from __future__ import annotations

from pathlib import Path

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar


@click.command("compare")
@click.argument(
    "traces",
    metavar="A B...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, readable=False),
)
@options.output_format
@options.steps
@click.option("--label", "labels", multiple=True, help="What to call a run; once for each.")
@options.batch
def command(
    traces: tuple[Path, ...],
    form: str,
    steps: str | None,
    labels: tuple[str, ...],
    batch: str | None,
    global_batch: str | None,
) -> None:
    """Compare B with A: faster or slower, in which class of time, in which kernels.

    For three runs or more, or two with different numbers of GPUs, show how they scale: speed-up,
    efficiency, and which class of time eats the loss. Each run is a file, or a folder with the
    files of its machines or ranks.
    """
    import gputrace

    report = gputrace.compare(
        *traces,
        labels=labels or None,
        steps=steps,
        batch=options.read_batch(batch),
        global_batch=options.read_batch(global_batch),
        progress=lambda name: progress_bar(f"reading {name}"),
    )
    if form != "text":
        click.echo(report.render(form), nl=False)
        return
    from gputrace.report import comparison

    click.echo(
        comparison.render_text(report, options.width(), options.use_color()), nl=False, color=True
    )
