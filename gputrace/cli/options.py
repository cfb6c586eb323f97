"""Options shared by several subcommands."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cli.console import tell
from gputrace.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gputrace.api import OpenTrace

    _Text = click.ParamType[str]
    _Any = click.ParamType[Any]
else:
    _Text = _Any = click.ParamType  # Not generic in click 8.1.

FORMATS: Final = ("text", "json", "markdown", "csv")

_F = TypeVar("_F", bound=Callable[..., Any])


def traces(function: _F) -> _F:
    """Add ``TRACE...``; arrives as ``traces``, unchecked paths."""
    return click.argument(
        "traces",
        metavar="TRACE...",
        nargs=-1,
        required=True,
        type=click.Path(path_type=Path, readable=False),
    )(function)


class OursOrPlugins(_Text):
    """Choice among built-in names and plugins, which are looked up only for other names."""

    name = "choice"

    def __init__(self, choices: Sequence[str], kind: str) -> None:
        self.choices, self.kind = tuple(choices), kind

    def get_metavar(self, *_args: Any, **_options: Any) -> str:
        return f"[{'|'.join(self.choices)}|PLUGIN]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from gputrace.plugins import names

        if value in self.choices or value in names(self.kind):
            return str(value)
        there = ", ".join((*self.choices, *names(self.kind)))
        self.fail(f"{value!r} is not one of {there}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from gputrace.plugins import names

        known = (*self.choices, *names(self.kind))
        return [CompletionItem(name) for name in known if name.startswith(incomplete)]


def report_format(function: _F) -> _F:
    """Add ``--format`` and ``--json``, with the views of plugins; arrives as ``form``."""
    return _format(function, OursOrPlugins(FORMATS, "views"))


def output_format(function: _F) -> _F:
    """Add ``--format`` and its short form ``--json``; arrives as ``form``."""
    return _format(function, click.Choice(FORMATS))


def _format(function: _F, kind: _Any) -> _F:
    function = click.option("--json", "form", flag_value="json", help="Same as --format json.")(
        function
    )
    return click.option(
        "--format",
        "form",
        type=kind,
        default="text",
        show_default=True,
        help="How to print the result.",
    )(function)


def window(function: _F) -> _F:
    """Add ``--time A:B``; arrives as ``time``, the text as typed."""
    return click.option(
        "--time",
        metavar="A:B",
        help="Only this part of the trace, as 12s:14s or 350ms:; times as the report shows them.",
    )(function)


def steps(function: _F) -> _F:
    """Add ``--steps A:B``; arrives as ``steps``, the text as typed."""
    return click.option(
        "--steps",
        metavar="A:B",
        help="Measure these steps, counted from 0, B not included, instead of the steady ones.",
    )(function)


def most_gaps(function: _F) -> _F:
    """Add ``--gaps N``; arrives as ``gaps``."""
    return click.option(
        "--gaps",
        type=click.IntRange(min=0),
        default=50,
        show_default=True,
        metavar="N",
        help="How many of the largest gaps to list.",
    )(function)


def batch(function: _F) -> _F:
    """Add ``--batch`` and ``--global-batch``; arrive as ``batch``, ``global_batch``, as typed."""
    function = click.option(
        "--global-batch",
        metavar="N[,N...]",
        help="Samples of a step on all GPUs; one number for all runs, or one for each.",
    )(function)
    return click.option(
        "--batch",
        metavar="N[,N...]",
        help="Samples that a GPU gets in a step; one number for all runs, or one for each.",
    )(function)


def read_batch(text: str | None) -> list[float] | None:
    """Parse ``64`` or ``64,32``; raises UsageError for anything else."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no batch; write 64, or 64,32 for two runs") from None


def width() -> int:
    """Return the width of a report: that of the terminal up to 120, else 80."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def default_target(trace: Path, suffix: str) -> Path:
    """Return the target of a command: in the current folder, named after the trace."""
    return Path((trace.resolve().name.partition(".")[0] or "trace") + suffix)


def keep_going(function: _F) -> _F:
    """Add ``--keep-going``; arrives as ``keep_going``."""
    return click.option(
        "--keep-going",
        is_flag=True,
        help="Go on without files, or ends of files, that cannot be read; exit code 5 then.",
    )(function)


def scheduler(function: _F) -> _F:
    """Add ``--scheduler``; arrives as ``scheduler``, the text as typed."""
    return click.option(
        "--scheduler",
        metavar="WHERE",
        help="Have a Dask cluster analyze each file where it is, with the same result: a "
        "scheduler's address, local:N for N processes, slurm:N for N workers as jobs.",
    )(function)


def tell_left_out(opened: OpenTrace) -> int:
    """List on stderr what could not be read; return the resulting exit code."""
    for file in opened.left_out:
        tell(f"not all read: {file}")
    return ExitCode.DONE_IN_PART if opened.left_out else ExitCode.DONE


def use_color() -> bool:
    """Return whether stdout is a terminal that should get colour (no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
