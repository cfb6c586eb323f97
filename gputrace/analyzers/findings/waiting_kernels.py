"""Kernels that occupy a GPU without work for it: spins, waits for a flag, a single block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.model.kernels import KernelActivity, KernelUse
from gputrace.model.results import Finding
from gputrace.units import format_ns

_LONG_NS: Final = 500_000
"""Minimum median of a kernel: of shorter ones, most is start and end."""
_WAITING_SHARE: Final = 0.02
"""Share of the time from which such kernels are reported."""
_MOST_NAMED: Final = 3
_MEANING: Final = {
    "waits": "in which next to nothing is computed ({}): a wait (spin), or work on integers and "
    "caches alone",
    "few SMs": "in which most of the GPU is without work ({}): a wait, or too few blocks",
}
"""Descriptions of kernels by `KernelActivity.does`: what is seen, and what it means."""


def work_waiting(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds in which such a kernel is alone on each GPU, with its rank."""
    spent: Counter[tuple[int, int]] = Counter()
    for use, _ in _waiting(facts):
        for on in use.by_gpu:
            spent[on.gpu, on.rank] += on.alone_ns or 0
    return spent


def _waiting(facts: Facts) -> list[tuple[KernelUse, KernelActivity]]:
    """Return these kernels, most time alone first; waiting in collectives is told elsewhere."""
    uses = [
        (use, use.activity)
        for use in (facts.kernels.top if facts.kernels is not None else ())
        if use.activity is not None and use.activity.does in _MEANING
        if use.median_ns >= _LONG_NS and use.family != "communication"
    ]
    return sorted(uses, key=lambda pair: -_alone(pair[0]))


def _alone(use: KernelUse) -> int:
    return sum(on.alone_ns or 0 for on in use.by_gpu)


def kernel_waits(facts: Facts) -> Iterator[Finding]:
    """For 2 % of the time only kernels of 0.5 ms and longer (median) run that wait, by the card's
    counters: arithmetic on floats is at most 2 % of the activity of their SMs, and memory traffic
    2 % of the bandwidth; or they leave 95 % of the SMs without work. Each within three standard
    errors, and with less than 1 GB/s over NVLink and PCIe. Nothing is said without counters, and of
    communication.

    Cost: the time in which such a kernel runs and nothing else.

    Wrong if: the step is no shorter without the kernel, or its integer arithmetic is the work.
    """
    waiting, kernels = _waiting(facts), facts.kernels
    spent = sum(_alone(use) for use, _ in waiting)
    if kernels is None or not waiting or spent < _WAITING_SHARE * kernels.total_ns:
        return
    steps, share = kernels.steps or facts.turns, spent / max(kernels.total_ns, 1)
    details: list[str] = []
    for does in dict.fromkeys(activity.does or "" for _, activity in waiting):
        alike = [(use, activity) for use, activity in waiting if activity.does == does]
        names = ", ".join(dict.fromkeys(use.short for use, _ in alike[:_MOST_NAMED]))
        time = format_ns(sum(_alone(use) for use, _ in alike) // steps)
        meaning = _MEANING[does].format(alike[0][1].text)
        details.append(f"{time} of it goes to {names} alone, {meaning}")
    activity = waiting[0][1]
    yield facts.finding(
        "kernel-waits",
        severity_of(share) or "low",
        spent // steps,
        f"kernels that wait, or leave most of the GPU idle, take {facts.of_step(spent // steps)}",
        "find what it waits for: a flag of another kernel, rank or the host, or a delay; end the "
        "kernel instead, or let other work run beside it (streams); a single block: spread its "
        "work over more",
        {
            "share": round(share, 4),
            "alone_ns": spent // steps,
            "kernels": len(waiting),
            "sms": activity.sms,
            "arithmetic": activity.arithmetic,
            "memory": activity.memory,
        },
        details,
    )
