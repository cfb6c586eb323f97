"""Finding on reinforcement learning: what updates wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gputrace.analyzers.findings.facts import HIGH, Facts, severity_of
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
    WEIGHT_SYNC,
)
from gputrace.model.results import Finding
from gputrace.units import format_ns

_FASTER: Final = {
    ROLLOUT: "generate with an engine made for it (vLLM, SGLang), in larger batches, "
    "and without the slowest few answers; or roll out while the last batch is learned from",
    REWARD: "score answers in parallel, in processes of their own, or while others are generated; "
    "cache what was scored before; limit the time of a verifier",
    REFERENCE: "score in larger batches, together with the old policy's; leave out the reference "
    "where its weight (beta) is 0",
    WEIGHT_SYNC: "send weights in large pieces and from GPU to GPU (NCCL, CUDA IPC), not through "
    "the host or a file; only those that changed; and less often",
}
_UPDATE: Final = (FORWARD, BACKWARD, UNSCALING, CLIPPING, OPTIMIZER)


def update_waits(facts: Facts) -> Iterator[Finding]:
    """Rollouts, rewards, log-probabilities without gradients or the sync of weights, as far as they
    were timed, take 20 % of a turn of reinforcement learning. Named is the longest of them on the
    rank on which it takes longest; details name the others.

    Cost: the host's time in that phase.

    Wrong if: a turn that uses its results again is no shorter.
    """
    ranks = facts.step_phases if facts.all_steps.kind == "rl" else ()
    known = [phase for row in ranks for phase in row.phases if phase.name in _FASTER]
    if not known:
        return
    longest = max(known, key=lambda phase: phase.host_ns)
    if facts.share_of(longest.host_ns) < HIGH:
        return
    rank = next(row for row in ranks if longest in row.phases)
    others = [
        f"{PHASES[name]} {format_ns(rank.of(name).host_ns)}"
        for name in _FASTER
        if name != longest.name and rank.of(name).host_ns
    ]
    update = format_ns(sum(rank.of(name).host_ns for name in _UPDATE))
    yield facts.finding(
        "update-waits",
        severity_of(facts.share_of(longest.host_ns)) or "low",
        longest.host_ns,
        f"the update waits {facts.of_step(longest.host_ns)} for {PHASES[longest.name]}",
        _FASTER[longest.name],
        {f"{phase.name.replace(' ', '_')}_ns": phase.host_ns for phase in rank.phases},
        [f"the update itself takes {update}", ", ".join(others) and f"{', '.join(others)} besides"],
    )
