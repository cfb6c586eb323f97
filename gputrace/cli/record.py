"""``gputrace record``: run a program and record its GPUs and host threads."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.cli import options
from gputrace.cli.console import signals_as_interrupt, tell
from gputrace.errors import ExitCode, GputraceError, MissingError, UsageError
from gputrace.units import format_bytes, format_ns, parse_duration

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gputrace.collectors.backend import Every, Merged, Plan
    from gputrace.collectors.limits import Limits, Size
    from gputrace.collectors.session import Prepared


BACKENDS: Final = ("auto", "cupti", "nsys", "nvprof", "host")
LARGE: Final = 10 * 10**9
LARGE_AT_A_TERMINAL: Final = 10**9
"""Sizes in bytes at which a running recording is reported on stderr."""


def _complete_file(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the program's arguments as files."""
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
    """Run COMMAND and record its GPUs into a trace file.

    The exit code is COMMAND's own; 125 says that the recording failed, 126 that COMMAND cannot be
    run, 127 that it is not found.
    """
    from gputrace.collectors.backend import Plan
    from gputrace.collectors.launch import CannotRun
    from gputrace.collectors.session import prepare

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
    if bound := bound_of(plan):
        _say(bound)
    if terminal is None:
        return _record(prepared)
    from gputrace.cli.live_view import record_live

    return record_live(prepared, terminal, partial(_record, prepared))


def _terminal() -> int:
    """Open the terminal to draw on; raises GputraceError if there is none."""
    from gputrace.collectors.launch.pty_session import open_terminal

    if find_spec("textual") is None:
        raise MissingError("--live needs textual; install it with `pip install textual`")
    return open_terminal()


def _record(prepared: Prepared) -> int:
    from gputrace.collectors.launch import CannotRun
    from gputrace.collectors.session import conclude, record

    has_run = True
    try:
        code = record(prepared, _say, _tell_size, LARGE_AT_A_TERMINAL if _is_ours() else LARGE)
    except CannotRun as error:
        code, has_run = _say(str(error), error.code), False
    except GputraceError as error:
        code, has_run = _say(str(error), ExitCode.RECORDING_FAILED), False
    try:
        with signals_as_interrupt():  # Leaves no partial trace behind.
            merged = conclude(prepared, has_run)
    except (OSError, GputraceError, KeyboardInterrupt, MemoryError, ImportError) as error:
        safe = f"what was recorded is safe: gputrace recover {prepared.folder} -o FILE"
        _say(f"{_problem(error, prepared.plan.output)}; {safe}")
        return code or ExitCode.RECORDING_FAILED
    if merged is not None:
        _tell(merged, prepared.plan.output, prepared.traces)
    return code


def _problem(error: BaseException, output: Path) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"{output}: interrupted while it was made"
    if isinstance(error, MemoryError | ImportError):
        # An ImportError: a library could not be mapped into memory.
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
    """Report a large recording on a line of its own, below what the program has printed."""
    state = f"{size.bytes / 1e9:,.1f} GB recorded in {format_ns(size.elapsed_ns)}"
    line = f"gputrace: {state} ({size.rate / 1e6:,.0f} MB/s); --duration or --steps records less\n"
    if sys.stderr.isatty():
        if not _is_ours():
            return
        line = f"\n{line}"
    with suppress(OSError):
        # One write, so that no other output gets in between.
        os.write(sys.stderr.fileno(), line.encode())


def _is_ours() -> bool:
    """Return whether stderr is a terminal and this is its foreground job."""
    try:
        return sys.stderr.isatty() and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False


def _say(message: str, code: int = 0) -> int:
    tell(message)
    return code


def _times(delay: str, duration: str) -> tuple[int, int]:

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


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])B", re.IGNORECASE)
_SCALES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTOR: Final = re.compile(r"(\d+(?:\.\d+)?)x")
_SHORTEST_NS: Final = 2_000_000_000
_SMALLEST: Final = 10**6
_EXAMPLE_RATE: Final = 10**7
"""Bytes per second."""


def parse_every(text: str | None) -> Every | None:
    """Parse ``1000:10`` (steps) or ``10min:5s`` (times)."""
    from gputrace.collectors.backend import Every

    if text is None:
        return None
    distance, _, length = text.partition(":")
    if distance.isdecimal() and length.isdecimal():
        every = Every(int(distance), int(length), in_steps=True)
    else:
        every = Every(_time(distance, text), _time(length, text), in_steps=False)
    if not 0 < every.length < every.distance:
        raise UsageError(f"--every {text}: the second number is a part of the first, above 0")
    return every


def _time(part: str, text: str) -> int:
    try:
        if part.strip()[-1:].isalpha():
            return parse_duration(part)
    except ValueError:
        pass
    raise UsageError(
        f"--every {text}: write steps, as 1000:10 (10 of each 1,000), or times, as 10min:5s"
    )


def parse_limits(keep: str | None, max_size: str | None) -> Limits:
    """Parse ``--keep``, a ring of ``5min``, or ``--max-size``, ``2GB`` in all."""
    from gputrace.collectors.limits import ring

    if keep is not None and max_size is not None:
        raise UsageError("--keep and --max-size exclude each other: a ring is as large as its time")
    return ring(_keep(keep) if keep is not None else 0, _size(max_size) if max_size else 0)


def _keep(text: str) -> int:
    try:
        time = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from None
    if time < _SHORTEST_NS:
        raise UsageError(f"--keep {text}: 2s is the least that can be kept")
    return time


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--max-size: {text!r} is not a size; write 500MB or 2GB")
    size = int(float(match[1]) * _SCALES[match[2].lower()])
    if size < _SMALLEST:
        raise UsageError(f"--max-size {text}: 1MB is the least")
    return size


def parse_when_slow(text: str | None, keep: str | None) -> float:
    """Parse ``2x``, steps of over twice the usual time; return 0 if not given."""
    if text is None:
        return 0.0
    match = _FACTOR.fullmatch(text.strip())
    if match is None or float(match[1]) <= 1:
        raise UsageError(f"--when-slow: {text!r} says not how slow; write 2x, or more than 1x")
    if keep is None:
        raise UsageError("--when-slow keeps what --keep has of a slow step: give --keep, as 5min")
    return float(match[1])


def check_together(plan: Plan) -> None:
    """Raise UsageError if options of a plan contradict each other."""
    if (every := plan.every) is None:
        return
    others = {
        "--profiler-api": plan.profiler_api,
        "--delay": every.in_steps and plan.delay_ns > 0,
        "--duration": every.in_steps and plan.duration_ns > 0,
        "--steps": not every.in_steps and plan.steps is not None,
    }
    wrong = next((name for name, is_given in others.items() if is_given), None)
    if wrong is not None:
        unit = "steps" if every.in_steps else "times"
        raise UsageError(f"--every in {unit} cannot be told when by {wrong}; leave out one of them")


def bound_of(plan: Plan) -> str:
    """Return a line on what bounds a long recording on disk; empty if nothing does."""
    limits = plan.limits
    if limits.segment_ns:
        longest = limits.longest_ns
        example = format_bytes(longest / 10**9 * _EXAMPLE_RATE)
        return (
            f"keeps the last {format_ns(limits.segment_ns * limits.keep)}: at most "
            f"{format_ns(longest)} are on disk (at 10 MB/s, {example})"
        )
    if limits.max_bytes:
        return f"records {format_bytes(limits.max_bytes)} at most, then the program goes on without"
    return ""
