"""Causes of lost time in what the host does: garbage, compilation, other work than to launch, the
optimizer on the host; and threads that lack a core, or wait for neither data nor a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.findings.context import HIGH, Facts, severity_of
from gputrace.analyzers.findings.drift import longer_ns
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.grouping import time_of
from gputrace.analyzers.host_state import read_host_state
from gputrace.analyzers.ledger.host import Host
from gputrace.analyzers.python_samples import SampledLine
from gputrace.model.events import Events, Kind, distinct_ids, is_among
from gputrace.model.host import BACKWARD, DATA, FORWARD, OPTIMIZER, HostLoad
from gputrace.model.intervals import EMPTY, Intervals, merge_touching, union
from gputrace.model.results import Finding
from gputrace.units import format_count, format_ns

_SLOW_CLOCK_PART: Final = 0.85
"""Part of the fastest clock that was seen below which a core is slow."""
THROTTLED_SHARE: Final = 0.02
"""Share of the time for which a quota stops threads, from which it is reported."""
_FAULT_NS: Final = 500
"""Least time of a page fault: 0.5 to 1 µs to map and clear 4 KiB (Linux 6 on shared cores)."""
_LOW_SHARE: Final = 0.02
"""Share of a step from which collections and compilations are reported."""
COLLECT_BETWEEN: Final = (
    "gc.freeze() after set-up, then gc.disable() with gc.collect() between some steps, the same "
    "ones on all ranks"
)
_CALLED_SUFFIX: Final = ", called"
"""Part of the name of a collection that the program asked for."""
_CALL_LESS: Final = (
    "no gc.collect() in the loop, and no torch.cuda.empty_cache() beside it: call it once before "
    "the first step, or between some epochs"
)
COMPILE_ONCE: Final = (
    "use few input shapes (pad, drop the last batch), or mark varying dimensions as dynamic "
    "(torch.compile(dynamic=True), mark_dynamic), and pass no Python numbers that change"
)
CORES_ALONE: Final = (
    "give the run's processes dedicated cores (taskset, numactl, one NUMA node each), or run less "
    "beside it"
)
RAISE_QUOTA: Final = (
    "raise the limit (docker --cpus, resources.limits.cpu of Kubernetes, --cpus-per-task of "
    "Slurm), or start no more threads and workers than it allows (OMP_NUM_THREADS)"
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
_LESS_HOST_WORK: Final = (
    "do it less often than in every step, on the GPU, or in another thread or process; vectorize it"
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
_COMPILE_ONCE: Final = {
    "Triton": "use few values for constexpr arguments and triton.autotune keys, and run each once "
    "before the loop",
    "tf.function": "pass a tf.function tensors of few shapes (pad, drop_remainder=True; "
    "reduce_retracing=True), and tensors instead of Python numbers",
    "jax": "pass jitted functions inputs of few shapes (pad, drop the last batch), create them "
    "once outside the loop, and keep static arguments (static_argnums) constant",
}
"""By the first letters of what is compiled, or the framework; else COMPILE_ONCE."""
_BLOCKED_SHARE: Final = 0.10
"""Share of a step that must be blocked, beyond waits for data, to be reported."""
_MAKES_BATCHES: Final = r"(?i)__next__$|(next|get|fetch|load)_?(batch|data|item|sample)"
"""Names of functions that give the next batch, whatever queue or pool they wait for."""
_FILL_THE_QUEUE: Final = (
    "make batches faster than the program takes them: more threads or processes that fill the "
    "queue, which is empty when it asks; a deeper queue only evens out slow ones"
)
_WAITING_NS: Final = 2_000_000
"""Time after a sample for which the thread must be at its line to be said to wait there."""
_FEWEST_LOCK_WAITS: Final = 5
"""Samples that must meet a wait for Python's lock."""
_LINE_SEPARATOR: Final = ":"
"""Part of a line's name: without it, the thread is not known."""
_NAMED_LINE_SHARE: Final = 0.3
"""Share of the samples that must be at one line for it to be named."""


def cpu_starved(facts: Facts) -> Iterator[Finding]:
    """Training threads are queued for a core for 5 % of the time (`medium`) or 20 % (`high`).

    If OpenMP threads spin instead of sleeping, they progress only while all of them have a core;
    the step with fewer threads is computed from that.

    Cost: time that the thread that marks the steps, or another busy thread of its process, is
    queued, or the time that fewer spinning threads would save; with GPUs, at most their idle time
    spent waiting for the host.

    Wrong if: the step is as long with fewer threads, or with more cores.
    """
    loads = [load for load in facts.host_load if load.throttled < THROTTLED_SHARE]
    worst = max(loads, key=_queued, default=None)
    if worst is None:
        return
    queued = _charged(facts, "cpu-starved", _queued(worst) * facts.mean_ns)
    severity = severity_of(facts.share_of(queued))
    if severity is None:
        return
    cost = queued
    wanting = max(worst.wanted_cores, worst.runnable or 0.0)
    # Of a run of less than a second, they may not have been counted.
    cores = f"{_number(worst.cores)} core{'s' * (worst.cores > 1)}" if worst.cores else "cores"
    crowd = f"{_number(wanting)} threads want {cores}"
    # The machine's threads are counted once a second at most: between that, others may come.
    if not wanting > worst.cores > 0:
        crowd = f"other threads on the machine occupy the {cores} meanwhile"
    fewer = max(1, worst.cores // max(1, len(facts.host_load)) - 1)
    advice = CORES_ALONE
    if worst.threads > 1:
        advice = (
            f"use fewer compute threads: OMP_NUM_THREADS={fewer} "
            f"(torch.set_num_threads({fewer})), fewer loader workers; or more cores for each "
            "process"
        )
    then = f"with a core for each, a step may take {format_ns(facts.mean_ns - cost)}"
    ratio = _with_fewer(worst, fewer)
    if ratio is not None:
        cost = _charged(facts, "cpu-starved", (1 - ratio) * facts.mean_ns)
        crowd += (
            f"; the {worst.spinning} OpenMP threads ({worst.openmp}) spin while any of them lacks "
            f"a core, and all have one for about {worst.at_once:.1%} of the time"
        )
        advice += "; OMP_WAIT_POLICY=passive lets waiting threads sleep"
        then = f"with {format_count(fewer, 'thread')}, a step may take about "
        then += format_ns(facts.mean_ns - cost)
    yield facts.finding(
        "cpu-starved",
        severity,
        cost,
        f"the training threads are queued for a core for {facts.of_step(queued)}: {crowd}; {then}",
        advice,
        _evidence(worst, facts.mean_ns),
    )


def _with_fewer(load: HostLoad, fewer: int) -> float | None:
    """Return the step with fewer threads that spin, as a share of the step; None if it is longer.

    A team gets on only while all its threads have a core, and so much then as it has threads; fewer
    have a core for as long as all that is ready to run on the machine lets them, in turn.
    """
    if load.spinning <= fewer:
        return None
    runnable = max(load.runnable or 0.0, load.wanted_cores) - load.spinning + fewer
    share = min(1.0, load.cores / max(runnable, fewer))
    ratio = load.spinning * load.at_once / (fewer * share**fewer)
    return ratio if ratio < 1 else None


def amount_queued(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step for which each rank's training threads are queued for a core."""
    loads = (load for load in facts.host_load if load.throttled < THROTTLED_SHARE)
    return {load.rank: round(_queued(load) * facts.mean_ns) for load in loads}


def amount_throttled(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step for which a quota stops each rank."""
    loads = (load for load in facts.host_load if load.throttled >= THROTTLED_SHARE)
    return {load.rank: round(_stopped(load) * facts.mean_ns) for load in loads}


def _stopped(load: HostLoad) -> float:
    """Return the share of the time for which a quota stops the thread that marks the steps."""
    return min(1.0, max(_queued(load), load.throttled / max(load.wanted_cores, 1.0)))


def amount_faults(facts: Facts) -> dict[int | None, int]:
    """Return the least time of a step that each rank's training thread spends in page faults."""
    return {load.rank: round(_faults(load) * _FAULT_NS * facts.mean_ns) for load in facts.host_load}


def _faults(load: HostLoad) -> float:
    """Return the page faults of a nanosecond."""
    return (load.minor_faults + load.major_faults) / max(load.covered_ns, 1)


def amount_slow_cores(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step that the fastest clock of the run would save each rank's host."""
    return {
        load.rank: round(load.of(load.on_core_ns, facts.mean_ns) * _slowed(load))
        for load in facts.host_load
    }


def _slowed(load: HostLoad) -> float:
    """Return the part of its time on a core that a host loses to a slow one; 0 if it is not."""
    if (
        not load.core_mhz
        or not load.fastest_mhz
        or load.core_mhz >= _SLOW_CLOCK_PART * load.fastest_mhz
    ):
        return 0.0
    return 1 - load.core_mhz / load.fastest_mhz


def _queued(load: HostLoad) -> float:
    return max(load.queued_ns / max(load.covered_ns, 1), load.others_queued)


def _charged(facts: Facts, cause: str, host_ns: float) -> int:
    """Return the cost of a cause in a step: what is charged to it, or without a GPU the host's."""
    return facts.ledger.mean(cause) if facts.per_gpu.operations else round(host_ns)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _evidence(load: HostLoad, mean_ns: int) -> dict[str, float | int | str | None]:
    return {
        "rank": load.rank,
        "on_core_ns": load.of(load.on_core_ns, mean_ns),
        "queued_ns": load.of(load.queued_ns, mean_ns),
        "blocked_ns": load.of(load.blocked_ns, mean_ns),
        "threads": load.threads,
        "wanted_cores": round(load.wanted_cores, 2),
        "cores": load.cores,
        "quota_cores": load.quota_cores,
        "openmp": load.openmp,
        "spinning": load.spinning,
        "at_once": round(load.at_once, 4),
        "runnable": None if load.runnable is None else round(load.runnable, 1),
        "throttled": round(load.throttled, 4),
    }


def cpu_throttled(facts: Facts) -> Iterator[Finding]:
    """The control group's CPU quota stops the process for 2 % of the time; `medium` from 5 %,
    `high` from 20 %.

    Cost: time that the thread that marks the steps is runnable but not on a core, at least the
    group's throttled time divided by the cores that the process wants; with GPUs, at most their
    idle time spent waiting for the host.

    Wrong if: the step is as long with a larger quota.
    """
    worst = max(facts.host_load, key=lambda load: load.throttled, default=None)
    if worst is None or worst.throttled < THROTTLED_SHARE:
        return
    cost = _charged(facts, "cpu-throttled", _stopped(worst) * facts.mean_ns)
    quota = "its quota"
    if worst.quota_cores is not None:
        quota += f" of {_number(worst.quota_cores)} core{'s' * (worst.quota_cores != 1)}"
    yield facts.finding(
        "cpu-throttled",
        severity_of(facts.share_of(cost)) or "low",
        cost,
        f"the container's limit on CPU time stops the host for {facts.of_step(cost)}: "
        f"{worst.threads} threads use up {quota}",
        RAISE_QUOTA,
        _evidence(worst, facts.mean_ns),
    )


def slow_cores(facts: Facts) -> Iterator[Finding]:
    """The training thread's core runs below 85 % of the fastest clock seen in the run, and that
    costs 2 % of a step (`low`), 5 % (`medium`) or 20 % (`high`).

    Cost: the part of its time on a core that the fastest clock would save; with GPUs, at most their
    idle time spent waiting for the host.

    Wrong if: the step is as long at that clock, because it waits for memory.
    """
    worst = max(facts.host_load, key=_slowed, default=None)
    if worst is None or not _slowed(worst) or not worst.core_mhz or not worst.fastest_mhz:
        return
    on_core = worst.of(worst.on_core_ns, facts.mean_ns)
    cost = _charged(facts, "slow-cores", on_core * _slowed(worst))
    share = facts.share_of(cost)
    if share < _LOW_SHARE:
        return
    yield facts.finding(
        "slow-cores",
        severity_of(share) or "low",
        cost,
        f"the training thread's core runs at {worst.core_mhz / 1000:.1f} GHz, and cores at up to "
        f"{worst.fastest_mhz / 1000:.1f} GHz in the same run: that costs {facts.of_step(cost)}",
        "the `performance` governor (cpupower frequency-set -g performance), fewer busy cores "
        "beside it, better cooling, no power limit on the machine",
        _evidence(worst, facts.mean_ns)
        | {"core_mhz": worst.core_mhz, "fastest_mhz": worst.fastest_mhz},
    )


def page_faults(facts: Facts) -> Iterator[Finding]:
    """Page faults of the training thread take at least 5 % of a step (`medium`), or 20 % (`high`).

    Cost: 0.5 µs per fault, the minimum.

    Wrong if: the step is no shorter when memory is kept.
    """
    worst = max(facts.host_load, key=lambda load: load.minor_faults, default=None)
    if worst is None or not facts.mean_ns:
        return
    faults = _faults(worst) * facts.mean_ns
    cost = _charged(facts, "page-faults", faults * _FAULT_NS)
    severity = severity_of(facts.share_of(cost))
    if severity is None:
        return
    major = worst.major_faults / worst.covered_ns * facts.mean_ns
    from_disk = f", {major:,.1f} of them from the disk" if major >= 1 else ""
    yield facts.finding(
        "page-faults",
        severity,
        cost,
        f"{faults:,.0f} page faults a step{from_disk}, at least {facts.of_step(cost)}: memory is "
        "released and allocated again",
        "reuse large buffers across steps; MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, or "
        "another allocator (jemalloc, tcmalloc)",
        {"minor_faults": round(faults - major), "major_faults": round(major, 1)},
    )


def host_blocked(facts: Facts) -> Iterator[Finding]:
    """In traces without GPU activity, the training thread is blocked, but not on data, a core or a
    GPU, for 10 % of a step (`medium`; `low` if other threads of its process compute for as long) or
    20 % (`high`).

    Where the line at which it waits belongs to an iterator that makes batches, it is
    `data-feeding`.

    Cost: its blocked time, less its waits for data and for Python's lock, compilation, which
    compiler threads may do while it waits, and what `steps-grow` costs.

    Wrong if: the named line does not wait.
    """
    compiled, locked = facts.per_gpu.whole.once(read_host_state).compilations, _locked(facts)
    for load in facts.host_load:
        steps = [step for step in facts.measured if step.rank == load.rank]
        if not steps:
            continue
        time = _measured_time(facts, load.rank)
        known = sum(step.host_data_ns or 0 for step in steps)
        known += compiled.get(facts.processes[load.rank], EMPTY).intersection(time).total
        share = load.blocked_ns / load.covered_ns - known / time.total
        share -= locked[load.rank].share if load.rank in locked else 0.0
        if share < _BLOCKED_SHARE:
            continue
        cost = max(round(share * facts.mean_ns) - longer_ns(facts, load.rank), 0)
        line, of_samples = _line_of(facts, load.rank)
        at = f"; it is at {line} in {of_samples:.0%} of the samples" if line else ""
        ask = "" if facts.lines is not None else "; record with --python to name the line"
        severity, advice = "high" if share >= HIGH else "medium", f"check what it waits for{ask}"
        rank = "another rank, " if len(facts.host_load) > 1 else ""
        waits = "for something other than data or a core: "
        waits += f"{rank}a lock, a disk, a pipe, a timer"
        if load.process_cores - load.on_core_ns / load.covered_ns >= share:
            severity, waits = "low", "while other threads of its process compute for as long"
            advice = "nothing to do if it waits for their results: XLA's threads compute so "
            advice += "without a GPU"
        id = "host-blocked"
        if re.search(_MAKES_BATCHES, line.partition(" ")[2]):
            id, waits, advice = "data-feeding", "for its next batch", _FILL_THE_QUEUE
        yield facts.finding(
            id,
            severity,
            cost,
            f"the training thread waits {facts.of_step(cost)} {waits}{at}",
            advice,
            _evidence(load, facts.mean_ns) | ({"line": line} if line else {}),
        )
        return


def _line_of(facts: Facts, rank: int) -> tuple[str, float]:
    """Return the line at which a rank's host waits most in the measured steps, and its share.

    Of the samples, those count at whose line it still was some time later, if there are any.
    """
    lines = facts.lines
    if lines is None:
        return "", 0.0
    time = _measured_time(facts, rank)
    samples = {thread: lines.within(thread, time) for thread in lines.times}
    waiting = {
        thread: mine[lines.waited[thread][mine] >= _WAITING_NS] for thread, mine in samples.items()
    }
    most_at = lines.place(waiting) or lines.place(samples)
    if most_at is None or most_at.share < _NAMED_LINE_SHARE:
        return "", 0.0
    return most_at.line, most_at.share


class _Locked(NamedTuple):
    """Samples of a rank that met its main thread waiting for Python's lock in measured steps."""

    waits: int
    samples: int
    place: SampledLine | None
    """Where other threads had it."""
    share: float
    """Part of the time: of the samples, and no more than the thread was blocked."""


def _locked(facts: Facts) -> dict[int, _Locked]:
    lines, ranks = facts.lines, {step.rank for step in facts.measured}
    blocked = {load.rank: load.blocked_ns / load.covered_ns for load in facts.host_load}
    by_rank = {}
    for rank, process in facts.processes.items():
        if lines is not None and rank in ranks:
            waits = lines.waits_for_lock(process, _measured_time(facts, rank))
            share = min(blocked.get(rank, 1.0), waits[0] / max(waits[1], 1))
            by_rank[rank] = _Locked(*waits, share)
    return by_rank


def amount_locked(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step for which each rank's main thread waits for Python's lock."""
    return {
        rank: round(locked.share * facts.mean_ns)
        for rank, locked in _locked(facts).items()
        if locked.waits >= _FEWEST_LOCK_WAITS
    }


def gil_wait(facts: Facts) -> Iterator[Finding]:
    """The training thread waits for Python's lock (GIL) while another thread runs Python code, in 5
    % of the samples of `--python` (`medium`) or 20 % (`high`), and in at least five.

    Cost: that share of a step, at most the thread's blocked time; with GPUs, at most their idle
    time spent waiting for the host.

    Wrong if: the step is as long without the other thread.
    """
    by_rank = _locked(facts)
    rank = max(by_rank, key=lambda rank: by_rank[rank].share, default=None)
    if rank is None or by_rank[rank].waits < _FEWEST_LOCK_WAITS:
        return
    waits, samples, holder, share = by_rank[rank]
    cost = _charged(facts, "gil-wait", share * facts.mean_ns)
    share = facts.share_of(cost)
    severity = severity_of(share)
    if severity is None or holder is None:
        return
    at = ""
    if _LINE_SEPARATOR in holder.line:
        at = f"; in {holder.share:.0%} of {waits:,} samples another thread holds it, "
        at += f"at {holder.line}"
    yield facts.finding(
        "gil-wait",
        severity,
        cost,
        f"the training thread waits for Python's lock (GIL) for {facts.of_step(cost)}{at}",
        "move the other thread's work to a separate process, or into calls that release the lock "
        "(NumPy, torch, I/O); sys.setswitchinterval(0.0005) shortens each wait",
        {
            "rank": rank,
            "waits": waits,
            "samples": samples,
            "share": round(share, 4),
            "line": holder.line if at else None,
            "line_share": round(holder.share, 4),
        },
    )


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


def claim_host_optimizer(host: Host) -> Intervals:
    """Prove that the optimizer computes on the host: its steps launch nothing, or are ranges that
    say so. All between the backward pass and the next forward pass then belongs to it, which
    brings the gradients and returns the parameters, and so do the copies that are issued there.
    """
    phases, named = host.phases, host.in_ranges(_HOST_OPTIMIZERS)
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
    beside = ""
    if copied:
        beside = f", {format_ns(copied // facts.turns)} of it in copies of gradients and parameters"
    yield from facts.costly(
        "host-optimizer",
        "the GPUs wait {cost} while the optimizer runs on the host (CPU)" + beside,
        _ON_THE_GPU,
    )


def claim_host_work(host: Host) -> Intervals:
    """Prove that the host does other things than to issue a pass: no CUDA call for a millisecond
    and more; or, where the phases of a step are recorded, it is in none of them.
    """
    phases, idle = host.phases, host.pauses.difference(host.view.lane.causes.in_mpi)
    if phases is None:
        return idle
    known = reduce(merge_touching, phases.of.values(), EMPTY)
    return merge_touching(idle, known.complement(*host.window))


def host_work(facts: Facts) -> Iterator[Finding]:
    """The GPUs wait for the program's own work on the host: it makes no CUDA call for a millisecond
    and more, or is neither in a forward pass, a backward pass, the optimizer nor the loader.

    The message names the line of the program, and how often that work reads values back.

    Cost: that time.

    Wrong if: the step is no shorter without the work at that line.
    """
    rows = facts.ledger.of("host-work")
    lines = [row.line for row in rows if row.line is not None]
    reads = facts.mean_over_gpus(_reads_between_passes) if facts.trains else 0
    clause, advice = "", _LESS_HOST_WORK
    if reads >= _FEWEST_READS:
        clause = f", which reads {reads:,} values back in each (.item(), .cpu(), print)"
        advice = _READ_LESS
    if any(row.frame is not None and re.search(_LOGGERS, row.frame) for row in rows):
        clause, advice = ", which writes logs" + clause, _LOG_LESS
    at = f" at {lines[0]}" if lines else ""
    ask = "" if lines or facts.lines is not None or not facts.framework else _NAME_THE_LINE
    yield from facts.costly(
        "host-work",
        f"the GPUs wait {{cost}} for other work of the host{at}{clause}",
        advice + ask,
    )


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
    rows = facts.ledger.of("garbage-collection")
    at = f" at {rows[0].line}" if is_called and rows and rows[0].line else ""
    each = f"{len(collections) / steps:.2g} a step"
    yield facts.finding(
        "garbage-collection",
        severity_of(share) or "low",
        cost,
        f"{who}{at} for {facts.of_step(cost)}: {each}, the longest {format_ns(longest)} "
        f"({texts[name]})",
        _CALL_LESS if is_called else COLLECT_BETWEEN,
        {
            "called": is_called,
            "rank": rank,
            "collections": len(collections),
            "steps": steps,
            "longest_ns": longest,
            "share": round(share, 4),
        },
    )


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
        f"parts of the program are recompiled for {facts.of_step(cost)}: {len(compilations):,} "
        f"times in {steps:,} steps, mostly {most}" + (f", since {reason}" if reason else ""),
        advice,
        {
            "rank": rank,
            "compilations": len(compilations),
            "steps": steps,
            "what": most,
            "reason": reason,
            "share": round(share, 4),
        },
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
    """Return the events of a kind of the host that lie in measured steps; None if none do."""
    if kind not in facts.trace.kinds or not facts.measured:
        return None
    events = facts.trace.events([kind], ("start", "end", "name", "process"))
    by_rank = {}
    for rank, process in facts.processes.items():
        mine = events.select(events.process == process)
        time = _measured_time(facts, rank)
        inside = mine.select(time.contains(mine.start)) if len(mine) else mine
        if len(inside):
            by_rank[rank] = inside, union(inside.start, inside.end).total / time.total
    if not by_rank:
        return None
    rank = max(by_rank, key=lambda rank: by_rank[rank][1])
    inside, share = by_rank[rank]
    steps = len({step.step for step in facts.measured if step.rank == rank})
    cost = _charged(facts, cause, share * facts.mean_ns)
    return _Found(inside, rank, steps, cost, facts.share_of(cost))


def _measured_time(facts: Facts, rank: int) -> Intervals:
    return time_of(step for step in facts.measured if step.rank == rank)
