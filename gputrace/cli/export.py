"""``gputrace export``: convert a trace for other programs and other people."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar, tell

_SUFFIXES: Final = {"perfetto": ".perfetto.json.gz", "parquet": ".parquet", "csv": ".csv"}


@click.command("export")
@options.traces
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["perfetto", "parquet", "csv", "trace"]),
    help="perfetto: a file for ui.perfetto.dev; parquet, csv: a folder of tables; trace: a smaller "
    "trace of the same kind.",
)
@options.window
@click.option("--redact", is_flag=True, help="Replace names of hosts, users, paths and programs.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file or folder.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@options.keep_going
def command(
    traces: tuple[Path, ...],
    form: str,
    time: str | None,
    redact: bool,
    output: Path | None,
    force: bool,
    keep_going: bool,
) -> int:
    """Write TRACE, or a part of it, in another format.

    TRACE is whatever `gputrace analyze` takes. The input is never changed.
    """
    import gputrace

    suffix = _SUFFIXES.get(form, f".part{traces[0].suffix or '.sqlite'}")
    target = output or options.default_target(traces[0], suffix)
    what = traces[0].name if len(traces) == 1 else f"{len(traces)} traces"
    with (
        gputrace.open(*traces, keep_going=keep_going, windows=time is not None) as opened,
        progress_bar(f"exporting {what}") as progress,
    ):
        opened.export(form, target, time=time, redact=redact, force=force, progress=progress)
        code = options.tell_left_out(opened)
    tell(f"wrote {target}")
    return code
