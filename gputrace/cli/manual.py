"""The manual pages, gputrace(1) and one for each command, made of what ``--help`` says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Final

import click

from gputrace import __version__
from gputrace.cli import COMMANDS, cli
from gputrace.errors import ExitCode

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
"""What click has in front of a paragraph that keeps its lines."""


def pages(day: str) -> dict[str, str]:
    """The text of each page, in the language of man(7), by the name of its file.

    It says to be of the day, written as 2026-11-30.
    """
    top = click.Context(cli, info_name="gputrace", **cli.context_settings)
    commands = [_of_command(top, name) for name in COMMANDS]
    return {
        f"{_title(one)}.1": "\n".join([*_page(one, day), *_more(one, commands), ""])
        for one in [top, *commands]
    }


def _of_command(top: click.Context, name: str) -> click.Context:
    command = cli.get_command(top, name)
    assert command is not None
    return click.Context(command, info_name=name, parent=top)


def _page(context: click.Context, day: str) -> Iterator[str]:
    """What every page has."""
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
    """What gputrace(1) has, and the others only refer to."""
    if context in commands:
        yield ".SH SEE ALSO"
        yield ".BR gputrace (1)"
        return
    yield ".SH COMMANDS"
    for one in commands:
        yield from _entry(f"{_title(one)}(1)", _paragraphs(one.command)[0])
    yield ".SH EXIT STATUS"
    for code in ExitCode:
        yield from _entry(str(int(code)), _CODES[code])


def _title(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _paragraphs(command: click.Command) -> list[str]:
    """The help of a command, each paragraph on one line but those that keep their lines."""
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    return [
        part.removeprefix(_KEPT) if part.startswith(_KEPT) else " ".join(part.split())
        for part in parts
    ]


def _as_name(sentence: str) -> str:
    """A sentence as the NAME section has it, for apropos(1)."""
    return (sentence[0].lower() + sentence[1:]).rstrip(".")


def _entry(term: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_escape(term)}"
    yield _text(text)


def _text(paragraph: str) -> str:
    """A paragraph, its lines kept, with what is `quoted so` in bold letters."""
    lines = [re.sub(r"`([^`]+)`", r"\\fB\1\\fR", _escape(one)) for one in paragraph.splitlines()]
    return "\n.br\n".join(lines)


def _escape(text: str) -> str:
    """Text that troff takes as it is: no escape, no macro, and a hyphen that can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in {".", "'"} else text
