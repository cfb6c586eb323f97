"""Causes of lost time in what the host does: garbage collection, compilation, the optimizer on the
host, modes for debugging that were left on, phases of reinforcement learning that updates wait for,
and other work than to launch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.findings.data_feeding import restarts
from gputrace.analyzers.findings.facts import HIGH, Facts, severity_of
from gputrace.analyzers.gpu_shards import GpuShardView, Shard
from gputrace.analyzers.grouping import times_by_process
from gputrace.analyzers.host_state import read_host_state
from gputrace.analyzers.ledger import lost_time
from gputrace.analyzers.ledger.causes import Host
from gputrace.analyzers.python_samples import SampledLine
from gputrace.analyzers.step_phases import read_phases
from gputrace.analyzers.steps.inferred import find_returned
from gputrace.analyzers.steps.rollouts import read_named_ranges
from gputrace.model.events import Events, Kind, distinct_ids, is_among
from gputrace.model.host import (
    BACKWARD,
    CHECKPOINT,
    CLIPPING,
    DATA,
    FORWARD,
    OPTIMIZER,
    PHASES,
    REFERENCE,
    REWARD,
    ROLLOUT,
    UNSCALING,
    UPDATE,
    WEIGHT_SYNC,
    StepPhase,
    StepPhases,
)
from gputrace.model.intervals import EMPTY, Intervals, merge_touching, union
from gputrace.model.results import Finding
from gputrace.sanitize import clean
from gputrace.units import format_count, format_ns, format_number

_LOW_SHARE: Final = 0.02
"""Share of a step from which collections and compilations are reported."""
COLLECT_BETWEEN: Final = (
    "gc.freeze() after set-up, then gc.disable() with gc.collect() between some steps, the same "
    "ones on all ranks"
)
_CALLED_SUFFIX: Final = ", called"
"""Part of the name of a collection that the program asked for."""
_CALL_LESS: Final = (
    "take gc.collect() out of the loop, and torch.cuda.empty_cache() with it: call it once before "
    "the first step, or between some epochs"
)
COMPILE_ONCE: Final = (
    "use few input shapes (pad, drop the last batch), or mark varying dimensions as dynamic "
    "(torch.compile(dynamic=True), mark_dynamic), and pass no Python numbers that change"
)
_HOST_OPTIMIZERS: Final = r"(?i)cpu_?(adam|lion|adagrad|optim|offload)"
"""Names of ranges in which an optimizer computes on the host, such as DeepSpeedCPUAdam.step."""
_ON_THE_GPU: Final = (
    "keep the optimizer's state and step on the GPU (optimizers with 8-bit states or sharded ones "
    "where memory is short); else pin the host's copies, and let the step of some layers run "
    "beside the backward pass of others"
)
_FEWEST_READS: Final = 10
"""Values read back in a step from which the finding on the host's work says so."""


def claim_collections(host: Host) -> Intervals:
    """Prove garbage collections in any thread of the process: all others wait for Python's lock."""
    return host.state.collections.get(host.process, EMPTY)


def claim_compilations(host: Host) -> Intervals:
    """Prove compilations of a part of the program: of a stretch without CUDA calls of which most is
    recorded as such, all, as compilers trace and look up between their parts.
    """
    compiled = host.state.compilations.get(host.process, EMPTY)
    within = compiled.within(host.pauses.start, host.pauses.end)
    return merge_touching(compiled, host.pauses.select(2 * within > host.pauses.lengths))


def claim_checkpoints(host: Host) -> Intervals:
    """Prove that the thread that trains saves a checkpoint: it is recorded as such."""
    saves = EMPTY if host.phases is None else host.phases.of[CHECKPOINT]
    return merge_touching(saves, host.copied_by_calls_in(saves)) if len(saves) else saves


def read_host_optimizers(shard: Shard) -> Mapping[int, Intervals]:
    """Read when each process is in ranges of an optimizer that computes on the host."""
    trace = shard.trace
    if Kind.RANGE not in trace.kinds:
        return {}
    ids = distinct_ids(trace.events([Kind.RANGE], ["name"]).name)
    if not (named := trace.search(ids, _HOST_OPTIMIZERS)):
        return {}
    events = trace.events([Kind.RANGE], ("start", "end", "name", "process"))
    return times_by_process(events.select(is_among(events.name, [*named])))


def claim_host_optimizer(host: Host) -> Intervals:
    """Prove that the optimizer computes on the host: its steps launch nothing, or are ranges that
    say so. All between the backward pass and the next forward pass then belongs to it, which
    brings the gradients and returns the parameters, and so do the copies that are issued there.
    A program's own optimizer shows by the copies that bring gradients and return parameters.
    """
    phases = host.phases
    named = host.view.once(read_host_optimizers).get(host.process, EMPTY)
    if phases is not None and not len(phases.of[OPTIMIZER]):
        if len(phases.of[ROLLOUT]) and not len(phases.of[BACKWARD]):
            return named  # An engine, which gets new weights and returns tokens.
        gone, back = find_returned(operations := host.view.operations)
        return merge_touching(named, union(operations.start[gone], operations.end[back]))
    updates = host.with_calls(EMPTY if phases is None else phases.of[OPTIMIZER])
    if phases is None or not len(updates) or host.count_issues(updates) >= len(updates):
        return named
    passes = merge_touching(phases.of[FORWARD], phases.of[BACKWARD])
    between = merge_touching(passes, phases.of[DATA]).complement(*host.window)
    between = between.select(updates.within(between.start, between.end) > 0)
    return merge_touching(merge_touching(named, between), host.copied_by_calls_in(between))


def host_optimizer(facts: Facts) -> Iterator[Finding]:
    """The optimizer computes on the host while the GPUs wait, for 5 % of the time (`medium`) or 20
    % (`high`).

    Cost: that time, and the copies of gradients and parameters with nothing beside them.

    Wrong if: the step is as long with the optimizer on the GPU.
    """
    copied = sum(r.ns for r in facts.ledger.of("host-optimizer") if r.of == "copy")
    spent = format_ns(copied // facts.turns)
    yield from facts.costly(
        "host-optimizer",
        "{gpus} {cost} for the optimizer on the host (CPU)",
        _ON_THE_GPU,
        [f"{spent} of it is in copies of gradients and parameters" if copied else ""],
    )


def claim_host_work(host: Host) -> Intervals:
    """Prove that the host does other things than to issue a pass: no CUDA call for a millisecond
    and more, or none before a copy to the GPU in a forward pass; or, where the phases of a step are
    recorded, it is in none of them, and does not launch one kernel after another either.
    """
    causes = host.view.lane.causes
    phases = host.phases
    idle = merge_touching(host.pauses.difference(causes.in_mpi), causes.between_calls)
    if phases is None or not len(phases.of[FORWARD]):
        return idle
    known = reduce(merge_touching, phases.of.values(), EMPTY)
    return merge_touching(idle, known.complement(*host.window).difference(host.streams))


_LESS_HOST_WORK: Final = (
    "do it less often, ahead of time, on the GPU, or in another thread or process; vectorize it"
)
_READ_LESS: Final = (
    "read values less often: every 50 steps, or all of them at once (torch.stack, one .tolist()); "
    "fuse the kernels that compute them (torch._foreach_norm)"
)
_LOG_LESS: Final = "log less often: fewer histograms and images, scalars every 50 steps"
_NAME_THE_LINE: Final = "; record with --python to name the line"
_LOGGERS: Final = (
    r"(?i)tensorboard|wandb|mlflow|comet_ml|neptune|clearml|aim/|summary\.py|event_file_writer"
    r"|(^|/)logging/|loguru|csv_logs"
)
"""Files of loggers and trackers."""

_SAVERS: Final = (
    r"(^|/)(serialization\.py:\d+ (?!\S*(load|reader))|safetensors/\S+:\d+ \S*save"
    r"|state_dict_saver\.py:)"
)
"""Functions of torch, safetensors and torch.distributed.checkpoint that write a checkpoint."""

_SAVE_ASIDE: Final = {
    "pytorch": "save in the background: torch.distributed.checkpoint.async_save, or copy to "
    "pinned memory and write in another thread",
    "tensorflow": "save in the background: tf.train.CheckpointOptions(enable_async=True)",
    "jax": "save in the background: orbax's AsyncCheckpointer",
}


def save_aside(framework: str) -> str:
    """Return the advice for checkpoints that hold the training up."""
    aside = _SAVE_ASIDE.get(
        framework, "save in the background: copy to pinned memory, write in a thread"
    )
    return f"{aside}; or save less often"


def host_work(facts: Facts) -> Iterator[Finding]:
    """The GPUs wait for the program's own work on the host: it makes no CUDA call for a millisecond
    and more, or is neither in a forward pass, a backward pass, the optimizer nor the loader.
    Without GPU activity, the latter takes 5 % of a step (`medium`) or 20 % (`high`).

    The message names the line of the program, and how often that work reads values back.

    Cost: that time; without GPU activity, less the part in which the thread waits or lacks a core.

    Wrong if: the step is no shorter without the work at that line.
    """
    if not facts.per_gpu.operations:
        yield from _own_work(facts)
        return
    rows = facts.ledger.of("host-work")
    lines = [row.line for row in rows if row.line is not None]
    reads = facts.mean_over_gpus(_reads_between_passes) if facts.trains else 0
    details, advice = [], _LESS_HOST_WORK
    if reads >= _FEWEST_READS:
        details.append(f"it reads {reads:,} values back a step (.item(), .cpu(), print)")
        advice = _READ_LESS
    for what, cure in _known_work(facts, [row.frame for row in rows]):
        details, advice = [what, *details], cure
    if not lines and rows and (place := _line_of_a_part(facts) or _range_of_work(facts)):
        details.append(place)
    ask = "" if lines or facts.lines is not None or not facts.framework else _NAME_THE_LINE
    yield from facts.costly(
        "host-work", "{gpus} {cost} while the host does other work{at}", advice + ask, details
    )


def _known_work(facts: Facts, frames: Iterable[str | None]) -> Iterator[tuple[str, str]]:
    """Yield what work is, and its cure, by the innermost frames that samples met in it."""
    for pattern, what, cure in (
        (_LOGGERS, "it writes logs", _LOG_LESS),
        (_SAVERS, "it saves a checkpoint", save_aside(facts.framework)),
    ):
        if any(frame is not None and re.search(pattern, frame) for frame in frames):
            yield what, cure


class OwnWork(NamedTuple):
    """Work of a program without a GPU outside its passes, on the rank that has most."""

    share: float
    """Share of its measured steps; 0 where no forward pass is known."""
    rank: int = 0
    place: SampledLine | None = None


def find_own_work(facts: Facts) -> OwnWork:
    """Return the work outside the passes: in no phase, no collection, no compilation and no start
    of a loader, less the part in which the thread waits, as samples show, or is queued for a core.
    """
    state, found = facts.per_gpu.whole.once(read_host_state), [OwnWork(0.0)]
    for load in facts.host_load:
        process, time = facts.processes[load.rank], facts.time_of_rank(load.rank)
        phases = facts.per_gpu.whole.once(read_phases).get(process)
        if phases is None or not (phases.of[FORWARD] or phases.of[UPDATE]):
            continue
        kept = (state.collections, state.compilations)
        known = [*phases.of.values(), *(times.get(process, EMPTY) for times in kept)]
        own = time.difference(reduce(merge_touching, known, restarts(facts, load.rank)))
        has_core = load.on_core_ns / max(load.on_core_ns + load.queued_ns, 1)
        awake = 1.0 if facts.lines is None else facts.lines.awake(process, own)
        share = own.total / max(time.total, 1) * awake * has_core
        found.append(OwnWork(share, load.rank, facts.line_in(own, {process})))
    return max(found, key=lambda work: work.share)


def _own_work(facts: Facts) -> Iterator[Finding]:
    share, rank, place = facts.once(find_own_work)
    severity = severity_of(share)
    if severity is None:
        return
    of_rank = f" on rank {rank}" if len(facts.processes) > 1 else ""
    details, at = [], ""
    advice = "do it less often, ahead of time, or in another thread or process; vectorize it"
    if place is not None:
        details, at = [place.host_is_at], f" at {place.line}"
        for what, cure in _known_work(facts, [place.frame]):
            details, advice = [what, *details], cure
    cost = round(share * facts.mean_ns)
    yield facts.finding(
        "host-work",
        severity,
        cost,
        f"the program's own work{of_rank} takes {facts.of_step(cost)}{at}",
        advice if facts.lines is not None else advice + _NAME_THE_LINE,
        {"share": round(share, 4), "rank": rank, "line": place.line if place else None},
        details,
    )


_MOST_FAMILIES: Final = 1000
_NAMED_RANGE_PART: Final = 0.5
_WHOLE_PART: Final = 0.9
"""Number of names, numbers aside, beyond which none is looked for; part of the work that ranges of
a name must hold; and part of the time from which they say nothing about its place."""


def _line_of_a_part(facts: Facts) -> str:
    """Return the line at which the host is for a large part of the work, not most; or nothing."""
    if facts.lines is None:
        return ""
    work = reduce(merge_touching, facts.each(_work_within), EMPTY)
    place = facts.line_in(work, facts.processes.values())
    return place.host_is_at if place is not None else ""


def _work_within(gpu: GpuShardView, time: Intervals) -> Intervals:
    """Return when a GPU waits for the work in some time."""
    return lost_time(gpu).get("host-work", EMPTY).intersection(time)


def _range_of_work(facts: Facts) -> str:
    """Return the ranges of one name in which most of the work lies, the narrowest; or nothing."""
    inside, length = Counter[str](), Counter[str]()
    for found in facts.each(_work_in_ranges):
        for name, (work, total) in found.items():
            inside[name] += work
            length[name] += total
    spent = facts.ledger.mean("host-work") * facts.turns
    whole = _WHOLE_PART * sum(time.total for time in facts.working_times)
    named = [n for n in inside if inside[n] >= _NAMED_RANGE_PART * spent and length[n] < whole]
    name = min(named, key=lambda name: length[name], default="")
    return f"{inside[name] / spent:.0%} of it is in the range {clean(name)}" if name else ""


def _work_in_ranges(gpu: GpuShardView, time: Intervals) -> dict[str, tuple[int, int]]:
    """Return by name, numbers aside, how much of the work that a GPU waits for in some time lies in
    ranges of its process, and how much of the time these take.
    """
    if Kind.RANGE not in gpu.trace.kinds:
        return {}
    events = gpu.trace.events([Kind.RANGE], ("start", "end", "name", "process"))
    events = events.select(events.process == gpu.operations.gpu.process)
    families: dict[str, list[int]] = {}
    for id, text in gpu.trace.names(distinct_ids(events.name)).items():
        families.setdefault(re.sub(r"\d+", "#", text), []).append(id)
    work, found = _work_within(gpu, time), {}
    for family, ids in families.items() if len(families) <= _MOST_FAMILIES else ():
        mine = is_among(events.name, ids)
        ranges = union(events.start[mine], events.end[mine])
        found[family] = ranges.intersection(work).total, ranges.intersection(time).total
    return found


def _reads_between_passes(gpu: GpuShardView, time: Intervals) -> int:
    """Return the copies to the host that a GPU makes in some time while its host does other work
    than a pass.
    """
    events = gpu.operations.events
    copies = np.flatnonzero(events.kind == Kind.COPY_D2H)
    inside = copies[time.contains(events.start[copies])]
    worked = claim_host_work(Host(gpu)).intersection(time)
    return int(np.count_nonzero(worked.contains(events.start[inside])))


def garbage_collection(facts: Facts) -> Iterator[Finding]:
    """Python's garbage collections take 2 % of a step (`low`), 5 % (`medium`) or 20 % (`high`). The
    message says whether the program calls them, and at which line.

    Cost: the GPUs' idle time meanwhile; without GPUs, their time on the rank with the most.

    Wrong if: the step is as long with `gc.disable()`.
    """
    worst = _in_steps(facts, Kind.COLLECTION, "garbage-collection")
    if worst is None or worst.share < _LOW_SHARE:
        return
    collections, rank, steps, cost, share = worst
    lengths = collections.end - collections.start
    longest = int(lengths.max())
    name = int(collections.name[int(np.argmax(lengths))])
    texts = facts.trace.names(distinct_ids(collections.name))
    called = is_among(
        collections.name, [id for id, text in texts.items() if _CALLED_SUFFIX in text]
    )
    is_called = 2 * int(lengths[called].sum()) > int(lengths.sum())
    who = "the program collects garbage" if is_called else "Python collects garbage"
    what, _, path = texts[name].partition(" at ")
    at = f" at {path.rpartition('/')[2]}" if is_called and path else ""
    each = format_count(len(collections), "collection")
    if steps:
        each = format_number(len(collections) / steps)
        each += " collection a step" if each == "1" else " collections a step"
    yield facts.finding(
        "garbage-collection",
        severity_of(share) or "low",
        cost,
        f"{who}{at} {facts.of_step(cost)}",
        _CALL_LESS if is_called else COLLECT_BETWEEN,
        {
            "called": is_called,
            "rank": rank,
            "collections": len(collections),
            "steps": steps,
            "longest_ns": longest,
            "share": round(share, 4),
        },
        [
            f"{each}, the longest {format_ns(longest)} ({what})",
            "" if at else facts.host_is_at("garbage-collection"),
        ],
    )


_COMPILE_ONCE: Final = {
    "Triton": "use few values for constexpr arguments and triton.autotune keys, and run each once "
    "before the loop",
    "tf.function": "pass a tf.function tensors of few shapes (pad, drop_remainder=True; "
    "reduce_retracing=True), and tensors instead of Python numbers",
    "jax": "pass jitted functions inputs of few shapes (pad, drop the last batch), create them "
    "once outside the loop, and keep static arguments (static_argnums) constant",
}
"""By the first letters of what is compiled, or the framework; else COMPILE_ONCE."""


def recompilation(facts: Facts) -> Iterator[Finding]:
    """Parts of the program are compiled during measured steps, for 2 % of a step (`low`), 5 %
    (`medium`) or 20 % (`high`).

    Cost: the GPUs' idle time meanwhile; without GPUs, their time on the rank with the most.

    Wrong if: the steps are as long with inputs of one shape.
    """
    worst = _in_steps(facts, Kind.COMPILATION, "recompilation")
    if worst is None or worst.share < _LOW_SHARE:
        return
    compilations, rank, steps, cost, share = worst
    texts = facts.trace.names(distinct_ids(compilations.name))
    took: dict[str, int] = {}
    for name, length in zip(
        compilations.name.tolist(), (compilations.end - compilations.start).tolist(), strict=True
    ):
        what = texts[name].partition(": ")[0]
        took[what] = took.get(what, 0) + length
    most = max(took, key=lambda what: took[what])
    reasons = [text for text in texts.values() if text.startswith(f"{most}: ")]
    reason = reasons[-1].removeprefix(f"{most}: ") if reasons else None
    cures = (_COMPILE_ONCE[who] for who in _COMPILE_ONCE if most.startswith(who))
    advice = next(cures, _COMPILE_ONCE.get(facts.framework, COMPILE_ONCE))
    yield facts.finding(
        "recompilation",
        severity_of(share) or "low",
        cost,
        f"recompilation takes {facts.of_step(cost)}",
        advice,
        {
            "rank": rank,
            "compilations": len(compilations),
            "steps": steps,
            "what": most,
            "reason": reason,
            "share": round(share, 4),
        },
        [
            f"{format_count(len(compilations), 'compilation')}"
            + f" in {format_count(steps, 'step')}" * bool(steps)
            + f", mostly {most}",
            f"reason: {reason}" if reason else "",
            facts.host_is_at("recompilation"),
        ],
    )


class _Found(NamedTuple):
    """Events of a kind in the measured steps of the rank that has most of them."""

    events: Events
    rank: int
    steps: int
    cost_ns: int
    """Time of a step that is charged to them."""
    share: float
    """Their share of a step."""


def _in_steps(facts: Facts, kind: Kind, cause: str) -> _Found | None:
    """Return the events of a kind of the host that lie in measured steps, or anywhere in a program
    without steps and a GPU; None if none do.
    """
    is_whole = not facts.measured and not facts.per_gpu.operations
    if kind not in facts.trace.kinds or not (facts.measured or is_whole):
        return None
    events = facts.trace.events([kind], ("start", "end", "name", "process"))
    by_rank = {}
    for rank, process in facts.processes.items():
        mine = events.select(events.process == process)
        time = facts.time_of_rank(rank)
        inside = mine.select(time.contains(mine.start)) if len(mine) and not is_whole else mine
        if len(inside):
            length = facts.mean_ns if is_whole else time.total
            by_rank[rank] = inside, union(inside.start, inside.end).total / max(length, 1)
    if not by_rank:
        return None
    rank = max(by_rank, key=lambda rank: by_rank[rank][1])
    inside, share = by_rank[rank]
    steps = len({step.step for step in facts.measured if step.rank == rank})
    cost = facts.host_cost(cause, share * facts.mean_ns)
    return _Found(inside, rank, steps, cost, facts.share_of(cost))


_LONG_KERNEL_NS: Final = 20_000
"""Duration of a kernel from which its launch returns before it ends, unless it waits for it."""
_FEWEST_LONG, _MOST_LONG = 10, 1_000
"""Number of such kernels that are looked at."""
_WAITED_FOR_SHARE: Final = 0.9
"""Share of them that launches wait for: at most an eighth in 146 recordings without the mode."""


def claim_debugging(host: Host) -> Intervals:
    """Prove that a mode for debugging holds the host up at each launch: launches return when their
    kernels have ended, or autograd looks for anomalies, which is recorded.
    """
    if host.process in host.state.anomaly_modes or _launches_wait(host):
        return Intervals(*np.array(host.window, np.int64)[:, None])
    return EMPTY


def _launches_wait(host: Host) -> bool:
    """Return whether launches return when their kernels have ended."""
    operations, calls = host.view.operations, host.view.calls
    if calls is None:
        return False
    is_long = operations.end - operations.start >= _LONG_KERNEL_NS
    rows = np.flatnonzero(is_long & (operations.events.kind == Kind.KERNEL))[:_MOST_LONG]
    issued_by = calls.issued_by(operations.events, rows)
    known = issued_by != NOBODY
    waited = calls.end[issued_by[known]] >= operations.end[rows[known]]
    return len(waited) >= _FEWEST_LONG and bool(waited.mean() >= _WAITED_FOR_SHARE)


def debugging(facts: Facts) -> Iterator[Finding]:
    """A mode for debugging was left on: launches return when their kernels have ended
    (`CUDA_LAUNCH_BLOCKING=1`), or PyTorch looks for anomalies in gradients.

    Cost: idle time before launches and in synchronising calls that no other cause is proven for.

    Wrong if: the step is no shorter without the mode.
    """
    finds_anomalies = bool(facts.read(read_host_state).anomaly_modes)
    yield from facts.costly(
        "debugging",
        "{gpus} {cost} while autograd looks for anomalies (detect_anomaly)"
        if finds_anomalies
        else "{gpus} {cost} because each launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1)",
        "train without torch.autograd.set_detect_anomaly(True) and detect_anomaly(): they check "
        "each gradient and keep a traceback of each operation"
        if finds_anomalies
        else "unset CUDA_LAUNCH_BLOCKING, which is for finding a kernel that fails",
    )


_AWAITED: Final = {
    ROLLOUT: "generate with cached keys and values (use_cache=True), an engine made for it (vLLM, "
    "SGLang), in larger batches, and without the slowest few answers; act in more environments at "
    "once, a small policy on the CPU; or roll out while the last batch is learned from",
    REWARD: "score answers in parallel, in processes of their own, or while others are "
    "generated; cache what was scored before; limit the time of a verifier",
    REFERENCE: "score in larger batches, together with the old policy's; leave out the "
    "reference where its weight (beta) is 0",
    WEIGHT_SYNC: "send weights in large pieces and from GPU to GPU (NCCL, CUDA IPC), not "
    "through the host or a file; only those that changed; and less often",
}
"""Phases that updates wait for, and how to make them faster."""
_UPDATE: Final = (FORWARD, BACKWARD, UNSCALING, CLIPPING, OPTIMIZER, UPDATE)
_ONE_RANK_PART: Final = 0.5
"""Part of the awaited phase that a rank has beyond others for it to be named."""
_TURNS_PART: Final = 0.5
"""Part of the steps that must have rollouts for them to be turns."""


def claim_awaited_phases(host: Host) -> Intervals:
    """Prove that updates wait for what comes before them in a turn: no CUDA call for a millisecond
    and more in rollouts, rewards, log-probabilities without gradients or a sync of weights.
    """
    phases = host.phases
    if phases is None or not len(host.steps[0]):
        return EMPTY
    if np.mean(phases.of[ROLLOUT].within(*host.steps) > 0) < _TURNS_PART:
        return EMPTY
    awaited = reduce(merge_touching, (phases.of[name] for name in _AWAITED))
    return host.pauses.intersection(awaited)


def awaited_phase(facts: Facts) -> tuple[StepPhases, StepPhase] | None:
    """Return the phase that updates wait for longest, and those of its rank; None if none takes
    20 % of a turn.
    """
    phases = [
        (row, row.of(name))
        for row in (facts.step_phases if facts.all_steps.kind == "rl" else ())
        for name in _AWAITED
    ]
    longest = max(phases, key=lambda pair: pair[1].host_ns, default=None)
    return longest if longest and facts.share_of(longest[1].host_ns) >= HIGH else None


def waits_alone(facts: Facts, rank: int) -> int:
    """Return by how many nanoseconds of a turn the awaited phase is longer on a rank than where it
    is shortest; 0 for other ranks than the one on which it is longest.
    """
    awaited = facts.once(awaited_phase)
    if awaited is None or awaited[0].rank != rank:
        return 0
    name, longest_ns = awaited[1].name, awaited[1].host_ns
    return longest_ns - min(row.of(name).host_ns for row in facts.step_phases)


def update_waits(facts: Facts) -> Iterator[Finding]:
    """Rollouts, rewards, log-probabilities without gradients or the sync of weights, as far as they
    were timed, take 20 % of a turn of reinforcement learning. Named is the longest of them on the
    rank on which it takes longest, and the rank if on another one it is half as long at most;
    details name the others, and the line at which the host waits.

    Cost: the host's time in that phase.

    Wrong if: a turn that uses its results again is no shorter.
    """
    awaited = facts.once(awaited_phase)
    if awaited is None:
        return
    rank, longest = awaited
    others = [
        f"{PHASES[name]} {format_ns(rank.of(name).host_ns)}"
        for name in _AWAITED
        if name != longest.name and rank.of(name).host_ns
    ]
    update = format_ns(sum(rank.of(name).host_ns for name in _UPDATE))
    process = facts.processes[rank.rank]
    phases = facts.read(read_phases)[process]
    time = phases.of[longest.name].intersection(facts.time_of_rank(rank.rank))
    engines = facts.trace.once(read_named_ranges).rollouts.keys() if longest.name == ROLLOUT else ()
    place = facts.line_in(time, processes={process} if process in engines else engines or {process})
    alone = waits_alone(facts, rank.rank)
    of_rank = f" of rank {rank.rank}" if alone >= _ONE_RANK_PART * longest.host_ns else ""
    yield facts.finding(
        "update-waits",
        "high",
        longest.host_ns,
        f"the update waits {facts.of_step(longest.host_ns)} for {PHASES[longest.name]}{of_rank}",
        _AWAITED[longest.name],
        {f"{phase.name.replace(' ', '_')}_ns": phase.host_ns for phase in rank.phases},
        [
            of_rank and f"on another rank they take {format_ns(longest.host_ns - alone)}",
            f"the update itself takes {update}",
            ", ".join(others) and f"{', '.join(others)} besides",
            place.host_is_at if place else "",
        ],
    )
