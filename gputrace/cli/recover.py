"""``gputrace recover``: make the trace of an interrupted recording."""

from __future__ import annotations

from pathlib import Path

import click

from gputrace.cli.console import tell
from gputrace.errors import InputError, UsageError


@click.command("recover")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The trace to write.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option("--keep", is_flag=True, help="Keep FOLDER.")
def command(folder: Path, output: Path | None, force: bool, keep: bool) -> None:
    """Make a trace of FOLDER, the NAME.spool that an interrupted recording left."""
    from gputrace.collectors.job import assert_ours, is_recording
    from gputrace.collectors.launch import orphans_of
    from gputrace.collectors.session import can_be_read_meanwhile, finish

    assert_ours(folder)
    if is_recording(folder) and not (keep and can_be_read_meanwhile(folder)):
        hint = "; --keep makes a trace of what is there" if can_be_read_meanwhile(folder) else ""
        raise UsageError(f"{folder}: still being recorded; wait for the program's end{hint}")
    resolved = folder.resolve()
    if not keep and (running := orphans_of(resolved)):
        problem = f"the recording goes on (process {running[0]}); wait for its end, or end it"
        raise InputError(folder, f"{problem}; --keep makes a trace of what is there")
    folder = folder if folder.name == resolved.name else resolved
    target = output or folder.with_name(folder.name.removesuffix(".spool"))
    if resolved in target.resolve().parents:
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
