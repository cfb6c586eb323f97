"""Findings: causes of lost time, and limits on how far the figures can be trusted.

A rule takes `Facts` and yields findings, or none. To add a rule, write it in the module of its
subject and list it in `RULES`, in `HOST_RULES`, or in both. Its docstring states the condition,
after "Cost:" how the cost is computed, and after "Wrong if:" what would prove it wrong;
docs/findings.md is made of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gputrace.analyzers.findings import (
    busy,
    data_feeding,
    drift,
    gpu_links,
    hardware,
    host,
    idle,
    slow_steps,
    stragglers,
    whole_run,
)
from gputrace.analyzers.findings.context import MEDIUM, SEVERITIES, Facts, Rule, severity_of
from gputrace.model.results import Finding, WhatIf

__all__ = ["ALL_RULES", "RULES", "Facts", "find", "order"]

RULES: Final[tuple[Rule, ...]] = (
    whole_run.recorder_overhead,
    whole_run.lost_records,
    whole_run.low_utilization,
    data_feeding.data_feeding,
    idle.autotune_repeated,
    idle.alloc_stall,
    idle.sync_bound,
    idle.launch_bound,
    idle.idle_unexplained,
    host.cpu_starved,
    host.cpu_throttled,
    host.page_faults,
    host.slow_cores,
    host.gil_wait,
    host.garbage_collection,
    host.recompilation,
    busy.h2d_exposed,
    busy.h2d_pageable,
    busy.copies_exposed,
    busy.communication_exposed,
    busy.pipeline_bubble,
    busy.expert_imbalance,
    stragglers.straggler,
    stragglers.late_host,
    busy.compute_bound,
    hardware.clock_mismatch,
    hardware.throttling,
    hardware.pcie_degraded,
    hardware.memory_imbalance,
    busy.layout_transposes,
    busy.no_tensor_cores,
    stragglers.gpu0_skew,
    gpu_links.topology,
    gpu_links.host_staged_comm,
    slow_steps.slow_steps,
    drift.steps_grow,
    whole_run.validation_downtime,
    whole_run.checkpoint_stall,
    whole_run.warmup,
    whole_run.graph_opaque,
)
HOST_RULES: Final[tuple[Rule, ...]] = (
    data_feeding.data_feeding,
    whole_run.lost_records,
    host.cpu_starved,
    host.cpu_throttled,
    host.page_faults,
    host.slow_cores,
    host.gil_wait,
    host.garbage_collection,
    host.recompilation,
    host.host_blocked,
    whole_run.no_gpu_activity,
    slow_steps.slow_steps,
    drift.steps_grow,
    whole_run.warmup,
)
"""Rules that need no GPU activity, for traces that hold none."""
CARD_RULES: Final[tuple[Rule, ...]] = (
    hardware.low_utilization,
    hardware.uneven_utilization,
    hardware.clock_mismatch,
    hardware.throttling,
    hardware.pcie_degraded,
    hardware.memory_imbalance,
)
"""Rules for what only has samples of the cards."""
ALL_RULES: Final = (*RULES, *HOST_RULES, *CARD_RULES)
"""Rules of all sorts of traces; some are in it more than once."""


def find(facts: Facts, plugged: Sequence[Finding] = ()) -> tuple[Finding, ...]:
    """Return what all rules find, in the order of the rules, and the findings of plugins."""
    findings: list[Finding] = []
    alone = CARD_RULES if facts.trace.is_card_log else HOST_RULES
    rules = RULES if facts.per_gpu.operations else alone
    for rule in rules:
        findings += rule(facts)
    return (*findings, *plugged)


_DISTORTING: Final = ("recorder-overhead", "lost-records")
_UNCONFIRMED: Final = 0.01
"""Share of a step that a cost counts whose cure is predicted to gain nothing worth listing."""
_CURED_BY_REPLAY: Final = ("launch-bound", "communication-exposed")
"""Findings about idle time that all GPUs share: if a replay without their cause gains nothing,
another cause explains that time."""
_OF_THE_WAY_THERE: Final = (
    "data-feeding",
    "alloc-stall",
    "sync-bound",
    "launch-bound",
    "idle-unexplained",
)
"""Findings about idle time, which matters little where it ends before a trace's later half."""
_BUSY: Final = 0.8
_LITTLE: Final = 0.1
"""Shares of the time: computation that has as much comes before idle time that has less, unless
that is spent waiting for data, which a faster loader ends."""


def order(
    findings: Sequence[Finding], predictions: Sequence[WhatIf], mean_ns: int
) -> tuple[Finding, ...]:
    """Return the findings, the most important first: by severity, then by what they cost.

    The severity of a cost that a prediction does not confirm is lowered.

    A recorder that distorts the run, or rows that are missing, come before all others: no other
    figure can be trusted then.
    A cost counts, and makes severe, as far as a prediction may confirm it. GPUs that compute nearly
    all the time come before costs below `MEDIUM`, and before little idle time; where they do so in
    the later half of a trace without steps, before idle time below `HIGH`.
    """
    gains: dict[str | None, int] = {}
    for cure in predictions:
        gains[cure.finding] = max(gains.get(cure.finding, 0), cure.now_ns - cure.low_ns)

    settled = any("settled_share" in finding.evidence for finding in findings)
    computing = {finding.id: finding.impact_ns for finding in findings}.get("compute-bound", 0)
    busy = computing >= _BUSY * mean_ns

    def weigh(finding: Finding) -> tuple[bool, int, float, Finding]:
        distorts = finding.id in _DISTORTING and finding.severity == "high"
        severity, gain = finding.severity, float(finding.impact_ns)
        if finding.id == "compute-bound":
            return True, SEVERITIES.index("medium"), -MEDIUM * mean_ns, finding
        little = busy and finding.id != "data-feeding" and gain < _LITTLE * mean_ns
        if (settled or little) and finding.id in _OF_THE_WAY_THERE and severity == "medium":
            severity = "low"
        elif finding.id in gains or (predictions and finding.id in _CURED_BY_REPLAY):
            # No cure that is predicted ends pauses of the host.
            pauses = float(finding.evidence.get("long_waits_ns") or 0)
            gain = min(gain, max(gains.get(finding.id, _UNCONFIRMED * mean_ns), pauses))
            confirmed = severity_of(gain / max(mean_ns, 1)) or "low"
            severity = max(severity, confirmed, key=SEVERITIES.index)
        weighed = finding if severity == finding.severity else replace(finding, severity=severity)
        return not distorts, SEVERITIES.index(severity), -gain, weighed

    return tuple(row[-1] for row in sorted(map(weigh, findings), key=lambda row: row[:-1]))
