"""Defaults of options from ``gputrace.toml``, or ``[tool.gputrace]`` in ``pyproject.toml``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click

from gputrace.cli.console import log

COMMANDS: Final = ("record", "analyze", "report", "compare", "check")
"""Commands that have a table in the file."""
_TYPED_ONLY: Final = {"output", "force", "scheduler", "serve", "port", "help"}
"""Options that write, replace, connect or listen: a folder from elsewhere must not choose them."""


def read_defaults(command: click.Command, context: click.Context) -> dict[str, Any]:
    """Return the defaults of a command by parameter, from the nearest file in this folder or above.

    Paths are relative to the file. Raises click.UsageError if the file is broken, or names a
    command or an option that does not exist.
    """
    try:
        here = Path.cwd()
    except OSError:  # The folder was removed.
        return {}
    for folder in (here, *here.parents):
        for path in (folder / "gputrace.toml", folder / "pyproject.toml"):
            if (tables := _read(path, context)) is not None:
                _check(path, "a command that it may set options of", tables, COMMANDS, context)
                return _defaults(path, tables.get(str(command.name), {}), command, context)
    return {}


def _read(path: Path, context: click.Context) -> dict[str, Any] | None:
    """Return the tables of a file; None if it is not there, or is another tool's or user's."""
    try:
        content = path.read_bytes() if path.is_file() else None
        owner = path.stat().st_uid
    except OSError:
        return None
    is_own = path.name == "gputrace.toml"
    # Most have no such table, and tomllib takes longer to import than all else here.
    if content is None or not (is_own or b"tool.gputrace" in content):
        return None
    import tomllib

    try:
        tables: Any = tomllib.loads(content.decode())
    except ValueError as error:
        if is_own:
            raise click.UsageError(f"{path}: {error}", context) from None
        return None
    found = tables if is_own else tables.get("tool", {}).get("gputrace")
    if found is not None and owner not in (os.getuid(), 0):
        log(f"{path}: not used, since it belongs to another user")
        return None
    if found is not None and not isinstance(found, dict):
        raise click.UsageError(f"{path}: tool.gputrace is not a table", context)
    return found


def _defaults(
    path: Path, table: Any, command: click.Command, context: click.Context
) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise click.UsageError(f"{path}: {command.name} is not a table", context)
    options = {
        option.opts[-1].lstrip("-"): option
        for option in command.params
        # Not --json, which is short for a value of --format.
        if isinstance(option, click.Option) and not isinstance(option.flag_value, str)
    }
    known = {name: option for name, option in options.items() if name not in _TYPED_ONLY}
    _check(path, f"an option of {command.name} that a file may set", table, known, context)
    defaults: dict[str, Any] = {}
    for name, value in table.items():
        option = known[name]
        if option.multiple and not isinstance(value, list):
            value = [value]
        if isinstance(option.type, click.Path):
            value = path.parent / str(value)
        defaults[str(option.name)] = value
    return defaults


def _check(path: Path, what: str, given: Any, known: Any, context: click.Context) -> None:
    for name in given:
        if name not in known:
            from difflib import get_close_matches

            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
            raise click.UsageError(f"{path}: {name}: not {what}; {hint}", context)
