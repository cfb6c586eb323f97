"""What went over the links between the GPUs of a run, and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Final

import numpy as np

from gputrace.analyzers.collectives.matched import PEER_COPY, Collectives
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.links.topology import Topology
from gputrace.analyzers.links.traffic import Traffic, find_staged, read_peer_copies
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results.links import GpuLink

LARGE: Final = 1 << 20
"""Bytes from which a copy's speed is the link's, and not that of starting it."""
FEWEST: Final = 3
"""Large copies that tell a link's speed."""
_MOST_LANES: Final = 62
"""GPUs that a set of bits in an integer can hold."""


@dataclass(frozen=True)
class Links:
    """The GPUs of a run, their links, and the copies between them."""

    gpus: Sequence[Gpu]
    topology: Topology
    peer: Traffic
    """Copies straight from one GPU to another."""
    staged: Traffic
    """Copies by way of the host."""
    collectives: Collectives

    @cached_property
    def groups(self) -> dict[tuple[int, ...], int]:
        """The sets of GPUs that had collectives together, and how many."""
        one = self.collectives
        if not len(one) or len(self.gpus) > _MOST_LANES:
            return {}
        keep = np.isin(one.operation, _kernels_only(one))
        bits = np.zeros(int(one.instance.max()) + 1, np.int64)
        np.bitwise_or.at(bits, one.instance[keep], np.int64(1) << one.lane[keep].astype(np.int64))
        sets, counts = np.unique(bits, return_counts=True)
        found = zip(sets.tolist(), counts.tolist(), strict=True)
        groups = {_lanes(bits, len(self.gpus)): count for bits, count in found}
        return {lanes: count for lanes, count in groups.items() if len(lanes) > 1}

    @cached_property
    def rows(self) -> tuple[GpuLink, ...]:
        """Every direction between two GPUs of a host of which anything is known."""
        return tuple(self._rows())

    def _rows(self) -> Iterator[GpuLink]:
        gpus = self.gpus
        together: dict[int, list[int]] = {}
        for place, gpu in enumerate(gpus):
            together.setdefault(gpu.host, []).append(place)
        met = self._met()
        for source, gpu in enumerate(gpus):
            for target in together[gpu.host]:
                if source == target:
                    continue
                if (source, target) in met or self.topology.name(gpu, gpus[target]):
                    yield self._row(source, target)

    def _met(self) -> set[tuple[int, int]]:
        """The directions in which anything was sent, and both of GPUs that share a collective."""
        found = {pair for lanes in self.groups for pair in permutations(lanes, 2)}
        for sent in (self.peer, self.staged):
            found |= set(zip(sent.source.tolist(), sent.target.tolist(), strict=True))
        return found

    def _row(self, source: int, target: int) -> GpuLink:
        one, other = self.gpus[source], self.gpus[target]
        link = self.topology.between(one, other)
        peer, staged = (traffic.of_pair(source, target) for traffic in (self.peer, self.staged))
        speed = bandwidth(peer)
        return GpuLink(
            from_=one.gpu,
            to=other.gpu,
            from_rank=one.rank,
            to_rank=other.rank,
            host=one.host_name,
            link=link.link if link is not None else "",
            peer_access=peer_access(self.topology, one, other),
            able=self.topology.able(one, other),
            copies=len(peer),
            bytes=int(peer.bytes.sum()),
            busy_ns=int((peer.end - peer.start).sum()),
            bandwidth=None if speed is None else round(speed),
            staged_copies=len(staged),
            staged_bytes=int(staged.bytes.sum()),
            staged_ns=int((staged.end - staged.start).sum()),
            collectives=sum(n for lanes, n in self.groups.items() if {source, target} <= {*lanes}),
        )


def measure_links(gpus: PerGpu, collectives: Collectives) -> Links | None:
    """The links between the GPUs that did anything; None where there is one GPU."""
    trace, operations = gpus.trace, gpus.operations
    if len(operations) < 2:
        return None
    talks = any(own.communicates for own in operations)
    return Links(
        [own.gpu for own in operations],
        Topology.of(trace.nvml),
        read_peer_copies(trace, operations),
        find_staged(trace, operations, talks),
        collectives,
    )


def bandwidth(copies: Traffic) -> float | None:
    """Bytes per second of the middle large copy; None where there are too few."""
    speeds = speeds_of(copies)
    return float(np.median(speeds)) if len(speeds) >= FEWEST else None


def speeds_of(copies: Traffic) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Bytes per second of each large copy."""
    large = copies.select((copies.bytes >= LARGE) & (copies.end > copies.start))
    return np.asarray(large.bytes * 1e9 / (large.end - large.start), np.float64)


def peer_access(topology: Topology, one: Gpu, other: Gpu) -> str:
    """``OK`` where NVML gives both reading and writing, else its reason, or nothing."""
    link = topology.between(one, other)
    if link is None:
        return ""
    return next((s for s in (link.p2p_read, link.p2p_write) if s not in ("OK", "")), link.p2p_read)


def _kernels_only(collectives: Collectives) -> list[int]:
    return [index for index, name in enumerate(collectives.operations) if name != PEER_COPY]


def _lanes(bits: int, count: int) -> tuple[int, ...]:
    return tuple(lane for lane in range(count) if bits >> lane & 1)


def by_class(links: Links) -> Mapping[str, Traffic]:
    """The copies straight from one GPU to another, by the name of the link."""
    if not len(links.peer):
        return {}
    names: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    for source, target in permutations(range(len(links.gpus)), 2):
        name = links.topology.name(links.gpus[source], links.gpus[target])
        rows = (links.peer.source == source) & (links.peer.target == target)
        names[name] = names.get(name, np.zeros(len(rows), bool)) | rows
    return {name: links.peer.select(rows) for name, rows in names.items() if name and rows.any()}
