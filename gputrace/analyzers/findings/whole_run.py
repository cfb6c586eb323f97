"""Findings about the run as a whole, its phases, the recording, and traces without GPU activity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.audit import find_missing
from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.findings.copies import weights_until
from gputrace.analyzers.findings.facts import HIGH, MEDIUM, Facts, severity_of
from gputrace.analyzers.findings.host_threads import wait_between_passes
from gputrace.analyzers.findings.host_work import save_aside
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.grouping import median
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.ledger import lost_time
from gputrace.analyzers.ledger.causes import Host
from gputrace.analyzers.python_samples import SampledLine, host_is_at
from gputrace.analyzers.run_phases import WARMUP_CAUSES, find_start_up
from gputrace.analyzers.step_phases import read_phases
from gputrace.analyzers.steps.rollouts import FEWEST_TURNS, MOST_UPDATES
from gputrace.model.attempts import attempts_of
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.host import CHECKPOINT
from gputrace.model.intervals import (
    EMPTY,
    Intervals,
    Times,
    merge_touching,
    number_windows,
    union,
)
from gputrace.model.results import Finding, Missing, Phase
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from gputrace.units import (
    format_count,
    format_ids,
    format_ns,
    format_pair,
    format_ranges,
    format_steps,
)


def recorder_overhead(facts: Facts) -> Iterator[Finding]:
    """The recorder itself keeps the GPUs idle; `medium` from 1 %, `high` from 5 %.

    Cost: idle time with that cause; if control stretches measured it, the overhead that they show
    (`info`: findings and predictions then describe the program without the recorder).

    Wrong if: the program is as slow without the recorder.
    """
    cost = facts.all_steps.cost
    if cost is not None:
        if cost.added_ns:
            evidence = {
                "step_ns": cost.step_ns,
                "unrecorded_step_ns": cost.unrecorded_step_ns,
                "low_ns": cost.low_ns,
                "high_ns": cost.high_ns,
                "control_steps": cost.steps,
            }
            advice = "nothing to do; to record less of it, use --every or --api none"
            details = [cost.basis, "all findings are about the program without it"]
            yield facts.finding(
                "recorder-overhead", "info", cost.added_ns, str(cost), advice, evidence, details
            )
        return
    yield from facts.costly(
        "recorder-overhead",
        "{gpus} {cost} for the recorder itself",
        "record less: fewer kinds of events, a shorter window; compare step times with and "
        "without the recorder",
        ["the run without it is faster than these figures"],
        medium=0.01,
        high=0.05,
    )


def missing_rows(facts: Facts) -> tuple[Missing, ...]:
    """Return the rows that the recording lacks, as its other rows show."""
    return find_missing(facts.per_gpu, facts.all_steps, facts.collectives)


_NO_VERDICT_SHARE: Final = 0.10
"""Share of a rank's GPU operations whose lack leaves no figure right."""


def lost_records(facts: Facts) -> Iterator[Finding]:
    """Rows or files were lost, the recorder warned of losses, or other rows show that 1 % of a
    rank's rows are missing (`low`; `high`, and no verdict, if 10 % of its GPU operations are
    missing).

    Wrong if: another recording of the program has the same number of rows.
    """
    quality, missing = facts.trace.quality, facts.once(missing_rows)
    of_gpus = [part for part in missing if part.rows in ("operations", "kernels")]
    if of_gpus and of_gpus[0].share >= _NO_VERDICT_SHARE:
        yield facts.finding(
            "lost-records",
            "high",
            0,
            f"no verdict is possible: the recording lacks {of_gpus[0]}",
            "record again, for a shorter time or with fewer kinds of events; cut traces at steps",
            {"missing": of_gpus[0].count, "share": round(of_gpus[0].share, 4)},
            [of_gpus[0].evidence, "the shares of time below are wrong"],
        )
        return
    if not quality.dropped and not quality.warnings and not quality.left_out and not missing:
        return
    rows, files = sum(quality.dropped.values()), len(quality.left_out)
    losses = [f"{format_count(files, 'file')} left out or cut short"] if files else []
    losses += [f"{format_count(rows, 'row')} cannot be used"] if rows else []
    losses += quality.warnings[:1] or [
        f"the recording lacks {part} ({part.evidence})" for part in missing[:1]
    ]
    yield facts.finding(
        "lost-records",
        "low",
        0,
        "the recording is incomplete",
        ("copy the files again; " if files else "")
        + "record again, for a shorter time or with fewer kinds of events, if the figures matter",
        {
            "dropped_rows": rows,
            "warnings": len(quality.warnings),
            "left_out": files,
            "missing": sum(part.count for part in missing),
        },
        losses,
    )


def claim_start_up(host: Host) -> Intervals:
    """Prove idle time for what a process does once, where no step is known to be without it."""
    if host.repeats or host.view.calls is None:
        return EMPTY
    return reduce(merge_touching, find_start_up(host.view).values(), EMPTY)


def claim_weights(host: Host) -> Intervals:
    """Prove copies of weights, in a trace without steps before the first kernel."""
    if len(host.steps[0]):
        return EMPTY
    return union([host.window.start], [weights_until(host.view)])


def _idle_once(gpu: GpuShardView, time: Intervals) -> dict[str, int]:
    """Return the nanoseconds of some time that are charged to start-up, by what it consists of."""
    charged = lost_time(gpu).get("warmup", EMPTY).intersection(time)
    return {cause: part.intersection(charged).total for cause, part in find_start_up(gpu).items()}


def warmup(facts: Facts) -> Iterator[Finding]:
    """Steps at the start are left out (`info`); the message names the two largest proven causes, if
    they take 10 % or more. In a trace without steps, the GPUs idle for 5 % of it (`medium`; `high`
    from 20 %) during one-time work: compiling or loading code, or allocating memory.

    Cost: the extra time of these steps, spread over all steps; without steps, that idle time.

    Wrong if: later steps are as long.
    """
    spent = 0 if facts.repeats else facts.ledger.mean("warmup")
    severity = severity_of(facts.share_of(spent))
    if severity is not None:
        each = facts.each(_idle_once)
        once = {cause: sum(of[cause] for of in each) // facts.turns for cause in each[0]}
        parts, advice = _name_causes(once, spent, facts.is_hip)
        yield facts.finding(
            "warmup",
            severity,
            spent,
            f"{facts.do('wait')} {facts.of_step(spent)} for start-up work, done once",
            f"record later steps (--steps 20:40; a profiler's warm-up); {advice}",
            {"warmup_ns": spent, "share": round(spent / facts.mean_ns, 4)}
            | {f"{name}_ns": ns for name, ns in once.items()},
            [f"of it, {parts}" if parts else "", "this is start-up, not training"],
        )
    count, chosen = facts.all_steps.warmup, facts.all_steps.chosen
    if not count or not facts.measured or (chosen is not None and chosen[0] < count):
        return
    windows = max(facts.all_steps.by_rank.values(), key=len)
    spent = int(windows.end[count - 1] - windows.start[0])
    more = max(spent - facts.mean_ns * count, 0)
    warmups = [phase for phase in facts.phases if phase.phase == "warmup"]
    causes = dict(max(warmups, key=lambda phase: phase.cost_ns).causes) if warmups else {}
    parts, advice = _name_causes(causes, more, facts.is_hip)
    # Without a GPU, all steps are recorded.
    records = bool(facts.per_gpu.operations)
    option = f" (record --steps {count}:{count + _STEPS_TO_RECORD})" if records else ""
    yield facts.finding(
        "warmup",
        "info",
        more // max(len(windows), 1),
        f"the first {'step is' if count == 1 else f'{count} steps are'} warm-up, left out: "
        f"{format_ns(spent)}" + (f", of which {parts}" if parts else ""),
        f"time only later steps, as warm-up hides their cost{option}; {advice}",
        {"steps": count, "warmup_ns": spent, "beyond_ns": more}
        | {f"{name}_ns": ns for name, ns in causes.items()},
    )


_STEPS_TO_RECORD: Final = 20
"""Steps of the recording that is proposed to leave warm-up out."""
_NAMED_CAUSE_PART: Final = 0.1
"""Share of warm-up's cost from which a cause is named."""
_CAUSES_NAMED: Final = 2
"""Maximum number of causes named."""


def _name_causes(causes: Mapping[str, int], whole: int, is_hip: bool) -> tuple[str, str]:
    """Return the largest causes of warm-up, ``10.6 s is host work``, and advice on the first."""
    largest = sorted(causes, key=lambda cause: -causes[cause])[:_CAUSES_NAMED]
    shown = [cause for cause in largest if causes[cause] > _NAMED_CAUSE_PART * whole]
    parts = [f"{format_ns(causes[cause])} is {WARMUP_CAUSES[cause].told}" for cause in shown]
    advice = "a long warm-up is autotuning, compilation or allocation"
    if shown:
        advice = WARMUP_CAUSES[shown[0]].advice
    if is_hip:
        advice = advice.replace("CUDA_MODULE_LOADING=LAZY", "HIP_ENABLE_DEFERRED_LOADING=1")
    return " and ".join(parts), advice


_FEWEST_KERNELS: Final = 10
"""Kernels below which a recording without steps shows next to nothing of a GPU."""


_PART_OF_PASS: Final = 0.01
"""Part of the host's recorded time below which a single pass is next to nothing of it."""
_HOST_ROWS: Final = frozenset((Kind.RANGE, Kind.OPERATOR, Kind.DATA_WAIT))
"""Rows that show, besides calls, for how long a host was recorded."""


def runs_almost_nothing(facts: Facts) -> bool:
    """Return whether a recording without steps shows next to nothing of a GPU."""
    kernels = sum(lane.kernels for lane in facts.working)
    is_whole = facts.per_gpu.has_calls and not facts.idle_unknown
    if facts.repeats or not is_whole:
        return False
    recorded, waited, *_ = facts.once(_recorded_host)
    if kernels >= _FEWEST_KERNELS:
        is_little = facts.mean_ns < max(_PART_OF_PASS * recorded, MEDIUM * waited)
        return facts.all_steps.kind == "pass" and is_little
    opaque = sum(lane.opaque_graphs for lane in facts.working)
    return facts.mean_ns < MEDIUM * recorded or not (kernels or opaque)


def low_utilization(facts: Facts) -> Iterator[Finding]:
    """A recording without steps has fewer than ten kernels, all within 5 % of the host's recorded
    time, or only copies or memsets; or a single pass is within 1 % of it, or 5 % of its waits for
    data.

    Cost: the rest of that time; without kernels, all of it.

    Wrong if: `nvidia-smi` shows the card in use for longer than the kernels take.
    """
    if not runs_almost_nothing(facts):
        return
    kernels = sum(lane.kernels for lane in facts.working)
    recorded, waited, spent, call, captures = facts.once(_recorded_host)
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
    yield facts.finding(
        "low-utilization",
        "high",
        recorded - facts.mean_ns,
        f"almost nothing runs on the GPUs: {format_count(kernels, 'kernel')} within "
        f"{format_ns(facts.mean_ns)} of the {format_ns(recorded)} that the host was recorded for",
        "record several batches: the first waits for the loader to start"
        if waited
        else f"record while the GPUs work{_REPLAYS if captures else ''}",
        {"kernels": kernels, "recorded_ns": recorded, "data_wait_ns": waited},
        [
            f"the program waits for data for {format_ns(waited)} of that" if waited else "",
            f"{call} takes {format_ns(spent)}" if spent >= HIGH * recorded else "",
        ],
    )


_REPLAYS: Final = "; of CUDA graphs the replay, not the capture"


class _RecordedHost(NamedTuple):
    """Nanoseconds from the first to the last row of the host in a GPU's process, those of its waits
    for data, those of the CUDA call that takes longest in all, its name, and whether it captures
    CUDA graphs.
    """

    ns: int = 0
    waited_ns: int = 0
    call_ns: int = 0
    call: str = ""
    captures: bool = False


def _recorded_host(facts: Facts) -> _RecordedHost:
    """Return what was recorded of the host with most; 0 without calls."""
    return max(facts.per_gpu.each(_recorded_of_host, facts.working), default=_RecordedHost())


def _recorded_of_host(gpu: GpuShardView) -> _RecordedHost:
    calls, process = gpu.calls, gpu.operations.gpu.process
    if calls is None:
        return _RecordedHost()
    threads = calls.threads_of(process)
    mine = slice(calls.first[threads.start], calls.first[threads.stop])
    rows = gpu.trace.events(_HOST_ROWS & gpu.trace.kinds, ("start", "end", "kind", "process"))
    rows = rows.select((rows.process == process) & (rows.end >= rows.start))
    waits = rows.select(rows.kind == Kind.DATA_WAIT)
    last = max(calls.end[mine].max(initial=0), rows.end.max(initial=0))
    first = min(calls.start[mine].min(initial=2**62), rows.start.min(initial=2**62))
    lengths, names = calls.end[mine] - calls.start[mine], calls.name[mine]
    text = gpu.trace.names(distinct_ids(names))
    spent = {text[id].partition("_v")[0]: int(lengths[names == id].sum()) for id in text}
    call = max(spent, key=lambda name: spent[name], default="")
    captures = any("BeginCapture" in name for name in spent)
    waited = union(waits.start, waits.end).total
    return _RecordedHost(int(last - first), waited, spent.get(call, 0), call, captures)


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
        f"{graphs:,} CUDA graphs are recorded as a whole: everything in them counts as compute",
        "record the nodes of graphs (gputrace record --graph-nodes, nsys --cuda-graph-trace=node)",
        {"graphs": graphs},
        ["so do the copies and collectives in them"],
    )


_PHASE_SHARE: Final = 0.01
"""Share of the run after warm-up from which a phase is reported."""
_WAITING_PART: Final = 0.5
"""Share of another rank's phase that a rank must spend without work to count as waiting in it."""
_NOT_WORK: Final = (CLASSES.index("communication"), *map(CLASSES.index, IDLE_CAUSES))

_VALIDATE_ON_ALL: Final = {
    "pytorch": "validate on all ranks: a DistributedSampler for the validation set, and "
    "all_reduce of the sums",
    "tensorflow": "validate under the strategy on all replicas",
    "jax": "validate on all devices: shard the validation set like the training set",
    "chainer": "validate on all ranks (chainermn.create_multi_node_evaluator)",
}


def restarts(facts: Facts) -> Iterator[Finding]:
    """The run was restarted: an attempt before the one that is analyzed ended, which cost 1 % of
    the run (`low`, `medium` from 5 %, `high` from 20 %).

    Cost: the time from the last step of an attempt to the end of the next one's first step, spread
    over all steps.

    Wrong if: the processes are runs of their own, one after another.
    """
    trace = facts.trace
    attempts = [each for each in attempts_of(trace.lives) if each.number <= trace.attempt]
    lost = sum(max(later.resumed - each.stopped, 0) for each, later in pairwise(attempts))
    run = attempts[-1].stopped - attempts[0].start if attempts else 0
    if not lost or lost < _PHASE_SHARE * run:
        return
    before = attempts[-2]
    again = format_count(len(attempts) - 1, "restart")
    yield facts.finding(
        "restarts",
        severity_of(lost / run) or "low",
        lost // max(attempts[-1].steps, 1),
        f"{again} took {lost / run:.0%} of the run ({format_pair(lost, 'of', run)}) without a step",
        "find in the program's output why it ended; save checkpoints more often, in the background",
        {
            "restarts": len(attempts) - 1,
            "lost_ns": lost,
            "share_of_run": round(lost / run, 4),
            "steps_before": sum(each.steps for each in attempts[:-1]),
            "exit_code": before.exit_code,
        },
        [f"attempt {before.number} {before}", "what it did after its last checkpoint is lost"],
    )


class _Times(Struct, frozen=True, dict=True):
    """Totals over all validations, or all checkpoints, of a run."""

    steps: tuple[int, ...]
    """Steps that they follow."""
    total_ns: int
    """Sum of their durations, each on the rank where it lasts longest."""
    idle_ns: int
    """Time in which the GPU of that rank runs nothing in them."""
    working: tuple[int, ...]
    waits: dict[int, int]
    """Nanoseconds without any work, by rank that waits meanwhile."""
    line: SampledLine | None
    """Line at which most samples met the host while it launched them."""


_ROLLED_PART: Final = 0.5
"""Part of the run from which what lies between a few updates may be their rollouts, too."""


def validation_downtime(facts: Facts) -> Iterator[Finding]:
    """Ranks wait while others validate, or the GPUs idle in validation, for 1 % of the run after
    warm-up (`low`); at most `medium` for a single validation.

    Cost: if ranks wait, the time that validating on all of them would save; otherwise the idle
    time; spread over all steps.

    Wrong if: the kernels between the steps are training too.
    """
    times, run = _times(facts, "validation"), _run_ns(facts)
    if times is None:
        return
    ranks = len(times.working) + len(times.waits)
    lost = times.total_ns * len(times.waits) // ranks if times.waits else times.idle_ns
    share = lost / run
    if share < _PHASE_SHARE:
        return
    advice = _VALIDATE_ON_ALL.get(facts.framework, "validate on all ranks, each on its part")
    if not times.waits:
        advice = "feed validation like training: persistent workers, larger batches; or validate "
        advice += "less often"
    what, advised = "validation takes", ""
    often = len(times.steps) >= FEWEST_TURNS and median(np.diff(times.steps)) <= MOST_UPDATES
    if often and times.total_ns > _ROLLED_PART * run and not times.waits:
        what, advised = (
            "validation or rollouts take",
            "if it rolls out, name it, and record again: ",
        )
        advised += "with gputrace.annotate('rollout'); else "
    yield facts.finding(
        "validation-downtime",
        _phase_severity(share, times),
        lost // _steps(facts),
        f"{what} {_of_run(times, run)}",
        advised + advice,
        _evidence(times, run, lost),
        [
            _when(facts, times),
            _meanwhile(facts, times),
            times.line.host_is_at if times.line else "",
        ],
    )


def checkpoint_stall(facts: Facts) -> Iterator[Finding]:
    """Training stops for a checkpoint: between steps for 1 % of the run after warm-up (`low`), at
    most `medium` for a single one; or within steps, or in all of the run where there is no GPU
    activity, for 5 % of the time (`medium`) or 20 % (`high`).

    Cost: its duration, spread over all steps.

    Wrong if: the pause remains without the checkpoint.
    """
    times, run = _times(facts, "checkpoint"), _run_ns(facts)
    advice = save_aside(facts.framework)
    if not facts.per_gpu.operations:
        yield from _saves_without_gpu(facts, run, advice)
    elif times is None:
        yield from facts.costly(
            "checkpoint-stall", "{gpus} {cost} for saving checkpoints{at}", advice
        )
    elif times.total_ns >= _PHASE_SHARE * run:
        yield facts.finding(
            "checkpoint-stall",
            _phase_severity(times.total_ns / run, times),
            times.total_ns // _steps(facts),
            f"saving checkpoints takes {_of_run(times, run)}",
            advice,
            _evidence(times, run, times.total_ns),
            [_when(facts, times), _meanwhile(facts, times)],
        )


def _saves_without_gpu(facts: Facts, run: int, advice: str) -> Iterator[Finding]:
    """Yield the finding of a program without a GPU, on the rank that saves for longest."""
    longest = 0
    for rank, steps in facts.all_steps.by_rank.items():
        phases = facts.per_gpu.whole.once(read_phases).get(facts.processes.get(rank, -1))
        if phases is not None and len(steps) > facts.all_steps.warmup:
            since, until = steps.start[facts.all_steps.warmup], steps.end[-1]
            longest = max(longest, phases.of[CHECKPOINT].clip(since, until).total)
    severity = severity_of(longest / run)
    if severity is not None:
        cost = longest // _steps(facts)
        yield facts.finding(
            "checkpoint-stall",
            severity,
            cost,
            f"saving checkpoints takes {longest / run:.0%} of the run after warm-up "
            f"({format_pair(longest, 'of', run)})",
            advice,
            {"total_ns": longest, "share_of_run": round(longest / run, 4)},
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
        max(same_step, key=lambda p: p.end_ns - p.start_ns)
        for _, same_step in sorted(by_step.items())
    ]
    working = sorted({phase.rank for same_step in by_step.values() for phase in same_step})
    # The ranks without such a phase that wait while others are in it, with their waits.
    lanes: dict[int, LaneSummary] = {}
    for lane in facts.per_gpu.lanes:
        if lane.gpu.rank not in working and lane.gpu.rank in facts.all_steps.by_rank:
            lanes.setdefault(lane.gpu.rank, lane)
    starts = np.array([phase.start_ns for phase in longest], np.int64)
    ends = np.array([phase.end_ns for phase in longest], np.int64)
    length = int((ends - starts).sum())
    waited = facts.per_gpu.each(_waited, lanes.values(), same=(starts, ends))
    waits = {
        rank: ns for rank, ns in zip(lanes, waited, strict=True) if ns >= _WAITING_PART * length
    }
    lanes_at_work = [lane for lane in facts.per_gpu.lanes if lane.gpu.rank in working]
    launching = facts.per_gpu.each(_launching, lanes_at_work, same=(starts, ends))
    begin, last = np.concatenate(launching, axis=1) if launching else (starts, ends)
    return _Times(
        steps=tuple(sorted(by_step)),
        total_ns=sum(phase.end_ns - phase.start_ns for phase in longest),
        idle_ns=sum(phase.idle_ns or 0 for phase in longest),
        working=tuple(working),
        waits=waits,
        line=facts.line_in(union(begin, last), {facts.processes[rank] for rank in working}),
    )


def _launching(gpu: GpuShardView, starts: Times, ends: Times) -> Times:
    """Return when the host began and ended to launch what a GPU runs in some phases, of shape
    (2, phases): once all is launched, it may wait for others, or be at the next step.

    Phases of which nothing is known are returned as they are.
    """
    first, last = starts.copy(), np.zeros_like(ends)
    if gpu.calls is not None:
        phase = number_windows(gpu.operations.start, starts, ends)
        issued_by = gpu.calls.issued_by(gpu.operations.events)
        known = (phase >= 0) & (issued_by != NOBODY)
        np.minimum.at(first, phase[known], gpu.calls.start[issued_by[known]])
        np.maximum.at(last, phase[known], gpu.calls.end[issued_by[known]])
    return np.stack([first, np.where(last > first, np.minimum(last, ends), ends)])


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


def _of_run(times: _Times, run: int) -> str:
    """Return ``54% of the run after warm-up (3.37 of 6.24 s)``."""
    amounts = format_pair(times.total_ns, "of", run)
    return f"{times.total_ns / run:.0%} of the run after warm-up ({amounts})"


def _when(facts: Facts, times: _Times) -> str:
    """Name the steps that such a phase precedes, as slow steps are named."""
    last = max(len(steps) for steps in facts.all_steps.by_rank.values()) - 1
    follow = [step + 1 for step in times.steps if step < last]
    clauses = [f"before {'step' if len(follow) == 1 else 'steps'} {format_steps(follow)}"]
    at_end = ["after the last step"] if len(follow) < len(times.steps) else []
    return f"it comes {' and '.join(clauses * bool(follow) + at_end)}"


def _meanwhile(facts: Facts, times: _Times) -> str:
    """Say which ranks work and which wait, or how long the GPUs idle."""
    if not times.waits:
        return f"{facts.do('run')} nothing for {format_ns(times.idle_ns)} of it"
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


_OF_SAMPLES: Final = 0.5
"""Share of the samples at a line from which it is what is said of a program without passes."""


def no_gpu_activity(facts: Facts) -> Iterator[Finding]:
    """The trace holds only host activity (`low`); the details give the reason, and what the host
    waits between the passes of an update. Where neither passes nor waits were recorded, the line of
    at least half of the samples comes first.

    Wrong if: `nvidia-smi` shows the program on a GPU.
    """
    if facts.trace.no_gpu is None:
        return
    why, remedy = facts.trace.no_gpu
    unknown = "no GPU activity was recorded: kernels, copies and idle time are unknown"
    to_record = f"{remedy}; `gputrace doctor` says what a machine lacks to record its GPUs"
    is_known = facts.step_phases or facts.mean("host_data")
    lines = () if facts.steps and is_known else facts.host_lines[:1]
    at = [host_is_at(each.line, f"{each.share:.0%} of the samples") for each in lines]
    message, first = unknown, ""
    if lines and lines[0].share >= _OF_SAMPLES:
        message, first, at = at[0], f"look at {lines[0].line}; ", [unknown]
    mark = "" if facts.steps else "mark the steps (gputrace.step()) to see what they wait for; "
    yield facts.finding(
        "no-gpu-activity",
        "low",
        0,
        message,
        f"{first}{mark}{to_record}",
        {"why": why},
        [*at, why, *wait_between_passes(facts)],
    )
