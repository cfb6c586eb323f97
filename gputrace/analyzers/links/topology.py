"""How the cards of a run hang together, and which of the machine's cards would do so better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.links.hardware import able, badness
from gputrace.traces.nvml.model import Link, Nvml

_MOST_CHOICES: Final = 20_000
"""Sets of cards that are tried at most."""


@dataclass(frozen=True)
class Topology:
    """The links of all cards of all hosts; of GPUs whose card is not known, nothing."""

    nvml: Nvml
    links: Mapping[tuple[int, int, int], Link]
    """By host, card and other card."""

    @classmethod
    def of(cls, nvml: Nvml) -> Topology:
        return cls(nvml, {(link.host, link.gpu, link.peer): link for link in nvml.links})

    def between(self, one: Gpu, other: Gpu) -> Link | None:
        """What NVML says of two GPUs; None where it says nothing, or they are on two hosts."""
        if one.host != other.host or not (one.gpu_known and other.gpu_known):
            return None
        return self.links.get((one.host, one.gpu, other.gpu))

    def name(self, one: Gpu, other: Gpu) -> str:
        """``NV18``, ``PHB`` and so on, or nothing."""
        link = self.between(one, other)
        return link.link if link is not None else ""

    def able(self, one: Gpu, other: Gpu) -> int | None:
        """Bytes per second that can go from one GPU to the other."""
        cards = [self.nvml.card(gpu.host, gpu.gpu) for gpu in (one, other)]
        return able(self.name(one, other), *cards)

    def worst(self, gpus: Sequence[Gpu]) -> str:
        """The worst link between any two; nothing where none is known."""
        names = [self.name(a, b) for a, b in combinations(gpus, 2)]
        return max(filter(None, names), key=badness, default="")

    def worst_of_cards(self, host: int, cards: Sequence[int]) -> str:
        """The worst link between any two of some cards of a host."""
        found = [self.links.get((host, a, b)) for a, b in combinations(cards, 2)]
        return max((one.link for one in found if one is not None), key=badness, default="")

    def better_choice(self, gpus: Sequence[Gpu]) -> tuple[int, ...] | None:
        """As many cards of the host, joined better than these; None where there are none.

        Of all sets of so many cards, the one whose worst link is best, then whose links together
        are. Where that is no better in its worst link, a person gains nothing by changing.
        """
        if len(gpus) < 2 or len({gpu.host for gpu in gpus}) > 1 or not self.worst(gpus):
            return None
        host = gpus[0].host
        cards = sorted({gpu for at, gpu, _ in self.links if at == host})
        own = tuple(sorted(gpu.gpu for gpu in gpus))
        chosen = self._best(host, cards, len(own))
        if chosen is None or self._cost(host, chosen)[0] >= self._cost(host, own)[0]:
            return None
        return chosen

    def _best(self, host: int, cards: Sequence[int], count: int) -> tuple[int, ...] | None:
        choices = combinations(cards, count)
        tried = (choice for _, choice in zip(range(_MOST_CHOICES), choices, strict=False))
        return min(tried, key=lambda choice: self._cost(host, choice), default=None)

    def _cost(self, host: int, cards: Sequence[int]) -> tuple[int, int]:
        pairs = combinations(cards, 2)
        links = [self.links.get((host, a, b)) for a, b in pairs]
        costs = [badness(link.link if link is not None else "") for link in links]
        return max(costs), sum(costs)
