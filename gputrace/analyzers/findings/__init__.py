"""Findings: what costs time, or what one must know to trust the figures.

A rule takes `Facts` and yields findings or nothing. To add one, write it in the module of its
subject and put it in `RULES`, or in `HOST_RULES`, or both. Its docstring says when it yields one,
and after "Cost:" what that costs: docs/findings.md is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gputrace.analyzers.findings import (
    busy,
    cards,
    clocks,
    host,
    idle,
    kernels,
    late,
    links,
    phases,
    run,
    skew,
    staging,
)
from gputrace.analyzers.findings.facts import Facts, Rule
from gputrace.analyzers.findings.severities import SEVERITIES
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
    late.straggler,
    late.late_host,
    busy.compute_bound,
    clocks.clock_mismatch,
    clocks.throttling,
    cards.pcie_degraded,
    cards.memory_imbalance,
    kernels.layout_transposes,
    kernels.no_tensor_cores,
    skew.gpu0_skew,
    links.topology,
    staging.host_staged_comm,
    run.slow_steps,
    phases.validation_downtime,
    phases.checkpoint_stall,
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


def find(facts: Facts, plugged: Sequence[Finding] = ()) -> tuple[Finding, ...]:
    """All findings, the most important first: by severity, then by cost.

    ``plugged`` are those of plugins.
    A recorder that distorts the run comes before all others: no other figure can be trusted then.
    """
    rules = RULES if facts.per_gpu.operations else HOST_RULES
    found = [*(finding for rule in rules for finding in rule(facts)), *plugged]

    def rank(finding: Finding) -> tuple[bool, int, int]:
        distorts = finding.id == "recorder-overhead" and finding.severity == "high"
        return not distorts, SEVERITIES.index(finding.severity), -finding.impact_ns

    return tuple(sorted(found, key=rank))
