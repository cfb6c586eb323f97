"""Finding on reinforcement learning: what updates wait for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Final

import numpy as np

from gputrace.analyzers.findings.facts import HIGH, Facts
from gputrace.analyzers.ledger.causes import Host
from gputrace.analyzers.step_phases import read_phases
from gputrace.analyzers.steps.rollouts import read_named_ranges
from gputrace.model.host import (
    BACKWARD,
    CLIPPING,
    FORWARD,
    OPTIMIZER,
    PHASES,
    REFERENCE,
    REWARD,
    ROLLOUT,
    UNSCALING,
    UPDATE,
    WEIGHT_SYNC,
    StepPhase,
    StepPhases,
)
from gputrace.model.intervals import EMPTY, Intervals, merge_touching
from gputrace.model.results import Finding
from gputrace.units import format_ns

_FASTER: Final = {
    ROLLOUT: "generate with an engine made for it (vLLM, SGLang), in larger batches, "
    "and without the slowest few answers; or roll out while the last batch is learned from",
    REWARD: "score answers in parallel, in processes of their own, or while others are "
    "generated; cache what was scored before; limit the time of a verifier",
    REFERENCE: "score in larger batches, together with the old policy's; leave out the "
    "reference where its weight (beta) is 0",
    WEIGHT_SYNC: "send weights in large pieces and from GPU to GPU (NCCL, CUDA IPC), not "
    "through the host or a file; only those that changed; and less often",
}
_UPDATE: Final = (
    FORWARD,
    BACKWARD,
    UNSCALING,
    CLIPPING,
    OPTIMIZER,
    UPDATE,
)


_OF_ONE_RANK: Final = 0.5
"""Part of the awaited phase that a rank has beyond others for it to be named."""
_MOST_TURNS: Final = 0.5
"""Part of the steps that must have rollouts for them to be turns."""


def claim_waits(host: Host) -> Intervals:
    """Prove that updates wait for what comes before them in a turn: no CUDA call for a millisecond
    and more in rollouts, rewards, log-probabilities without gradients or a sync of weights.
    """
    phases = host.phases
    if phases is None or not len(host.steps[0]):
        return EMPTY
    if np.mean(phases.of[ROLLOUT].within(*host.steps) > 0) < _MOST_TURNS:
        return EMPTY
    awaited = reduce(merge_touching, (phases.of[name] for name in _FASTER))
    return host.pauses.intersection(awaited)


def awaited_phase(facts: Facts) -> tuple[StepPhases, StepPhase] | None:
    """Return the phase that updates wait for longest, and those of its rank; None if none takes
    20 % of a turn.
    """
    phases = [
        (row, row.of(name))
        for row in (facts.step_phases if facts.all_steps.kind == "rl" else ())
        for name in _FASTER
    ]
    longest = max(phases, key=lambda pair: pair[1].host_ns, default=None)
    return longest if longest and facts.share_of(longest[1].host_ns) >= HIGH else None


def waits_alone(facts: Facts, rank: int) -> int:
    """Return by how many nanoseconds of a turn the awaited phase is longer on a rank than where it
    is shortest; 0 for other ranks than the one on which it is longest.
    """
    awaited = facts.once(awaited_phase)
    if awaited is None or awaited[0].rank != rank:
        return 0
    name, longest_ns = awaited[1].name, awaited[1].host_ns
    return longest_ns - min(row.of(name).host_ns for row in facts.step_phases)


def update_waits(facts: Facts) -> Iterator[Finding]:
    """Rollouts, rewards, log-probabilities without gradients or the sync of weights, as far as they
    were timed, take 20 % of a turn of reinforcement learning. Named is the longest of them on the
    rank on which it takes longest, and the rank if on another one it is half as long at most;
    details name the others, and the line at which the host waits.

    Cost: the host's time in that phase.

    Wrong if: a turn that uses its results again is no shorter.
    """
    awaited = facts.once(awaited_phase)
    if awaited is None:
        return
    rank, longest = awaited
    others = [
        f"{PHASES[name]} {format_ns(rank.of(name).host_ns)}"
        for name in _FASTER
        if name != longest.name and rank.of(name).host_ns
    ]
    update = format_ns(sum(rank.of(name).host_ns for name in _UPDATE))
    process = facts.processes[rank.rank]
    phases = facts.per_gpu.whole.once(read_phases)[process]
    time = phases.of[longest.name].intersection(facts.time_of_rank(rank.rank))
    engines = facts.trace.once(read_named_ranges).rollouts.keys() if longest.name == ROLLOUT else ()
    place = facts.line_in(time, processes={process} if process in engines else engines or {process})
    alone = waits_alone(facts, rank.rank)
    of_rank = f" of rank {rank.rank}" if alone >= _OF_ONE_RANK * longest.host_ns else ""
    yield facts.finding(
        "update-waits",
        "high",
        longest.host_ns,
        f"the update waits {facts.of_step(longest.host_ns)} for {PHASES[longest.name]}{of_rank}",
        _FASTER[longest.name],
        {f"{phase.name.replace(' ', '_')}_ns": phase.host_ns for phase in rank.phases},
        [
            of_rank and f"on another rank they take {format_ns(longest.host_ns - alone)}",
            f"the update itself takes {update}",
            ", ".join(others) and f"{', '.join(others)} besides",
            place.told if place else "",
        ],
    )
