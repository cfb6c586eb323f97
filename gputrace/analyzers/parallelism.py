"""Forms of parallel training: what each group of ranks is for, by what its members exchange; the
load of experts, sharded parameters and split matrix products; and what their exchange costs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives, RankGroup, steps_of
from gputrace.analyzers.communicators import ALL_TO_ALL, SEND_RECV
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, compute_within
from gputrace.analyzers.grouping import StepsOf, edges_of, median, rows_by
from gputrace.analyzers.kernel_names import PRODUCTS, family_of
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.model.communication import (
    CollectiveTotals,
    ExpertRank,
    Experts,
    ShardedData,
    TensorParallel,
)
from gputrace.model.events import UNKNOWN, Kind, Mask, distinct_ids
from gputrace.model.intervals import Times, union
from gputrace.model.results import Step
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

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
    """Return what each of the groups is for; empty if that is not clear."""
    named = [role_of_name(group.name) for group in collectives.groups]
    if not measured or not any(not role for role in named):
        return tuple(named)
    lanes = gpus.lane_of
    number = steps_of(collectives, gpus.operations, measured)
    patterns: dict[int, tuple[int, NDArray[np.intp]]] = {}
    for index, group in enumerate(collectives.groups):
        lane = next((lane for lane in group.lanes if lane in lanes), None)
        if not named[index] and lane is not None:
            mine = (collectives.group == index) & (collectives.lane == lane)
            rows = np.flatnonzero(mine & (number != UNKNOWN))
            patterns[index] = lane, rows[np.argsort(collectives.start[rows], kind="stable")]
    measured_of, edges = StepsOf(measured), []
    for lane, rows in patterns.values():
        mine = {step.step: step for step in measured_of(gpus.operations[lane].gpu)}
        edges.append(edges_of(mine[n] for n in number[rows].tolist()))
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
        early = (before < _FORWARD_PART) & (beside < _HIDDEN_PART)
        named[index] = _role(collectives, group, rows, number[rows], early)
    # Experts of fixed capacity exchange as evenly as attention over parts of a sequence does.
    if CONTEXT in named and _ranges_name_experts(gpus.trace):
        named = ["" if role == CONTEXT else role for role in named]
    return tuple(named)


def _ranges_name_experts(trace: Trace) -> bool:
    if Kind.RANGE not in trace.kinds:
        return False
    ids = distinct_ids(trace.events([Kind.RANGE], ["name"]).name)
    return bool(trace.search(ids, r"(?i)(?<![a-z])(moe|experts?)(?![a-z])"))


def _compute_around(
    view: GpuShardView, begins: Times, starts: Times, ends: Times, finishes: Times
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much of the compute of its step is done before each collective, and for how much
    of the collective there is compute beside it; both as fractions.
    """
    compute = view.lane.timeline.of_class(OperationClass.COMPUTE)
    before = compute.within(begins, starts) / np.maximum(compute.within(begins, finishes), 1)
    return before, compute.within(starts, ends) / np.maximum(ends - starts, 1)


_HIDDEN_PART: Final = 0.5
"""Minimum fraction of an all-reduce with compute beside it, if the compute does not need it."""
_FORWARD_PART: Final = 0.2
"""Fraction of a step's compute in the forward pass, with recomputation in the backward pass."""
_FORWARD_COLLECTIVES_PART: Final = 0.08
"""Minimum fraction of collectives in that part of the step, if they are of both passes."""
_GATHERS_IN_A_ROW: Final = 3
"""Minimum all-gathers in a row, if layers' parameters are gathered for the forward pass."""
_FEWEST_MESSAGES: Final = 4
_EQUAL_MESSAGES_SPREAD: Final = 0.01
"""Maximum relative spread of messages of equal size."""


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
        is_even = (sizes > 0).all() and sizes.std() <= _EQUAL_MESSAGES_SPREAD * sizes.mean()
        return CONTEXT if is_even else EXPERT
    if any(map(_EXCHANGE.search, count)):
        return EXPERT
    if any("userbuffers" in name for name in count):  # Transformer Engine's
        return TENSOR
    gathers, scatters = count["AllGather"], count["ReduceScatter"]
    if gathers and scatters:
        return _gathering(names, steps, gathers, scatters)
    if count[SEND_RECV] > len(rows) / 2:
        # Distinguish the ring of context parallelism from the stages of a pipeline.
        sends = collectives.sends
        mine = sends[collectives.group[sends[:, 0]] == collectives.group[rows[0]]]
        if not len(mine):
            return PIPELINE if group.communicator != UNKNOWN else ""
        source, target = (collectives.lane[side].tolist() for side in mine.T)
        pairs = set(zip(source, target, strict=True))
        there = {pair for pair in pairs if pair[::-1] in pairs}
        # Stages send activations on and gradients back; a ring passes keys and values one way.
        return PIPELINE if there or len(pairs) < len(group.lanes) else CONTEXT
    if reductions := count["AllReduce"]:
        forward = np.count_nonzero(early & (names == "AllReduce"))
        both = (
            reductions >= _FEWEST_MESSAGES * turns
            and forward >= _FORWARD_COLLECTIVES_PART * reductions
        )
        return TENSOR if both else DATA
    return SHARDED if gathers >= _FEWEST_MESSAGES * turns else ""


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
    if min(gathers, scatters) < _FEWEST_MESSAGES * turns:
        return SHARDED
    return (
        SHARDED if longest >= max(_GATHERS_IN_A_ROW, gathers / turns / _FEWEST_MESSAGES) else TENSOR
    )


class Groups(Struct, frozen=True, dict=True):
    """Groups of communicating GPUs, and the steps that they are looked at in."""

    gpus: PerGpu
    collectives: Collectives
    roles: Sequence[str]
    """Role of each group; empty where it is unknown."""
    measured: Sequence[Step]

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Step in which each collective begins, or `UNKNOWN`."""
        return steps_of(self.collectives, self.gpus.operations, self.measured)

    def of(self, role: str) -> Iterator[tuple[int, list[int], list[LaneSummary]]]:
        """Yield the number of each group of a role, and its lanes with anything in the window, by
        number and as summaries.
        """
        summaries = self.gpus.lane_of
        for index in (index for index, each in enumerate(self.roles) if each == role):
            lanes = [lane for lane in self.collectives.groups[index].lanes if lane in summaries]
            yield index, lanes, [summaries[lane] for lane in lanes]

    def places(self, lanes: Sequence[int]) -> list[Gpu]:
        """Return the GPUs of some lanes."""
        return [self.gpus.operations[lane].gpu for lane in lanes]


# ---- Experts ----

_EXCHANGE: Final = re.compile(r"\b(dispatch|combine)$")
"""Kernels of DeepEP that move tokens, not those that say how many."""
_TOKEN_COUNTS_PART: Final = 0.05
"""Fraction of the largest message below which an exchange only says how many tokens follow."""


def find_experts(groups: Groups) -> tuple[Experts, ...]:
    """Return the load of the experts of each rank, by group.

    Tokens are sent to their experts and back: what a GPU computes between these two exchanges is
    its experts' work.
    """
    experts, collectives, numbers = [], groups.collectives, groups.numbers
    for index, lanes, summaries in groups.of(EXPERT):
        if len(lanes) < 2:
            continue
        pairs = _exchanged(collectives, index, lanes, numbers)
        whole = distinct_ids(numbers[pairs[0][:, 0]])
        if len(whole):
            ends = [collectives.end[pair[:, 0]] for pair in pairs]
            returns = [collectives.start[pair[:, 1]] for pair in pairs]
            starts = list(map(np.maximum, returns, ends))
            work = groups.gpus.each(compute_within, summaries, ends, starts)
            rows = np.flatnonzero((collectives.group == index) & np.isin(numbers, whole))
            experts.append(_load(groups, lanes, rows, np.array(work), len(whole)))
    return tuple(experts)


def _rows_by_lane(
    collectives: Collectives, rows: NDArray[np.intp], lanes: Sequence[int]
) -> list[NDArray[np.intp]]:
    """Return the given collectives by lane, in order of start."""
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
    rows = rows[
        (sizes[rows] <= 0) | (sizes[rows] >= _TOKEN_COUNTS_PART * sizes[rows].max(initial=0))
    ]
    by_lane = _rows_by_lane(collectives, rows, lanes)
    counts = [Counter(numbers[mine].tolist()) for mine in by_lane]
    whole = [
        step
        for step, count in counts[0].items()
        if count % 2 == 0 and all(other[step] == count for other in counts)
    ]
    return [mine[np.isin(numbers[mine], whole)].reshape(-1, 2) for mine in by_lane]


def _load(
    groups: Groups,
    lanes: Sequence[int],
    rows: NDArray[np.intp],
    work: NDArray[np.int64],
    steps: int,
) -> Experts:
    """Return the load of a group by the work of its ranks, shape (ranks, exchanges).

    ``rows`` are all that the group communicates.
    """
    collectives, mean = groups.collectives, work.mean(axis=0)
    busiest = np.bincount(work.argmax(axis=0), minlength=len(lanes)) / work.shape[1]
    waits = int(collectives.wait[rows].sum()) // (steps * len(lanes))
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
            for gpu, of_rank, share in zip(groups.places(lanes), work, busiest, strict=True)
        ),
    )


# ---- Sharded data parallel ----


def find_sharded(groups: Groups) -> tuple[ShardedData, ...]:
    """Return how each group of ranks that shards its parameters gathers them."""
    sharded, collectives = [], groups.collectives
    for index, lanes, summaries in groups.of(SHARDED):
        mine = (collectives.group == index) & (groups.numbers != UNKNOWN)
        mine &= collectives.of("AllGather", "ReduceScatter")
        rows_of = _rows_by_lane(collectives, np.flatnonzero(mine), lanes)
        if not mine.any() or not all(map(len, rows_of)):
            continue
        # What begins a gather, what ends it, and the end of the gather before.
        both = collectives.start, collectives.end
        starts, ends = ([times[rows] for rows in rows_of] for times in both)
        gathers = [collectives.of("AllGather")[rows] for rows in rows_of]
        since = [_ends_before(*columns) for columns in zip(starts, ends, gathers, strict=True)]
        beside = groups.gpus.each(_compute_beside, summaries, starts, ends, since)
        sharded.append(_sharded(groups, lanes, rows_of, beside))
    return tuple(sharded)


def _ends_before(starts: Times, ends: Times, gathers: Mask) -> Times:
    """Return by when the gather before each row, in order of start, had ended; its own start at
    the latest.
    """
    ended = np.maximum.accumulate(np.where(gathers, ends, starts[:1]))
    before: Times = np.minimum(np.append(starts[:1], ended[:-1]), starts)
    return before


_PREFETCHED_NS: Final = 1_000
"""Length of the first part of a collective, beside which compute shows that it was prefetched."""


def _compute_beside(
    view: GpuShardView, starts: Times, ends: Times, since: Times
) -> tuple[Times, Times, Times]:
    """Return the compute beside each collective, beside its first part, and in the time before."""
    compute = view.lane.timeline.of_class(OperationClass.COMPUTE)
    first = np.minimum(starts + _PREFETCHED_NS, ends)
    spans = (starts, ends), (starts, first), (since, starts)
    beside, at_start, before = (compute.within(*span) for span in spans)
    return beside, at_start, before


def _sharded(
    groups: Groups,
    lanes: Sequence[int],
    rows_of: Sequence[NDArray[np.intp]],
    computed: Sequence[tuple[Times, Times, Times]],
) -> ShardedData:
    """Return the gathers and scatters of a group, by rows of each of its GPUs in order of start."""
    collectives, numbers, rows = groups.collectives, groups.numbers, np.concatenate(rows_of)
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
    known, places = bool((sizes > 0).all()) and layers > 0, groups.places(lanes)

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
        unsharded_bytes=_unsharded(groups, rows_of[0]) if known else None,
    )


def _unsharded(groups: Groups, rows: NDArray[np.intp]) -> int:
    """Return the bytes of all parameters: a layer has one scatter, and is gathered for the forward
    pass before any of these.
    """
    collectives, numbers = groups.collectives, groups.numbers
    rows = rows[numbers[rows] == numbers[rows[-1]]]
    gathers = collectives.of("AllGather")[rows]
    before = rows[: int(np.argmin(gathers))]
    return int(collectives.bytes[before[: np.count_nonzero(~gathers)]].sum())


# ---- Tensor parallel ----


def find_tensor(groups: Groups) -> tuple[TensorParallel, ...]:
    """Return how much of the communication of each tensor-parallel group is exposed, and beside
    matrix products.
    """
    tensor, collectives, numbers = [], groups.collectives, groups.numbers
    for index, lanes, summaries in groups.of(TENSOR):
        mine = (collectives.group == index) & (numbers != UNKNOWN)
        if not mine.any():
            continue
        rows_of = _rows_by_lane(collectives, np.flatnonzero(mine), lanes)
        spans = [
            [times[rows] for rows in rows_of] for times in (collectives.start, collectives.end)
        ]
        beside = groups.gpus.each(_work_beside, summaries, *spans)
        compute, products = np.array([[int(part.sum()) for part in parts] for parts in beside]).T
        turns = max(sum(len(distinct_ids(numbers[rows])) for rows in rows_of), 1)
        rows = np.concatenate(rows_of)
        total = int((collectives.end[rows] - collectives.start[rows]).sum())
        places = groups.places(lanes)
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


_CARRIED: Final = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1, "AllToAll": 1}
"""Message volume per link among n ranks, in units of (n - 1) / n of the message; in other
operations, each link carries the whole message."""


def total_collectives(groups: Groups) -> tuple[CollectiveTotals, ...]:
    """Sum up the collectives by operation and group, most time first.

    Without measured steps, the windows of the lanes are summed up.
    """
    collectives, of_lane = groups.collectives, groups.gpus.lane_of
    if groups.measured:
        chosen = groups.numbers != UNKNOWN
    else:
        chosen = np.zeros(len(collectives), bool)
        for index, lane in of_lane.items():
            begins = (collectives.start >= lane.window.start) & (
                collectives.start < lane.window.end
            )
            chosen |= (collectives.lane == index) & begins
    # The nanoseconds of each chosen row without a concurrent compute kernel; else 0.
    exposed = np.zeros(len(collectives), np.int64)
    count = max(of_lane, default=-1) + 1
    by_lane = rows_by(np.where(chosen, collectives.lane, count), count)
    rows = [by_lane[index] for index in of_lane]
    starts, ends = (
        [times[mine] for mine in rows] for times in (collectives.start, collectives.end)
    )
    computing_ns = groups.gpus.each(compute_within, of_lane.values(), starts, ends)
    for mine, start, end, overlapped in zip(rows, starts, ends, computing_ns, strict=True):
        exposed[mine] = end - start - overlapped
    steps = len({step.step for step in groups.measured})
    totals = [
        _total(of_lane, groups, rows, steps, int(exposed[rows].sum()))
        for rows in _kinds(collectives, chosen)
    ]
    return tuple(sorted(totals, key=lambda total: -total.total_ns * len(total.gpus)))


def _kinds(collectives: Collectives, chosen: Mask) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each operation of a group; copies of all pairs together."""
    for operation in range(len(collectives.operations)):
        mine = chosen & (collectives.operation == operation)
        for number in distinct_ids(collectives.group[mine]).tolist():
            yield np.flatnonzero(mine & (collectives.group == number))


def _total(
    of_lane: Mapping[int, LaneSummary],
    groups: Groups,
    rows: NDArray[np.int64],
    steps: int,
    exposed_ns: int,
) -> CollectiveTotals:
    collectives, roles = groups.collectives, groups.roles
    gpus = [of_lane[index].gpu for index in distinct_ids(collectives.lane[rows]).tolist()]
    wait = collectives.wait[rows]
    transfer = collectives.end[rows] - collectives.start[rows] - wait
    known = bool(collectives.known[rows].all())
    name = collectives.operations[int(collectives.operation[rows[0]])]
    sizes = collectives.bytes[rows]
    sized = sizes > 0
    size = int(median(sizes[sized])) if sized.any() else None
    speed = None
    if known and sized.any():
        speed = float(median(sizes[sized] * 1e9 / np.maximum(transfer[sized], 1)))
    number = int(collectives.group[rows[0]])
    ranks = collectives.groups[number] if number != UNKNOWN else RankGroup(())
    members = max(ranks.size, len(gpus))
    carried = _CARRIED[name] * (members - 1) / members if name in _CARRIED else 1.0
    shared = max(steps, 1) * len(gpus)
    return CollectiveTotals(
        operation=name,
        gpus=tuple(gpu.gpu for gpu in gpus),
        ranks=tuple(sorted({gpu.rank for gpu in gpus})),
        one_process=len({gpu.process for gpu in gpus}) == 1 and len(gpus) > 1,
        count=len(distinct_ids(collectives.instance[rows])),
        steps=steps,
        bytes=size,
        wait_ns=int(median(wait)) if known else None,
        transfer_ns=int(median(transfer)) if known else None,
        total_ns=int((wait + transfer).sum()) // shared,
        wait_total_ns=int(wait.sum()) // shared if known else None,
        transfer_total_ns=int(transfer.sum()) // shared if known else None,
        exposed_ns=exposed_ns // shared,
        algorithm_bandwidth=None if speed is None else round(speed),
        bus_bandwidth=None if speed is None else round(speed * carried),
        role=roles[number] if roles and number != UNKNOWN else "",
        group=ranks.name,
        communicator=ranks.id,
        group_size=ranks.size or None,
        hosts=len({gpu.host if gpu.host_name else None for gpu in gpus}),
    )
