"""``gputrace recipe``: gputrace's tables for users of `nsys recipe`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from gputrace.cli.console import tell

_USE: Final = (
    "NSYS_RECIPE_PATH=$(gputrace recipe) nsys recipe gputrace_analyze --input RUN.nsys-rep"
)


@click.command("recipe")
def command() -> None:
    """Print the folder of gputrace_analyze, a recipe for Nsight Systems.

    With that folder as NSYS_RECIPE_PATH, `nsys recipe gputrace_analyze --input RUN.nsys-rep` writes
    the tables of `gputrace analyze`.
    """
    click.echo(Path(__file__).parents[1] / "data" / "recipe")
    if sys.stdout.isatty():
        tell(f"use it as {_USE}")
