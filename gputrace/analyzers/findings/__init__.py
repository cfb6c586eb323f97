"""Findings: what costs time, or what one must know to trust the figures.

A rule takes `Facts` and yields findings or nothing. To add one, write it in the module of its
subject and put it in `RULES`, or in `HOST_RULES`, or both.
"""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.findings import busy, host, idle, late, run
from gputrace.analyzers.findings.facts import Facts, Rule
from gputrace.analyzers.results import Finding

__all__ = ["HOST_RULES", "RULES", "Facts", "find"]

RULES: Final[tuple[Rule, ...]] = (
    run.recorder_overhead,
    run.lost_records,
    idle.data_feeding,
    idle.autotune_repeated,
    idle.alloc_stall,
    idle.sync_bound,
    idle.launch_bound,
    idle.idle_unexplained,
    busy.h2d_exposed,
    busy.h2d_pageable,
    busy.communication_exposed,
    late.late_ranks,
    late.more_work,
    busy.compute_bound,
    run.slow_steps,
    run.warmup,
    run.graph_opaque,
)
HOST_RULES: Final[tuple[Rule, ...]] = (
    host.data_feeding,
    run.lost_records,
    host.no_gpu_activity,
    run.slow_steps,
    run.warmup,
)
"""Those that need no GPU activity; of traces that hold none."""

_SEVERITIES: Final = ("high", "medium", "low", "info")


def find(facts: Facts) -> tuple[Finding, ...]:
    """All findings, the most important first: by severity, then by cost.

    A recorder that distorts the run comes before all others: no other figure can be trusted then.
    """
    rules = RULES if facts.operations else HOST_RULES
    found = [finding for rule in rules for finding in rule(facts)]

    def rank(finding: Finding) -> tuple[bool, int, int]:
        distorts = finding.id == "recorder-overhead" and finding.severity == "high"
        return not distorts, _SEVERITIES.index(finding.severity), -finding.impact_ns

    return tuple(sorted(found, key=rank))
