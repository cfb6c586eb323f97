"""Commands about this installation: doctor, plugins, recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.cli import options
from gputrace.cli.console import log
from gputrace.errors import ExitCode, PluginError

if TYPE_CHECKING:
    from gputrace.plugins import Plugin

_COLORS: Final = {"ok": "green", "missing": "red", "note": "yellow"}
_USE: Final = (
    "NSYS_RECIPE_PATH=$(gputrace recipe) nsys recipe gputrace_analyze --input RUN.nsys-rep"
)


@click.command("doctor")
def doctor() -> int:
    """Check what works here for recording, and what to do about what does not.

    The exit code is 4 if GPU activity cannot be recorded.
    """
    from gputrace.collectors.doctor import examine

    checks, color = examine(), options.use_color()
    for check in checks:
        state = click.style(f"{check.state:<8}", fg=_COLORS[check.state])
        advice = f"; {check.advice}" if check.advice else ""
        click.echo(f"{state}{check.what}: {check.result}{advice}", color=color)
    missing = any(check.state == "missing" for check in checks)
    return ExitCode.MISSING_HERE if missing else ExitCode.DONE


@click.command("recipe")
def recipe() -> None:
    """Print the folder of gputrace_analyze, a recipe for Nsight Systems.

    With that folder as NSYS_RECIPE_PATH, `nsys recipe gputrace_analyze --input RUN.nsys-rep` writes
    the tables of `gputrace analyze`.
    """
    click.echo(Path(__file__).parents[1] / "data" / "recipe")
    if sys.stdout.isatty():
        log(f"use it as {_USE}")


@click.command("plugins")
@click.option("--check", is_flag=True, help="Import each; exit code 4 where one does not work.")
def plugins(check: bool) -> int:
    """List the readers, analyzers, views, collectors and cures that other packages add.

    Without --check, none is imported. GPUTRACE_NO_PLUGINS=1 disables all of them.
    """
    from gputrace.plugins import KINDS, all_plugins

    code = ExitCode.DONE
    seen = {("views", name) for name in options.FORMATS}
    seen |= {("collectors", name) for name in options.BACKENDS}
    for plugin in all_plugins():
        kind, key = KINDS[plugin.kind], (plugin.kind, plugin.name)
        hidden = "; not used: the name is taken" if key in seen else ""
        seen.add(key)
        click.echo(f"{kind:<9} {plugin.name} ({plugin.package}, {plugin.value}){hidden}")
        if check and (problem := _problem(plugin)):
            log(problem)
            code = ExitCode.MISSING_HERE
    return code


def _problem(plugin: Plugin) -> str:
    """Return why a plugin cannot be imported or has the wrong type; empty if it is fine."""
    from gputrace.plugins import load, load_function

    try:
        if plugin.kind == "readers":
            from gputrace.readers.registry import Reader

            load(plugin, Reader)
        elif plugin.kind == "collectors":
            from gputrace.collectors.backends import backend_of

            backend_of(plugin)
        elif plugin.kind == "cures":
            from gputrace.trials.cures import Cure

            load(plugin, Cure)
        else:
            load_function(plugin)
    except PluginError as error:
        return " ".join(str(error).split())
    return ""
