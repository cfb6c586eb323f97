"""Options shared by several subcommands, and their defaults from ``gputrace.toml``, or
``[tool.gputrace]`` in ``pyproject.toml``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cli.console import log
from gputrace.errors import ExitCode, UsageError
from gputrace.units import parse_duration

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gputrace.api import OpenTrace, Report

    _Text = click.ParamType[str]
else:
    _Text = click.ParamType  # Not generic in click 8.1.

FORMATS: Final = ("text", "json", "markdown", "csv")
BACKENDS: Final = ("auto", "cupti", "nsys", "nvprof", "host")
UNCHECKED: Final = click.Path(path_type=Path, readable=False)
"""Path that is checked when it is opened, with gputrace's own messages."""

_F = TypeVar("_F", bound=Callable[..., Any])

PROGRAM: Final = "gputrace.program"
"""Key of the context's ``meta`` under which `WithProgram` has the program's words."""


class OursOrPlugins(_Text):
    """Choice among built-in names and plugins, which are looked up only for other names."""

    name = "choice"

    def __init__(self, choices: Sequence[str], kind: str) -> None:
        self.choices, self.kind = tuple(choices), kind

    def get_metavar(self, *_args: Any, **_options: Any) -> str:
        return f"[{'|'.join(self.choices)}|PLUGIN]"

    def _all_choices(self) -> tuple[str, ...]:
        from gputrace.plugins import names

        return (*self.choices, *names(self.kind))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices and value not in self._all_choices():
            self.fail(f"{value!r} is not one of {', '.join(self._all_choices())}", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._all_choices() if name.startswith(incomplete)]


class StepNumber(click.ParamType):  # type: ignore[type-arg]
    """Number of a step, or the word for the longest one."""

    name = "step"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == "slowest" or str(value).isdecimal():
            return "slowest" if value == "slowest" else int(value)
        self.fail(f"{value!r} is neither a step's number nor slowest", param, ctx)


class Grouped(click.Command):
    """Command whose help lists some options under titles, after the others."""

    def __init__(self, *arguments: Any, sections: Mapping[str, str], **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self._titles = {name: title for title, names in sections.items() for name in names.split()}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Options", *self._titles.values())
        }
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and row is not None:
                rows[self._titles.get(str(parameter.name), "Options")].append(row)
        for title, listed in rows.items():
            with formatter.section(title):
                formatter.write_dl(listed)


class WithProgram(Grouped):
    """Command whose own words end at ``--``; those behind it are the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[PROGRAM] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


def _format(kind: Any) -> Callable[[_F], _F]:
    def add(function: _F) -> _F:
        short = click.option("--json", "form", flag_value="json", help="Same as --format json.")
        return click.option(
            "--format",
            "form",
            type=kind,
            default="text",
            show_default=True,
            help="How to print the result.",
        )(short(function))

    return add


# Each arrives in the command under the name of the option, and as typed.
report_format = _format(OursOrPlugins(FORMATS, "views"))
output_format = _format(click.Choice(FORMATS))
check_format = _format(click.Choice(("text", "json", "junit", "markdown")))
traces = click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=UNCHECKED)
force = click.option("--force", is_flag=True, help="Replace the output if it exists.")
window = click.option(
    "--time",
    metavar="A:B",
    help="Only this part of the trace, e.g. 12s:14s or 350ms: (times as in the report).",
)
steps = click.option(
    "--steps",
    metavar="A:B",
    help="Measure steps A to B-1 instead of the steady ones, e.g. 20:40; the first is 0.",
)
most_gaps = click.option(
    "--gaps",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    metavar="N",
    help="How many of the largest gaps to list; text shows 5, Markdown 10.",
)
keep_going = click.option(
    "--keep-going",
    is_flag=True,
    help="Skip files, or ends of files, that cannot be read; the exit code is then 5.",
)


def output(text: str) -> Callable[[_F], _F]:
    """Return the option ``--output`` with its help."""
    return click.option("-o", "--output", type=click.Path(path_type=Path), help=text)


def batch(function: _F) -> _F:
    """Add ``--batch`` and ``--global-batch``; arrive as ``batch``, ``global_batch``, as typed."""
    function = click.option(
        "--global-batch",
        metavar="N[,N...]",
        help="Samples per step on all GPUs together; one number for all runs, or one for each.",
    )(function)
    return click.option(
        "--batch",
        metavar="N[,N...]",
        help="Samples per GPU and step; one number for all runs, or one for each.",
    )(function)


def read_batch(text: str | None) -> list[float] | None:
    """Parse ``64`` or ``64,32``; raises UsageError for anything else."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a batch size; write 64, or 64,32 for two runs") from None


def read_duration(text: str, what: str = "") -> int:
    """Parse a time to nanoseconds; raise UsageError, led by ``what``, for anything else."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{what}{error}") from None


def width() -> int:
    """Return the width of a report: that of the terminal up to 120, else 80."""
    # As shutil does, whose import takes 0.002 s.
    columns = os.environ.get("COLUMNS", "")
    wide = int(columns) if columns.isdecimal() else 0
    with suppress(AttributeError, ValueError, OSError):  # None, closed, or no terminal.
        wide = wide or os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    return min(wide or 80, 120)


def use_color() -> bool:
    """Return whether stdout is a terminal that should get colour (no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def show(report: Report, form: str) -> None:
    """Print a report; text in the terminal's width and colours."""
    from gputrace.report import render

    wide = width() if form == "text" else 80
    click.echo(render(report, form, wide, use_color()), nl=False, color=True)


def show_as(result: object, form: str, module: str) -> None:
    """Print a result by the document that a module makes of it."""
    from gputrace.report import render_as

    click.echo(render_as(result, form, module, width(), use_color()), nl=False, color=True)


def default_target(trace: Path, suffix: str, force: bool) -> Path:
    """Return the target of a command: in the current folder, named after the trace, and numbered
    where that exists and is not to be replaced: ``trace-2.html``.
    """
    name = trace.resolve().name.partition(".")[0] or "trace"
    target = Path(name + suffix)
    for number in count(2):
        if force or not target.exists():
            break
        target = Path(f"{name}-{number}{suffix}")
    return target


def log_left_out(opened: OpenTrace) -> int:
    """List on stderr what could not be read; return the resulting exit code."""
    for file in opened.left_out:
        log(f"not all read: {file}")
    return ExitCode.DONE_IN_PART if opened.left_out else ExitCode.DONE


CONFIGURED: Final = ("record", "analyze", "report", "compare", "check")
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
            if (tables := _read_tables(path, context)) is not None:
                _check(path, "a command that it may set options of", tables, CONFIGURED, context)
                return _defaults(path, tables.get(str(command.name), {}), command, context)
    return {}


def _read_tables(path: Path, context: click.Context) -> dict[str, Any] | None:
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
