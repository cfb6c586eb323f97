"""Notebook magic ``%%gputrace``: record a cell and show its report below it.

%load_ext gputrace

%%gputrace [--backend auto|cupti|host] [--gaps N] [-o TRACE]
for batch in loader:
    ...

IPython is not imported: only the shell that loads this extension is needed. An exception in the
cell reaches the notebook with the traceback that it would have without gputrace.
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import Any, Final

from gputrace.api import open as open_trace
from gputrace.collectors.in_process import ProcessRecorder
from gputrace.errors import GputraceError, InputError, MissingError, UsageError
from gputrace.report import check_target
from gputrace.sanitize import message

_HOST_ONLY: Final = "only steps and waits for data are recorded, nothing of the GPUs"


@dataclass(frozen=True, slots=True)
class CellOptions:
    """Options of a cell."""

    backend: str = "auto"
    gaps: int = 50
    output: Path | None = None


def load(shell: Any) -> None:
    """Register the magic; CUDA is recorded only if the process initializes it afterwards."""
    recorder = None if os.environ.get("GPUTRACE_DIR") else ProcessRecorder()
    magic = partial(record_cell, shell, recorder)
    shell.register_magic_function(magic, magic_kind="cell", magic_name="gputrace")


def record_cell(shell: Any, recorder: ProcessRecorder | None, line: str, cell: str) -> None:
    """Run and record a cell, and show its report, even if the cell fails."""
    __tracebackhide__ = True
    if recorder is None:
        _log("not recorded by itself: all of this notebook is, by the `gputrace record` around it")
        run(shell, compile_cell(shell, cell))
        return
    try:
        asked = read_options(line)
        if asked.backend == "cupti" and recorder.obstacle is not None:
            raise MissingError(f"the GPUs cannot be recorded: {recorder.obstacle}")
    except GputraceError as error:
        line = f"gputrace: {error}"
        _show_as(error, lambda: [line])
        raise
    codes = compile_cell(shell, cell)
    recorder.begin(asked.backend != "host")
    try:
        run(shell, codes)
    finally:
        recorder.end()
        _report(shell, recorder, asked)


def read_options(line: str) -> CellOptions:
    """Parse the options after ``%%gputrace``; raises UsageError for anything else."""
    import click

    command = click.Command(
        "gputrace",
        params=[
            click.Option(["--backend"], type=click.Choice(["auto", "cupti", "host"])),
            click.Option(["--gaps"], type=click.IntRange(min=0)),
            click.Option(["-o", "--output"], type=click.Path(path_type=Path)),
        ],
        add_help_option=False,
    )
    try:
        given = command.make_context("%%gputrace", shlex.split(line)).params
    except (click.ClickException, ValueError) as error:
        problem = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise UsageError(
            f"%%gputrace: {problem} (options: --backend auto|cupti|host, --gaps N, -o TRACE)"
        ) from None
    asked = CellOptions(**{name: value for name, value in given.items() if value is not None})
    if asked.output is not None:
        check_target(asked.output, (), force=False)
    return asked


def compile_cell(shell: Any, cell: str) -> list[CodeType]:
    """Compile a cell as the shell would: with IPython syntax, showing a final expression."""
    source = shell.transform_cell(cell)
    # Tracebacks name a cell by its number, which is that of the last input.
    number = len(shell.user_ns.get("In", ())) - 1
    name = shell.compile.cache(source, number, raw_code=cell)
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    codes = [shell.compile(tree, name, "exec")]
    if last:
        codes.append(shell.compile(ast.Interactive(last), name, "single"))
    return codes


def run(shell: Any, codes: Sequence[CodeType]) -> None:
    """Run compiled code in the notebook's namespace."""
    __tracebackhide__ = True
    try:
        for code in codes:
            exec(code, shell.user_global_ns, shell.user_ns)
    except Exception as error:
        show = getattr(getattr(shell, "InteractiveTB", None), "structured_traceback", None)
        ours = error.__traceback__
        if show is not None and ours is not None and ours.tb_next is not None:
            # From the cell on, without the frame of this module.
            _show_as(error, partial(show, type(error), error, ours.tb_next, tb_offset=0))
        raise


def _show_as(error: Exception, lines: Callable[[], list[str]]) -> None:
    """Set the traceback that IPython shows, if the error accepts attributes."""
    with suppress(AttributeError):
        error._render_traceback_ = lines  # type: ignore[attr-defined]


def _report(shell: Any, recorder: ProcessRecorder, asked: CellOptions) -> None:
    """Show the report of the cell, or a line that says why there is none."""
    if recorder.obstacle is not None and asked.backend != "host":
        _log(f"{recorder.obstacle}; {_HOST_ONLY}")
    if recorder.notice:
        _log(recorder.notice)
    try:
        with TemporaryDirectory(prefix="gputrace-") as folder:
            trace = asked.output or Path(folder) / "cell.sqlite"
            merged = recorder.save(trace)
            for note in merged.notes:
                _log(note)
            with open_trace(trace) as opened:
                report = opened.analyze(gaps=asked.gaps)
        data = {"text/plain": str(report), "text/html": report._repr_html_()}
        shell.display_pub.publish(data=data, metadata={})
    except InputError as error:
        _log(f"nothing to report of this cell: {error.problem}")
    except (GputraceError, OSError) as error:
        _log(f"no report of this cell: {error}")


def _log(line: str) -> None:
    sys.stderr.write(f"gputrace: {message(line)}\n")
