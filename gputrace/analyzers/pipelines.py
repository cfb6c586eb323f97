"""Pipelines of stages: their schedule, and what their bubbles come from, by replaying steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.collectives import steps_of
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.parallelism import PIPELINE, Groups
from gputrace.model.communication import Pipeline, PipelineStage
from gputrace.model.events import UNKNOWN, Mask
from gputrace.model.intervals import Times, union
from gputrace.model.results import Step
from gputrace.model.struct import Struct


class _Event(Struct, frozen=True):
    """One end of a message, in the order of a stage's time."""

    work: int
    """Nanoseconds of work that the stage has done by then in the step."""
    message: int
    sends: bool
    transfer: int
    """Nanoseconds from the later of its two starts on; 0 for a send."""
    posted: bool
    """True for a receipt that was asked for before the work ahead of it was done."""


class _Turn(Struct, frozen=True, dict=True):
    """One step of a pipeline: events and work of each stage, and its length on the first one."""

    events: tuple[tuple[_Event, ...], ...]
    work: tuple[int, ...]
    length: int

    def replay(self, scale: Sequence[float], *, transfers: bool) -> float | None:
        """Return how long the step takes if stages only work, and wait for messages.

        Args:
            scale: factor for the work of each stage.
            transfers: False if messages arrive as they are sent.

        Returns None where messages wait for each other in a circle.
        """
        now, done = [0.0] * len(self.work), [0] * len(self.work)
        left = [0] * len(self.work)
        sent: dict[int, float] = {}
        waiting = True
        while waiting:
            waiting, moved = False, False
            for stage, events in enumerate(self.events):
                while left[stage] < len(events):
                    event = events[left[stage]]
                    at = now[stage] + (event.work - done[stage]) * scale[stage]
                    if event.sends:
                        sent[event.message] = at
                    elif event.message not in sent:
                        waiting = True
                        break
                    else:
                        begun = sent[event.message]
                        begun = begun if event.posted else max(begun, at)
                        at = max(at, begun + (event.transfer if transfers else 0))
                    now[stage], done[stage] = at, event.work
                    left[stage], moved = left[stage] + 1, True
            if waiting and not moved:
                return None
        rest = zip(now, self.work, done, scale, strict=True)
        return max(at + (work - before) * factor for at, work, before, factor in rest)


class _Messages(NamedTuple):
    """Messages between the stages of a pipeline; arrays of equal length."""

    step: NDArray[np.int64]
    """Step in which each arrives: the last gradient may leave after its own."""
    source: NDArray[np.int16]
    target: NDArray[np.int16]
    """Lanes of its ends."""
    sent: Times
    """When its send began."""
    posted: Times
    """When its receipt began."""
    arrived: Times

    def select(self, mask: Mask) -> _Messages:
        """Return some of the messages."""
        return _Messages._make(column[mask] for column in self)


_NEVER: Final = np.iinfo(np.int64).max
_MOST_TURNS: Final = 32
"""Steps of a pipeline that are replayed, spread over the measured ones."""
_AT_ONCE_NS: Final = 1_000
"""Longest time between the receipt that work waits for and that work."""


def find_pipelines(groups: Groups) -> tuple[Pipeline, ...]:
    """Return the pipelines, with the time that their stages do not work, by cause.

    A step is replayed from the work of each stage and the messages between them: without the
    host's gaps, then without transfers, then with the work spread evenly. What each of these takes
    away is the host's, the transfers' and the imbalance's part of the bubble; what is left beyond
    the work is the schedule's.
    """
    collectives, sends = groups.collectives, groups.collectives.sends
    of_stages = [number for number, role in enumerate(groups.roles) if role == PIPELINE]
    if not len(sends) or not of_stages:
        return ()
    sends = sends[np.isin(collectives.group[sends[:, 0]], of_stages)]
    arrived = replace(collectives, start=collectives.end - 1)
    steps = steps_of(arrived, groups.gpus.operations, groups.measured)
    pipelines = []
    for lanes in _chains(collectives.lane[sends]):
        mine = sends[np.isin(collectives.lane[sends[:, 0]], lanes)]
        mine = mine[steps[mine[:, 1]] != UNKNOWN]
        source, target = mine.T
        messages = _Messages(
            step=steps[target],
            source=collectives.lane[source],
            target=collectives.lane[target],
            sent=collectives.start[source],
            posted=collectives.start[target],
            arrived=collectives.end[target],
        )
        others = np.flatnonzero(~np.isin(collectives.group, collectives.group[mine]))
        pipeline = _pipeline(groups, lanes, messages, others)
        pipelines += [] if pipeline is None else [pipeline]
    return tuple(pipelines)


def _chains(pairs: NDArray[np.int16]) -> list[list[int]]:
    """Return the sets of lanes that messages connect, each in order."""
    chain: dict[int, set[int]] = {}
    for a, b in set(map(tuple, pairs.tolist())):
        joined = chain.get(a, {a}) | chain.get(b, {b})
        chain |= dict.fromkeys(joined, joined)
    return sorted({id(each): sorted(each) for each in chain.values()}.values())


def _pipeline(
    groups: Groups, lanes: Sequence[int], messages: _Messages, others: NDArray[np.intp]
) -> Pipeline | None:
    """Return the pipeline of some lanes; None if its steps cannot be replayed.

    ``others`` are the rows of what lanes do with other ranks than those of the messages.
    """
    measured_of, places = StepsOf(groups.measured), groups.places(lanes)
    windows = [{step.step: step for step in measured_of(gpu)} for gpu in places]
    numbers = sorted(set(messages.step.tolist()).intersection(*windows))
    chosen = numbers[:: max(1, -(-len(numbers) // _MOST_TURNS))]
    if not chosen:
        return None
    first = messages.select(messages.step == chosen[0])
    # A lane begins when it first sent or had received something.
    begins = [
        min(
            int(first.sent[first.source == lane].min(initial=_NEVER)),
            int(first.arrived[first.target == lane].min(initial=_NEVER)),
        )
        for lane in lanes
    ]
    order = sorted(range(len(lanes)), key=lambda n: begins[n])
    lanes, places = [lanes[n] for n in order], [places[n] for n in order]
    windows = [windows[n] for n in order]
    messages = messages.select(np.isin(messages.step, chosen))
    each = _turns(groups, lanes, messages, others, windows, chosen)
    split = [(turn, parts) for turn in each if (parts := _split(turn)) is not None]
    return _mean_pipeline(*_schedule(first, lanes), places, split) if split else None


def _mean_pipeline(
    kind: str,
    micro_batches: int,
    places: Sequence[Gpu],
    split: Sequence[tuple[_Turn, tuple[float, float, float]]],
) -> Pipeline:
    """Return the means of replayed steps and of the parts of their bubbles, by cause.

    ``places`` are the stages' GPUs, in order; each step comes with its parts, as `_split` has them.
    """
    turns = [turn for turn, _ in split]
    causes = [round(float(np.mean(column))) for column in zip(*(p for _, p in split), strict=True)]
    work = [round(float(np.mean(times))) for times in zip(*(t.work for t in turns), strict=True)]
    length = round(float(np.mean([turn.length for turn in turns])))
    mean = round(float(np.mean(work)))
    schedule, imbalance, transfer = causes
    host = length - mean - schedule - imbalance - transfer
    return Pipeline(
        kind,
        micro_batches,
        steps=len(turns),
        step_ns=length,
        work_ns=mean,
        bubble_ns=length - mean,
        schedule_ns=schedule,
        imbalance_ns=imbalance,
        transfer_ns=transfer,
        host_ns=host,
        slowest=int(np.argmax(work)),
        excess_ns=max(work) - mean,
        stages=tuple(
            PipelineStage(
                stage=n,
                gpu=gpu.gpu,
                rank=gpu.rank,
                work_ns=work_of_rank,
                bubble_ns=length - work_of_rank,
                schedule_ns=schedule,
                imbalance_ns=imbalance + mean - work_of_rank,
                transfer_ns=transfer,
                host_ns=host,
            )
            for n, (gpu, work_of_rank) in enumerate(zip(places, work, strict=True))
        ),
    )


def _schedule(messages: _Messages, lanes: Sequence[int]) -> tuple[str, int]:
    """Return the name of the schedule and the number of micro-batches, by a step's messages."""
    source, target, last = messages.source, messages.target, lanes[-1]
    on = np.count_nonzero((source == lanes[0]) & (target == lanes[1]))
    back = np.count_nonzero((source == last) & (target == lanes[0])) if len(lanes) > 2 else 0
    if back:
        return "interleaved", int(on - back)
    # The last stage sends its first gradient at once, or after all micro-batches.
    begin = messages.sent[source == last].min(initial=_NEVER)
    before = np.count_nonzero(messages.arrived[target == last] <= begin)
    if on > 1 and before >= on:
        return "GPipe", int(on)
    return ("1F1B" if before <= 2 else "unknown"), int(on)


def _turns(
    groups: Groups,
    lanes: Sequence[int],
    messages: _Messages,
    others: NDArray[np.intp],
    windows: Sequence[Mapping[int, Step]],
    chosen: Sequence[int],
) -> list[_Turn]:
    """Return the steps to replay: the messages of each stage by how much work came before them."""
    collectives, summaries = groups.collectives, groups.gpus.lane_of
    at = np.searchsorted(chosen, messages.step)
    ends, asked = [], []
    for lane, steps_of_lane in zip(lanes, windows, strict=True):
        # Of what it does with other ranks, a stage works from when all are there.
        talks = others[collectives.lane[others] == lane]
        met = collectives.start[talks] + collectives.wait[talks], collectives.end[talks]
        begin, end = np.array(
            [(steps_of_lane[n].start_ns, steps_of_lane[n].end_ns) for n in chosen], np.int64
        ).T
        sends, receipts = (np.flatnonzero(side == lane) for side in messages[1:3])
        posted, arrived = messages.posted[receipts], messages.arrived[receipts]
        moments = (end, messages.sent[sends], posted, arrived, arrived - _AT_ONCE_NS)
        since = np.concatenate([begin, begin[at[sends]], *[begin[at[receipts]]] * 3])
        until = np.maximum(np.concatenate(moments), since)
        ends.append((sends, receipts))
        asked.append((*met, since, until))
    columns = zip(*asked, strict=True)
    done = groups.gpus.each(_work_within, [summaries[lane] for lane in lanes], *columns)
    stages = [
        _by_turn(messages, at, *of_stage, worked, len(chosen))
        for of_stage, worked in zip(ends, done, strict=True)
    ]
    turns = []
    for step, of_step in zip(chosen, zip(*stages, strict=True), strict=True):
        events, work = zip(*of_step, strict=True)
        # From the first stage's first forward pass to its last backward pass.
        span = windows[0][step]
        turns.append(_Turn(events, work, span.end_ns - span.start_ns))
    return turns


def _by_turn(
    messages: _Messages,
    at: NDArray[np.int64],
    sends: NDArray[np.intp],
    receipts: NDArray[np.intp],
    worked: NDArray[np.int64],
    turns: int,
) -> Iterator[tuple[tuple[_Event, ...], int]]:
    """Yield the events and the work of a stage in each step.

    Args:
        messages: all messages.
        at: index of the step of each.
        sends: indices of those that the stage sends.
        receipts: indices of those that it receives.
        worked: what `_work_within` says of it.
        turns: number of steps.
    """
    sizes = np.cumsum([turns, len(sends), len(receipts), len(receipts)])
    total, before, posted, ended, just_before = np.split(worked, sizes)
    # Work that went on when a message came needs it later.
    gates = np.where(just_before == ended, ended, UNKNOWN)
    begun = np.maximum(messages.posted, messages.sent)
    transfer = np.maximum(messages.arrived - begun, 0)[receipts]
    message, nothing = np.append(sends, receipts), np.zeros(len(sends), np.int64)
    columns = (
        np.append(before, gates),
        message,
        np.arange(len(message)) < len(sends),
        np.append(nothing, transfer),
        np.append(nothing > 0, posted < ended),
    )
    events = list(map(_Event, *(column.tolist() for column in columns)))
    times = np.append(messages.sent[sends], messages.arrived[receipts])
    step = at[message]
    order = np.lexsort((times, step))
    edges = np.searchsorted(step[order], np.arange(turns + 1))
    for work, (first, end) in zip(total.tolist(), pairwise(edges.tolist()), strict=True):
        yield _placed([events[n] for n in order[first:end].tolist()], work), work


def _placed(events: Sequence[_Event], total: int) -> tuple[_Event, ...]:
    """Place receipts that came while work went on: that work needs them only after it has sent
    what it made.
    """
    placed: list[_Event] = []
    later: list[_Event] = []
    for event in events:
        if event.work == UNKNOWN:
            later.append(event)
            continue
        placed.append(event)
        placed += [replace(each, work=event.work) for each in later]
        later = []
    return (*placed, *(replace(each, work=total) for each in later))


def _work_within(
    view: GpuShardView, talk_starts: Times, talk_ends: Times, starts: Times, ends: Times
) -> NDArray[np.int64]:
    """Return for how long a GPU works in stretches of time: all but communication, and some of
    that.
    """
    operations = view.operations
    works = operations.classes != OperationClass.COMMUNICATION
    work = union(
        np.append(operations.start[works], talk_starts), np.append(operations.end[works], talk_ends)
    )
    return work.within(starts, ends)


def _split(turn: _Turn) -> tuple[float, float, float] | None:
    """Return what schedule, imbalance and transfers take of a step, on the mean of its stages."""
    mean = sum(turn.work) / len(turn.work)
    alike, even = [1.0] * len(turn.work), [mean / max(work, 1) for work in turn.work]
    replays = [
        turn.replay(alike, transfers=True),
        turn.replay(alike, transfers=False),
        turn.replay(even, transfers=False),
    ]
    # No replay takes longer than the step did, or less than the work.
    most, lengths = float(turn.length), []
    for length in replays:
        if length is None:
            return None
        most = max(min(most, length), mean)
        lengths.append(most)
    busy, at_once, balanced = lengths
    return balanced - mean, at_once - balanced, busy - at_once
