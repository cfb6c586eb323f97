"""The speed of gputrace: the whole command, its growth, its start, its peers."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Final

from benchmarks import commands, gate, peers
from benchmarks.inputs import (
    DENSE_SIZES,
    HUGE,
    LARGE,
    SIZES,
    USUAL,
    kineto_folder,
    nsys_export,
    nvprof_folder,
)
from benchmarks.measure import MIB, Failed, Job, Series, alternate, alternate_all, machine, pin
from benchmarks.options import Options
from benchmarks.tables import mebibytes, seconds, show, spread, verdict

TARGET_S: Final = 0.55
TARGET_AGAIN_S: Final = 0.12
TARGET_BYTES: Final = 450 * MIB
TARGET_HELP_S: Final = 0.15
KINETO: Final = "PyTorch's profiler, a file for each of 8 ranks"
TARGET_KINETO_S: Final = 2.0
TARGET_KINETO_BYTES: Final = 800 * MIB
DENSE: Final = "2 M"
TARGET_HUGE_S: Final = 120.0
_HUGE_LIMIT_S: Final = 3_600.0
_GROWN: Final = (
    *("kernels", "file MiB", "wall s", "fastest to slowest", "x floor", "µs a kernel"),
    *("user µs", "to the usual", "peak MiB", "bytes a kernel"),
)
READ: Final = "cat FILE, its bytes read once"
START: Final = "python -c pass"


def run(options: Options) -> int:
    """Prints the tables; 1 where a bound is broken or a command does not work."""
    pin()
    print(f"speed: {machine()}")
    try:
        if options.check:
            return gate.check(options)
        if options.huge:
            _huge()
            return 0
        _whole_command(options.runs)
        _formats(options.runs)
        _growth(options)
        _dense(options)
        _start(options.runs)
        if options.peers:
            peers.show_peers(options.runs, options.chart)
    except Failed as failure:
        print(f"speed: {failure}", file=sys.stderr)
        return 1
    return 0


def _whole_command(turns: int) -> None:
    path = nsys_export(USUAL)
    with tempfile.TemporaryDirectory(prefix="gputrace-cache-") as cache:
        jobs = [
            commands.analyze(path),
            commands.analyze(path, commands.AGAIN, cache),
            commands.floor(path),
            Job(READ, ("sh", "-c", 'cat "$0" >/dev/null', str(path))),
            commands.python("pass", START),
        ]
        series = alternate_all(jobs, turns)
    floor, analysis = series[commands.FLOOR], series[commands.ANALYZE]
    kernels, calls = commands.rows(floor)
    for one in (analysis, series[commands.AGAIN]):
        commands.require_right(one, kernels)
    size = mebibytes(path.stat().st_size)
    show(
        f"The whole command: {kernels:,} kernels, {calls:,} CUDA calls, {size} MiB, "
        f"median of {turns}",
        ("command", "wall s", "fastest to slowest", "CPU s", "peak MiB", "x floor"),
        [_row(label, one, floor) for label, one in series.items()],
    )
    inside = commands.seconds_inside(floor)
    print(f"\n  Inside the floor's process, at best: {seconds(inside)} s")
    time, memory = analysis.wall_s, analysis.peak_bytes
    again = series[commands.AGAIN].wall_s
    print(f"  Target {TARGET_S} s: {verdict(time < TARGET_S)}", end="; ")
    print(f"again, {TARGET_AGAIN_S} s: {verdict(again < TARGET_AGAIN_S)}", end="; ")
    print(f"{mebibytes(TARGET_BYTES)} MiB: {verdict(memory < TARGET_BYTES)}")


def _row(label: str, series: Series, floor: Series) -> tuple[str, ...]:
    figures = (seconds(series.wall_s), spread(series), seconds(series.cpu_s))
    return (label, *figures, mebibytes(series.peak_bytes), f"{series.times(floor):.2f}")


def _formats(turns: int) -> None:
    """Return one recording in each format that runs come in."""
    nsys, floor = "nsys, one file", commands.floor(nsys_export(USUAL))
    jobs = [
        commands.analyze(nsys_export(USUAL), nsys),
        commands.analyze(nvprof_folder(USUAL), "nvprof, a file for each of 8 ranks"),
        commands.analyze(kineto_folder(USUAL), KINETO),
    ]
    series = alternate_all([*jobs, floor], turns)
    kernels, _ = commands.rows(series.pop(floor.label))
    for one in series.values():
        commands.require_right(one, kernels)
    show(
        f"Formats: gputrace analyze FILE --json, median of {turns}",
        ("format", "wall s", "fastest to slowest", "CPU s", "peak MiB", "x nsys"),
        [_row(label, one, series[nsys]) for label, one in series.items()],
    )
    time, memory = series[KINETO].wall_s, series[KINETO].peak_bytes
    print(f"\n  Target for {KINETO}, {TARGET_KINETO_S} s: ", end="")
    print(verdict(time < TARGET_KINETO_S), end="; ")
    print(f"{mebibytes(TARGET_KINETO_BYTES)} MiB: {verdict(memory < TARGET_KINETO_BYTES)}")


def _growth(options: Options) -> None:
    left_out = (HUGE,) if options.large else (HUGE, *LARGE)
    sizes = [size for size in SIZES if size not in left_out]
    title = "Growth: gputrace analyze FILE --json by kernels (linear: the same time a kernel)"
    series = _by_size(title, "nsys", sizes, USUAL, options.runs)
    first, last = sizes[0], sizes[-1]
    print(f"\n  Beyond the fixed cost, from {first} to {last}: {_marginal(series, first, last)}")


def _dense(options: Options) -> None:
    """One GPU that waits for each launch has as many gaps as kernels."""
    sizes = [size for size in DENSE_SIZES if options.large or size == DENSE]
    title = "Launch-bound, one GPU: gputrace analyze FILE --json by kernels"
    _by_size(title, "dense", sizes, DENSE, options.runs)


def _huge() -> None:
    """Measure one process on a file that does not fit into memory, once."""
    path = nsys_export(HUGE)
    jobs = [commands.analyze(path), commands.floor(path)]
    series = alternate(jobs, 1, limit_s=_HUGE_LIMIT_S)
    if failed := next((one for one in series.values() if one.runs[0].code), None):
        raise Failed(failed.runs[0].error.strip()[-500:])
    kernels, calls = commands.rows(series[commands.FLOOR])
    analysis = series[commands.ANALYZE]
    commands.require_right(analysis, kernels)
    ran = analysis.runs[0]
    size = mebibytes(path.stat().st_size)
    show(
        f"Out of core: {kernels:,} kernels, {calls:,} CUDA calls, {size} MiB",
        ("command", "wall s", "user s", "system s", "peak MiB", "anonymous MiB"),
        [
            (
                label,
                *map(seconds, (one.wall_s, one.runs[0].user_s, one.runs[0].system_s)),
                *map(mebibytes, (one.peak_bytes, one.anonymous_bytes)),
            )
            for label, one in series.items()
        ],
    )
    processor_s = ran.user_s + ran.system_s
    print(f"\n  Target {TARGET_HUGE_S:.0f} s: {verdict(ran.wall_s < TARGET_HUGE_S)}", end="; ")
    print(f"by the processor's time: {verdict(processor_s < TARGET_HUGE_S)}")


def _by_size(
    title: str, kind: str, sizes: Sequence[str], usual: str, runs: int
) -> dict[str, Series]:
    """Shows a line for each size; its time a kernel also as a ratio to that of the usual one."""
    paths = {size: nsys_export(size, kind) for size in sizes}
    jobs = [commands.analyze(path, size) for size, path in paths.items()]
    floors = [commands.floor(path, f"floor {size}") for size, path in paths.items()]
    series = alternate_all([*jobs, *floors], min(runs, 5))
    rows = [_grown(size, paths[size].stat().st_size, series, usual) for size in sizes]
    show(title, _GROWN, rows)
    return series


def _grown(
    size: str, file_bytes: int, series: dict[str, Series], usual_size: str
) -> tuple[str, ...]:
    one, floor = series[size], series[f"floor {size}"]
    kernels, usual = (commands.rows(series[f"floor {name}"])[0] for name in (size, usual_size))
    relative = one.times(series[usual_size]) * usual / kernels
    return (
        f"{kernels:,}",
        mebibytes(file_bytes),
        seconds(one.wall_s),
        spread(one),
        f"{one.times(floor):.2f}",
        f"{one.wall_s / kernels * 1e6:.2f}",
        f"{one.user_s / kernels * 1e6:.2f}",
        f"{relative:.2f}",
        mebibytes(one.peak_bytes),
        f"{one.peak_bytes / kernels:.0f}",
    )


def _marginal(series: dict[str, Series], first: str, last: str) -> str:
    low, high = series[first], series[last]
    kernels = [commands.rows(series[f"floor {name}"])[0] for name in (first, last)]
    more = kernels[1] - kernels[0]
    time, memory = (high.wall_s - low.wall_s) / more, (high.peak_bytes - low.peak_bytes) / more
    return f"{time * 1e6:.2f} µs and {memory:.0f} bytes a kernel"


def _start(turns: int) -> None:
    usage = commands.usage()
    jobs = [
        usage,
        commands.python("import gputrace", "import gputrace"),
        commands.python("from gputrace import open", "from gputrace import open"),
        commands.python("pass", START),
    ]
    series = alternate_all(jobs, 2 * turns)
    show(
        f"Start: median of {2 * turns}",
        ("command", "wall ms", "fastest to slowest, s", "peak MiB"),
        [
            (label, f"{one.wall_s * 1e3:.0f}", spread(one), mebibytes(one.peak_bytes))
            for label, one in series.items()
        ],
    )
    met = series[usage.label].wall_s < TARGET_HELP_S
    print(f"\n  Target for --help, {TARGET_HELP_S * 1e3:.0f} ms: {verdict(met)}")
