"""Findings about the run as a whole and about the recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.phases import WARMUP_CAUSES
from gputrace.analyzers.results import CLASSES, Finding, Step
from gputrace.traces.events import Mask
from gputrace.units import format_ns

_SLOW: Final = 1.3
"""A step this many times as long as the middle one is slow, if that is past the usual scatter."""
_WORTH: Final = 0.02
"""Part of the steady time that slow steps must add to be worth a word."""
_PART_OF_WARMUP: Final = 0.1
"""Part of what warm-up costs that a cause must have to be named,"""
_MOST_CAUSES: Final = 2
"""of which so many are."""
_EPOCHS: Final = 0.75
"""Part of the slow steps that begin epochs, from which they are said to."""
_TOLD_APART: Final = {"data_feeding", "h2d", "alloc", "sync", "launch"}
"""Classes that a finding of their own is about."""
_NAMES: Final = {
    "data_feeding": "waiting for data",
    "h2d": "host-to-device copies",
    "other_copy": "copies",
    "alloc": "memory allocation",
    "sync": "synchronisation",
    "launch": "waiting for launches",
    "other_idle": "unexplained idle time",
    "recorder": "the recorder",
    "host_data": "waiting for data",
    "host": "the program's own work",
}
_KEEP_LOADER: Final = {
    "pytorch": "keep the loader's workers from one epoch to the next: "
    "DataLoader(persistent_workers=True), or one endless loader with a sampler that begins anew",
    "tensorflow": "keep the pipeline from one epoch to the next: dataset.repeat().prefetch(…) and "
    "steps_per_epoch, cache decoded data",
    "": "keep the loader and what it has prefetched from one epoch to the next",
}
_LOOK_AT_THEM: Final = (
    "look at these steps: a batch that is slow to load, garbage collection, an allocation, "
    "a checkpoint or logging every so many steps"
)


def recorder_overhead(facts: Facts) -> Iterator[Finding]:
    """The recorder itself keeps the GPUs idle; `medium` from 1 %, `high` from 5 %.

    Cost: idle time with that cause.
    """
    yield from facts.costly(
        "recorder-overhead",
        "recorder",
        "the recorder itself keeps the GPUs idle for {cost}: the run without it is faster than "
        "these figures",
        "record less: fewer kinds of events, a shorter window; compare step times with and "
        "without the recorder",
        medium=0.01,
        high=0.05,
    )


def lost_records(facts: Facts) -> Iterator[Finding]:
    """Rows dropped, or the recorder's own warnings of loss (`low`)."""
    quality = facts.trace.quality
    if not quality.dropped and not quality.warnings and not quality.left_out:
        return
    rows, files = sum(quality.dropped.values()), len(quality.left_out)
    told = [f"{files} file{'s' if files > 1 else ''} left out or cut short"] if files else []
    told += [f"rows that cannot be used ({rows:,})"] if rows else []
    told += quality.warnings[:1]
    yield facts.finding(
        "lost-records",
        "low",
        0,
        "the recording is not whole: " + "; ".join(told),
        ("copy the files again; " if files else "")
        + "record again, for a shorter time or with fewer kinds of events, if the figures matter",
        {"dropped_rows": rows, "warnings": len(quality.warnings), "left_out": files},
    )


def slow_steps(facts: Facts) -> Iterator[Finding]:
    """Steps 30 % and four deviations longer than the middle one add 2 % of the time; says what
    they have more of, and whether they begin epochs.

    Cost: the time they add, spread over all steps.
    """
    by_rank: dict[int, list[Step]] = {rank: [] for rank in facts.ranks}
    for step in facts.timed:
        by_rank.setdefault(step.rank, []).append(step)
    own = ((rank, by_rank[rank]) for rank in facts.ranks)
    found = [f for rank, steps in own if (f := _slow_steps_of(facts, rank, steps)) is not None]
    if found:
        yield max(found, key=lambda finding: finding.impact_ns)


def _slow_steps_of(facts: Facts, rank: int, steps: Sequence[Step]) -> Finding | None:
    longest = _longest_of_each(steps)
    if len(longest) < 5:
        return None
    lengths = np.array([step.end_ns - step.start_ns for step in longest])
    middle = float(np.median(lengths))
    scatter = 1.4826 * float(np.median(np.abs(lengths - middle)))
    slow = lengths > max(_SLOW * middle, middle + 4 * scatter)
    excess = int((lengths[slow] - middle).sum())
    if not slow.any() or slow.mean() > 0.5 or excess < _WORTH * lengths.sum():
        return None
    name, more = _what_slow_steps_have(longest, slow)
    numbers = [step.step for step, is_slow in zip(longest, slow, strict=True) if is_slow]
    epochs = _begun_by(facts, rank, numbers)
    told = f": they begin epochs of {epochs} steps, whose loader starts anew" if epochs else ""
    shown = ", ".join(str(number) for number in numbers[:5]) + (", …" if len(numbers) > 5 else "")
    return facts.finding(
        "slow-steps",
        _severity(facts, excess / float(lengths.sum()), name),
        excess // len(longest),
        f"{len(numbers)} of {len(longest)} steps ({shown}) take "
        f"{format_ns(float(np.mean(lengths[slow])))} instead of {format_ns(middle)}; what they "
        f"have more of is {_NAMES.get(name, name)} ({format_ns(more)}){told}",
        _KEEP_LOADER.get(facts.framework, _KEEP_LOADER[""]) if epochs else _LOOK_AT_THEM,
        {
            "slow_steps": len(numbers),
            "rank": rank,
            "class": name,
            "more_ns": more,
            "epoch_steps": epochs,
        },
    )


def _begun_by(facts: Facts, rank: int, numbers: Sequence[int]) -> int | None:
    """The steps of an epoch, where most of the slow steps begin one; else None."""
    epochs = [p.step for p in facts.phases if (p.phase, p.rank) == ("epoch", rank)]
    begins = sorted(step for step in epochs if step is not None)
    if len(begins) < 2 or len(set(begins) & set(numbers)) < _EPOCHS * len(numbers):
        return None
    return begins[1] - begins[0]


def _severity(facts: Facts, share: float, name: str) -> str:
    """At most medium where another finding tells what the slow steps have: it has the advice."""
    severity = severity_of(share) or "low"
    if severity != "high" or name not in _TOLD_APART:
        return severity
    spent = sum(row.of(name) for row in facts.breakdown)
    whole = sum(row.total_ns for row in facts.breakdown)
    return "medium" if severity_of(spent / whole) == "high" else severity


def _longest_of_each(steps: Sequence[Step]) -> list[Step]:
    """For each step number, the step of the GPU on which it took longest."""
    longest: dict[int, Step] = {}
    for step in steps:
        known = longest.get(step.step)
        if known is None or step.end_ns - step.start_ns > known.end_ns - known.start_ns:
            longest[step.step] = step
    return [longest[number] for number in sorted(longest)]


def _what_slow_steps_have(steps: Sequence[Step], slow: Mask) -> tuple[str, int]:
    """The class of which slow steps have most more than the others, and how much more."""
    shares = [_shares(step) for step in steps]
    table = np.array([list(share.values()) for share in shares])
    more = table[slow].mean(axis=0) - np.median(table[~slow], axis=0)
    most = int(np.argmax(more))
    return list(shares[0])[most], int(more[most])


def _shares(step: Step) -> dict[str, int]:
    """A step by class; where no GPU was seen, what the program waited for data, and the rest."""
    if step.gpu is not None:
        return {name: getattr(step, f"{name}_ns") for name in CLASSES}
    waited = step.host_data_ns or 0
    return {"host_data": waited, "host": step.end_ns - step.start_ns - waited}


def warmup(facts: Facts) -> Iterator[Finding]:
    """Steps left out at the start (`info`); names the two largest causes that are shown, of
    10 % or more.

    Cost: their time beyond the usual, spread over all steps.
    """
    count, chosen = facts.found.warmup, facts.found.chosen
    if not count or (chosen is not None and chosen[0] < count):
        return
    windows = max(facts.found.by_rank.values(), key=len)
    spent = int(windows.end[count - 1] - windows.start[0])
    more = max(spent - facts.mean_ns * count, 0)
    causes = _warmup_causes(facts)
    largest = sorted(causes, key=lambda cause: -causes[cause])[:_MOST_CAUSES]
    shown = [cause for cause in largest if causes[cause] > _PART_OF_WARMUP * more]
    parts = [f"{format_ns(causes[cause])} of {WARMUP_CAUSES[cause].told}" for cause in shown]
    told = f", with {' and '.join(parts)}" if parts else ""
    advice = "a long warm-up is autotuning, compilation or allocation"
    if shown:
        advice = WARMUP_CAUSES[shown[0]].advice
    yield facts.finding(
        "warmup",
        "info",
        more // max(len(windows), 1),
        f"the first {count} step{'s take' if count > 1 else ' takes'} {format_ns(spent)}: "
        f"left out as warm-up{told}",
        f"measure without them; {advice}",
        {"steps": count, "warmup_ns": spent, "beyond_ns": more}
        | {f"{name}_ns": ns for name, ns in causes.items()},
    )


def _warmup_causes(facts: Facts) -> dict[str, int]:
    """Of the rank whose warm-up costs most."""
    phases = [phase for phase in facts.phases if phase.phase == "warmup"]
    return dict(max(phases, key=lambda p: p.cost_ns).causes) if phases else {}


def graph_opaque(facts: Facts) -> Iterator[Finding]:
    """CUDA graphs recorded as a whole (`info`)."""
    graphs = sum(lane.opaque_graphs for lane in facts.per_gpu.lanes)
    if not graphs:
        return
    yield facts.finding(
        "graph-opaque",
        "info",
        0,
        f"{graphs:,} CUDA graphs are recorded as a whole: what runs in them counts as compute, "
        "their copies and collectives included",
        "record the nodes of graphs (nsys --cuda-graph-trace=node)",
        {"graphs": graphs},
    )
