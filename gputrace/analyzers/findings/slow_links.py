"""Findings about links between GPUs: slow ones, and exchange through the host's memory."""

from __future__ import annotations

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
from gputrace.model.intervals import Intervals
from gputrace.model.results import Evidence, Finding
from gputrace.model.struct import Struct
from gputrace.units import format_number

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
