"""Finding on steps that become longer over the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from gputrace.analyzers.findings.context import Facts, severity_of
from gputrace.analyzers.steps.drift import Drift, find_drift
from gputrace.model.results import Finding, Step
from gputrace.model.time_class import CLASSES, IDLE_CAUSES, TIME_CLASSES
from gputrace.units import format_ns

_ACTIVITIES: Final = {
    **{row.id: row.activity for row in TIME_CLASSES},
    "host_data": "waiting for data",
    "host": "other host time",
}
_ADVICE: Final = {
    "grow": "look for what the program keeps from step to step: losses that hold their graph "
    "(keep loss.item()), lists, hooks or callbacks added again, a history that is searched; "
    "compare an early step with a late one (--steps)",
    "jump": "check what changed at that step: longer inputs, a larger batch, clocks and heat, "
    "another program on the machine, a cache that no longer fits; compare steps before and after "
    "it (--steps)",
}


def steps_grow(facts: Facts) -> Iterator[Finding]:
    """Forty or more steps grow by 15 % over the run, or take so much longer from one step on, three
    times as much as they scatter. The message names the class that grew most.

    Cost: the time that they take longer than at the begin, or before that step, on average, less
    the part in which their GPUs idle, which is charged to what keeps them idle.

    Wrong if: steps recorded late in another run are as long as early ones.
    """
    found = {rank: drift for rank in facts.ranks if (drift := _drift_of(facts, rank)) is not None}
    if not found:
        return
    rank, drift = max(found.items(), key=lambda item: item[1].to_ns - item[1].from_ns)
    longer = min(facts.mean_ns, drift.to_ns) - drift.from_ns
    severity = severity_of(facts.share_of(longer))
    if severity is None:
        return
    # While its GPU idles, that is charged to what keeps it idle.
    own = sum(ns for name, ns in drift.grew if name not in IDLE_CAUSES)
    cost = round(longer * own / max(sum(ns for _, ns in drift.grew), 1))
    severity = severity_of(facts.share_of(cost)) or "low"
    start, end, count = format_ns(drift.from_ns), format_ns(drift.to_ns), len(_steps(facts, rank))
    message = f"steps grow from {start} to {end} over {count} steps"
    if drift.shape == "jump":
        message = f"steps take {end} instead of {start} from step {drift.since} on"
    if drift.grew:
        name, longer = drift.grew[0]
        message += f"; what grew most is {_ACTIVITIES[name]} ({format_ns(longer)})"
    evidence = {"from_ns": drift.from_ns, "to_ns": drift.to_ns, "since": drift.since}
    evidence |= {f"{name}_ns": ns for name, ns in drift.grew}
    yield facts.finding("steps-grow", severity, cost, message, _ADVICE[drift.shape], evidence)


def longer_ns(facts: Facts, rank: int) -> int:
    """Return by how many nanoseconds the mean step of a rank is longer than its first ones."""
    drift = _drift_of(facts, rank)
    return 0 if drift is None else max(facts.mean_ns - drift.from_ns, 0)


def _drift_of(facts: Facts, rank: int) -> Drift | None:
    """Return how the steps of a rank become longer; None if they do not, or come in two sizes."""
    steps = _steps(facts, rank)
    parts = {name: [getattr(step, f"{name}_ns") for step in steps] for name in CLASSES}
    lengths = [step.end_ns - step.start_ns for step in steps]
    waits = [step.host_data_ns or 0 for step in steps]
    if steps and steps[0].gpu is None:
        host = [length - wait for length, wait in zip(lengths, waits, strict=True)]
        parts = {"host_data": waits, "host": host}
    drift = find_drift(lengths, {name: ns for name, ns in parts.items() if None not in ns})
    if drift is None or drift.shape not in _ADVICE:
        return None
    return drift if drift.shape == "grow" else replace(drift, since=steps[drift.since].step)


def _steps(facts: Facts, rank: int) -> Sequence[Step]:
    """Return the steady steps of a rank's first GPU, with calls or without."""
    mine = [step for step in facts.timed if step.rank == rank]
    return [step for step in mine if step.gpu == mine[0].gpu]
