"""Findings about validation and checkpoints: what they cost, and which ranks only wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import HIGH, MEDIUM, Facts, severity_of
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.results import CLASSES, IDLE_CAUSES, Finding, Phase
from gputrace.analyzers.shard import OneGpu
from gputrace.analyzers.steps import StepWindows
from gputrace.units import format_ns, format_ranges

_WORTH: Final = 0.01
"""Part of the run after warm-up that a phase must cost to be worth a word."""
_WAITS: Final = 0.5
"""A rank waits in another one's phase if it computes and copies for less than the rest of it."""
_NOT_WORK: Final = (CLASSES.index("communication"), *map(CLASSES.index, IDLE_CAUSES))

_VALIDATE_ON_ALL: Final = {
    "pytorch": "validate on all ranks: a DistributedSampler for the validation set, and "
    "all_reduce of the sums",
    "tensorflow": "validate under the strategy on all replicas",
    "jax": "validate on all devices: shard the validation set as the training set is",
    "chainer": "validate on all ranks (chainermn.create_multi_node_evaluator)",
}
_SAVE_ASIDE: Final = {
    "pytorch": "save beside the training: torch.distributed.checkpoint.async_save, or copy to "
    "pinned memory and write in another thread",
    "tensorflow": "save beside the training: tf.train.CheckpointOptions(enable_async=True)",
    "jax": "save beside the training: orbax's AsyncCheckpointer",
}


@dataclass(frozen=True)
class _Times:
    """All validations, or all checkpoints, of a run."""

    steps: tuple[int, ...]
    """The steps that they follow."""
    total_ns: int
    """How long they last, on the rank where each lasts longest."""
    idle_ns: int
    """How long the GPU of that rank runs nothing in them and at their edges."""
    working: tuple[int, ...]
    waits: dict[int, int]
    """By rank that waits meanwhile: nanoseconds without any work of its own."""


def validation_downtime(facts: Facts) -> Iterator[Finding]:
    """Ranks wait while others validate, or the GPUs idle in validation: 1 % of the run after
    warm-up (`low`); at most `medium` of a single one.

    Cost: of ranks that wait, what validating on all of them would save; else the idle time;
    spread over all steps.
    """
    times, run = _times(facts, "validation"), _run_ns(facts)
    if times is None:
        return
    ranks = len(times.working) + len(times.waits)
    lost = times.total_ns * len(times.waits) // ranks if times.waits else times.idle_ns
    share = lost / run
    if share < _WORTH:
        return
    advice = _VALIDATE_ON_ALL.get(facts.framework, "validate on all ranks, each its part")
    if not times.waits:
        advice = "feed validation as training is fed: workers that persist, larger batches; less "
        advice += "often"
    yield facts.finding(
        "validation-downtime",
        _severity(share, times),
        lost // _steps(facts),
        f"validation {_when(times)} takes {format_ns(times.total_ns)} "
        f"({times.total_ns / run:.0%} of the run after warm-up); {_meanwhile(times)}",
        advice,
        _evidence(times, run, lost),
    )


def checkpoint_stall(facts: Facts) -> Iterator[Finding]:
    """Training stands still for a checkpoint: 1 % of the run after warm-up (`low`); at most
    `medium` of a single one.

    Cost: how long it takes, spread over all steps.
    """
    times, run = _times(facts, "checkpoint"), _run_ns(facts)
    if times is None or times.total_ns < _WORTH * run:
        return
    yield facts.finding(
        "checkpoint-stall",
        _severity(times.total_ns / run, times),
        times.total_ns // _steps(facts),
        f"saving a checkpoint {_when(times)} takes {format_ns(times.total_ns)} "
        f"({times.total_ns / run:.0%} of the run after warm-up); {_meanwhile(times)}",
        _SAVE_ASIDE.get(
            facts.framework, "save beside the training: copy to pinned memory, write in a thread"
        )
        + "; less often",
        _evidence(times, run, times.total_ns),
    )


def _times(facts: Facts, name: str) -> _Times | None:
    """What the phases of a name cost; None where there are none."""
    by_step: dict[int, list[Phase]] = defaultdict(list)
    for phase in facts.phases:
        if phase.phase == name and phase.step is not None and not phase.waits_for:
            by_step[phase.step].append(phase)
    if not by_step:
        return None
    longest = [max(own, key=lambda p: p.end_ns - p.start_ns) for own in by_step.values()]
    working = sorted({phase.rank for own in by_step.values() for phase in own})
    return _Times(
        steps=tuple(sorted(by_step)),
        total_ns=sum(phase.end_ns - phase.start_ns for phase in longest),
        idle_ns=sum((phase.idle_ns or 0) + (phase.after_ns or 0) for phase in longest),
        working=tuple(working),
        waits=_waits(facts, longest, working),
    )


def _waits(facts: Facts, phases: Sequence[Phase], working: Sequence[int]) -> dict[int, int]:
    """Of the ranks that have no such phase, those that wait while the others are in it."""
    lanes: dict[int, LaneSummary] = {}
    for lane in facts.per_gpu.lanes:
        if lane.gpu.rank not in working and lane.gpu.rank in facts.found.by_rank:
            lanes.setdefault(lane.gpu.rank, lane)
    starts = np.array([phase.start_ns for phase in phases], np.int64)
    ends = np.array([phase.end_ns for phase in phases], np.int64)
    length = int((ends - starts).sum())
    waited = facts.per_gpu.each(_waited, lanes.values(), same=(starts, ends))
    return {rank: ns for rank, ns in zip(lanes, waited, strict=True) if ns >= _WAITS * length}


def _waited(one: OneGpu, starts: Times, ends: Times) -> int:
    return int(one.lane.split(starts, ends)[:, _NOT_WORK].sum())


def _run_ns(facts: Facts) -> int:
    """From the first step after warm-up to the last one's end: what a longer run has more of."""
    warm = facts.found.warmup
    windows = [own for own in facts.found.by_rank.values() if len(own) > warm]
    return max((_lasting(own, warm) for own in windows), default=1)


def _lasting(own: StepWindows, warm: int) -> int:
    """Steps and what lies between them: the time between windows of a recording is not known."""
    between = (i.end - i.start for i in own.interludes if i.after >= warm)
    return int(own.lengths[warm:].sum()) + sum(between)


def _steps(facts: Facts) -> int:
    """Steps in that time."""
    most = max(map(len, facts.found.by_rank.values()), default=0)
    return max(most - facts.found.warmup, 1)


def _severity(share: float, times: _Times) -> str:
    """At most medium for a single one: how often it comes, the recording does not say."""
    severity = severity_of(share, MEDIUM, HIGH) or "low"
    return "medium" if severity == "high" and len(times.steps) == 1 else severity


def _when(times: _Times) -> str:
    shown = format_ranges(times.steps[:5]) + (", …" if len(times.steps) > 5 else "")
    return f"after step{'' if len(times.steps) == 1 else 's'} {shown}"


def _meanwhile(times: _Times) -> str:
    """Who works and who waits, or how long the GPUs idle."""
    if not times.waits:
        return f"the GPUs run nothing for {format_ns(times.idle_ns)} of it"
    waiting, each = sorted(times.waits), max(times.waits.values())
    who = f"rank{'' if len(times.working) == 1 else 's'} {format_ranges(times.working)}"
    verb = "waits" if len(waiting) == 1 else "wait"
    return (
        f"rank{'' if len(waiting) == 1 else 's'} {format_ranges(waiting)} {verb} "
        f"{format_ns(each)} for {who}"
    )


def _evidence(times: _Times, run: int, lost: int) -> dict[str, float | int | str | None]:
    return {
        "times": len(times.steps),
        "after_steps": format_ranges(times.steps),
        "total_ns": times.total_ns,
        "idle_ns": times.idle_ns,
        "lost_ns": lost,
        "share_of_run": round(lost / run, 4),
        "working_ranks": format_ranges(times.working),
        "waiting_ranks": format_ranges(sorted(times.waits)),
        "wait_ns": max(times.waits.values(), default=0),
    }
