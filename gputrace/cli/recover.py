"""``gputrace recover``: the trace of a recording that was cut short."""

from __future__ import annotations

from pathlib import Path

import click

from gputrace.cli.telling import tell
from gputrace.errors import InputError, UsageError


@click.command("recover")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The trace to write.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option("--keep", is_flag=True, help="Keep FOLDER.")
def command(folder: Path, output: Path | None, force: bool, keep: bool) -> None:
    """Makes a trace of FOLDER, the NAME.spool that a recording left when it was cut short."""
    from gputrace.collectors.program.underway import processes_of
    from gputrace.collectors.record import can_be_read_meanwhile, finish
    from gputrace.collectors.tasks.team import assert_ours, is_recording

    assert_ours(folder)
    if is_recording(folder) and not (keep and can_be_read_meanwhile(folder)):
        told = "; --keep makes a trace of what is there" if can_be_read_meanwhile(folder) else ""
        raise UsageError(f"{folder}: still being recorded; wait for the program's end{told}")
    place = folder.resolve()
    if not keep and (running := processes_of(place)):
        problem = f"the recording goes on (process {running[0]}); wait for its end, or end it"
        raise InputError(folder, f"{problem}; --keep makes a trace of what is there")
    folder = folder if folder.name == place.name else place
    target = output or folder.with_name(folder.name.removesuffix(".spool"))
    if place in target.resolve().parents:
        raise UsageError(f"{target}: lies in what is to be recovered; name another with -o")
    if target.exists() and not (force and target.is_file()):
        raise UsageError(f"{target}: exists; name another with -o, or give --force")
    try:
        merged = finish(folder, target, keep)
    except OSError as error:
        raise InputError(target, f"cannot be written ({error.strerror})") from error
    what = f"{merged.kernels:,} kernels, {merged.steps:,} steps, processes: {merged.processes}"
    for line in (f"{target}: {what}", *merged.notes):
        tell(line)
