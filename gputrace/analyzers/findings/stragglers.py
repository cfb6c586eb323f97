"""Findings about imbalance: ranks that arrive late at collectives, so that the others wait for
them, and a GPU that has more to do than the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.findings.data_feeding import how_to_feed_faster
from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.findings.hardware import (
    SHARE_NO_CARD,
    lower_clock,
    neighbours_of,
    unknown_neighbours,
)
from gputrace.analyzers.findings.host_work import waits_alone
from gputrace.analyzers.findings.idle import ONE_PROCESS, ONE_PROCESS_ELSE
from gputrace.analyzers.grouping import median, median_of_others
from gputrace.analyzers.lateness import Lateness, Straggler, find_lateness, find_stragglers
from gputrace.analyzers.load_balance import KernelRatio, compare_loads
from gputrace.analyzers.operations import Gpu
from gputrace.analyzers.parallelism import PIPELINE
from gputrace.analyzers.pipelines import find_pipelines
from gputrace.model.events import UNKNOWN
from gputrace.model.results import Evidence, Finding, Load
from gputrace.model.struct import Struct
from gputrace.model.time_class import BY_ID, TIME_CLASSES
from gputrace.units import format_ns, format_ranges, format_share


class _Kernels(Struct, frozen=True):
    """Kernels of a late GPU compared with the others', in the steps in which it is late."""

    ratio: float | None
    """Ratio of their durations to the median of the others; None if not comparable."""
    extra_ns: int
    """Nanoseconds per step in kernels that the others do not run, or not as often."""


_NOT_COMPARED: Final = _Kernels(None, 0)


def measure_lateness(facts: Facts) -> Lateness | None:
    """Return the time that GPUs lose to each other at collectives; None where none meet."""
    return find_lateness(facts.per_gpu, facts.collectives, facts.measured)


def find_late(facts: Facts) -> tuple[Straggler, ...]:
    """Return the GPUs for which others wait at collectives, the costliest first."""
    lateness = facts.once(measure_lateness)
    return () if lateness is None else find_stragglers(lateness, facts.measured)


def find_balance(facts: Facts) -> tuple[Load, ...]:
    """Return the load of each GPU that counts, for comparison; empty where there is one."""
    return compare_loads(facts.per_gpu, facts.working, facts.measured)


def straggler(facts: Facts) -> Iterator[Finding]:
    """Others wait at collectives for a GPU that works longer: its kernels are slower (the details
    give the factor), or it has more of them; `low` if slower hosts hide extra work of 5 % of a
    step. Or the same kernels take 1.10 times as long on it as on the others (lower quartile: 1.05
    times), at a cost of 5 % of the time, whether or not others wait; in a trace without steps, also
    in bursts.

    If a GPU is late in all steps, replays that remove one reason at a time (kernels that the others
    do not run, slower kernels, its host) decide between this and `late-host`; with several reasons,
    the details give the gain of each.

    If another process on its card explains half of that, it is `shared-gpu`.

    Cost: the time that another GPU loses waiting for it; otherwise its kernels' extra time.

    Wrong if: another card in its place is as slow, or its kernels are as fast when it runs alone.
    """
    for late in facts.once(find_late):
        kernels = _kernels(facts, late)
        is_shared = _by_neighbours(facts, late.lane.gpu, late.cost_ns)
        if _works_longer(facts, late, kernels) and not is_shared:
            yield _straggler(facts, late, kernels)
    yield from _slow_kernels(facts)
    # Findings about extra work that costs little as long as the other ranks' hosts are slower.
    for gpu, extra, lost in _hiding_work(facts):
        yield facts.finding(
            "straggler",
            "low",
            lost,
            f"{_who(facts, gpu)} runs kernels that the others do not, {facts.of_step(extra)}",
            _SHARE_WORK,
            {
                "extra_kernels_ns": extra,
                "share": round(facts.share_of(extra), 4),
                "pattern": "constant",
            },
            (f"the others' slower hosts hide it: they lose {format_ns(lost)} to it",),
            of=[gpu],
        )


_SLOW_GPU_RATIO: Final = 1.10
_SLOW_GPU_LOW_QUARTILE: Final = 1.05
"""Ratios to the others' kernel times, of the median and of the lower quartile, from which slow
kernels are reported even where nothing in the trace waits for them."""
_BURST_SKEW: Final = 2
"""How much further above 1 the upper quartile of that ratio is than the lower below, at least, if
a GPU is slow in bursts; where its work only differs, they are as far."""


class SlowGpu(Struct, frozen=True):
    """GPU on which the same kernels take longer than on the others, whoever waits for it."""

    gpu: Gpu
    ratio: float
    """Ratio of the time of all compared launches to the others'."""
    low: float
    high: float
    """Quartiles of the ratio of a launch."""
    in_bursts: bool
    cost_ns: int
    """Nanoseconds per step, or in all, that its kernels take longer."""


def slow_gpus(facts: Facts) -> list[SlowGpu]:
    """Return the GPUs on which the same kernels take longer, for 5 % of the time at least."""
    ratios = facts.kernel_ratios()
    if len(ratios) < 2:
        return []
    each = [(entry.ratio, entry.mean, entry.low, entry.high) for entry in ratios]
    usual = median_of_others(np.array(each))[:, :2].tolist()
    slow = []
    for entry, (middle, mean) in zip(ratios, usual, strict=True):
        typical, low, high = (part / middle for part in (entry.ratio, entry.low, entry.high))
        ratio = entry.mean / mean
        always = typical >= _SLOW_GPU_RATIO and low >= _SLOW_GPU_LOW_QUARTILE
        in_bursts = not always and not facts.repeats and ratio >= _SLOW_GPU_RATIO
        in_bursts &= high - 1 >= _BURST_SKEW * abs(1 - low) and high >= _SLOW_GPU_RATIO
        cost = round(entry.compared_ns * (1 - 1 / ratio))
        if (always or in_bursts) and cost >= MEDIUM * facts.mean_ns:
            slow.append(SlowGpu(entry.gpu, ratio, low, high, in_bursts, cost))
    return slow


def _slow_kernels(facts: Facts) -> Iterator[Finding]:
    """Yield findings about GPUs on which the same kernels take longer, whoever waits for them."""
    reported = {late.lane.gpu for late in facts.once(find_late)}
    for slow in slow_gpus(facts):
        gpu, share = slow.gpu, facts.share_of(slow.cost_ns)
        if gpu in reported or _by_neighbours(facts, gpu, slow.cost_ns):
            continue
        reason = lower_clock(facts, gpu.gpu, gpu.rank)
        yield facts.finding(
            "straggler",
            severity_of(share) or "low",
            slow.cost_ns,
            f"the kernels of {_who(facts, gpu)} take {slow.ratio:.2f} times as long as "
            f"others', which costs {facts.of_step(slow.cost_ns)}",
            "look for another program on this card, a lower clock or power limit, heat, or larger "
            "inputs than the others' (nvidia-smi -q -d CLOCK,PERFORMANCE)",
            {
                "pattern": "burst" if slow.in_bursts else "constant",
                "kernel_ratio": round(slow.ratio, 4),
                "lower_quartile": round(slow.low, 4),
                "upper_quartile": round(slow.high, 4),
                "share": round(share, 4),
            },
            [
                "the same kernels are compared" + (", slow in bursts" if slow.in_bursts else ""),
                reason or "",
                unknown_neighbours(facts, gpu),
            ],
            of=[gpu],
        )


def late_causes(facts: Facts) -> dict[int, str]:
    """Return the cause to charge for waiting for each rank that is late by more than chance."""
    slow = {each.gpu: (each.cost_ns, True) for each in slow_gpus(facts)} | {
        late.lane.gpu: (late.cost_ns, _works_longer(facts, late, _kernels(facts, late)))
        for late in facts.once(find_late)
    }
    causes = {}
    for gpu, (cost, works) in slow.items():
        cause = "shared-gpu" if _by_neighbours(facts, gpu, cost) else "straggler"
        late = "update-waits" if _awaited_by_others(facts, gpu, cost) else "late-host"
        causes[gpu.rank] = cause if works else late
    return causes


def _awaited_by_others(facts: Facts, gpu: Gpu, cost_ns: int) -> bool:
    """Return whether a phase that updates wait for is why a GPU costs so much of a turn."""
    return waits_alone(facts, gpu.rank) >= _CONFIRMED_PART * cost_ns


def _by_neighbours(facts: Facts, gpu: Gpu, cost_ns: int) -> bool:
    """Return whether others on the card of a GPU explain why it costs so much of a step."""
    met = neighbours_of(facts, gpu)
    return met is not None and met.cost_ns >= _CONFIRMED_PART * cost_ns


_SLOWER_KERNELS_RATIO: Final = 1.03
"""Ratio to the others' kernel times from which kernels are slower."""
_IDLE: Final = {row.id: row.longer for row in TIME_CLASSES if row.is_idle}


def late_host(facts: Facts) -> Iterator[Finding]:
    """Others wait for a GPU whose kernels are as fast as theirs: its host is late. Details
    name the idle time that it has more of. If a phase that updates wait for takes longer on its
    rank, it is `update-waits`.

    Cost: the time that another GPU loses waiting for it.

    Wrong if: another process on the same cores is as late, or no process is late on an otherwise
    idle host.
    """
    for late in facts.once(find_late):
        kernels = _kernels(facts, late)
        if _works_longer(facts, late, kernels):
            continue
        if _awaited_by_others(facts, late.lane.gpu, late.cost_ns):
            continue
        equal = kernels.ratio is not None and kernels.ratio < _SLOWER_KERNELS_RATIO
        details = [f"its kernels are as fast as {_theirs(facts)}"] if equal else []
        then = " in each of these steps" * (late.pattern != "constant" and len(late.steps) > 1)
        details.append(f"its GPU {_more(late, _IDLE)}{then}")
        advice = BY_ID[late.cause].advice or how_to_feed_faster(facts)
        where: Evidence = {}
        mine = (row for row in facts.ledger.rows if row.paid_by == row.rank == late.lane.gpu.rank)
        lines = [row for row in mine if row.line is not None]
        if lines:
            where = {"line": lines[0].line}
            details.append(f"its host is at {lines[0].line} in {lines[0].evidence}")
        yield _finding(facts, "late-host", late, kernels, details, advice, where)


class _HiddenWork(NamedTuple):
    """GPU with kernels that the others do not run, whose slower hosts hide them."""

    gpu: Gpu
    extra_ns: int
    lost_ns: int
    """Nanoseconds that the others lose to it."""


def _hiding_work(facts: Facts) -> list[_HiddenWork]:
    lateness = facts.once(measure_lateness)
    if lateness is None:
        return []
    late = {late.lane.gpu for late in facts.once(find_late)}
    beside = _beside(facts.kernel_ratios())
    pairs = zip(lateness.lanes, lateness.caused, strict=True)
    hiding = [
        _HiddenWork(lane.gpu, beside.get(lane.gpu, _NOT_COMPARED).extra_ns, int(caused.mean()))
        for lane, caused in pairs
        if lane.gpu not in late
    ]
    return [each for each in hiding if each.extra_ns >= MEDIUM * facts.mean_ns]


_SHARE_WORK: Final = (
    "share the work equally: the same batch size and shapes on every rank, no work on one rank only"
)


_NAMED_PART: Final = 0.25
"""Fraction of the largest excess from which another class is reported too."""
_WORK: Final = {
    row.id: row.longer for row in TIME_CLASSES if not row.is_idle and row.id != "communication"
}


def _straggler(facts: Facts, late: Straggler, kernels: _Kernels) -> Finding:
    """Return the finding about a GPU whose kernels are slower, or that has more of them."""
    slower = kernels.ratio is not None and kernels.ratio >= _SLOWER_KERNELS_RATIO
    extra = kernels.extra_ns > _NAMED_PART * max(late.more["compute"], late.cost_ns)
    theirs = _theirs(facts)
    reasons = [f"its kernels take {kernels.ratio:.2f} times as long as {theirs}"] if slower else []
    if extra:
        reasons.append(f"{format_ns(kernels.extra_ns)} a step are kernels that only it runs")
    why = lower_clock(facts, late.lane.gpu.gpu, late.lane.gpu.rank) if slower else None
    if why is not None:
        reasons.append(why or f"its clock is as high as {theirs}")
    met = neighbours_of(facts, late.lane.gpu) if slower else None
    if met is not None and met.cost_ns < _NAMED_PART * late.cost_ns:
        met = None
    reasons += [str(met)] if met is not None else []
    reasons += [] if reasons else ["it " + _more(late, _WORK)]
    advice = _SHARE_WORK
    if slower and not extra and why == "" and met is None:
        advice += "; where it is equal already, try another card in its place"
    elif slower and not extra:
        advice = "compare its clocks, temperature, power and other programs on it with the others'"
        advice = SHARE_NO_CARD if met is not None and not why else advice
    reasons += [unknown_neighbours(facts, late.lane.gpu)] if slower else []
    return _finding(facts, "straggler", late, kernels, reasons, advice)


_CONFIRMED_PART: Final = 0.5
"""Part of the others' wait that a replay must gain to say why a rank is late."""


def _works_longer(facts: Facts, late: Straggler, kernels: _Kernels) -> bool:
    """Return whether a GPU is late because of work, its own or more launches by its host: of the
    replays without each reason, the one without a work of its own gains most; else as the classes
    of its time differ from the others'.
    """
    gains = facts.late_gains.get(late.lane.gpu.rank)
    if gains is not None and max(gains) >= _CONFIRMED_PART * late.cost_ns:
        return max(gains.extra_ns, gains.slower_ns) >= gains.host_ns
    return late.by_work or 2 * kernels.extra_ns > late.cost_ns


def _mixture(facts: Facts, late: Straggler) -> list[str]:
    """Return what a step gains without each of several reasons; nothing if there is one alone."""
    gains = facts.late_gains.get(late.lane.gpu.rank)
    if gains is None or late.pattern != "constant":
        return []
    without = {
        "without the kernels that only it runs": gains.extra_ns,
        f"with kernels as quick as {_theirs(facts)}": gains.slower_ns,
        f"with a host as quick as {_theirs(facts)}": gains.host_ns,
    }
    most = max(gains)
    reasons = [f"{format_ns(ns)} {how}" for how, ns in without.items() if ns >= _NAMED_PART * most]
    worth = most >= _CONFIRMED_PART * late.cost_ns and len(reasons) > 1
    return [f"a step is shorter by {' and by '.join(reasons)}"] if worth else []


def _kernels(facts: Facts, late: Straggler) -> _Kernels:
    return _beside(facts.kernel_ratios(late.steps)).get(late.lane.gpu, _NOT_COMPARED)


def _beside(ratios: Sequence[KernelRatio]) -> dict[Gpu, _Kernels]:
    """Compare the kernels of each GPU with the others'."""
    if len(ratios) < 2:
        return {}
    usual = median_of_others(np.array([(entry.ratio, entry.own_ns) for entry in ratios]))
    return {
        entry.gpu: _Kernels(entry.ratio / speed, max(entry.own_ns - int(alone), 0))
        for entry, (speed, alone) in zip(ratios, usual.tolist(), strict=True)
    }


def _more(late: Straggler, words: dict[str, str]) -> str:
    """Describe the classes that a GPU has more of than the others, the largest first."""
    most = max(late.more[name] for name in words)
    names = sorted(words, key=lambda name: -late.more[name])
    clauses = [words[name] for name in names if late.more[name] >= max(_NAMED_PART * most, 1)]
    lengths = [format_ns(late.more[name]) for name in names]
    first, *more = (text.format(ns) for text, ns in zip(clauses, lengths, strict=False))
    verb = first.partition(" ")[0]
    return " and ".join([first, *(clause.removeprefix(f"{verb} ") for clause in more)])


def _finding(
    facts: Facts,
    id: str,
    late: Straggler,
    kernels: _Kernels,
    details: Sequence[str],
    advice: str,
    more: Evidence | None = None,
) -> Finding:
    gpu, share = late.lane.gpu, facts.share_of(late.cost_ns)
    evidence = {
        "pattern": late.pattern,
        "steps": len(late.steps),
        "first_step": late.steps[0],
        "last_share": round(late.last, 4),
        "share": round(share, 4),
        "kernel_ratio": None if kernels.ratio is None else round(kernels.ratio, 4),
        "extra_kernels_ns": kernels.extra_ns,
        "cause": late.cause,
        **(gains._asdict() if (gains := facts.late_gains.get(gpu.rank)) is not None else {}),
        **{f"more_{name}_ns": ns for name, ns in late.more.items()},
        **(more or {}),
    }
    lose = "the other GPUs lose" if _theirs(facts) == _OTHERS else "the other GPU loses"
    of_step = facts.of_step(late.cost_ns, in_few=late.pattern != "constant")
    message = f"{lose} {of_step} to {_who(facts, gpu)}, which "
    message += "works longer" if id == "straggler" else "has a late host"
    shown = (
        f"it is last at {late.last:.0%} of the collectives{_where(facts, gpu)}{_when(late)}",
        *details,
        *_mixture(facts, late),
        *_in_all_steps(facts, id, late),
    )
    severity, cost = severity_of(share) or "low", late.cost_ns
    return facts.finding(id, severity, cost, message, advice, evidence, shown, of=[gpu])


_BY_CHANCE: Final = 1.2
"""Ratio of the waits for a GPU in all steps to those in which it is late, from which both are said.
"""


def _in_all_steps(facts: Facts, id: str, late: Straggler) -> Iterator[str]:
    """Say what the ledger charges to waits for a GPU, if that is more than its lateness costs."""
    rank = late.lane.gpu.rank
    waits = [row for row in facts.ledger.of(id) if row.rank == rank != row.paid_by]
    on_gpus = len({(row.gpu, row.paid_by) for row in waits})
    steps = facts.ledger.turns / max(len(facts.ledger.counted), 1)
    each = sum(row.ns for row in waits) / max(on_gpus * steps, 1)
    if each > _BY_CHANCE * late.cost_ns:
        waited = f"waits for it take {format_ns(each)} a step"
        yield f"with the steps in which it is last by chance, {waited}"


_OTHERS: Final = "the others'"


def _theirs(facts: Facts) -> str:
    """Say whose a thing is that all GPUs have but one."""
    lateness = facts.once(measure_lateness)
    return _OTHERS if lateness is not None and len(lateness.lanes) > 2 else "the other's"


def _who(facts: Facts, gpu: Gpu) -> str:
    """Name the rank, as in ``rank 3``; the GPU where one rank has several."""
    alone = sum(lane.gpu.rank == gpu.rank for lane in facts.per_gpu.lanes) == 1
    return f"rank {gpu.rank}" if alone else f"GPU {gpu.gpu} of rank {gpu.rank}"


def _where(facts: Facts, gpu: Gpu) -> str:
    """Name the group in which others wait most for a GPU that is in several; else empty."""
    collectives = facts.collectives
    lane = next(n for n, ran in enumerate(facts.per_gpu.operations) if ran.gpu == gpu)
    mine = np.flatnonzero((collectives.lane == lane) & collectives.known)
    last = mine[collectives.start[mine] == collectives.arrival[mine]]
    groups = set(collectives.group[mine].tolist()) - {UNKNOWN}
    if len(groups) < 2 or not len(last):
        return ""
    waits = np.bincount(collectives.instance, collectives.wait)[collectives.instance[last]]
    most = max(groups, key=lambda group: waits[collectives.group[last] == group].sum())
    if not facts.roles[most]:
        return ""
    operations = facts.per_gpu.operations
    ranks = sorted({operations[member].gpu.rank for member in collectives.groups[most].lanes})
    return f", mostly of its {facts.roles[most]} group (ranks {format_ranges(ranks)})"


_STEPS_NAMED: Final = 6
"""Maximum number of steps named."""


def _when(late: Straggler) -> str:
    """Name the steps concerned; empty where it is all of them."""
    if late.pattern == "constant":
        return ""
    if late.pattern == "one-step":
        return f" in step {late.steps[0]} alone"
    shown = format_ranges(late.steps[:_STEPS_NAMED]) + (
        ", …" if len(late.steps) > _STEPS_NAMED else ""
    )
    return f" in steps {shown}"


_WAITED_SHARE: Final = 0.01
"""Share of a step that the others must lose for a finding whatever the work is."""
_EXTRA_WORK_PART: Final = 0.05
_EXTRA_STEP_SHARE: Final = 0.0005
"""Else the shares of the GPU's own work, and of a step, that the extra work must be."""
_NAMED_EXTRA_PART: Final = 0.1
"""Share of the extra work from which one kind of it is named."""

_EXTRA_NAMES: Final = {
    "kernels": "kernels",
    "h2d": "input copies",
    "d2h": "copies to the host",
    "d2d": "copies within its memory",
    "peer": "copies from and to other GPUs",
}
_SPREAD_WORK: Final = (
    "spread what rank {rank} does alone over all ranks (metrics, validation, logging), or do it "
    "less often"
)


def gpu0_skew(facts: Facts) -> Iterator[Finding]:
    """One GPU, the first or another, has kernels or copies that no other GPU has: the others wait
    for it for 1 % of the time; or (`low`) that work is 5 % of the GPU's own work and 0.05 % of the
    time.

    Cost: the part of that work during which no other GPU works.

    Wrong if: the other GPUs take as long per step without that work.
    """
    loads = [load for load in facts.once(find_balance) if sum(load.extra_ns.values())]
    if not loads or not facts.mean_ns:
        return
    load = max(loads, key=lambda load: (load.alone_ns, sum(load.extra_ns.values())))
    extra, cost = sum(load.extra_ns.values()) // load.turns, load.alone_ns // load.turns
    share = cost / facts.mean_ns
    if share < _WAITED_SHARE:
        # Is it much of all that the GPU does, even if nobody waits yet?
        work = load.kernel_ns + load.h2d_ns + load.d2h_ns + load.d2d_ns + load.peer_ns
        if (
            extra * load.turns < _EXTRA_WORK_PART * work
            or extra < _EXTRA_STEP_SHARE * facts.mean_ns
        ):
            return
    if not any(ns for name, ns in load.extra_ns.items() if name != "kernels"):
        hiding = {each.gpu.rank for each in _hiding_work(facts)}
        if facts.late_causes.get(load.rank) == "straggler" or load.rank in hiding:
            return
    # The work of a pipeline's stage is its own by design.
    if load.rank in (
        stage.rank for each in facts.by_group(find_pipelines, PIPELINE) for stage in each.stages
    ):
        return
    known = {(row.gpu, row.rank): row.gpu_known for row in facts.breakdown}
    where = f"{'gpu' if known[load.gpu, load.rank] else 'device'} {load.gpu}"
    advice = ONE_PROCESS.get(facts.framework, ONE_PROCESS_ELSE)
    if len({other.rank for other in facts.once(find_balance)}) > 1:
        where += f" (rank {load.rank})"
        advice = _SPREAD_WORK.format(rank=load.rank)
    yield facts.finding(
        "gpu0-skew",
        severity_of(share) or "low",
        cost,
        f"{where} has work that no other GPU has, {facts.of_step(extra)}",
        advice,
        _evidence(load, facts.once(find_balance), extra, share),
        (
            _parts(facts, load),
            f"the others wait {format_ns(cost)} ({format_share(cost, facts.mean_ns)}) meanwhile",
        ),
        of=[load],
    )


def _parts(facts: Facts, load: Load) -> str:
    """List the kinds of extra work, most first: ``input copies (2.83 ms against 7.4 µs), kernels
    (1.2 ms against 0 ns)``.
    """
    staged = facts.links is not None and len(facts.links.staged) > 0
    names = _EXTRA_NAMES | ({"h2d": "copies from the host"} if staged else {})
    loads = facts.once(find_balance)
    least = _NAMED_EXTRA_PART * sum(load.extra_ns.values())
    kinds = sorted(load.extra_ns.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{names[name]} ({format_ns(_each(load, name))} against "
        f"{format_ns(_mean_of_others(load, loads, name))})"
        for name, ns in kinds
        if ns >= least
    )


def _each(load: Load, name: str) -> float:
    """Return the nanoseconds per step of a kind of work."""
    ns: int = load.kernel_ns if name == "kernels" else getattr(load, f"{name}_ns")
    return ns / load.turns


def _mean_of_others(load: Load, loads: tuple[Load, ...], name: str) -> float:
    """Return the median of the other GPUs' nanoseconds per step."""
    return float(median([_each(other, name) for other in loads if other is not load]))


def _evidence(load: Load, loads: tuple[Load, ...], extra: int, share: float) -> Evidence:
    others = [other for other in loads if other is not load]
    evidence: dict[str, float | int | str | None] = {
        "share": round(share, 6),
        "extra_ns": extra,
        "h2d_run_ns": load.h2d_run_ns,
        "others_h2d_run_ns": round(median([other.h2d_run_ns for other in others])),
    }
    for name, ns in load.extra_ns.items():
        if ns:
            evidence[f"extra_{name}_ns"] = ns // load.turns
            evidence[f"{name}_ns"] = round(_each(load, name))
            evidence[f"others_{name}_ns"] = round(_mean_of_others(load, loads, name))
    if load.memory_bytes is not None:
        known = [other.memory_bytes for other in others if other.memory_bytes is not None]
        evidence["memory_bytes"] = load.memory_bytes
        evidence["others_memory_bytes"] = round(median(known)) if known else None
    return evidence
