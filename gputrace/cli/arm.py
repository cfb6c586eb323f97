"""``gputrace arm``, which starts a program that can be recorded at any time, and its commands."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gputrace.cli import options
from gputrace.cli.console import log, note
from gputrace.cli.record import OUTPUT, log_merged
from gputrace.errors import ExitCode, GputraceError, InputError, UsageError
from gputrace.sanitize import clean

if TYPE_CHECKING:
    from gputrace.collectors.armed import ArmedProcess

_DEFAULT_STEPS = 50


@click.command("arm", context_settings={"allow_interspersed_args": False})
@click.option(
    "--env", is_flag=True, help="Print the environment that arms programs, as shell commands."
)
@click.argument("command", nargs=-1, type=click.Path(readable=False))
def arm(command: tuple[str, ...], env: bool) -> int:
    """Run COMMAND so that `gputrace on` can record it at any time; until then nothing is recorded.

    COMMAND takes the place of this process. The exit code is 125 if it cannot be armed, 126 if it
    cannot be run, 127 if it is not found.
    """
    from gputrace.collectors.armed import arming
    from gputrace.collectors.launch import PYTHONS, CannotRun, find_program, start_program
    from gputrace.collectors.session import keep_hooks

    if bool(command) == env:
        raise click.UsageError("give COMMAND, or --env")
    try:
        environment = arming(os.environ)
        if env:
            for name, value in sorted(environment.items()):
                if os.environ.get(name) != value:
                    click.echo(f"export {name}={shlex.quote(value)}")
            return ExitCode.DONE
        program = find_program(command[0])
    except CannotRun as error:
        log(str(error))
        return error.code
    except (GputraceError, OSError) as error:
        log(str(error))
        return ExitCode.RECORDING_FAILED
    words = keep_hooks(command)
    sys.stdout.flush()
    for number in PYTHONS:
        signal.signal(number, signal.SIG_DFL)
    try:
        return start_program(
            lambda path, given: os.execve(path, given, environment), program, words
        )
    except CannotRun as error:
        log(str(error))
        return error.code


_target = click.argument("target", metavar="[PID|JOB]", required=False)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("on")
@click.option(
    "--steps",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help=f"Record N training steps, the same on all ranks; {_DEFAULT_STEPS} by default.",
)
@click.option(
    "--at",
    type=click.IntRange(0),
    metavar="STEP",
    help="Begin at this step, e.g. on several machines; by default at the next that all can.",
)
@click.option(
    "--duration",
    metavar="TIME",
    help="Record for a time, e.g. 5s, instead: of programs whose steps are not known.",
)
@options.output("Trace to write; by default trace.sqlite, or trace-2.sqlite and so on.")
@options.force
@_target
def on(
    target: str | None,
    steps: int | None,
    at: int | None,
    duration: str | None,
    output: Path | None,
    force: bool,
) -> int:
    """Record some steps of a running job under `gputrace arm`, on all its ranks, into a trace.

    Ctrl+C ends the recording early. The lines that the program is at are sampled 20 times a second:
    record more steps (--steps 500) for more samples. The job is that of a process, or has a name
    that `gputrace list` shows; it need not be given where there is one.
    """
    from gputrace.collectors.armed import KEPT_NS, Window, find, record, select
    from gputrace.collectors.job_tasks import name_output
    from gputrace.collectors.session import unused

    if duration is not None and (steps or at is not None):
        raise UsageError("--duration counts no steps: leave out --steps and --at, or --duration")
    length = 0 if duration is None else options.read_duration(duration)
    if duration is not None and not 0 < length <= KEPT_NS:
        raise UsageError(f"--duration {duration}: from 1ms to {KEPT_NS // 10**9} s")
    members = select(target, find())
    if duration is None and not any(member.step for member in members):
        raise UsageError("no step of a training was seen so far: give --duration, e.g. 5s")
    window = Window(0 if duration else steps or _DEFAULT_STEPS, at, length)
    output = output or (OUTPUT if force else unused(OUTPUT, ("gputrace",)))
    output = name_output(
        str(output), None, ("gputrace",), os.environ, socket.gethostname(), os.getpid()
    ).path
    try:
        merged = record(members, window, output, force, note)
    except OSError as error:
        raise InputError(output, f"cannot be written ({error.strerror})") from error
    log_merged(merged, output, str(output), failed=False)
    if merged.steps:
        note("in the trace, the first of these steps is step 0")
    return ExitCode.DONE


@click.command("off")
@_target
def off(target: str | None) -> None:
    """End the recording that `gputrace on` has under way in a job, which makes its trace then."""
    from gputrace.collectors.armed import find, select, stop

    members = select(target, find())
    ended = stop(members)
    if not ended:
        begin = "`gputrace on` begins one"
        raise UsageError(f"no recording is under way in job {members[0].job}; {begin}")
    note(f"ended the recording in {ended} of {len(members)} processes")


@click.command("status")
@_json
@_target
def status(target: str | None, as_json: bool) -> None:
    """Show the steps of each rank of an armed job, and whether it is being recorded.

    The state is cold (not recording), waiting (for a window's first step), recording or silent.
    Of a program without steps, `gputrace on --duration 5s` records the lines that it is at.
    """
    from gputrace.collectors.armed import find, select

    _show(select(target, find()), as_json)


@click.command("list")
@_json
def list_(as_json: bool) -> None:
    """List the armed processes of this user on this machine.

    rank: as RANK or a launcher's variable says, else LOCAL_RANK, - without one (rank 0 in a trace);
    step: how many have ended, "none yet" if none was marked so far; gpu: ready, unstarted (the
    process uses no GPU yet), or none (no NVIDIA driver: only the host is recorded).
    """
    from gputrace.collectors.armed import find

    found = find()
    if not found and not as_json:
        note("no armed process on this machine; start one with `gputrace arm -- COMMAND`")
    _show(found, as_json)


def _show(processes: Sequence[ArmedProcess], as_json: bool) -> None:
    """Print a row for each process, or a JSON array of objects."""
    if as_json:
        import json

        click.echo(json.dumps([process.to_json() for process in processes], indent=2))
        return
    names = ("job", "pid", "rank", "step", "state", "gpu", "command")
    if not processes:
        return
    found = [process.to_json() | {"step": process.step or "none yet"} for process in processes]
    rows = [[row[name] for name in names] for row in found]
    table = [list(names), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(names) - 1)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo(clean("  ".join([*cells, row[-1]]))[: options.width()].rstrip())
