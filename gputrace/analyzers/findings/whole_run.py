"""Findings about the run as a whole, its phases, the recording, and traces without GPU activity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from gputrace.analyzers.findings.context import MEDIUM, Facts, severity_of
from gputrace.analyzers.findings.host import (
    COLLECT_BETWEEN,
    COMPILE_ONCE,
    CORES_ALONE,
    RAISE_QUOTA,
    STOPPED,
)
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.grouping import edges_of, median, time_of
from gputrace.analyzers.host_state import read_counters, read_host_state
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.loader import read_loaders
from gputrace.analyzers.run_phases import WARMUP_CAUSES
from gputrace.model.events import Mask
from gputrace.model.host import DATA, FORWARD, PHASES
from gputrace.model.intervals import EMPTY, Times, union
from gputrace.model.results import Finding, Phase, Step
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES, IDLE_CAUSES, TIME_CLASSES
from gputrace.units import format_count, format_ids, format_ns, format_ranges

_TOO_MANY: Final = 0.10
"""Share of a rank's GPU operations whose lack leaves no figure right."""
_SLOW: Final = 1.3
"""Ratio to the median from which a step is slow, if it is past the usual scatter too."""
_WORTH: Final = 0.02
"""Share of the steady time that slow steps must add to be reported."""
_PART_OF_WARMUP: Final = 0.1
"""Share of warm-up's cost from which a cause is named."""
_MOST_CAUSES: Final = 2
"""Maximum number of causes named."""
_EPOCHS: Final = 0.75
"""Share of the slow steps that must begin epochs for the finding to say so."""
_MOSTLY: Final = 0.5
"""Share that one of `_HOST_TOOK` must have of what slow steps take longer, to be named."""
_TOLD_APART: Final = {"data_feeding", "h2d", "alloc", "sync", "launch"}
"""Classes covered by findings of their own."""
_NAMES: Final = {
    **{row.id: row.activity for row in TIME_CLASSES},
    **PHASES,
    FORWARD: "forward passes",
    "host_data": "waiting for data",
    "host": "other time of the host",
}
_KEEP_LOADER: Final = {
    "pytorch": "keep the loader's workers from one epoch to the next: "
    "DataLoader(persistent_workers=True), or one endless loader with a sampler that begins anew",
    "tensorflow": "keep the pipeline from one epoch to the next: dataset.repeat().prefetch(…) and "
    "steps_per_epoch, cache decoded data",
    "": "keep the loader and what it has prefetched from one epoch to the next",
}
_HOST_TOOK: Final = {
    "starting_workers_ns": ("a loader starts its workers for {} of each", _KEEP_LOADER["pytorch"]),
    "collecting_ns": ("Python collects garbage for {} of each", COLLECT_BETWEEN),
    "compiling_ns": ("parts of the program are compiled for {} of each", COMPILE_ONCE),
    "queued_ns": (
        "in each, the thread that trains is queued for a core for {} longer than usual, at least",
        CORES_ALONE,
    ),
}
"""Clause of the message and advice, by what takes the host in slow steps, as in the evidence."""
_HOST_THEN: Final = (
    "look at what the program does in these steps alone: garbage collection, logging, a checkpoint "
    "or an evaluation every so many steps, other programs on its cores"
)
_LOAD_EVENLY: Final = (
    "look at the batches of these steps: samples that are larger or come from a slower disk, a "
    "cache that is filled, too few batches fetched ahead"
)
_IN_SLOW_STEPS: Final = {
    "compute": "look at the batches of these steps: longer inputs, shapes that kernels are "
    "searched or compiled for, an evaluation every so many steps; or at the clocks of the GPU then",
    "communication": "look at which rank comes last in these steps, and what else uses the links "
    "then",
    "h2d": "look at what these steps copy to the GPU that the others do not: larger batches, "
    "tables or masks made on the host",
    "other_copy": "look at what these steps read back or move: metrics, logging, a checkpoint "
    "every so many steps",
    "memset": "look at what these steps set to zero: buffers taken anew for inputs of other shapes",
    "recorder": "record with less, or leave these steps out: the recorder writes in them",
    "data_feeding": _LOAD_EVENLY,
    "host_data": _LOAD_EVENLY,
    "sync": "look at what the host waits for in these steps: a loss or a metric read for "
    "logging, an evaluation or a checkpoint every so many steps",
    FORWARD: "look for an evaluation or a rollout every so many steps, whose forward passes count "
    "for the step that follows: make it rarer or shorter; or at the batches of these steps: longer "
    "inputs",
    "alloc": "look at the shapes of these steps: inputs longer than any before take memory anew; "
    "pad them, or run the longest first",
}
"""Advice by the class or phase that is longer in slow steps; of all others `_HOST_THEN`."""


def recorder_overhead(facts: Facts) -> Iterator[Finding]:
    """The recorder itself keeps the GPUs idle; `medium` from 1 %, `high` from 5 %.

    Cost: idle time with that cause; where control stretches measured it, what they say (`info`:
    findings and predictions are then of the program without the recorder).

    Wrong if: the program is as slow without the recorder.
    """
    cost = facts.all_steps.cost
    if cost is not None:
        if cost.added_ns:
            text = f"{cost}; findings and predictions are of the program without it"
            evidence = {
                "step_ns": cost.step_ns,
                "unrecorded_step_ns": cost.unrecorded_step_ns,
                "low_ns": cost.low_ns,
                "high_ns": cost.high_ns,
                "control_steps": cost.steps,
            }
            advice = "nothing need be done; to record less of it, use --every or --api none"
            yield facts.finding("recorder-overhead", "info", cost.added_ns, text, advice, evidence)
        return
    yield from facts.costly(
        "recorder-overhead",
        "recorder",
        "the recorder itself keeps the GPUs idle for {cost}: the run without it is faster than "
        "these figures",
        "record less: fewer kinds of events, a shorter window; compare step times with and "
        "without the recorder",
        medium=0.01,
        high=0.05,
    )


def lost_records(facts: Facts) -> Iterator[Finding]:
    """Rows or files were lost, the recorder warned of losses, or other rows show that 1 % of a
    rank's are missing (`low`; `high` if 10 % of its GPU operations are: there is no verdict then).

    Wrong if: another recording of the program has as many rows.
    """
    quality, missing = facts.trace.quality, facts.missing
    of_gpus = [part for part in missing if part.rows in ("operations", "kernels")]
    if of_gpus and of_gpus[0].share >= _TOO_MANY:
        yield facts.finding(
            "lost-records",
            "high",
            0,
            f"no verdict can be given: the recording lacks {of_gpus[0]}, and no share of the time "
            "below is right",
            "record again, for a shorter time or with fewer kinds of events; cut traces at steps",
            {"missing": of_gpus[0].count, "share": round(of_gpus[0].share, 4)},
        )
        return
    if not quality.dropped and not quality.warnings and not quality.left_out and not missing:
        return
    rows, files = sum(quality.dropped.values()), len(quality.left_out)
    losses = [f"{format_count(files, 'file')} left out or cut short"] if files else []
    losses += [f"rows that cannot be used ({rows:,})"] if rows else []
    losses += quality.warnings[:1] or list(map(str, missing[:1]))
    yield facts.finding(
        "lost-records",
        "low",
        0,
        "the recording is not whole: " + "; ".join(losses),
        ("copy the files again; " if files else "")
        + "record again, for a shorter time or with fewer kinds of events, if the figures matter",
        {
            "dropped_rows": rows,
            "warnings": len(quality.warnings),
            "left_out": files,
            "missing": sum(part.count for part in missing),
        },
    )


def slow_steps(facts: Facts) -> Iterator[Finding]:
    """Steps that exceed the median by 30 % and four deviations add 2 % of the time; the message
    names the class that grew most, and whether they begin epochs, start a loader's workers,
    collect garbage, compile or wait for a core.

    Cost: the time they add, spread over all steps.

    Wrong if: another run of the program has no such steps.
    """
    by_rank: dict[int, list[Step]] = {rank: [] for rank in facts.ranks}
    for step in facts.timed:
        by_rank.setdefault(step.rank, []).append(step)
    by_own_rank = ((rank, by_rank[rank]) for rank in facts.ranks)
    findings = [
        f for rank, steps in by_own_rank if (f := _slow_steps_of(facts, rank, steps)) is not None
    ]
    if findings:
        worst = max(findings, key=lambda finding: finding.impact_ns)
        if len(findings) == 1 < len(facts.ranks):
            of_one = f" steps of rank {worst.evidence['rank']} ("
            worst = replace(worst, message=worst.message.replace(" steps (", of_one, 1))
        yield worst


def _slow_steps_of(facts: Facts, rank: int, steps: Sequence[Step]) -> Finding | None:
    longest = _longest_of_each(steps)
    if len(longest) < 5:
        return None
    lengths = np.array([step.end_ns - step.start_ns for step in longest])
    middle = float(median(lengths))
    scatter = 1.4826 * float(median(np.abs(lengths - middle)))
    slow = lengths > max(_SLOW * middle, middle + 4 * scatter)
    excess = int((lengths[slow] - middle).sum())
    if not slow.any() or slow.mean() > 0.5 or excess < _WORTH * lengths.sum():
        return None
    name, more = _what_slow_steps_have(facts, rank, longest, slow)
    numbers = [step.step for step, is_slow in zip(longest, slow, strict=True) if is_slow]
    epochs = _begun_by(facts, rank, numbers)
    reason, advice = "", _IN_SLOW_STEPS.get(name, _HOST_THEN)
    those, others = ([longest[row] for row in np.flatnonzero(of)] for of in (slow, ~slow))
    took = _host_took(facts, rank, those, others)
    if epochs:
        reason = f": they begin epochs of {epochs} steps, whose loader starts anew"
        advice = _KEEP_LOADER.get(facts.framework, _KEEP_LOADER[""])
    else:
        # A GPU that works for longer does not wait for a thread that waits for a core.
        works = name in CLASSES and name not in IDLE_CAUSES
        for cause, (clause, remedy) in _HOST_TOOK.items():
            if works and cause == "queued_ns":
                continue
            if took[cause] >= _MOSTLY * excess / len(numbers):
                reason, advice = ": " + clause.format(format_ns(took[cause])), remedy
                break
    stopped = any(load.rank == rank and load.throttled >= STOPPED for load in facts.host_load)
    advice = RAISE_QUOTA if advice == CORES_ALONE and stopped else advice
    take, have = ("take", "they have") if len(numbers) > 1 else ("takes", "it has")
    shown = ", ".join(str(number) for number in numbers[:5]) + (", …" if len(numbers) > 5 else "")
    return facts.finding(
        "slow-steps",
        _severity(facts, excess / float(lengths.sum()), name, advice),
        excess // len(longest),
        f"{len(numbers)} of {len(longest)} steps ({shown}) {take} "
        f"{format_ns(float(np.mean(lengths[slow])))} instead of {format_ns(middle)}; what {have} "
        f"more of is {_NAMES[name]} ({format_ns(more)}){reason}",
        advice,
        {
            "slow_steps": len(numbers),
            "rank": rank,
            "class": name,
            "more_ns": more,
            "epoch_steps": epochs,
            **took,
        },
    )


def _host_took(
    facts: Facts, rank: int, slow: Sequence[Step], others: Sequence[Step]
) -> dict[str, int]:
    """Return the nanoseconds of each slow step of a rank that each of `_HOST_TOOK` has."""
    state, process = facts.per_gpu.whole.once(read_host_state), facts.processes.get(rank, -1)
    starts, loading = EMPTY, facts.per_gpu.whole.once(read_loaders)
    if loading is not None:
        # With no workers to start, too, a loader begins.
        rows = loading.select((loading.process == process) & (loading.number > 0))
        rows = rows.of("start workers")
        starts = union(rows.start, rows.end)
    time, counted = time_of(slow), facts.per_gpu.whole.once(read_counters).get(process)
    took = {
        "starting_workers_ns": starts.intersection(time).total,
        "collecting_ns": state.collections.get(process, EMPTY).intersection(time).total,
        "compiling_ns": state.compilations.get(process, EMPTY).intersection(time).total,
        "queued_ns": counted.queued_more(edges_of(slow), edges_of(others)) if counted else 0,
    }
    return {cause: ns // len(slow) for cause, ns in took.items()}


def _begun_by(facts: Facts, rank: int, numbers: Sequence[int]) -> int | None:
    """Return the steps per epoch if most of the slow steps begin an epoch; else None."""
    epochs = [p.step for p in facts.phases if (p.phase, p.rank) == ("epoch", rank)]
    begins = sorted(step for step in epochs if step is not None)
    if len(begins) < 2 or len(set(begins) & set(numbers)) < _EPOCHS * len(numbers):
        return None
    return begins[1] - begins[0]


def _severity(facts: Facts, share: float, name: str, advice: str) -> str:
    """Return the severity: at most medium where another finding covers the class with advice."""
    severity = severity_of(share) or "low"
    if severity == "high" and advice in (COLLECT_BETWEEN, COMPILE_ONCE, CORES_ALONE, RAISE_QUOTA):
        return "medium"
    if severity != "high" or name not in _TOLD_APART:
        return severity
    spent = sum(row.of(name) for row in facts.breakdown)
    whole = sum(row.total_ns for row in facts.breakdown)
    return "medium" if severity_of(spent / whole) == "high" else severity


def _longest_of_each(steps: Sequence[Step]) -> list[Step]:
    """Return, for each step number, the step of the GPU on which it took longest."""
    longest: dict[int, Step] = {}
    for step in steps:
        known = longest.get(step.step)
        if known is None or step.end_ns - step.start_ns > known.end_ns - known.start_ns:
            longest[step.step] = step
    return [longest[number] for number in sorted(longest)]


def _what_slow_steps_have(
    facts: Facts, rank: int, steps: Sequence[Step], slow: Mask
) -> tuple[str, int]:
    """Return the class that grew most in the slow steps, and its growth in nanoseconds.

    Of a rank without a GPU, the classes are its phases, as far as they are known.
    """
    if steps[0].gpu is None:
        shares = _phases_of(facts, rank, steps)
    else:
        shares = {name: [getattr(step, f"{name}_ns") for step in steps] for name in CLASSES}
    table = np.array(list(shares.values()), np.int64)
    more = table[:, slow].mean(axis=1) - [median(row[~slow]) for row in table]
    most = int(np.argmax(more))
    return list(shares)[most], int(more[most])


def _phases_of(facts: Facts, rank: int, steps: Sequence[Step]) -> dict[str, ArrayLike]:
    """Return the nanoseconds of each step by phase; ``host`` is what is left."""
    starts, ends = np.array([(step.start_ns, step.end_ns) for step in steps], np.int64).T
    waited = np.array([step.host_data_ns or 0 for step in steps], np.int64)
    known = facts.per_gpu.whole.once(read_host_state).phases.get(facts.processes.get(rank, -1))
    of = {} if known is None else {name: known.of[name] for name in known.of if name != DATA}
    phases = {name: times.within(starts, ends) for name, times in of.items()}
    rest = ends - starts - waited - sum(phases.values())
    return {"host_data": waited, **phases, "host": rest}


def warmup(facts: Facts) -> Iterator[Finding]:
    """Steps at the start are left out (`info`); the message names the two largest causes that are
    proven, if 10 % or more. In a trace without steps, the GPUs idle for 5 % of it (`medium`; `high`
    from 20 %) while code is compiled or loaded, or memory allocated, as a process does once.

    Cost: their time beyond the usual, spread over all steps; without steps, that idle time.

    Wrong if: later steps are as long.
    """
    once = {cause: sum(names.values()) for cause, names in facts.start_up.items()}
    severity = severity_of(facts.share_of(sum(once.values())))
    if severity is not None:
        spent = sum(once.values())
        parts, advice = _name_causes(once, spent, facts.is_hip)
        yield facts.finding(
            "warmup",
            severity,
            spent,
            f"the GPUs idle {facts.of_step(spent)} for what a process does once{parts}: the "
            "recording shows a start, not training",
            f"record later steps (--steps 20:40; a profiler's warm-up); {advice}",
            {"warmup_ns": spent, "share": round(spent / facts.mean_ns, 4)}
            | {f"{name}_ns": ns for name, ns in once.items()},
        )
    count, chosen = facts.all_steps.warmup, facts.all_steps.chosen
    if once or not count or (chosen is not None and chosen[0] < count):
        return
    windows = max(facts.all_steps.by_rank.values(), key=len)
    spent = int(windows.end[count - 1] - windows.start[0])
    more = max(spent - facts.mean_ns * count, 0)
    warmups = [phase for phase in facts.phases if phase.phase == "warmup"]
    causes = dict(max(warmups, key=lambda phase: phase.cost_ns).causes) if warmups else {}
    parts, advice = _name_causes(causes, more, facts.is_hip)
    yield facts.finding(
        "warmup",
        "info",
        more // max(len(windows), 1),
        f"the first {f'{count} steps take' if count > 1 else 'step takes'} {format_ns(spent)}: "
        f"left out as warm-up{parts}",
        f"measure without them; {advice}",
        {"steps": count, "warmup_ns": spent, "beyond_ns": more}
        | {f"{name}_ns": ns for name, ns in causes.items()},
    )


def _name_causes(causes: Mapping[str, int], whole: int, is_hip: bool) -> tuple[str, str]:
    """Return a clause on the largest causes of warm-up, and advice on the first of them."""
    largest = sorted(causes, key=lambda cause: -causes[cause])[:_MOST_CAUSES]
    shown = [cause for cause in largest if causes[cause] > _PART_OF_WARMUP * whole]
    parts = [f"{format_ns(causes[cause])} of {WARMUP_CAUSES[cause].told}" for cause in shown]
    advice = "a long warm-up is autotuning, compilation or allocation"
    if shown:
        advice = WARMUP_CAUSES[shown[0]].advice
    if is_hip:
        advice = advice.replace("CUDA_MODULE_LOADING=LAZY", "HIP_ENABLE_DEFERRED_LOADING=1")
    return f", with {' and '.join(parts)}" if parts else "", advice


_HARDLY_ANY: Final = 10
"""Kernels below which a recording without steps shows next to nothing of a GPU."""


def low_utilization(facts: Facts) -> Iterator[Finding]:
    """A recording without steps has less than ten kernels, within 5 % of the host's recorded time;
    or none at all, but copies or memsets.

    Cost: the rest of that time; without kernels, all of it.

    Wrong if: `nvidia-smi` shows the card in use for longer than the kernels take.
    """
    kernels = sum(lane.kernels for lane in facts.working)
    if facts.measured or not facts.per_gpu.has_calls or kernels >= _HARDLY_ANY:
        return
    recorded = max(facts.per_gpu.each(_recorded_of_host, facts.working), default=0)
    opaque = sum(lane.opaque_graphs for lane in facts.working)
    if not kernels and not opaque and facts.mean_ns >= MEDIUM * recorded:
        copies = sum(lane.copies for lane in facts.working)
        what = f"{copies:,} copies" if copies > 1 else "one copy" if copies else "memsets"
        yield facts.finding(
            "low-utilization",
            "high",
            facts.mean_ns,
            f"no kernel ran on the GPUs within {format_ns(facts.mean_ns)}, only {what}",
            "record the part of the program that computes, and all of its processes",
            {"kernels": 0, "recorded_ns": recorded},
        )
        return
    if facts.mean_ns >= MEDIUM * recorded:
        return
    yield facts.finding(
        "low-utilization",
        "high",
        recorded - facts.mean_ns,
        f"hardly anything runs on the GPUs: {format_count(kernels, 'kernel')} within "
        f"{format_ns(facts.mean_ns)} of the {format_ns(recorded)} that the host was recorded for",
        "record while the GPUs work; of a program with CUDA graphs what they run, not their "
        "capture",
        {"kernels": kernels, "recorded_ns": recorded},
    )


def _recorded_of_host(gpu: GpuShardView) -> int:
    """Return the nanoseconds from the first to the last call of a GPU's process."""
    calls, process = gpu.calls, gpu.operations.gpu.process
    if calls is None:
        return 0
    threads = calls.threads_of(process)
    mine = slice(calls.first[threads.start], calls.first[threads.stop])
    return int(calls.end[mine].max(initial=0) - calls.start[mine].min(initial=2**62))


def graph_opaque(facts: Facts) -> Iterator[Finding]:
    """CUDA graphs are recorded as a whole (`info`).

    Wrong if: kernels within the graphs are listed.
    """
    graphs = sum(lane.opaque_graphs for lane in facts.per_gpu.lanes)
    if not graphs:
        return
    yield facts.finding(
        "graph-opaque",
        "info",
        0,
        f"{graphs:,} CUDA graphs are recorded as a whole: what runs in them counts as compute, "
        "their copies and collectives included",
        "record the nodes of graphs (gputrace record --graph-nodes, nsys --cuda-graph-trace=node)",
        {"graphs": graphs},
    )


_WORTH_PHASE: Final = 0.01
"""Share of the run after warm-up from which a phase is reported."""
_WAITS: Final = 0.5
"""Share of another rank's phase that a rank must spend without work to count as waiting in it."""
_NOT_WORK: Final = (CLASSES.index("communication"), *map(CLASSES.index, IDLE_CAUSES))

_VALIDATE_ON_ALL: Final = {
    "pytorch": "validate on all ranks: a DistributedSampler for the validation set, and "
    "all_reduce of the sums",
    "tensorflow": "validate under the strategy on all replicas",
    "jax": "validate on all devices: shard the validation set as the training set is",
    "chainer": "validate on all ranks (chainermn.create_multi_node_evaluator)",
}
_SAVE_ASIDE: Final = {
    "pytorch": "save beside the training: torch.distributed.checkpoint.async_save, or copy to "
    "pinned memory and write in another thread",
    "tensorflow": "save beside the training: tf.train.CheckpointOptions(enable_async=True)",
    "jax": "save beside the training: orbax's AsyncCheckpointer",
}


class _Times(Struct, frozen=True, dict=True):
    """Totals over all validations, or all checkpoints, of a run."""

    steps: tuple[int, ...]
    """Steps that they follow."""
    total_ns: int
    """Sum of their durations, each on the rank where it lasts longest."""
    idle_ns: int
    """Time in which the GPU of that rank runs nothing, in them and at their edges."""
    working: tuple[int, ...]
    waits: dict[int, int]
    """Nanoseconds without any work, by rank that waits meanwhile."""


def validation_downtime(facts: Facts) -> Iterator[Finding]:
    """Ranks wait while others validate, or the GPUs idle in validation, for 1 % of the run after
    warm-up (`low`); at most `medium` for a single one.

    Cost: if ranks wait, the time that validating on all of them would save; else the idle time;
    spread over all steps.

    Wrong if: the kernels between the steps train, too.
    """
    times, run = _times(facts, "validation"), _run_ns(facts)
    if times is None:
        return
    ranks = len(times.working) + len(times.waits)
    lost = times.total_ns * len(times.waits) // ranks if times.waits else times.idle_ns
    share = lost / run
    if share < _WORTH_PHASE:
        return
    advice = _VALIDATE_ON_ALL.get(facts.framework, "validate on all ranks, each its part")
    if not times.waits:
        advice = "feed validation as training is fed: workers that persist, larger batches; less "
        advice += "often"
    yield facts.finding(
        "validation-downtime",
        _phase_severity(share, times),
        lost // _steps(facts),
        f"validation {_when(times)} takes {format_ns(times.total_ns)} "
        f"({times.total_ns / run:.0%} of the run after warm-up); {_meanwhile(times)}",
        advice,
        _evidence(times, run, lost),
    )


def checkpoint_stall(facts: Facts) -> Iterator[Finding]:
    """Training stops for a checkpoint, for 1 % of the run after warm-up (`low`); at most `medium`
    for a single one.

    Cost: its duration, spread over all steps.

    Wrong if: the pause stays without the checkpoint.
    """
    times, run = _times(facts, "checkpoint"), _run_ns(facts)
    if times is None or times.total_ns < _WORTH_PHASE * run:
        return
    yield facts.finding(
        "checkpoint-stall",
        _phase_severity(times.total_ns / run, times),
        times.total_ns // _steps(facts),
        f"saving a checkpoint {_when(times)} takes {format_ns(times.total_ns)} "
        f"({times.total_ns / run:.0%} of the run after warm-up); {_meanwhile(times)}",
        _SAVE_ASIDE.get(
            facts.framework, "save beside the training: copy to pinned memory, write in a thread"
        )
        + "; less often",
        _evidence(times, run, times.total_ns),
    )


def _times(facts: Facts, name: str) -> _Times | None:
    """Return the totals of the phases of a name; None where there are none."""
    by_step: dict[int, list[Phase]] = defaultdict(list)
    for phase in facts.phases:
        if phase.phase == name and phase.step is not None and not phase.waits_for:
            by_step[phase.step].append(phase)
    if not by_step:
        return None
    longest = [
        max(same_step, key=lambda p: p.end_ns - p.start_ns) for same_step in by_step.values()
    ]
    working = sorted({phase.rank for same_step in by_step.values() for phase in same_step})
    return _Times(
        steps=tuple(sorted(by_step)),
        total_ns=sum(phase.end_ns - phase.start_ns for phase in longest),
        idle_ns=sum((phase.idle_ns or 0) + (phase.after_ns or 0) for phase in longest),
        working=tuple(working),
        waits=_waits(facts, longest, working),
    )


def _waits(facts: Facts, phases: Sequence[Phase], working: Sequence[int]) -> dict[int, int]:
    """Return the ranks without such a phase that wait while others are in it, with their waits."""
    lanes: dict[int, LaneSummary] = {}
    for lane in facts.per_gpu.lanes:
        if lane.gpu.rank not in working and lane.gpu.rank in facts.all_steps.by_rank:
            lanes.setdefault(lane.gpu.rank, lane)
    starts = np.array([phase.start_ns for phase in phases], np.int64)
    ends = np.array([phase.end_ns for phase in phases], np.int64)
    length = int((ends - starts).sum())
    waited = facts.per_gpu.each(_waited, lanes.values(), same=(starts, ends))
    return {rank: ns for rank, ns in zip(lanes, waited, strict=True) if ns >= _WAITS * length}


def _waited(gpu: GpuShardView, starts: Times, ends: Times) -> int:
    return int(gpu.lane.split(starts, ends)[:, _NOT_WORK].sum())


def _run_ns(facts: Facts) -> int:
    """Return the nanoseconds of the steps after warm-up and of the phases between them.

    The time between the windows of a recording is unknown and does not count.
    """
    warm = facts.all_steps.warmup
    lengths = [
        int(steps.lengths[warm:].sum())
        + sum(phase.end - phase.start for phase in steps.interludes if phase.after >= warm)
        for steps in facts.all_steps.by_rank.values()
        if len(steps) > warm
    ]
    return max(lengths, default=1)


def _steps(facts: Facts) -> int:
    """Return the number of steps after warm-up, at least 1."""
    most = max(map(len, facts.all_steps.by_rank.values()), default=0)
    return max(most - facts.all_steps.warmup, 1)


def _phase_severity(share: float, times: _Times) -> str:
    """Return the severity, at most medium for a single phase: its frequency is unknown."""
    severity = severity_of(share) or "low"
    return "medium" if severity == "high" and len(times.steps) == 1 else severity


def _when(times: _Times) -> str:
    return f"after {format_ids('step', times.steps[:5])}{', …' if len(times.steps) > 5 else ''}"


def _meanwhile(times: _Times) -> str:
    """Say which ranks work and which wait, or how long the GPUs idle."""
    if not times.waits:
        return f"the GPUs run nothing for {format_ns(times.idle_ns)} of it"
    waiting, longest = sorted(times.waits), max(times.waits.values())
    verb = "waits" if len(waiting) == 1 else "wait"
    who = format_ids("rank", times.working)
    return f"{format_ids('rank', waiting)} {verb} {format_ns(longest)} for {who}"


def _evidence(times: _Times, run: int, lost: int) -> dict[str, float | int | str | None]:
    return {
        "times": len(times.steps),
        "after_steps": format_ranges(times.steps),
        "total_ns": times.total_ns,
        "idle_ns": times.idle_ns,
        "lost_ns": lost,
        "share_of_run": round(lost / run, 4),
        "working_ranks": format_ranges(times.working),
        "waiting_ranks": format_ranges(sorted(times.waits)),
        "wait_ns": max(times.waits.values(), default=0),
    }


def no_gpu_activity(facts: Facts) -> Iterator[Finding]:
    """The trace holds host activity alone (`low`); the message gives the reason.

    Wrong if: `nvidia-smi` shows the program on a GPU.
    """
    if facts.trace.no_gpu is None:
        return
    why, remedy = facts.trace.no_gpu
    yield facts.finding(
        "no-gpu-activity",
        "low",
        0,
        f"no GPU activity was recorded ({why}): kernels, copies and idle time are unknown; "
        f"{remedy}",
        "`gputrace doctor` says what a machine lacks to record its GPUs",
        {"why": why},
    )
