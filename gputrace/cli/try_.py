"""``gputrace try``: apply cures to a program, measure what each brings, and keep a ledger."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

import click

from gputrace.cli import options
from gputrace.cli.console import log, progress_bar, signals_as_interrupt
from gputrace.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from gputrace.trials.history import Request
    from gputrace.trials.outcome import Outcome
    from gputrace.trials.patch import Patch
    from gputrace.trials.trial import Progress

_STEPS: Final = click.IntRange(min=5)
_LABEL: Final = 30
"""Most characters of what a run is, beside the bar."""


@click.command(
    "try",
    cls=options.WithProgram,
    sections={
        "What becomes of the best set": "diff apply_",
        "Without running anything": "list_ history export",
        "Expert": "steps warmup recording keep_recording workdir keep_trackers ledger",
    },
)
@click.option("--budget", default="10min", show_default=True, metavar="TIME", help="Time to spend.")
@click.option("--steps", type=_STEPS, help="Steps to measure in each run.")
@click.option("--warmup", type=click.IntRange(min=1), help="Steps to skip first in each run.")
@click.option(
    "--recording",
    type=options.UNCHECKED,
    metavar="TRACE",
    help="Take the verdict and the predictions from this trace instead of recording one.",
)
@click.option(
    "--keep-recording",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TRACE",
    help="Save the recording that the verdict and the predictions come from.",
)
@click.option(
    "--workdir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Give each run a copy of this folder to work in.",
)
@click.option("--keep-trackers", is_flag=True, help="Let the runs log to W&B and TensorBoard.")
@click.option("--diff", is_flag=True, help="Print the best set as a unified diff of the program.")
@click.option("--apply", "apply_", is_flag=True, help="Write the best set into the program.")
@click.option("--list", "list_", is_flag=True, help="List what can be tried.")
@click.option(
    "--history", is_flag=True, help="Show the ledger of earlier trials, of COMMAND if given."
)
@click.option(
    "--export",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CSV",
    help="Write predicted and measured steps from the ledger.",
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Ledger of all trials; by default the one in your data folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("cures", metavar="[CURES] -- COMMAND...", nargs=-1)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    cures: tuple[str, ...],
    list_: bool,
    history: bool,
    export: Path | None,
    diff: bool,
    apply_: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Apply cures to COMMAND, and measure what each gains.

    CURES are separated by commas or blanks; those joined by + are tried together:
    workers=8,pinned+fused. COMMAND is recorded once; without CURES, those of the causes that take
    most of its steps are tried. Each run is stopped after some steps. The program is not changed
    unless --apply is given.

    The exit code is 1 if nothing that was tried makes it faster.
    """
    if list_:
        return _list(as_json)
    if history or export:
        return _history(given["ledger"], ctx.meta[options.PROGRAM], export, as_json)
    if not ctx.meta[options.PROGRAM]:
        raise UsageError("name the program after --: gputrace try workers=8 -- python train.py")
    request = _request(cures, ctx.meta[options.PROGRAM], given)
    if request.workdir is None:
        from gputrace.collectors.launch import CannotRun, find_program

        try:
            find_program(request.command[0])
        except CannotRun as error:
            raise UsageError(str(error)) from None
        log(
            "each run executes your program in this folder and rewrites its outputs; "
            "use --workdir . to run in copies"
        )
    with signals_as_interrupt(), _progress() as progress:
        from gputrace.trials.trial import Trial

        outcome = Trial(request, progress).run()
    if as_json:
        from gputrace.trials.outcome import render_json

        click.echo(render_json(outcome), nl=False)
    else:
        click.echo(_text(outcome, diff, apply_), nl=False, color=True)
    if apply_:
        _apply(outcome.patch)
    if outcome.interrupted:
        log("interrupted; results so far are shown")
        return ExitCode.INTERRUPTED
    faster = any(row.verdict == "faster" for row in outcome.rows)
    return ExitCode.DONE if faster else ExitCode.GATE_NOT_MET


def _apply(patch: Patch | None) -> None:
    """Write the changes, and log which files, or why none."""
    from gputrace.trials.patch import apply

    if patch is None:
        log("wrote nothing: nothing is proven to be faster")
        return
    apply(patch)
    for edit in patch.edits:
        log(f"wrote {edit.path}")
    if patch.by_hand:
        log(f"{'more' if patch.edits else 'wrote nothing: all of it'} is to be done by hand")


def _request(cures: Sequence[str], program: tuple[str, ...], given: dict[str, Any]) -> Request:
    from gputrace.trials.cures import read_candidates
    from gputrace.trials.history import Request

    budget = options.read_duration(given["budget"], "--budget: ") / 1e9
    kept: Path | None = given["keep_recording"]
    if kept is not None and given["recording"] is not None:
        raise UsageError("--keep-recording: with --recording, no recording is made")
    if kept is not None and kept.exists():
        raise UsageError(f"--keep-recording: {kept} is there already; name another")
    candidates = tuple(read_candidates(",".join(cures)))
    if cures and not candidates:
        raise UsageError("name a cure, or leave out the commas; gputrace try --list lists them all")
    return Request(
        program,
        candidates or None,
        given["recording"],
        budget,
        given["warmup"],
        given["steps"],
        given["workdir"],
        given["keep_trackers"],
        given["ledger"],
        given["keep_recording"],
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield what shows the time spent, and the run or what cures gain so far, as a bar at a
    terminal, and else as a line for each run.
    """
    with progress_bar("trying") as bar:
        last = 0

        def show(run: int, label: str, spent: float, budget: float, gains: str) -> None:
            nonlocal last
            if bar is not None:
                what = shorten(gains or f"run {run}, {label}", _LABEL, placeholder=" …")
                bar(round(spent), round(budget), what)
            elif run > last:
                so_far = f"; so far {gains}" if gains else ""
                log(f"run {run}, {label}; {spent:.0f} of {budget:.0f} s{so_far}")
            last = run

        yield show


def _text(outcome: Outcome, diff: bool, apply_: bool) -> str:
    """Render the answers as a table, the best set, and what is to be changed for it."""
    from gputrace.report import text
    from gputrace.trials.outcome import document

    width, patch = options.width(), outcome.patch
    report = document(outcome, text.limits(width), with_diff=diff, applied=apply_)
    shown = text.render(report, width, options.use_color())
    return f"{shown}\n{patch.diff}" if diff and patch is not None and patch.edits else shown


def _list(as_json: bool) -> int:
    from gputrace.trials.cures import all_cures

    cures = all_cures().values()
    if as_json:
        from gputrace.report import to_json

        told = ("id", "what", "frameworks", "takes", "value", "numerics", "findings", "predictions")
        rows = [
            {name: getattr(cure, name) for name in told}
            | {"how": "environment" if cure.variables else "hook"}
            for cure in cures
        ]
        click.echo(to_json(rows), nl=False)
        return ExitCode.DONE
    for cure in cures:
        takes = f"={cure.takes}" if cure.takes else ""
        frameworks = ", ".join(cure.frameworks) or "any"
        numerics = "; changes numerics" if cure.numerics else ""
        default = f"; {cure.value} if no value is given" if takes and cure.value is not None else ""
        click.echo(f"{cure.id + takes}\n    {cure.what}{default} [{frameworks}{numerics}]")
        if cure.findings:
            click.echo(f"    for {', '.join(cure.findings)}")
    return ExitCode.DONE


def _history(
    path: Path | None, program: tuple[str, ...], export: Path | None, as_json: bool
) -> int:
    """Show the ledger, or its part on a program, and how far predictions were off, by cure; or
    write what they are calibrated by.
    """
    from gputrace.collectors.masking import masked
    from gputrace.report import text, to_json
    from gputrace.trials import ledger
    from gputrace.trials.outcome import history

    path = path or ledger.default_ledger()
    entries = ledger.read(path)
    if program:
        name = shlex.join(masked(program))
        entries = [entry for entry in entries if entry.program == name]
    if export is not None:
        log(f"wrote {ledger.export(export, entries)} predictions to {export}")
        return ExitCode.DONE
    if as_json:
        shown = {
            "ledger": str(path),
            "trials": entries,
            "programs": ledger.records(entries, by_program=True),
            "cures": ledger.records(entries),
            "shipped": ledger.shipped(),
        }
        click.echo(to_json(shown), nl=False)
        return ExitCode.DONE
    if not entries:
        click.echo(f"{path} holds nothing yet; `gputrace try -- COMMAND` begins it")
    click.echo(
        text.render(history(entries), options.width(), options.use_color()), nl=False, color=True
    )
    return ExitCode.DONE
