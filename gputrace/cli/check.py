"""``gputrace check``: gate for continuous integration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gputrace.cli import options
from gputrace.cli.console import reading
from gputrace.errors import ExitCode, UsageError
from gputrace.model.time_class import BUSY_CLASSES, IDLE_CAUSES, TIME_CLASSES
from gputrace.sanitize import sentence
from gputrace.units import parse_duration

if TYPE_CHECKING:
    from gputrace.analyzers.ci_gates import Check, CheckOptions, Limit

_F = TypeVar("_F", bound=Callable[..., Any])

_SHARES: Final = tuple(name.replace("_", "-") for name in ("idle", *IDLE_CAUSES, *BUSY_CLASSES))
"""Classes of time, as spelled in options."""
_NOT_IN_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _limits(function: _F) -> _F:
    """Add an option for each figure that can be limited; they arrive as ``max_idle`` etc."""
    rows = [
        ("--min-throughput", "RATE", "Minimum samples per second; needs --batch."),
        ("--max-step-time-p95", "TIME", "Maximum 95th percentile of the step times."),
        ("--max-step-time", "TIME", "Maximum mean step, e.g. 65ms."),
        (
            "--max-slow-steps",
            "PERCENT",
            "Maximum share of steps over 1.3 times the median, also on a CPU.",
        ),
        ("--max-data-wait", "SHARE", "Maximum time that the host waits for data; on CPUs, too."),
        ("--min-compute", "SHARE", "Minimum of the row 'compute'."),
    ]
    words = {"idle": "all idle time"} | {
        row.id.replace("_", "-"): f"the row {row.label!r}" for row in TIME_CLASSES
    }
    words["launch"] += ": all that the host does instead of launching"
    rows += [(f"--max-{name}", "SHARE", f"Maximum of {words[name]}.") for name in reversed(_SHARES)]
    for name, metavar, text in rows:
        function = click.option(name, metavar=metavar, help=text)(function)
    return function


@click.command(
    "check",
    cls=options.Grouped,
    sections={
        "Limits of a row in the table of `gputrace analyze`": " ".join(
            ["min_compute", *(f"max_{name}".replace("-", "_") for name in _SHARES)]
        ),
        "Expert": "batch global_batch steps",
    },
)
@click.argument("trace", type=options.UNCHECKED)
@click.option(
    "--baseline",
    type=options.UNCHECKED,
    help="Trace of the run to compare with.",
)
@click.option(
    "--max-slowdown",
    metavar="SHARE",
    help="How much slower than the baseline the run may be; by default 3%.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="WORD",
    help="Fail on this finding (its id), or on findings of this severity and worse; may be given "
    "several times.",
)
@click.option(
    "--max-cause",
    multiple=True,
    metavar="CAUSE=SHARE",
    help="Maximum of a cause of lost time, by its id or its label in analyze's table 'Why', e.g. "
    "garbage-collection=5%; host=10% is all that the host holds the GPU up; may be given several "
    "times.",
)
@_limits
@options.batch
@options.steps
@options.check_format
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

    A SHARE is a part of the mean step (10%) or a time per step (5ms); with a baseline also what it
    may be more than there (+5% of the baseline's step, +2ms). Figures are means over the measured
    steps and the GPUs. A slowdown, or what is more, counts only if its 95% bounds, from the noise
    of the steps, are above the limit; a slowdown without a GPU, also without waits for cores that
    other programs use.
    """
    from gputrace.analyzers.ci_gates import check
    from gputrace.api import open_runs
    from gputrace.report import to_json

    asked = _read_gates(baseline, gates)
    paths = [trace] if baseline is None else [trace, baseline]
    runs = open_runs(
        paths,
        [path.name for path in paths],
        steps=steps,
        batch=options.read_batch(batch),
        global_batch=options.read_batch(global_batch),
        progress=reading,
    )
    result = check(runs[0], asked, *runs[1:])
    render = {"text": _text, "json": to_json, "junit": _junit, "markdown": _markdown}[form]
    click.echo(render(result), nl=False, color=True)
    return ExitCode.DONE if result.passed else ExitCode.GATE_NOT_MET


def _read_gates(baseline: Path | None, gates: dict[str, Any]) -> CheckOptions:
    """Return the given gates; raises UsageError if there are none."""
    from gputrace.analyzers.ci_gates import CheckOptions, cause_of, check_words

    slowdown, fail_on = gates.pop("max_slowdown"), gates.pop("fail_on")
    given = (text.partition("=") for text in gates.pop("max_cause"))
    causes = [(f"max_cause {cause_of(cause)}", share) for cause, _, share in given]
    if slowdown is not None and baseline is None:
        raise UsageError("--max-slowdown needs --baseline, the trace to compare with")
    limits = [_limit(name, text) for name, text in (*gates.items(), *causes) if text is not None]
    if baseline is None and any(limit.relative for limit in limits):
        raise UsageError("a limit such as +5% needs --baseline, the trace that it is relative to")
    if not limits and baseline is None and not fail_on:
        raise UsageError(
            "no limit is given; name one, e.g. --max-data-feeding 10%, without a GPU "
            "--max-data-wait 10%, or --baseline TRACE"
        )
    check_words(fail_on)
    allowed = None if baseline is None else _share("--max-slowdown", slowdown or "3%")
    return CheckOptions(tuple(limits), allowed, fail_on)


def _limit(name: str, text: str) -> Limit:
    from gputrace.analyzers.ci_gates import Limit

    bound, _, figure = name.partition("_")
    option = f"--{name.replace('_', '-')}"
    is_time = figure.startswith("step_time")
    if text.startswith("+"):
        if bound == "min" or is_time or figure == "slow_steps":
            raise UsageError(f"{option} {text}: only parts of a step can be relative to a baseline")
        return replace(_limit(name, text[1:]), relative=True)
    if figure == "throughput":
        return Limit(figure, _number(option, text), "samples_per_s", False)
    if figure == "slow_steps":
        return Limit(figure, _share(option, text), "share")
    if text.endswith("%") and not is_time:
        return Limit(figure, _share(option, text), "share", bound == "max")
    what = "a time, 65ms" if is_time else "10% of a step, or a time, 5ms"
    try:
        time = parse_duration(text)
    except ValueError:
        time = -1
    if time < 0 or text.strip()[-1:].isdigit():
        raise UsageError(f"{f'{option} {text}'.rstrip()}: write {what}")
    return Limit(figure, time, "ns", bound == "max")


def _share(option: str, text: str) -> float:
    if not text.endswith("%"):
        raise UsageError(f"{option} {text}: write a percentage, e.g. 3%")
    return _number(option, text.removesuffix("%")) / 100


def _number(option: str, text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{option} {text}: write a number from 0 on")
    return number


def _verdict(check: Check) -> str:
    failed, count = sum(not gate.passed for gate in check.gates), len(check.gates)
    if not failed:
        return "The gate is met." if count == 1 else f"All {count} gates are met."
    if count == 1:
        return "The gate is not met."
    return f"{failed} of {count} gates {'is' if failed == 1 else 'are'} not met."


def _text(check: Check) -> str:
    """Render the verdict, then a line per gate, failed ones first."""
    from rich.text import Text

    from gputrace.report.text import open_console, said, without_blanks

    console = open_console(options.width(), options.use_color())
    console.print(said(_verdict(check), "green" if check.passed else "bold red"))
    for gate in sorted(check.gates, key=lambda gate: gate.passed):
        word, style = ("ok     ", "green") if gate.passed else ("FAILED ", "bold red")
        console.print(Text.assemble((word, style), sentence(f"{gate.id}: {gate.message}.")))
    return without_blanks(console)


def _markdown(check: Check) -> str:
    """Render the verdict, then a table with a row per gate, failed ones first."""
    lines = [_verdict(check), "", "| gate | what came of it |", "| --- | --- |"]
    for gate in sorted(check.gates, key=lambda gate: gate.passed):
        message = gate.message.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {'' if gate.passed else '**FAILED** '}{gate.id} | {message} |")
    return "\n".join(lines) + "\n"


def _junit(check: Check) -> str:
    """Render a JUnit test suite, a test case per gate; unevaluated gates are errors."""
    from xml.etree import ElementTree as ET

    failures = sum(gate.evaluated and not gate.passed for gate in check.gates)
    errors = sum(not gate.evaluated for gate in check.gates)
    counts = {"tests": len(check.gates), "failures": failures, "errors": errors}
    words = {name: str(count) for name, count in counts.items()}
    suite = ET.Element("testsuite", {"name": "gputrace check", **words})
    for gate in check.gates:
        case = ET.SubElement(suite, "testcase", classname="gputrace", name=gate.id)
        message = _NOT_IN_XML.sub("\ufffd", gate.message)
        if gate.passed:
            ET.SubElement(case, "system-out").text = message
        else:
            ET.SubElement(case, "failure" if gate.evaluated else "error", message=message)
    ET.indent(suite)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suite, encoding="unicode")}\n'
