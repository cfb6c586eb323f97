"""What links can carry, and which of two is the better one.

NVLink: NVIDIA's whitepapers of P100 (4 links of 20 GB/s a direction), V100 (6 of 25), A100 (12 of
25), H100 (18 of 25) and Blackwell (18 of 50). PCIe: PCI-SIG's transfer rates (2.5, 5, 8, 16, 32 and
64 GT/s a lane) less their line codes (8b/10b to generation 2, 128b/130b to 5, 242/256 for 6).
What a path through a host bridge or between sockets carries is at most what its PCIe ends do.
"""

from __future__ import annotations

import re
from typing import Final

from gputrace.traces.nvml.model import Card

GB: Final = 10**9

_NVLINK: Final = (
    (re.compile(r"P100", re.IGNORECASE), 20 * GB),
    (re.compile(r"\bG?B[123]00|RTX PRO 6000|GB10", re.IGNORECASE), 50 * GB),
)
"""Bytes per second of one NVLink in one direction, by model."""
_NVLINK_ELSE: Final = 25 * GB

_PCIE_LANE: Final = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_615_384,
    4: 1_969_230_769,
    5: 3_938_461_538,
    6: 7_562_500_000,
}
"""Bytes per second of one lane in one direction, by generation."""

_ORDER: Final = ("INT", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCIe, the shortest first."""
_NUMBERED: Final = re.compile(r"NV(\d+)")


def nvlinks(link: str) -> int:
    """How many NVLinks ``NV18`` has; 0 of any other."""
    found = _NUMBERED.fullmatch(link)
    return int(found[1]) if found else 0


def badness(link: str) -> int:
    """Orders links: the smaller, the better; one that is not known is the worst."""
    count = nvlinks(link)
    if count:
        return -count
    return _ORDER.index(link) if link in _ORDER else len(_ORDER)


def able(link: str, one: Card | None, other: Card | None) -> int | None:
    """Bytes per second that a link can carry in one direction; None where that is not known."""
    count = nvlinks(link)
    if count:
        name = one.name if one is not None else ""
        return count * next((rate for of, rate in _NVLINK if of.search(name)), _NVLINK_ELSE)
    if link not in _ORDER or one is None or other is None:
        return None
    rates = [pcie_rate(card) for card in (one, other)]
    return min((rate for rate in rates if rate), default=None) if all(rates) else None


def pcie_rate(card: Card) -> int:
    """Bytes per second that a card's slot carries in one direction; 0 where that is not known."""
    return _PCIE_LANE.get(card.pcie_gen_max or 0, 0) * (card.pcie_width_max or 0)
