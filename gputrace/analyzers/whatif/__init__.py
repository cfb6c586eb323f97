"""Prediction of the step time without one cause of lost time, by replaying the steps.

An optimization is an edit of the dependency graph (`optimizations`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.findings.stragglers import find_late
from gputrace.analyzers.grouping import median, quantile
from gputrace.analyzers.lateness import LateGains
from gputrace.analyzers.ledger import find_host_times
from gputrace.analyzers.operations import Gpu
from gputrace.analyzers.whatif.build import build_graph
from gputrace.analyzers.whatif.graph import (
    Graph,
    Measure,
    Recorded,
    measure,
    replay,
    standard_error,
    with_quick_host,
)
from gputrace.analyzers.whatif.optimizations import (
    CURABLE,
    CURES,
    Cure,
    Effect,
    longest_wait,
)
from gputrace.analyzers.whatif.step_rows import Index, choose_steps, read_rows, when_issued
from gputrace.model.events import Kind, Mask, distinct_ids, number_ids
from gputrace.model.intervals import Intervals, Times
from gputrace.model.results import Finding, WhatIf
from gputrace.model.struct import Struct


class Replay(Struct, frozen=True, dict=True):
    """Some steps of a run as a graph."""

    graph: Graph
    gpus: tuple[Gpu, ...]
    """In the order of the graph."""
    mean_ns: int
    """Mean of all measured steps."""
    rarely: Mapping[str, float]
    """Time of a mean measured step as a multiple of that in the graph's steps, by cause."""

    @property
    def curable(self) -> frozenset[str]:
        """Return the findings whose cures are predicted wherever they gain anything: not those
        whose cause is mostly in other steps than the graph's.
        """
        return CURABLE - {cause for cause, more in self.rarely.items() if more > _RARE_IN_REPLAY}


def prepare_replay(facts: Facts) -> Replay | None:
    """Return what is replayed of a run; None if the steps have no host calls, without which it is
    unknown what GPUs wait for, or if there are too few steps.
    """
    gpus, all_steps = facts.per_gpu, facts.all_steps
    steps = choose_steps(gpus, all_steps, facts.measured) if gpus.has_calls else None
    if steps is None:
        return None
    window = when_issued(gpus, all_steps, steps)
    calls = None if window is None else gpus.calls_within(window)
    if window is None or calls is None:
        return None
    rows = read_rows(facts.groups, calls, all_steps, steps)
    host: dict[str, dict[int, Intervals]] = {}
    data: dict[tuple[int, int], Intervals] = {}
    spent: dict[str, tuple[float, float]] = {}
    causes = tuple(cause for cause in facts.causes if cause.in_all)
    times = [facts.time_of(lane) for lane in gpus.lanes]
    each = gpus.each(find_host_times, gpus.lanes, times, same=(causes, window))
    for lane, found in zip(gpus.lanes, each, strict=True):
        data |= found.data
        count = max(len(facts.measured_of(lane.gpu)), 1)
        for cause, here in found.inside.items():
            host.setdefault(cause, {})[lane.gpu.process] = here
            usual = found.spent[cause] / count, here.total / len(steps)
            spent[cause] = max(spent.get(cause, (0.0, 0.0)), usual)
    rarely = {cause: mean / max(now, 1.0) for cause, (mean, now) in spent.items() if mean}
    graph = build_graph(facts.trace, rows, calls, data, host)
    waited = max(row.of("data_feeding") / max(row.steps, 1) for row in facts.rows)
    rarely["data-feeding"] = waited / max(longest_wait(graph), 1.0)
    lengths = {(s.rank, s.step): s.end_ns - s.start_ns for s in facts.measured}
    graph = without_recorder(graph, facts.unrecorded)
    mean = round(sum(lengths.values()) / len(lengths) * facts.unrecorded)
    return Replay(graph, rows.gpus, mean, rarely)


def late_gains(facts: Facts, run: Replay | None) -> dict[int, LateGains]:
    """Return, by rank that is late in all steps, what a step gains without each reason for it."""
    late = {
        straggler.lane.gpu.rank
        for straggler in facts.once(find_late)
        if straggler.pattern == "constant"
    }
    if run is None or not late or replay_error(run.graph) > MOST_ERROR:
        return {}
    by_rank = {rank: attribute(run.graph, rank, run.mean_ns) for rank in sorted(late)}
    return {rank: gains for rank, gains in by_rank.items() if gains is not None}


def attribute(graph: Graph, rank: int, mean_ns: int) -> LateGains | None:
    """Return how much shorter a step is without each reason for which a rank is late; None where
    there is one rank.

    Reasons are kernels that the median rank does not launch, or not as often; kernels of the same
    name that take longer than on the median rank; and more time of the host between the same calls.

    ``mean_ns`` is the mean step of the whole run.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    if len(ranks) < 2 or rank not in ranks:
        return None
    extra, slower = _compare_kernels(graph, ranks, rank)
    gone = graph.changed(
        ns=np.where(extra, 0, graph.ns),
        spacing=np.where(extra, np.minimum(graph.spacing, 0), graph.spacing),
        own=np.where(extra, 0, graph.own),
        gap=np.where(extra & (graph.hand < 0), graph.data, graph.gap),
    )
    edits = (
        gone if extra.any() else None,
        graph.changed(ns=slower) if (slower < graph.ns).any() else None,
        with_quick_host(graph, [rank], ~extra),
    )
    recorded = measure(graph, graph.end).mean
    gains = [0 if edit is None else recorded - measure(edit, replay(edit)).mean for edit in edits]
    return LateGains(*(max(round(gain * mean_ns / recorded), 0) for gain in gains))


def _compare_kernels(graph: Graph, ranks: Index, rank: int) -> tuple[Mask, Times]:
    """Return a mask of the kernels that a rank has beyond the median rank's number in each step,
    and all durations with its other kernels as short as the median rank's of the same name.
    """
    computes = graph.computes
    rows = np.flatnonzero(computes & (graph.kind == Kind.KERNEL) & (graph.rank >= 0))
    names, name = number_ids(graph.name[rows])
    of_rank = np.searchsorted(ranks, graph.rank[rows])
    shape = len(ranks), len(names)
    cell, cells = of_rank * len(names) + name, len(ranks) * len(names)
    count = np.bincount(cell, minlength=cells).reshape(shape)
    spent = np.bincount(cell, graph.ns[rows], cells).reshape(shape)
    usual = np.round(median(count, axis=0) / max(graph.steps, 1))
    mean = np.divide(spent, count, out=np.full(shape, np.inf), where=count > 0)
    middle = np.sort(mean, axis=0)[(len(ranks) - 1) // 2]
    mine = of_rank == int(np.searchsorted(ranks, rank))
    launched, name = rows[mine], name[mine]
    order = np.lexsort((launched, graph.step[launched], name))
    key = name[order] * (graph.steps + 2) + graph.step[launched][order] + 1
    first = np.flatnonzero(np.diff(key, prepend=-1))
    nth = np.arange(len(key)) - np.repeat(first, np.diff(first, append=len(key)))
    extra = np.zeros(len(graph), np.bool_)
    extra[launched[order]] = nth >= usual[name[order]]
    here = mean[int(np.searchsorted(ranks, rank))]
    known = np.isfinite(middle) & np.isfinite(here) & (here > 0)
    factor = np.minimum(np.divide(middle, here, out=np.ones_like(here), where=known), 1.0)
    shorter = graph.ns.copy()
    shorter[launched] = np.where(
        extra[launched], graph.ns[launched], np.rint(graph.ns[launched] * factor[name])
    )
    return extra, shorter


def what_if(facts: Facts, findings: Sequence[Finding], run: Replay | None) -> tuple[WhatIf, ...]:
    """Return the optimizations that are worth it, largest gain first."""
    if run is None:
        return ()
    costs = {finding.id: finding.impact_ns for finding in findings}
    others = ", less waiting between GPUs" if len(facts.working) > 1 else ""
    recorded = Recorded.of(run.gpus, facts.breakdown, facts.ledger, run.mean_ns)
    predicted = predict(run.graph, recorded, costs, run.rarely)
    # In a loop that generates, too, GPUs of one process do not train on parts of a batch.
    parted = facts.all_steps.kind != "rl"
    cures = [
        replace(cure, beyond=cure.beyond + others)
        for cure in predicted
        if parted or cure.id != "ddp"
    ]
    return tuple(within_lost_time(cures, recorded))


def within_lost_time(cures: Sequence[WhatIf], run: Recorded) -> Iterator[WhatIf]:
    """Yield the predictions, the largest gain first, such that the best for each cause gain no more
    together than there is to gain: what one brings beyond those before it.
    """
    left, before = run.mean_ns, dict[str, int]()
    for cure in sorted(cures, key=lambda cure: -cure.gain_ns):
        cause = cure.finding or cure.id
        if cause not in before:
            before[cause] = left
        gain = min(cure.gain_ns, before[cause])
        left = min(left, before[cause] - gain)
        if gain < WORTHWHILE_GAIN * cure.now_ns:
            continue
        step = cure.now_ns - gain
        low, high = max(cure.low_ns, step) if gain < cure.gain_ns else cure.low_ns, cure.high_ns
        sure = min(cure.sure_ns, gain)
        bounds = {"low_ns": low, "high_ns": max(high, step)}
        yield replace(cure, step_ns=step, gain_ns=gain, sure_ns=sure, **bounds)


_RARE_IN_REPLAY: Final = 2.0
"""Time of a mean step, as a multiple of that in the replayed steps, above which these do not stand
for the others."""
_RECORDER_TRIALS: Final = 6
"""Replays to find how much shorter calls are without the recorder."""


def without_recorder(graph: Graph, ratio: float) -> Graph:
    """Return the graph of the program without the recorder.

    All calls that issue work are shorter by the same time, such that a step takes the given
    fraction of the recorded one.
    """
    recorded = measure(graph, graph.end).mean
    launches = graph.issues
    if ratio >= 1 or not launches.any():
        return graph
    threads = np.bincount(graph.thread[launches])
    low, high = 0.0, 4 * (1 - ratio) * recorded * graph.steps / float(threads.max())
    for _ in range(_RECORDER_TRIALS):
        each = (low + high) / 2
        quick = _with_quick_calls(graph, launches, each)
        is_too_quick = measure(quick, quick.end).mean < ratio * recorded
        low, high = (low, each) if is_too_quick else (each, high)
    return _with_quick_calls(graph, launches, (low + high) / 2)


def _with_quick_calls(graph: Graph, calls: Mask, saved: float) -> Graph:
    """Shorten calls, and where they are shorter than that, the host time before them."""
    less = np.where(calls, round(saved), 0)
    shorter = np.minimum(less, graph.own)
    rest = less - shorter
    alone = graph.hand < 0
    gap = np.where(alone, np.minimum(rest, np.maximum(graph.gap - graph.kept, 0)), 0)
    lag = np.where(alone, 0, np.minimum(rest, np.maximum(graph.hand_lag - graph.kept, 0)))
    quick = graph.changed(
        own=graph.own - shorter, gap=graph.gap - gap, hand_lag=graph.hand_lag - lag
    )
    return quick.changed(end=replay(quick))


WORTHWHILE_GAIN: Final = 0.01
"""Fraction of a step that an optimization must save to be listed."""
MOST_ERROR: Final = 0.10
"""Maximum unexplained fraction of the step time; above it, nothing is predicted."""
_RANGE_ERRORS: Final = 2.0
"""Half-width of the bounds of a mean, in standard errors."""


_RUN_TO_RUN: Final = 0.1
"""Part by which steps of one program differ from run to run: 31 to 42 ms on a shared machine
(docs/measurements/predictions.md), most of it by a few per cent."""


def predict(
    graph: Graph,
    run: Recorded,
    findings: Mapping[str, int],
    rarely: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[WhatIf]:
    """Yield a prediction per optimization; none if the replay explains the steps too poorly.

    Args:
        graph: of the steps.
        run: time of all steps.
        findings: cost of each finding of the analysis, by id.
        rarely: host time of a mean step as a multiple of that in the graph, by cause.
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
        floors = [run.floor(graph, edit.graph, cure.takes, cure.evens) for edit in edits]
        more = rarely.get(cure.rare_cause or "", 1.0)
        ranged = (
            max(recorded.mean - more * (recorded.mean - step), 0.0)
            for step in _range(edits, recorded, error)
        )
        low, step, high = (round(mean_ns * value / recorded.mean) for value in ranged)
        step = max(step, floors[0])
        if mean_ns - step < WORTHWHILE_GAIN * mean_ns:
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
            sure_ns=round((mean_ns - step) * known.sure),
            assumption=cure.assumption,
            beyond=cure.beyond,
            replay_error=round(error, 4),
            steps=graph.steps,
            pairs=known.pairs,
        )


def replay_error(graph: Graph) -> float:
    """Return the relative error of a replay with median lags after every cause, and without the
    unexplained delays.
    """
    recorded = measure(graph, graph.end).mean
    launched, follows = graph.issues, graph.runs & (graph.spacing > 0)
    latency, spacing = (
        int(median(lags)) if len(lags) else 0
        for lags in (graph.latency[launched], graph.spacing[follows])
    )
    explained_only = graph.changed(
        latency=np.where(launched, latency, graph.latency),
        spacing=np.where(follows, spacing, graph.spacing),
        residual=np.zeros_like(graph.residual),
    )
    explained = measure(graph, replay(explained_only)).mean
    return abs(recorded - explained) / recorded if recorded else 1.0


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
        if not edits or recorded.mean - edits[0].steps.mean < WORTHWHILE_GAIN * recorded.mean:
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
    scatter = _RANGE_ERRORS * min(standard_error(lengths) for lengths in known)
    highest = max(middle.mean, min(max(bounds) + scatter, recorded.mean))
    return max(min(bounds) - scatter, 0.0), middle.mean, highest


_PAIRS: Final = Path(__file__).parents[2] / "data" / "pairs.csv"
FEWEST_OWN_PAIRS: Final = 3
"""Pairs of an optimization from which its range is made of them alone."""
_FEWEST_TRIMMED_PAIRS: Final = 10
"""Pairs from which the tenth at each end is left out."""
_TRIMMED_PART: Final = 0.1


class Pair(Struct, frozen=True):
    """Prediction, and what came. Times are milliseconds a step."""

    cure: str
    """Id of the optimization; empty where the notes name none."""
    program: str
    now_ms: float | None
    """Step as recorded; None where the notes do not say."""
    predicted_ms: float
    low_ms: float | None
    high_ms: float | None
    """Range that was given; None without one."""
    measured_ms: float
    counts: bool
    """False where the prediction was made in a way that has since been mended."""
    source: str

    @property
    def ratio(self) -> float:
        """Return the measured step as a fraction of the predicted one."""
        return self.measured_ms / self.predicted_ms

    @property
    def within(self) -> bool | None:
        """Return whether the range that was given holds the measured step; None without one."""
        if self.low_ms is None or self.high_ms is None:
            return None
        return self.low_ms <= self.measured_ms <= self.high_ms


@cache
def pairs() -> tuple[Pair, ...]:
    """Return all pairs, from the file ``gputrace/data/pairs.csv``."""
    import csv

    text = _PAIRS.read_text(encoding="utf-8")

    def number(cell: str) -> float | None:
        return float(cell) if cell else None

    return tuple(
        Pair(
            row["cure"],
            row["program"],
            number(row["now_ms"]),
            float(row["predicted_ms"]),
            number(row["low_ms"]),
            number(row["high_ms"]),
            float(row["measured_ms"]),
            row["counts"] == "yes",
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    )


class Calibration(Struct, frozen=True):
    """Factors of a predicted step between which measured ones lay."""

    below: float
    above: float
    pairs: int
    """Number of pairs that they are taken from."""
    sure: float = 1.0
    """Part of the predicted gain that nine in ten pairs of the optimization reached, or, with few
    of these, of all; at most 1."""


def calibrate(cure: str, known: Sequence[Pair] | None = None) -> Calibration:
    """Return the range of measured over predicted steps of an optimization's pairs.

    With few pairs, it is widened to the 10th to 90th percentile of all. It always includes 1.

    Args:
        cure: id of the optimization.
        known: pairs to learn from; None for those that come with gputrace.
    """
    counted = [pair for pair in (pairs() if known is None else known) if pair.counts]
    same = [pair.ratio for pair in counted if pair.cure == cure]
    ratios = [*same] if len(same) >= FEWEST_OWN_PAIRS else [pair.ratio for pair in counted]
    if not ratios:
        return Calibration(1.0, 1.0, 0)
    tail = _TRIMMED_PART if len(ratios) >= _FEWEST_TRIMMED_PAIRS else 0.0
    low, high = (quantile(ratios, part) for part in (tail, 1 - tail))
    gained = {
        pair: (pair.now_ms - pair.measured_ms) / (pair.now_ms - pair.predicted_ms)
        for pair in counted
        if pair.now_ms is not None and pair.now_ms > pair.predicted_ms
    }
    own = [part for pair, part in gained.items() if pair.cure == cure]
    parts = own if len(own) >= FEWEST_OWN_PAIRS else [*gained.values()]
    sure = min(1.0, max(0.0, quantile(parts, _TRIMMED_PART))) if parts else 1.0
    return Calibration(min(low, *same, 1.0), max(high, *same, 1.0), len(ratios), sure)
