"""Forms of parallel training: what each group of ranks is for, by what its members exchange."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives, RankGroup, steps_of
from gputrace.analyzers.communicators import ALL_TO_ALL, SEND_RECV
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import steps_by_gpu
from gputrace.analyzers.operations import OperationClass
from gputrace.model.events import UNKNOWN, Mask, distinct_ids
from gputrace.model.intervals import Times
from gputrace.model.results import Step

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
    if any(re.search("dispatch|combine", name) for name in count):
        return EXPERT
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


def label_of(group: RankGroup, role: str) -> str:
    """Return what a group is called: by its name, with its role if that is not in it."""
    if not group.name or role_of_name(group.name) == role:
        return role or group.name
    return f"{role} ({group.name})" if role else group.name


def roles_by_gpu(collectives: Collectives, roles: Sequence[str]) -> Mapping[str, list[RankGroup]]:
    """Return the groups of each role."""
    found: dict[str, list[RankGroup]] = {}
    for group, role in zip(collectives.groups, roles, strict=True):
        found.setdefault(role, []).append(group)
    return found


def of_role(collectives: Collectives, roles: Sequence[str], role: str) -> Mask:
    """Return a mask of the rows of groups of a role."""
    chosen = [index for index, each in enumerate(roles) if each == role]
    return np.isin(collectives.group, chosen)
