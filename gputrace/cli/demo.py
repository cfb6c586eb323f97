"""``gputrace demo``, which analyzes a bundled recording and makes one here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.cli import console, options
from gputrace.errors import ExitCode, GputraceError
from gputrace.sanitize import sentence
from gputrace.tools import ask_tool

if TYPE_CHECKING:
    import subprocess

    from gputrace.api import Report


_BUNDLED: Final = """\
The bundled recording: PyTorch DistributedDataParallel, ResNet-50, two H200 GPUs.
Something makes it slower than it should be.
"""
_HERE: Final = """
The same on this machine: a few seconds of training, in a temporary folder that is then removed.

$ gputrace record -- python train.py"""
_YOURS: Final = """
To keep the bundled recording: gputrace demo -o demo.sqlite
Your own: gputrace record -- python train.py, then gputrace analyze trace.sqlite"""


@click.command("demo")
@click.option("--no-record", is_flag=True, help="Only analyze the bundled recording.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Only write the bundled recording to this file, and print its verdict.",
)
@click.option("--force", is_flag=True, help="Replace that file if it exists.")
@options.report_format
def command(form: str, no_record: bool, output: Path | None, force: bool) -> int:
    """Analyze a bundled recording: two H200 GPUs training ResNet-50, slower than they should.

    Then record a small training on this machine (with PyTorch if it is installed, else numpy), and
    analyze that too. The JSON is the bundled recording's; the other one's is in it as "recorded".

    The exit code is 5 if nothing could be recorded.
    """
    if output is not None:
        return _write_demo(output, force)
    import gputrace
    from gputrace.data import unpacked

    with unpacked("demo.sqlite.xz") as path, gputrace.open(path) as opened:
        bundled = opened.analyze()
    if form != "json":
        _explain(_BUNDLED, form)
        options.show(bundled, form)
    recorded, problem = (None, "not asked for") if no_record else _record_here(form)
    if form == "json":
        from gputrace.report import plain, to_json

        both = plain(bundled)
        assert isinstance(both, dict)
        unmade = None if recorded else problem
        click.echo(to_json(both | {"recorded": recorded, "not_recorded": unmade}), nl=False)
    elif recorded is not None:
        click.echo("\nThe recording made here:" if form == "text" else "")
        options.show(recorded, form)
    _explain(_YOURS, form)
    if recorded is not None or no_record:
        return ExitCode.DONE
    console.log(f"nothing was recorded here: {problem}")
    return ExitCode.DONE_IN_PART


def _write_demo(target: Path, force: bool) -> int:
    """Write the bundled recording to a file, and print its verdict."""
    import shutil

    import gputrace
    from gputrace.data import unpacked
    from gputrace.report import check_target, unfinished_file
    from gputrace.report.wording import verdict

    path = check_target(target, (), force)
    with unpacked("demo.sqlite.xz") as recording, unfinished_file(path) as unfinished:
        shutil.copyfile(recording, unfinished)
    console.note(f"wrote {target}")
    with gputrace.open(path) as opened:
        click.echo(sentence(verdict(opened.analyze())))
    console.note(f"next: gputrace analyze {target}")
    return ExitCode.DONE


def _explain(message: str, form: str) -> None:
    """Write an explanation to stderr, unless the output is for programs."""
    if form == "text":
        click.echo(message, err=True)


def _record_here(form: str) -> tuple[Report | None, str]:
    """Record a training here; return its report, or None and the reason."""
    import gputrace
    from gputrace.data import unpacked

    _explain(_HERE, form)
    record = [sys.executable, "-m", "gputrace", "record", "--", sys.executable, "train.py"]
    try:
        with unpacked("train.py") as script:
            ran = ask_tool(record, cwd=script.parent)
            _explain((ran.stdout + ran.stderr).rstrip(), form)
            if ran.returncode:
                return None, why_not(ran)
            _explain("\n$ gputrace analyze trace.sqlite", form)
            with gputrace.open(script.with_name("trace.sqlite")) as opened:
                return opened.analyze(), ""
    except (OSError, GputraceError) as error:
        return None, str(error)


def why_not(ran: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the failed recording or training."""
    ours = ran.returncode == ExitCode.RECORDING_FAILED
    said = filter(None, ran.stderr.splitlines())
    lines = [line for line in said if line.startswith("gputrace: ") == ours]
    last = lines[-1] if lines else f"no message, exit code {ran.returncode}"
    return last.removeprefix("gputrace: ") if ours else f"the training failed: {last}"
