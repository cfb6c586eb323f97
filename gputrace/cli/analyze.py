"""Commands that read traces: analyze, compare, report, export, browse, log."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from gputrace.cli import console, options
from gputrace.cli.console import progress_bar, reading
from gputrace.errors import ExitCode, MissingError, UsageError
from gputrace.sanitize import message

_SUFFIXES: Final = {
    "perfetto": ".perfetto.json.gz",
    "parquet": ".parquet",
    "csv": ".csv",
    "speedscope": ".speedscope.json",
    "cpuprofile": ".cpuprofile",
}


def _named(traces: tuple[Path, ...]) -> str:
    return traces[0].name if len(traces) == 1 else f"{len(traces)} traces"


@click.command(
    "analyze",
    cls=options.Grouped,
    sections={"Part of the trace": "time steps", "Expert": "gaps keep_going scheduler"},
)
@options.traces
@options.window
@options.steps
@options.most_gaps
@click.option(
    "--step",
    type=options.StepNumber(),
    metavar="N|slowest",
    help="Say only why step N took as long as it did: its causes against the median step; slowest "
    "is that after warm-up.",
)
@options.report_format
@options.keep_going
@click.option(
    "--scheduler",
    metavar="WHERE",
    help="Analyze each file on a Dask cluster, with the same result: a scheduler's address, "
    "local:N for N processes, slurm:N for N workers as jobs.",
)
def analyze(
    traces: tuple[Path, ...],
    form: str,
    steps: str | None,
    time: str | None,
    gaps: int,
    step: int | str | None,
    keep_going: bool,
    scheduler: str | None,
) -> int:
    """Show where the time of TRACE went, and what to change.

    TRACE is what `gputrace record` wrote, an nsys export (SQLite, or a folder of Parquet or Arrow
    tables), an nsys report if nsys is installed, a file of nvprof or rocprofv3, or a profile of
    PyTorch, TensorFlow, JAX or MXNet, compressed or not. Several files are the parts of one run,
    one for each machine or rank; a folder stands for the traces in it. Logs of nvidia-smi
    (--query-gpu as CSV, or dmon -o DT) given with them add the GPUs' clocks and utilization. URLs
    of object stores (s3://, gs://) are fetched first. Reports of hangs (`gputrace record --hang`)
    and dumps of PyTorch's flight recorder, one per rank, say which rank the others wait for.
    Snapshots of PyTorch's memory (torch.cuda.memory._dump_snapshot) say who holds it at the peak.
    """
    import gputrace
    from gputrace.native import keep_freed_memory
    from gputrace.store.sqlite_security import is_database

    if not any(map(is_database, traces)):
        from gputrace.readers.flight_recorder import is_hang_report
        from gputrace.readers.memory_snapshot import is_memory_snapshot

        if all(map(is_memory_snapshot, traces)):
            options.show_as(_memory(traces), form, "gputrace.report.memory")
            return ExitCode.DONE
        if all(map(is_hang_report, traces)):
            click.echo(_hang(traces, form), nl=False)
            return ExitCode.DONE
        if all(path.is_dir() and any(path.glob("*.sketch")) for path in traces):
            if step is not None:
                raise UsageError("--step is of a trace: sketches hold no causes of single steps")
            options.show_as(_sketches(traces), form, "gputrace.report.sketches")
            return ExitCode.DONE
    keep_freed_memory()
    with (
        reading(_named(traces)) as progress,
        gputrace.open(
            *traces,
            keep_going=keep_going,
            windows=time is not None,
            scheduler=scheduler,
            progress=progress,
        ) as opened,
    ):
        if step is not None:
            part = opened.explain_step(step, steps=steps, time=time, progress=progress)
        else:
            report = opened.analyze(steps=steps, time=time, gaps=gaps, progress=progress)
        code = options.log_left_out(opened)
    if step is None:
        options.show(report, form)
    else:
        options.show_as(part, form, "gputrace.report.step")
    return code


def _memory(snapshots: tuple[Path, ...]) -> Any:
    """Return who holds the memory of each GPU."""
    from gputrace.analyzers.memory_holders import report_memory
    from gputrace.readers.memory_snapshot import read_snapshot

    return report_memory((str(path), read_snapshot(path)) for path in snapshots)


def _sketches(folders: tuple[Path, ...]) -> Any:
    """Return late ranks and changes by the sketches that `gputrace watch` wrote.

    A rank of a run is in one folder: where it is in several, each holds another run of that name.
    """
    from gputrace.analyzers.sketches import report_sketches
    from gputrace.store.sketches import read_sketches

    of = {folder: read_sketches(folder) for folder in folders}
    ranks = Counter(key for each in of.values() for key in {(s.job, s.rank) for s in each})
    again = {job for (job, _), count in ranks.items() if count > 1}
    return report_sketches(
        [
            replace(sketch, job=f"{sketch.job} in {folder}") if sketch.job in again else sketch
            for folder, sketches in of.items()
            for sketch in sketches
        ]
    )


def _hang(reports: tuple[Path, ...], form: str) -> str:
    """Return what a hang comes from, and where each rank is."""
    from gputrace.analyzers.hang_causes import find_cause
    from gputrace.readers.flight_recorder import read_ranks

    hang = find_cause(read_ranks(reports))
    if form == "json":
        return json.dumps({"schema_version": 1, "source": "hang", **asdict(hang)}, indent=2) + "\n"
    lines = [hang.message, ""]
    for state in hang.states:
        steps = "" if state.steps is None else f", {state.steps} steps"
        process = "" if state.pid is None else f" (process {state.pid} on {state.host})"
        ended = ", ended" if state.is_alive is False else ""
        lines += [f"rank {state.rank}{process}{steps}{ended}"]
        if state.last:
            lines += [f"  {'in' if state.waits else 'last in'} {state.last}"]
        lines += [f"  at {state.line or '?'}"]
    return "".join((line[:2] if line[:1] == " " else "") + message(line) + "\n" for line in lines)


@click.command(
    "compare",
    cls=options.Grouped,
    sections={"Scaling": "batch global_batch", "Expert": "steps"},
)
@click.argument("traces", metavar="A B...", nargs=-1, required=True, type=options.UNCHECKED)
@click.option("--label", "labels", multiple=True, help="Name of a run; give it once for each.")
@options.batch
@options.steps
@options.output_format
def compare(traces: tuple[Path, ...], form: str, **given: Any) -> None:
    """Compare B with A: faster or slower, in which class of time, in which kernels.

    For three runs or more, or two with different numbers of GPUs, show how they scale: speed-up,
    efficiency, and which class of time eats the loss. Each run is a file, or a folder with the
    files of its machines or ranks.
    """
    from gputrace.report.comparison import render

    report = _compared(traces, **given)
    shown = render(report, form, options.width(), options.use_color())
    click.echo(shown, nl=False, color=True)


def _compared(
    traces: tuple[Path, ...],
    labels: tuple[str, ...],
    steps: str | None,
    batch: str | None,
    global_batch: str | None,
) -> Any:
    import gputrace

    return gputrace.compare(
        *traces,
        labels=labels or None,
        steps=steps,
        batch=options.read_batch(batch),
        global_batch=options.read_batch(global_batch),
        progress=reading,
    )


@click.command(
    "report",
    cls=options.Grouped,
    sections={
        "Part of the trace": "time steps",
        "With --compare": "labels batch global_batch",
        "Expert": "port gaps keep_going",
    },
)
@options.traces
@options.output(
    "The page to write; by default TRACE.html, or TRACE-2.html and so on if that exists."
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--serve", is_flag=True, help="Serve the page from this machine, to zoom into large traces."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="With --serve: the port; 0: any."
)
@options.window
@options.steps
@options.most_gaps
@click.option("--compare", is_flag=True, help="Each TRACE is a run of its own: compare them.")
@click.option("--label", "labels", multiple=True, help="With --compare: name of a run.")
@options.batch
@options.keep_going
def report(
    traces: tuple[Path, ...],
    keep_going: bool,
    output: Path | None,
    force: bool,
    compare: bool,
    labels: tuple[str, ...],
    batch: str | None,
    global_batch: str | None,
    serve: bool,
    port: int,
    **part: Any,
) -> int:
    """Write a web page about TRACE: findings, charts, a timeline to zoom into, the gaps.

    The page is one HTML file that opens offline in any browser; its address follows what is shown
    and selected, so that a copied link opens there. Sent to somebody else, the file opens at a
    step with `#step=N` or `#step=slowest` after its name. TRACE is whatever `gputrace analyze`
    takes; several files are the parts of one run. With --serve no file is written: the
    page is served on this machine until Ctrl-C, and shows every window of the GPUs in full detail,
    however large the trace is. With --compare each TRACE is a run of its own, as for `gputrace
    compare`; --label, --batch and --global-batch need it.
    """
    if serve and (output is not None or compare):
        raise UsageError("--serve shows one run and writes no file; leave out -o and --compare")
    from gputrace.report import check_target
    from gputrace.report.html import load, write_page

    suffix = ".compare.html" if compare else ".html"
    target = output or options.default_target(traces[0], suffix, force)
    if not serve:
        check_target(target, traces, force)
    if compare:
        if part["time"] is not None or keep_going:
            raise UsageError("--compare takes whole runs; leave out --time and --keep-going")
        _compared(traces, labels, part["steps"], batch, global_batch).save(target, force=force)
        console.note(f"wrote {target}")
        return ExitCode.DONE
    if labels or batch or global_batch:
        raise UsageError("--label, --batch and --global-batch need --compare")
    import gputrace

    page = load("server" if serve else "page")
    with gputrace.open(*traces, keep_going=keep_going, windows=part["time"] is not None) as opened:
        with reading(_named(traces)) as progress:
            material = opened.material(**part, progress=progress)
            if not serve:
                inputs = [Path(path) for path in material.analysis.paths]
                write_page(target, inputs, force, lambda page: page.render(material))
        code = options.log_left_out(opened)
        slow = load("timeline").slow_steps(material.analysis)
        more = (
            f"; {{}}#step={slow[0]} opens at the slowest step, #step=N at another" if slow else ""
        )
        if serve:
            said = f"the page is at {{}}{more}"
            page.serve(material, port, lambda at: console.log(said.format(at, at)))
    if not serve:
        console.note(f"wrote {target}{more and ', which can be sent'}{more.format(target)}")
    return code


@click.command("export")
@options.traces
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["perfetto", "parquet", "csv", "speedscope", "cpuprofile", "trace"]),
    help="perfetto: a file for ui.perfetto.dev; parquet, csv: a folder of tables; speedscope, "
    "cpuprofile: the sampled lines of Python, for speedscope.app and VS Code; trace: a smaller "
    "trace of the same kind.",
)
@options.output("File or folder to write.")
@options.force
@options.window
@click.option(
    "--redact", is_flag=True, help="Replace the names of hosts, users, paths and programs."
)
@options.keep_going
def export(
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
    target = output or options.default_target(traces[0], suffix, force)
    with (
        gputrace.open(*traces, keep_going=keep_going, windows=time is not None) as opened,
        progress_bar(f"exporting {_named(traces)}") as progress,
    ):
        opened.export(form, target, time=time, redact=redact, force=force, progress=progress)
        code = options.log_left_out(opened)
    console.note(f"wrote {target}")
    return code


@click.command("browse")
@click.argument("traces", metavar="TRACE...", nargs=-1, type=options.UNCHECKED)
@click.option(
    "--beside",
    metavar="TRACE",
    multiple=True,
    type=options.UNCHECKED,
    help="Trace of another run to show on the same time axis; give it once for each of its files.",
)
@click.option("--demo", is_flag=True, help="Show the recording that `gputrace demo` analyzes.")
def browse(traces: tuple[Path, ...], beside: tuple[Path, ...], demo: bool) -> int:
    """Browse TRACE in the terminal: what each GPU did when, and the gaps between the batches.

    TRACE is whatever `gputrace analyze` takes; several files are the parts of one run. The worst
    gap is shown first. Press ? for the keys, q to leave.

    For a recording in progress (NAME.sqlite.spool), it shows the steps per second, where the time
    of the last steps went, and the GPUs' clocks.
    """
    if bool(traces) == demo:
        raise UsageError("browse takes either a TRACE or --demo (see gputrace browse --help)")
    folder = None if demo else _under_way(traces)
    # It draws on stderr.
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not is_terminal or os.environ.get("TERM") == "dumb":
        raise UsageError(
            "browse needs a terminal, and stdin, stdout or stderr is not one; "
            "use `gputrace analyze` instead"
        )
    try:
        return _browse(traces, beside, folder)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("textual"):
            raise
        raise MissingError("browse needs textual; install it with `pip install textual`") from None


def _browse(traces: tuple[Path, ...], beside: tuple[Path, ...], folder: Path | None) -> int:
    """Browse traces, or the demo's without any; first a recording under way in a folder."""
    from gputrace.report.tui import app

    if not traces:
        from gputrace.data import unpacked

        with unpacked("demo.sqlite.xz") as path:
            return app.browse((path,), beside)
    if folder is None:
        return app.browse(traces, beside)
    from gputrace.cli.record_live import RecordingFeed
    from gputrace.report.tui.live import watch

    code, trace = watch(RecordingFeed(folder))
    return code if trace is None else app.browse((trace,))


def _under_way(traces: tuple[Path, ...]) -> Path | None:
    """Return the folder of a recording under way, given its own path or the trace's; else None.

    Raises UsageError if the recording has ended without a trace.
    """
    if len(traces) != 1:
        return None
    from gputrace.collectors.job_tasks import is_ours
    from gputrace.collectors.live import RecordingFollower

    trace = traces[0]
    folder = trace if trace.is_dir() else trace.with_name(f"{trace.name}.spool")
    if (trace.exists() and folder != trace) or not is_ours(folder):
        return None
    if not RecordingFollower(folder).is_under_way:
        raise UsageError(
            f"{folder}: the recorder has ended without making a trace; "
            f"`gputrace recover {folder}` makes one"
        )
    return folder


@click.command("log")
@options.traces
@click.option(
    "--to",
    "trackers",
    required=True,
    multiple=True,
    metavar="TRACKER",
    help="tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT; may be given several times.",
)
@options.keep_going
def log(traces: tuple[Path, ...], trackers: tuple[str, ...], keep_going: bool) -> int:
    """Send the results of TRACE to an experiment tracker.

    It gets the time of each step and of each class in it, the verdict, the report and the page.
    TRACE is whatever `gputrace analyze` takes; several files are the parts of one run. They are
    logged as a run of their own; the callbacks of `gputrace.loggers` log into the training's run.
    """
    import gputrace
    from gputrace import loggers

    with gputrace.open(*traces, keep_going=keep_going) as opened, reading(_named(traces)):
        loggers.log(opened, *trackers)
        code = options.log_left_out(opened)
    for tracker in trackers:
        console.note(f"logged to {tracker}")
    return code
