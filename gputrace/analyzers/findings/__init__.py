"""Findings: causes of lost time, and limits on how far the figures can be trusted.

A rule takes `Facts` and yields findings, or none. To add a rule, write it in the module of its
subject and list it in `RULES`, in `HOST_RULES`, or in both. Its docstring states the condition and,
after "Cost:", how the cost is computed; docs/findings.md is made of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gputrace.analyzers.findings import busy, hardware, idle, multi_gpu, run, stragglers
from gputrace.analyzers.findings.context import SEVERITIES, Facts, Rule
from gputrace.model.results import Finding

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
    stragglers.straggler,
    stragglers.late_host,
    busy.compute_bound,
    hardware.clock_mismatch,
    hardware.throttling,
    hardware.pcie_degraded,
    hardware.memory_imbalance,
    busy.layout_transposes,
    busy.no_tensor_cores,
    multi_gpu.gpu0_skew,
    multi_gpu.topology,
    multi_gpu.host_staged_comm,
    run.slow_steps,
    run.validation_downtime,
    run.checkpoint_stall,
    run.warmup,
    run.graph_opaque,
)
HOST_RULES: Final[tuple[Rule, ...]] = (
    run.data_feeding,
    run.lost_records,
    run.no_gpu_activity,
    run.slow_steps,
    run.warmup,
)
"""Rules that need no GPU activity, for traces that hold none."""


def find(facts: Facts, plugged: Sequence[Finding] = ()) -> tuple[Finding, ...]:
    """Return all findings, the most important first: by severity, then by cost.

    A recorder that distorts the run comes before all others: no other figure can be trusted then.

    Args:
        facts: facts about the trace.
        plugged: findings of plugins.
    """
    rules = RULES if facts.per_gpu.operations else HOST_RULES
    findings: list[Finding] = []
    for rule in rules:
        findings += rule(facts)
    findings += plugged

    def rank(finding: Finding) -> tuple[bool, int, int]:
        distorts = finding.id == "recorder-overhead" and finding.severity == "high"
        return not distorts, SEVERITIES.index(finding.severity), -finding.impact_ns

    return tuple(sorted(findings, key=rank))
