"""``gputrace check``: gate for continuous integration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar
from gputrace.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from gputrace.analyzers.compare.runs import Run
    from gputrace.analyzers.gates import Asked, Limit

_F = TypeVar("_F", bound=Callable[..., Any])

_SHARES: Final = (
    *("data-feeding", "idle", "launch", "sync", "alloc", "other-idle", "recorder"),
    *("communication", "h2d", "other-copy", "memset", "compute"),
)
"""Classes of time, as spelled in options."""


def _limits(function: _F) -> _F:
    """Add an option for each figure that can be limited; they arrive as ``max_idle`` etc."""
    rows = [
        ("--min-throughput", "RATE", "Samples a second at least; needs --batch."),
        ("--max-step-time-p95", "TIME", "95th percentile of the steps at most."),
        ("--max-step-time", "TIME", "Mean step at most, as 65ms."),
        ("--min-compute", "SHARE", "Computing at least."),
    ]
    rows += [(f"--max-{name}", "SHARE", f"{name} at most.") for name in reversed(_SHARES)]
    for name, metavar, text in rows:
        function = click.option(name, metavar=metavar, help=text)(function)
    return function


@click.command("check")
@click.argument("trace", type=click.Path(path_type=Path, readable=False))
@_limits
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, readable=False),
    help="A trace of the run that this must not be slower than.",
)
@click.option(
    "--max-slowdown",
    metavar="SHARE",
    help="How much slower than the baseline it may be; 3% if not given.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="WORD",
    help="A finding's id, or a severity (that one and worse); may be given several times.",
)
@options.steps
@options.batch
@click.option("--json", "form", flag_value="json", help="Same as --format json.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json", "junit", "markdown")),
    default="text",
    show_default=True,
    help="How to print the result.",
)
def command(
    trace: Path,
    baseline: Path | None,
    steps: str | None,
    batch: str | None,
    global_batch: str | None,
    form: str,
    **gates: Any,
) -> int:
    """Check a run against limits: the exit code is 1 if one is not met, or cannot be evaluated.

    A SHARE is of the mean step, as 10%, or a time in it, as 5ms. Figures are means over the
    measured steps and the GPUs. A slow-down counts only where the noise of the steps does not
    explain it.
    """
    from gputrace.analyzers.gates import check

    asked = _read(baseline, gates)
    run = _open(trace, steps, batch, global_batch)
    before = _open(baseline, steps, batch, global_batch) if baseline is not None else None
    result = check(run, asked, before)
    from gputrace.report import check as views

    if form == "text":
        shown = views.text(result, options.width(), options.use_color())
        click.echo(shown, nl=False, color=True)
    else:
        click.echo(views.FORMATS[form](result), nl=False)
    return ExitCode.DONE if result.passed else ExitCode.GATE_NOT_MET


def _open(path: Path, steps: str | None, batch: str | None, global_batch: str | None) -> Run:
    from gputrace.api import open_runs

    (run,) = open_runs(
        [path],
        [path.name],
        steps=steps,
        batch=options.read_batch(batch),
        global_batch=options.read_batch(global_batch),
        progress=lambda name: progress_bar(f"reading {name}"),
    )
    return run


def _read(baseline: Path | None, gates: dict[str, Any]) -> Asked:
    """Return the given gates; raises UsageError if there are none."""
    from gputrace.analyzers.gates import Asked, check_words

    slowdown, fail_on = gates.pop("max_slowdown"), gates.pop("fail_on")
    if slowdown is not None and baseline is None:
        raise UsageError("--max-slowdown needs the trace to be measured against: --baseline")
    limits = [_limit(name, text) for name, text in gates.items() if text is not None]
    if not limits and baseline is None and not fail_on:
        raise UsageError("no gate is given; name one, as --max-data-feeding 10%")
    check_words(fail_on)
    allowed = None if baseline is None else _share("--max-slowdown", slowdown or "3%")
    return Asked(tuple(limits), allowed, fail_on)


def _limit(name: str, text: str) -> Limit:
    from gputrace.analyzers.gates import Limit
    from gputrace.units import parse_duration

    bound, _, figure = name.partition("_")
    option = f"--{name.replace('_', '-')}"
    if figure == "throughput":
        return Limit(figure, _number(option, text), "samples_per_s", False)
    if text.endswith("%") and not figure.startswith("step_time"):
        return Limit(figure, _share(option, text), "share", bound == "max")
    what = "a time, as 65ms" if figure.startswith("step_time") else "10% of a step, or a time, 5ms"
    try:
        time = parse_duration(text)
    except ValueError:
        time = -1
    if time < 0 or text.strip()[-1:].isdigit():
        raise UsageError(f"{option} {text}: write {what}")
    return Limit(figure, time, "ns", bound == "max")


def _share(option: str, text: str) -> float:
    if not text.endswith("%"):
        raise UsageError(f"{option} {text}: write a percentage, as 3%")
    share = _number(option, text.removesuffix("%"))
    return share / 100


def _number(option: str, text: str) -> float:
    """Parse a finite number of at least 0."""
    from math import inf

    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < inf:
        raise UsageError(f"{option} {text}: write a number from 0 on")
    return number
