"""Findings about communication: exposed, over slow links, through the host's memory, and waits that
lie in how work is divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, permutations
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.gpu_links import (
    GB,
    Links,
    Slower,
    Traffic,
    bandwidth,
    nvlinks,
    peer_access,
    sent,
    slower_links,
)
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.parallelism import (
    EXPERT,
    PIPELINE,
    SHARDED,
    find_experts,
    find_sharded,
    total_collectives,
)
from gputrace.analyzers.pipelines import find_pipelines
from gputrace.model.intervals import Intervals
from gputrace.model.results import Evidence, Finding
from gputrace.model.struct import Struct
from gputrace.units import format_bytes, format_ns, format_number, format_pair

_WAIT_LESS: Final = (
    "make the ranks arrive at the same time ({who} last): hosts that launch sooner, "
    "batches of equal size, loaders without stalls; sending less gains little"
)
_ALWAYS_LAST: Final = 0.9
"""Share of the waiting that must be for one rank to say that this one comes last."""


def communication_exposed(facts: Facts) -> Iterator[Finding]:
    """Communication runs with no computation beside it. Waiting in it counts too, where no rank is
    late by more than chance and nothing on it says why.

    Cost: class `communication`, less what is charged to a cause on the rank that came last, to the
    division of work (`pipeline-bubble`, `expert-imbalance`) or to links.

    Wrong if: the step is no shorter without the exchange (DDP's `no_sync` for some steps).
    """
    cost = facts.ledger.mean("communication-exposed", "uneven-arrival")
    wait = facts.ledger.mean("uneven-arrival")
    known, share = facts.waits_known, facts.share_of(cost)
    severity = severity_of(share)
    if severity is None:
        return
    unseen = "" if known else "record all ranks, which shows how much of it is waiting; then "
    role, part = _costliest_role(facts)
    waiting = ""
    if not known:
        waiting = "waiting for other ranks is included, as not all ranks were recorded"
    elif wait >= MEDIUM * cost:
        waiting = f"{format_ns(wait)} of it is waiting for other ranks"
    yield facts.finding(
        "communication-exposed",
        severity,
        cost,
        f"communication not hidden by compute takes {facts.of_step(cost)}",
        _WAIT_LESS.format(who=_who_is_last(facts))
        if known and 2 * wait > cost
        else unseen + _less(facts, role),
        {
            "share": round(share, 4),
            "communication_ns": facts.mean("communication"),
            "wait_ns": wait if known else None,
            "total_ns": facts.mean_ns,
            "role": role or None,
            "role_share": round(part, 4) if role else None,
        },
        [f"most of it is in {_ROLE_NAMES[role]}" if role else "", waiting],
    )


def _who_is_last(facts: Facts) -> str:
    """Return the rank that others wait for where none is known to be late, as advice calls it."""
    waited: Counter[int] = Counter()
    for row in facts.ledger.of("uneven-arrival"):
        waited[row.rank] += row.ns
    (rank, longest), *_ = waited.most_common(1)
    is_one = longest >= _ALWAYS_LAST * waited.total()
    return f"rank {rank} comes" if is_one else "none is always"


_COSTLIEST_ROLE_SHARE: Final = 0.5
"""Share of the exposed communication that one role must have to be named."""
_ROLE_NAMES: Final = {
    "sharded data": "gathering parameters and scattering gradients (sharded data parallel)",
    "tensor": "tensor-parallel groups",
    "pipeline": "messages between pipeline stages",
    "expert": "sending tokens to experts and back",
    "context": "context-parallel groups",
}
"""Groups by role; that of data-parallel gradients goes without saying."""
_LESS_BY_ROLE: Final = {
    "tensor": "overlap it with the matrix products (Megatron: --tp-comm-overlap with "
    "--sequence-parallel; PyTorch: async tensor parallelism), or use smaller groups, on one host",
    "expert": "overlap dispatch and combine with the shared experts or another micro-batch, "
    "balance the routing (auxiliary loss, capacity), keep groups of experts on one host",
    "context": "overlap the exchange with attention (a ring), or use fewer ranks a group",
}
_PREFETCH_PARAMETERS: Final = (
    "prefetch the next layer's parameters (FSDP2: set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch; FSDP: forward_prefetch=True and "
    "backward_prefetch=BACKWARD_PRE; DeepSpeed: a larger stage3_prefetch_bucket_size): {share:.0%} "
    "of the gathers begin beside kernels, and {hideable} of the others would fit there, too"
)
_KEEP_PARAMETERS: Final = (
    "keep parameters between the passes where memory allows (FSDP2: reshard_after_forward=False; "
    "FSDP: SHARD_GRAD_OP; DeepSpeed: stage 2): the backward pass gathers {count} times again"
)
_SHARD_WITHIN_HOST: Final = (
    "shard within a host (HSDP), or wrap more layers together: larger messages"
)
_SEND_LESS: Final = (
    "overlap it with the backward pass (bucket size), send less (bf16 gradients, gradient "
    "accumulation with no_sync)"
)
_EXCHANGE_LESS: Final = (
    "run the model on fewer GPUs, neighbours on one host, or overlap it with the computation of "
    "another batch"
)
"""Advice for inference, which has no gradients."""


def _less(facts: Facts, role: str) -> str:
    """Return how to expose less communication in groups of a role."""
    sharded = facts.by_group(find_sharded, SHARDED) if role == SHARDED else ()
    if not sharded:
        return _LESS_BY_ROLE.get(role, _EXCHANGE_LESS if facts.infers else _SEND_LESS)
    most = max(sharded, key=lambda group: group.gather_exposed_ns)
    advice = []
    if most.hideable_ns >= _HIDEABLE_PART * most.gather_exposed_ns:
        hideable = format_ns(most.hideable_ns)
        advice.append(_PREFETCH_PARAMETERS.format(share=most.prefetched, hideable=hideable))
    if most.gathered_again:
        size = most.unsharded_bytes
        room = "" if size is None else f", which would take {format_bytes(size)} to spare"
        advice.append(_KEEP_PARAMETERS.format(count=most.gathered_again) + room)
    return "; ".join([*advice, _SHARD_WITHIN_HOST])


_HIDEABLE_PART: Final = 0.1
"""Minimum part of the exposed gathers that prefetching could hide, if it is advised."""


def _costliest_role(facts: Facts) -> tuple[str, float]:
    """Return the role whose groups have most of the exposed communication, and its share of it;
    empty if that is data parallel, or not clear.
    """
    exposed: dict[str, int] = {}
    for total in facts.by_group(total_collectives):
        spent = total.exposed_ns * len(total.gpus)
        exposed[total.role] = exposed.get(total.role, 0) + spent
    role = max(exposed, key=lambda name: exposed[name], default="")
    share = exposed.get(role, 0) / max(sum(exposed.values()), 1)
    return (role, share) if role in _ROLE_NAMES and share >= _COSTLIEST_ROLE_SHARE else ("", 0.0)


_BUBBLE_SHARE: Final = 0.02
"""Share of the time from which a bubble is reported."""
_FILL_IT: Final = {
    "schedule": "fill the pipeline: more micro-batches per step, or several model chunks per "
    "stage (interleaved 1F1B, zero-bubble schedules)",
    "imbalance": "move layers from the slowest stage to the others",
    "transfer": "overlap the transfers: receive the next micro-batch while this one computes, "
    "neighbours in the pipeline on the fastest links",
    "host": "let the hosts launch sooner: CUDA graphs, torch.compile, fewer and larger kernels",
}


def pipeline_bubble(facts: Facts) -> Iterator[Finding]:
    """The stages of a pipeline idle for 2 % of the time, including waits for each other's messages;
    `low` if the schedule accounts for it.

    Cost: the mean bubble of a stage.

    Wrong if: with twice as many micro-batches of half the size, the schedule's part does not halve.
    """
    for pipeline in facts.by_group(find_pipelines, PIPELINE):
        share = pipeline.bubble_ns / max(pipeline.step_ns, 1)
        if share < _BUBBLE_SHARE:
            continue
        causes = {name: getattr(pipeline, f"{name}_ns") for name in _FILL_IT}
        avoidable = (pipeline.bubble_ns - pipeline.schedule_ns) / max(pipeline.step_ns, 1)
        slow, count = pipeline.stages[pipeline.slowest], len(pipeline.stages)
        largest = sorted(causes, key=lambda name: -causes[name])
        parts = [
            f"{format_ns(causes[name])} for {_BUBBLE_CAUSES[name]}"
            for name in largest
            if causes[name] >= _NAMED_BUBBLE_PART * pipeline.bubble_ns
        ]
        schedule = "" if pipeline.schedule == "unknown" else f"{pipeline.schedule}, "
        details = [f"{schedule}{pipeline.micro_batches} micro-batches: {', '.join(parts)}"]
        if pipeline.imbalance_ns >= _NAMED_BUBBLE_PART * pipeline.bubble_ns:
            longer = format_ns(pipeline.excess_ns)
            details.append(
                f"stage {slow.stage} (rank {slow.rank}) works {longer} longer than the mean"
            )
        idle = format_pair(pipeline.bubble_ns, "of", pipeline.step_ns)
        yield Finding(
            "pipeline-bubble",
            severity_of(avoidable) or "low",
            tuple(stage.gpu for stage in pipeline.stages),
            tuple(stage.rank for stage in pipeline.stages),
            pipeline.bubble_ns,
            f"the {count} stages of the pipeline idle {share:.0%} of each step ({idle})",
            "; ".join(_FILL_IT[name] for name in largest[:2] if causes[name] > 0),
            {
                "share": round(share, 4),
                "schedule": pipeline.schedule,
                "stages": count,
                "micro_batches": pipeline.micro_batches,
                **{f"{name}_ns": value for name, value in causes.items()},
                "slowest_rank": slow.rank,
                "excess_ns": pipeline.excess_ns,
            },
            tuple(details),
        )


_NAMED_BUBBLE_PART: Final = 0.05
_BUBBLE_CAUSES: Final = {
    "schedule": "the schedule",
    "imbalance": "unequal stages",
    "transfer": "transfers",
    "host": "host gaps",
}
_EXPERT_EXCESS: Final = 0.1
"""Minimum excess of the busiest rank's experts, as a fraction of their mean work."""
_EXPERT_SHARE: Final = 0.02
"""Share of the time that the excess must cost."""
_ALWAYS_BUSIEST_SHARE: Final = 0.5
"""Share of the exchanges in which a rank must have most work to be named."""


def expert_imbalance(facts: Facts) -> Iterator[Finding]:
    """The busiest rank's experts have 10 % more work than the mean, exchange by exchange, and that
    costs 2 % of the time.

    Cost: that excess, for which the mean rank waits.

    Wrong if: the step is no shorter when tokens go to experts round-robin, ignoring the router.
    """
    for experts in facts.by_group(find_experts, EXPERT):
        share = facts.share_of(experts.imbalance_ns)
        excess = experts.imbalance_ns / max(experts.work_ns, 1)
        if share < _EXPERT_SHARE or excess < _EXPERT_EXCESS:
            continue
        most = max(experts.ranks, key=lambda rank: rank.work_ns)
        always = most.busiest >= _ALWAYS_BUSIEST_SHARE
        who = (
            f"the experts of rank {most.rank} work {most.ratio:.2f} times as long as the mean"
            if always
            else "which rank has them varies from layer to layer"
        )
        yield Finding(
            "expert-imbalance",
            severity_of(share) or "low",
            (most.gpu,) if always else tuple(rank.gpu for rank in experts.ranks),
            (most.rank,) if always else tuple(rank.rank for rank in experts.ranks),
            experts.imbalance_ns,
            f"ranks wait {facts.of_step(experts.imbalance_ns)} for the busiest experts",
            "balance the routing (auxiliary loss, router bias, capacity factor), or spread busy "
            "experts over the ranks (redundant experts)",
            {
                "share": round(share, 4),
                "excess": round(excess, 4),
                "rank": most.rank if always else None,
                "ratio": most.ratio,
                "busiest_share": most.busiest,
                "wait_ns": experts.wait_ns,
            },
            (who,),
        )


LINK_SHARE: Final = 0.01
"""Share of the time from which a slow link is reported."""


def topology(facts: Facts) -> Iterator[Finding]:
    """Copies, or the same collectives, take 10 % longer over one type of link than over a better
    one, with three quarters of each on its side of the other's median, and that costs 1 % of the
    time; or (`low`) communication takes 5 % of the time and other cards of the machine have better
    links.

    Cost: the exposed time of these transfers on the GPU with the most, less the time that they
    would take over the better link; 0 if that was not measured.

    Wrong if: the same transfers are as slow on the better link.
    """
    if facts.links is None or not facts.mean_ns:
        return
    costs = [
        # What these transfers would save over the better link.
        (round(exposed(facts, facts.links, slow.busy) * (1 - 1 / slow.ratio)), slow)
        for slow in slower_links(facts.links)
    ]
    cost, slow = max(costs, key=lambda pair: pair[0], default=(0, None))
    if slow is not None and cost >= LINK_SHARE * facts.mean_ns:
        yield _slower(facts, facts.links, slow, cost)
    else:
        yield from _could_be_better(facts, facts.links)


def exposed(facts: Facts, links: Links, busy: Mapping[int, Intervals]) -> int:
    """Return the nanoseconds per step of transfers with no computation beside them, on the GPU with
    most.

    ``busy`` has the times of the transfers of each GPU, by its index among the operations.
    """
    index_of = {gpu: index for index, gpu in enumerate(links.gpus)}
    lanes = [lane for lane in facts.working if index_of[lane.gpu] in busy]
    steps = [facts.time_of(lane) for lane in lanes]
    spent = facts.per_gpu.each(_alone, lanes, (busy[index_of[lane.gpu]] for lane in lanes), steps)
    counts = (max(len(facts.measured_of(lane.gpu)), 1) for lane in lanes)
    return max((ns // count for ns, count in zip(spent, counts, strict=True)), default=0)


def _alone(gpu: GpuShardView, busy: Intervals, steps: Intervals) -> int:
    """Return the nanoseconds of transfers in the steps with no computation beside them."""
    idle = busy.difference(gpu.lane.timeline.of_class(OperationClass.COMPUTE))
    return idle.intersection(steps).total


_MAKE_NEIGHBOURS: Final = (
    "let the GPUs that exchange most be neighbours, by their order in CUDA_VISIBLE_DEVICES; send "
    "less over the slow links (all-reduce within each switch first, bf16 gradients, accumulation)"
)


def _slower(facts: Facts, links: Links, slow: Slower, cost: int) -> Finding:
    share = cost / facts.mean_ns
    details = [
        f"{slow.what} over {slow.link} take {slow.ratio:.2f} times as long as over {slow.than}"
    ]
    if slow.bandwidth and slow.than_bandwidth:
        details[0] += f" ({slow.bandwidth / 1e9:.1f} against {slow.than_bandwidth / 1e9:.1f} GB/s)"
    better = links.topology.better_choice(links.gpus)
    gpus = [links.gpus[index] for index, busy in sorted(slow.busy.items()) if len(busy)]
    evidence: dict[str, float | int | str | None] = {
        "share": round(share, 4),
        "link": slow.link,
        "than": slow.than,
        "ratio": round(slow.ratio, 4),
        "bandwidth": slow.bandwidth,
        "than_bandwidth": slow.than_bandwidth,
        "better_choice": None if better is None else ",".join(map(str, better)),
    }
    return Finding(
        "topology",
        severity_of(share) or "low",
        tuple(gpu.gpu for gpu in gpus),
        tuple(sorted({gpu.rank for gpu in gpus})),
        cost,
        f"{slow.link} between GPUs instead of {slow.than} costs {facts.of_step(cost)}",
        f"{_choose(better)}; else {_MAKE_NEIGHBOURS}" if better is not None else _MAKE_NEIGHBOURS,
        evidence,
        tuple(details),
    )


def _could_be_better(facts: Facts, links: Links) -> Iterator[Finding]:
    """Yield a finding if the run communicates and other cards of the machine are better joined."""
    share = facts.share("communication")
    better = links.topology.better_choice(links.gpus) if share >= MEDIUM else None
    if better is None:
        return
    worst = links.topology.worst(links.gpus)
    best = links.topology.worst_of_cards(links.gpus[0].host, better)
    evidence: Evidence = {
        "share": round(share, 4),
        "link": worst,
        "than": best,
        "better_choice": ",".join(map(str, better)),
    }
    yield facts.finding(
        "topology",
        "low",
        0,
        f"communication takes {share:.0%} of the time over {worst}, and other GPUs have {best}",
        _choose(better),
        evidence,
        [f"GPUs {', '.join(map(str, better))} of this machine are joined by {best}"],
    )


def _choose(cards: tuple[int, ...]) -> str:
    chosen = ",".join(map(str, cards))
    return f"run on GPUs that are joined better: CUDA_VISIBLE_DEVICES={chosen}"


_FEWEST_STAGED_COPIES: Final = 5
_STEPS_WITH_COPIES: Final = 0.5
"""Minimum number of staged copies, and share of the steps with one, for significance."""
_FASTEST_PCIE: Final = 64 * GB
_SLOW_NVLINK_PART: Final = 0.25
"""Upper bound of PCIe 5 in bytes per second, and a fraction of NVLink's capacity: copies below both
do not go over NVLink."""
_SILENT_NVLINK_PART: Final = 0.1
"""Ratio of NVLink to PCIe bytes below which the GPUs do not communicate over NVLink."""
_REACH: Final = (
    "let the GPUs reach each other's memory: no NCCL_P2P_DISABLE or NCCL_P2P_LEVEL, containers "
    "that share one IPC namespace (--ipc=host), PCIe ACS and the IOMMU off; `nvidia-smi topo -p2p "
    "r` tells what the driver allows"
)
_STRAIGHT: Final = {
    "pytorch": "copy from GPU to GPU (tensor.to('cuda:1') without .cpu()), use the nccl backend",
    "tensorflow": "reduce on the GPUs: MirroredStrategy with NcclAllReduce, no parameter server on "
    "the CPU",
    "mxnet": "reduce on the GPUs: kvstore='device' or 'nccl' instead of 'local', with "
    "MXNET_ENABLE_GPU_P2P=1",
    "chainer": "use the pure_nccl communicator",
}


class _Proof(Struct, frozen=True, dict=True):
    """Proof that data between GPUs passes through host memory."""

    gpus: list[Gpu]
    cost: int
    """Nanoseconds per step."""
    detail: str
    advice: str
    evidence: Evidence


def amount_slow_links(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step that the GPUs of each rank lose to slow links at most."""
    return {
        rank: found.impact_ns
        for found in topology(facts)
        for rank in found.ranks
        if found.impact_ns
    }


def amount_staged(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step that the GPUs of each rank exchange data through host memory at
    most.
    """
    return {gpu.rank: proof.cost for proof in _proofs(facts)[:1] for gpu in proof.gpus}


def host_staged_comm(facts: Facts) -> Iterator[Finding]:
    """GPUs exchange data through host memory, and that takes 1 % of the time. Either copies to the
    host are followed by copies of the same size to another GPU in most steps; or copies over NVLink
    are slower than a quarter of its bandwidth and than PCIe; or GPUs with NVLink communicate but
    its counters hardly move; or NVML reports that they cannot access each other's memory.

    Cost: the exposed time of these copies on the GPU with the most; for collectives, exposed
    communication without waiting.

    Wrong if: NVLink's counters (`nvidia-smi nvlink -gt d`) grow by the bytes exchanged.
    """
    links = facts.links
    if links is None:
        return
    for best in _proofs(facts)[:1]:
        share = facts.share_of(best.cost)
        yield Finding(
            "host-staged-comm",
            severity_of(share) or "low",
            tuple(gpu.gpu for gpu in best.gpus),
            tuple(sorted({gpu.rank for gpu in best.gpus})),
            best.cost,
            f"exchange between GPUs through the host's memory takes {facts.of_step(best.cost)}",
            best.advice,
            {"share": round(share, 4), "peer_access": _access(links, best.gpus), **best.evidence},
            (best.detail,),
        )


def _proofs(facts: Facts) -> list[_Proof]:
    """Return the proofs worth reporting, the costliest first."""
    if facts.links is None or not facts.mean_ns:
        return []
    ways = (_staged_copies, _slow_peer_copies, _silent_nvlink, _no_access)
    proofs = [proof for way in ways for proof in way(facts, facts.links)]
    worth = [proof for proof in proofs if proof.cost >= LINK_SHARE * facts.mean_ns]
    return sorted(worth, key=lambda proof: -proof.cost)


def _staged_copies(facts: Facts, links: Links) -> Iterator[_Proof]:
    """Yield a proof if copies to the host are each followed by one of its size to another GPU."""
    staged = links.staged
    if len(staged) < _FEWEST_STAGED_COPIES or not _in_most_steps(facts, staged):
        return
    busy = {index: staged.on(index) for index in range(len(links.gpus))}
    speed = float(staged.bytes.sum()) / max(int((staged.end - staged.start).sum()), 1)
    straight = _STRAIGHT.get(facts.framework, "copy from GPU to GPU")
    yield _Proof(
        [gpu for index, gpu in enumerate(links.gpus) if len(busy[index])],
        exposed(facts, links, busy),
        f"{len(staged):,} copies to the host are each followed by one of the same size to another "
        f"GPU, together at {speed:.1f} GB/s",
        f"{straight}; {_REACH}",
        {"copies": len(staged), "bytes": int(staged.bytes.sum()), "bandwidth": round(speed * GB)},
    )


def _in_most_steps(facts: Facts, copies: Traffic) -> bool:
    """Return whether most measured steps contain a copy; true where there are no steps."""
    steps = {(s.rank, s.step): (s.start_ns, s.end_ns) for s in facts.measured}.values()
    if not steps:
        return True
    starts = np.sort(copies.start)
    first, end = (np.searchsorted(starts, edges) for edges in zip(*steps, strict=True))
    return bool(np.mean(end > first) >= _STEPS_WITH_COPIES)


def _slow_peer_copies(facts: Facts, links: Links) -> Iterator[_Proof]:
    """Yield a proof if copies between GPUs joined by NVLink are no faster than over PCIe."""
    pairs = sorted(set(zip(links.peer.source.tolist(), links.peer.target.tolist(), strict=True)))
    copies = {pair: links.peer.of_pair(*pair) for pair in pairs}
    slow = {}
    for pair in pairs:
        one, other = (links.gpus[index] for index in pair)
        speed, able = bandwidth(copies[pair]), links.topology.able(one, other)
        if speed is None or able is None or not nvlinks(links.topology.name(one, other)):
            continue
        if speed < min(_SLOW_NVLINK_PART * able, _FASTEST_PCIE):
            slow[pair] = copies[pair]
    if not slow:
        return
    first, second = next(iter(slow))
    speed = max(bandwidth(traffic) or 0.0 for traffic in slow.values())
    link = links.topology.name(links.gpus[first], links.gpus[second])
    indices = sorted({index for pair in slow for index in pair})
    of_pairs = [(links.peer.source == s) & (links.peer.target == t) for s, t in slow]
    peer = links.peer.select(np.any(of_pairs, axis=0))
    busy = {index: peer.on(index) for index in indices}
    yield _Proof(
        [links.gpus[index] for index in indices],
        exposed(facts, links, busy),
        f"copies between GPUs joined by {link} run at {speed / GB:.1f} GB/s: not over NVLink, but "
        "through the host's memory",
        _REACH,
        {"link": link, "bandwidth": round(speed)},
    )


def _silent_nvlink(facts: Facts, links: Links) -> Iterator[_Proof]:
    """Yield a proof for GPUs with NVLink whose counters show communication over PCIe."""
    for lanes in links.groups:
        gpus = [links.gpus[lane] for lane in lanes]
        counted = sent(links.topology.nvml, gpus)
        worst = links.topology.worst(gpus)
        if (
            counted is None
            or not nvlinks(worst)
            or counted.nvlink >= _SILENT_NVLINK_PART * counted.pcie
        ):
            continue
        yield _Proof(
            gpus,
            _transfer(facts),
            f"GPUs joined by {worst} sent {format_number(counted.nvlink / GB)} GB over NVLink and "
            f"{format_number(counted.pcie / GB)} GB over PCIe",
            _REACH,
            {"link": worst, "nvlink_bytes": counted.nvlink, "pcie_bytes": counted.pcie},
        )


def _no_access(facts: Facts, links: Links) -> Iterator[_Proof]:
    """Yield a proof for communicating GPUs that the driver denies access to each other's memory."""
    for lanes in links.groups:
        gpus = [links.gpus[lane] for lane in lanes]
        pairs = list(combinations(gpus, 2))
        answers = [peer_access(links.topology, *pair) for pair in pairs]
        if all(answer in ("", "OK") for answer in answers):
            continue
        yield _Proof(
            gpus,
            _transfer(facts),
            f"the driver gives the GPUs no access to each other's memory ({_access(links, gpus)})",
            _REACH,
            {"link": links.topology.worst(gpus)},
        )


def _transfer(facts: Facts) -> int:
    """Return the mean exposed communication per GPU and step, without waiting, in nanoseconds."""
    spent = sum(row.of("communication") - (row.communication_wait_ns or 0) for row in facts.rows)
    return spent // facts.turns


def _access(links: Links, gpus: list[Gpu]) -> str:
    """Return the driver's answers for all pairs: ``OK``, or its reasons; empty if unknown."""
    answers = {peer_access(links.topology, *pair) for pair in permutations(gpus, 2)} - {""}
    return ", ".join(sorted(answers))
