"""Findings about threads of the host that lack a core, or wait for something other than data or a
GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from gputrace.analyzers.findings.facts import HIGH, NEARLY_ALL, Facts, severity_of
from gputrace.analyzers.findings.growing_steps import longer_ns
from gputrace.analyzers.findings.host_work import awaited_phase
from gputrace.analyzers.host_state import FAULT_NS, read_host_state
from gputrace.analyzers.neighbours import programs_on_cores
from gputrace.analyzers.python_samples import SampledLine
from gputrace.analyzers.step_phases import read_phases
from gputrace.model.host import HostLoad
from gputrace.model.intervals import EMPTY, Intervals
from gputrace.model.results import Finding
from gputrace.units import format_count, format_ns

THROTTLED_SHARE: Final = 0.02
"""Share of the time for which a quota stops threads, from which it is reported."""
CORES_ALONE: Final = (
    "give the run's processes dedicated cores (taskset, numactl, one NUMA node each), or run less "
    "beside it"
)
RAISE_QUOTA: Final = (
    "raise the limit (docker --cpus, resources.limits.cpu of Kubernetes, --cpus-per-task of "
    "Slurm), or start no more threads and workers than it allows (OMP_NUM_THREADS)"
)
DO_ELSEWHERE: Final = "do that less often, faster, or in another thread"
_BLOCKED_SHARE: Final = 0.10
"""Share of a step that must be blocked, beyond waits for data, to be reported."""


def cpu_starved(facts: Facts) -> Iterator[Finding]:
    """Training threads are queued for a core for 5 % of the time (`medium`) or 20 % (`high`).

    Other programs that use a third as much of its cores as that are named by pid and, if they are
    the same user's, by command; from half as much on they are said to be why.

    If OpenMP threads spin instead of sleeping, they progress only while all of them have a core;
    the step with fewer threads is computed from that.

    Cost: time that the thread that marks the steps, or another busy thread of its process, is
    queued (both, if they take turns), or the time that fewer spinning threads would save; with
    GPUs, at most their idle time spent waiting for the host.

    Wrong if: the step is as long with fewer threads, or with more cores.
    """
    loads = [load for load in facts.host_load if load.throttled < THROTTLED_SHARE]
    worst = max(loads, key=_queued, default=None)
    if worst is None:
        return
    queued = facts.host_cost("cpu-starved", _queued(worst) * facts.mean_ns)
    severity = severity_of(facts.share_of(queued))
    if severity is None:
        return
    cost = queued
    others, used = _others_on_cores(facts, worst)
    are_why = bool(others) and used >= _OTHERS_PART * _queued(worst)
    crowd, whose = _crowd(worst, are_why, alone=len(facts.host_load) == 1)
    fewer = max(1, worst.cores // max(1, len(facts.host_load)) - 1)
    advice = CORES_ALONE
    if worst.threads > (worst.cores if are_why else 1):
        advice = (
            f"use fewer compute threads: OMP_NUM_THREADS={fewer} "
            f"(torch.set_num_threads({fewer})), fewer loader workers; or more cores for each "
            "process"
        )
    details = [others or whose]
    ratio = _with_fewer(worst, fewer)
    if ratio is not None:
        cost = facts.host_cost("cpu-starved", (1 - ratio) * facts.mean_ns)
        details += [
            f"the {worst.spinning} OpenMP threads ({worst.openmp}) spin while any of them lacks "
            f"a core, and all have one for about {worst.at_once:.1%} of the time",
            f"with {format_count(fewer, 'thread')}, a step may take about "
            f"{format_ns(facts.mean_ns - cost)}",
        ]
        advice += "; OMP_WAIT_POLICY=passive lets waiting threads sleep"
    yield facts.finding(
        "cpu-starved",
        severity,
        cost,
        f"too few cores cost {facts.of_step(queued)}: {crowd}",
        advice,
        _evidence(worst, facts.mean_ns) | {"others_are_why": are_why},
        details,
    )


_OTHERS_PART: Final = 0.5
"""Part of the time for which threads are queued that others use of the cores if they are why."""
_NAMED_PART: Final = 1 / 3
"""The part from which on they are named."""


def _crowd(worst: HostLoad, others_are_why: bool, *, alone: bool) -> tuple[str, str]:
    """Return who shares the cores of a rank, and whose the threads are, as far as that is known.

    ``alone`` is True where no other rank's process was counted.
    """
    # Of a run of less than a second, they may not have been counted.
    cores = f"{_number(worst.cores)} core{'s' * (worst.cores > 1)}" if worst.cores else "cores"
    wanting = max(worst.wanted_cores, worst.runnable or 0.0)
    # The machine's threads are counted once a second at most: between that, others may come.
    crowd, whose = f"other threads occupy the {cores}", ""
    if wanting > worst.cores > 0:
        crowd = f"{_number(wanting)} threads share {cores}"
        if worst.threads + 1 <= wanting and alone:
            are = "is" if worst.threads == 1 else "are"
            whose = f"{worst.threads or 'none'} of these threads {are} in the training process: "
            whose += "loader workers and other programs have the rest"
    if others_are_why:
        crowd = "other programs use them"
        if worst.threads > worst.cores > 0:
            crowd = f"its {worst.threads} threads share {cores} with other programs"
    return crowd, whose


def _others_on_cores(facts: Facts, load: HostLoad) -> tuple[str, float]:
    """Return a clause on other programs that use the cores of a rank, if any, and their use."""
    process = facts.trace.processes[facts.processes[load.rank]]
    time = facts.time_of_rank(load.rank)
    programs = programs_on_cores(facts.trace, process.host, time)
    programs = tuple(program for program in programs if program.sharing != "SMT")
    used = sum(program.use or 0.0 for program in programs)
    if used < _NAMED_PART * _queued(load):
        return "", used
    who = "; ".join(filter(None, map(str, programs[:3])))
    several = len(programs) > 1
    nodes = {program.numa_node for program in programs}
    node = f" (NUMA node {nodes.pop()})" if len(nodes) == 1 and None not in nodes else ""
    where = f"of the {format_count(load.cores, 'core')}" if load.cores > 1 else "of its core"
    return (
        f"{'other programs' if several else 'another program'} {f'({who}) ' if who else ''}"
        f"use{'s' * (not several)} {used:.1f} {where}{node}",
        used,
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
    return {load.rank: round(_faults(load) * FAULT_NS * facts.mean_ns) for load in facts.host_load}


def _faults(load: HostLoad) -> float:
    """Return the page faults of a nanosecond."""
    return (load.minor_faults + load.major_faults) / max(load.covered_ns, 1)


def amount_slow_cores(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step that the fastest clock of the run would save each rank's host."""
    return {
        load.rank: round(load.of(load.on_core_ns, facts.mean_ns) * _slowed(load))
        for load in facts.host_load
    }


_SLOW_CLOCK_PART: Final = 0.85
"""Part of the fastest clock that was seen below which a core is slow."""


def _slowed(load: HostLoad) -> float:
    """Return the part of its time on a core that a host loses to a slow one; 0 if it is not."""
    if (
        not load.core_mhz
        or not load.fastest_mhz
        or load.core_mhz >= _SLOW_CLOCK_PART * load.fastest_mhz
    ):
        return 0.0
    return 1 - load.core_mhz / load.fastest_mhz


_IN_TURN_CORES: Final = 1.1
"""Cores that several threads want together, up to which they are taken to run one after another,
as those of a forward and a backward pass do: they wait for all that any of them is queued."""


def _queued(load: HostLoad) -> float:
    """Return the share of the time for which threads that make a step are queued."""
    queued = load.queued_ns / max(load.covered_ns, 1)
    if load.threads > 1 and load.wanted_cores <= _IN_TURN_CORES:
        return queued + load.others_queued
    return max(queued, load.others_queued)


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
    cost = facts.host_cost("cpu-throttled", _stopped(worst) * facts.mean_ns)
    quota = "its quota"
    if worst.quota_cores is not None:
        quota += f" of {_number(worst.quota_cores)} core{'s' * (worst.quota_cores != 1)}"
    yield facts.finding(
        "cpu-throttled",
        severity_of(facts.share_of(cost)) or "low",
        cost,
        f"the container's limit on CPU time stops the host {facts.of_step(cost)}",
        RAISE_QUOTA,
        _evidence(worst, facts.mean_ns),
        [f"{worst.threads} threads use up {quota}"],
    )


_LOW_SHARE: Final = 0.02
"""Share of a step from which a slow core is reported."""


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
    cost = facts.host_cost("slow-cores", on_core * _slowed(worst))
    share = facts.share_of(cost)
    if share < _LOW_SHARE:
        return
    yield facts.finding(
        "slow-cores",
        severity_of(share) or "low",
        cost,
        f"a slow core under the training thread costs {facts.of_step(cost)}",
        "the `performance` governor (cpupower frequency-set -g performance), fewer busy cores "
        "beside it, better cooling, no power limit on the machine",
        _evidence(worst, facts.mean_ns)
        | {"core_mhz": worst.core_mhz, "fastest_mhz": worst.fastest_mhz},
        [
            f"it runs at {worst.core_mhz / 1000:.1f} GHz, other cores at up to "
            f"{worst.fastest_mhz / 1000:.1f} GHz in the same run"
        ],
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
    cost = facts.host_cost("page-faults", faults * FAULT_NS)
    severity = severity_of(facts.share_of(cost))
    if severity is None:
        return
    major = worst.major_faults / worst.covered_ns * facts.mean_ns
    from_disk = f", {major:,.1f} of them from the disk" if major >= 1 else ""
    yield facts.finding(
        "page-faults",
        severity,
        cost,
        f"page faults take at least {facts.of_step(cost)}",
        "reuse large buffers across steps; MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, or "
        "another allocator (jemalloc, tcmalloc)",
        {"minor_faults": round(faults - major), "major_faults": round(major, 1)},
        [f"{faults:,.0f} a step{from_disk}: memory is released and allocated again"],
    )


_MAKES_BATCHES: Final = r"(?i)__next__$|(next|get|fetch|load)_?(batch|data|item|sample)"
"""Names of functions that give the next batch, whatever queue or pool they wait for."""
_FILL_THE_QUEUE: Final = (
    "make batches ahead of time, in threads or processes of their own; where they come from a "
    "queue, it is empty when the program asks: have more of them fill it, as a deeper queue only "
    "evens out slow batches"
)


def host_blocked(facts: Facts) -> Iterator[Finding]:
    """In traces without GPU activity, the training thread is blocked, but not on data, a core or a
    GPU, for 10 % of a step (`medium`; `low` if other threads of its process compute for as long) or
    20 % (`high`).

    Where the line at which it waits belongs to an iterator that makes batches, it is
    `data-feeding`.

    Cost: its blocked time, less its waits for data and for Python's lock, compilation, which
    compiler threads may do while it waits, the time between the passes of an update, in which it
    may wait for a device that was not recorded, and what `steps-grow` and `update-waits` cost.

    Wrong if: the named line does not wait.
    """
    compiled, locked = facts.read(read_host_state).compilations, _locked(facts)
    awaited = facts.once(awaited_phase)
    for load in facts.host_load:
        steps = [step for step in facts.measured if step.rank == load.rank]
        if not steps:
            continue
        time = facts.time_of_rank(load.rank)
        known = sum(step.host_data_ns or 0 for step in steps)
        known += compiled.get(facts.processes[load.rank], EMPTY).intersection(time).total
        known += _between_passes(facts, load.rank).total
        share = load.blocked_ns / load.covered_ns - known / time.total
        share -= locked[load.rank].share if load.rank in locked else 0.0
        if awaited is not None:
            mine = (row for row in facts.step_phases if row.rank == load.rank)
            share -= facts.share_of(sum(row.of(awaited[1].name).host_ns for row in mine))
        if share < _BLOCKED_SHARE:
            continue
        cost = max(round(share * facts.mean_ns) - longer_ns(facts, load.rank), 0)
        place = facts.line_in(time, {facts.processes[load.rank]}, blocked=True)
        severity, line, at, details = "high" if share >= HIGH else "medium", "", "", []
        waits = " but not for a core, nor for data that is marked"
        if place is None:
            ask = "" if facts.lines is not None else "; record with --python to name the line"
            advice = f"check what it waits for{ask}"
            rank = "another rank, " if len(facts.host_load) > 1 else ""
            details.append(f"that may be {rank}a lock, a disk, a pipe or a timer")
        else:
            line, advice = place.line, f"look at {place.line}: {DO_ELSEWHERE}"
            if place.share >= NEARLY_ALL:
                at, waits = f" at {line}", ""
            else:
                details.append(f"it sits at {line} for {format_ns(place.share * cost)} of that")
        if load.process_cores - load.on_core_ns / load.covered_ns >= share:
            severity, waits = "low", " while other threads of its process compute for as long"
            advice = "nothing to do if it waits for their results: XLA's threads compute so "
            advice += "without a GPU"
        elif not any(step.host_data_ns for step in steps):
            details.append(
                "if batches are made or awaited there, wrap that in "
                "`with gputrace.annotate('data'):`; few other names count as data"
            )
        id = "host-blocked"
        if re.search(_MAKES_BATCHES, line.partition(" ")[2]):
            id, waits, advice = "data-feeding", " for its next batch", _FILL_THE_QUEUE
        yield facts.finding(
            id,
            severity,
            cost,
            f"the training thread waits {facts.of_step(cost)}{at}{waits}",
            advice,
            _evidence(load, facts.mean_ns) | ({"line": line} if line else {}),
            details,
        )
        return


def wait_between_passes(facts: Facts) -> Iterator[str]:
    """Yield a clause on the rank that waits longest between the passes of an update, from 10 % of a
    step on.
    """
    shares = {}
    for load in facts.host_load:
        part = _between_passes(facts, load.rank).total / max(load.covered_ns, 1)
        shares[min(load.blocked_ns / max(load.covered_ns, 1), part)] = load.rank
    share = max(shares, default=0.0)
    if share >= _BLOCKED_SHARE:
        rank = shares[share]
        time, process = _between_passes(facts, rank), facts.processes[rank]
        place = facts.line_in(time, {process}, blocked=True)
        at = f", at {place.line}" if place is not None else ""
        yield (
            f"the training thread waits {facts.of_step(round(share * facts.mean_ns))} between the "
            f"passes of an update{at}, which may be for a device"
        )


def _between_passes(facts: Facts, rank: int) -> Intervals:
    """Return the time of a rank's measured steps between the passes of an update."""
    phases = facts.read(read_phases).get(facts.processes[rank])
    return EMPTY if phases is None else phases.between_passes.intersection(facts.time_of_rank(rank))


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
            waits = lines.waits_for_lock(process, facts.time_of_rank(rank))
            share = min(blocked.get(rank, 1.0), waits[0] / max(waits[1], 1))
            by_rank[rank] = _Locked(*waits, share)
    return by_rank


_FEWEST_LOCK_WAITS: Final = 5
"""Samples that must meet a wait for Python's lock."""


def amount_locked(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step for which each rank's main thread waits for Python's lock."""
    return {
        rank: round(locked.share * facts.mean_ns)
        for rank, locked in _locked(facts).items()
        if locked.waits >= _FEWEST_LOCK_WAITS
    }


_LINE_SEPARATOR: Final = ":"
"""Part of a line's name: without it, the thread is not known."""


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
    cost = facts.host_cost("gil-wait", share * facts.mean_ns)
    share = facts.share_of(cost)
    severity = severity_of(share)
    if severity is None or holder is None:
        return
    at = ""
    if _LINE_SEPARATOR in holder.line:
        at = f"another thread holds it, at {holder.line} in {holder.share:.0%} of {waits:,} samples"
    yield facts.finding(
        "gil-wait",
        severity,
        cost,
        f"the training thread waits for Python's lock (GIL) {facts.of_step(cost)}",
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
        [at],
    )
