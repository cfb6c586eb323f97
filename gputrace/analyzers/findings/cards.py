"""Findings about the cards themselves, their links and their memory, by NVML's samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.results import Evidence, Finding
from gputrace.analyzers.results.cards import CardUse
from gputrace.units import format_ns, format_ranges

FEWEST: Final = 3
"""Samples of a busy card from which anything is said of it."""
_SLOWER_LINK: Final = 0.9
"""Part of the best link's bandwidth below which one is degraded."""
_MORE_MEMORY: Final = 1.25
_MUCH_MEMORY: Final = 1 << 30
_FULL: Final = 0.9
"""Part of a card's memory from which it limits the batch."""
_GB_A_LANE: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.877}
"""GB/s of a PCIe lane, by generation."""

_MEMORY_ADVICE: Final = {
    "pytorch": "keep the other processes off this GPU (torch.cuda.set_device before anything else, "
    "map_location when loading), and use DistributedDataParallel instead of DataParallel, which "
    "gathers outputs on one GPU",
    "tensorflow": "place variables and the loss on all GPUs (tf.distribute.MirroredStrategy)",
}


def pcie_degraded(facts: Facts) -> Iterator[Finding]:
    """NVML: a busy card's PCIe link has less than 90 % of the bandwidth that card and slot can
    do, or that the other cards have (`low`).

    Cost: what its exposed copies would save at the full link.
    """
    links = {card: _bandwidth(card) for card in facts.cards if card.samples >= FEWEST}
    best = max((most for _, most in links.values()), default=0.0)
    slow = [card for card, (now, _) in links.items() if 0 < now < _SLOWER_LINK * best]
    if not slow:
        return
    worst = min(slow, key=lambda card: links[card][0])
    now = links[worst][0]
    excess = max(_copies_excess(facts, card, links[card][0] / best) for card in slow)
    cost = f"; its exposed copies cost {format_ns(excess)} of {facts.per} more" if excess else ""
    evidence: Evidence = {
        "pcie_gen": worst.pcie_gen,
        "pcie_gen_max": worst.pcie_gen_max,
        "pcie_width": worst.pcie_width,
        "pcie_width_max": worst.pcie_width_max,
        "gb_s": round(now, 1),
        "best_gb_s": round(best, 1),
    }
    yield finding_of(
        "pcie-degraded",
        severity_of(excess / max(facts.mean_ns, 1)) or "low",
        slow,
        excess,
        f"{named(slow)} {'have' if len(slow) > 1 else 'has'} a PCIe link of generation "
        f"{worst.pcie_gen} with {worst.pcie_width} lanes under load, {now:.0f} of {best:.0f} GB/s"
        f"{cost}",
        "see to the card's slot, riser and the firmware's setting of its link; until then keep it "
        "from what copies most",
        evidence,
    )


def _bandwidth(card: CardUse) -> tuple[float, float]:
    """GB/s of the link now, and at most; 0 where it is not known."""
    if not card.pcie_gen or not card.pcie_width:
        return 0.0, 0.0
    now = _GB_A_LANE.get(card.pcie_gen, 0.0) * card.pcie_width
    most = _GB_A_LANE.get(card.pcie_gen_max or 0, 0.0) * (card.pcie_width_max or 0)
    return now, max(now, most)


def _copies_excess(facts: Facts, card: CardUse, part: float) -> int:
    """What a card's exposed copies from the host would take less, a step, at the full link."""
    rows = [row for row in facts.rows if (row.gpu, row.rank) == (card.gpu, card.rank)]
    spent = sum(row.of("h2d") // max(row.steps, 1) for row in rows)
    return round(spent * (1 - part))


def memory_imbalance(facts: Facts) -> Iterator[Finding]:
    """NVML: a card holds a quarter and 1 GiB more than the others (`low`, `medium` where it is
    90 % full).
    """
    used = {card: card.memory_used_bytes for card in facts.cards if card.memory_used_bytes}
    if len(used) < 2:
        return
    fullest = max(used, key=lambda card: used[card])
    others = float(np.median([used[card] for card in used if card is not fullest]))
    more = used[fullest] - others
    if used[fullest] < _MORE_MEMORY * others or more < _MUCH_MEMORY:
        return
    full = used[fullest] / fullest.memory_bytes if fullest.memory_bytes else 0.0
    part = f" ({full:.0%} of it)" if full else ""
    yield finding_of(
        "memory-imbalance",
        "medium" if full >= _FULL else "low",
        [fullest],
        0,
        f"{named([fullest])} uses {used[fullest] / 2**30:.1f} GiB of memory{part}, the others "
        f"{others / 2**30:.1f} GiB",
        _MEMORY_ADVICE.get(facts.framework, "spread what one GPU alone holds"),
        {"used_bytes": used[fullest], "others_bytes": round(others), "share": round(full, 4)},
    )


def named(cards: Sequence[CardUse]) -> str:
    """``GPUs 0-2``; by rank where cards of several machines have the same numbers."""
    word, numbers = "GPU", sorted({card.gpu for card in cards})
    if len(numbers) < len(cards):
        word, numbers = "rank", sorted({card.rank for card in cards})
    return f"{word}{'s' if len(numbers) > 1 else ''} {format_ranges(numbers)}"


def finding_of(
    id: str,
    severity: str,
    cards: Sequence[CardUse],
    impact_ns: int,
    message: str,
    advice: str,
    evidence: Evidence,
) -> Finding:
    """A finding about some cards alone."""
    gpus = tuple(sorted({card.gpu for card in cards}))
    ranks = tuple(sorted({card.rank for card in cards}))
    return Finding(id, severity, gpus, ranks, impact_ns, message, advice, evidence)
