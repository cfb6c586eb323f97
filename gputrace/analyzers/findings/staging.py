"""The finding about GPUs that exchange data by way of the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.findings.links import WORTH, exposed, topology
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.links import Links
from gputrace.analyzers.links.counters import sent
from gputrace.analyzers.links.hardware import GB, nvlinks
from gputrace.analyzers.links.measure import bandwidth, peer_access
from gputrace.analyzers.links.traffic import Traffic
from gputrace.analyzers.results import Evidence, Finding
from gputrace.units import format_ns

_FEWEST: Final = 5
_MOSTLY: Final = 0.5
"""Staged copies, and the part of the steps that must have one, to be no chance."""
_PCIE: Final = 64 * GB
_OF_NVLINK: Final = 0.25
"""Bytes per second that PCIe 5 carries at most, and the part of what NVLinks do: copies below both
do not go over NVLink."""
_SILENT: Final = 0.1
"""NVLink's bytes to PCIe's below which NVLink is not what the GPUs communicate by."""

_REACH: Final = (
    "let the GPUs reach each other's memory: no NCCL_P2P_DISABLE or NCCL_P2P_LEVEL, containers "
    "that share one IPC namespace (--ipc=host), PCIe ACS and the IOMMU off; `nvidia-smi topo -p2p "
    "r` tells what the driver allows"
)
_STRAIGHT: Final = {
    "pytorch": "copy from GPU to GPU (tensor.to('cuda:1') without .cpu()), use the nccl backend",
    "tensorflow": "reduce on the GPUs: MirroredStrategy with NcclAllReduce, no parameter server on "
    "the CPU",
    "mxnet": "reduce on the GPUs: kvstore='device' or 'nccl' in place of 'local', with "
    "MXNET_ENABLE_GPU_P2P=1",
    "chainer": "use the pure_nccl communicator",
}


@dataclass(frozen=True)
class _Proof:
    """One way in which the host's memory is shown to lie between GPUs."""

    gpus: list[Gpu]
    cost: int
    """Nanoseconds a step."""
    told: str
    advice: str
    evidence: Evidence
    copies: bool = False
    """Whether it is of copies to and from the host, which are no communication by their class."""


def told_by_links(facts: Facts) -> int:
    """Nanoseconds of communication a step that the findings about links tell of."""
    found = [proof for proof in _proofs(facts)[:1] if not proof.copies]
    told = [finding.impact_ns for finding in topology(facts)] + [proof.cost for proof in found]
    return max(told, default=0)


def host_staged_comm(facts: Facts) -> Iterator[Finding]:
    """Data goes from GPU to GPU through the host's memory, and that takes 1 % of the time:
    copies to the host are followed by one of the same size to another GPU in most steps; or
    copies over NVLink are below a quarter of its speed and PCIe's; or GPUs with NVLink
    communicate while its counters stand still; or NVML says that they have no access to each
    other.

    Cost: the exposed time of these copies on the GPU that has most; of collectives, exposed
    communication less waiting.
    """
    if facts.links is None:
        return
    for best in _proofs(facts)[:1]:
        yield _finding(facts, facts.links, best)


def _proofs(facts: Facts) -> list[_Proof]:
    """What is worth a word, the costliest first."""
    if facts.links is None or not facts.mean_ns:
        return []
    ways = (_staged_copies, _slow_peer_copies, _silent_nvlink, _no_access)
    proofs = [proof for way in ways for proof in way(facts, facts.links)]
    worth = [proof for proof in proofs if proof.cost >= WORTH * facts.mean_ns]
    return sorted(worth, key=lambda proof: -proof.cost)


def _finding(facts: Facts, links: Links, best: _Proof) -> Finding:
    share = best.cost / facts.mean_ns
    evidence: Evidence = {"share": round(share, 4), "peer_access": _access(links, best.gpus)}
    return Finding(
        "host-staged-comm",
        severity_of(share) or "low",
        tuple(gpu.gpu for gpu in best.gpus),
        tuple(sorted({gpu.rank for gpu in best.gpus})),
        best.cost,
        f"{best.told}; it takes {format_ns(best.cost)} of {facts.per} ({share:.0%})",
        best.advice,
        {**evidence, **best.evidence},
    )


def _staged_copies(facts: Facts, links: Links) -> Iterator[_Proof]:
    """Copies to the host, each followed by one of its size from there to another GPU."""
    staged = links.staged
    if len(staged) < _FEWEST or not _in_most_steps(facts, staged):
        return
    busy = {place: staged.on(place) for place in range(len(links.gpus))}
    speed = float(staged.bytes.sum()) / max(int((staged.end - staged.start).sum()), 1)
    straight = _STRAIGHT.get(facts.framework, "copy from GPU to GPU")
    yield _Proof(
        [gpu for place, gpu in enumerate(links.gpus) if len(busy[place])],
        exposed(facts, links, busy),
        f"what GPUs exchange goes through the host's memory ({len(staged):,} copies to the host "
        f"are each followed by one of the same size to another GPU, together at {speed:.1f} GB/s)",
        f"{straight}; {_REACH}",
        {
            "copies": len(staged),
            "bytes": int(staged.bytes.sum()),
            "bandwidth": round(speed * GB),
        },
        copies=True,
    )


def _in_most_steps(facts: Facts, copies: Traffic) -> bool:
    """Whether most of the measured steps hold one; true where there are no steps."""
    steps = {(s.rank, s.step): (s.start_ns, s.end_ns) for s in facts.measured}.values()
    if not steps:
        return True
    starts = np.sort(copies.start)
    first, end = (np.searchsorted(starts, edges) for edges in zip(*steps, strict=True))
    return bool(np.mean(end > first) >= _MOSTLY)


def _slow_peer_copies(facts: Facts, links: Links) -> Iterator[_Proof]:
    """Copies between GPUs joined by NVLink that are no faster than over PCIe."""
    pairs = sorted(set(zip(links.peer.source.tolist(), links.peer.target.tolist(), strict=True)))
    copies = {pair: links.peer.of_pair(*pair) for pair in pairs}
    slow = {pair: copies[pair] for pair in pairs if _is_slow(links, pair, copies[pair])}
    if not slow:
        return
    one, other = next(iter(slow))
    speed = max(bandwidth(own) or 0.0 for own in slow.values())
    link = links.topology.name(links.gpus[one], links.gpus[other])
    places = sorted({place for pair in slow for place in pair})
    busy = {place: _of_pairs(links.peer, list(slow)).on(place) for place in places}
    yield _Proof(
        [links.gpus[place] for place in places],
        exposed(facts, links, busy),
        f"copies between GPUs joined by {link} run at {speed / GB:.1f} GB/s: not over NVLink, but "
        "through the host's memory",
        _REACH,
        {"link": link, "bandwidth": round(speed)},
    )


def _is_slow(links: Links, pair: tuple[int, int], copies: Traffic) -> bool:
    one, other = (links.gpus[place] for place in pair)
    speed, able = bandwidth(copies), links.topology.able(one, other)
    if not nvlinks(links.topology.name(one, other)) or speed is None or able is None:
        return False
    return speed < min(_OF_NVLINK * able, _PCIE)


def _of_pairs(copies: Traffic, pairs: list[tuple[int, int]]) -> Traffic:
    keep = np.zeros(len(copies), bool)
    for source, target in pairs:
        keep |= (copies.source == source) & (copies.target == target)
    return copies.select(keep)


def _silent_nvlink(facts: Facts, links: Links) -> Iterator[_Proof]:
    """GPUs with NVLink communicate, and their counters show that it is over PCIe."""
    for lanes in links.groups:
        gpus = [links.gpus[lane] for lane in lanes]
        counted = sent(links.topology.nvml, gpus)
        worst = links.topology.worst(gpus)
        if counted is None or not nvlinks(worst) or counted.nvlink >= _SILENT * counted.pcie:
            continue
        yield _Proof(
            gpus,
            _transfer(facts),
            f"GPUs joined by {worst} communicate through the host's memory (while recorded they "
            f"sent {counted.nvlink / GB:.3g} GB over NVLink, {counted.pcie / GB:.3g} GB over PCIe)",
            _REACH,
            {"link": worst, "nvlink_bytes": counted.nvlink, "pcie_bytes": counted.pcie},
        )


def _no_access(facts: Facts, links: Links) -> Iterator[_Proof]:
    """GPUs communicate to which the driver gives no access to each other's memory."""
    for lanes in links.groups:
        gpus = [links.gpus[lane] for lane in lanes]
        pairs = list(combinations(gpus, 2))
        refused = [peer_access(links.topology, *pair) for pair in pairs]
        if all(answer in ("", "OK") for answer in refused):
            continue
        yield _Proof(
            gpus,
            _transfer(facts),
            "GPUs communicate through the host's memory: the driver gives them no access to each "
            f"other's ({_access(links, gpus)})",
            _REACH,
            {"link": links.topology.worst(gpus)},
        )


def _transfer(facts: Facts) -> int:
    """Mean nanoseconds of exposed communication of a GPU and step, less the waiting for ranks."""
    rows = facts.rows
    spent = sum(row.of("communication") - (row.communication_wait_ns or 0) for row in rows)
    return spent // max(1, sum(max(row.steps, 1) for row in rows))


def _access(links: Links, gpus: list[Gpu]) -> str:
    """What the driver answers for any pair: ``OK``, or its reasons; nothing if not known."""
    answers = {peer_access(links.topology, *pair) for pair in permutations(gpus, 2)} - {""}
    return ", ".join(sorted(answers))
