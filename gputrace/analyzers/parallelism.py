"""Forms of parallel training: what each group of ranks is for, by what its members exchange; the
bubbles of pipelines, the load of experts, sharded parameters and split matrix products.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives, RankGroup, steps_of
from gputrace.analyzers.communicators import ALL_TO_ALL, SEND_RECV
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import steps_by_gpu
from gputrace.analyzers.kernel_names import PRODUCTS, family_of
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import OperationClass
from gputrace.model.events import UNKNOWN, Kind, Mask, distinct_ids
from gputrace.model.intervals import Times, union
from gputrace.model.results import (
    ExpertRank,
    Experts,
    Pipeline,
    PipelineStage,
    ShardedData,
    Step,
    TensorParallel,
)
from gputrace.model.struct import Struct

DATA, SHARDED, TENSOR = "data", "sharded data", "tensor"
PIPELINE, EXPERT, CONTEXT = "pipeline", "expert", "context"

_WORDS: Final = (
    # Experts have data-parallel groups of their own; so the words for data come first.
    (DATA, {"dp", "ddp", "data", "replicate", "hsdp"}),
    (SHARDED, {"fsdp", "shard", "zero"}),
    (EXPERT, {"ep", "expert", "experts", "moe"}),
    (CONTEXT, {"cp", "context", "sp", "sequence", "ulysses", "ring"}),
    (TENSOR, {"tp", "tensor", "mp"}),
    (PIPELINE, {"pp", "pipe", "pipeline"}),
)
"""Words in the names that Megatron, DeepSpeed and PyTorch's device meshes give to groups."""


def role_of_name(name: str) -> str:
    """Return the role that the name of a group says; empty if it says none."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return next((role for role, those in _WORDS if words & those), "")


def find_roles(gpus: PerGpu, collectives: Collectives, measured: Sequence[Step]) -> tuple[str, ...]:
    """Return what each of the groups is for; empty if that is not clear.

    Args:
        gpus: GPUs among which the collectives were matched, with their lanes.
        collectives: collectives of all GPUs.
        measured: steps to look at.
    """
    named = [role_of_name(group.name) for group in collectives.groups]
    if not measured or not any(not role for role in named):
        return tuple(named)
    of_lane = {summary.gpu: index for index, summary in enumerate(gpus.operations)}
    lanes = {of_lane[lane.gpu]: lane for lane in gpus.lanes}
    number = steps_of(collectives, gpus.operations, measured)
    patterns: dict[int, tuple[int, NDArray[np.intp]]] = {}
    for index, group in enumerate(collectives.groups):
        lane = next((lane for lane in group.lanes if lane in lanes), None)
        if not named[index] and lane is not None:
            mine = (collectives.group == index) & (collectives.lane == lane)
            rows = np.flatnonzero(mine & (number != UNKNOWN))
            patterns[index] = lane, rows[np.argsort(collectives.start[rows], kind="stable")]
    by_gpu = steps_by_gpu(measured)
    edges = []
    for lane, rows in patterns.values():
        gpu = gpus.operations[lane].gpu
        mine = {step.step: step for step in by_gpu.get((gpu.gpu, gpu.rank), ())}
        spans = [mine[n] for n in number[rows].tolist()]
        edges.append(np.array([(s.start_ns, s.end_ns) for s in spans], np.int64).reshape(-1, 2).T)
    done = gpus.each(
        _compute_around,
        [lanes[lane] for lane, _ in patterns.values()],
        [edge[0] for edge in edges],
        [collectives.start[rows] for _, rows in patterns.values()],
        [collectives.end[rows] for _, rows in patterns.values()],
        [edge[1] for edge in edges],
    )
    for (index, (_, rows)), (before, beside) in zip(patterns.items(), done, strict=True):
        group = collectives.groups[index]
        early = (before < _EARLY) & (beside < _HIDDEN)
        named[index] = _role(collectives, group, rows, number[rows], early)
    return tuple(named)


def _compute_around(
    view: GpuShardView, begins: Times, starts: Times, ends: Times, finishes: Times
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much of the compute of its step is done before each collective, and for how much
    of the collective there is compute beside it; both as fractions.
    """
    compute = view.lane.timeline.of_class(OperationClass.COMPUTE)
    before = compute.within(begins, starts) / np.maximum(compute.within(begins, finishes), 1)
    return before, compute.within(starts, ends) / np.maximum(ends - starts, 1)


_HIDDEN: Final = 0.5
"""Minimum fraction of an all-reduce with compute beside it, if the compute does not need it."""
_EARLY: Final = 0.2
"""Fraction of a step's compute that is of the forward pass, with recomputation in the backward."""
_OFTEN: Final = 0.08
"""Minimum fraction of collectives in that part of the step, if they are of both passes."""
_RUN: Final = 3
"""Minimum all-gathers in a row, if layers' parameters are gathered for the forward pass."""
_FEW: Final = 4
_SPREAD: Final = 0.01
"""Maximum relative spread of messages that are of equal size."""


def _role(
    collectives: Collectives,
    group: RankGroup,
    rows: NDArray[np.intp],
    steps: NDArray[np.int64],
    early: Mask,
) -> str:
    """Return the role of a group by the rows of one of its GPUs, in order of start.

    ``early`` are rows of the forward pass that hold up its compute.
    """
    if not len(rows) or max(group.size, len(group.lanes)) < 2:
        return ""
    names = np.array(collectives.operations, object)[collectives.operation[rows]]
    count = Counter(names.tolist())
    turns = len(distinct_ids(steps))
    if ALL_TO_ALL in count:
        sizes = collectives.bytes[rows][names == ALL_TO_ALL]
        return EXPERT if not (sizes > 0).all() or _spread(sizes) > _SPREAD else CONTEXT
    if any(map(_EXCHANGE.search, count)):
        return EXPERT
    if any("userbuffers" in name for name in count):  # Transformer Engine's
        return TENSOR
    gathers, scatters = count["AllGather"], count["ReduceScatter"]
    if gathers and scatters:
        return _gathering(names, steps, gathers, scatters)
    if count[SEND_RECV] > len(rows) / 2:
        return _exchanging(collectives, group, rows)
    if reductions := count["AllReduce"]:
        forward = np.count_nonzero(early & (names == "AllReduce"))
        both = reductions >= _FEW * turns and forward >= _OFTEN * reductions
        return TENSOR if both else DATA
    return SHARDED if gathers >= _FEW * turns else ""


def _spread(sizes: NDArray[np.int64]) -> float:
    return float(sizes.std() / sizes.mean())


def _gathering(names: NDArray[np.object_], steps: Times, gathers: int, scatters: int) -> str:
    """Tell sharded parameters, gathered layer by layer before any gradient is scattered, from
    activations, which are gathered and scattered in turn.
    """
    longest = run = 0
    last = UNKNOWN
    for name, step in zip(names.tolist(), steps.tolist(), strict=True):
        run = 0 if name == "ReduceScatter" or step != last else run
        run += name == "AllGather"
        longest, last = max(longest, run), step
    turns = len(distinct_ids(steps))
    if min(gathers, scatters) < _FEW * turns:
        return SHARDED
    return SHARDED if longest >= max(_RUN, gathers / turns / _FEW) else TENSOR


def _exchanging(collectives: Collectives, group: RankGroup, rows: NDArray[np.intp]) -> str:
    """Tell the ring of a context that is attended to in parts from the stages of a pipeline."""
    sends = collectives.sends
    mine = sends[collectives.group[sends[:, 0]] == collectives.group[rows[0]]]
    if not len(mine):
        return PIPELINE if group.communicator != UNKNOWN else ""
    source, target = (collectives.lane[side].tolist() for side in mine.T)
    pairs = set(zip(source, target, strict=True))
    there = {pair for pair in pairs if pair[::-1] in pairs}
    # Stages send activations on and gradients back; a ring passes keys and values one way.
    return PIPELINE if there or len(pairs) < len(group.lanes) else CONTEXT


def of_role(collectives: Collectives, roles: Sequence[str], role: str) -> Mask:
    """Return a mask of the rows of groups of a role."""
    chosen = [index for index, each in enumerate(roles) if each == role]
    return np.isin(collectives.group, chosen)


# ---- Pipelines ----


class _Event(NamedTuple):
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


_MOST_TURNS: Final = 32
"""Steps of a pipeline that are replayed, spread over the measured ones."""
_AT_ONCE_NS: Final = 1_000
"""Longest time between the receipt that work waits for and that work."""


def find_pipelines(
    gpus: PerGpu, collectives: Collectives, roles: Sequence[str], measured: Sequence[Step]
) -> tuple[Pipeline, ...]:
    """Return the pipelines, with the time that their stages do not work, by cause.

    A step is replayed from the work of each stage and the messages between them: without the
    host's gaps, then without transfers, then with the work spread evenly. What each of these takes
    away is the host's, the transfers' and the imbalance's part of the bubble; what is left beyond
    the work is the schedule's.
    """
    sends = collectives.sends
    if len(sends):
        sends = sends[of_role(collectives, roles, PIPELINE)[sends[:, 0]]]
    # A message is of the step in which it arrives: the last gradient may leave after its own.
    arrived = replace(collectives, start=collectives.end - 1)
    steps = steps_of(arrived, gpus.operations, measured) if len(sends) else np.empty(0, np.int64)
    pipelines = []
    for lanes in _chains(collectives.lane[sends]):
        mine = sends[np.isin(collectives.lane[sends[:, 0]], lanes)]
        mine = mine[steps[mine[:, 1]] != UNKNOWN]
        pipeline = _pipeline(gpus, collectives, lanes, mine, steps[mine[:, 1]], measured)
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
    gpus: PerGpu,
    collectives: Collectives,
    lanes: Sequence[int],
    sends: NDArray[np.int64],
    steps: NDArray[np.int64],
    measured: Sequence[Step],
) -> Pipeline | None:
    """Return the pipeline of some lanes; None if its steps cannot be replayed."""
    by_gpu = steps_by_gpu(measured)
    places = [gpus.operations[lane].gpu for lane in lanes]
    windows = [{s.step: s for s in by_gpu.get((gpu.gpu, gpu.rank), ())} for gpu in places]
    numbers = sorted(set(steps.tolist()).intersection(*windows))
    chosen = numbers[:: max(1, -(-len(numbers) // _MOST_TURNS))]
    if not chosen:
        return None
    first = {lane: _first_event(collectives, sends, steps, lane, chosen) for lane in lanes}
    order = sorted(range(len(lanes)), key=lambda n: first[lanes[n]])
    lanes, places = [lanes[n] for n in order], [places[n] for n in order]
    windows = [windows[n] for n in order]
    each = _turns(gpus, collectives, lanes, sends, steps, windows, chosen)
    split = [(turn, parts) for turn in each if (parts := _split(turn)) is not None]
    if not split:
        return None
    turns = [turn for turn, _ in split]
    causes = [round(float(np.mean(column))) for column in zip(*(p for _, p in split), strict=True)]
    work = [round(float(np.mean([turn.work[n] for turn in turns]))) for n in range(len(lanes))]
    length = round(float(np.mean([turn.length for turn in turns])))
    mean = round(float(np.mean(work)))
    schedule, imbalance, transfer = causes[:3]
    host = length - mean - schedule - imbalance - transfer
    return Pipeline(
        *_schedule(collectives, lanes, sends, steps, chosen),
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


def _first_event(
    collectives: Collectives,
    sends: NDArray[np.int64],
    steps: NDArray[np.int64],
    lane: int,
    chosen: Sequence[int],
) -> int:
    """Return when, in the first of some steps, a lane first sent or had received something."""
    inside = steps == chosen[0]
    sent = sends[inside & (collectives.lane[sends[:, 0]] == lane), 0]
    received = sends[inside & (collectives.lane[sends[:, 1]] == lane), 1]
    times = np.append(collectives.start[sent], collectives.end[received])
    return int(times.min(initial=np.iinfo(np.int64).max))


def _schedule(
    collectives: Collectives,
    lanes: Sequence[int],
    sends: NDArray[np.int64],
    steps: NDArray[np.int64],
    chosen: Sequence[int],
) -> tuple[str, int]:
    """Return the schedule's name, and the number of micro-batches, by the first of some steps."""
    mine = sends[steps == chosen[0]]
    ends = collectives.lane[mine]
    last, count = lanes[-1], len(lanes)
    on = np.count_nonzero((ends[:, 0] == lanes[0]) & (ends[:, 1] == lanes[1]))
    back = np.count_nonzero((ends[:, 0] == last) & (ends[:, 1] == lanes[0])) if count > 2 else 0
    if back:
        return "interleaved", int(on - back)
    # The last stage sends its first gradient at once, or after all micro-batches.
    begin = collectives.start[mine[ends[:, 0] == last, 0]].min(initial=np.iinfo(np.int64).max)
    before = np.count_nonzero(collectives.end[mine[ends[:, 1] == last, 1]] <= begin)
    if on > 1 and before >= on:
        return "GPipe", int(on)
    return ("1F1B" if before <= 2 else "unknown"), int(on)


def _turns(
    gpus: PerGpu,
    collectives: Collectives,
    lanes: Sequence[int],
    sends: NDArray[np.int64],
    steps: NDArray[np.int64],
    windows: Sequence[Mapping[int, Step]],
    chosen: Sequence[int],
) -> list[_Turn]:
    """Return the steps to replay: the messages of each stage by how much work came before them."""
    lane_of = {gpus.operations[lane].gpu: lane for lane in lanes}
    summaries = {lane_of[each.gpu]: each for each in gpus.lanes if each.gpu in lane_of}
    rows, asked = [], []
    for lane, steps_of_lane in zip(lanes, windows, strict=True):
        of_lane = collectives.lane == lane
        others = np.flatnonzero(of_lane & ~np.isin(collectives.group, collectives.group[sends]))
        # Of what it does with other ranks, a stage works from when all are there.
        talks = collectives.start[others] + collectives.wait[others], collectives.end[others]
        spans = np.array(
            [(steps_of_lane[n].start_ns, steps_of_lane[n].end_ns) for n in chosen], np.int64
        ).T
        at = np.where(np.isin(steps, chosen), np.searchsorted(chosen, steps), UNKNOWN)
        messages = [
            np.flatnonzero((at != UNKNOWN) & (collectives.lane[sends[:, side]] == lane))
            for side in (0, 1)
        ]
        begins = [spans[0][at[mine]] for mine in messages]
        sent = collectives.start[sends[messages[0], 0]]
        got = collectives.start[sends[messages[1], 1]], collectives.end[sends[messages[1], 1]]
        moments = np.concatenate([spans[1], sent, *got, got[1] - _AT_ONCE_NS])
        since = np.concatenate([spans[0], begins[0], begins[1], begins[1], begins[1]])
        rows.append((at, messages, sent, got))
        asked.append((*talks, since, np.maximum(moments, since)))
    columns = zip(*asked, strict=True)
    done = gpus.each(_work_within, [summaries[lane] for lane in lanes], *columns)
    turns = []
    for number, step in enumerate(chosen):
        events, work = [], []
        for (at, messages, sent, got), worked in zip(rows, done, strict=True):
            sizes = np.cumsum([len(chosen), len(sent), len(got[0]), len(got[0])])
            total, before, posted, ended, just_before = np.split(worked, sizes)
            there = collectives.start[sends[messages[1], 0]]
            transfer = np.maximum(got[1] - np.maximum(got[0], there), 0)
            # Work that went on when a message came needs it later.
            gates = np.where(just_before == ended, ended, UNKNOWN)
            early = posted < ended
            timed = [
                (int(sent[n]), _Event(int(before[n]), message, True, 0, False))
                for n, message in enumerate(messages[0].tolist())
                if at[message] == number
            ]
            timed += [
                (
                    int(got[1][n]),
                    _Event(int(gates[n]), message, False, int(transfer[n]), bool(early[n])),
                )
                for n, message in enumerate(messages[1].tolist())
                if at[message] == number
            ]
            timed.sort(key=lambda each: each[0])
            events.append(_placed([event for _, event in timed], int(total[number])))
            work.append(int(total[number]))
        # From the first stage's first forward pass to its last backward pass.
        span = windows[0][step]
        turns.append(_Turn(tuple(events), tuple(work), span.end_ns - span.start_ns))
    return turns


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
        placed += [each._replace(work=event.work) for each in later]
        later = []
    return (*placed, *(each._replace(work=total) for each in later))


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


# ---- Experts ----

_EXCHANGE: Final = re.compile(r"\b(dispatch|combine)$")
"""Kernels of DeepEP that move tokens, not those that say how many."""
_PART: Final = 0.05
"""Fraction of the largest message below which an exchange only says how many tokens follow."""


def find_experts(
    gpus: PerGpu, collectives: Collectives, roles: Sequence[str], measured: Sequence[Step]
) -> tuple[Experts, ...]:
    """Return the load of the experts of each rank, by group.

    Tokens are sent to their experts and back: what a GPU computes between these two exchanges is
    its experts' work.
    """
    if EXPERT not in roles:
        return ()
    numbers = steps_of(collectives, gpus.operations, measured)
    experts = []
    for index, lanes, summaries in _groups_of(EXPERT, gpus, collectives, roles):
        if len(lanes) < 2:
            continue
        pairs = _exchanged(collectives, index, lanes, numbers)
        whole = distinct_ids(numbers[pairs[0][:, 0]])
        if len(whole):
            ends = [collectives.end[pair[:, 0]] for pair in pairs]
            returns = [collectives.start[pair[:, 1]] for pair in pairs]
            starts = list(map(np.maximum, returns, ends))
            work = gpus.each(_computed, summaries, ends, starts)
            rows = np.flatnonzero((collectives.group == index) & np.isin(numbers, whole))
            experts.append(_load(gpus, collectives, lanes, rows, np.array(work), len(whole)))
    return tuple(experts)


def _groups_of(
    role: str, gpus: PerGpu, collectives: Collectives, roles: Sequence[str]
) -> Iterator[tuple[int, list[int], list[LaneSummary]]]:
    """Yield the number of each group of a role, and its lanes with anything in the window, by
    number and as summaries.
    """
    of_gpu = {summary.gpu: index for index, summary in enumerate(gpus.operations)}
    summaries = {of_gpu[lane.gpu]: lane for lane in gpus.lanes}
    for index, role_of_group in enumerate(roles):
        if role_of_group == role:
            lanes = [lane for lane in collectives.groups[index].lanes if lane in summaries]
            yield index, lanes, [summaries[lane] for lane in lanes]


def _rows_by_lane(
    collectives: Collectives, rows: NDArray[np.intp], lanes: Sequence[int]
) -> list[NDArray[np.intp]]:
    """Return those of some collectives that are on each lane, in order of start."""
    ordered = rows[np.argsort(collectives.start[rows], kind="stable")]
    return [ordered[collectives.lane[ordered] == lane] for lane in lanes]


def _exchanged(
    collectives: Collectives, group: int, lanes: Sequence[int], numbers: NDArray[np.int64]
) -> list[NDArray[np.intp]]:
    """Return the rows of each exchange to the experts and of that back, shape (exchanges, 2), by
    lane, in the steps in which all ranks have equally many.
    """
    sizes = collectives.bytes
    by_name = [name for name in collectives.operations if _EXCHANGE.search(name)]
    chosen = (collectives.group == group) & (numbers != UNKNOWN)
    rows = np.flatnonzero(chosen & collectives.of(*by_name) if by_name else chosen)
    rows = rows[(sizes[rows] <= 0) | (sizes[rows] >= _PART * sizes[rows].max(initial=0))]
    by_lane = _rows_by_lane(collectives, rows, lanes)
    counts = [Counter(numbers[mine].tolist()) for mine in by_lane]
    whole = [
        step
        for step, count in counts[0].items()
        if count % 2 == 0 and all(other[step] == count for other in counts)
    ]
    return [mine[np.isin(numbers[mine], whole)].reshape(-1, 2) for mine in by_lane]


def _computed(view: GpuShardView, starts: Times, ends: Times) -> NDArray[np.int64]:
    return view.lane.timeline.of_class(OperationClass.COMPUTE).within(starts, ends)


def _load(
    gpus: PerGpu,
    collectives: Collectives,
    lanes: Sequence[int],
    rows: NDArray[np.intp],
    work: NDArray[np.int64],
    steps: int,
) -> Experts:
    """Return the load of a group by the work of its ranks, shape (ranks, exchanges).

    ``rows`` are all that the group communicates.
    """
    mean = work.mean(axis=0)
    busiest = np.bincount(work.argmax(axis=0), minlength=len(lanes)) / work.shape[1]
    waits = int(collectives.wait[rows].sum()) // (steps * len(lanes))
    places = [gpus.operations[lane].gpu for lane in lanes]
    return Experts(
        steps=steps,
        exchanges=work.shape[1] // steps,
        work_ns=round(float(mean.sum()) / steps),
        imbalance_ns=round(float((work.max(axis=0) - mean).sum()) / steps),
        wait_ns=waits if collectives.known[rows].all() else None,
        ranks=tuple(
            ExpertRank(
                gpu=gpu.gpu,
                rank=gpu.rank,
                work_ns=round(float(of_rank.sum()) / steps),
                ratio=round(float(of_rank.sum() / max(mean.sum(), 1)), 4),
                busiest=round(float(share), 4),
            )
            for gpu, of_rank, share in zip(places, work, busiest, strict=True)
        ),
    )


# ---- Sharded data parallel ----


def find_sharded(
    gpus: PerGpu, collectives: Collectives, roles: Sequence[str], measured: Sequence[Step]
) -> tuple[ShardedData, ...]:
    """Return how each group of ranks that shards its parameters gathers them."""
    if SHARDED not in roles:
        return ()
    numbers = steps_of(collectives, gpus.operations, measured)
    sharded = []
    for index, lanes, summaries in _groups_of(SHARDED, gpus, collectives, roles):
        mine = (collectives.group == index) & (numbers != UNKNOWN)
        mine &= collectives.of("AllGather", "ReduceScatter")
        rows_of = _rows_by_lane(collectives, np.flatnonzero(mine), lanes)
        if not mine.any() or not all(map(len, rows_of)):
            continue
        # What begins a gather, what ends it, and the end of the gather before.
        both = collectives.start, collectives.end
        starts, ends = ([times[rows] for rows in rows_of] for times in both)
        gathers = [collectives.of("AllGather")[rows] for rows in rows_of]
        since = [_ends_before(*columns) for columns in zip(starts, ends, gathers, strict=True)]
        beside = gpus.each(_compute_beside, summaries, starts, ends, since)
        sharded.append(_sharded(gpus, collectives, lanes, rows_of, numbers, beside))
    return tuple(sharded)


def _ends_before(starts: Times, ends: Times, gathers: Mask) -> Times:
    """Return by when the gather before each row, in order of start, had ended; its own start at
    the latest.
    """
    ended = np.maximum.accumulate(np.where(gathers, ends, starts[:1]))
    before: Times = np.minimum(np.append(starts[:1], ended[:-1]), starts)
    return before


def _compute_beside(
    view: GpuShardView, starts: Times, ends: Times, since: Times
) -> tuple[Times, Times, Times]:
    """Return the compute beside each collective, beside its first part, and in the time before."""
    compute = view.lane.timeline.of_class(OperationClass.COMPUTE)
    first = np.minimum(starts + _AT_ONCE_NS, ends)
    spans = (starts, ends), (starts, first), (since, starts)
    beside, at_start, before = (compute.within(*span) for span in spans)
    return beside, at_start, before


def _sharded(
    gpus: PerGpu,
    collectives: Collectives,
    lanes: Sequence[int],
    rows_of: Sequence[NDArray[np.intp]],
    numbers: NDArray[np.int64],
    computed: Sequence[tuple[Times, Times, Times]],
) -> ShardedData:
    """Return the gathers and scatters of a group, by rows of each of its GPUs in order of start."""
    rows = np.concatenate(rows_of)
    beside, at_start, before = (np.concatenate(part) for part in zip(*computed, strict=True))
    gathers = collectives.of("AllGather")[rows]
    length = collectives.end[rows] - collectives.start[rows]
    exposed = length - beside
    wait = np.minimum(collectives.wait[rows], exposed)
    # What the ranks do not wait for could run beside the compute that comes before it.
    hideable = np.where(gathers & (at_start == 0), np.minimum(exposed - wait, before), 0)
    turns = sum(len(distinct_ids(numbers[mine])) for mine in rows_of)
    count = int(gathers.sum())
    layers = len(rows) - count
    sizes = collectives.bytes[rows_of[0]]
    known = bool((sizes > 0).all()) and layers > 0
    places = [gpus.operations[lane].gpu for lane in lanes]

    def per_step(values: NDArray[np.int64], chosen: Mask) -> int:
        return int(values[chosen].sum()) // turns

    return ShardedData(
        gpus=tuple(gpu.gpu for gpu in places),
        ranks=tuple(gpu.rank for gpu in places),
        steps=turns // len(lanes),
        gathers=round(count / turns),
        gather_ns=per_step(length, gathers),
        gather_exposed_ns=per_step(exposed, gathers),
        gather_wait_ns=per_step(wait, gathers) if collectives.known[rows].all() else None,
        scatters=round(layers / turns),
        scatter_ns=per_step(length, ~gathers),
        scatter_exposed_ns=per_step(exposed, ~gathers),
        prefetched=round(float((at_start[gathers] > 0).mean()) if count else 0.0, 4),
        hideable_ns=per_step(hideable, gathers),
        gathered_again=max(round((count - layers) / turns), 0) if layers else 0,
        unsharded_bytes=_unsharded(collectives, rows_of[0], numbers) if known else None,
    )


def _unsharded(collectives: Collectives, rows: NDArray[np.intp], numbers: NDArray[np.int64]) -> int:
    """Return the bytes of all parameters: a layer has one scatter, and is gathered for the forward
    pass before any of these.
    """
    rows = rows[numbers[rows] == numbers[rows[-1]]]
    gathers = collectives.of("AllGather")[rows]
    before = rows[: int(np.argmin(gathers))]
    return int(collectives.bytes[before[: np.count_nonzero(~gathers)]].sum())


# ---- Tensor parallel ----


def find_tensor(
    gpus: PerGpu, collectives: Collectives, roles: Sequence[str], measured: Sequence[Step]
) -> tuple[TensorParallel, ...]:
    """Return how much of the communication of each tensor-parallel group is exposed, and beside
    matrix products.
    """
    if TENSOR not in roles:
        return ()
    numbers = steps_of(collectives, gpus.operations, measured)
    tensor = []
    for index, lanes, summaries in _groups_of(TENSOR, gpus, collectives, roles):
        mine = (collectives.group == index) & (numbers != UNKNOWN)
        if not mine.any():
            continue
        rows_of = _rows_by_lane(collectives, np.flatnonzero(mine), lanes)
        spans = [
            [times[rows] for rows in rows_of] for times in (collectives.start, collectives.end)
        ]
        beside = gpus.each(_work_beside, summaries, *spans)
        compute, products = np.array([[int(part.sum()) for part in parts] for parts in beside]).T
        turns = max(sum(len(distinct_ids(numbers[rows])) for rows in rows_of), 1)
        rows = np.concatenate(rows_of)
        total = int((collectives.end[rows] - collectives.start[rows]).sum())
        places = [gpus.operations[lane].gpu for lane in lanes]
        tensor.append(
            TensorParallel(
                gpus=tuple(gpu.gpu for gpu in places),
                ranks=tuple(gpu.rank for gpu in places),
                steps=turns // len(lanes),
                collectives=round(len(rows) / turns),
                total_ns=total // turns,
                exposed_ns=(total - int(compute.sum())) // turns,
                beside_products_ns=int(products.sum()) // turns,
                wait_ns=int(collectives.wait[rows].sum()) // turns
                if collectives.known[rows].all()
                else None,
            )
        )
    return tuple(tensor)


def _work_beside(view: GpuShardView, starts: Times, ends: Times) -> tuple[Times, Times]:
    """Return how much compute, and how much of it in matrix products, is beside collectives."""
    operations, events = view.operations, view.operations.events
    computes = (operations.classes == OperationClass.COMPUTE) & (events.kind == Kind.KERNEL)
    names = view.trace.names(distinct_ids(events.name[computes]))
    multiply = [id for id, name in names.items() if family_of(name) in PRODUCTS]
    rows = computes & np.isin(events.name, multiply)
    products = union(events.start[rows], events.end[rows])
    compute = view.lane.timeline.of_class(OperationClass.COMPUTE)
    return compute.within(starts, ends), products.within(starts, ends)
