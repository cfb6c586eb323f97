"""The command line's reference, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from gputrace.cli import COMMANDS, cli


def markdown() -> str:
    """A section for each subcommand: what it does, how it is called, its options."""
    group = click.Context(cli, info_name="gputrace", **cli.context_settings)
    return "\n".join(line for name in COMMANDS for line in _section(group, name))


def _section(group: click.Context, name: str) -> Iterator[str]:
    command = cli.get_command(group, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=group)
    yield f"## gputrace {name}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    yield inspect.cleandoc(command.help or "").replace("\b", "") + "\n"
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    yield "| option | |\n| :-- | :-- |"
    yield from (_row(option, context) for option in options)
    yield ""


def _row(option: click.Option, context: click.Context) -> str:
    """``| `--gaps N` | How many … (50 if not given) |``."""
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    names = ", ".join(f"`{name}{value}`" for name in option.opts)
    if option.secondary_opts:
        names += ", " + ", ".join(f"`{name}`" for name in option.secondary_opts)
    default = f" ({option.default} if not given)" if option.show_default else ""
    more = " May be given several times." if option.multiple else ""
    return f"| {_cell(names)} | {_cell((option.help or '') + default + more)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
