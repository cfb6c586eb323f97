"""Prediction of the step time without one cause of lost time, by replaying the steps.

An optimization is an edit of the dependency graph; to add one, see `CURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.device_metrics import peak_of
from gputrace.analyzers.findings.context import Facts
from gputrace.analyzers.grouping import median
from gputrace.analyzers.host_calls import Call
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.stragglers import LateGains
from gputrace.analyzers.whatif.build import SHORT_NS, build_graph
from gputrace.analyzers.whatif.calibration import calibrate
from gputrace.analyzers.whatif.graph import (
    NONE,
    Graph,
    Index,
    Measure,
    Recorded,
    attribute,
    before_on,
    measure,
    replay,
    standard_error,
    with_quick_host,
)
from gputrace.analyzers.whatif.step_rows import choose_steps, data_within, read_rows, when_issued
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.intervals import Times
from gputrace.model.results import Finding, WhatIf
from gputrace.model.struct import Struct


class Replay(Struct, frozen=True, dict=True):
    """Some steps of a run as a graph, and the time of all measured steps."""

    graph: Graph
    recorded: Recorded


def prepare_replay(facts: Facts) -> Replay | None:
    """Return what is replayed of a run; None if the steps have no host calls, without which it is
    unknown what GPUs wait for, or if there are too few steps.
    """
    gpus, all_steps = facts.per_gpu, facts.found
    steps = choose_steps(gpus, all_steps, facts.measured) if gpus.has_calls else None
    if steps is None:
        return None
    window = when_issued(gpus, all_steps, steps)
    calls = None if window is None else gpus.calls_within(window)
    if window is None or calls is None:
        return None
    rows = read_rows(gpus, calls, all_steps, steps, facts.collectives, facts.roles)
    graph = build_graph(facts.trace, rows, calls, data_within(gpus, window))
    lengths = {(s.rank, s.step): s.end_ns - s.start_ns for s in facts.measured}
    graph = without_recorder(graph, facts.unrecorded)
    mean = round(sum(lengths.values()) / len(lengths) * facts.unrecorded)
    return Replay(graph, Recorded.of(rows.gpus, facts.breakdown, facts.rows, mean))


def late_gains(facts: Facts, run: Replay | None) -> dict[int, LateGains]:
    """Return, by rank that is late in all steps, what a step gains without each reason for it."""
    late = {straggler.lane.gpu.rank for straggler in facts.late if straggler.pattern == "constant"}
    if run is None or not late or replay_error(run.graph) > MOST_ERROR:
        return {}
    by_rank = {rank: attribute(run.graph, rank, run.recorded.mean_ns) for rank in sorted(late)}
    return {rank: gains for rank, gains in by_rank.items() if gains is not None}


def what_if(facts: Facts, findings: Sequence[Finding], run: Replay | None) -> tuple[WhatIf, ...]:
    """Return the optimizations that are worth it, largest gain first.

    Args:
        facts: earlier results of the analysis.
        findings: findings of the analysis.
        run: what is replayed; None where nothing can be.
    """
    if run is None:
        return ()
    costs = {finding.id: finding.impact_ns for finding in findings}
    others = ", and GPUs wait less for each other" if len(facts.working) > 1 else ""
    predicted = predict(run.graph, run.recorded, costs)
    cures = (replace(cure, beyond=cure.beyond + others) for cure in predicted)
    return tuple(sorted(cures, key=lambda cure: -cure.gain_ns))


_TRIALS: Final = 6
"""Replays to find how much shorter calls are without the recorder."""


def without_recorder(graph: Graph, ratio: float) -> Graph:
    """Return the graph of the program without the recorder.

    All calls that issue work are shorter by the same time, such that a step takes the given
    fraction of the recorded one.
    """
    recorded = measure(graph, graph.end).mean
    launches = issues(graph) & (graph.thread >= 0)
    if ratio >= 1 or not launches.any():
        return graph
    threads = np.bincount(graph.thread[launches])
    low, high = 0.0, 4 * (1 - ratio) * recorded * graph.steps / float(threads.max())
    for _ in range(_TRIALS):
        each = (low + high) / 2
        quick = _with_quick_calls(graph, launches, each)
        is_too_quick = measure(quick, quick.end).mean < ratio * recorded
        low, high = (low, each) if is_too_quick else (each, high)
    return _with_quick_calls(graph, launches, (low + high) / 2)


def _with_quick_calls(graph: Graph, calls: Mask, saved: float) -> Graph:
    """Shorten calls, and where they are shorter than that, the host time before them."""
    less = np.where(calls, round(saved), 0)
    own = np.minimum(less, graph.own)
    rest = less - own
    alone = graph.hand < 0
    gap = np.where(alone, np.minimum(rest, np.maximum(graph.gap - graph.data, 0)), 0)
    lag = np.where(alone, 0, np.minimum(rest, np.maximum(graph.hand_lag - graph.data, 0)))
    quick = graph.changed(own=graph.own - own, gap=graph.gap - gap, hand_lag=graph.hand_lag - lag)
    return quick.changed(end=replay(quick))


WORTH: Final = 0.01
"""Fraction of a step that an optimization must save to be listed."""
MOST_ERROR: Final = 0.10
"""Maximum unexplained fraction of the step time; above it, nothing is predicted."""
_SURE: Final = 2.0
"""Half-width of the bounds of a mean, in standard errors."""


_RUN_TO_RUN: Final = 0.1
"""Part by which steps of one program differ from run to run: 31 to 42 ms on a shared machine
(docs/benchmarks.md), most of it by a few per cent."""


def predict(graph: Graph, run: Recorded, findings: Mapping[str, int]) -> Iterator[WhatIf]:
    """Yield a prediction per optimization; none if the replay explains the steps too poorly.

    Args:
        graph: dependency graph of some steps.
        run: time of all measured steps.
        findings: cost of each finding of the analysis, by id.
    """
    recorded, mean_ns = measure(graph, graph.end), run.mean_ns
    error = replay_error(graph)
    if error > MOST_ERROR:
        return
    for cure in CURES:
        having = [id for id in cure.findings if id in findings]
        if cure.only_as_cure and not having:
            continue
        edits = _edits(graph, cure, recorded)
        if not edits:
            continue
        floors = [run.floor(graph, edit.graph, cure.shortens) for edit in edits]
        ranged = _range(edits, recorded, error)
        low, step, high = (round(mean_ns * value / recorded.mean) for value in ranged)
        step = max(step, floors[0])
        if mean_ns - step < WORTH * mean_ns:
            continue
        known = calibrate(cure.id)
        least = round(min(low * (1 - _RUN_TO_RUN), step * known.below))
        most = round(max(high * (1 + _RUN_TO_RUN), step * known.above))
        low, high = min(max(least, min(floors)), step), max(min(most, mean_ns), step)
        finding = max(having, key=lambda id: findings[id], default=None)
        yield WhatIf(
            id=cure.id,
            finding=finding,
            what=cure.what,
            now_ns=mean_ns,
            step_ns=step,
            low_ns=low,
            high_ns=high,
            gain_ns=mean_ns - step,
            assumption=cure.assumption,
            beyond=cure.beyond,
            replay_error=round(error, 4),
            steps=graph.steps,
            pairs=known.pairs,
        )


def replay_error(graph: Graph) -> float:
    """Return the relative error of a replay without the unexplained delays."""
    recorded = measure(graph, graph.end).mean
    explained = measure(graph, replay(explained_only(graph))).mean
    return abs(recorded - explained) / recorded if recorded else 1.0


def explained_only(graph: Graph) -> Graph:
    """Return the graph with median lags after every cause and no unexplained delays."""
    launched = issues(graph)
    follows = runs(graph) & (graph.spacing > 0)
    usual = [
        int(median(lags)) if len(lags) else 0
        for lags in (graph.latency[launched], graph.spacing[follows])
    ]
    return graph.changed(
        latency=np.where(launched, usual[0], graph.latency),
        spacing=np.where(follows, usual[1], graph.spacing),
        residual=np.zeros_like(graph.residual),
    )


class _Edit(Struct, frozen=True):
    """Graph with an optimization, and its replay."""

    graph: Graph
    steps: Measure


def _edits(graph: Graph, cure: Cure, recorded: Measure) -> list[_Edit]:
    """Return the likely effect of an optimization, then its bounds; empty if it gains little."""
    edits: list[_Edit] = []
    for effect in (Effect.LIKELY, *cure.bounds):
        changed = cure.change(graph, effect)
        if changed is not None:
            edits.append(_Edit(changed, measure(changed, replay(changed))))
        if not edits or recorded.mean - edits[0].steps.mean < WORTH * recorded.mean:
            return []
    return edits


def _range(edits: Sequence[_Edit], recorded: Measure, error: float) -> tuple[float, float, float]:
    """Return the lowest, likely and highest step time after an optimization, in nanoseconds.

    The bounds cover the range of its effect, the scatter of the steps, and the time that the replay
    cannot explain, which may or may not disappear too.
    """
    middle = edits[0].steps
    gain = recorded.mean - middle.mean
    bounds = [middle.mean - error * gain, middle.mean + error * gain]
    bounds += [edit.steps.mean for edit in edits]
    # Estimate the step directly or as the recorded one minus the gain: take what scatters less.
    known = (recorded.lengths - middle.lengths, middle.lengths)
    scatter = _SURE * min(standard_error(lengths) for lengths in known)
    highest = max(middle.mean, min(max(bounds) + scatter, recorded.mean))
    return max(min(bounds) - scatter, 0.0), middle.mean, highest


_PINNED_RATE: Final = 10.0
"""Bytes per nanosecond: PCIe 3.0 x16 copies 11 to 12 from pinned memory."""


def pinned(graph: Graph, effect: Effect) -> Graph | None:
    """Copy input from pinned memory, overlapped with computation as far as the host is ahead.

    At most, all copies finish before they are needed; at least, they stay on their stream, at the
    pinned rate.
    """
    copies = input_copies(graph)
    if not copies.any():
        return None
    if effect is Effect.MOST:
        return copied_before(graph, copies)
    quick = returning(graph, copies, SHORT_CALL_NS)
    quick = quick.changed(ns=_at_pinned_rate(quick, copies))
    return quick if effect is Effect.LEAST else moved_aside(quick, copies)


def _at_pinned_rate(graph: Graph, copies: Mask) -> Times:
    """Return durations with pageable copies at the rate of the large pinned ones in the trace.

    Without such copies, at `_PINNED_RATE`.
    """
    large = copies & ~graph.pageable & (graph.size > 1 << 20)
    rate = _PINNED_RATE
    if large.any():
        rate = float(graph.size[large].sum()) / max(int(graph.ns[large].sum()), 1)
    faster = np.minimum(graph.ns, graph.size / rate).astype(np.int64)
    return np.where(copies & graph.pageable, faster, graph.ns)


def overlap(graph: Graph, effect: Effect) -> Graph | None:
    """Let computation wait for no communication; at least, only for the last one of each step."""
    talks = runs(graph) & (graph.operation == OperationClass.COMMUNICATION)
    talks &= graph.kind == Kind.KERNEL
    if not talks.any() or trained_together(graph) is not None:
        return None
    freed = talks & ~last_collectives(graph, talks) if effect is Effect.LEAST else talks
    after = {
        i: tuple(edge for edge in edges if talks[i] or not freed[edge[0]])
        for i, edges in graph.after.items()
    }
    return moved_aside(graph.changed(after=after), talks, joined=False)


def gathers(graph: Graph, effect: Effect) -> Graph | None:
    """Gather parameters as early as the gather before them; at most, as the one before that.

    At least, every second time. Nothing is gathered before the step begins, which needs what the
    optimizer has written.
    """
    rows = np.flatnonzero(graph.gathers)
    if not len(rows):
        return None
    rows = rows[np.lexsort((graph.start[rows], graph.step[rows], graph.gpu[rows]))]
    turn = graph.gpu[rows] * (graph.steps + 1) + graph.step[rows]
    first = np.searchsorted(turn, turn)
    number = np.arange(len(rows)) - first
    earlier = number % 2 if effect is Effect.LEAST else 1 + (effect is Effect.MOST)
    cause = rows[first + np.maximum(number - earlier, 0)]
    moved = rows[cause != rows]
    after, gap, thread = dict(graph.after), graph.gap.copy(), graph.thread.copy()
    following = {int(i): n for n, i in enumerate(before_on(graph.thread)) if i >= 0}
    for item, before in zip(moved.tolist(), cause[cause != rows].tolist(), strict=True):
        after[item] = graph.after.get(before, ())
        # The host's time stays, but for when it asks for the gather.
        if item in following:
            gap[following[item]] += gap[item] + graph.own[item]
        thread[item] = NONE
    return moved_aside(graph.changed(after=after, gap=gap, thread=thread), graph.gathers)


def peer_access(graph: Graph, effect: Effect) -> Graph | None:
    """Let GPUs exchange over their own links, in a part of the time.

    NCCL all-reduces at 10 to 20 GB/s through the host's memory, at 20 to 50 over PCIe and at 150 to
    450 over NVLink (nccl-tests).
    """
    part = {Effect.MOST: 1 / 40, Effect.LIKELY: 1 / 20, Effect.LEAST: 1 / 3}[effect]
    talks = runs(graph) & (graph.operation == OperationClass.COMMUNICATION)
    if not talks.any():
        return None
    return graph.changed(ns=np.where(talks, (graph.ns * part).astype(np.int64), graph.ns))


_GRAPH_LAUNCH_NS: Final = 10_000
"""Duration of the launch of a CUDA graph."""


def prefetch(graph: Graph, effect: Effect) -> Graph | None:
    """Have the next batch ready when it is requested; at most, already on the GPU.

    At least, one thread makes it in parallel to training, in the time that training waited.
    """
    if not graph.data.any():
        return None
    cured = _without_data(graph, 1.0)
    if effect is Effect.MOST:
        return copied_before(cured, input_copies(graph))
    if effect is Effect.LEAST:
        waited = _longest_wait(graph)
        step = measure(cured, replay(cured)).mean
        return _without_data(graph, min(1.0, step / max(waited, 1.0)))
    return cured


def _without_data(graph: Graph, part: float) -> Graph:
    """Shorten the waits for data by a fraction of them."""
    saved = (graph.data * part).astype(np.int64)
    return graph.changed(
        gap=graph.gap - np.where(graph.hand < 0, saved, 0),
        hand_lag=graph.hand_lag - np.where(graph.hand >= 0, saved, 0),
    )


def _longest_wait(graph: Graph) -> float:
    """Return the nanoseconds a step that the longest-waiting thread waits for data."""
    calls = graph.thread >= 0
    return float(np.bincount(graph.thread[calls], graph.data[calls]).max()) / graph.steps


def graphs(graph: Graph, effect: Effect) -> Graph | None:
    """Combine consecutive launches into one, without host time between.

    At most, the kernels also follow each other without a pause; at least, half of the host time
    remains, as where the optimizer or the loss is still launched separately.
    """
    launched = issues(graph) & np.isin(graph.kind, (Kind.KERNEL, Kind.COPY_D2D, Kind.MEMSET))
    follows = _follows(graph, launched)
    if not follows.any() or trained_together(graph) is not None:
        return None
    if effect is Effect.LEAST:
        return _half_launched(graph, follows)
    first = launched & ~follows
    if effect is Effect.MOST:
        graph = graph.changed(
            spacing=np.where(follows, np.minimum(graph.spacing, 0), graph.spacing)
        )
    return graph.changed(
        gap=np.where(follows, np.where(graph.hand < 0, graph.data, 0), graph.gap),
        hand_lag=np.where(follows, graph.data, graph.hand_lag),
        own=np.where(follows, 0, np.where(first, _GRAPH_LAUNCH_NS, graph.own)),
        residual=np.where(follows, 0, graph.residual),
        slot=np.where(launched, NONE, graph.slot),
    )


def _half_launched(graph: Graph, follows: Mask) -> Graph:
    host = (graph.gap - graph.data) // 2, (graph.hand_lag - graph.data) // 2
    return graph.changed(
        gap=np.where(follows & (graph.hand < 0), graph.gap - host[0], graph.gap),
        hand_lag=np.where(follows & (graph.hand >= 0), graph.hand_lag - host[1], graph.hand_lag),
        own=np.where(follows, graph.own // 2, graph.own),
    )


def _follows(graph: Graph, launched: Mask) -> Mask:
    """Return a mask of launches that directly follow a launch, on their thread or by hand-over."""
    before = np.where(graph.hand >= 0, graph.hand, before_on(graph.thread))
    return launched & (graph.thread >= 0) & (before >= 0) & launched[before]


def sync(graph: Graph, _effect: Effect) -> Graph | None:
    """Let the host never wait for a GPU: no results are read in the middle of training."""
    calls = (graph.thread >= 0) & (graph.sort == Call.SYNC)
    back = issues(graph) & (graph.kind == Kind.COPY_D2H)
    if not (calls | back).any():
        return None
    return without_waits(graph, calls | back)


def alloc(graph: Graph, _effect: Effect) -> Graph | None:
    """Keep memory: no allocation and no release."""
    calls = (graph.thread >= 0) & (graph.sort == Call.ALLOC)
    if not calls.any():
        return None
    freed = without_waits(graph, calls)
    return freed.changed(own=np.where(calls, 0, freed.own))


_SLOWER: Final = 1.02
"""Ratio of kernel time to the median rank's above which a rank is slower."""


def straggler(graph: Graph, _effect: Effect) -> Graph | None:
    """Shorten the kernels of slower ranks to the median rank's; None where none is slower.

    Kernels of one name are scaled alike, to the total of the median rank: to zero if it has none.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    computes = runs(graph) & (graph.operation == OperationClass.COMPUTE)
    row = np.searchsorted(ranks, graph.rank)
    totals = np.bincount(row[computes], graph.ns[computes], len(ranks))
    slow = totals > _SLOWER * _median(totals)
    if len(ranks) < 2 or not slow.any():
        return None
    names, name = np.unique(graph.name, return_inverse=True)
    spent = np.zeros((len(ranks), len(names)))
    np.add.at(spent, (row[computes], name[computes]), graph.ns[computes])
    usual = np.broadcast_to(_median(spent), spent.shape)
    factor = np.minimum(np.divide(usual, spent, out=np.ones_like(spent), where=spent > 0), 1.0)
    eased = computes & slow[row]
    shorter = np.rint(graph.ns * factor[row, name]).astype(np.int64)
    return graph.changed(ns=np.where(eased, shorter, graph.ns))


def _median(values: NDArray[Any]) -> NDArray[Any]:
    """Return the median over ranks (axis 0); the lower of two middle values, so the faster rank."""
    ordered: NDArray[Any] = np.sort(values, axis=0)
    middle: NDArray[Any] = ordered[(len(values) - 1) // 2]
    return middle


def late_host(graph: Graph, _effect: Effect) -> Graph | None:
    """Cut the host time of later ranks to the median rank's, call by call.

    None where no rank is later, or where the ranks make different calls.
    """
    return with_quick_host(graph, distinct_ids(graph.rank[graph.rank >= 0]).tolist())


_SHARE: Final = 0.2
"""Minimum fraction of the busiest GPU's kernels on a GPU that trains."""
_MANY_ALLOCS: Final = 20
"""Allocations per step and GPU above which they belong to a one-time algorithm search."""


def trained_together(graph: Graph) -> Index | None:
    """Return the GPUs that one process trains on from different threads; None if there are none."""
    kernels = runs(graph) & (graph.operation == OperationClass.COMPUTE) & (graph.thread >= 0)
    if len(distinct_ids(graph.process[kernels])) != 1:
        return None
    counts = np.bincount(graph.gpu[kernels])
    gpus = np.flatnonzero(counts >= _SHARE * counts.max())
    feeders = {_feeder(graph, kernels, int(gpu)) for gpu in gpus}
    allocs = np.count_nonzero(graph.sort[graph.thread >= 0] == Call.ALLOC)
    searches = allocs > _MANY_ALLOCS * graph.steps * len(gpus)
    return gpus if len(gpus) > 1 and len(feeders) > 1 and not searches else None


def _feeder(graph: Graph, kernels: Mask, gpu: int) -> int:
    return int(np.argmax(np.bincount(graph.thread[kernels & (graph.gpu == gpu)])))


def _one_process_each(
    graph: Graph, gpus: Index, loads: float, waited: float, talks: bool, longest: int | None = None
) -> Graph:
    """Keep only the first GPU and the work of its threads for it, in sequence.

    This is the load of each process if every GPU had one, with its share of the batch to load and
    copy. Work for other GPUs is dropped with its host time, and so is the time that threads waited
    for each other (for Python's global interpreter lock).

    Args:
        graph: graph of the steps.
        gpus: GPUs that the process trains on.
        loads: fraction of the waiting for data that remains.
        waited: fraction of the threads' waiting for each other that remains.
        talks: True if communication keeps its time on the GPU, False if it is overlapped.
        longest: upper limit of a host pause in nanoseconds, which removes such as the making of
            replicas; None for no limit.
    """
    first = int(gpus[0])
    between = graph.operation == OperationClass.COMMUNICATION
    runs_here = runs(graph) & (graph.gpu == first) & (talks | ~between)
    feeds = distinct_ids(graph.thread[runs(graph) & (graph.gpu == first) & (graph.thread >= 0)])
    stays = np.isin(graph.thread, feeds) & (runs_here | ~runs(graph))
    chain = int(feeds[0])
    host = np.where(graph.hand >= 0, graph.hand_lag, graph.gap) - graph.data
    kept = np.flatnonzero(stays)
    before = np.concatenate([[NONE], kept[:-1]])
    handed = graph.hand[kept]
    # A hand-over by a call that is dropped is a wait for another thread.
    foreign = (handed >= 0) & (handed != before)
    gap = np.zeros(len(graph), np.int64)
    gap[kept] = np.where(foreign, host[kept] * waited, host[kept])
    if longest is not None:
        gap = np.minimum(gap, longest)
    gap[kept] += (graph.data[kept] * loads).astype(np.int64)
    gap[kept[:1]] = graph.start[kept[:1]]
    copies = runs_here & (graph.kind == Kind.COPY_H2D)
    return graph.changed(
        thread=np.where(stays, chain, NONE),
        gap=gap,
        hand=np.full(len(graph), NONE),
        stream=np.where(runs_here, graph.stream, NONE),
        ns=np.where(copies, graph.ns // len(gpus), graph.ns),
        group=np.full(len(graph), NONE),
        waits={i: edges for i, edges in graph.waits.items() if stays[i]},
    )


def _computing_evenly(graph: Graph, gpus: Index) -> Graph:
    """Shorten the kernels of some GPUs to the total of the one that computes least."""
    computes = runs(graph) & (graph.operation == OperationClass.COMPUTE)
    totals = np.bincount(graph.gpu[computes], graph.ns[computes])
    factor = np.ones(len(totals))
    factor[gpus] = totals[gpus].min() / totals[gpus]
    shorter = np.rint(graph.ns * factor[graph.gpu]).astype(np.int64)
    return graph.changed(ns=np.where(computes, shorter, graph.ns))


def ddp(graph: Graph, effect: Effect) -> Graph | None:
    """Use one process per GPU instead of one for all: no scatter, gather or replicas.

    At most, no host pause over a millisecond (as for making replicas) remains, and the GPU computes
    no more than the one with least to do; at least, part of the threads' waiting for each other was
    work, communication remains, and the data loaders of the processes compete, so that a share of
    the batch takes as long as the whole.
    """
    gpus = trained_together(graph)
    if gpus is None:
        return None
    part = 1 / len(gpus)
    if effect is Effect.MOST:
        even = _computing_evenly(graph, gpus)
        return _one_process_each(even, gpus, part, 0.0, talks=False, longest=1_000_000)
    if effect is Effect.LEAST:
        return _one_process_each(graph, gpus, 1.0, part, talks=True)
    return _one_process_each(graph, gpus, part, 0.0, talks=False)


_OF_PEAKS: Final = 3 / 4
_LEAST_OF_PEAKS: Final = 1 / 4
"""Part of the ratio of a card's peaks by which products get faster: an H100 has 7.4 and 14.8 times
its FP32 in TF32 and bf16, large products of cuBLAS take a sixth and an eleventh of the time
(docs/studies/cures.md). Small ones, and those bound by memory, gain less."""
_LEAST_FASTER: Final = 2.0
"""Ratio that the finding assumes; products that are bound by memory reach it with 16 bits."""
_SHORTEST_NS: Final = 5_000
"""Duration of a small product in any precision."""


def products(precision: str, graph: Graph, effect: Effect) -> Graph | None:
    """Multiply FP32 matrices in another precision, faster by a part of the ratio of the peaks.

    At most by all of it, and with 16 bits other kernels move half of the bytes, which otherwise the
    casts between the types make up for; at least by a quarter of it, or twice.
    """
    if not graph.single.any():
        return None
    part = {Effect.MOST: 1.0, Effect.LIKELY: _OF_PEAKS, Effect.LEAST: _LEAST_OF_PEAKS}[effect]
    peaks = [(peak_of(card, precision), peak_of(card, "fp32")) for card in graph.cards]
    ratios = np.array([part * new / old if new and old else 1.0 for new, old in peaks])
    faster = np.clip(ratios, 1.0, _LEAST_FASTER if effect is Effect.LEAST else None)
    quick = np.maximum(graph.ns / faster[graph.gpu], _SHORTEST_NS)
    ns = np.where(graph.single, np.minimum(quick.astype(np.int64), graph.ns), graph.ns)
    if precision == "bf16" and effect is Effect.MOST:
        others = runs(graph) & (graph.operation == OperationClass.COMPUTE) & ~graph.single
        ns = np.where(others & (graph.kind == Kind.KERNEL), graph.ns // 2, ns)
    return graph.changed(ns=ns)


Mask = NDArray[np.bool_]

SHORT_CALL_NS: Final = 10_000
"""Duration of a copy call that need not wait."""


class Effect(Enum):
    """Extent to which an optimization works: the prediction and the bounds of its range."""

    LIKELY = "likely"
    MOST = "most"
    LEAST = "least"


def runs(graph: Graph) -> Mask:
    """Return a mask of the items with an operation."""
    return graph.stream >= 0


def issues(graph: Graph) -> Mask:
    """Return a mask of the items with an operation whose call is known."""
    return (graph.stream >= 0) & (graph.thread >= 0)


def returning(graph: Graph, calls: Mask, ns: int) -> Graph:
    """Let some calls wait for nothing and take at most ``ns``."""
    return without_waits(graph, calls).changed(
        own=np.where(calls, np.minimum(graph.own, ns), graph.own)
    )


def without_waits(graph: Graph, calls: Mask) -> Graph:
    """Let some calls wait for no operation; their duration without waiting remains."""
    waits = {i: edges for i, edges in graph.waits.items() if not calls[i]}
    lost = np.zeros(len(graph), bool)
    lost[[i for i in graph.waits if calls[i]]] = True
    return graph.changed(
        waits=waits, own=np.where(lost, np.minimum(graph.own, SHORT_NS), graph.own)
    )


def moved_aside(graph: Graph, operations: Mask, joined: bool = True) -> Graph:
    """Move operations to separate streams; if ``joined``, their followers still wait for them."""
    before = before_on(graph.stream)
    after = dict(graph.after)
    stream = np.where(operations, graph.stream + int(graph.stream.max()) + 1, graph.stream)
    followers = np.flatnonzero(~operations & (before >= 0) & operations[before])
    for i in followers.tolist() if joined else ():
        after[i] = (*after.get(i, ()), (int(before[i]), int(graph.spacing[i])))
    return graph.changed(stream=stream, after=after)


def last_collectives(graph: Graph, talks: Mask) -> Mask:
    """Return a mask of the collective issued last on each GPU in each step."""
    last = np.zeros(len(graph), bool)
    last_of = {(int(graph.gpu[i]), int(graph.step[i])): i for i in np.flatnonzero(talks).tolist()}
    last[list(last_of.values())] = True
    return last


def input_copies(graph: Graph) -> Mask:
    """Return a mask of the copies from the host to a GPU."""
    copies: Mask = runs(graph) & (graph.kind == Kind.COPY_H2D)
    return copies


def copied_before(graph: Graph, copies: Mask) -> Graph:
    """Let some copies take no time, as if made before they were needed."""
    quick = returning(graph, copies, SHORT_CALL_NS)
    return quick.changed(
        ns=np.where(copies, 0, quick.ns), residual=np.where(copies, 0, quick.residual)
    )


Change = Callable[[Graph, Effect], Graph | None]


class Cure(Struct, frozen=True):
    """An optimization that can be predicted."""

    id: str
    findings: tuple[str, ...]
    """Ids of the findings that it removes; it belongs to the costliest that the analysis has."""
    change: Change
    """Edit of the graph; returns None where there is nothing to improve."""
    what: str
    """Name of the optimization, as the subject of a sentence on what it would save."""
    assumption: str
    beyond: str
    """Reason why it may gain more than the finding costs."""
    bounds: tuple[Effect, ...] = (Effect.MOST, Effect.LEAST)
    """Effects that bound the prediction; none where it is all or nothing."""
    only_as_cure: bool = False
    """True if it makes sense only where one of the findings is there."""
    shortens: tuple[str, ...] = ()
    """Classes of time, and ``communication_wait``, that it can shorten at most; empty for any."""


CURES: Final = (
    Cure(
        "ddp",
        ("gpu0-skew", "launch-bound"),
        ddp,
        "DistributedDataParallel",
        "one process trains on each GPU (DistributedDataParallel), and loads and copies its own "
        "part of the batch; its threads wait for no others, and gradients are exchanged meanwhile",
        "its exchanges and copies run beside the computation, too",
    ),
    Cure(
        "prefetch",
        ("data-feeding",),
        prefetch,
        "A loader that keeps up",
        "every batch is ready when it is asked for, and at best on the GPU already; at the least, "
        "one batch at a time is made beside the training",
        "the copy of the batch may go, too",
    ),
    Cure(
        "pinned",
        ("h2d-exposed", "h2d-pageable"),
        pinned,
        "Copying the input beside the computation",
        "input is copied from pinned memory on a stream of its own, as early as the host asks",
        "the host does not wait for the copy either, and launches sooner",
    ),
    Cure(
        "straggler",
        ("straggler",),
        straggler,
        "A rank as fast as the others",
        "every rank's kernels take what the median's do",
        "work that follows the wait begins sooner, too",
        bounds=(),
    ),
    Cure(
        "late-host",
        ("late-host",),
        late_host,
        "A host as quick as on the other ranks",
        "every rank's host is as quick as the median's between the same calls",
        "work that follows the wait begins sooner, too",
        bounds=(),
    ),
    Cure(
        "peer-access",
        ("host-staged-comm",),
        peer_access,
        "Exchange over the GPUs' own links",
        "an exchange takes a twentieth of what it takes through the host's memory, as over NVLink; "
        "over PCIe a third",
        "work that follows the exchange begins sooner, too",
        only_as_cure=True,
    ),
    Cure(
        "overlap",
        ("communication-exposed",),
        overlap,
        "Overlapping all communication",
        "nothing waits for communication but communication, and it slows nothing down; at the "
        "least, each step's last exchange stays exposed",
        "work that follows the wait begins sooner, too",
    ),
    Cure(
        "gathers",
        ("communication-exposed",),
        gathers,
        "Prefetching the next layer's parameters",
        "the parameters of a layer are gathered while the one before it computes, which slows "
        "nothing down and holds one layer more in memory; at the least, those of every second "
        "layer, at the most two layers ahead",
        "later gathers no longer wait for the computation, either",
    ),
    Cure(
        "graphs",
        ("launch-bound",),
        graphs,
        "CUDA graphs of whole steps",
        "consecutive launches become one, without host time between them; kernels take what "
        "they do",
        "synchronisation and time between kernels go, too",
        shortens=("launch", "sync", "alloc", "other_idle", "communication_wait"),
    ),
    Cure(
        "tf32",
        ("no-tensor-cores",),
        partial(products, "tf32"),
        "TF32 for FP32 matrix products",
        "products get faster by three quarters of the ratio of the card's peaks in TF32 and FP32, "
        "at most by all of it, at least by a quarter, or twice; numbers change a little",
        "tensor cores are more than twice as fast",
        only_as_cure=True,
    ),
    Cure(
        "bf16",
        ("no-tensor-cores",),
        partial(products, "bf16"),
        "bf16 for FP32 matrix products",
        "products get faster by three quarters of the ratio of the card's peaks in bf16 and FP32, "
        "at most by all of it, with half of the bytes to move elsewhere, at least by a quarter, or "
        "twice; numbers change",
        "tensor cores are more than twice as fast",
        only_as_cure=True,
    ),
    Cure(
        "sync",
        ("sync-bound",),
        sync,
        "A host that waits for no GPU",
        "the host never waits for a GPU, and runs ahead as far as launches can be queued",
        "with the host ahead, later launches are on time, too",
        bounds=(),
    ),
    Cure(
        "alloc",
        ("alloc-stall",),
        alloc,
        "Keeping memory allocated",
        "no memory is allocated or given back in a step",
        "other calls no longer wait for these, and launches come sooner",
        bounds=(),
    ),
)
