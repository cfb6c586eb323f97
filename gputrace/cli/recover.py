"""``gputrace recover``: the trace of a recording that was cut short."""

from __future__ import annotations

from pathlib import Path

import click

from gputrace.errors import InputError, UsageError


@click.command("recover")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The trace to write.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option("--keep", is_flag=True, help="Keep FOLDER.")
def command(folder: Path, output: Path | None, force: bool, keep: bool) -> None:
    """Makes a trace of FOLDER, the NAME.spool that a recording left when it was cut short."""
    from gputrace.collectors.record import finish
    from gputrace.collectors.tasks.team import is_recording

    if is_recording(folder):
        raise UsageError(f"{folder}: still being recorded; wait for the program's end")
    target = output or folder.with_name(folder.name.removesuffix(".spool"))
    if target.exists() and not (force and target.is_file()):
        raise UsageError(f"{target}: exists; name another with -o, or give --force")
    try:
        merged = finish(folder, target, keep)
    except OSError as error:
        raise InputError(target, f"cannot be written ({error.strerror})") from error
    click.echo(f"{target}: {merged.kernels:,} kernels of {merged.processes} processes", err=True)
    for note in merged.notes:
        click.echo(f"gputrace: {note}", err=True)
