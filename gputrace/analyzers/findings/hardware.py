"""Findings about the cards, from NVML samples: clocks, throttling, PCIe links and memory.

NVML gives the clocks. The kernels show whether a lower one costs anything: how long the same
kernels take on the other cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.device_metrics import find_cards
from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.gpu_links import GB, pcie_rate
from gputrace.analyzers.grouping import median, median_of_others, time_of
from gputrace.analyzers.neighbours import (
    USE_MARGIN,
    CardNeighbours,
    find_card_neighbours,
    hides_processes,
    programs_on_cores,
)
from gputrace.analyzers.operations import Gpu
from gputrace.model.cards import CardUse
from gputrace.model.results import Evidence, Finding
from gputrace.units import format_ns, format_ranges

_COOLER: Final = "check the card's cooling and placement (nvidia-smi -q -d TEMPERATURE)"


def find_card_use(facts: Facts) -> tuple[CardUse, ...]:
    """Return the cards while they were busy, of those that were sampled."""
    return find_cards(facts.trace.nvml, facts.per_gpu, facts.measured)


_SHARED_SHARE: Final = 0.02
"""Share of a step that a neighbour on the card must cost to be reported."""
_ALL_THE_TIME: Final = 0.8
"""Part of the measured time from which there is no time without a neighbour to compare with."""
_AFFECTED_STEP: Final = 0.05
_ALL_STEPS: Final = 0.8
"""Share of a step by which it must be longer to count as slowed, and part of the steps that are
called all."""
SHARE_NO_CARD: Final = (
    "run it on another card or at another time; exclusive mode (nvidia-smi -c EXCLUSIVE_PROCESS) "
    "keeps others off"
)


def find_neighbours(facts: Facts) -> tuple[CardNeighbours, ...]:
    """Return the neighbours on the cards of the run, with what they cost.

    One that computes all the time at the same time as the run, by MPS, slows all kernels alike: it
    costs by how much they are slower than on the other cards, if no lower clock says why. In turns,
    most kernels fit between two turns of others and take their usual time: what is slower in all of
    them has another reason, as more work.
    """
    listed = facts.trace.nvml.processes
    found = find_card_neighbours(facts.per_gpu, facts.measured) if listed else ()
    if not found:
        return ()
    ratios = {entry.gpu: entry for entry in facts.kernel_ratios()}
    usual = {}
    if len(ratios) > 1:
        middles = median_of_others(np.array([(each.ratio,) for each in ratios.values()]))
        usual = dict(zip(ratios, middles[:, 0].tolist(), strict=True))
    corrected = []
    for each in found:
        time = facts.time_of(next(x for x in facts.per_gpu.lanes if x.gpu == each.gpu))
        always = each.times.intersection(time).total >= _ALL_THE_TIME * time.total
        entry, ratio = ratios.get(each.gpu), 1.0
        if always and each.is_mps and entry and not lower_clock(facts, each.gpu.gpu, each.gpu.rank):
            ratio = max(1.0, entry.ratio / usual[each.gpu])
        slower = 0 if entry is None else round(entry.compared_ns * (1 - 1 / ratio))
        slower = min(slower, round(USE_MARGIN * (each.use or 1.0) * facts.mean_ns))
        is_more = ratio >= _SLOWER_KERNELS_RATIO and slower > each.cost_ns
        by_step = np.full(len(each.by_step), slower) if is_more else each.by_step
        corrected.append(replace(each, by_step=by_step))
    return tuple(corrected)


def neighbours_of(facts: Facts, gpu: Gpu) -> CardNeighbours | None:
    """Return the neighbours on the card of a GPU; None if there are none."""
    return next((each for each in facts.once(find_neighbours) if each.gpu == gpu), None)


def work_slowed(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds by which neighbours slow the kernels of each GPU, with its rank."""
    met = facts.once(find_neighbours)
    return {(each.gpu.gpu, each.gpu.rank): int(each.by_step.sum()) for each in met}


def unknown_neighbours(facts: Facts, gpu: Gpu) -> str:
    """Return a detail if it cannot be known whether others compute on a card; else empty."""
    hides = hides_processes(facts.trace, gpu) and neighbours_of(facts, gpu) is None
    return (
        "whether another process computes on it is not known: the driver lists no process of "
        "this run, as in a container"
        if hides
        else ""
    )


def shared_gpu(facts: Facts) -> Iterator[Finding]:
    """Another process computes on a card of the run, by NVML, and that costs 2 % of a step (`low`),
    5 % (`medium`) or 20 % (`high`). It is named by its pid, and if it is the same user's by its
    command.

    Cost: the time by which kernels are longer while it computes than the same launches without it,
    or, where it never stops, than most of them; and the waits of launched work for its turn.

    Wrong if: the kernels take as long when it does not run.
    """
    worst = max(facts.once(find_neighbours), key=partial(_cost_of, facts), default=None)
    if worst is None or not _is_costly(facts, worst):
        return
    cost = _cost_of(facts, worst)
    share = facts.share_of(cost)
    slowed = int(np.count_nonzero(worst.by_step >= _AFFECTED_STEP * facts.mean_ns))
    some = 0 < slowed < _ALL_STEPS * len(worst.by_step)
    when = f"it slows {slowed} of {len(worst.by_step)} steps" if some else ""
    first = worst.programs[0] if worst.programs else None
    how = "at the same time (MPS)" if worst.is_mps else "in turns"
    yield facts.finding(
        "shared-gpu",
        severity_of(share) or "low",
        cost,
        f"another process on {named([worst.gpu])} costs {facts.of_step(cost)}",
        SHARE_NO_CARD
        + ("; or limit it with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" if worst.is_mps else ""),
        {
            "pid": first.pid if first else None,
            "name": first.name if first else None,
            "use": None if worst.use is None else round(worst.use, 4),
            "memory_bytes": first.memory_bytes if first else None,
            "processes": len(worst.programs),
            "sharing": first.sharing if first else None,
            "kernels_ns": worst.cost_ns,
            "waits_ns": cost - worst.cost_ns,
            "slowed_steps": slowed,
            "share": round(share, 4),
        },
        [f"{worst}, {how} with the training", when],
        of=[worst.gpu],
    )


def _cost_of(facts: Facts, met: CardNeighbours) -> int:
    """Return the nanoseconds of a step that neighbours cost a GPU: longer kernels, and waits."""
    waits = facts.ledger.of("shared-gpu")
    mine = (row for row in waits if row.of == "idle" and row.paid_by == row.rank == met.gpu.rank)
    idle = sum(row.ns for row in mine if row.gpu == met.gpu.gpu)
    return met.cost_ns + idle // max(len(met.by_step), 1)


def _is_costly(facts: Facts, met: CardNeighbours) -> bool:
    return facts.share_of(_cost_of(facts, met)) >= _SHARED_SHARE


def note_neighbours(facts: Facts) -> Iterator[str]:
    """Yield a line for each card or host with other programs whose cost is small or unknown."""
    for met in facts.once(find_neighbours):
        if not _is_costly(facts, met):
            cost = "no cost of that can be measured"
            if met.is_mps:
                cost = "at the same time (MPS): by how much that slows its kernels is not known"
            yield f"{met}; {cost}"
    time = time_of(facts.measured)
    for host in sorted({process.host for process in facts.trace.processes}):
        for program in programs_on_cores(facts.trace, host, time):
            if program.sharing == "SMT":
                yield (
                    f"another program ({program}) uses {program.use or 0:.1f} of the other "
                    "hardware threads (SMT) of the cores that the run uses: whether that slows it "
                    "is not measured"
                )


def clock_mismatch(facts: Facts) -> Iterator[Finding]:
    """NVML: SM or memory clocks of busy cards of one model differ by 3 % or more, and the same
    kernels take 1 % longer on the slower cards (`low` with cost 0 if the kernels cannot be
    compared).

    Cost: the time that the slowest card's kernels would save at the others' speed.

    Wrong if: the ranks take as long as before when the cards are swapped.
    """
    findings = [f for which in ("memory", "sm") if (f := _mismatch(facts, which)) is not None]
    if findings:
        yield max(findings, key=lambda finding: finding.impact_ns)


_CLOCK_DIFFERENCE: Final = 0.03
"""Relative difference of clocks that is no scatter: cards of one model agree within 2 %."""
_BEYOND_CLOCK_RATIO: Final = 1.03
"""How much more than its clock explains a kernel must be slower for the finding to say so."""


_SLOWER_KERNELS_RATIO: Final = 1.01
"""Ratio of kernel times from which a card is slower: equal cards agree within 0.2 %."""


def _mismatch(facts: Facts, which: str) -> Finding | None:
    clocks = _clocks(facts, which)
    reference = max(clocks.values(), default=0.0)
    low = [card for card, clock in clocks.items() if clock < (1 - _CLOCK_DIFFERENCE) * reference]
    if not low:
        return None
    rest = [card for card in clocks if card not in low]
    excess, ratio = _slowness(facts, low, rest)
    if ratio is not None and ratio < _SLOWER_KERNELS_RATIO:
        return None
    name = "memory" if which == "memory" else "SM"
    slowest = min(clocks[card] for card in low)
    longer = ""
    if ratio:
        longer = f"the same kernels take up to {ratio - 1:.1%} longer at the lower clock"
        explained = reference / slowest
        if ratio > _BEYOND_CLOCK_RATIO * explained:
            longer += f", of which it explains {explained - 1:.1%}"
        excess = _by_clock(excess, ratio, explained)
    message = (
        f"{named(low)} {'run' if len(low) > 1 else 'runs'} with the {name} clock at "
        f"{slowest:,.0f} MHz, the others at {reference:,.0f} MHz"
    )
    details = [longer]
    if excess:
        details.insert(0, message)
        message = f"the lower {name} clock of {named(low)} costs {facts.of_step(excess)}"
    evidence: Evidence = {
        "clock": which,
        "clock_mhz": slowest,
        "others_mhz": reference,
        "kernel_ratio": None if ratio is None else round(ratio, 4),
        "samples": min(card.samples for card in low),
    }
    return facts.finding(
        "clock-mismatch",
        severity_of(facts.share_of(excess)) or "low",
        excess,
        message,
        _clock_advice(low, which),
        evidence,
        details,
        of=low,
    )


def _clocks(facts: Facts, which: str) -> dict[CardUse, float]:
    """Return the clock in MHz of each busy card of the most common model."""
    clocks = {card: getattr(card, f"{which}_clock_mhz") for card in facts.once(find_card_use)}
    known = [
        card
        for card in facts.once(find_card_use)
        if clocks[card] and card.samples >= FEWEST_SAMPLES
    ]
    names = [card.name for card in known]
    common = max(names, key=names.count, default="")
    return {card: clocks[card] for card in known if card.name == common}


def lower_clock(facts: Facts, gpu: int, rank: int) -> str | None:
    """Return ``its SM clock is 1,590 MHz, the others' 1,980 MHz``; empty if no clock of the GPU is
    lower, None if clocks are unknown.
    """
    lower = None
    for which, name in (("sm", "SM"), ("memory", "memory")):
        clocks = _clocks(facts, which)
        of_gpu = [clock for card, clock in clocks.items() if (card.gpu, card.rank) == (gpu, rank)]
        others = [clock for card, clock in clocks.items() if (card.gpu, card.rank) != (gpu, rank)]
        if of_gpu and others:
            lower = ""
            if of_gpu[0] < (1 - _CLOCK_DIFFERENCE) * float(median(others)):
                whose = "the others'" if len(others) > 1 else "the other's"
                usual = f"{median(others):,.0f} MHz"
                return f"its {name} clock is {of_gpu[0]:,.0f} MHz, {whose} {usual}"
    return lower


def _slowness(
    facts: Facts, low: Sequence[CardUse], rest: Sequence[CardUse]
) -> tuple[int, float | None]:
    """Return the cost per step in nanoseconds of the slowest of some cards, and its kernel time
    ratio.

    The ratio is to the median of the other cards, None if they are not comparable. A step of
    several ranks is as long as that of the slowest.
    """
    ratios = {(entry.gpu.gpu, entry.gpu.rank): entry for entry in facts.kernel_ratios()}
    slow = [ratios[key] for card in low if (key := (card.gpu, card.rank)) in ratios]
    others = [ratios[key].ratio for card in rest if (key := (card.gpu, card.rank)) in ratios]
    if not slow or not others:
        return 0, None
    usual = float(median(others))
    worst = max(slow, key=lambda entry: entry.ratio)
    excess = max(round(entry.compared_ns * (1 - usual / entry.ratio)) for entry in slow)
    return max(excess, 0), worst.ratio / usual


def _by_clock(excess: int, ratio: float, clocks: float) -> int:
    """Return the part of a cost that a ratio of clocks explains: no kernel is slower by more than
    its clock; the rest of the ratio of their times has other reasons, such as more work in each.
    """
    return round(excess * (1 - 1 / min(ratio, clocks)) / (1 - 1 / ratio))


def _clock_advice(low: Sequence[CardUse], which: str) -> str:
    if any(card.throttled for card in low):
        return "find out what throttles these cards, and leave them out if speed matters"
    if which == "memory":
        return (
            "set all cards to the same clocks (nvidia-smi -rac, -rmc; another driver or power "
            "state lowers the memory clock), or leave the slower ones out"
        )
    return (
        "set all cards to the same clocks (nvidia-smi -rgc, -rac), and look at their power limits "
        "and persistence mode"
    )


_THROTTLED_SHARE: Final = 0.1
"""Share of the time from which throttling counts."""
_LOWERED_CLOCK_PART: Final = 0.95
"""Fraction of its maximum that a clock must be below for throttling to matter."""


def throttling(facts: Facts) -> Iterator[Finding]:
    """NVML: a busy card's SM clock is held below 95 % of its maximum for 10 % of the time or more;
    `low` for the power cap, `medium` for heat and the power supply.

    Cost: as for `clock-mismatch`, compared with the cards that are not throttled; otherwise 0.

    Wrong if: the step is no shorter on a cooler card, or with a higher power limit.
    """
    by_reason: dict[str, list[CardUse]] = {}
    for card in facts.once(find_card_use):
        clock, most = card.sm_clock_mhz, card.sm_clock_max_mhz
        is_lowered = clock is None or not most or clock < _LOWERED_CLOCK_PART * most
        for reason, share in card.throttled.items():
            if is_lowered and share >= _THROTTLED_SHARE and card.samples >= FEWEST_SAMPLES:
                by_reason.setdefault(reason, []).append(card)
    for reason, cards in by_reason.items():
        yield _throttled(facts, reason, cards)


_UNCHOSEN_REASONS: Final = (
    "hardware slowdown",
    "hardware thermal",
    "software thermal",
    "power brake",
)
"""Reasons that nobody chose; their findings are `medium`."""
_THROTTLING_ADVICE: Final = {
    "power cap": "the power limit holds the clocks down: raise it where the machine allows "
    "(nvidia-smi -pl), or accept it: steps cannot be faster at this power",
    "hardware slowdown": "the board slows the card down for heat or power: " + _COOLER,
    "hardware thermal": "the card is too hot: " + _COOLER,
    "software thermal": "the card is too hot: " + _COOLER,
    "power brake": "the machine's power supply throttles the card: check the supply and its feed",
    "sync boost": "cards of a sync boost group run at the clock of their slowest: ungroup them",
}


def _throttled(facts: Facts, reason: str, cards: Sequence[CardUse]) -> Finding:
    rest = [card for card in facts.once(find_card_use) if card not in cards]
    excess, ratio = _slowness(facts, cards, rest)
    worst = max(cards, key=lambda card: card.throttled[reason])
    if ratio is None or ratio < _SLOWER_KERNELS_RATIO:
        excess = 0
    elif worst.sm_clock_mhz:
        others = [card.sm_clock_mhz for card in rest if card.sm_clock_mhz]
        clocks = float(median(others)) / worst.sm_clock_mhz if others else 1.0
        excess = _by_clock(excess, ratio, clocks) if clocks > 1 else 0
    share = worst.throttled[reason]
    least = "medium" if reason in _UNCHOSEN_REASONS else "low"
    clock = f" at {worst.sm_clock_mhz:,.0f} MHz" if worst.sm_clock_mhz else ""
    clock += f" of {worst.sm_clock_max_mhz:,}" if clock and worst.sm_clock_max_mhz else ""
    heat = worst.temperature_c
    details = (
        "" if heat is None else f"its temperature is {heat:.0f} °C",
        f"the others' speed would save {facts.of_step(excess)}" if excess else "",
    )
    evidence: Evidence = {
        "reason": reason,
        "share": share,
        "sm_clock_mhz": worst.sm_clock_mhz,
        "sm_clock_max_mhz": worst.sm_clock_max_mhz,
        "power_mw": worst.power_mw,
        "temperature_c": worst.temperature_c,
        "kernel_ratio": None if ratio is None else round(ratio, 4),
    }
    return facts.finding(
        "throttling",
        severity_of(facts.share_of(excess)) or least,
        excess,
        f"{named(cards)} {'are' if len(cards) > 1 else 'is'} throttled ({reason}) up to "
        f"{share:.0%} of the time{clock}",
        _THROTTLING_ADVICE[reason],
        evidence,
        details,
        of=cards,
    )


FEWEST_SAMPLES: Final = 3
"""Minimum number of samples of a busy card for any finding about it."""
_DEGRADED_LINK_PART: Final = 0.9
"""Fraction of the best link's bandwidth below which a link is degraded."""
_MORE_MEMORY_RATIO: Final = 1.25
_MORE_MEMORY_BYTES: Final = 1 << 30
_FULL_MEMORY_PART: Final = 0.9
"""Fraction of a card's memory from which it limits the batch."""

_MEMORY_ADVICE: Final = {
    "pytorch": "keep the other processes off this GPU (torch.cuda.set_device before anything else, "
    "map_location when loading), and use DistributedDataParallel instead of DataParallel, which "
    "gathers outputs on one GPU",
    "tensorflow": "place variables and the loss on all GPUs (tf.distribute.MirroredStrategy)",
}
_OF_ONE_RANK: Final = (
    "give this rank no more of the work than the others have (layers, samples and their lengths), "
    "and keep their processes off its GPU (torch.cuda.set_device before anything else, "
    "map_location when loading)"
)


def pcie_degraded(facts: Facts) -> Iterator[Finding]:
    """NVML: a busy card's PCIe link has less than 90 % of the bandwidth that card and slot support,
    or that the other cards have (`low`).

    Cost: the time that its exposed copies would save at full link speed.

    Wrong if: a copy test (`nvbandwidth`) reaches the slot's full rate.
    """
    rates = {
        card: now
        for card in facts.once(find_card_use)
        if card.samples >= FEWEST_SAMPLES and (now := pcie_rate(card.pcie_gen, card.pcie_width))
    }
    slots = (pcie_rate(card.pcie_gen_max, card.pcie_width_max) for card in rates)
    best = max((*rates.values(), *slots), default=0)
    slow = [card for card, now in rates.items() if now < _DEGRADED_LINK_PART * best]
    if not slow:
        return
    worst = min(slow, key=lambda card: rates[card])
    now = rates[worst]
    # A mean over the GPUs would hide that one of them copies over a slower link.
    copied = {(row.gpu, row.rank): row.of("h2d") // max(row.steps, 1) for row in facts.rows}
    excess = max(
        round(copied.get((card.gpu, card.rank), 0) * (1 - rates[card] / best)) for card in slow
    )
    details = [f"its exposed copies cost {facts.of_step(excess)} more" if excess else ""]
    evidence: Evidence = {
        "pcie_gen": worst.pcie_gen,
        "pcie_gen_max": worst.pcie_gen_max,
        "pcie_width": worst.pcie_width,
        "pcie_width_max": worst.pcie_width_max,
        "gb_s": round(now / GB, 1),
        "best_gb_s": round(best / GB, 1),
    }
    yield facts.finding(
        "pcie-degraded",
        severity_of(facts.share_of(excess)) or "low",
        excess,
        f"{named(slow)} {'have' if len(slow) > 1 else 'has'} a PCIe link of generation "
        f"{worst.pcie_gen} with {worst.pcie_width} lanes under load, {now / GB:.0f} of "
        f"{best / GB:.0f} GB/s",
        "check the card's slot, its riser and the link setting in the firmware; until then, keep "
        "copy-heavy work off it",
        evidence,
        details,
        of=slow,
    )


def memory_imbalance(facts: Facts) -> Iterator[Finding]:
    """NVML: a card uses 25 % and 1 GiB more memory than the others (`low`, or `medium` if it is 90
    % full).

    Wrong if: the frameworks' own counters are equal on all cards.
    """
    used = {
        card: card.memory_used_bytes for card in facts.once(find_card_use) if card.memory_used_bytes
    }
    if len(used) < 2:
        return
    fullest = max(used, key=lambda card: used[card])
    others = float(median([used[card] for card in used if card is not fullest]))
    more = used[fullest] - others
    if used[fullest] < _MORE_MEMORY_RATIO * others or more < _MORE_MEMORY_BYTES:
        return
    full = used[fullest] / fullest.memory_bytes if fullest.memory_bytes else 0.0
    part = f" ({full:.0%} of it)" if full else ""
    advice = _MEMORY_ADVICE.get(facts.framework, "spread the data that only one GPU holds")
    processes = [lane.gpu.process for lane in facts.working]
    if facts.framework == "pytorch" and 1 < len(processes) == len(set(processes)):
        advice = _OF_ONE_RANK
    yield facts.finding(
        "memory-imbalance",
        "medium" if full >= _FULL_MEMORY_PART else "low",
        0,
        f"{named([fullest])} uses {used[fullest] / 2**30:.1f} GiB of memory{part}, the others "
        f"{others / 2**30:.1f} GiB",
        advice,
        {"used_bytes": used[fullest], "others_bytes": round(others), "share": round(full, 4)},
        of=[fullest],
    )


_STANDSTILL_NS: Final = 2_000_000_000
"""Shortest time without any use that is counted: samples are a second apart mostly."""
_UNEVEN_POINTS: Final = 20.0
"""Points of use that a card must have beyond the others."""


def low_utilization(facts: Facts) -> Iterator[Finding]:
    """A log of nvidia-smi alone: by the driver's figure, even the busiest card runs no kernel for 5
    % of the time (`medium`) or 20 % (`high`), or less than that (`info`).

    Cost: that share of the log; the figure counts any kernel, however small, so actual idle time
    may be longer.

    Wrong if: a recording of the run shows kernels at all times.
    """
    used, span = _utilization(facts)
    if not used:
        return
    percent = float(np.mean(list(used.values())))
    idle = round((1 - max(used.values()) / 100) * span)
    times, still = _stands_still(facts)
    text = f"{named(list(used))} {'run' if len(used) > 1 else 'runs'} a kernel {percent:.0f}% of "
    text += f"{format_ns(span)}, by the driver's figure"
    often = f"{times:,} times" if times > 1 else "once"
    stand = f"they stand still {often} for 2 s or more, {format_ns(still)} in all"
    yield facts.finding(
        "low-utilization",
        severity_of(idle / max(span, 1)) or "info",
        idle,
        text,
        "record some steps of the run (gputrace record -- COMMAND) to see what they wait for",
        {"utilization_percent": round(percent, 1), "still": times, "still_ns": still},
        [
            stand if still else "",
            "a log does not say what a GPU waits for, or how well it computes",
        ],
        of=list(used),
    )


def _utilization(facts: Facts) -> tuple[dict[CardUse, float], int]:
    """Return the utilization of each card in percent, and the nanoseconds of the samples."""
    used = {
        c: c.utilization_percent
        for c in facts.once(find_card_use)
        if c.utilization_percent is not None
    }
    return used, int(np.ptp(facts.trace.nvml.samples.time)) if used else 0


def _stands_still(facts: Facts) -> tuple[int, int]:
    """Return how often, and for how many nanoseconds in all, no card was used for some time."""
    samples = facts.trace.nvml.samples
    moments, row = np.unique(samples.time // 10**8, return_inverse=True)
    used = np.zeros(len(moments))
    np.maximum.at(used, row, np.nan_to_num(samples["utilization"], nan=100.0))
    edges = np.flatnonzero(np.diff(np.concatenate([[1], used > 0, [1]])))
    starts, ends = edges[::2], np.minimum(edges[1::2], len(moments) - 1)
    lengths = (moments[ends] - moments[starts]) * 10**8
    lengths = lengths[lengths >= _STANDSTILL_NS]
    return len(lengths), int(lengths.sum())


def uneven_utilization(facts: Facts) -> Iterator[Finding]:
    """A log of nvidia-smi alone: by the driver's figure, a card's utilization is 20 points above
    the others' (`high`).

    Cost: the time that the others are unused meanwhile.

    Wrong if: the cards run separate programs.
    """
    used, span = _utilization(facts)
    if len(used) < 2:
        return
    most = max(used, key=lambda card: used[card])
    others = float(median([used[card] for card in used if card is not most]))
    if used[most] - others < _UNEVEN_POINTS:
        return
    yield facts.finding(
        "uneven-utilization",
        "high",
        round((used[most] - others) / 100 * span),
        f"{named([most])} runs kernels {used[most]:.0f}% of the time, the others {others:.0f}%, "
        "by the driver's figure",
        "DistributedDataParallel instead of DataParallel, or equal shares of work; gputrace "
        "record shows its extra work",
        {"utilization_percent": used[most], "others_percent": round(others, 1)},
        ["the others wait for it, or have less to do"],
        of=[most],
    )


def named(cards: Sequence[CardUse | Gpu]) -> str:
    """Name cards: ``GPUs 0-2``; by rank where cards of several hosts have equal indices."""
    word, numbers = "GPU", sorted({card.gpu for card in cards})
    if len(numbers) < len(cards):
        word, numbers = "rank", sorted({card.rank for card in cards})
    return f"{word}{'s' if len(numbers) > 1 else ''} {format_ranges(numbers)}"
