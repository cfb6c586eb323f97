"""A run's recording reduced to the numbers that a study keeps of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.compare.loop import Loop, measure_loop, measured_steps, working_gpus
from gputrace.analyzers.intervals import union
from gputrace.analyzers.options import Options
from gputrace.analyzers.results import CLASSES, IDLE_CAUSES, Analysis
from gputrace.bench.results import (
    FindingMeasure,
    GpuMeasure,
    LinkMeasure,
    Measure,
    Prediction,
)
from gputrace.errors import GputraceError
from gputrace.traces.events import Kind
from gputrace.traces.opening import open_traces
from gputrace.traces.trace import Progress, Trace


def measure(path: Path, progress: Progress | None = None) -> Measure:
    """The numbers of a trace file; one that cannot be read gives nothing but why."""
    try:
        with open_traces([str(path)]) as trace:
            return measure_trace(trace, progress)
    except (GputraceError, OSError) as error:
        return Measure(problem=" ".join(str(error).split()))


def measure_trace(trace: Trace, progress: Progress | None = None) -> Measure:
    """The numbers of an open trace; raises what `analyze` does."""
    analysis = analyze(trace, Options(gaps=0), progress)
    loop = measure_loop(measured_steps(analysis, None))
    waits = _data_waits(trace)
    classes = _classes(analysis, loop)
    return Measure(
        source=analysis.steps.source,
        kind=analysis.steps.kind,
        steps=_steps(trace, analysis),
        steady=len(loop.numbers) if loop is not None else 0,
        step_ns=_step(loop, classes),
        p50_ns=analysis.steps.p50_ns,
        classes=classes,
        wait_ns=_mean(loop, "communication_wait") if classes is not None else None,
        host_data_ns=_mean(loop, "host_data"),
        data_waits_ns=waits[0] if waits is not None else None,
        data_waits=waits[1] if waits is not None else 0,
        gap_ns=sum(classes[name] for name in IDLE_CAUSES) if classes is not None else None,
        findings=tuple(
            FindingMeasure(one.id, one.severity, one.impact_ns, one.message)
            for one in analysis.findings
        ),
        gpus=tuple(_gpus(analysis, loop)),
        links=tuple(_links(analysis)),
        predictions=tuple(
            Prediction(one.id, one.now_ns, one.step_ns, one.low_ns, one.high_ns)
            for one in analysis.what_if
        ),
        bus_bandwidth=_bus_bandwidth(analysis),
    )


def _steps(trace: Trace, analysis: Analysis) -> dict[int, int]:
    """How many steps were found on each rank, whatever their phase.

    Of marked ones, the marks: a step that nothing marks the begin of has no window to measure.
    """
    found: dict[int, set[int]] = {row.rank: set() for row in analysis.breakdown}
    if analysis.steps.source == "markers":
        marks = np.maximum(trace.events([Kind.STEP], ("rank",)).rank, 0)
        return {rank: int((marks == rank).sum()) for rank in sorted(found)}
    for step in analysis.step_list:
        found.setdefault(step.rank, set()).add(step.step)
    return {rank: len(found[rank]) for rank in sorted(found)}


def _classes(analysis: Analysis, loop: Loop | None) -> dict[str, int] | None:
    """Each class as whole nanoseconds, a step and GPU; None without steps or GPUs."""
    if loop is None or not analysis.gpus:
        return None
    return {name: round(loop.classes[name].value) for name in CLASSES}


def _step(loop: Loop | None, classes: Mapping[str, int] | None) -> int | None:
    """The step that the whole nanoseconds of its classes make, so that they sum to it exactly."""
    if loop is None:
        return None
    return sum(classes.values()) if classes is not None else round(loop.length.value)


def _mean(loop: Loop | None, name: str) -> int | None:
    if loop is None or name not in loop.classes:
        return None
    return round(loop.classes[name].value)


def _data_waits(trace: Trace) -> tuple[int, int] | None:
    """All waits for data of the first rank, and their number, in steps or not.

    Waits within waits, as of a loader that reads another, count once.
    """
    if Kind.DATA_WAIT not in trace.kinds:
        return None
    waits = trace.events([Kind.DATA_WAIT], ("start", "end", "rank"))
    if not len(waits):
        return None
    first = waits.select(waits.rank == waits.rank.min())
    return union(first.start, first.end).total, len(first)


def _bus_bandwidth(analysis: Analysis) -> int | None:
    """Collectives come in the order of their time."""
    known = (one.bus_bandwidth for one in analysis.collectives)
    return next((round(one) for one in known if one is not None), None)


def _gpus(analysis: Analysis, loop: Loop | None) -> Iterable[GpuMeasure]:
    """The GPUs that do the work."""
    names = {(gpu.gpu, gpu.rank): gpu.name for gpu in analysis.gpus}
    cards = {(card.gpu, card.rank): card for card in analysis.cards}
    memory = {(load.gpu, load.rank): load.memory_bytes for load in analysis.balance}
    for gpu, rank in working_gpus(analysis):
        if loop is None or gpu is None:
            continue
        card = cards.get((gpu, rank))
        yield GpuMeasure(
            gpu=gpu,
            rank=rank,
            name=names[gpu, rank],
            compute_ns=round(loop.of_gpu[gpu, rank]["compute"]),
            memory_bytes=memory.get((gpu, rank)) if card is None else card.memory_used_bytes,
            sm_clock_mhz=None if card is None else card.sm_clock_mhz,
            sm_clock_max_mhz=None if card is None else card.sm_clock_max_mhz,
        )


def _links(analysis: Analysis) -> Iterable[LinkMeasure]:
    """Each two GPUs once."""
    rows = {(link.from_, link.to): link for link in analysis.links}
    for (a, b), link in rows.items():
        if a < b:
            back = rows.get((b, a), link)
            known = [one.bandwidth for one in (link, back) if one.bandwidth is not None]
            yield LinkMeasure(a, b, link.link or back.link, min(known, default=None))
