"""Findings: causes of lost time, and limits on how far the figures can be trusted.

A rule takes `Facts` and yields findings, or none. To add a rule, write it in the module of its
subject and list it in `RULES`, in `HOST_RULES`, or in both. Its docstring states the condition,
after "Cost:" how the cost is computed, and after "Wrong if:" what would prove it wrong;
docs/findings.md is made of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from gputrace.analyzers.findings import (
    communication,
    copies,
    data_feeding,
    growing_steps,
    hardware,
    host_threads,
    host_work,
    idle,
    kernels,
    slow_steps,
    stragglers,
    whole_run,
)
from gputrace.analyzers.findings.facts import MEDIUM, SEVERITIES, Facts, Rule, severity_of
from gputrace.analyzers.ledger.causes import IDLE, IDLING, WAITS, Cause
from gputrace.analyzers.neighbours import claim_turns
from gputrace.model.events import Kind
from gputrace.model.results import Finding, WhatIf

__all__ = ["ALL_RULES", "CAUSES", "CHEAPER_KERNELS_SAVE", "RULES", "Facts", "find", "order"]

_IDLE_AND_COPIES = (*IDLE, "h2d", "other_copy")
CAUSES: Final[tuple[Cause, ...]] = (
    # Claimed first, the most certain before the others.
    Cause("garbage-collection", "host", "garbage collection", IDLE, host_work.claim_collections,
          rule=host_work.garbage_collection, in_all=True, needs=(Kind.COLLECTION,)),
    Cause("recompilation", "host", "compilation and tracing", IDLE, host_work.claim_compilations,
          rule=host_work.recompilation, in_all=True, needs=(Kind.COMPILATION,)),
    Cause("warmup", "host", "start-up, once", IDLE, whole_run.claim_start_up,
          rule=whole_run.warmup),
    Cause("weights", "copies", "weights, once", ("h2d",), whole_run.claim_weights),
    Cause("loader-restart", "data", "loader starts its workers", WAITS,
          data_feeding.claim_restarts, rule=data_feeding.loader_restart, in_all=True,
          needs=(Kind.LOADER,), least=MEDIUM),
    Cause("shared-gpu", "neighbours", "another process on the card", ("launch", "other_idle"),
          claim_turns, work=hardware.work_slowed, rule=hardware.shared_gpu),
    Cause("autotune-repeated", "host", "search for algorithms", IDLE, idle.claim_autotune,
          rule=idle.autotune_repeated),
    Cause("checkpoint-stall", "host", "saving checkpoints", _IDLE_AND_COPIES,
          host_work.claim_checkpoints, rule=whole_run.checkpoint_stall, in_all=True),
    Cause("update-waits", "host", "phases that updates wait for", ("data_feeding", "launch"),
          host_work.claim_awaited_phases, rule=host_work.update_waits),
    Cause("host-optimizer", "host", "optimizer on the host", _IDLE_AND_COPIES,
          host_work.claim_host_optimizer, rule=host_work.host_optimizer, in_all=True, least=MEDIUM),
    Cause("host-work", "host", "other work of the host", ("launch",), host_work.claim_host_work,
          rule=host_work.host_work, in_all=True, least=MEDIUM),
    Cause("debugging", "host", "debugging mode left on", ("launch", "sync"),
          host_work.claim_debugging, rule=host_work.debugging, certain=0.5, least=MEDIUM),
    Cause("sync-bound", "host", "synchronising call", ("launch",), idle.claim_late_after_waits,
          rule=idle.sync_bound, least=MEDIUM),
    Cause("graph-gaps", "work", "between nodes of a graph", ("other_idle",),
          idle.claim_graph_gaps, rule=idle.graph_gaps, least=MEDIUM),
    Cause("kernel-gaps", "host", "between kernels", ("other_idle",), idle.claim_kernel_gaps),
    # What is left of each class of time.
    Cause("recorder-overhead", "host", "recorder", rule=whole_run.recorder_overhead),
    Cause("data-feeding", "data", "waiting for the next batch", rule=data_feeding.data_feeding),
    Cause("alloc-stall", "host", "allocation", rule=idle.alloc_stall,
          least=idle.ALLOC_MEDIUM_SHARE),
    Cause("launch-bound", "host", "launch overhead", rule=idle.launch_bound, certain=0.5),
    Cause("idle-unexplained", "unexplained", "unexplained", rule=idle.idle_unexplained,
          least=MEDIUM),
    Cause("h2d-exposed", "copies", "host to device", rule=copies.h2d_exposed, least=MEDIUM),
    Cause("copies-exposed", "copies", "other copies", rule=copies.copies_exposed, least=MEDIUM),
    Cause("memset", "copies", "memset"),
    Cause("communication-exposed", "communication", "transfer",
          rule=communication.communication_exposed),
    Cause("uneven-arrival", "waiting", "arrives last"),
    Cause("straggler", "waiting", "more or slower work", rule=stragglers.straggler),
    Cause("late-host", "waiting", "late host", rule=stragglers.late_host),
    Cause("pipeline-bubble", "waiting", "pipeline bubble", rule=communication.pipeline_bubble),
    Cause("expert-imbalance", "waiting", "uneven experts", rule=communication.expert_imbalance),
    # Known by how long they last, but not when.
    Cause("gil-wait", "host", "lock of Python", IDLING, amount=host_threads.amount_locked,
          rule=host_threads.gil_wait, needs=(Kind.SAMPLE,)),
    Cause("cpu-throttled", "host", "CPU quota", IDLING, amount=host_threads.amount_throttled,
          rule=host_threads.cpu_throttled, needs=(Kind.COUNTER,)),
    Cause("cpu-starved", "host", "queued for a core", IDLING, amount=host_threads.amount_queued,
          rule=host_threads.cpu_starved, needs=(Kind.COUNTER,)),
    Cause("page-faults", "host", "page faults", IDLING, amount=host_threads.amount_faults,
          rule=host_threads.page_faults, needs=(Kind.COUNTER,)),
    Cause("slow-cores", "host", "slow core", IDLING, amount=host_threads.amount_slow_cores,
          rule=host_threads.slow_cores, needs=(Kind.COUNTER,)),
    Cause("h2d-pageable", "copies", "pageable memory", ("h2d-exposed",),
          amount=copies.amount_pageable, rule=copies.h2d_pageable),
    Cause("host-staged-comm", "communication", "through the host's memory",
          ("communication-exposed", "copies-exposed", "h2d-exposed"),
          amount=communication.amount_staged, rule=communication.host_staged_comm),
    Cause("topology", "communication", "slow link", ("communication-exposed",),
          amount=communication.amount_slow_links, rule=communication.topology),
    # Computation that need not be.
    Cause("kernel-waits", "work", "kernels that wait", work=kernels.work_waiting,
          rule=kernels.kernel_waits),
    Cause("layout-transposes", "work", "layout conversions", work=kernels.work_on_layouts,
          rule=kernels.layout_transposes),
    Cause("double-precision", "work", "products in fp64", work=kernels.work_in_double,
          rule=kernels.double_precision),
    Cause("no-tensor-cores", "work", "beside the tensor cores",
          work=kernels.work_beside_tensor_cores, rule=kernels.no_tensor_cores),
    Cause("recomputation", "work", "forward pass again", work=kernels.work_recomputed,
          rule=kernels.recomputation),
)  # fmt: skip
"""Causes of lost time that a ledger charges, in this order."""
RULES: Final[tuple[Rule, ...]] = (
    whole_run.lost_records,
    whole_run.low_utilization,
    *(cause.rule for cause in CAUSES if cause.rule is not None),
    kernels.compute_bound,
    hardware.clock_mismatch,
    hardware.throttling,
    hardware.pcie_degraded,
    hardware.memory_imbalance,
    stragglers.gpu0_skew,
    slow_steps.slow_steps,
    growing_steps.steps_grow,
    whole_run.validation_downtime,
    whole_run.restarts,
    whole_run.graph_opaque,
)
HOST_RULES: Final[tuple[Rule, ...]] = (
    host_work.update_waits,
    data_feeding.data_feeding,
    data_feeding.loader_restart,
    whole_run.lost_records,
    whole_run.checkpoint_stall,
    host_work.host_work,
    host_threads.cpu_starved,
    host_threads.cpu_throttled,
    host_threads.page_faults,
    host_threads.slow_cores,
    host_threads.gil_wait,
    host_work.garbage_collection,
    host_work.recompilation,
    host_threads.host_blocked,
    whole_run.no_gpu_activity,
    slow_steps.slow_steps,
    growing_steps.steps_grow,
    whole_run.restarts,
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
    kinds = facts.trace.kinds
    is_charged = bool(facts.per_gpu.operations)
    pointless = {
        cause.rule
        for cause in CAUSES
        if not cause.may_be_in(kinds)
        or (is_charged and cause.least and not facts.is_costly(cause.id, cause.least))
    }
    for rule in rules:
        if rule not in pointless:
            findings += rule(facts)
    return (*findings, *plugged)


_DISTORTING: Final = ("recorder-overhead", "lost-records")
"""Findings by which no other figure can be trusted, if they are high."""
_UNCONFIRMED_SHARE: Final = 0.01
"""Share of a step that a cost counts whose cure is predicted to gain nothing worth listing."""
CHEAPER_KERNELS_SAVE: Final = 1 / 8
"""Part of the computation that cheaper kernels are taken to save, where nothing says how."""
_OF_COMPUTATION: Final = {"compute-bound", *(c.id for c in CAUSES if c.work)} - {"shared-gpu"}
"""Findings whose cures shorten kernels, which another process on the card makes longer."""
_CERTAIN: Final = {cause.id: cause.certain for cause in CAUSES}


def order(
    findings: Sequence[Finding],
    predictions: Sequence[WhatIf],
    mean_ns: int,
    curable: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Return the findings, those first whose cure is sure to gain most, with severities to match.

    A cure gains what its prediction says, as far as predictions of its kind came true; without a
    prediction, what is charged to its cause. Of computation itself, cheaper kernels are taken to
    save an eighth of what no finding calls needless: GPUs that compute nearly all the time come
    before anything smaller.

    A recorder that distorts the run, or rows that are missing, come before all others.

    Args:
        findings: in any order.
        predictions: of what cures gain; none where the steps cannot be replayed.
        mean_ns: mean step.
        curable: ids of the findings whose cures are predicted if they gain anything.
    """
    gains: dict[str | None, int] = {}
    for cure in predictions:
        gains[cure.finding] = max(gains.get(cure.finding, 0), cure.sure_ns)

    shared = max((each.impact_ns for each in findings if each.id == "shared-gpu"), default=0)
    alone = 1 - min(shared / max(mean_ns, 1), 1.0)
    needless = sum(f.impact_ns for f in findings if f.id in _OF_COMPUTATION - {"compute-bound"})

    def gain_of(finding: Finding) -> float:
        if finding.id == "compute-bound":
            return CHEAPER_KERNELS_SAVE * max(finding.impact_ns - needless, 0)
        if finding.id in gains:
            return gains[finding.id]
        if predictions and finding.id in curable:
            return min(finding.impact_ns, _UNCONFIRMED_SHARE * mean_ns)
        return finding.impact_ns * _CERTAIN.get(finding.id, 1.0)

    def weigh(finding: Finding) -> tuple[bool, bool, float, int, Finding]:
        gain = gain_of(finding) * (alone if finding.id in _OF_COMPUTATION else 1)
        severity = finding.severity
        is_info = severity == "info" and finding.id != "compute-bound"
        if finding.impact_ns and severity != "info" and finding.id not in _DISTORTING:
            confirmed = severity_of(gain / max(mean_ns, 1)) or "low"
            severity = max(severity, confirmed, key=SEVERITIES.index)
        distorts = finding.id in _DISTORTING and severity == "high"
        weighed = finding if severity == finding.severity else replace(finding, severity=severity)
        return not distorts, is_info, -gain, SEVERITIES.index(severity), weighed

    return tuple(row[-1] for row in sorted(map(weigh, findings), key=lambda row: row[:-1]))
