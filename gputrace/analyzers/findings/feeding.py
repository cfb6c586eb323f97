"""Why batches are late: clauses, advice and evidence for the finding about data feeding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from gputrace.analyzers.findings.context import Facts
from gputrace.model.loader import COLLATING, READING, SENDING, Loader
from gputrace.model.results import Evidence, Finding
from gputrace.units import format_count, format_ns

_DOMINATES: Final = 0.4
"""Share of the workers' time from which a part is named."""
_OF_THE_WAIT: Final = 0.5
"""Share of the wait from which receiving is named."""
_ADVICE: Final = {
    READING: "read less often or ahead of time: larger files read in order, a local disk, a cache "
    "in memory, formats that need no parsing",
    COLLATING: "make batches in fewer steps: samples of one shape, arrays that torch.stack joins, "
    "a collate_fn without loops over fields",
    SENDING: "return tensors instead of Python objects: they go through shared memory and are not "
    "pickled",
}


def explained(facts: Facts, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings with what makes batches late, where the loader's workers tell."""
    for finding in findings:
        why = why_late(facts)
        if why is None:
            yield finding
            continue
        clause, cure, evidence = why
        yield replace(
            finding,
            message=f"{finding.message}; {clause}",
            advice=cure or finding.advice,
            evidence={**finding.evidence, **evidence},
        )


def why_late(facts: Facts) -> tuple[str, str, Evidence] | None:
    """Return a clause on what makes batches late, advice, and evidence; None where unknown.

    It is of the loader that its rank waits for most.
    """
    loader = max(facts.loaders, key=lambda loader: loader.wait_ns, default=None)
    if loader is None:
        return None
    told = list(_reasons(loader, "the GPU" if facts.per_gpu.operations else "the program"))
    if not told:
        return None
    clauses, cures = zip(*told, strict=True)
    evidence: dict[str, float | int | str | None] = {
        "workers": loader.workers,
        "batch_ns": loader.batch_ns,
        "longest_part": loader.parts[0].name,
        "longest_part_share": loader.parts[0].share,
    }
    if loader.better is not None:
        evidence |= {"better_workers": loader.better.workers}
    if loader.slow is not None:
        worker, ratio = loader.slow
        evidence |= {"slow_worker": worker.worker, "slow_ratio": round(ratio, 2)}
    return "; ".join(clauses), "; ".join(cure for cure in cures if cure), evidence


def _reasons(loader: Loader, who: str) -> Iterator[tuple[str, str]]:
    slow = loader.slow
    if slow is not None:
        worker, ratio = slow
        yield (
            f"one worker of {loader.workers} (worker {worker.worker}) takes {ratio:.1f} times as "
            "long as the others",
            "batches are taken in order, so all wait for the slow worker: look at what it loads, "
            "and give all workers samples of equal cost",
        )
    else:
        yield from _on_workers(loader, who)
    if loader.sending >= _DOMINATES:
        yield f"pickling and sending take {loader.sending:.0%} of a batch", _ADVICE[SENDING]
    first = loader.parts[0]
    if first.share < _DOMINATES or first.name == SENDING:
        return
    what = {READING: "reading samples", COLLATING: "collating"}
    name = what.get(first.name, first.name.removeprefix("transform "))
    whose = "the workers' time" if loader.workers else "the loader's time"
    clause = f"{name} is {first.share:.0%} of {whose}"
    cure = _ADVICE.get(first.name)
    if cure is None:
        cure = f"make {name} cheaper, or do it once and keep the result"
        if loader.half_step_ns is not None and not loader.workers:
            cure += f" (a step of {format_ns(loader.half_step_ns)} if it took half as long)"
    yield clause, cure


def _on_workers(loader: Loader, who: str) -> Iterator[tuple[str, str]]:
    """Yield how many workers would keep up, or how far more of them get."""
    now = f"with {loader.workers} {who} still waits {format_ns(loader.wait_ns)} a step"
    choice, present = loader.better, loader.now
    if choice is not None:
        workers = format_count(choice.workers, "worker")
        would = "keep up"
        if not loader.keeps_up(choice):
            would = f"leave a wait of {format_ns(choice.wait_ns)} a step"
        yield f"{workers} would {would}; {now}", f"num_workers={choice.workers}"
    elif present is not None and not loader.keeps_up(present):
        yield "more workers would gain next to nothing", ""
    if loader.receiving_ns >= _OF_THE_WAIT * loader.wait_ns:
        yield (
            f"receiving a batch takes {format_ns(loader.receiving_ns)} a step",
            "pin_memory=True has a thread of its own receive",
        )
