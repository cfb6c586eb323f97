"""``gputrace report``: write the report as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gputrace.cli import options
from gputrace.cli.console import progress_bar, tell
from gputrace.errors import ExitCode, UsageError


@click.command("report")
@options.traces
@options.steps
@options.window
@options.most_gaps
@options.keep_going
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--compare", is_flag=True, help="Each TRACE is a run of its own: compare them.")
@click.option("--label", "labels", multiple=True, help="Of --compare: what to call a run.")
@options.batch
@click.option("--serve", is_flag=True, help="Serve the page here, to zoom into large traces.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of --serve; any if 0.")
def command(
    traces: tuple[Path, ...],
    steps: str | None,
    time: str | None,
    gaps: int,
    keep_going: bool,
    output: Path | None,
    force: bool,
    compare: bool,
    labels: tuple[str, ...],
    batch: str | None,
    global_batch: str | None,
    serve: bool,
    port: int,
) -> int:
    """Write a page on TRACE: findings, charts, a timeline to zoom into, the gaps.

    The page is one HTML file that opens offline in any browser. TRACE is whatever `gputrace
    analyze` takes; several are the parts of one run. With --serve no file is written: the page is
    served on this machine until Ctrl-C, and shows every window in full detail, however large the
    trace is. With --compare each TRACE is a run of its own, as for `gputrace compare`; --label,
    --batch and --global-batch are for that alone.
    """
    if serve and (output is not None or compare):
        raise UsageError("--serve shows one run and writes no file: leave -o and --compare out")
    target = output or options.default_target(traces[0], ".compare.html" if compare else ".html")
    runs = {"labels": labels or None, "batch": batch, "global_batch": global_batch}
    if compare:
        if time is not None or keep_going:
            raise UsageError("--compare takes whole runs: leave --time and --keep-going out")
        return _compare(traces, runs | {"steps": steps}, target, force)
    if any(runs.values()):
        raise UsageError("--label, --batch and --global-batch compare runs: give --compare, too")
    import gputrace
    from gputrace.report.html import load

    show = load("server").serve if serve else None
    what = traces[0].name if len(traces) == 1 else f"{len(traces)} traces"
    with gputrace.open(*traces, keep_going=keep_going, windows=time is not None) as opened:
        with progress_bar(f"reading {what}") as progress:
            if show is not None:
                material = opened.material(steps=steps, time=time, gaps=gaps, progress=progress)
            else:
                opened.report(
                    target, steps=steps, time=time, gaps=gaps, force=force, progress=progress
                )
        code = options.tell_left_out(opened)
    if show is not None:
        show(material, port, lambda at: tell(f"the page is at {at}"))
    else:
        tell(f"wrote {target}")
    return code


def _compare(traces: tuple[Path, ...], asked: dict[str, Any], target: Path, force: bool) -> int:
    """Write the page of a comparison; ``asked`` is for `gputrace.compare`, batches as typed."""
    import gputrace
    from gputrace.report.output_file import check_target

    check_target(target, traces, force)
    batches = {name: options.read_batch(asked[name]) for name in ("batch", "global_batch")}
    report = gputrace.compare(
        *traces, **asked | batches, progress=lambda name: progress_bar(f"reading {name}")
    )
    report.save(target, force=force)
    tell(f"wrote {target}")
    return ExitCode.DONE
