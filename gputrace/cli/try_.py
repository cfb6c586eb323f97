"""``gputrace try``: apply cures to a program, measure what each brings, and keep a ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

import click

from gputrace.cli import options
from gputrace.cli.console import log, progress_bar, signals_as_interrupt
from gputrace.errors import ExitCode, UsageError
from gputrace.units import format_ns, parse_duration

if TYPE_CHECKING:
    from gputrace.report.tables import Table
    from gputrace.trials.history import Request
    from gputrace.trials.ledger import Entry, Record
    from gputrace.trials.outcome import Outcome
    from gputrace.trials.patch import Patch
    from gputrace.trials.trial import Progress

_PROGRAM: Final = "gputrace.program"
_STEPS: Final = click.IntRange(min=5)
_LABEL: Final = 30
"""Most characters of what a run is, beside the bar."""
_WIDE: Final = 300
"""Upper bound of an interval, in percent, beyond which an undecided one says nothing."""


class _WithProgram(click.Command):
    """Command whose own words end at ``--``; those behind it are the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_PROGRAM] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command("try", cls=_WithProgram)
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
@click.option("--list", "list_", is_flag=True, help="List what can be tried, and run nothing.")
@click.option("--history", is_flag=True, help="Show the ledger, and run nothing.")
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
    diff: bool,
    apply_: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Apply cures to COMMAND, and measure what each gains.

    CURES are separated by commas or blanks; those joined by + are tried together:
    workers=8,pinned+fused. COMMAND is recorded once; without CURES, those that its findings
    suggest are tried. Each run is stopped after some steps. The program is not changed unless
    --apply is given.

    The exit code is 1 if nothing that was tried makes it faster.
    """
    if list_:
        return _list(as_json)
    if history:
        return _history(given["ledger"], as_json)
    if not ctx.meta[_PROGRAM]:
        raise UsageError("name the program after --: gputrace try workers=8 -- python train.py")
    request = _request(cures, ctx.meta[_PROGRAM], given)
    if request.workdir is None:
        _assert_runs(request.command[0])
        log(
            "each run executes your program in this folder and rewrites its outputs; "
            "use --workdir . to run in copies"
        )
    with signals_as_interrupt(), _progress() as progress:
        from gputrace.trials.trial import Trial

        outcome = Trial(request, progress).run()
    click.echo(_json(outcome) if as_json else _text(outcome, diff, apply_), nl=False, color=True)
    if apply_:
        _apply(outcome.patch)
    if outcome.interrupted:
        log("interrupted; results so far are shown")
        return ExitCode.INTERRUPTED
    faster = any(row.verdict == "faster" for row in outcome.rows)
    return ExitCode.DONE if faster else ExitCode.GATE_NOT_MET


def _assert_runs(name: str) -> None:
    from gputrace.collectors.launch import CannotRun, find_program

    try:
        find_program(name)
    except CannotRun as error:
        hint = f"; write python {name}" if name.endswith(".py") else ""
        raise UsageError(f"{error}{hint}") from None


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

    try:
        budget = parse_duration(given["budget"]) / 1e9
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from None
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
    """Yield what shows the run and the time spent at a terminal, and else a line for each run."""
    with progress_bar("trying") as bar:
        last = 0

        def show(run: int, label: str, spent: float, budget: float) -> None:
            nonlocal last
            if bar is not None:
                what = shorten(f"run {run}, {label}", _LABEL, placeholder=" …")
                bar(round(spent), round(budget), what)
            elif run > last:
                log(f"run {run}, {label}; {spent:.0f} of {budget:.0f} s")
            last = run

        yield show


def _json(outcome: Outcome) -> str:
    from gputrace.report import to_json

    shown = {name: getattr(outcome, name) for name in outcome.__slots__}
    if outcome.patch is not None:
        shown["patch"] = {"diff": outcome.patch.diff, "by_hand": outcome.patch.by_hand}
    return to_json(shown)


def _text(outcome: Outcome, diff: bool, apply_: bool) -> str:
    """Render the answers as a table, the best set, and what is to be changed for it."""
    from gputrace.report.text import open_console, print_table, without_blanks
    from gputrace.sanitize import sentence

    console = open_console(options.width(), options.use_color())
    console.print(sentence(_verdict(outcome)), style="bold green" if outcome.best else None)
    console.print()
    if outcome.rows:
        print_table(console, _table(outcome))
    for line in (*_remarks(outcome), *_to_change(outcome, diff, apply_)):
        console.print(sentence(line))
    text, patch = without_blanks(console), outcome.patch
    return f"{text}\n{patch.diff}" if diff and patch is not None and patch.edits else text


def _verdict(outcome: Outcome) -> str:
    from gputrace.trials.ledger import WORTH

    if outcome.best is not None:
        best = next(row for row in reversed(outcome.rows) if row.cure == outcome.best)
        return f"{outcome.best}: {said(best)}"
    fastest = _fastest(outcome)
    if fastest is not None:
        return f"{fastest.cure}: {said(fastest)}, but it changes numerics"
    if outcome.rows and all(row.verdict == "changes nothing" for row in outcome.rows):
        return "Nothing that was tried changes the program."
    if outcome.rows and all(row.gains_little for row in outcome.rows):
        return f"Nothing that was tried gains {100 * (WORTH - 1):.0f}%."
    if outcome.rows:
        return "Nothing that was tried is proven to be faster."
    return "Nothing was tried."


def _fastest(outcome: Outcome) -> Entry | None:
    proven = [row for row in outcome.rows if row.verdict == "faster" and row.ratio is not None]
    return min(proven, key=lambda row: row.ratio or 1.0, default=None)


def _remarks(outcome: Outcome) -> Iterator[str]:
    fastest = _fastest(outcome)
    if fastest is not None and fastest.numerics and fastest.cure != outcome.best:
        words = ",".join(filter(None, (outcome.best, fastest.cure)))
        yield (
            f"{fastest.cure} is the fastest, but changes numerics; have it in the best set, with "
            f"its patch, by naming it: gputrace try {words}"
        )
    for row in outcome.rows:
        # Of what the budget did not pay for, a note has the names.
        if row.why and row.verdict != "cannot tell yet":
            yield f"{row.cure}: {row.verdict}: {row.why}"
        if row.loss_differs:
            yield f"{row.cure}: its losses differ from those of the unchanged program"
    if outcome.findings:
        yield f"findings of the recording: {', '.join(outcome.findings)}"
    for note in outcome.notes:
        yield f"note: {note}"


def _to_change(outcome: Outcome, diff: bool, apply_: bool) -> Iterator[str]:
    """Yield what is to be done to have the best set for good."""
    if outcome.patch is None:
        return
    yield f"To have {outcome.best} for good:"
    for edit in outcome.patch.edits:
        hint = " (as below)" if diff else "" if apply_ else " (--apply writes it)"
        yield f"  change {os.path.relpath(edit.path)}{hint}"
        if not diff:
            yield from (f"    {line}" for line in edit.lines)
    for line in outcome.patch.by_hand:
        yield f"  {line}"


def _table(outcome: Outcome) -> Table:
    from gputrace.report.tables import Table

    step = "" if outcome.bare_ns is None else f", unchanged step {format_ns(outcome.bare_ns)}"
    runs = f"{outcome.runs} run{'s' if outcome.runs != 1 else ''}"
    title = f"{runs} in {outcome.seconds:.0f} s{step}"
    rows = tuple(
        (row.cure, said(row), foretold(row), "changed" if row.numerics else "–", str(row.rounds))
        for row in outcome.rows
    )
    return Table(title, ("", "measured", "predicted", "numerics", "rounds"), rows)


def said(row: Entry) -> str:
    """Return an answer as ``faster by 31% (28% to 34%)``; the interval is one of 95%."""
    if row.ratio is None or row.low is None or row.high is None:
        return row.verdict
    middle, low, high = (100 * (1 / value - 1) for value in (row.ratio, row.high, row.low))
    if row.verdict == "faster":
        return f"faster by {middle:.0f}% ({low:.0f}% to {high:.0f}%)"
    if row.verdict == "slower":
        return f"slower by {-middle:.0f}% ({-high:.0f}% to {-low:.0f}%)"
    if row.gains_little and row.verdict != "no difference":
        return f"gains {max(high, 0.0):.1f}% at most ({low:+.1f}% to {high:+.1f}%)"
    if high > _WIDE:
        return f"{row.verdict} ({middle:+.0f}% so far)"
    return f"{row.verdict} ({low:+.1f}% to {high:+.1f}%)"


def foretold(row: Entry) -> str:
    """Return a prediction as ``+56% (+12% to +99%)``."""
    if row.predicted is None:
        return "–"
    if row.predicted_low is None or row.predicted_high is None:
        return _gain(row.predicted)
    return f"{_gain(row.predicted)} ({_gain(row.predicted_high)} to {_gain(row.predicted_low)})"


def _gain(ratio: float) -> str:
    return f"{100 * (1 / max(ratio, 1e-3) - 1):+.0f}%"


def _list(as_json: bool) -> int:
    from gputrace.trials.cures import all_cures

    cures = all_cures().values()
    if as_json:
        from gputrace.report import to_json

        click.echo(to_json([_listed(cure) for cure in cures]), nl=False)
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


def _listed(cure: Any) -> dict[str, Any]:
    names = ("id", "what", "frameworks", "takes", "value", "numerics", "findings", "predictions")
    how = "environment" if cure.variables else "hook"
    return {name: getattr(cure, name) for name in names} | {"how": how}


def _history(path: Path | None, as_json: bool) -> int:
    """Show the ledger, and how far predictions were off, by cure."""
    from gputrace.report import to_json
    from gputrace.report.tables import Table
    from gputrace.report.text import open_console, print_table, without_blanks
    from gputrace.trials.ledger import default_ledger, read, records, shipped

    path = path or default_ledger()
    entries = read(path)
    by_cure, pairs = records(entries), shipped()
    if as_json:
        shown = {"ledger": str(path), "trials": entries, "cures": by_cure, "shipped": pairs}
        click.echo(to_json(shown), nl=False)
        return ExitCode.DONE
    if not entries:
        click.echo(f"{path} holds nothing yet; `gputrace try -- COMMAND` begins it")
    console = open_console(options.width(), options.use_color())
    for trial, answers in groupby(entries, _trial):
        rows = tuple((answer.cure, said(answer), foretold(answer)) for answer in answers)
        print_table(console, Table(trial, ("", "measured", "predicted"), rows))
    if entries:
        print_table(console, _records("Predictions, in % of the unchanged step", "trials", by_cure))
    title = "Pairs that ship with gputrace, by prediction, in % of the unchanged step"
    print_table(console, _records(title, "pairs", pairs))
    click.echo(without_blanks(console), nl=False, color=True)
    return ExitCode.DONE


def _trial(entry: Entry) -> str:
    """Return when and of what a trial was, and on which machine."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.time_ns / 1e9))
    return f"{when} on {entry.host}: {entry.program}"


def _records(title: str, counted: str, records: Sequence[Record]) -> Table:
    from gputrace.report.tables import Table

    rows = tuple(
        (
            each.cure,
            str(each.trials),
            str(each.faster),
            str(each.predicted),
            "–" if each.mean_error is None else f"{100 * each.mean_error:+.1f}",
            "–" if each.mean_size is None else f"{100 * each.mean_size:.1f}",
            f"{each.within} of {each.ranged}" if each.ranged else "–",
        )
        for each in records
    )
    header = ("", counted, "faster", "predicted", "error", "size of error", "in the range")
    return Table(title, header, rows)
