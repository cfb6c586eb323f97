"""``gputrace plugins``: list the plugins of other packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from gputrace.cli.console import tell
from gputrace.errors import ExitCode, PluginError

if TYPE_CHECKING:
    from gputrace.plugins import Plugin


@click.command("plugins")
@click.option("--check", is_flag=True, help="Import each; exit code 4 where one does not work.")
def command(check: bool) -> int:
    """List the readers, analyzers, views and collectors that other packages add.

    Without --check, none is imported. GPUTRACE_NO_PLUGINS=1 disables all of them.
    """
    from gputrace.plugins import KINDS, all_plugins

    code, seen = ExitCode.DONE, set(_own())
    for plugin in all_plugins():
        kind, key = KINDS[plugin.kind], (plugin.kind, plugin.name)
        hidden = "; not used: the name is taken" if key in seen else ""
        seen.add(key)
        click.echo(f"{kind:<9} {plugin.name} ({plugin.package}, {plugin.value}){hidden}")
        if check and (problem := _problem(plugin)):
            tell(problem)
            code = ExitCode.MISSING_HERE
    return code


def _own() -> Iterator[tuple[str, str]]:
    """Yield the kinds and names that plugins cannot have."""
    from gputrace.cli import options
    from gputrace.cli.record import BACKENDS

    yield from (("views", name) for name in options.FORMATS)
    yield from (("collectors", name) for name in BACKENDS)


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
        else:
            load_function(plugin)
    except PluginError as error:
        return " ".join(str(error).split())
    return ""
