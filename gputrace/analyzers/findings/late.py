"""Findings about ranks that come late to the collectives, so that the others wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.findings.clocks import lower_clock
from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.findings.idle import how_to_feed_faster
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.kernel_ratios import KernelRatio
from gputrace.analyzers.late.ranks import Late
from gputrace.analyzers.medians import of_others
from gputrace.analyzers.results import Evidence, Finding
from gputrace.units import format_ns, format_ranges

Reason = Callable[[Facts, Late], str | None]
"""Says why the kernels of a late GPU are slow, as the rest of a sentence; None if it cannot."""

REASONS: Final[tuple[Reason, ...]] = (
    lambda facts, late: lower_clock(facts, late.lane.gpu.gpu, late.lane.gpu.rank),
)
"""The first that knows is told with a straggler."""

_SLOWER: Final = 1.03
"""Kernels that take so many times as long as the others' are slower."""
_PART: Final = 0.25
"""Of what a late GPU has most more of, so much of another class is told too."""

_SHOWN: Final = 6
"""So many steps at most are named."""

_SHARE_WORK: Final = (
    "share the work equally: the same batch size and shapes on every rank, nothing that one rank "
    "alone computes"
)
_IDLE: Final = {
    "data_feeding": "waits {} longer for its next batch",
    "launch": "waits {} longer for its host to launch work",
    "sync": "idles {} longer while its host is in a synchronising call",
    "alloc": "waits {} longer in cudaMalloc and cudaFree",
    "recorder": "waits {} longer for the recorder",
    "other_idle": "runs nothing for {} longer, and the trace does not show why",
}
_WORK: Final = {
    "compute": "computes {} longer",
    "h2d": "copies from the host for {} longer",
    "other_copy": "copies for {} longer",
    "memset": "sets memory for {} longer",
}
_HOST_ADVICE: Final = {
    "launch": "look at what this rank's host does that the others do not: logging, writing files, "
    "loading, garbage collection, other programs on its cores (pin ranks to cores of their own)",
    "sync": "look for a .item(), a .cpu() or a print that this rank alone makes",
    "alloc": "keep this rank's memory allocated: equal shapes every step",
    "recorder": "record less on this rank",
    "other_idle": "look at events and streams that this rank's work waits for",
}


@dataclass(frozen=True, slots=True)
class _Kernels:
    """A late GPU's kernels beside the others', in the steps in which it is late."""

    ratio: float | None
    """How many times as long they take as the middle one of the others; None if not comparable."""
    extra_ns: int
    """Time of a step in kernels that the others do not run, or not as often."""


_NOT_COMPARED: Final = _Kernels(None, 0)


def straggler(facts: Facts) -> Iterator[Finding]:
    """Others wait at collectives for a GPU that works longer: its kernels are slower (says how
    much), or it has more of them; `low` where slower hosts hide 5 % of a step of more work.

    Cost: what another GPU loses by waiting for it.
    """
    for late in facts.late:
        kernels = _kernels(facts, late)
        if _works_longer(late, kernels):
            yield _straggler(facts, late, kernels)
    yield from _hidden_work(facts)


def late_host(facts: Facts) -> Iterator[Finding]:
    """Others wait for a GPU whose kernels are as fast as theirs: its host comes late; says
    which idle time it has more of.

    Cost: what another GPU loses by waiting for it.
    """
    for late in facts.late:
        kernels = _kernels(facts, late)
        if not _works_longer(late, kernels):
            yield _late_host(facts, late, kernels)


def _hidden_work(facts: Facts) -> Iterator[Finding]:
    """A rank that computes what the others do not, and costs little as long as hosts are slower."""
    if facts.lateness is None:
        return
    told = {late.lane.gpu for late in facts.late}
    beside = _beside(facts.ratios)
    for lane, caused in zip(facts.lateness.lanes, facts.lateness.caused, strict=True):
        extra = beside.get(lane.gpu, _NOT_COMPARED).extra_ns
        if lane.gpu in told or extra < MEDIUM * facts.mean_ns:
            continue
        lost, share = int(caused.mean()), extra / max(facts.mean_ns, 1)
        yield Finding(
            "straggler",
            "low",
            (lane.gpu.gpu,),
            (lane.gpu.rank,),
            lost,
            f"{_who(facts, lane.gpu)} runs {format_ns(extra)} of kernels in {facts.per} "
            f"({share:.0%}) that the others do not; slower hosts hide it: they lose "
            f"{format_ns(lost)} to it",
            _SHARE_WORK,
            {"extra_kernels_ns": extra, "share": round(share, 4), "pattern": "constant"},
        )


def _straggler(facts: Facts, late: Late, kernels: _Kernels) -> Finding:
    """Its kernels are slower, or it has more of them."""
    slower = kernels.ratio is not None and kernels.ratio >= _SLOWER
    extra = kernels.extra_ns > _PART * max(late.more["compute"], late.cost_ns)
    told = [f"its kernels take {kernels.ratio:.2f} times as long as theirs"] if slower else []
    told += (
        [f"it runs {format_ns(kernels.extra_ns)} of kernels a step that they do not"]
        if extra
        else []
    )
    why = next(filter(None, (reason(facts, late) for reason in REASONS)), None)
    told += [why] if why and slower else []
    told += [] if told else ["it " + _more(late, _WORK)]
    advice = (
        "compare its clocks, temperature, power and other programs on it with the others'"
        if slower and not extra
        else _SHARE_WORK
    )
    return _finding(facts, "straggler", late, kernels, ", and ".join(told), advice)


def _late_host(facts: Facts, late: Late, kernels: _Kernels) -> Finding:
    """Its kernels are as fast as the others': its host comes late."""
    equal = kernels.ratio is not None and kernels.ratio < _SLOWER
    told = "its kernels are as fast as theirs, and its GPU " if equal else "its GPU "
    told += _more(late, _IDLE)
    advice = _HOST_ADVICE.get(late.cause) or how_to_feed_faster(facts)
    place = facts.place_of(late.lane, late.cause, late.steps)
    where: dict[str, float | int | str | None] = {}
    if place is not None:
        where = {"line": place.line, "line_share": round(place.share, 4)}
        told += f"; its host is at {place.line} in {place.share:.0%} of the samples"
    return _finding(facts, "late-host", late, kernels, told, advice, where)


def _works_longer(late: Late, kernels: _Kernels) -> bool:
    """Whether work is what makes a GPU late: its own, or that its host must launch more."""
    return late.by_work or 2 * kernels.extra_ns > late.cost_ns


def _kernels(facts: Facts, late: Late) -> _Kernels:
    return _beside(facts.ratios_in(late.steps)).get(late.lane.gpu, _NOT_COMPARED)


def _beside(ratios: Sequence[KernelRatio]) -> dict[Gpu, _Kernels]:
    """Each GPU beside the others."""
    if len(ratios) < 2:
        return {}
    usual = of_others(np.array([(one.ratio, one.own_ns) for one in ratios]))
    return {
        one.gpu: _Kernels(one.ratio / speed, max(one.own_ns - int(alone), 0))
        for one, (speed, alone) in zip(ratios, usual.tolist(), strict=True)
    }


def _more(late: Late, words: dict[str, str]) -> str:
    """What a GPU has more of than the others, the most first."""
    most = max(late.more[name] for name in words)
    names = sorted(words, key=lambda name: -late.more[name])
    told = [words[name] for name in names if late.more[name] >= max(_PART * most, 1)]
    lengths = [format_ns(late.more[name]) for name in names]
    return " and ".join(text.format(ns) for text, ns in zip(told, lengths, strict=False))


def _finding(
    facts: Facts,
    id: str,
    late: Late,
    kernels: _Kernels,
    told: str,
    advice: str,
    more: Evidence | None = None,
) -> Finding:
    gpu, share = late.lane.gpu, late.cost_ns / max(facts.mean_ns, 1)
    evidence = {
        "pattern": late.pattern,
        "steps": len(late.steps),
        "first_step": late.steps[0],
        "last_share": round(late.last, 4),
        "share": round(share, 4),
        "kernel_ratio": None if kernels.ratio is None else round(kernels.ratio, 4),
        "extra_kernels_ns": kernels.extra_ns,
        "cause": late.cause,
        **{f"more_{name}_ns": ns for name, ns in late.more.items()},
        **(more or {}),
    }
    message = (
        f"{_others(facts)} {format_ns(late.cost_ns)} of {facts.per} ({share:.0%}) to "
        f"{_who(facts, gpu)}{_when(late)}, the last at {late.last:.0%} of the collectives: {told}"
    )
    severity = severity_of(share) or "low"
    return Finding(id, severity, (gpu.gpu,), (gpu.rank,), late.cost_ns, message, advice, evidence)


def _who(facts: Facts, gpu: Gpu) -> str:
    """``rank 3``; the GPU where one rank has several."""
    alone = sum(lane.gpu.rank == gpu.rank for lane in facts.per_gpu.lanes) == 1
    return f"rank {gpu.rank}" if alone else f"gpu {gpu.gpu} of rank {gpu.rank}"


def _others(facts: Facts) -> str:
    several = facts.lateness is not None and len(facts.lateness.lanes) > 2
    return "the other GPUs lose" if several else "the other GPU loses"


def _when(late: Late) -> str:
    """In which steps; nothing where it is in all."""
    if late.pattern == "constant":
        return ""
    if late.pattern == "one-step":
        return f" in step {late.steps[0]} alone"
    shown = format_ranges(late.steps[:_SHOWN]) + (", …" if len(late.steps) > _SHOWN else "")
    return f" in steps {shown}"
