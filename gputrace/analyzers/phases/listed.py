"""All phases of all ranks: warm-up, validation, checkpoints, and the waits that begin epochs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.lanes import AnyLane, AnyLaneSummary, Lane
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.phases.epochs import find_epochs
from gputrace.analyzers.phases.warmup import WARMUP_CAUSES
from gputrace.analyzers.results import CLASSES, Phase, Step
from gputrace.analyzers.shard import OneGpu
from gputrace.analyzers.steps import FoundSteps, HeldUp, Interlude, StepWindows, held_up
from gputrace.units import format_ns, format_ranges

_WORKS: Final = 0.1
"""A rank works in a phase if it computes and copies this part of what the busiest one does."""
_TOLD: Final = 0.05
"""Causes of warm-up from this part of its cost are named."""


def list_phases(
    gpus: PerGpu,
    lanes: Sequence[AnyLaneSummary],
    found: FoundSteps,
    steps: Sequence[Step] = (),
    causes: Mapping[int, Mapping[str, int]] | None = None,
) -> tuple[Phase, ...]:
    """Warm-up, validation and checkpoints of every rank, and what begins its epochs.

    Args:
        gpus: whose lanes they are.
        lanes: of all GPUs; the first of each rank stands for it.
        found: the steps, with what lies between them.
        steps: all steps on all GPUs.
        causes: of warm-up, by rank.
    """
    held, steps_of = list(held_up(found.by_rank)), StepsOf(steps)
    lanes = [lane for lane in _one_of_each_rank(lanes) if lane.gpu.rank in found.by_rank]
    told = [
        _Told(
            found.by_rank[lane.gpu.rank],
            found.warmup,
            (causes or {}).get(lane.gpu.rank, {}),
            tuple(own for own in held if own.rank == lane.gpu.rank),
            _waits(steps_of(lane.gpu)),
        )
        for lane in lanes
    ]
    listed = [phase for own in gpus.each(_phases, lanes, told) for phase in own]
    return tuple(_who_waits(listed))


@dataclass(frozen=True)
class _Told:
    """What phases are made of, of one rank, but for its lane."""

    windows: StepWindows
    warmup: int
    causes: Mapping[str, int]
    held: tuple[HeldUp, ...]
    waits: Mapping[int, int]
    """By step, nanoseconds that its GPU waits for data."""


def _phases(one: OneGpu, told: _Told) -> list[Phase]:
    lane, windows = one.any_lane, told.windows
    return [
        *_warmup(lane, windows, told.warmup, told.causes),
        *(_interlude(lane, windows, interlude) for interlude in windows.interludes),
        *(_held_up(lane, own) for own in told.held),
        *_epochs(lane, windows, told.warmup, told.waits),
    ]


def _waits(steps: Sequence[Step]) -> dict[int, int]:
    return {step.step: _wait(step) for step in steps}


def _one_of_each_rank(lanes: Sequence[AnyLaneSummary]) -> list[AnyLaneSummary]:
    return list({lane.gpu.rank: lane for lane in reversed(lanes)}.values())[::-1]


def _warmup(
    lane: AnyLane, windows: StepWindows, warmup: int, causes: Mapping[str, int]
) -> Iterator[Phase]:
    warm = min(warmup, len(windows))
    if not warm:
        return
    start, end = int(windows.start[0]), int(windows.end[warm - 1])
    later = windows.lengths[warm:]
    cost = end - start - warm * int(np.median(later)) if len(later) else 0
    evidence = (
        f"{warm} step{'' if warm == 1 else 's'} before three in a row at the later steps' speed"
    )
    largest = sorted(causes.items(), key=lambda item: -item[1])
    told = [f"{WARMUP_CAUSES[c].told} {format_ns(ns)}" for c, ns in largest if ns > _TOLD * cost]
    if told and cost > 0:
        evidence += f"; of {format_ns(cost)} more than steady steps take: {', '.join(told)}"
    yield Phase(
        "warmup",
        lane.gpu.rank,
        start,
        end,
        lane.idle(start, end),
        evidence,
        cost_ns=max(cost, 0),
        causes=dict(largest),
    )


def _interlude(lane: AnyLane, windows: StepWindows, interlude: Interlude) -> Phase:
    start, end = interlude.start, interlude.end
    phase = Phase(
        interlude.phase,
        lane.gpu.rank,
        start,
        end,
        lane.idle(start, end),
        interlude.evidence,
        step=interlude.after,
        cost_ns=end - start,
        communication_ns=_of(lane, "communication", start, end),
    )
    if not isinstance(lane, Lane):
        return phase
    begins = int(windows.busy_from[interlude.after + 1])
    before, after = _edges(lane.timeline.busy, start, end, begins)
    is_last = not any(i.after == interlude.after and i.start >= end for i in windows.interludes)
    return replace(phase, before_ns=before, after_ns=after if is_last else None)


def _held_up(lane: AnyLane, held: HeldUp) -> Phase:
    start, end = held.start, held.end
    idle, joint = lane.idle(start, end), _of(lane, "communication", start, end)
    return Phase(
        held.interlude.phase,
        lane.gpu.rank,
        start,
        end,
        idle,
        _told_of_waiting((held.by,), joint, idle),
        step=held.interlude.after,
        cost_ns=end - start,
        communication_ns=joint,
        waits_for=(held.by,),
    )


def _told_of_waiting(ranks: Sequence[int], joint: int | None, idle: int | None) -> str:
    return (
        f"waits for rank{'' if len(ranks) == 1 else 's'} {format_ranges(ranks)}: "
        f"{format_ns(joint or 0)} in communication, {format_ns(idle or 0)} idle"
    )


def _edges(busy: Intervals, start: int, end: int, begins: int) -> tuple[int, int]:
    """Idle time from the start of a phase to its first operation, and before the next step's."""
    place = int(np.searchsorted(busy.end, start, "right"))
    first = int(busy.start[place]) if place < len(busy) else end
    last = int(np.searchsorted(busy.end, begins, "right")) - 1
    idle_from = max(int(busy.end[last]), start) if last >= 0 else start
    return max(min(first, end) - start, 0), max(begins - idle_from, 0)


def _of(lane: AnyLane, name: str, start: int, end: int) -> int | None:
    row = lane.split(np.array([start]), np.array([end]))[0]
    return int(row[CLASSES.index(name)]) if len(row) else None


def _epochs(
    lane: AnyLane, windows: StepWindows, warmup: int, told: Mapping[int, int]
) -> Iterator[Phase]:
    """The waits for data that begin epochs, from those of all steps of the lane's GPU."""
    if len(told) != len(windows):
        return
    waits = np.array([told[number] for number in range(len(windows))], np.int64)
    waits[:warmup] = np.median(waits)
    begins = find_epochs(waits, windows.lengths, {i.after + 1 for i in windows.interludes})
    usual = int(np.median(waits))
    for number in begins:
        start, end = int(windows.start[number]), int(windows.busy_from[number])
        evidence = (
            f"the first of an epoch of {begins[1] - begins[0]} steps waits "
            f"{format_ns(waits[number])} for data, a usual one {format_ns(usual)}"
        )
        cost = int(waits[number]) - usual
        yield Phase(
            "epoch",
            lane.gpu.rank,
            start,
            max(start, end),
            lane.idle(start, max(start, end)),
            evidence,
            step=number,
            cost_ns=cost,
        )


def _wait(step: Step) -> int:
    return (step.host_data_ns if step.gpu is None else step.data_feeding_ns) or 0


def _who_waits(phases: Sequence[Phase]) -> Iterator[Phase]:
    """The phases, those of ranks that only wait for others with the others' names."""
    by_step: dict[int | None, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for phase in phases:
        if not phase.waits_for:
            by_step[phase.step if _is_between(phase) else None][phase.rank] += _work(phase)
    for phase in phases:
        work = by_step[phase.step]
        most = max(work.values(), default=0)
        if phase.waits_for or not _is_between(phase) or work[phase.rank] >= _WORKS * most:
            yield phase
            continue
        working = tuple(sorted(rank for rank, done in work.items() if done >= _WORKS * most))
        told = _told_of_waiting(working, phase.communication_ns, phase.idle_ns)
        yield replace(phase, waits_for=working, evidence=told)


def _is_between(phase: Phase) -> bool:
    return phase.phase in ("validation", "checkpoint")


def _work(phase: Phase) -> int:
    """Nanoseconds in which the GPU computes or copies."""
    if phase.idle_ns is None:
        return 0
    return phase.end_ns - phase.start_ns - phase.idle_ns - (phase.communication_ns or 0)
