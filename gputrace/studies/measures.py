"""Measures of each run: its recording reduced to the numbers that a study keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import convert

from gputrace.analyzers.compare.runs import Loop, main_gpus, measure_loop, measured_steps
from gputrace.analyzers.pipeline import analyze
from gputrace.errors import GputraceError
from gputrace.model.events import Kind
from gputrace.model.intervals import union
from gputrace.model.options import Options
from gputrace.model.results import Analysis
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from gputrace.model.trace import Progress, Trace
from gputrace.readers.open import open_traces
from gputrace.studies.database import Database, Settings


class GpuMeasure(Struct, frozen=True):
    """GPU over the steady steps of a run; None is unknown."""

    gpu: int
    rank: int
    name: str
    compute_ns: int
    """Per step."""
    memory_bytes: int | None = None
    """Peak use on the card, of all processes."""
    sm_clock_mhz: float | None = None
    """Median while the GPU was busy."""
    sm_clock_max_mhz: int | None = None


class LinkMeasure(Struct, frozen=True):
    """Link between two GPUs and its use; bandwidths in bytes per second."""

    a: int
    b: int
    link: str
    """``NV18``, ``PIX``, ``SYS``; empty if unknown."""
    bandwidth: int | None = None
    """Bandwidth of large copies in the slower direction."""


class FindingMeasure(Struct, frozen=True):
    """Finding of a run."""

    id: str
    severity: str
    impact_ns: int
    message: str


class Prediction(Struct, frozen=True):
    """Predicted step time with a cure, from the recording of a run without it."""

    id: str
    now_ns: int
    step_ns: int
    low_ns: int
    high_ns: int


class Measure(Struct, frozen=True):
    """Numbers kept of the recording of one run; a step is the mean over the steady steps."""

    problem: str = ""
    """Reason why the trace cannot be read; empty if it can."""
    source: str = ""
    """Source of the steps: ``markers``, ``profiler``, ``nvtx``, ``inferred`` or ``none``."""
    kind: str = "none"
    """``training``, ``iterations`` or ``none``."""
    steps: Mapping[int, int] = {}
    """Detected steps by rank."""
    steady: int = 0
    step_ns: int | None = None
    p50_ns: int | None = None
    classes: Mapping[str, int] | None = None
    """Nanoseconds per step and GPU by class; sum to ``step_ns``; None without GPUs."""
    wait_ns: int | None = None
    """Part of communication spent waiting for other ranks, per step and GPU."""
    host_data_ns: int | None = None
    """Host time in the data loader per step, overlapped or not."""
    data_waits_ns: int | None = None
    """Total of the recorded waits for data of the first rank; None if none was recorded."""
    data_waits: int = 0
    gap_ns: int | None = None
    """Idle time per step and GPU."""
    findings: tuple[FindingMeasure, ...] = ()
    gpus: tuple[GpuMeasure, ...] = ()
    links: tuple[LinkMeasure, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    bus_bandwidth: int | None = None
    """Bytes per second of the most time-consuming collective whose bandwidth is known."""

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes.keys() != set(CLASSES):
            raise ValueError("classes of a step are missing")


class RunResult(Struct, frozen=True):
    """Run of a study: a repeat of a configuration."""

    settings: Settings
    repeat: int = 0
    recorded: bool = True
    state: str = "done"
    """``done``, ``failed`` or ``skipped``."""
    reason: str = ""
    """Reason why it failed or was skipped, on one line."""
    result: Mapping[str, Any] = {}
    """The script's last line of output, parsed from JSON."""
    measure: Measure | None = None
    """Measure of its recording; None for a bare run."""


class Results(Struct, frozen=True):
    """Results of all runs of a study."""

    title: str
    question: str
    runs: tuple[RunResult, ...]
    left: int = 0
    """Number of planned runs that are not over."""


def measure(path: Path, progress: Progress | None = None) -> Measure:
    """Measure a trace file; for an unreadable one, only ``problem`` is set."""
    try:
        with open_traces([str(path)]) as trace:
            return measure_trace(trace, progress)
    except (GputraceError, OSError) as error:
        return Measure(problem=" ".join(str(error).split()))


def measure_trace(trace: Trace, progress: Progress | None = None) -> Measure:
    """Measure an open trace; raises what `analyze` raises."""
    analysis = analyze(trace, Options(gaps=0), progress)
    loop = measure_loop(measured_steps(analysis, None), analysis.recorder)
    waits_ns, waits = _data_waits(trace)
    means = {} if loop is None else {n: round(mean.value) for n, mean in loop.classes.items()}
    classes = {name: means[name] for name in CLASSES} if means and analysis.gpus else None
    step_ns = None if loop is None else round(loop.length.value)
    by_ends, links = {(link.from_, link.to): link for link in analysis.links}, []
    for (a, b), link in by_ends.items():
        if a < b:  # Each pair of GPUs once.
            back = by_ends.get((b, a), link)
            known = [way.bandwidth for way in (link, back) if way.bandwidth is not None]
            links.append(LinkMeasure(a, b, link.link or back.link, min(known, default=None)))
    return Measure(
        source=analysis.steps.source,
        kind=analysis.steps.kind,
        steps=_steps(trace, analysis),
        steady=len(loop.numbers) if loop is not None else 0,
        # As the sum of the rounded classes, so that these add up exactly.
        step_ns=step_ns if classes is None else sum(classes.values()),
        p50_ns=analysis.steps.p50_ns,
        classes=classes,
        wait_ns=means.get("communication_wait") if classes is not None else None,
        host_data_ns=means.get("host_data"),
        data_waits_ns=waits_ns,
        data_waits=waits,
        gap_ns=sum(classes[name] for name in IDLE_CAUSES) if classes is not None else None,
        findings=convert(analysis.findings, tuple[FindingMeasure, ...], from_attributes=True),
        gpus=tuple(_gpus(analysis, loop)),
        links=tuple(links),
        predictions=convert(analysis.what_if, tuple[Prediction, ...], from_attributes=True),
        # Collectives are ordered by their time.
        bus_bandwidth=next(
            (round(c.bus_bandwidth) for c in analysis.collectives if c.bus_bandwidth is not None),
            None,
        ),
    )


def _steps(trace: Trace, analysis: Analysis) -> dict[int, int]:
    """Return the number of steps of each rank, in all phases.

    Marked steps are counted by their marks: the first has no start mark, thus no window.
    """
    steps: dict[int, set[int]] = {row.rank: set() for row in analysis.breakdown}
    if analysis.steps.source == "markers":
        marks = np.maximum(trace.events([Kind.STEP], ("rank",)).rank, 0)
        return {rank: int((marks == rank).sum()) for rank in sorted(steps)}
    for step in analysis.step_list:
        steps.setdefault(step.rank, set()).add(step.step)
    return {rank: len(steps[rank]) for rank in sorted(steps)}


def _data_waits(trace: Trace) -> tuple[int | None, int]:
    """Return the total and the number of the first rank's waits for data, inside steps or not.

    Nested waits, as of a loader that wraps another, add to the total once.
    """
    if Kind.DATA_WAIT not in trace.kinds:
        return None, 0
    waits = trace.events([Kind.DATA_WAIT], ("start", "end", "rank"))
    if not len(waits):
        return None, 0
    first = waits.select(waits.rank == waits.rank.min())
    return union(first.start, first.end).total, len(first)


def _gpus(analysis: Analysis, loop: Loop | None) -> Iterable[GpuMeasure]:
    names = {(gpu.gpu, gpu.rank): gpu.name for gpu in analysis.gpus}
    cards = {(card.gpu, card.rank): card for card in analysis.cards}
    memory = {(load.gpu, load.rank): load.memory_bytes for load in analysis.balance}
    for gpu, rank in main_gpus(analysis):
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


def measure_runs(
    database: Database,
    watching: Callable[[str], AbstractContextManager[Progress | None]] = lambda _: nullcontext(),
) -> None:
    """Measure the recordings that have not been measured yet; ``watching`` takes their names."""
    known = database.measures()
    for run in database.runs():
        if run.trace is not None and run.state == "done" and run.id not in known:
            with watching(run.trace) as progress:
                measured = measure(database.folder / run.trace, progress)
            database.save_measure(run, measured)


def read_results(database: Database) -> Results:
    """Return the runs of the current plan with their measures; raises InputError if empty."""
    plan = database.plan()
    study, settings = plan.study, {each.key: each.settings for each in plan.configurations}
    order = {key: position for position, key in enumerate(settings)}
    runs = sorted(database.runs(), key=lambda run: (order[run.configuration], run.repeat))
    measures = {id: database.convert(values, Measure) for id, values in database.measures().items()}
    results = (
        RunResult(
            settings=settings[run.configuration],
            repeat=run.repeat,
            recorded=run.recorded,
            state=run.state,
            reason=run.why,
            result=run.result or {},
            measure=None if run.id is None else measures.get(run.id),
        )
        for run in runs
    )
    planned = len(settings) * study.repeats * (2 if study.recording == "both" else 1)
    return Results(study.title, study.question, tuple(results), planned - len(runs))
