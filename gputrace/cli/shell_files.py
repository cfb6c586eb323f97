"""Manual pages and shell completions installed beside the package."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Iterator
from typing import Final

import click

from gputrace.cli import COMMANDS, cli
from gputrace.cli.completion import PLACES, script
from gputrace.errors import ExitCode
from gputrace.version import __version__

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


_KEPT: Final = "\b\n"
"""Click's mark before a paragraph that keeps its line breaks."""


def pages(day: str) -> dict[str, str]:
    """Return the text of each manual page, in man(7) markup, by file name.

    ``day`` is the date of the pages, as 2026-11-30.
    """
    top = click.Context(cli, info_name="gputrace", **cli.context_settings)
    commands = [_of_command(top, name) for name in COMMANDS]
    return {
        f"{_title(context)}.1": "\n".join([*_page(context, day), *_more(context, commands), ""])
        for context in [top, *commands]
    }


def _of_command(top: click.Context, name: str) -> click.Context:
    command = cli.get_command(top, name)
    assert command is not None
    return click.Context(command, info_name=name, parent=top)


def _page(context: click.Context, day: str) -> Iterator[str]:
    """Yield the sections that every page has."""
    title, (first, *others) = _title(context), _paragraphs(context.command)
    yield f'.TH {title.upper()} 1 {day} "gputrace {__version__}" "gputrace"'
    yield ".SH NAME"
    yield f"{_escape(title)} \\- {_escape(_as_name(first))}"
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
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    return [
        part.removeprefix(_KEPT) if part.startswith(_KEPT) else " ".join(part.split())
        for part in parts
    ]


def _as_name(sentence: str) -> str:
    """Convert a sentence to the style of the NAME section, for apropos(1)."""
    return (sentence[0].lower() + sentence[1:]).rstrip(".")


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
