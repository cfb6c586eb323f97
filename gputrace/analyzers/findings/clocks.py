"""Findings about clocks: cards that run slower than the others, or than they could.

NVML's samples tell the clocks. Whether a lower one costs anything is told by the kernels: how long
the same ones take on the other cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.findings.cards import FEWEST, finding_of, named
from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.results import Evidence, Finding
from gputrace.analyzers.results.cards import CardUse
from gputrace.units import format_ns

_CLOCK_APART: Final = 0.03
"""Part by which clocks differ where that is no scatter: cards of one kind keep within 2 %."""
_SLOWER: Final = 1.01
"""Ratio of kernel times from which a card is slower: equal ones agree within 0.2 %."""
_THROTTLED: Final = 0.1
"""Share of the time from which throttling counts."""
_LOWERED: Final = 0.95
"""Part of its maximum that a clock must be below, for throttling to matter."""
_HARD: Final = ("hardware slowdown", "hardware thermal", "software thermal", "power brake")
"""Reasons that are no choice of anybody's, and medium."""

_COOLER: Final = "see to the cooling and the place of the card (nvidia-smi -q -d TEMPERATURE)"
_ADVICE: Final = {
    "power cap": "the power limit holds the clocks down: raise it where the machine allows "
    "(nvidia-smi -pl), or accept it: steps cannot be faster at this power",
    "hardware slowdown": "the board slows the card down for heat or power: " + _COOLER,
    "hardware thermal": "the card is too hot: " + _COOLER,
    "software thermal": "the card is too hot: " + _COOLER,
    "power brake": "the machine's power supply brakes the card: see to its power and its feed",
    "sync boost": "cards of a sync boost group wait for their slowest: take them apart",
}


def clock_mismatch(facts: Facts) -> Iterator[Finding]:
    """NVML: SM or memory clocks of busy cards of one kind differ by 3 % or more, and the same
    kernels take 1 % longer on the slower (`low` with cost 0 where they cannot be compared).

    Cost: what the slowest card's kernels would save at the others' speed.
    """
    found = [f for which in ("memory", "sm") if (f := _mismatch(facts, which)) is not None]
    if found:
        yield max(found, key=lambda finding: finding.impact_ns)


def _mismatch(facts: Facts, which: str) -> Finding | None:
    clocks = _clocks(facts, which)
    reference = max(clocks.values(), default=0.0)
    low = [card for card, clock in clocks.items() if clock < (1 - _CLOCK_APART) * reference]
    if not low:
        return None
    rest = [card for card in clocks if card not in low]
    excess, ratio = _slowness(facts, low, rest)
    if ratio is not None and ratio < _SLOWER:
        return None
    name = "memory" if which == "memory" else "SM"
    slowest = min(clocks[card] for card in low)
    cost = f"; the same kernels take up to {ratio - 1:.1%} longer on them" if ratio else ""
    cost += f", {format_ns(excess)} of {facts.per}" if excess else ""
    evidence: Evidence = {
        "clock": which,
        "clock_mhz": slowest,
        "others_mhz": reference,
        "kernel_ratio": None if ratio is None else round(ratio, 4),
        "samples": min(card.samples for card in low),
    }
    return finding_of(
        "clock-mismatch",
        severity_of(excess / max(facts.mean_ns, 1)) or "low",
        low,
        excess,
        f"{named(low)} {'run' if len(low) > 1 else 'runs'} at a {name} clock of {slowest:,.0f} "
        f"MHz, the others at {reference:,.0f} MHz{cost}",
        _clock_advice(low, which),
        evidence,
    )


def _clocks(facts: Facts, which: str) -> dict[CardUse, float]:
    """The clock of each card that worked, of the commonest kind of card."""
    known = [card for card in facts.cards if _clock(card, which) and card.samples >= FEWEST]
    names = [card.name for card in known]
    common = max(names, key=names.count, default="")
    return {card: _clock(card, which) or 0.0 for card in known if card.name == common}


def _clock(card: CardUse, which: str) -> float | None:
    return card.memory_clock_mhz if which == "memory" else card.sm_clock_mhz


def lower_clock(facts: Facts, gpu: int, rank: int) -> str | None:
    """``its SM clock is 1,590 MHz and theirs 1,980 MHz``; None where no clock of it is lower."""
    for which, name in (("sm", "SM"), ("memory", "memory")):
        clocks = _clocks(facts, which)
        own = [clock for card, clock in clocks.items() if (card.gpu, card.rank) == (gpu, rank)]
        others = [clock for card, clock in clocks.items() if (card.gpu, card.rank) != (gpu, rank)]
        if own and others and own[0] < (1 - _CLOCK_APART) * float(np.median(others)):
            return f"its {name} clock is {own[0]:,.0f} MHz and theirs {np.median(others):,.0f} MHz"
    return None


def _slowness(
    facts: Facts, low: Sequence[CardUse], rest: Sequence[CardUse]
) -> tuple[int, float | None]:
    """What the slowest of some cards costs a step against the others, and how slow its kernels are.

    A step of several ranks is as long as that of the slowest.
    """
    ratios = {(one.gpu.gpu, one.gpu.rank): one for one in facts.ratios}
    slow = [ratios[key] for card in low if (key := (card.gpu, card.rank)) in ratios]
    others = [ratios[key].ratio for card in rest if (key := (card.gpu, card.rank)) in ratios]
    if not slow or not others:
        return 0, None
    usual = float(np.median(others))
    worst = max(slow, key=lambda one: one.ratio)
    excess = max(round(one.compared_ns * (1 - usual / one.ratio)) for one in slow)
    return max(excess, 0), worst.ratio / usual


def _clock_advice(low: Sequence[CardUse], which: str) -> str:
    if any(card.throttled for card in low):
        return "find out what throttles these cards, and leave them out where speed matters"
    if which == "memory":
        return (
            "set all cards to the same clocks (nvidia-smi -rac, -rmc; another driver or power "
            "state lowers the memory clock), or leave the slower ones out"
        )
    return (
        "set all cards to the same clocks (nvidia-smi -rgc, -rac), and look at their power limits "
        "and persistence mode"
    )


def throttling(facts: Facts) -> Iterator[Finding]:
    """NVML: something holds a busy card's SM clock below 95 % of its maximum for 10 % of the
    time or more; `low` for the power cap, `medium` for heat and the power supply.

    Cost: as `clock-mismatch`, against the cards that are not held down; else 0.
    """
    slowed = [card for card in facts.cards if card.samples >= FEWEST and _is_lowered(card)]
    by_reason: dict[str, list[CardUse]] = {}
    for card in slowed:
        for reason, share in card.throttled.items():
            if share >= _THROTTLED:
                by_reason.setdefault(reason, []).append(card)
    for reason, cards in by_reason.items():
        yield _throttled(facts, reason, cards)


def _is_lowered(card: CardUse) -> bool:
    clock, most = card.sm_clock_mhz, card.sm_clock_max_mhz
    return clock is None or not most or clock < _LOWERED * most


def _throttled(facts: Facts, reason: str, cards: Sequence[CardUse]) -> Finding:
    rest = [card for card in facts.cards if card not in cards]
    excess, ratio = _slowness(facts, cards, rest)
    excess = excess if ratio is not None and ratio >= _SLOWER else 0
    worst = max(cards, key=lambda card: card.throttled[reason])
    share = worst.throttled[reason]
    least = "medium" if reason in _HARD else "low"
    clock = f" at {worst.sm_clock_mhz:,.0f} MHz" if worst.sm_clock_mhz else ""
    clock += f" of {worst.sm_clock_max_mhz:,}" if clock and worst.sm_clock_max_mhz else ""
    heat = f", {worst.temperature_c:.0f} °C" if worst.temperature_c is not None else ""
    cost = f"; the others save {format_ns(excess)} of {facts.per}" if excess else ""
    evidence: Evidence = {
        "reason": reason,
        "share": share,
        "sm_clock_mhz": worst.sm_clock_mhz,
        "sm_clock_max_mhz": worst.sm_clock_max_mhz,
        "power_mw": worst.power_mw,
        "temperature_c": worst.temperature_c,
        "kernel_ratio": None if ratio is None else round(ratio, 4),
    }
    return finding_of(
        "throttling",
        severity_of(excess / max(facts.mean_ns, 1)) or least,
        cards,
        excess,
        f"{named(cards)} {'are' if len(cards) > 1 else 'is'} throttled ({reason}) up to "
        f"{share:.0%} of the time{clock}{heat}{cost}",
        _ADVICE[reason],
        evidence,
    )
