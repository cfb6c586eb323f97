"""GPUs beside each other: pairs and their links, single cards, and how placements load them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gputrace.bench.answer import Card, GpuShare, PairOfGpus, Placement
from gputrace.bench.groups import VISIBLE, Group, mean_classes, mean_ns, spread, told
from gputrace.bench.results import GpuMeasure, LinkMeasure, Measure


def find_pairs(groups: Sequence[Group]) -> tuple[PairOfGpus, ...]:
    """Runs on two named GPUs, where several pairs were tried; the quickest first."""
    rows = [_pair(group) for group in _on(groups, 2)]
    return tuple(sorted(rows, key=lambda row: -(row.rate or 0.0)))


def _on(groups: Sequence[Group], count: int) -> list[Group]:
    """Configurations that are done and name so many cards; none where all name the same."""
    own = [g for g in groups if g.done and len(g.settings.get(VISIBLE) or ()) == count]
    return own if len({tuple(g.settings[VISIBLE]) for g in own}) > 1 else []


def _pair(group: Group) -> PairOfGpus:
    links = [link for one in group.measures for link in one.links]
    classes = mean_classes(group.measures)
    return PairOfGpus(
        label=group.label,
        gpus=tuple(group.settings[VISIBLE]),
        link=_link(links),
        bandwidth=_bandwidth(links, group.measures),
        step_ns=mean_ns(group.measures, lambda one: one.step_ns),
        communication_ns=None if classes is None else classes["communication"],
        rate=rate(group),
    )


def _link(links: Sequence[LinkMeasure]) -> str:
    """Its kind; a run on two cards has one link."""
    return next((link.link for link in links if link.link), "")


def _bandwidth(links: Sequence[LinkMeasure], measures: Sequence[Measure]) -> int | None:
    """Of straight copies; of collectives where nothing is copied straight, as NCCL does."""
    known = [link.bandwidth for link in links if link.bandwidth is not None]
    known = known or [one.bus_bandwidth for one in measures if one.bus_bandwidth is not None]
    return round(median(known)) if known else None


def rate(group: Group) -> float | None:
    """Samples a second: the median of the repeats."""
    own = spread(told(group.timed, "samples_per_second"))
    return None if own is None else own.median


def find_cards(groups: Sequence[Group]) -> tuple[Card, ...]:
    """Runs on one named GPU, where several were tried, each beside the median of all."""
    own = _on(groups, 1)
    rates = [known for group in own if (known := rate(group)) is not None]
    middle = median(rates) if rates else None
    return tuple(_card(group, middle) for group in own)


def _card(group: Group, middle: float | None) -> Card:
    own = rate(group)
    seen = [gpu for one in group.measures for gpu in one.gpus]
    clocks = [gpu.sm_clock_mhz for gpu in seen if gpu.sm_clock_mhz is not None]
    return Card(
        label=group.label,
        gpus=tuple(group.settings[VISIBLE]),
        name=seen[0].name if seen else "",
        sm_clock_mhz=median(clocks) if clocks else None,
        sm_clock_max_mhz=seen[0].sm_clock_max_mhz if seen else None,
        step_ns=mean_ns(group.measures, lambda one: one.step_ns),
        rate=own,
        beside=own / middle if own is not None and middle else None,
    )


def find_placements(groups: Sequence[Group]) -> tuple[Placement, ...]:
    """What each GPU has to do, where several placements on several GPUs were tried."""
    done = [group for group in groups if group.done]
    if len({group.settings.get("update") for group in done}) < 2:
        return ()
    own = [(group, _shares(group)) for group in done if group.gpus > 1]
    return tuple(Placement(g.label, shares, skew(shares)) for g, shares in own if shares)


def _shares(group: Group) -> tuple[GpuShare, ...]:
    """Each GPU's mean over the repeats, and the most memory of any."""
    seen: dict[tuple[int, int], list[GpuMeasure]] = {}
    for one in group.measures:
        for gpu in one.gpus:
            seen.setdefault((gpu.gpu, gpu.rank), []).append(gpu)
    return tuple(
        GpuShare(
            gpu=number,
            rank=rank,
            compute_ns=round(sum(one.compute_ns for one in rows) / len(rows)),
            memory_bytes=max((r.memory_bytes for r in rows if r.memory_bytes), default=None),
        )
        for (number, rank), rows in sorted(seen.items())
    )


def skew(shares: Sequence[GpuShare]) -> float | None:
    """Compute time of the first GPU for each of the others' mean; None without others."""
    first, *others = (share.compute_ns for share in shares)
    mean = sum(others) / len(others) if others else 0
    return first / mean if mean else None
