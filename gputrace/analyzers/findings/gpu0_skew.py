"""The finding that one GPU has more to do than the others, as GPU 0 under DataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from gputrace.analyzers.findings.context import Facts, severity_of
from gputrace.analyzers.findings.idle import ONE_PROCESS, ONE_PROCESS_ELSE
from gputrace.analyzers.findings.stragglers import straggler
from gputrace.model.results import Evidence, Finding, Load
from gputrace.units import format_ns, format_share

_WAITED: Final = 0.01
"""Share of a step that the others must lose for a finding whatever the work is."""
_OF_THE_WORK: Final = 0.05
_OF_THE_STEP: Final = 0.0005
"""Else the shares of the GPU's own work, and of a step, that the extra work must be."""
_TOLD: Final = 0.1
"""Share of the extra work from which one kind of it is named."""

_NAMES: Final = {
    "kernels": "kernels",
    "h2d": "input copies",
    "d2h": "copies to the host",
    "d2d": "copies within its memory",
    "peer": "copies from and to other GPUs",
}
_SEVERAL: Final = (
    "let all ranks do a part of what rank {rank} does alone (metrics, validation, logging), or do "
    "it less often"
)


def gpu0_skew(facts: Facts) -> Iterator[Finding]:
    """One GPU, the first or another, has kernels or copies that no other has: the others wait 1 %
    of the time for it; or (`low`) that work is 5 % of the GPU's own and 0.05 % of the time.

    Cost: the part of that work during which no other GPU works.

    Wrong if: the other GPUs take as long per step without that work.
    """
    loads = [load for load in facts.balance if sum(load.extra_ns.values())]
    if not loads or not facts.mean_ns:
        return
    load = max(loads, key=lambda load: (load.alone_ns, sum(load.extra_ns.values())))
    extra, cost = sum(load.extra_ns.values()) // load.turns, load.alone_ns // load.turns
    share = cost / facts.mean_ns
    if share < _WAITED and not _stands_out(facts, load, extra):
        return
    if _is_straggler(facts, load):
        return
    where = _label(facts, load)
    yield Finding(
        "gpu0-skew",
        severity_of(share) or "low",
        (load.gpu,),
        (load.rank,),
        cost,
        f"{where} has work that no other GPU has, {format_ns(extra)} of {facts.per}: "
        f"{_parts(facts, load)}; the others wait {format_ns(cost)} "
        f"({format_share(cost, facts.mean_ns)}) meanwhile",
        _advice(facts, load),
        _evidence(load, facts.balance, extra, share),
    )


def told_by_skew(facts: Facts) -> int:
    """Return the nanoseconds per step of copies between GPUs that the finding covers."""
    finding = next(gpu0_skew(facts), None)
    if finding is None:
        return 0
    peer = float(finding.evidence.get("extra_peer_ns") or 0)
    return round(finding.impact_ns * peer / max(float(finding.evidence["extra_ns"] or 0), 1))


def _is_straggler(facts: Facts, load: Load) -> bool:
    """Return whether the extra work is kernels alone, and `straggler` reports the rank for it."""
    if any(ns for name, ns in load.extra_ns.items() if name != "kernels"):
        return False
    return any(load.rank in finding.ranks for finding in straggler(facts))


def _stands_out(facts: Facts, load: Load, extra: int) -> bool:
    """Return whether the extra work is much of all that the GPU does, even if nobody waits yet."""
    work = load.kernel_ns + sum(
        getattr(load, f"{name}_ns") for name in ("h2d", "d2h", "d2d", "peer")
    )
    much = extra * load.turns >= _OF_THE_WORK * work
    return much and extra >= _OF_THE_STEP * facts.mean_ns


def _label(facts: Facts, load: Load) -> str:
    known = {(row.gpu, row.rank): row.gpu_known for row in facts.breakdown}
    word = "gpu" if known[load.gpu, load.rank] else "device"
    several = len({other.rank for other in facts.balance}) > 1
    return f"{word} {load.gpu}" + (f" (rank {load.rank})" if several else "")


def _parts(facts: Facts, load: Load) -> str:
    """List the kinds of extra work, most first: ``input copies (2.83 ms against 7.4 µs), kernels
    (1.2 ms against 0 ns)``.
    """
    staged = facts.links is not None and len(facts.links.staged) > 0
    names = _NAMES | ({"h2d": "copies from the host"} if staged else {})
    loads = facts.balance
    least = _TOLD * sum(load.extra_ns.values())
    kinds = sorted(load.extra_ns.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{names[name]} ({format_ns(_each(load, name))} against "
        f"{format_ns(_others(load, loads, name))})"
        for name, ns in kinds
        if ns >= least
    )


def _each(load: Load, name: str) -> float:
    """Return the nanoseconds per step of a kind of work."""
    ns: int = load.kernel_ns if name == "kernels" else getattr(load, f"{name}_ns")
    return ns / load.turns


def _others(load: Load, loads: tuple[Load, ...], name: str) -> float:
    """Return the median of the other GPUs' nanoseconds per step."""
    return median(_each(other, name) for other in loads if other is not load)


def _advice(facts: Facts, load: Load) -> str:
    if len({other.rank for other in facts.balance}) > 1:
        return _SEVERAL.format(rank=load.rank)
    return ONE_PROCESS.get(facts.framework, ONE_PROCESS_ELSE)


def _evidence(load: Load, loads: tuple[Load, ...], extra: int, share: float) -> Evidence:
    others = [other for other in loads if other is not load]
    evidence: dict[str, float | int | str | None] = {
        "share": round(share, 6),
        "extra_ns": extra,
        "h2d_run_ns": load.h2d_run_ns,
        "others_h2d_run_ns": round(median(other.h2d_run_ns for other in others)),
    }
    for name, ns in load.extra_ns.items():
        if ns:
            evidence[f"extra_{name}_ns"] = ns // load.turns
            evidence[f"{name}_ns"] = round(_each(load, name))
            evidence[f"others_{name}_ns"] = round(_others(load, loads, name))
    if load.memory_bytes is not None:
        known = [other.memory_bytes for other in others if other.memory_bytes is not None]
        evidence["memory_bytes"] = load.memory_bytes
        evidence["others_memory_bytes"] = round(median(known)) if known else None
    return evidence
