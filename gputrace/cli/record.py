"""``gputrace record``, which records a program, and ``gputrace recover`` for one cut short."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cli import options
from gputrace.cli.console import log, log_after_program, note, signals_as_interrupt
from gputrace.errors import ExitCode, GputraceError, InputError, MissingError, UsageError
from gputrace.units import format_bytes, format_count, format_ns, parse_duration

if TYPE_CHECKING:
    from gputrace.collectors.backend import Limits, Merged, Plan, RepeatedWindow
    from gputrace.collectors.session import Prepared, Size


OUTPUT: Final = Path("trace.sqlite")
LARGE: Final = 10 * 10**9
LARGE_AT_A_TERMINAL: Final = 10**9
"""Sizes in bytes at which a running recording is reported on stderr."""


@click.command(
    "record",
    cls=options.Grouped,
    sections={
        "What to record of a long run": "steps delay duration every sample keep when_slow max_size "
        "profiler_api",
        "Expert": "backend api no_nvml no_control graph_nodes hw_trace",
    },
    context_settings={"allow_interspersed_args": False},
)
@options.output(
    "Trace to write; %h is the host, %p the process id, %q{VAR} an environment variable. By "
    "default trace.sqlite, or trace-2.sqlite and so on if that exists."
)
@options.force
@click.option(
    "--python/--no-python",
    default=None,
    help="Sample the program's current line 100 times a second from its start, or never; by "
    "default 20 times a second from the first step.",
)
@click.option("--live", is_flag=True, help="Show steps, GPUs and clocks while COMMAND runs.")
@click.option(
    "--steps",
    metavar="A:B",
    help="Record only training steps A to B-1, e.g. 50:70; the first is 0.",
)
@click.option(
    "--delay", metavar="TIME", default="0", help="Wait this long after CUDA starts, e.g. 30s."
)
@click.option("--duration", metavar="TIME", default="0", help="Stop after this long, e.g. 10s.")
@click.option(
    "--every",
    metavar="N:M",
    help="Record M of every N steps, e.g. 1000:10, or 5s of every 10min as 10min:5s.",
)
@click.option(
    "--sample",
    metavar="SHARE",
    help="Record only some steps, so that the run takes this much longer, e.g. 2%; all records "
    "every step. By default every step, but only some of a long run that recording slows.",
)
@click.option(
    "--keep", metavar="TIME", help="Keep only the last part of the recording on disk, e.g. 5min."
)
@click.option("--when-slow", metavar="2x", help="With --keep: save a trace of every slow step.")
@click.option(
    "--hang",
    metavar="TIME",
    help="After this long without progress, e.g. 60s, report where each rank is, and which one the "
    "others wait for.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Write snapshots of PyTorch's memory at its peak, and when it runs out, next to the "
    "trace; `gputrace analyze` says who holds it.",
)
@click.option("--max-size", metavar="SIZE", help="Stop recording at this size, e.g. 2GB.")
@click.option(
    "--backend",
    type=options.OursOrPlugins(options.BACKENDS, "collectors"),
    default="auto",
    show_default=True,
    help="What records: the embedded CUPTI collector, nsys, nvprof (GPUs before A100), or host "
    "(steps and waits for data only).",
)
@click.option(
    "--api",
    type=click.Choice(["all", "auto", "none"]),
    default="all",
    show_default=True,
    help="CUDA calls to keep; auto: only some steps' if there are very many, to save space.",
)
@click.option(
    "--profiler-api", is_flag=True, help="Record only from cudaProfilerStart to cudaProfilerStop."
)
@click.option(
    "--no-nvml", is_flag=True, help="Do not sample the GPUs' clocks, power and utilization."
)
@click.option(
    "--no-control",
    is_flag=True,
    help="Record every step (the recorder's overhead is then unknown).",
)
@click.option(
    "--graph-nodes",
    is_flag=True,
    help="Record what CUDA graphs run, in a few steps; other replays are assumed to run the same.",
)
@click.option(
    "--hw-trace",
    is_flag=True,
    help="Time kernels by hardware events (Blackwell, CUPTI 13.4 Update 1 and newer; untested).",
)
# The type lets the shell complete arguments as files.
@click.argument("command", nargs=-1, type=click.Path(readable=False), required=True)
def command(command: tuple[str, ...], live: bool, force: bool, **given: Any) -> int:
    """Run COMMAND and record its GPUs into a trace file.

    The exit code is COMMAND's own, or 125 if the recording failed, 126 if COMMAND cannot be run,
    127 if it is not found.
    """
    from gputrace.collectors.launch import CannotRun
    from gputrace.collectors.session import prepare, unused

    output = given["output"]
    try:
        if output is None:
            given["output"] = OUTPUT if force else unused(OUTPUT, command)
        plan = _plan(given)
        terminal = None
        if live:
            from gputrace.collectors.launch.pty_session import open_terminal

            if find_spec("textual") is None:
                raise MissingError("--live needs textual; install it with `pip install textual`")
            terminal = open_terminal()
        prepared = prepare(plan, command, force)
    except CannotRun as error:
        return _fail(str(error), error.code)
    except GputraceError as error:
        return _fail(str(error), ExitCode.RECORDING_FAILED)
    except OSError as error:
        at = error.filename or given["output"]
        return _fail(f"{at}: {error.strerror}", ExitCode.RECORDING_FAILED)
    if output is None and plan.output != OUTPUT:
        note(f"{OUTPUT} exists: records into {plan.output}")
    if bound := _bound(plan.limits):
        note(bound)
    if terminal is None:
        return _record(prepared)
    from gputrace.cli.record_live import record_live

    return record_live(prepared, terminal, partial(_record, prepared))


def _record(prepared: Prepared) -> int:
    from gputrace.collectors.launch import CannotRun, block_late_signals
    from gputrace.collectors.session import record

    has_run = True
    try:
        size = LARGE_AT_A_TERMINAL if _is_ours() else LARGE
        code = record(prepared, _fail, _log_size, size, _explain_hang)
    except CannotRun as error:
        code, has_run = _fail(str(error), error.code), False
    except GputraceError as error:
        code, has_run = _fail(str(error), ExitCode.RECORDING_FAILED), False
    block_late_signals()
    if has_run:
        log_after_program()
    made = _conclude(prepared, has_run, failed=code != 0)
    return code or made


def _explain_hang(report: Path) -> list[str]:
    import json

    from gputrace.analyzers.hang_causes import find_cause
    from gputrace.readers.flight_recorder import read_ranks

    ranks = read_ranks([report])
    dumps = map(Path, json.loads(report.read_text())["flight_recorder"])
    with suppress(InputError):  # One may still be written to.
        ranks += read_ranks(dumps)
    return [find_cause(ranks).message]


def _conclude(prepared: Prepared, has_run: bool, *, failed: bool) -> int:
    """Make the trace and report on it; return the exit code if the program's own is 0.

    ``failed`` says that the program's own is another.
    """
    from gputrace.collectors.job_tasks import is_ours
    from gputrace.collectors.session import conclude

    output = prepared.plan.output
    try:
        with signals_as_interrupt():  # Leaves no partial trace behind.
            merged = conclude(prepared, has_run)
    except KeyboardInterrupt:
        problem = f"{output}: interrupted while it was made"
    except ModuleNotFoundError as error:
        problem = f"{output}: cannot be made, {error.name} is not installed for {sys.executable}"
    except (MemoryError, ImportError):
        # An ImportError: a library could not be mapped into memory.
        problem = f"{output}: not enough memory to make it"
    except OSError as error:
        problem = f"{output}: cannot be written ({error.strerror})"
    except GputraceError as error:
        problem = str(error)
    else:
        if merged is not None:
            log_merged(merged, output, prepared.traces, failed=failed)
        for path in sorted(output.parent.glob(f"{output.stem}.*.pickle")):
            if prepared.plan.memory:
                note(f"who holds the memory: gputrace analyze {path}")
        return ExitCode.DONE
    if is_ours(prepared.folder):
        safe = f"what was recorded is safe: gputrace recover {prepared.folder} -o FILE"
        log(f"{problem}; {safe}")
    else:
        gone = "it was removed or moved while the program ran"
        log(f"what was recorded is no longer in {prepared.folder}: {gone}")
    return ExitCode.RECORDING_FAILED


def _counts(merged: Merged) -> str:
    kernels, steps = format_count(merged.kernels, "kernel"), format_count(merged.steps, "step")
    # One that left nothing has run all the same.
    processes = f", processes: {merged.processes}" if merged.processes else ""
    return f"{kernels}, {steps}{processes}"


_LEAST_STEPS: Final = 2
"""Marks of steps that an analysis needs where no GPU was seen: from one to the next is a step."""


def log_merged(merged: Merged, output: Path, traces: str, *, failed: bool) -> None:
    """Report on a trace that was made; ``failed`` says that the program has ended with an error."""
    size = output.stat().st_size / 1e6
    for line in (f"{output}: {_counts(merged)}, {size:,.1f} MB", *merged.notes):
        note(line)
    if merged.cut:
        lost = "what they had not written, a second at most where the disk took it, is missing"
        log(f"{merged.cut} ended without warning; {lost}")
    if merged.unreached:
        log(merged.unreached)
    has_more, has_lines = merged.kernels or merged.steps >= _LEAST_STEPS, "lines" in merged.of_host
    if has_more or has_lines:
        note(f"next: gputrace analyze {traces}")
    if has_more or merged.unreached or (failed and has_lines):
        return
    if failed:
        lacks = "; if it lacks the module gputrace, install that into its Python, too"
        problem = "the program failed before its second step: there is nothing to analyze yet"
        log(problem if merged.processes else f"{problem}{lacks}")
        return
    seen = "only one step was" if merged.steps else "no steps were"
    lines = (
        "`gputrace record --python` names the lines of a Python program as it is; for the steps, "
    )
    log(
        f"{seen} seen: {'' if has_lines else lines}`import gputrace` and call gputrace.step() at "
        "the end of each, or wrap each in `with gputrace.step():`, and what makes its batches in "
        "`with gputrace.annotate('data'):`, and record again"
    )


def _log_size(size: Size) -> None:
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


def _fail(message: str, code: int = 0) -> int:
    log(message)
    return code


_Parsed = TypeVar("_Parsed")

_AS_GIVEN: Final = ("output", "backend", "python", "api", "profiler_api", "hw_trace", "memory")
"""Options that a `Plan` takes as they are."""
_NODE_STEPS: Final = 4
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])B", re.IGNORECASE)
_SCALES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTOR: Final = re.compile(r"(\d+(?:\.\d+)?)x")


def _plan(given: Mapping[str, Any]) -> Plan:
    """Parse the options; raises UsageError if one is invalid, or they contradict each other."""
    from gputrace.collectors.backend import Plan

    def parse(option: str, parser: Callable[[str], _Parsed]) -> _Parsed | None:
        return None if given[option] is None else parser(given[option])

    delay_ns, duration_ns = map(options.read_duration, (given["delay"], given["duration"]))
    if min(delay_ns, duration_ns) < 0:
        raise UsageError("--delay and --duration cannot be negative")
    windows = {
        "--profiler-api": given["profiler_api"],
        "--delay": delay_ns,
        "--duration": duration_ns,
        "--steps": given["steps"],
        "--every": given["every"],
    }
    chosen = [name for name, value in windows.items() if value]
    keep = given["keep"]
    plan = Plan(
        **{name: given[name] for name in _AS_GIVEN},
        delay_ns=delay_ns,
        duration_ns=duration_ns,
        steps=parse("steps", _steps),
        every=parse("every", _every),
        limits=_limits(keep, given["max_size"]),
        sample=parse("sample", _share),
        nvml=not given["no_nvml"],
        # A window that a person chose is theirs.
        control=not (given["no_control"] or chosen or keep),
        graph_nodes=_NODE_STEPS * given["graph_nodes"],
        when_slow=parse("when_slow", partial(_when_slow, keep=keep)) or 0.0,
        hang_ns=parse("hang", _hang) or 0,
    )
    _check_windows(plan, chosen)
    if plan.sample and (chosen or given["no_control"]):
        wrong = [*chosen, "--no-control"]
        raise UsageError(f"--sample chooses the steps itself; leave out {wrong[0]}")
    return plan


def _check_windows(plan: Plan, chosen: Sequence[str]) -> None:
    """Raise UsageError if another of the chosen options contradicts ``--every``."""
    if plan.every is None:
        return
    unit, others = "times", ["--profiler-api", "--steps"]
    if plan.every.in_steps:
        unit, others = "steps", ["--profiler-api", "--delay", "--duration"]
    if wrong := next((name for name in chosen if name in others), ""):
        both = f"--every in {unit} cannot be combined with {wrong}"
        raise UsageError(f"{both}; leave out one of them")


def _share(text: str) -> float:
    if text == "all":
        return 0.0
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"--sample {text!r} is not a share of the time; write 2%, 0.02 or all")
    return share


def _steps(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise UsageError(f"{text!r} does not name steps; write FIRST:END, e.g. 20:40")
    return int(first), int(end)


def _every(text: str) -> RepeatedWindow:
    """Parse ``1000:10`` (steps) or ``10min:5s`` (times)."""
    from gputrace.collectors.backend import RepeatedWindow

    parts = (distance, _, length) = text.partition(":")
    if distance.isdecimal() and length.isdecimal():
        every = RepeatedWindow(int(distance), int(length), in_steps=True)
    else:
        try:
            if not all(part.strip()[-1:].isalpha() for part in parts[::2]):
                raise ValueError
            every = RepeatedWindow(parse_duration(distance), parse_duration(length), in_steps=False)
        except ValueError:
            steps = "steps, e.g. 1000:10 (10 of every 1,000)"
            raise UsageError(f"--every {text}: write {steps}, or times, e.g. 10min:5s") from None
    if not 0 < every.length < every.distance:
        raise UsageError(f"--every {text}: the second number must be above 0 and below the first")
    return every


def _limits(keep: str | None, max_size: str | None) -> Limits:
    """Parse ``--keep``, a ring of ``5min``, or ``--max-size``, ``2GB`` in all."""
    from gputrace.collectors.backend import ring

    if keep is not None and max_size is not None:
        raise UsageError("--keep and --max-size exclude each other; leave out one of them")
    if keep is not None:
        kept_ns = options.read_duration(keep, "--keep: ")
        if kept_ns < 2 * 10**9:
            raise UsageError(f"--keep {keep}: 2s is the minimum")
        return ring(kept_ns, 0)
    if not max_size:
        return ring(0, 0)
    match = _SIZE.fullmatch(max_size.strip())
    if match is None:
        raise UsageError(f"--max-size: {max_size!r} is not a size; write 500MB or 2GB")
    size = int(float(match[1]) * _SCALES[match[2].lower()])
    if size < 10**6:
        raise UsageError(f"--max-size {max_size}: 1MB is the minimum")
    return ring(0, size)


def _hang(text: str) -> int:
    """Parse ``60s``."""
    length = options.read_duration(text, "--hang: ")
    if length < 10**9:
        raise UsageError(f"--hang {text}: 1s is the minimum")
    return length


def _when_slow(text: str, keep: str | None) -> float:
    """Parse ``2x``, steps of over twice the usual time."""
    match = _FACTOR.fullmatch(text.strip())
    if match is None or float(match[1]) <= 1:
        raise UsageError(f"--when-slow: {text!r} is not a factor above 1; write 2x")
    if keep is None:
        raise UsageError("--when-slow needs --keep, e.g. --keep 5min")
    return float(match[1])


def _bound(limits: Limits) -> str:
    """Return a line on what bounds a long recording on disk; empty if nothing does."""
    if limits.segment_ns:
        longest = limits.longest_ns
        return (
            f"keeps the last {format_ns(limits.kept_ns)}: at most {format_ns(longest)} are on disk "
            f"(at 10 MB/s, {format_bytes(longest / 10**9 * 10**7)})"
        )
    if limits.max_bytes:
        most = format_bytes(limits.max_bytes)
        return f"records {most} at most, then the program continues unrecorded"
    return ""


@click.command("recover")
@click.argument("folder", type=click.Path(path_type=Path))
@options.output("Trace to write.")
@options.force
@click.option("--keep", is_flag=True, help="Do not remove FOLDER afterwards.")
def recover(folder: Path, output: Path | None, force: bool, keep: bool) -> None:
    """Make a trace of FOLDER, the NAME.spool left by an interrupted recording."""
    from gputrace.collectors.job_tasks import assert_ours, is_recording
    from gputrace.collectors.processes import orphans_of
    from gputrace.collectors.session import can_be_read_meanwhile, finish

    assert_ours(folder)
    if is_recording(folder) and not (keep and can_be_read_meanwhile(folder)):
        hint = "; --keep makes a trace of what is there" if can_be_read_meanwhile(folder) else ""
        raise UsageError(f"{folder}: still being recorded; wait for the program's end{hint}")
    resolved = folder.resolve()
    if not keep and (running := orphans_of(resolved)):
        problem = f"still recording (process {running[0]}); wait for it to end, or end it"
        raise InputError(folder, f"{problem}; --keep makes a trace of what is there")
    folder = folder if folder.name == resolved.name else resolved
    target = output or folder.with_name(folder.name.removesuffix(".spool"))
    if resolved in target.resolve().parents:
        raise UsageError(f"{target}: lies in the folder to recover; name another with -o")
    if target.exists() and not (force and target.is_file()):
        raise UsageError(f"{target}: exists; name another with -o, or give --force")
    try:
        merged = finish(folder, target, keep)
    except OSError as error:
        raise InputError(target, f"cannot be written ({error.strerror})") from error
    for line in (f"{target}: {_counts(merged)}", *merged.notes):
        note(line)
