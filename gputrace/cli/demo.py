"""``gputrace demo``: the analysis of a small real recording that comes with the package."""

from __future__ import annotations

import click

from gputrace.cli import options


@click.command("demo")
@options.output_format
def command(form: str) -> None:
    """Analyses a bundled recording: four H200 GPUs training ResNet-50, slower than they should."""
    import gputrace
    from gputrace.cli.analyze import show
    from gputrace.data import unpacked

    if form == "text":
        click.echo(
            "The bundled recording: PyTorch DistributedDataParallel, ResNet-50, four H200 GPUs.\n"
            "Something makes it slower than it should be.\n",
            err=True,
        )
    with unpacked("demo.sqlite.xz") as path, gputrace.open(path) as opened:
        show(opened.analyze(), form)
    if form == "text":
        click.echo(
            "\nYour own: gputrace record -- python train.py, then gputrace analyze trace.sqlite",
            err=True,
        )
