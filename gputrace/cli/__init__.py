"""Command ``gputrace``: nothing heavy is imported until a subcommand runs."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from gputrace.cli.console import tell
from gputrace.errors import ExitCode, GputraceError
from gputrace.version import __version__

COMMANDS: Final = {
    "record": "record.command",
    "analyze": "analyze.analyze",
    "browse": "browse.command",
    "report": "analyze.report",
    "compare": "analyze.compare",
    "check": "check.command",
    "export": "analyze.export",
    "kernel": "kernel.command",
    "bench": "bench.command",
    "recover": "record.recover",
    "doctor": "installation.doctor",
    "plugins": "installation.plugins",
    "recipe": "installation.recipe",
    "demo": "demo.command",
    "completion": "completion.command",
}
"""Click commands in the modules of this package."""


class _Commands(click.Group):
    """Group that imports a subcommand when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(".")
        command: click.Command = getattr(import_module(f"gputrace.cli.{module}"), function)
        return command

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _own_broken_pipe():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _own_broken_pipe():
            return super().invoke(ctx)


class _ReaderGone(Exception):
    """Broken pipe: the reader of the output has closed it."""


@contextmanager
def _own_broken_pipe() -> Iterator[None]:
    """Hide a broken pipe from click, which would exit with 1, the code for an unmet gate."""
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGone from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gputrace")
def cli() -> None:
    """Show where each training step's time goes on NVIDIA GPUs, and what to change."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; every failure ends in one line on stderr and an exit code.

    Where a signal ended a recorded program, it ends this process too, so that a shell's loop stops
    at Ctrl+C as it would without the recorder.
    """
    code = run(arguments)
    if code < 0:
        _die_by(-code)
    sys.exit(code if code >= 0 else 128 - code)


def _die_by(number: int) -> None:
    """Ends this process by a signal, without a core of its own, unless it ends no process."""
    import resource

    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # SIGKILL has no handler.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code, -N where signal N ended a recorded program."""
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        result: Any = cli.main(arguments, prog_name="gputrace", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.DONE
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return ExitCode.USAGE
    except (_ReaderGone, BrokenPipeError):
        _drop_output()
        return ExitCode.DONE
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError):
            _drop_output()
        problem = _explain(error)
        if problem is None:
            raise
        tell(problem[0])
        return problem[1]


def _explain(error: BaseException) -> tuple[str, ExitCode] | None:
    """Return the line and the exit code for a failure; None for one that nobody foresaw."""
    match error:
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "gputrace"
            # `record` keeps 2 for its program, as `timeout` and `docker run` do.
            code = ExitCode.RECORDING_FAILED if path.endswith(" record") else ExitCode.USAGE
            return f"{error.format_message()} (see {path} --help)", code
        case click.ClickException():
            return error.format_message(), ExitCode.USAGE
        case GputraceError():
            return str(error), error.exit_code
        case click.Abort() | KeyboardInterrupt():
            return "interrupted", ExitCode.INTERRUPTED
        case OSError():
            where = error.filename or "the output"
            return f"{where}: {error.strerror or repr(error)}", ExitCode.MISSING_HERE
        case MemoryError():
            problem = "not enough memory for this trace; look at a part of it (--time)"
            return problem, ExitCode.MISSING_HERE
        case _:
            from gputrace.plugins import blame

            plugin_error = blame(error)
            return (str(plugin_error), plugin_error.exit_code) if plugin_error else None


def _replace_closed_streams() -> None:
    """Replace closed stdout or stderr by /dev/null here; child programs still get it closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))


def _drop_output() -> None:
    """Discard pending output, so that Python does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
