"""``gputrace kernel``, which shows the launches of a kernel and profiles one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gputrace.cli import console, options
from gputrace.cli.console import reading
from gputrace.errors import ExitCode, MissingError, UsageError
from gputrace.sanitize import clean
from gputrace.units import format_count, format_ns, format_number

if TYPE_CHECKING:
    from gputrace.analyzers.kernels import Launches
    from gputrace.collectors.ncu import LaunchFilter
    from gputrace.model.kernels import LongestLaunch, Roofline


@click.command("kernel")
@click.argument("trace", type=options.UNCHECKED)
@click.argument("kernel", metavar="KERNEL", required=False)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--count", type=click.IntRange(min=1), default=1, show_default=True, help="Launches to profile."
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    help="Launches to skip first; by default those before a typical step after warm-up.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("kernel.ncu-rep"),
    show_default=True,
    help="Nsight Compute report to write.",
)
@options.force
@click.option("--json", "as_json", is_flag=True, help="Print the kernel and its launches as JSON.")
def command(
    trace: Path,
    kernel: str | None,
    command: tuple[str, ...],
    output: Path,
    force: bool,
    count: int,
    skip: int | None,
    as_json: bool,
) -> int:
    """Show where a kernel of TRACE is launched, and profile it in COMMAND with Nsight Compute.

    KERNEL is a name, a part of a name, a rank by total time (1 takes most), or `longest`, for the
    kernel of the longest launch. COMMAND runs the traced program again, under ncu; without COMMAND,
    the ncu command is printed.
    """
    import shlex

    import gputrace
    from gputrace.collectors.launch import load_numpy
    from gputrace.collectors.ncu import LaunchFilter, words

    if kernel is None:
        raise UsageError("name a kernel: 1 for the one that takes most time, longest, or a name")
    if not trace.exists() and Path(kernel).exists():
        raise UsageError(f"write the trace first: gputrace kernel {kernel} {trace}")
    load_numpy()
    if command and not force and output.exists():
        raise UsageError(f"{output}: exists; name another with -o, or give --force")
    with reading(trace.name) as progress, gputrace.open(trace) as opened:
        launches = opened.launches(kernel, progress=progress)
    if command and launches.why_not:
        raise UsageError(f"{launches.kernel.short} {launches.why_not}")
    first = launches.skip if skip is None else skip
    chosen = LaunchFilter(launches.pattern, first, count, launches.device)
    ready = shlex.join(words(chosen, output, command or ("COMMAND",)))
    if as_json:
        from gputrace.report import to_json

        shown = {"launches": launches, "command": None if launches.why_not else ready}
        click.echo(to_json(shown), nl=False)
    else:
        click.echo(_launches_text(launches), nl=False, color=True)
        if launches.compute_place is not None:
            ready = shlex.join(["gputrace", "kernel", str(trace), str(launches.compute_place)])
        if not command and (launches.compute_place is not None or not launches.why_not):
            click.echo(f"\n{ready}")
    return _profile(chosen, output, command) if command else ExitCode.DONE


_LONGEST_NAME: Final = 320
"""Characters of a kernel's full name; the JSON has all of it."""


def _launches_text(launches: Launches) -> str:
    """Render the kernel's time on each GPU, and a description of the launch to profile."""
    from gputrace.analyzers.kernel_names import short_name
    from gputrace.report import Document, Line, declared, text
    from gputrace.report.wording import capital

    use = launches.kernel
    title = (
        f"{use.short} ({use.family}): {use.share:.1%} of the time, number {launches.place} by time"
    )
    lines = [clean(use.name, _LONGEST_NAME)] + (
        [_roofline(use.roofline)] if use.roofline is not None else []
    )
    if use.activity is not None:
        lines.append(f"While it runs: {use.activity.text}.")
    if (at := launches.longest) is not None:
        after = " after warm-up" if at.step is not None else ""
        is_other = not launches.why_not and launches.longest_skip != launches.skip
        how = f" (to profile it: --skip {launches.longest_skip})" if is_other else ""
        lines.append(f"Its longest launch{after}: {_when(at)}{how}.")
    if launches.issued:
        lines.append(f"Issued by {launches.issued}.")
    where = "no step was found" if launches.step is None else f"in step {launches.step}"
    where += " (one of usual length)" if launches.is_usual else ""
    gpu = f"GPU {launches.gpu} (device {launches.device} of rank {launches.rank})"
    for finding in launches.findings:
        lines += [f"{capital(finding.message)}.", f"What to do: {finding.advice}."]
    launch = f"a launch on {gpu}, {where}, after {format_count(launches.skip, 'other')} of it"
    lines.append(f"It {launches.why_not}." if launches.why_not else f"To profile: {launch}.")
    if (at := launches.longest_compute) is not None:
        name = short_name(at.name)
        lines.append(f"The longest launch that computes: {name}, {_when(at)}. To look at it:")
    if launches.alike > 1 and not launches.why_not:
        lines.append(
            f"{launches.alike} kernels have the same name: the right one comes if the "
            "program launches the same kernels as in the trace."
        )
    if not launches.from_start and not launches.why_not:
        lines.append(
            "The trace does not begin with the run: earlier launches are not counted, and an "
            "earlier one is profiled."
        )
    if (at := launches.longest_compute) is not None:
        name, number = short_name(at.name), launches.compute_place
        seen = "" if number is None else f" It is number {number} by time; to see it:"
        lines.append(f"The longest launch that computes: {name}, {_when(at)}.{seen}")
    table = declared(title, use.by_gpu)
    report = Document(head=(), tables=(table,), notes=tuple(map(Line, lines)))
    return text.render(report, options.width(), options.use_color())


def _when(launch: LongestLaunch) -> str:
    step = "" if launch.step is None else f" in step {launch.step}"
    length, at = format_ns(launch.duration_ns), f"{launch.start_ns / 1e9:.6f} s"
    return f"{length} at {at}{step} on GPU {launch.gpu}"


def _roofline(line: Roofline) -> str:
    """Say how fast a kernel multiplies, or moves what it computes with, and what bounds it."""
    if not line.flop_per_s:
        text = f"{(line.bytes_per_s or 0) / 1e9:,.0f} GB/s at least, by the shapes of its operators"
        share = "" if line.of_limit is None else f": {line.of_limit:.0%} of the memory's peak"
        return f"{text}{share}."
    text = f"{format_number(line.flop_per_s / 1e12)} TFLOP/s by the shapes of its operators"
    if line.flop_per_byte is not None:
        text += f", {format_number(line.flop_per_byte)} FLOP for each byte"
    if line.limit_flop_per_s is None or line.of_limit is None:
        return f"{text}."
    bound = "its arithmetic" if line.limit == "compute" else "its memory"
    most = format_number(line.limit_flop_per_s / 1e12)
    return f"{text}: {line.of_limit:.0%} of the {most} TFLOP/s to which {bound} limits the card."


def _profile(chosen: LaunchFilter, output: Path, command: tuple[str, ...]) -> int:
    from gputrace.collectors.launch import CannotRun
    from gputrace.collectors.ncu import profile, read_report, show_report

    try:
        profile(chosen, output, command)
    except CannotRun as error:
        raise MissingError(str(error)) from None
    kernels = read_report(output)
    if kernels is None:
        click.echo(show_report(output), nl=False)
    show = {"ns": format_ns, "%": "{:.3g}%".format}
    for kernel in kernels or ():
        wide = max(map(len, kernel.figures), default=0)
        click.echo(f"{kernel.name}: {kernel.verdict}")
        for label, (value, unit) in kernel.figures.items():
            click.echo(f"  {label:<{wide}}  {show.get(unit, '{:,.4g}'.format)(value)}")
    console.note(f"wrote {output}")
    return ExitCode.DONE
