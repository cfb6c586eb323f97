"""The finding about work that one GPU of a run has and the others have not."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.findings.late import straggler
from gputrace.analyzers.results import Evidence, Finding
from gputrace.analyzers.results.balance import Load
from gputrace.units import format_ns, format_share

_WAITED: Final = 0.01
"""Part of a step that the others must lose for the finding to be made whatever the work is."""
_OF_THE_WORK: Final = 0.05
_OF_THE_STEP: Final = 0.0005
"""Else the parts of the GPU's own work, and of a step, that the extra work must be."""
_TOLD: Final = 0.1
"""Part of the extra work from which one sort of it is named."""

_NAMES: Final = {
    "kernels": "kernels",
    "h2d": "input copies",
    "d2h": "copies to the host",
    "d2d": "copies within its memory",
    "peer": "copies from and to other GPUs",
}
_ONE_PROCESS: Final = {
    "pytorch": "one process for each GPU: DistributedDataParallel in place of DataParallel; until "
    "then, compute the loss inside the module, on each GPU, so that no output is gathered",
    "tensorflow": "reduce between the GPUs: MirroredStrategy with NcclAllReduce in place of a "
    "parameter server on one GPU (variable_update=replicated in tf_cnn_benchmarks)",
    "mxnet": "reduce between the GPUs: kvstore='nccl', or Horovod, in place of 'device', and "
    "split each batch to all GPUs straight from the host (gluon.utils.split_and_load)",
    "chainer": "MultiprocessParallelUpdater or ChainerMN in place of ParallelUpdater",
    "jax": "shard the batch straight from the host (jax.device_put with a NamedSharding), and let "
    "the compiled step reduce",
}
_ONE_PROCESS_ELSE: Final = (
    "give each GPU its own part of the batch straight from the host, compute the loss there, and "
    "all-reduce the gradients"
)
_SEVERAL: Final = (
    "let all ranks do a part of what rank {rank} does alone (metrics, validation, logging), or do "
    "it less often"
)


def gpu0_skew(facts: Facts) -> Iterator[Finding]:
    """One GPU, the first or another, has kernels or copies that no other has: the others wait
    1 % of the time for it; or (`low`) it is 5 % of that GPU's work and 0.05 % of the time.

    Cost: the part of that work during which no other GPU works.
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
    """Nanoseconds of copies between GPUs a step that the finding tells of."""
    found = next(gpu0_skew(facts), None)
    if found is None:
        return 0
    peer = float(found.evidence.get("extra_peer_ns") or 0)
    return round(found.impact_ns * peer / max(float(found.evidence["extra_ns"] or 0), 1))


def _is_straggler(facts: Facts, load: Load) -> bool:
    """Whether all that the GPU has more of is kernels, and it is told of as the rank that has."""
    if any(ns for name, ns in load.extra_ns.items() if name != "kernels"):
        return False
    return any(load.rank in found.ranks for found in straggler(facts))


def _stands_out(facts: Facts, load: Load, extra: int) -> bool:
    """Whether the work is much beside all that the GPU does, though nobody waits for it yet."""
    own = load.kernel_ns + sum(
        getattr(load, f"{name}_ns") for name in ("h2d", "d2h", "d2d", "peer")
    )
    much = extra * load.turns >= _OF_THE_WORK * own
    return much and extra >= _OF_THE_STEP * facts.mean_ns


def _label(facts: Facts, load: Load) -> str:
    known = {(row.gpu, row.rank): row.gpu_known for row in facts.breakdown}
    word = "gpu" if known[load.gpu, load.rank] else "device"
    several = len({other.rank for other in facts.balance}) > 1
    return f"{word} {load.gpu}" + (f" (rank {load.rank})" if several else "")


def _parts(facts: Facts, load: Load) -> str:
    """``input copies (2.83 ms against 7.4 us), kernels (1.2 ms against 0 ns)``, most first."""
    staged = facts.links is not None and len(facts.links.staged) > 0
    names = _NAMES | ({"h2d": "copies from the host"} if staged else {})
    loads = facts.balance
    least = _TOLD * sum(load.extra_ns.values())
    told = sorted(load.extra_ns.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{names[name]} ({format_ns(_each(load, name))} against "
        f"{format_ns(_others(load, loads, name))})"
        for name, ns in told
        if ns >= least
    )


def _each(load: Load, name: str) -> float:
    """Nanoseconds a step of a sort of work."""
    ns: int = load.kernel_ns if name == "kernels" else getattr(load, f"{name}_ns")
    return ns / load.turns


def _others(load: Load, loads: tuple[Load, ...], name: str) -> float:
    """The middle of the other GPUs' nanoseconds a step."""
    return median(_each(other, name) for other in loads if other is not load)


def _advice(facts: Facts, load: Load) -> str:
    if len({other.rank for other in facts.balance}) > 1:
        return _SEVERAL.format(rank=load.rank)
    return _ONE_PROCESS.get(facts.framework, _ONE_PROCESS_ELSE)


def _evidence(load: Load, loads: tuple[Load, ...], extra: int, share: float) -> Evidence:
    others = [other for other in loads if other is not load]
    found: dict[str, float | int | str | None] = {
        "share": round(share, 6),
        "extra_ns": extra,
        "h2d_run_ns": load.h2d_run_ns,
        "others_h2d_run_ns": round(median(other.h2d_run_ns for other in others)),
    }
    for name, ns in load.extra_ns.items():
        if ns:
            found[f"extra_{name}_ns"] = ns // load.turns
            found[f"{name}_ns"] = round(_each(load, name))
            found[f"others_{name}_ns"] = round(_others(load, loads, name))
    if load.memory_bytes is not None:
        known = [other.memory_bytes for other in others if other.memory_bytes is not None]
        found["memory_bytes"] = load.memory_bytes
        found["others_memory_bytes"] = round(median(known)) if known else None
    return found
