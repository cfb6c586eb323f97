"""Finding about input: GPUs that wait for batches, and what makes these late."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.findings.copies import is_pinned
from gputrace.analyzers.findings.facts import HIGH, MEDIUM, Facts, severity_of
from gputrace.analyzers.grouping import time_of
from gputrace.analyzers.host_state import read_counters, read_host_state
from gputrace.analyzers.idle_causes import read_evidence
from gputrace.analyzers.ledger.causes import Host
from gputrace.analyzers.loader import (
    LoaderEvents,
    Pace,
    measure_loaders,
    measure_pipelines,
    read_loaders,
)
from gputrace.model.events import Kind
from gputrace.model.host import COLLATING, READING, SENDING, InputPipeline, Loader
from gputrace.model.intervals import EMPTY, Intervals, merge_touching, search, union
from gputrace.model.results import Breakdown, Evidence, Finding
from gputrace.units import format_count, format_ns

KEEP_LOADER: Final = {
    "pytorch": "keep the loader's workers from one epoch to the next: "
    "DataLoader(persistent_workers=True), or one endless loader with a sampler that restarts",
    "tensorflow": "keep the pipeline from one epoch to the next: dataset.repeat().prefetch(…) and "
    "steps_per_epoch, cache decoded data",
    "": "keep the loader and what it has prefetched from one epoch to the next",
}
_LOADER_WAIT_PART: Final = 0.2
"""Part of the wait for input below which waits for the loader do not explain it."""


def data_feeding(facts: Facts) -> Iterator[Finding]:
    """The GPUs wait for the next batch; in traces without GPU activity, the program does.

    If the loader's workers were recorded, the details say how many would keep up (from a
    simulation of the loader's queue). It also names a worker that takes 1.5 times as long as the
    others, and a stage of loading that takes 40 % of the workers' time. For tf.data, Grain, DALI
    and torchdata's nodes, it names the setting that limits the pipeline, and predicts the step with
    a larger value.

    Cost: idle time with that cause; without GPU activity, the program's wait, an upper bound on a
    GPU's idle time for this reason, if it is 5 % beside receiving batches that are there, or
    receiving takes 20 %; less the part in which it collects garbage or is certain to be queued for
    a core, as those are findings of their own.

    Wrong if: the step is no shorter when one batch is reused.
    """
    if facts.per_gpu.operations:
        what = "data" if facts.trains else "data from the host"
        text = f"{{gpus}} for {what} {{cost}}"
        findings = facts.costly("data-feeding", text, how_to_feed_faster(facts))
    else:
        findings = _without_gpu(facts)
    for finding in findings:
        details, cures, evidence = _why_late(facts)
        yield replace(
            finding,
            advice="; ".join(cures) or finding.advice,
            evidence={**finding.evidence, **evidence},
            details=(*details, *finding.details),
        )


def _without_gpu(facts: Facts) -> Iterator[Finding]:
    """Yield the finding of a program without a GPU: of what it waits, a GPU may idle as much."""
    charged = [_charged_elsewhere(facts, rank) for rank in facts.ranks]
    collecting, queued = (sum(ns) // facts.turns for ns in zip((0, 0), *charged, strict=True))
    elsewhere = collecting + queued
    cost = facts.mean("host_data") - elsewhere - mean_restart(facts)
    loader = _slowest_loader(facts)
    severity = severity_of(facts.share_of(cost))
    receiving = 0.0 if loader is None else loader.receiving_ns
    # Batches may be there when they are asked for.
    is_ready = receiving < HIGH * facts.mean_ns and cost - receiving < MEDIUM * facts.mean_ns
    if severity is None or is_ready:
        return
    to = ["garbage collections"] * (collecting > 0) + ["the queue for a core"] * (queued > 0)
    more = f"{format_ns(elsewhere)} more of its waits go to {' and '.join(to)}"
    told = [more] if elsewhere >= _TOLD_ELSEWHERE * cost else []
    yield facts.finding(
        "data-feeding",
        severity,
        cost,
        f"the program waits for data {facts.of_step(cost)}",
        how_to_feed_faster(facts),
        {"share": round(facts.share_of(cost), 4), "host_data_ns": cost, "total_ns": facts.mean_ns},
        (*told, *_sampled(facts, loader)),
    )


_TOLD_ELSEWHERE: Final = 0.05
"""Part of the waits for data that other causes must have of them to be told."""


def _charged_elsewhere(facts: Facts, rank: int) -> tuple[int, int]:
    """Return the nanoseconds of a rank's waits for data that are charged to other causes: in which
    it collects garbage, and those in which it is certain to be queued for a core.
    """
    process, whole = facts.processes.get(rank, -1), facts.per_gpu.whole
    waits = _waits_for_data(facts, process).intersection(facts.time_of_rank(rank))
    waits = waits.difference(restarts(facts, rank))
    collecting = waits.intersection(whole.once(read_host_state).collections.get(process, EMPTY))
    counters = whole.once(read_counters).get(process)
    waits = waits.difference(collecting)
    return collecting.total, counters.queued_in(waits) if counters is not None else 0


def _sampled(facts: Facts, loader: Loader | None) -> Iterator[str]:
    """Say at which line the program itself makes batches, where its stacks were sampled."""
    if facts.lines is None or (loader is not None and loader.workers):
        return
    waits = reduce(merge_touching, read_evidence(facts.trace).data.values(), EMPTY)
    steps = reduce(merge_touching, map(facts.time_of_rank, facts.ranks), EMPTY)
    place = facts.line_in(waits.intersection(steps), facts.processes.values())
    if place is not None:
        yield place.host_is_at


_FEED_FASTER: Final = {
    "pytorch": "give the DataLoader more workers (num_workers{workers}, persistent_workers=True)"
    "{pin} and prefetch_factor; decode less per sample, or cache decoded data",
    "tensorflow": "end the tf.data pipeline with .prefetch(tf.data.AUTOTUNE), map with "
    "num_parallel_calls=tf.data.AUTOTUNE, cache decoded data",
    "jax": "prefetch batches to the device in a background thread; load with several workers",
    "mxnet": "give gluon's DataLoader num_workers{pin}; use RecordIO and prefetching",
    "chainer": "use MultiprocessIterator with more processes and n_prefetch",
}
_RESTART_WAIT_NS: Final = 10_000_000
"""Time after the start of the workers within which the wait for their first batch begins."""


def claim_restarts(host: Host) -> Intervals:
    """Prove waits for a loader that starts its workers anew: from there to the first batch."""
    events = host.view.once(read_loaders)
    return EMPTY if events is None else _starts(events, host.process, host.waits_for_data)


def _starts(events: LoaderEvents, process: int, data: Intervals) -> Intervals:
    """Return when the loaders of a process start their workers anew and it waits for the first
    batch.
    """
    mine = events.select((events.process == process) & (events.number > 0))
    starts = mine.of("start workers")
    following = np.minimum(search(data.end, starts.end, "right"), len(data) - 1)
    if not len(data):
        return union(starts.start, starts.end)
    first = (data.end[following] > starts.end) & (
        data.start[following] < starts.end + _RESTART_WAIT_NS
    )
    ends = np.where(first, data.end[following], starts.end)
    return union(starts.start, ends)


def loader_restart(facts: Facts) -> Iterator[Finding]:
    """The loader starts its workers anew in measured steps, as at each epoch, and the GPUs wait for
    its first batch for 5 % of the time (`medium`) or 20 % (`high`); in traces without GPU activity,
    the program does.

    Cost: these waits.

    Wrong if: the first step of an epoch is as long with workers that stay.
    """
    advice = KEEP_LOADER.get(facts.framework, KEEP_LOADER[""])
    details = ["each epoch does that"]
    if facts.per_gpu.operations:
        text = "{gpus} {cost} for the loader to start its workers anew"
        yield from facts.costly("loader-restart", text, advice, details)
        return
    cost = mean_restart(facts)
    severity = severity_of(facts.share_of(cost))
    if severity is not None:
        message = (
            f"the program waits {facts.of_step(cost)} for the loader to start its workers anew"
        )
        yield facts.finding("loader-restart", severity, cost, message, advice, None, details)


def mean_restart(facts: Facts) -> int:
    """Return for how long a program without a GPU waits in a step for workers that start anew."""
    return sum(restarts(facts, rank).total for rank in facts.ranks) // facts.turns


def restarts(facts: Facts, rank: int) -> Intervals:
    """Return when a rank waits in measured steps for a loader that starts its workers anew."""
    events, process = facts.per_gpu.whole.once(read_loaders), facts.processes.get(rank, -1)
    if events is None:
        return EMPTY
    starts = _starts(events, process, _waits_for_data(facts, process))
    return starts.intersection(facts.time_of_rank(rank))


def _waits_for_data(facts: Facts, process: int) -> Intervals:
    data = read_evidence(facts.trace).data.items()
    return reduce(merge_touching, (time for (of, _), time in data if of == process), EMPTY)


_COPY_SOONER: Final = (
    "check what the loop does between taking a batch and copying it: move changes to samples into "
    "the loader's workers, and everything else after the copy"
)
_SLEEPS: Final = (
    "a sleep in the loop, which can go, or one between two looks for the next batch; if batches "
    "are late, load them in parallel, ahead of time"
)
_LOAD_SOONER: Final = "load and decode batches in parallel, ahead of time"
_MAKE_ON_GPU: Final = (
    "make the batch on the GPU (device='cuda'), or ahead of time, in the workers of a DataLoader; "
    "copy once what stays the same; what else the loop does before it copies, such as logging, "
    "less often or on another thread"
)
_MAKE_SOONER: Final = (
    "generate or read the copied data in parallel while the GPU works, or on the GPU"
)


def how_to_feed_faster(facts: Facts) -> str:
    """Return advice on the input pipeline that fits the framework and the loader's settings."""
    loader, charged = _slowest_loader(facts), facts.ledger.of("data-feeding")
    if loader is not None and _is_ready(facts, loader):
        return _COPY_SOONER
    if charged and re.search("sleep", charged[0].call or ""):
        return f"find out why that thread sleeps: {_SLEEPS}"
    if facts.framework == "pytorch" and not _has_loader(facts):
        return _MAKE_ON_GPU
    pinned = is_pinned(facts, "h2d") or (loader is not None and loader.pins_memory)
    has_batches = facts.trains or not facts.per_gpu.operations
    return _FEED_FASTER.get(facts.framework, _LOAD_SOONER if has_batches else _MAKE_SOONER).format(
        workers="" if loader is None else f", now {loader.workers}",
        pin="" if pinned else ", pin_memory=True",
    )


def _has_loader(facts: Facts) -> bool:
    """Return False only where a recorder of the host that names each batch of a DataLoader, as
    PyTorch's profiler and gputrace's hooks do, recorded none.
    """
    trace, nothing = facts.trace, frozenset[Kind]()
    of_host = nothing.union(*(_OF_HOST.get(each, nothing) for each in trace.source.split("+")))
    return not of_host & trace.kinds or any(map(len, read_evidence(trace).data.values()))


_OF_HOST: Final = {
    "kineto": {Kind.OPERATOR, Kind.RANGE, Kind.STEP},
    "gputrace": {Kind.PHASE, Kind.MODULE},
}
"""Kinds of events by which recorders show that they recorded the host, too."""


def _slowest_loader(facts: Facts) -> Loader | None:
    """Return the loader that its rank waits for most; None where none was recorded."""
    return max(facts.once(find_loaders), key=lambda loader: loader.wait_ns, default=None)


def _is_ready(facts: Facts, loader: Loader) -> bool:
    """Return whether a GPU waits for input that its loader has ready."""
    rows = [row for row in facts.rows if row.rank == loader.rank]
    idle = sum(row.of("data_feeding") for row in rows) / max(sum(row.steps for row in rows), 1)
    return loader.wait_ns < _LOADER_WAIT_PART * idle


_NAMED_PART_SHARE: Final = 0.4
"""Share of the workers' time from which a part is named."""
_CHEAPER_PART_STEP: Final = 0.95
"""Predicted part of a step below which a cheaper part of a batch is worth telling."""
_RECEIVING_PART: Final = 0.5
"""Share of the wait from which receiving is named."""
_CHEAPER_BATCHES: Final = {
    READING: "read less often or ahead of time: larger files read in order, a local disk, a cache "
    "in memory, formats that need no parsing",
    COLLATING: "make batches in fewer steps: samples of one shape, arrays that torch.stack joins, "
    "a collate_fn without loops over fields",
    SENDING: "return tensors instead of Python objects: they go through shared memory and are not "
    "pickled",
}


def _why_late(facts: Facts) -> tuple[Sequence[str], Sequence[str], Evidence]:
    """Return what makes batches late, advice, and evidence; nothing where that is unknown."""
    loader = _slowest_loader(facts)
    if loader is None:
        return _why_pipeline_late(facts)
    if _is_ready(facts, loader):
        wait = format_ns(loader.wait_ns)
        detail = f"the loader accounts for {wait} a step, the loop itself for the rest"
        return [detail], [_COPY_SOONER], {"loader_wait_ns": loader.wait_ns}
    reasons = list(_reasons(loader, "the GPU" if facts.per_gpu.operations else "the program"))
    if not reasons:
        return [], [], {}
    details, cures = zip(*reasons, strict=True)
    evidence: dict[str, float | int | str | None] = {
        "workers": loader.workers,
        "batch_ns": loader.batch_ns,
        "longest_part": loader.parts[0].name,
        "longest_part_share": loader.parts[0].share,
    }
    if loader.better is not None:
        evidence |= {"better_workers": loader.better.workers}
    if loader.slow is not None:
        worker, ratio = loader.slow
        evidence |= {"slow_worker": worker.worker, "slow_ratio": round(ratio, 2)}
    return details, [cure for cure in cures if cure], evidence


def _reasons(loader: Loader, who: str) -> Iterator[tuple[str, str]]:
    slow = loader.slow
    if slow is not None:
        worker, ratio = slow
        yield (
            f"one worker of {loader.workers} (worker {worker.worker}) takes {ratio:.1f} times as "
            "long as the others",
            "batches are taken in order, so all wait for the slow worker: check what it loads, "
            "and give all workers samples of equal cost",
        )
    else:
        yield from _on_workers(loader, who)
    if loader.sending >= _NAMED_PART_SHARE:
        share = sum(part.share for part in loader.parts if part.name == SENDING)
        clause = f"pickling and sending take {share:.0%} of the workers' time"
        if loader.receive_ns and loader.receiving_ns < _RECEIVING_PART * loader.wait_ns:
            clause += f", and receiving {format_ns(loader.receive_ns)} a batch"
        yield clause, _CHEAPER_BATCHES[SENDING]
    first = loader.parts[0]
    if first.share < _NAMED_PART_SHARE or first.name == SENDING:
        return
    what = {READING: "reading samples", COLLATING: "collating"}
    name = what.get(first.name, first.name.removeprefix("transform "))
    whose = "the workers' time" if loader.workers else "the loader's time"
    clause = f"{name} is {first.share:.0%} of {whose}"
    cure = _CHEAPER_BATCHES.get(
        first.name, f"make {name} cheaper, or do it once and cache the result"
    )
    if first.name == READING and loader.computes:
        clause += ", and computes rather than waits"
        cure = "make the dataset's computation per sample cheaper, or cache the result"
    elif first.name == READING and loader.from_disk:
        clause += f", and {loader.from_disk:.0%} of what it reads comes from a disk"
    # The steps to expect where a batch's longest part costs less; those that gain 5 %.
    steps = {"with samples kept in memory": loader.cached_step_ns}
    if loader.parts[0].name == READING:
        steps["without waiting for the disk"] = loader.no_disk_step_ns
    elif loader.parts[0].name != COLLATING:
        steps["if it took half as long"] = loader.half_step_ns
    gains: dict[str, list[str]] = {}
    for how, step in reversed(steps.items()):
        if step is not None and step < _CHEAPER_PART_STEP * loader.step_ns:
            gains.setdefault(format_ns(step), []).append(how)
    then = ", ".join(f"{step} {' or '.join(how)}" for step, how in gains.items())
    yield clause, cure + (f" (a step would take {then})" if then else "")


def _on_workers(loader: Loader, who: str) -> Iterator[tuple[str, str]]:
    """Yield how many workers would keep up, or how far more of them get."""
    now = "now the training process loads batches itself (num_workers=0)"
    if loader.workers:
        now = f"with {loader.workers} {who} still waits {format_ns(loader.wait_ns)} a step"
    choice, present = loader.better, loader.now
    if choice is not None:
        workers = format_count(choice.workers, "worker")
        would = "keep up"
        if not loader.keeps_up(choice):
            would = f"leave a wait of {format_ns(choice.wait_ns)} a step"
        yield (
            f"{workers} would {would}, while {now}",
            f"num_workers={choice.workers} (now {loader.workers})",
        )
    elif present is not None and not loader.keeps_up(present):
        yield f"more workers than num_workers={loader.workers} would gain next to nothing", ""
    elif present is None and not loader.workers:
        yield (
            "the training process loads batches itself (num_workers=0)",
            "num_workers=1 or more (now 0), so that batches are made beside the training",
        )
    if loader.receiving_ns >= _RECEIVING_PART * loader.wait_ns:
        yield (
            f"receiving a batch takes {format_ns(loader.receiving_ns)} a step",
            "pin_memory=True receives in a separate thread",
        )


_RAISE: Final = {
    "tf.data": "num_parallel_calls=tf.data.AUTOTUNE in {stage}",
    "Grain": "worker_count={count}",
    "DALI": "num_threads={count}",
    "torchdata.nodes": "num_workers={count} in {stage}, method='process' if it computes in Python",
}
_MAKE_AHEAD: Final = {
    "tf.data": "end the pipeline with .prefetch(tf.data.AUTOTUNE)",
    "DALI": "prefetch_queue_depth=2",
    "torchdata.nodes": "end the chain with Prefetcher(node, prefetch_factor=2)",
}
_RAISE_GAINS: Final = 0.02
"""Part of a step that a larger value must gain to be advised."""
_MAKE_CHEAPER: Final = "cache decoded samples, or do less for each"


def _why_pipeline_late(facts: Facts) -> tuple[Sequence[str], Sequence[str], Evidence]:
    """Return the setting by which an input pipeline, not torch's DataLoader, is late, its cure, and
    evidence; nothing where no settings were recorded.
    """
    pipeline = max(
        facts.once(find_input_pipelines), key=lambda pipeline: pipeline.wait_ns, default=None
    )
    if pipeline is None:
        return [], [], {}
    narrowest, library = pipeline.narrowest, pipeline.library
    details, cures = [], []
    if narrowest is None:
        details.append(f"{library} tunes its settings itself")
    else:
        count = pipeline.enough
        step = pipeline.step_with(count)
        value = narrowest.value or 0
        cores = format_count(pipeline.cores, "core")
        details.append(f"{narrowest.stage} of {library} has {narrowest.name}={value} on {cores}")
        if count > value and step < pipeline.step_ns - _RAISE_GAINS * pipeline.step_ns:
            details.append(f"with {count}, a step may take {format_ns(step)}")
            cures.append(_RAISE[library].format(count=count, stage=narrowest.stage))
    if not pipeline.is_ahead:
        details.append("no batch is prefetched")
        cures += [_MAKE_AHEAD[library]] if library in _MAKE_AHEAD else []
    if pipeline.queue_median is not None:
        details.append(f"{pipeline.queue_median:g} ready when one is asked for")
    evidence = {
        "library": library,
        "setting": None if narrowest is None else narrowest.name,
        "value": None if narrowest is None else narrowest.value,
        "cores": pipeline.cores,
    }
    return details, cures or [_MAKE_CHEAPER], evidence


def find_loaders(facts: Facts) -> tuple[Loader, ...]:
    """Return the data loader of each rank in the measured steps; empty where none was recorded."""
    events = facts.read(read_loaders)
    return () if events is None else measure_loaders(events, facts.processes, facts.once(_paces))


def find_input_pipelines(facts: Facts) -> tuple[InputPipeline, ...]:
    """Return the input pipeline of each rank that has one which is not torch's DataLoader."""
    events = facts.read(read_loaders)
    return () if events is None else measure_pipelines(events, facts.processes, facts.once(_paces))


def _paces(facts: Facts) -> dict[int, Pace]:
    """Return the pace of each rank that has steps."""
    loads = {load.rank: load for load in facts.host_load}
    paces = {}
    for rank in facts.processes:
        rows = [row for row in facts.rows if row.rank == rank and row.steps]
        if not rows:
            continue
        measured, load = facts.measured_of.of_rank(rank), loads.get(rank)
        steps = sum(row.steps for row in rows)
        step_ns = sum(row.total_ns for row in rows) / steps
        waited_ns, train_ns, host_ns = _host_times(facts, rows)
        paces[rank] = Pace(
            time_of(measured),
            np.array(sorted(step.start_ns for step in measured), np.int64),
            step_ns,
            waited_ns / steps,
            train_ns / steps,
            host_ns / steps,
            sum(row.of("communication_wait") for row in rows) / steps,
            load.process_cores * step_ns if load is not None else 0.0,
            len(facts.processes),
            load is not None and load.others_queued >= MEDIUM,
        )
    return paces


def _host_times(facts: Facts, rows: Sequence[Breakdown]) -> tuple[int, int, int]:
    """Return the nanoseconds of a rank's waits for data, its training, and its host's work."""
    total_ns = sum(row.total_ns for row in rows)
    waited_ns = sum(row.of("host_data") for row in rows)
    host_ns = total_ns - waited_ns
    if not facts.per_gpu.operations:
        return waited_ns, host_ns, host_ns
    # A GPU also waits for what the program itself does with a batch before its copy.
    idle_ns = sum(row.of("data_feeding") for row in rows)
    is_known = any(row.host_data_ns is not None for row in rows)
    waited_ns = min(idle_ns, waited_ns) if is_known else idle_ns
    train_ns = total_ns - waited_ns - sum(row.of("recorder") for row in rows)
    host_ns = host_ns if is_known else train_ns
    if is_pinned(facts, "h2d"):
        # A host that no batch holds up has launched before its GPU gets there.
        ahead_ns = train_ns - sum(row.of("launch") for row in rows)
        train_ns = min(train_ns, max(ahead_ns, host_ns))
    return waited_ns, train_ns, host_ns
