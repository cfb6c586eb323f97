"""Topology of the GPUs of a host: NVML links between cards, and the rates of NVLink and PCIe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations, islice
from typing import Final

from gputrace.analyzers.operations import Gpu
from gputrace.model.nvml import Card, Link, Nvml
from gputrace.model.struct import Struct

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
