"""Findings: what costs time, or what one must know to trust the figures.

A rule takes `Facts` and yields findings or nothing. To add one, write it in the module of its
subject and put it in `RULES`.
"""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.findings import busy, idle, run
from gputrace.analyzers.findings.facts import Facts, Rule
from gputrace.analyzers.results import Finding

__all__ = ["RULES", "Facts", "find"]

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
    busy.compute_bound,
    run.slow_steps,
    run.warmup,
    run.graph_opaque,
)

_SEVERITIES: Final = ("high", "medium", "low", "info")


def find(facts: Facts) -> tuple[Finding, ...]:
    """All findings, the most important first: by severity, then by cost.

    A recorder that distorts the run comes before all others: no other figure can be trusted then.
    """
    found = [finding for rule in RULES for finding in rule(facts)]

    def rank(finding: Finding) -> tuple[bool, int, int]:
        distorts = finding.id == "recorder-overhead" and finding.severity == "high"
        return not distorts, _SEVERITIES.index(finding.severity), -finding.impact_ns

    return tuple(sorted(found, key=rank))
