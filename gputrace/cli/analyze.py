"""Commands that read traces: analyze, demo, compare, report, export, browse, log, kernel."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gputrace.cli import console, options
from gputrace.cli.console import progress_bar, reading
from gputrace.errors import ExitCode, GputraceError, MissingError, UsageError
from gputrace.units import format_ns, format_number

if TYPE_CHECKING:
    import subprocess

    from gputrace.analyzers.kernels import Launches
    from gputrace.api import Report
    from gputrace.collectors.ncu import LaunchFilter
    from gputrace.model.kernels import Roofline


_SUFFIXES: Final = {"perfetto": ".perfetto.json.gz", "parquet": ".parquet", "csv": ".csv"}


def _named(traces: tuple[Path, ...]) -> str:
    return traces[0].name if len(traces) == 1 else f"{len(traces)} traces"


@click.command("analyze")
@options.traces
@options.window
@options.steps
@options.most_gaps
@options.report_format
@options.keep_going
@click.option(
    "--scheduler",
    metavar="WHERE",
    help="Have a Dask cluster analyze each file where it is, with the same result: a scheduler's "
    "address, local:N for N processes, slurm:N for N workers as jobs.",
)
def analyze(
    traces: tuple[Path, ...],
    form: str,
    steps: str | None,
    time: str | None,
    gaps: int,
    keep_going: bool,
    scheduler: str | None,
) -> int:
    """Show where the time of TRACE went, and what to change.

    TRACE is what `gputrace record` wrote, an nsys export (SQLite, or a folder of Parquet or Arrow
    tables), an nsys report where nsys is installed, a file of nvprof or rocprofv3, or a profile of
    PyTorch, TensorFlow, JAX or MXNet, packed or not. Several are the parts of one run, a file for
    each machine or rank; a folder stands for the traces in it. Logs of nvidia-smi beside them
    (--query-gpu as CSV, or dmon -o DT) add the clocks and the use of the GPUs. URLs of object
    stores (s3://, gs://) are fetched first. Reports of hangs (`gputrace record --hang`) and dumps
    of PyTorch's flight recorder, one a rank, say which rank the others wait for.
    """
    import gputrace
    from gputrace.model import keep_freed_memory
    from gputrace.readers.flight_recorder import is_hang_report

    if all(map(is_hang_report, traces)):
        click.echo(_hang(traces, form), nl=False)
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
        report = opened.analyze(steps=steps, time=time, gaps=gaps, progress=progress)
        code = options.log_left_out(opened)
    options.show(report, form)
    return code


def _hang(reports: tuple[Path, ...], form: str) -> str:
    """Return what a hang comes from, and where each rank is."""
    from gputrace.analyzers.hangs import find_cause
    from gputrace.readers.flight_recorder import read_ranks
    from gputrace.sanitize import message

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


@click.command("compare")
@click.argument("traces", metavar="A B...", nargs=-1, required=True, type=options.UNCHECKED)
@click.option("--label", "labels", multiple=True, help="What to call a run; once for each.")
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


@click.command("report")
@options.traces
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--serve", is_flag=True, help="Serve the page here, to zoom into large traces.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of --serve; any if 0.")
@options.window
@options.steps
@options.most_gaps
@click.option("--compare", is_flag=True, help="Each TRACE is a run of its own: compare them.")
@click.option("--label", "labels", multiple=True, help="Of --compare: what to call a run.")
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
    """Write a page on TRACE: findings, charts, a timeline to zoom into, the gaps.

    The page is one HTML file that opens offline in any browser. TRACE is whatever `gputrace
    analyze` takes; several are the parts of one run. With --serve no file is written: the page is
    served on this machine until Ctrl-C, and shows every window of the GPUs in full detail, however
    large the trace is. With --compare each TRACE is a run of its own, as for `gputrace compare`;
    --label, --batch and --global-batch are for that alone.
    """
    if serve and (output is not None or compare):
        raise UsageError("--serve shows one run and writes no file: leave -o and --compare out")
    target = output or options.default_target(traces[0], ".compare.html" if compare else ".html")
    if compare:
        if part["time"] is not None or keep_going:
            raise UsageError("--compare takes whole runs: leave --time and --keep-going out")
        from gputrace.report import check_target

        check_target(target, traces, force)
        _compared(traces, labels, part["steps"], batch, global_batch).save(target, force=force)
        console.log(f"wrote {target}")
        return ExitCode.DONE
    if labels or batch or global_batch:
        raise UsageError("--label, --batch and --global-batch compare runs: give --compare, too")
    import gputrace
    from gputrace.report.html import load

    show = load("server").serve if serve else None
    with gputrace.open(*traces, keep_going=keep_going, windows=part["time"] is not None) as opened:
        with reading(_named(traces)) as progress:
            if show is not None:
                material = opened.material(**part, progress=progress)
            else:
                opened.report(target, **part, force=force, progress=progress)
        code = options.log_left_out(opened)
    if show is not None:
        show(material, port, lambda at: console.log(f"the page is at {at}"))
    else:
        console.log(f"wrote {target}")
    return code


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
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file or folder.")
@options.force
@options.window
@click.option("--redact", is_flag=True, help="Replace names of hosts, users, paths and programs.")
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
    target = output or options.default_target(traces[0], suffix)
    with (
        gputrace.open(*traces, keep_going=keep_going, windows=time is not None) as opened,
        progress_bar(f"exporting {_named(traces)}") as progress,
    ):
        opened.export(form, target, time=time, redact=redact, force=force, progress=progress)
        code = options.log_left_out(opened)
    console.log(f"wrote {target}")
    return code


@click.command("browse")
@click.argument("traces", metavar="TRACE...", nargs=-1, type=options.UNCHECKED)
@click.option(
    "--beside",
    metavar="TRACE",
    multiple=True,
    type=options.UNCHECKED,
    help="A trace of another run, on the same time axis; several are the parts of that run.",
)
@click.option("--demo", is_flag=True, help="Show the recording that `gputrace demo` analyses.")
def browse(traces: tuple[Path, ...], beside: tuple[Path, ...], demo: bool) -> int:
    """Show TRACE: what each GPU did when, and the gaps between the batches.

    TRACE is whatever `gputrace analyze` takes; several are the parts of one run. The worst gap is
    shown first. Press ? for the keys, q to leave.

    For a recording under way (NAME.sqlite.spool), the current speed of the steps, the last steps'
    time and the GPUs' clocks are shown.
    """
    if bool(traces) == demo:
        raise UsageError("browse takes either a TRACE or --demo (see gputrace browse --help)")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_terminal or os.environ.get("TERM") == "dumb":
        raise UsageError(
            "browse draws on a terminal, and stdin or stdout is none; "
            "use `gputrace analyze` where there is none"
        )
    try:
        return _browse(traces, beside, demo)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("textual"):
            raise
        raise MissingError("browse needs textual; install it with `pip install textual`") from None


def _browse(traces: tuple[Path, ...], beside: tuple[Path, ...], demo: bool) -> int:
    from gputrace.report.tui import app

    if demo:
        from gputrace.data import unpacked

        with unpacked("demo.sqlite.xz") as path:
            return app.browse((path,), beside)
    if (folder := _under_way(traces)) is None:
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
    TRACE is whatever `gputrace analyze` takes; several are the parts of one run. What the training
    logged itself stays apart, as a run of its own; the callbacks of `gputrace.loggers` log into the
    training's.
    """
    import gputrace
    from gputrace import loggers

    with gputrace.open(*traces, keep_going=keep_going) as opened, reading(_named(traces)):
        loggers.log(opened, *trackers)
        code = options.log_left_out(opened)
    for tracker in trackers:
        console.log(f"logged to {tracker}")
    return code


@click.command("kernel")
@click.argument("trace", type=options.UNCHECKED)
@click.argument("kernel")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--count", type=click.IntRange(min=1), default=1, show_default=True, help="Launches to profile."
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    help="Launches of it to leave out first, instead of those before a steady step.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("kernel.ncu-rep"),
    show_default=True,
    help="The report of Nsight Compute.",
)
@options.force
@click.option("--json", "as_json", is_flag=True, help="Print the kernel and its launches as JSON.")
def kernel(
    trace: Path,
    kernel: str,
    command: tuple[str, ...],
    output: Path,
    force: bool,
    count: int,
    skip: int | None,
    as_json: bool,
) -> int:
    """Show where a kernel of TRACE is launched, and profile it in COMMAND with Nsight Compute.

    KERNEL is a name, a part of one, or a rank by total time (1 takes most). COMMAND runs the
    program of the trace again, under ncu; without one, the command to run is printed.
    """
    import shlex

    import gputrace
    from gputrace.collectors.launch import load_numpy
    from gputrace.collectors.ncu import LaunchFilter, words

    load_numpy()
    if command and not force and output.exists():
        raise UsageError(f"{output}: exists; name another with -o, or give --force")
    with reading(trace.name) as progress, gputrace.open(trace) as opened:
        launches = opened.launches(kernel, progress=progress)
    first = launches.skip if skip is None else skip
    chosen = LaunchFilter(launches.pattern, first, count, launches.device)
    ready = shlex.join(words(chosen, output, command or ("COMMAND",)))
    if as_json:
        from gputrace.report import to_json

        click.echo(to_json({"launches": launches, "command": ready}), nl=False)
    else:
        click.echo(_launches_text(launches), nl=False, color=True)
        if not command:
            click.echo(f"\n{ready}")
    return _profile(chosen, output, command) if command else ExitCode.DONE


def _launches_text(launches: Launches) -> str:
    """Render the kernel's time on each GPU, and a description of the launch to profile."""
    from rich.text import Text

    from gputrace.report.tables import Table
    from gputrace.report.text import open_console, print_table, without_blanks

    screen = open_console(options.width(), options.use_color())
    use = launches.kernel
    title = f"{use.short} ({use.family}): {use.share:.1%} of the time, number {launches.place}"
    rows = tuple(
        (
            f"gpu {gpu.gpu}",
            f"{gpu.count:,}",
            *map(format_ns, (gpu.median_ns, gpu.max_ns, gpu.total_ns)),
        )
        for gpu in use.by_gpu
    )
    print_table(screen, Table(title, ("", "launches", "median", "longest", "total"), rows))
    screen.print(Text(use.name))
    if use.roofline is not None:
        screen.print(Text(_roofline(use.roofline)))
    where = "no step was found" if launches.step is None else f"in step {launches.step}"
    gpu = f"gpu {launches.gpu} (device {launches.device} of rank {launches.rank})"
    lines = [f"To look at: a launch on {gpu}, {where}, after {launches.skip:,} others of it."]
    if launches.alike > 1:
        lines.append(
            f"{launches.alike} kernels cannot be told apart by name: the right one comes if the "
            "program launches what it launched in the trace."
        )
    if not launches.from_start:
        lines.append(
            "The trace does not begin with the run: earlier launches are not counted, and an "
            "earlier one is profiled."
        )
    for line in lines:
        screen.print(Text(line))
    return without_blanks(screen)


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
    console.log(f"wrote {output}")
    return ExitCode.DONE


_BUNDLED: Final = """\
The bundled recording: PyTorch DistributedDataParallel, ResNet-50, two H200 GPUs.
Something makes it slower than it should be.
"""
_HERE: Final = """
The same on this machine: a few seconds of training, in a temporary folder.

$ gputrace record -- python train.py"""
_YOURS: Final = """
Your own: gputrace record -- python train.py, then gputrace analyze trace.sqlite"""


@click.command("demo")
@click.option("--no-record", is_flag=True, help="Only analyse the bundled recording.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Only write the bundled recording to a file, for other commands to look at.",
)
@click.option("--force", is_flag=True, help="Replace that file if it exists.")
@options.report_format
def demo(form: str, no_record: bool, output: Path | None, force: bool) -> int:
    """Analyze a bundled recording: two H200 GPUs training ResNet-50, slower than they should.

    Then record a small training on this machine (with PyTorch if it is installed, else numpy), and
    analyze that. The JSON is the bundled recording's, and has the other's as "recorded".

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
        click.echo()
        options.show(recorded, form)
    _explain(_YOURS, form)
    if recorded is not None or no_record:
        return ExitCode.DONE
    console.log(f"nothing was recorded here: {problem}")
    return ExitCode.DONE_IN_PART


def _write_demo(target: Path, force: bool) -> int:
    """Write the bundled recording to a file."""
    import shutil

    from gputrace.data import unpacked
    from gputrace.report import check_target, unfinished_file

    path = check_target(target, (), force)
    with unpacked("demo.sqlite.xz") as recording, unfinished_file(path) as unfinished:
        shutil.copyfile(recording, unfinished)
    console.log(f"wrote {target}")
    return ExitCode.DONE


def _explain(message: str, form: str) -> None:
    """Write an explanation to stderr, unless the output is for programs."""
    if form == "text":
        click.echo(message, err=True)


def _record_here(form: str) -> tuple[Report | None, str]:
    """Record a training here; return its report, or None and the reason."""
    import subprocess

    import gputrace
    from gputrace.data import unpacked

    _explain(_HERE, form)
    record = [sys.executable, "-m", "gputrace", "record", "--", sys.executable, "train.py"]
    try:
        with unpacked("train.py") as script:
            ran = subprocess.run(
                record,
                cwd=script.parent,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
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
