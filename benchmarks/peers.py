"""Other programs on the same recording, in turn with gputrace; each only where it is installed.

They answer other questions, some more of them and some fewer, so this says what one pays for an
answer and not which program is better made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks import commands
from benchmarks.chart import write_chart
from benchmarks.inputs import USUAL, kineto_folder, nsys_export
from benchmarks.measure import LIMIT_S, Run, Series, alternate
from benchmarks.peer_programs import KINETO, NSYS, PEERS, Found, Inputs
from benchmarks.tables import mebibytes, seconds, show, spread

PATIENCE_S: Final = 30.0
"""A peer that has had this long in all gets no further turn."""


OURS: Final = {
    NSYS: "gputrace analyze, the nsys export",
    KINETO: "gputrace analyze, the eight Kineto files",
}


def show_peers(turns: int, chart: Path | None = None) -> None:
    """Runs those installed, and says which are not; each beside gputrace on the same input."""
    with tempfile.TemporaryDirectory(prefix="gputrace-peers-") as folder:
        inputs = Inputs(nsys_export(USUAL), Path(folder))
        found = [peer(inputs) for peer in PEERS]
        ours = {
            NSYS: commands.analyze(nsys_export(USUAL), OURS[NSYS]),
            KINETO: commands.analyze(kineto_folder(USUAL), OURS[KINETO]),
        }
        used = dict.fromkeys(peer.reads for peer in found if peer.jobs)
        jobs = [ours[kind] for kind in used] + [job for peer in found for job in peer.jobs]
        series = alternate(jobs, turns, PATIENCE_S) if used else {}
    beside = {job.label: OURS[peer.reads] for peer in found for job in peer.jobs}
    rows = [_row(label, one, series[beside.get(label, label)]) for label, one in series.items()]
    if chart is not None and series:
        _draw(chart, series)
    show(
        "Peers, in turn with gputrace on the same recording",
        ("command", "runs", "wall s", "fastest to slowest", "x gputrace", "CPU s", "peak MiB"),
        rows + [_absent(peer) for peer in found if not peer.jobs],
    )
    _say_versions(found)


def _draw(chart: Path, series: Mapping[str, Series]) -> None:
    done = {label: one.wall_s for label, one in series.items() if not one.runs[-1].code}
    bars = sorted(done.items(), key=lambda bar: bar[1])
    title = "The same recording of 0.8 million kernels: seconds, logarithmic"
    write_chart(chart, title, [(label, wall, label in OURS.values()) for label, wall in bars])
    print(f"\n  The chart is {chart}")


def _row(label: str, series: Series, ours: Series) -> tuple[str, ...]:
    last = series.runs[-1]
    if last.code:
        return (label, str(len(series.runs)), "-", _why(last), "-", "-", "-")
    times = f"{series.times(ours):.1f}"
    runs = str(len(series.runs))
    peak = mebibytes(series.peak_bytes)
    cpu = seconds(series.cpu_s)
    return (label, runs, seconds(series.wall_s), spread(series), times, cpu, peak)


def _why(run: Run) -> str:
    if run.wall_s >= LIMIT_S:
        return f"ended after {LIMIT_S:.0f} s"
    said = run.error.strip() or run.output.strip()
    return f"failed: {(said.splitlines() or ['it said nothing'])[-1][:60]}"


def _absent(peer: Found) -> tuple[str, ...]:
    return (peer.name, "-", "-", "not installed", "-", "-", "-")


def _say_versions(found: Sequence[Found]) -> None:
    for peer in found:
        if peer.jobs:
            print(f"\n  {peer.name} {peer.version}: {peer.note}", end="")
    print("\n  Peak memory is that of all processes; copies of the input are not timed.")
