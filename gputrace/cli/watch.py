"""Command ``watch``: sketches of an armed job while it runs, and what becomes slow in it."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from gputrace.cli import options
from gputrace.cli.console import log, note
from gputrace.errors import ExitCode, InputError, MissingError, UsageError
from gputrace.units import format_count

if TYPE_CHECKING:
    from gputrace.collectors.armed import ArmedProcess
    from gputrace.collectors.sketching import Sketcher
    from gputrace.model.sketches import SketchReport, Slowdown

_SHORTEST_NS: Final = 500_000_000
_MOST_KEPT: Final = 3
"""Findings at which the rows of the last windows are kept."""
_LONGEST: Final = 400
"""Characters of a problem that another library words."""


@click.command("watch")
@options.output("Folder for the sketches; by default gputrace-JOB.")
@click.option("--every", default="5s", metavar="TIME", help="Look so often.", show_default=True)
@click.option(
    "--for", "length", metavar="TIME", help="Stop after so long; by default when the job ends."
)
@click.option(
    "--kernels",
    type=click.IntRange(100),
    metavar="N",
    envvar="GPUTRACE_KERNELS",
    help="Every N steps, record three on all ranks for the times of kernels by family, e.g. 1000, "
    "or more rarely, so that it costs 1 % at most; by default, never. Also GPUTRACE_KERNELS.",
)
@click.option(
    "--alert",
    metavar="COMMAND",
    help="Run a shell command at each new finding, with the sentence in GPUTRACE_ALERT.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve Prometheus metrics, on this machine alone unless HOST says otherwise.",
)
@click.option(
    "--otlp", metavar="URL", help="Send the same metrics to an OpenTelemetry collector, by HTTP."
)
@click.argument("target", metavar="[PID|JOB]", required=False)
def command(
    output: Path | None,
    every: str,
    length: str | None,
    kernels: int | None,
    alert: str | None,
    metrics: str | None,
    otlp: str | None,
    target: str | None,
) -> int:
    """Watch a job under `gputrace arm`: which rank is late, and since when steps are slower.

    Writes some hundred bytes for each step of each rank, which `gputrace analyze FOLDER` reads at
    any time: put the folder of all machines of a job on a shared disk. Nothing is added to the
    processes, whose hooks write anyway, but for the windows of --kernels. Each finding is one line,
    printed when it is new.
    """
    from gputrace.analyzers.sketches import WINDOW, classify, report_sketches
    from gputrace.collectors.armed import find, keep_ring, select
    from gputrace.collectors.sketching import Sketcher
    from gputrace.store.sketches import read_sketches

    pause_ns, length_ns = _duration("--every", every), length and _duration("--for", length)
    members = select(target, find())
    job, processes = members[0].job, f"{len(members)} process{'es' * (len(members) > 1)}"
    folder = output or Path("gputrace-" + "".join(c if c.isalnum() else "-" for c in job))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file; name a folder")
    latest: list[SketchReport] = []
    if metrics:
        _serve(metrics, latest)
    if otlp:
        _send(otlp, pause_ns, latest)
    until = time.monotonic() + length_ns / 1e9 if length_ns else None
    known: dict[tuple[str, str, int | None], int] = {}
    steps = 0
    try:
        sketcher = Sketcher(folder, kernels or 0, classify)
        ends = f"for {length_ns / 1e9:g} s" if length_ns else "until it ends or Ctrl+C"
        note(
            f"watching {processes} of job {job} {ends}; `gputrace analyze {folder}` shows its steps"
        )
        while True:
            members = [member for member in find() if member.job == job]
            steps = _look(sketcher, members, steps)
            if any(folder.glob("*.sketch")):
                report = report_sketches(read_sketches(folder))
                for change in report.changes:
                    kind = change.part if change.kind == "kernels" else change.kind
                    key = change.job, kind, change.rank
                    if change.since_step - known.get(key, -WINDOW) >= WINDOW:
                        _say(change, alert)
                        ring = folder / f"{change.kind}-{change.since_step}.spool"
                        if kernels and members and len(known) < _MOST_KEPT and not ring.exists():
                            keep_ring(members, ring)
                            note(f"`gputrace recover {ring}` makes a trace of the windows so far")
                    known.setdefault(key, change.since_step)
                latest[:] = [report]
            if not members or (until is not None and time.monotonic() >= until):
                break
            time.sleep(pause_ns / 1e9)
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise InputError(folder, f"cannot be written ({error.strerror})") from error
    kept = f"{format_count(steps, 'step')} of {processes} kept in {folder}"
    note(kept if known or not steps else f"{kept}: no rank is late, no step became slower")
    return ExitCode.DONE


def _look(sketcher: Sketcher, members: Sequence[ArmedProcess], steps: int) -> int:
    """Keep the steps that are new; return how many there are, and say when the first are seen."""
    now = steps + sketcher.look(members)
    if now and not steps:
        note("its first steps are seen; a line follows when a rank is late, or steps become slower")
    return now


def _duration(option: str, text: str) -> int:
    length = options.read_duration(text, f"{option}: ")
    if length < _SHORTEST_NS:
        raise UsageError(f"{option} {text}: half a second at least")
    return length


def _say(change: Slowdown, alert: str | None) -> None:
    """Print a finding, and run the user's command, whose failure is said and ends nothing."""
    note(f"{time.strftime('%H:%M:%S')} {change.message}")
    if alert is None:
        return
    environment = {**os.environ, "GPUTRACE_ALERT": change.message, "GPUTRACE_KIND": change.kind}
    try:
        words = ["/bin/sh", "-c", alert]
        ended = subprocess.run(words, env=environment, timeout=30, check=False)
        problem = f"ended with {ended.returncode}" if ended.returncode else ""
    except subprocess.TimeoutExpired:
        problem = "did not end within 30 s"
    if problem:
        log(f"--alert: {alert} {problem}")


def _serve(address: str, latest: Sequence[SketchReport]) -> None:
    """Serve metrics of the latest report, if any; raise MissingError without the client."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not int(port) < 1 << 16:
        raise UsageError(f"--metrics {address}: not a port, nor HOST:PORT")
    try:
        from prometheus_client import start_http_server
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.registry import CollectorRegistry
    except ImportError:
        problem = "--metrics needs prometheus-client"
        raise MissingError(f'{problem}: pip install "gputrace[metrics]"') from None

    class _Collector:
        def collect(self) -> Iterator[Any]:
            for name, text, labels, rows in families(latest[0]) if latest else ():
                family = GaugeMetricFamily(f"gputrace_{name}", text, labels=labels)
                for values, figure in rows:
                    family.add_metric(list(map(str, values)), figure)
                yield family

    registry = CollectorRegistry()
    registry.register(_Collector())
    try:
        start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--metrics {address}: {reason}") from None


def _send(url: str, pause_ns: int, latest: Sequence[SketchReport]) -> None:
    """Send metrics of the latest report, if any, now and then, and at the end.

    Headers, certificates and the timeout are what the variables OTEL_EXPORTER_OTLP_* say. Raises
    MissingError without the SDK.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--otlp {url}: not a URL such as http://collector:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    except ImportError:
        problem = "--otlp needs OpenTelemetry's SDK and exporter"
        raise MissingError(f'{problem}: pip install "gputrace[otlp]"') from None
    from gputrace.model.sketches import SketchReport

    def observe(name: str, _: object) -> Iterator[Any]:
        for known, _text, labels, rows in families(latest[0]) if latest else ():
            for values, figure in rows if known == name else ():
                yield Observation(figure, dict(zip(labels, values, strict=True)))

    # Not the password, if it has one.
    _say_failures(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    exporter = OTLPMetricExporter(url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, pause_ns / 1e6)
    provider = MeterProvider([reader], Resource.create({SERVICE_NAME: "gputrace"}))
    meter = provider.get_meter("gputrace")
    for name, text, *_ in families(SketchReport(1, "sketches", (), ())):
        unit = {"seconds": "s", "bytes": "By"}.get(name.rpartition("_")[2], "")
        meter.create_observable_gauge(f"gputrace_{name}", [partial(observe, name)], unit, text)


def _say_failures(url: str) -> None:
    """Say the first problem that the exporter logs; it tries again by itself."""
    logger = logging.getLogger("opentelemetry")

    class _First(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logger.removeHandler(self)
            log(f"--otlp {url}: {' '.join(record.getMessage().split())[:_LONGEST]}")

    logger.addHandler(_First(logging.WARNING))
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


Family = tuple[str, str, Sequence[str], list[tuple[tuple[Any, ...], float]]]


def families(report: SketchReport) -> Iterator[Family]:
    """Yield name, help, labels and rows of each metric."""
    # "job" is a label of Prometheus's own.
    where = ("run", "rank", "host")
    rows = [((row.job, row.rank, row.host), row) for row in report.ranks]
    for name, text, field, scale in (
        ("steps", "Training steps that have ended.", "steps", 1.0),
        ("step_seconds", "Median step.", "median_ns", 1e-9),
        ("step_p95_seconds", "95th percentile of steps.", "p95_ns", 1e-9),
        ("resident_bytes", "Memory of the process.", "resident_bytes", 1.0),
    ):
        yield name, text, where, [(key, getattr(row, field) * scale) for key, row in rows]
    parts = ("data", "gc", "compilation", "checkpoint", "queued")
    spent = [
        ((*key, part), getattr(row, f"{part}_ns") * 1e-9) for key, row in rows for part in parts
    ]
    yield "step_part_seconds", "Mean part of a step.", (*where, "part"), spent
    found = [
        ((c.job, c.kind, "" if c.rank is None else c.rank, c.part), c.ns * 1e-9)
        for c in report.changes
    ]
    labels = ("run", "kind", "rank", "part")
    yield "lost_seconds", "Time that a step loses to a late rank or a change.", labels, found
