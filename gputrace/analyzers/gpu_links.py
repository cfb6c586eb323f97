"""Links between GPUs: which there are, collectives and copies over them, and slower ones in use."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice, permutations, product
from typing import Final

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from gputrace.analyzers.collectives import PEER_COPY, Collectives
from gputrace.analyzers.gpu_shards import PerGpu
from gputrace.analyzers.grouping import median
from gputrace.analyzers.operations import Gpu, GpuSummary
from gputrace.model.communication import GpuLink
from gputrace.model.events import Events, Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.nvml import Card, Link, Nvml, Samples
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

_MOST_CHOICES: Final = 20_000
"""Maximum number of sets of cards tried."""


class Topology(Struct, frozen=True, dict=True):
    """Links of all cards of all hosts; GPUs whose card is unknown have none."""

    nvml: Nvml
    links: Mapping[tuple[int, int, int], Link]
    """Links by host, card and other card."""

    @classmethod
    def of(cls, nvml: Nvml) -> Topology:
        return cls(nvml, {(link.host, link.gpu, link.peer): link for link in nvml.links})

    def between(self, source: Gpu, target: Gpu) -> Link | None:
        """Return the NVML link of two GPUs; None if unknown, or if they are on two hosts."""
        if source.host != target.host or not (source.gpu_known and target.gpu_known):
            return None
        return self.links.get((source.host, source.gpu, target.gpu))

    def name(self, source: Gpu, target: Gpu) -> str:
        """Return ``NV18``, ``PHB`` and so on, or ""."""
        link = self.between(source, target)
        return link.link if link is not None else ""

    def able(self, source: Gpu, target: Gpu) -> int | None:
        """Return the capacity from one GPU to the other, in bytes per second; None if unknown."""
        cards = [self.nvml.card(gpu.host, gpu.gpu) for gpu in (source, target)]
        return able(self.name(source, target), *cards)

    def worst(self, gpus: Sequence[Gpu]) -> str:
        """Return the worst link between any two GPUs; "" if none is known."""
        names = [self.name(a, b) for a, b in combinations(gpus, 2)]
        return max(filter(None, names), key=badness, default="")

    def worst_of_cards(self, host: int, cards: Sequence[int]) -> str:
        """Return the worst link between any two of some cards of a host; "" if none is known."""
        links = [self.links.get((host, a, b)) for a, b in combinations(cards, 2)]
        return max((link.link for link in links if link is not None), key=badness, default="")

    def better_choice(self, gpus: Sequence[Gpu]) -> tuple[int, ...] | None:
        """Return an equally large set of cards of the host with better links; None if none exists.

        The best set has the best worst link, then the best links in total. A set whose worst link
        is no better gains nothing.
        """
        if len(gpus) < 2 or len({gpu.host for gpu in gpus}) > 1 or not self.worst(gpus):
            return None
        host = gpus[0].host
        cards = sorted({gpu for at, gpu, _ in self.links if at == host})
        used = tuple(sorted(gpu.gpu for gpu in gpus))
        choices = islice(combinations(cards, len(used)), _MOST_CHOICES)
        best = min(choices, key=lambda choice: self._cost(host, choice), default=None)
        is_better = best is not None and self._cost(host, best)[0] < self._cost(host, used)[0]
        return best if is_better else None

    def _cost(self, host: int, cards: Sequence[int]) -> tuple[int, int]:
        pairs = combinations(cards, 2)
        links = [self.links.get((host, a, b)) for a, b in pairs]
        costs = [badness(link.link if link is not None else "") for link in links]
        return max(costs), sum(costs)


GB: Final = 10**9

_NVLINK: Final = (
    (r"(?i)P100", 20 * GB),
    (r"(?i)\bG?B[123]00|RTX PRO 6000|GB10", 50 * GB),
)
"""Bytes per second of one NVLink in one direction, by pattern of the model."""
_NVLINK_ELSE: Final = 25 * GB

_PCIE_LANE: Final = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_615_384,
    4: 1_969_230_769,
    5: 3_938_461_538,
    6: 7_562_500_000,
}
"""Bytes per second of one lane in one direction, by generation, as its coding leaves them: 8 of 10
bits; since 3, 128 of 130; of 6, 242 of the 256 bytes of a flit (PCI Express Base Specification)."""

_ORDER: Final = ("INT", "PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe paths, shortest first."""
_NUMBERED: Final = re.compile(r"NV(\d+)")


def nvlinks(link: str) -> int:
    """Return the number of NVLinks in a name such as ``NV18``; 0 for any other link."""
    match = _NUMBERED.fullmatch(link)
    return int(match[1]) if match else 0


def badness(link: str) -> int:
    """Return a sort key of links, lowest for the best; an unknown link is the worst."""
    count = nvlinks(link)
    if count:
        return -count
    return _ORDER.index(link) if link in _ORDER else len(_ORDER)


def able(link: str, source: Card | None, target: Card | None) -> int | None:
    """Return the capacity of a link in one direction, in bytes per second; None if unknown."""
    count = nvlinks(link)
    if count:
        name = source.name if source is not None else ""
        return count * next(
            (rate for model, rate in _NVLINK if re.search(model, name)), _NVLINK_ELSE
        )
    if link not in _ORDER or source is None or target is None:
        return None
    return min(slot_rate(source), slot_rate(target)) or None


def slot_rate(card: Card) -> int:
    """Return the capacity of a card's slot in one direction, in bytes per second; 0 if unknown."""
    return pcie_rate(card.pcie_gen_max, card.pcie_width_max)


def pcie_rate(generation: int | None, lanes: int | None) -> int:
    """Return the capacity of a PCIe link in one direction, in bytes per second; 0 if unknown."""
    return _PCIE_LANE.get(generation or 0, 0) * (lanes or 0)


LARGE: Final = 1 << 20
"""Minimum bytes of a copy whose speed is limited by the link, not by latency."""
FEWEST_COPIES: Final = 3
"""Minimum number of large copies for the bandwidth of a link."""
_MOST_LANES: Final = 62
"""Maximum number of GPUs in a bit set of one integer."""


class Links(Struct, frozen=True, dict=True):
    """GPUs of a run, their links, and the copies between them."""

    gpus: Sequence[Gpu]
    topology: Topology
    peer: Traffic
    """Copies directly from one GPU to another."""
    staged: Traffic
    """Copies through host memory."""
    collectives: Collectives

    @cached_property
    def groups(self) -> dict[tuple[int, ...], int]:
        """Return the number of collectives by set of participating GPUs."""
        collectives = self.collectives
        if not len(collectives) or len(self.gpus) > _MOST_LANES:
            return {}
        kernels = [n for n, name in enumerate(collectives.operations) if name != PEER_COPY]
        keep = np.isin(collectives.operation, kernels)
        bits = np.zeros(int(collectives.instance.max()) + 1, np.int64)
        np.bitwise_or.at(
            bits, collectives.instance[keep], np.int64(1) << collectives.lane[keep].astype(np.int64)
        )
        sets, counts = np.unique(bits, return_counts=True)
        groups = {
            tuple(lane for lane in range(len(self.gpus)) if bits >> lane & 1): count
            for bits, count in zip(sets.tolist(), counts.tolist(), strict=True)
        }
        return {lanes: count for lanes, count in groups.items() if len(lanes) > 1}

    @cached_property
    def rows(self) -> tuple[GpuLink, ...]:
        """Return every direction between two GPUs of a host of which anything is known."""
        pairs = {pair for lanes in self.groups for pair in permutations(lanes, 2)}
        for traffic in (self.peer, self.staged):
            pairs |= set(zip(traffic.source.tolist(), traffic.target.tolist(), strict=True))
        of_card: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, gpu in enumerate(self.gpus):
            if gpu.gpu_known:
                of_card[gpu.host, gpu.gpu].append(index)
        for (host, card, peer), link in self.topology.links.items():
            if link.link:
                pairs |= set(product(of_card[host, card], of_card[host, peer]))
        return tuple(
            self._row(source, target)
            for source, target in sorted(pairs)
            if source != target and self.gpus[source].host == self.gpus[target].host
        )

    def _row(self, source: int, target: int) -> GpuLink:
        sender, receiver = self.gpus[source], self.gpus[target]
        link = self.topology.between(sender, receiver)
        peer, staged = (traffic.of_pair(source, target) for traffic in (self.peer, self.staged))
        speed = bandwidth(peer)
        return GpuLink(
            from_=sender.gpu,
            to=receiver.gpu,
            from_rank=sender.rank,
            to_rank=receiver.rank,
            host=sender.host_name,
            link=link.link if link is not None else "",
            peer_access=peer_access(self.topology, sender, receiver),
            able=self.topology.able(sender, receiver),
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
    """Measure the links between the active GPUs; None where there is one GPU."""
    trace, operations = gpus.trace, gpus.operations
    if len(operations) < 2:
        return None
    talks = any(summary.communicates for summary in operations)
    return Links(
        [summary.gpu for summary in operations],
        Topology.of(trace.nvml),
        read_peer_copies(trace, operations),
        find_staged(trace, operations, talks),
        collectives,
    )


def bandwidth(copies: Traffic | Events) -> float | None:
    """Return the median bytes per second of large copies; None where there are too few."""
    speeds = speeds_of(copies)
    return float(median(speeds)) if len(speeds) >= FEWEST_COPIES else None


def speeds_of(copies: Traffic | Events) -> NDArray[np.float64]:
    """Return the bytes per second of each large copy."""
    large = copies.select((copies.bytes >= LARGE) & (copies.end > copies.start))
    return large.bytes * 1e9 / (large.end - large.start)


def peer_access(topology: Topology, source: Gpu, target: Gpu) -> str:
    """Return ``OK`` if NVML reports reads and writes as possible, else its reason, or ""."""
    link = topology.between(source, target)
    if link is None:
        return ""
    return next((s for s in (link.p2p_read, link.p2p_write) if s not in ("OK", "")), link.p2p_read)


def by_class(links: Links) -> Mapping[str, Traffic]:
    """Return the direct copies by the name of the link."""
    if not len(links.peer):
        return {}
    names: dict[str, NDArray[np.bool_]] = {}
    ends = zip(links.peer.source.tolist(), links.peer.target.tolist(), strict=True)
    for source, target in sorted(set(ends)):
        name = links.topology.name(links.gpus[source], links.gpus[target])
        rows = (links.peer.source == source) & (links.peer.target == target)
        names[name] = names.get(name, np.zeros(len(rows), bool)) | rows
    return {name: links.peer.select(rows) for name, rows in names.items() if name and rows.any()}


_SLOWER_LINK_RATIO: Final = 1.1
"""Minimum ratio of median transfer times that is no scatter."""
_APART_PERCENTILE: Final = 75
"""Percentage of the transfers that must be on their side of the others' median."""
_FEWEST_PAIRS: Final = 10
"""Minimum pairs of collectives of two groups for a comparison."""
_EDGE_COLLECTIVES: Final = 3
"""Maximum surplus of collectives of one group, as the recording may begin or end between them."""


class Slower(Struct, frozen=True, dict=True):
    """Links of one kind that are slower than those of another kind."""

    what: str
    """``copies`` or ``collectives``."""
    link: str
    than: str
    ratio: float
    """Ratio of the times of equal transfers; above 1."""
    bandwidth: int | None
    """Bytes per second; None where the size is not known."""
    than_bandwidth: int | None
    busy: Mapping[int, Intervals]
    """Intervals of such transfers by index of the GPU."""


def slower_links(links: Links) -> Iterator[Slower]:
    """Yield the kinds of links that are measurably slower than the best one in use."""
    yield from _by_copies(links)
    yield from _by_collectives(links)


def _by_copies(links: Links) -> Iterator[Slower]:
    classes = by_class(links)
    speeds = {name: speeds_of(copies) for name, copies in classes.items()}
    known = {name: speed for name, speed in speeds.items() if len(speed) >= FEWEST_COPIES}
    if len(known) < 2:
        return
    best = max(known, key=lambda name: float(median(known[name])))
    fast = known[best]
    for name, slow in known.items():
        ratio = float(median(fast) / median(slow))
        apart = np.percentile(slow, _APART_PERCENTILE) < np.percentile(
            fast, 100 - _APART_PERCENTILE
        )
        if ratio >= _SLOWER_LINK_RATIO and apart and badness(name) > badness(best):
            rates = round(float(median(slow))), round(float(median(fast)))
            busy = {gpu: classes[name].on(gpu) for gpu in range(len(links.gpus))}
            yield Slower("copies", name, best, ratio, *rates, busy)


def _by_collectives(links: Links) -> Iterator[Slower]:
    """Compare groups of equally many GPUs with the same collectives over two kinds of links."""
    groups = {lanes: links.topology.worst([links.gpus[i] for i in lanes]) for lanes in links.groups}
    series = {lanes: _series(links.collectives, lanes) for lanes, name in groups.items() if name}
    slowest: dict[str, Slower] = {}
    for slow, fast in permutations(series, 2):
        if len(slow) != len(fast) or badness(groups[slow]) <= badness(groups[fast]):
            continue
        ratio = _ratio(series[slow], series[fast])
        if ratio is not None and ratio > slowest.get(groups[slow], _NONE).ratio:
            busy = {lane: _transfers(links.collectives, slow, lane) for lane in slow}
            name = groups[slow]
            slowest[name] = Slower("collectives", name, groups[fast], ratio, None, None, busy)
    yield from slowest.values()


_NONE: Final = Slower("", "", "", 0.0, None, None, {})


class _Series(Struct, frozen=True, dict=True):
    """Collectives of one group of GPUs in order: operation, size and transfer time of each."""

    name: NDArray[np.int16]
    bytes: NDArray[np.int64]
    ns: NDArray[np.int64]


def _rows_of(collectives: Collectives, lanes: tuple[int, ...], lane: int) -> NDArray[np.intp]:
    """Return the rows of one GPU in the joint operations of exactly these GPUs, in order."""
    instance = collectives.instance
    inside = np.isin(collectives.lane, lanes)
    count = np.bincount(instance)
    within = np.bincount(instance[inside], minlength=len(count))
    whole = (count == len(lanes)) & (within == count)
    chosen = collectives.joint & collectives.known & whole[instance]
    return np.flatnonzero(chosen & (collectives.lane == lane))


def _series(collectives: Collectives, lanes: tuple[int, ...]) -> _Series:
    rows = _rows_of(collectives, lanes, lanes[0])
    ns = collectives.end[rows] - collectives.start[rows] - collectives.wait[rows]
    return _Series(collectives.operation[rows], collectives.bytes[rows], ns)


def _ratio(slow: _Series, fast: _Series) -> float | None:
    """Return the median time ratio of the slow group to the fast one; None if not longer.

    Since the recording may begin or end between the groups, the offset between the two series is
    the one with the least scatter of the ratios.
    """
    tried = [
        _ratios(slow, fast, offset) for offset in range(-_EDGE_COLLECTIVES, _EDGE_COLLECTIVES + 1)
    ]
    ways = [ratios for ratios in tried if len(ratios) >= _FEWEST_PAIRS]
    if abs(len(slow.ns) - len(fast.ns)) > _EDGE_COLLECTIVES or not ways:
        return None
    ratios = min(ways, key=lambda ratios: float(np.std(np.log(ratios))))
    ratio = float(median(ratios))
    return (
        ratio
        if ratio >= _SLOWER_LINK_RATIO and np.percentile(ratios, 100 - _APART_PERCENTILE) > 1
        else None
    )


def _ratios(slow: _Series, fast: _Series, offset: int) -> NDArray[np.float64]:
    """Return the ratios of the series at an offset; empty where the collectives differ."""
    first, second = max(0, -offset), max(0, offset)
    count = max(0, min(len(slow.ns) - first, len(fast.ns) - second))
    ours, theirs = slice(first, first + count), slice(second, second + count)
    same = (slow.name[ours] == fast.name[theirs]) & (slow.bytes[ours] == fast.bytes[theirs])
    if not same.all():
        return np.empty(0)
    return np.maximum(slow.ns[ours], 1) / np.maximum(fast.ns[theirs], 1)


def _transfers(collectives: Collectives, lanes: tuple[int, ...], lane: int) -> Intervals:
    rows = _rows_of(collectives, lanes, lane)
    starts = collectives.start[rows] + collectives.wait[rows]
    return union(starts, collectives.end[rows])


_LEAST_STAGED_BYTES: Final = 1 << 16
"""Minimum bytes for which two copies of equal size are no coincidence."""
_STAGING_PAUSE_NS: Final = 2_000_000
"""Maximum pause between the halves of a staged copy: a CPU may add up in between."""
_STAGING_PAUSE_LENGTHS: Final = 4
"""Maximum pause in lengths of the first half, if that is longer."""
_EARLIER_COPIES_TRIED: Final = 8
"""Maximum number of earlier copies to the host tried per GPU."""
_MOST_COPIES: Final = 50_000
"""Maximum number of copies, from the first, searched for staged ones: a sufficient sample."""
_NOBODY: Final = -1


class Traffic(Struct, frozen=True, dict=True):
    """Copies from one GPU to another; arrays of equal length, times in nanoseconds.

    One through the host lasts from the start of the copy to it to the end of that from it.
    """

    source: NDArray[np.int64]
    """Index of the source GPU among the `GpuOperations`."""
    target: NDArray[np.int64]
    bytes: NDArray[np.int64]
    start: Times
    end: Times

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: Mask) -> Traffic:
        return Traffic(*(column[rows] for column in astuple(self)))

    def of_pair(self, source: int, target: int) -> Traffic:
        return self.select((self.source == source) & (self.target == target))

    def on(self, gpu: int) -> Intervals:
        """Return when one GPU sends or receives: a staged copy takes both halves, and between."""
        rows = (self.source == gpu) | (self.target == gpu)
        return union(self.start[rows], self.end[rows])


_NO_TRAFFIC: Final = Traffic(*[np.empty(0, np.int64)] * len(Traffic.__struct_fields__))


def read_peer_copies(trace: Trace, operations: Sequence[GpuSummary]) -> Traffic:
    """Read the direct copies between GPUs of which both ends are known."""
    if not any(Kind.COPY_PEER in summary.kinds for summary in operations):
        return _NO_TRAFFIC
    columns = ("start", "end", "bytes", "process", "source_device", "destination_device")
    copies = trace.events([Kind.COPY_PEER], columns)
    source = _places(operations, copies.process, copies.source_device)
    target = _places(operations, copies.process, copies.destination_device)
    traffic = Traffic(source, target, copies.bytes, copies.start, copies.end)
    return traffic.select((source != _NOBODY) & (target != _NOBODY) & (source != target))


def find_staged(trace: Trace, operations: Sequence[GpuSummary], talks: bool) -> Traffic:
    """Find copies to the host that are followed by an equally large one to another GPU.

    With ``talks``, where the GPUs also communicate otherwise, only copies of one process count, and
    none to a GPU that has just copied as much to the host: it may read its data back, as offloaded
    optimizers do.
    """
    kinds = frozenset[Kind]().union(*(summary.kinds for summary in operations))
    if not {Kind.COPY_D2H, Kind.COPY_H2D} <= kinds:
        return _NO_TRAFFIC
    columns = ("start", "end", "kind", "bytes", "process", "device")
    copies = trace.events([Kind.COPY_D2H, Kind.COPY_H2D], columns)
    copies = copies.select(copies.bytes >= _LEAST_STAGED_BYTES)
    copies = copies.select(np.argsort(copies.start, kind="stable")[:_MOST_COPIES])
    gpu = _places(operations, copies.process, copies.device)
    down = copies.kind == Kind.COPY_D2H
    hosts = [summary.gpu.host for summary in operations]
    sizes = distinct_ids(copies.bytes[down])
    pairs = [
        pair
        for size in sizes[is_among(sizes, copies.bytes[~down])].tolist()
        for pair in _of_size(copies, gpu, np.flatnonzero(copies.bytes == size), talks)
        if hosts[gpu[pair[0]]] == hosts[gpu[pair[1]]]
    ]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return Traffic(
        gpu[first], gpu[second], copies.bytes[first], copies.start[first], copies.end[second]
    )


def _of_size(
    copies: Events, gpus: NDArray[np.int64], rows: NDArray[np.int64], talks: bool
) -> list[tuple[int, int]]:
    """Pair first and second halves among copies of one size, in order of start.

    A copy to the host counts once per GPU that it may be for.
    """
    recent: dict[int, deque[int]] = {}
    taken: set[tuple[int, int]] = set()
    pairs = []
    for row in rows.tolist():
        gpu = int(gpus[row])
        if gpu == _NOBODY:
            continue
        if copies.kind[row] == Kind.COPY_D2H:
            recent.setdefault(gpu, deque(maxlen=_EARLIER_COPIES_TRIED)).append(row)
            continue
        start = int(copies.start[row])
        near = {at: [f for f in rows if _is_soon(copies, f, start)] for at, rows in recent.items()}
        if talks and near.get(gpu):
            continue
        of_others = [first for at, rows in near.items() if at != gpu for first in rows]
        if talks:
            of_others = [f for f in of_others if copies.process[f] == copies.process[row]]
        free = [first for first in of_others if (first, gpu) not in taken]
        if free:
            first = max(free, key=lambda first: int(copies.end[first]))
            taken.add((first, gpu))
            pairs.append((first, row))
    return pairs


def _is_soon(copies: Events, first: int, start: int) -> bool:
    """Return True if a copy from the host at ``start`` may continue the one to it in a row."""
    begin, end = int(copies.start[first]), int(copies.end[first])
    return end <= start <= end + max(_STAGING_PAUSE_NS, _STAGING_PAUSE_LENGTHS * (end - begin))


def _places(
    operations: Sequence[GpuSummary], process: NDArray[np.int16], device: NDArray[np.int16]
) -> NDArray[np.int64]:
    """Return the index of the GPU for each process and device ordinal, or `_NOBODY`."""
    known = {pair: index for index, summary in enumerate(operations) for pair in summary.gpu.pairs}
    pairs = zip(process.tolist(), device.tolist(), strict=True)
    return np.array([known.get(pair, _NOBODY) for pair in pairs], np.int64)


_PCIE_COUNTER_MODULUS: Final = 1 << 32
"""Modulus of the PCIe counter."""


class Sent(Struct, frozen=True, dict=True):
    """Bytes sent by cards between their first and last sample with the counters."""

    nvlink: int
    pcie: int
    """Lower bound: the counter may wrap more than once between two samples."""
    start: int
    """Last of the first samples of the cards, in nanoseconds on the trace's clock."""
    end: int
    """First of the last samples of the cards."""


def sent(nvml: Nvml, gpus: Sequence[Gpu]) -> Sent | None:
    """Return what some cards sent in total; None if one has no counters or was reset."""
    by_card = [_sent(nvml.samples.of(gpu.host, gpu.gpu)) for gpu in gpus if gpu.gpu_known]
    known = [card for card in by_card if card is not None]
    if not known or len(known) < len(gpus):
        return None
    return Sent(
        sum(card.nvlink for card in known),
        sum(card.pcie for card in known),
        max(card.start for card in known),
        min(card.end for card in known),
    )


def _sent(samples: Samples) -> Sent | None:
    nvlink, pcie = samples["nvlinkTx"], samples["pcieTx"]
    rows = np.flatnonzero(~np.isnan(nvlink) & ~np.isnan(pcie))
    if len(rows) < 2:
        return None
    by_nvlink, by_pcie = np.diff(nvlink[rows]), np.diff(pcie[rows])
    if (by_nvlink < 0).any() or (by_pcie < -_PCIE_COUNTER_MODULUS).any():
        return None
    by_pcie[by_pcie < 0] += _PCIE_COUNTER_MODULUS
    start, end = int(samples.time[rows[0]]), int(samples.time[rows[-1]])
    return Sent(int(by_nvlink.sum()), int(by_pcie.sum()), start, end)
