"""``gputrace record``: runs a program and records what its GPUs and host threads do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.cli import options
from gputrace.cli.long_runs import (
    bound_of,
    check_together,
    parse_every,
    parse_limits,
    parse_when_slow,
)
from gputrace.cli.telling import tell
from gputrace.errors import ExitCode, GputraceError, MissingError, UsageError
from gputrace.units import format_ns

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gputrace.collectors.backend import Merged
    from gputrace.collectors.growth import Size
    from gputrace.collectors.prepare import Prepared

BACKENDS: Final = ("auto", "cupti", "nsys", "nvprof", "host")
LARGE: Final = 10 * 10**9
LARGE_AT_A_TERMINAL: Final = 10**9
"""Bytes from which on a recording's size is worth a line while the program runs."""


def _complete_file(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Has the shell complete the program's own words, as far as they are files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


@click.command("record", context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("trace.sqlite"),
    show_default=True,
    help="The trace to write; %h is the host, %p the process id, %q{VAR} a variable.",
)
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--backend",
    type=options.OursOrPlugins(BACKENDS, "collectors"),
    default="auto",
    show_default=True,
    help="What records: the embedded CUPTI collector, nsys, nvprof (GPUs before A100), or the "
    "host's signals alone.",
)
@click.option("--delay", metavar="TIME", default="0", help="Start so long after CUDA, as 30s.")
@click.option("--duration", metavar="TIME", default="0", help="Record only so long, as 10s.")
@click.option("--steps", metavar="A:B", help="Record only these training steps, from 0, without B.")
@click.option(
    "--every",
    metavar="N:M",
    help="Record M of each N steps, as 1000:10, or so long of each time, as 10min:5s.",
)
@click.option(
    "--keep",
    metavar="TIME",
    help="Keep only the last stretch of the recording on disk, as 5min.",
)
@click.option("--when-slow", metavar="2x", help="Also a trace of what --keep has of slow steps.")
@click.option("--max-size", metavar="SIZE", help="Stop recording at so many bytes, as 2GB.")
@click.option(
    "--api",
    type=click.Choice(["all", "auto", "none"]),
    default="all",
    show_default=True,
    help="CUDA calls to keep: auto those of some steps where there are too many, to save room.",
)
@click.option("--profiler-api", is_flag=True, help="Record from cudaProfilerStart to Stop.")
@click.option("--no-nvml", is_flag=True, help="Do not sample clocks, power and use of the GPUs.")
@click.option("--python", is_flag=True, help="Sample which line of the program the host is at.")
@click.option("--live", is_flag=True, help="Show steps, GPUs and clocks while COMMAND runs.")
@click.argument(
    "command", nargs=-1, type=click.UNPROCESSED, required=True, shell_complete=_complete_file
)
def command(
    output: Path,
    force: bool,
    backend: str,
    delay: str,
    duration: str,
    steps: str | None,
    every: str | None,
    keep: str | None,
    when_slow: str | None,
    max_size: str | None,
    api: str,
    profiler_api: bool,
    no_nvml: bool,
    python: bool,
    live: bool,
    command: tuple[str, ...],
) -> int:
    """Runs COMMAND and records its GPUs into a trace file.

    The exit code is COMMAND's own; 125 says that the recording failed, 126 that COMMAND cannot be
    run, 127 that it is not found.
    """
    from gputrace.collectors.backend import Plan
    from gputrace.collectors.prepare import prepare
    from gputrace.collectors.program.child import CannotRun

    try:
        times = _times(delay, duration)
        plan = Plan(
            output,
            backend,
            *times,
            _steps(steps),
            profiler_api,
            nvml=not no_nvml,
            python=python,
            every=parse_every(every),
            limits=parse_limits(keep, max_size),
            api=api,
            when_slow=parse_when_slow(when_slow, keep),
        )
        check_together(plan)
        terminal = _terminal() if live else None
        prepared = prepare(plan, command, force)
    except CannotRun as error:
        return _say(str(error), error.code)
    except GputraceError as error:
        return _say(str(error), ExitCode.RECORDING_FAILED)
    except OSError as error:
        return _say(f"{error.filename or output}: {error.strerror}", ExitCode.RECORDING_FAILED)
    if told := bound_of(plan):
        _say(told)
    if terminal is None:
        return _record(prepared)
    from gputrace.cli.live import record_live

    return record_live(prepared, terminal, partial(_record, prepared))


def _terminal() -> int:
    """The terminal to draw on; raises GputraceError where that cannot be."""
    from gputrace.collectors.program.aside import open_terminal

    if find_spec("textual") is None:
        raise MissingError("--live needs textual; install it with `pip install textual`")
    return open_terminal()


def _record(prepared: Prepared) -> int:
    from gputrace.collectors.program.child import CannotRun
    from gputrace.collectors.record import conclude, record

    has_run = True
    try:
        code = record(prepared, _say, _tell_size, LARGE_AT_A_TERMINAL if _is_ours() else LARGE)
    except CannotRun as error:
        code, has_run = _say(str(error), error.code), False
    except GputraceError as error:
        code, has_run = _say(str(error), ExitCode.RECORDING_FAILED), False
    try:
        with _interrupted_by_all():
            merged = conclude(prepared, has_run)
    except (OSError, GputraceError, KeyboardInterrupt, MemoryError, ImportError) as error:
        safe = f"what was recorded is safe: gputrace recover {prepared.folder} -o FILE"
        _say(f"{_problem(error, prepared.plan.output)}; {safe}")
        return code or ExitCode.RECORDING_FAILED
    if merged is not None:
        _tell(merged, prepared.plan.output, prepared.traces)
    return code


@contextmanager
def _interrupted_by_all() -> Iterator[None]:
    """Signals that ask us to end interrupt the making of the trace: nothing half-made stays."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _problem(error: BaseException, output: Path) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"{output}: interrupted while it was made"
    if isinstance(error, MemoryError | ImportError):
        # A library that cannot be mapped is an ImportError.
        return f"{output}: not enough memory to make it"
    if isinstance(error, OSError):
        return f"{output}: cannot be written ({error.strerror})"
    return str(error)


def _tell(merged: Merged, output: Path, traces: str) -> None:
    size = output.stat().st_size / 1e6
    what = f"{merged.kernels:,} kernels, {merged.steps:,} steps, processes: {merged.processes}"
    _say(f"{output}: {what}, {size:,.1f} MB")
    for note in merged.notes:
        _say(note)
    if merged.cut:
        what = "what they had not written, a second at most where the disk took it, is missing"
        _say(f"{merged.cut} ended without warning; {what}")
    if merged.kernels or merged.steps:
        _say(f"next: gputrace analyze {traces}")


def _tell_size(size: Size) -> None:
    """A line of its own: what the program has on the last line of a terminal is left as it is."""
    told = f"{size.bytes / 1e9:,.1f} GB recorded in {format_ns(size.elapsed_ns)}"
    line = f"gputrace: {told} ({size.rate / 1e6:,.0f} MB/s); --duration or --steps records less\n"
    if sys.stderr.isatty():
        if not _is_ours():
            return
        line = f"\n{line}"
    with suppress(OSError):
        # In one piece, so that no other's text gets in between.
        os.write(sys.stderr.fileno(), line.encode())


def _is_ours() -> bool:
    """Whether stderr is a terminal that shows us, not a job in the background."""
    try:
        return sys.stderr.isatty() and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False


def _say(message: str, code: int = 0) -> int:
    tell(message)
    return code


def _times(delay: str, duration: str) -> tuple[int, int]:
    from gputrace.units import parse_duration

    try:
        times = parse_duration(delay), parse_duration(duration)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if min(times) < 0:
        raise UsageError("--delay and --duration cannot be negative")
    return times


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise UsageError(f"{text!r} does not name steps; write FIRST:END, as 20:40")
    return int(first), int(end)
