"""Commands about this installation: doctor, plugins, recipe, skill, completion, schema.

Also, as files beside the package, completions and manual pages.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import get_completion_class

from gputrace.cli import COMMANDS, COMPLETES, cli, options
from gputrace.cli.console import log
from gputrace.errors import ExitCode, PluginError
from gputrace.version import __version__

if TYPE_CHECKING:
    from gputrace.plugins import Plugin


_COLORS: Final = {"ok": "green", "missing": "red", "note": "yellow"}
_USE: Final = (
    "NSYS_RECIPE_PATH=$(gputrace recipe) nsys recipe gputrace_analyze --input RUN.nsys-rep"
)


@click.command("schema")
@click.argument(
    "result",
    type=click.Choice(("analysis", "step", "comparison", "check", "memory", "sketches", "study")),
)
def schema(result: str) -> None:
    """Print the JSON Schema of what analyze, compare, check or bench print with --json."""
    import json

    from gputrace.cli import json_schema

    click.echo(json.dumps(json_schema.schema(result), indent=1, ensure_ascii=False))


@click.command("doctor")
def doctor() -> int:
    """Check what works on this machine for recording, and how to fix the rest.

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


@click.command("skill")
def skill() -> None:
    """Print a skill for agents: how to go from slow to fast with gputrace.

    It is a SKILL.md with front matter, for the folder in which an agent looks for skills.
    """
    path = Path(__file__).parents[1] / "data" / "SKILL.md"
    click.echo(path.read_text(encoding="utf-8"), nl=False)


@click.command("plugins")
@click.option(
    "--check", is_flag=True, help="Import each plugin; the exit code is 4 if one does not work."
)
def plugins(check: bool) -> int:
    """List the readers, analyzers, views, collectors, cures and causes that other packages add.

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
        elif plugin.kind == "causes":
            from gputrace.analyzers.ledger.causes import Cause

            load(plugin, Cause)
        else:
            load_function(plugin)
    except PluginError as error:
        return " ".join(str(error).split())
    return ""


PLACES: Final = {
    "bash": "share/bash-completion/completions/gputrace",
    "zsh": "share/zsh/site-functions/_gputrace",
    "fish": "share/fish/vendor_completions.d/gputrace.fish",
}
"""Path of each shell's completion script below /usr, /usr/local or an environment's folder."""


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(list(PLACES)))
def completion(shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and paths.

    \b
    bash: put  eval "$(gputrace completion bash)"  into ~/.bashrc
    zsh:  put  eval "$(gputrace completion zsh)"  into ~/.zshrc, after compinit
    fish: gputrace completion fish > ~/.config/fish/completions/gputrace.fish
    """  # noqa: D301 - what click keeps the lines by
    click.echo(script(shell), nl=False)


def script(shell: str) -> str:
    """Return the script for one of the shells of `PLACES`."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(cli, {}, "gputrace", COMPLETES).source()


_CODES: Final = {
    ExitCode.DONE: "Done.",
    ExitCode.GATE_NOT_MET: "A gate of `gputrace check` is not met.",
    ExitCode.USAGE: "The command was called wrongly.",
    ExitCode.UNREADABLE_INPUT: "The input cannot be read.",
    ExitCode.MISSING_HERE: "Something is missing on this machine.",
    ExitCode.DONE_IN_PART: "Done in part.",
    ExitCode.RECORDING_FAILED: "`gputrace record` failed; else its code is the program's own.",
    ExitCode.INTERRUPTED: "Interrupted.",
}


def pages(day: str) -> dict[str, str]:
    """Return the text of each manual page, in man(7) markup, by file name.

    ``day`` is the date of the pages, as 2026-11-30.
    """
    top = click.Context(cli, info_name="gputrace", **cli.context_settings)
    named = ((name, cli.get_command(top, name)) for name in COMMANDS)
    commands = [click.Context(each, info_name=name, parent=top) for name, each in named if each]
    return {
        f"{_title(context)}.1": "\n".join([*_page(context, day), *_more(context, commands), ""])
        for context in [top, *commands]
    }


def _page(context: click.Context, day: str) -> Iterator[str]:
    title, (first, *others) = _title(context), _paragraphs(context.command)
    yield f'.TH {title.upper()} 1 {day} "gputrace {__version__}" "gputrace"'
    yield ".SH NAME"
    # In the style for apropos(1).
    yield f"{_escape(title)} \\- {_escape((first[0].lower() + first[1:]).rstrip('.'))}"
    yield ".SH SYNOPSIS"
    yield f".B {_escape(context.command_path)}"
    yield _escape(" ".join(context.command.collect_usage_pieces(context)))
    yield ".SH DESCRIPTION"
    yield _text(first)
    for paragraph in others:
        yield ".PP"
        yield _text(paragraph)
    yield ".SH OPTIONS"
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option):
            yield from _entry(*record)


def _more(context: click.Context, commands: list[click.Context]) -> Iterator[str]:
    """Yield the sections of gputrace(1), or a reference to it from the other pages."""
    if context in commands:
        yield ".SH EXAMPLES"
        yield _text("\n".join(COMMANDS[str(context.info_name)][1:]))
        yield ".SH SEE ALSO"
        yield ".BR gputrace (1)"
        return
    yield ".SH COMMANDS"
    for each in commands:
        yield from _entry(f"{_title(each)}(1)", _paragraphs(each.command)[0])
    yield ".SH EXIT STATUS"
    for code in ExitCode:
        yield from _entry(str(int(code)), _CODES[code])


def _title(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _paragraphs(command: click.Command) -> list[str]:
    """Split a command's help into paragraphs, each on one line unless it keeps line breaks."""
    kept = "\b\n"  # Click's mark before a paragraph that keeps its line breaks.
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    return [
        part.removeprefix(kept) if part.startswith(kept) else " ".join(part.split())
        for part in parts
    ]


def _entry(term: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_escape(term)}"
    yield _text(text)


def _text(paragraph: str) -> str:
    """Format a paragraph, keeping its lines, with `quoted` text in bold."""
    lines = [re.sub(r"`([^`]+)`", r"\\fB\1\\fR", _escape(line)) for line in paragraph.splitlines()]
    return "\n.br\n".join(lines)


def _escape(text: str) -> str:
    """Escape text for troff: no escapes, no macros, and hyphens that can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in {".", "'"} else text


def shared_files() -> dict[str, str]:
    """Return the text of each file by its path, as share/man/man1/gputrace.1."""
    # See reproducible-builds.org; seconds since 1970.
    built_s = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    day = time.strftime("%Y-%m-%d", time.gmtime(built_s))
    manual = {f"share/man/man1/{name}": text for name, text in pages(day).items()}
    return manual | {path: script(shell) for shell, path in PLACES.items()}
