"""Findings about links between GPUs that are slower than others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.links import Links
from gputrace.analyzers.links.slower import Slower, slower_links
from gputrace.analyzers.results import Evidence, Finding
from gputrace.analyzers.shard import OneGpu
from gputrace.units import format_ns

WORTH: Final = 0.01
"""Part of the time from which a slow link is worth a word."""
_NEAR: Final = (
    "let the GPUs that exchange most be neighbours, by their order in CUDA_VISIBLE_DEVICES; send "
    "less over the slow links (all-reduce within each switch first, bf16 gradients, accumulation)"
)


def topology(facts: Facts) -> Iterator[Finding]:
    """Copies, or the same collectives, take 10 % longer over one sort of link than over a
    better one, three quarters of them on their side of the others' middle, and that costs 1 %
    of the time; or (`low`) communication takes 5 % of the time and other cards of the machine
    are joined by better links.

    Cost: the exposed time of these transfers on the GPU that has most, less what they would
    take over the better link; nothing where it was not measured.
    """
    if facts.links is None or not facts.mean_ns:
        return
    costs = [(_cost(facts, slow), slow) for slow in slower_links(facts.links)]
    cost, slow = max(costs, key=lambda pair: pair[0], default=(0, None))
    if slow is not None and cost >= WORTH * facts.mean_ns:
        yield _slower(facts, facts.links, slow, cost)
    else:
        yield from _could_be_better(facts, facts.links)


def exposed(facts: Facts, links: Links, busy: Mapping[int, Intervals]) -> int:
    """Nanoseconds a step of transfers with no computation beside them, on the GPU with most.

    ``busy`` says when each GPU, by its place among the operations, was in one.
    """
    place = {gpu: index for index, gpu in enumerate(links.gpus)}
    lanes = [lane for lane in facts.working if place[lane.gpu] in busy]
    steps = [facts.time_of(lane) for lane in lanes]
    found = facts.per_gpu.each(_alone, lanes, (busy[place[lane.gpu]] for lane in lanes), steps)
    counts = (max(len(facts.measured_of(lane.gpu)), 1) for lane in lanes)
    return max((ns // count for ns, count in zip(found, counts, strict=True)), default=0)


def _alone(one: OneGpu, busy: Intervals, steps: Intervals) -> int:
    """Nanoseconds of transfers in the steps with no computation beside them."""
    idle = busy.difference(one.lane.timeline.of_class(OperationClass.COMPUTE))
    return idle.intersection(steps).total


def _cost(facts: Facts, slow: Slower) -> int:
    """What the step would be shorter if these transfers took as long as those over the better."""
    if facts.links is None:
        return 0
    return round(exposed(facts, facts.links, slow.busy) * (1 - 1 / slow.ratio))


def _slower(facts: Facts, links: Links, slow: Slower, cost: int) -> Finding:
    share = cost / facts.mean_ns
    rates = ""
    if slow.bandwidth and slow.than_bandwidth:
        rates = f" ({slow.bandwidth / 1e9:.1f} against {slow.than_bandwidth / 1e9:.1f} GB/s)"
    better = links.topology.better_choice(links.gpus)
    gpus = [links.gpus[place] for place, busy in sorted(slow.busy.items()) if len(busy)]
    evidence: dict[str, float | int | str | None] = {
        "share": round(share, 4),
        "link": slow.link,
        "than": slow.than,
        "ratio": round(slow.ratio, 4),
        "bandwidth": slow.bandwidth,
        "than_bandwidth": slow.than_bandwidth,
        "better_choice": None if better is None else ",".join(map(str, better)),
    }
    return Finding(
        "topology",
        severity_of(share) or "low",
        tuple(gpu.gpu for gpu in gpus),
        tuple(sorted({gpu.rank for gpu in gpus})),
        cost,
        f"{slow.what} between GPUs joined by {slow.link} take {slow.ratio:.2f} times as long as "
        f"between those joined by {slow.than}{rates}: crossing {slow.link} costs "
        f"{format_ns(cost)} of {facts.per} ({share:.0%})",
        f"{_choose(better)}; else {_NEAR}" if better is not None else _NEAR,
        evidence,
    )


def _could_be_better(facts: Facts, links: Links) -> Iterator[Finding]:
    """The run communicates, and other cards of the machine are joined better than its own."""
    share = facts.share("communication")
    better = links.topology.better_choice(links.gpus) if share >= MEDIUM else None
    if better is None:
        return
    worst = links.topology.worst(links.gpus)
    best = links.topology.worst_of_cards(links.gpus[0].host, better)
    evidence: Evidence = {
        "share": round(share, 4),
        "link": worst,
        "than": best,
        "better_choice": ",".join(map(str, better)),
    }
    yield facts.finding(
        "topology",
        "low",
        0,
        f"GPUs of this run are joined by {worst}, and {share:.0%} of the time goes to "
        f"communication; GPUs {', '.join(map(str, better))} of this machine are joined by {best}",
        _choose(better),
        evidence,
    )


def _choose(cards: tuple[int, ...]) -> str:
    chosen = ",".join(map(str, cards))
    return f"run on GPUs that are joined better: CUDA_VISIBLE_DEVICES={chosen}"
