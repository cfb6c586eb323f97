"""Finding on steps that take much longer than the rest, and what is longer in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.findings.data_feeding import KEEP_LOADER, find_loaders, mean_restart
from gputrace.analyzers.findings.facts import MEDIUM, NEARLY_ALL, Facts, severity_of
from gputrace.analyzers.findings.growing_steps import time_by_part
from gputrace.analyzers.findings.hardware import SHARE_NO_CARD, find_neighbours
from gputrace.analyzers.findings.host_threads import (
    CORES_ALONE,
    DO_ELSEWHERE,
    RAISE_QUOTA,
    THROTTLED_SHARE,
    amount_locked,
    amount_queued,
)
from gputrace.analyzers.findings.host_work import (
    COLLECT_BETWEEN,
    COMPILE_ONCE,
    find_own_work,
    save_aside,
)
from gputrace.analyzers.grouping import edges_of, median, time_of
from gputrace.analyzers.host_state import read_counters, read_host_state
from gputrace.analyzers.loader import read_loaders
from gputrace.analyzers.neighbours import CardNeighbours
from gputrace.model.events import Mask
from gputrace.model.host import CHECKPOINT, FORWARD, PHASES
from gputrace.model.intervals import EMPTY, Times, union
from gputrace.model.results import Finding, Step
from gputrace.model.time_class import CLASSES, IDLE_CAUSES, TIME_CLASSES
from gputrace.units import format_ns, format_ranges, format_steps


def slow_steps(facts: Facts) -> Iterator[Finding]:
    """Steps that exceed the median by 30 % and four deviations add 2 % of the time. Details
    name the class that grew most, and whether these steps begin epochs, start a loader's workers,
    collect garbage, compile or wait for a core, or another process computes on a card meanwhile.

    Cost: the time they add, spread over all steps, less the part in which their GPUs idle, which is
    charged to what keeps them idle, less what other processes on the cards cost; without a GPU,
    less what other findings have: waits for data, a core or Python's lock, checkpoints, own work.

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
            of_one = (f"they are of rank {worst.evidence['rank']} alone", *worst.details)
            worst = replace(worst, details=of_one)
        yield worst


_SLOW_STEP_RATIO: Final = 1.3
"""Ratio to the median from which a step is slow, if it is past the usual scatter too."""
_FEWEST_SAMPLES: Final = 3
"""Samples that the host's line must have in slow steps to be named."""
_ADDED_SHARE: Final = 0.02
"""Share of the steady time that slow steps must add to be reported."""
_EPOCH_BEGINS_SHARE: Final = 0.75
"""Share of the slow steps that must begin epochs for the finding to say so."""
_FEW_OF_SLOW: Final = 0.7
"""Part of the slow steps up to which those that have nearly all of the growth are named."""
_NAMED_REASON_SHARE: Final = 0.5
"""Share that one of `_HOST_TOOK` must have of what slow steps take longer, to be named."""
_NAMES: Final = {
    **{row.id: row.activity for row in TIME_CLASSES},
    **PHASES,
    FORWARD: "forward passes",
    "host_data": "waiting for data",
    "host": "other host time",
}
_HOST_TOOK: Final = {
    "starting_workers_ns": (
        "in {each}, a loader starts its workers for {took}",
        KEEP_LOADER["pytorch"],
    ),
    "collecting_ns": ("in {each}, Python collects garbage for {took}", COLLECT_BETWEEN),
    "compiling_ns": ("in {each}, parts of the program are compiled for {took}", COMPILE_ONCE),
    "queued_ns": (
        "in {each}, the training thread is queued for a core for at least {took} longer than usual",
        CORES_ALONE,
    ),
}
"""Detail and advice, by what takes the host in slow steps, as in the evidence."""
_EXPLAIN: Final = {*KEEP_LOADER.values(), *(remedy for _, remedy in _HOST_TOOK.values())}
"""Advice that says why steps are slow."""
HOST_THEN: Final = (
    "check what the program does only in these steps: garbage collection, logging, a periodic "
    "checkpoint or evaluation, other programs on its cores"
)
_LOAD_EVENLY: Final = (
    "check the batches of these steps: larger samples, a slower disk, a cache being filled, too "
    "few batches prefetched"
)
IN_SLOW_STEPS: Final = {
    "compute": "check the batches of these steps: longer inputs, shapes that need a kernel search "
    "or compilation, a periodic evaluation; or the GPU's clocks then",
    "communication": "check which rank arrives last in these steps, and what else uses the links "
    "then",
    "h2d": "check what only these steps copy to the GPU: larger batches, tables or masks made on "
    "the host",
    "other_copy": "check what these steps read back or move: metrics, logging, a periodic "
    "checkpoint",
    "memset": "check what these steps set to zero: buffers reallocated for other input shapes",
    "recorder": "record less, or leave these steps out: the recorder writes its data in them",
    "data_feeding": _LOAD_EVENLY,
    "host_data": _LOAD_EVENLY,
    "sync": "check what the host waits for in these steps: a loss or a metric read for logging, a "
    "periodic evaluation or checkpoint",
    FORWARD: "look for a periodic evaluation or rollout, whose forward passes count toward the "
    "next step, and make it rarer or shorter; or check the batches of these steps for longer "
    "inputs",
    "alloc": "check the shapes of these steps: inputs longer than any before need new memory; pad "
    "them, or run the longest first",
}
"""Advice by the class or phase that is longer in slow steps; of all others `HOST_THEN`."""


def _slow_steps_of(facts: Facts, rank: int, steps: Sequence[Step]) -> Finding | None:
    longest = _longest_of_each(steps)
    if len(longest) < 5:
        return None
    lengths = np.array([step.end_ns - step.start_ns for step in longest])
    middle = float(median(lengths))
    scatter = 1.4826 * float(median(np.abs(lengths - middle)))
    slow = lengths > max(_SLOW_STEP_RATIO * middle, middle + 4 * scatter)
    excess = int((lengths[slow] - middle).sum())
    if not slow.any() or slow.mean() > 0.5 or excess < _ADDED_SHARE * lengths.sum():
        return None
    name, grown, part = _what_slow_steps_have(facts, rank, longest, slow)
    more = int(grown.mean())
    those, others = ([longest[row] for row in np.flatnonzero(of)] for of in (slow, ~slow))
    numbers = [step.step for step in those]
    found = _SlowSteps(rank, those, others, excess, name)
    worst = longest[int(np.argmax(lengths))].step
    took = _host_took(facts, rank, those, others)
    epochs = _steps_of_epoch(facts, found)
    shared, met = _slowed_by_neighbours(facts, frozenset(numbers))
    if not facts.per_gpu.operations:
        shared += _in_other_findings(facts, rank, those, took)
    part *= 1 - min(shared / max(excess, 1), 1.0)
    details, advice = _why(facts, found, took, epochs)
    details.insert(
        0, f"what grew most is {_NAMES[name]} ({format_ns(more)}{_where_most(numbers, grown)})"
    )
    is_explained = advice in _EXPLAIN
    added, charged = (format_ns(ns / len(longest)) for ns in (excess, (1 - part) * excess))
    amount = "all" if charged == added else charged
    elsewhere = f"; {amount} of that is counted under its causes, not here" * (part < NEARLY_ALL)
    details.insert(1, f"they add {added} to the mean step{elsewhere}")
    if met is not None and not is_explained and shared >= _NAMED_REASON_SHARE * excess:
        details.append(f"{met} meanwhile")
        advice = SHARE_NO_CARD
    stopped = any(
        load.rank == rank and load.throttled >= THROTTLED_SHARE for load in facts.host_load
    )
    advice = RAISE_QUOTA if advice == CORES_ALONE and stopped else advice
    return facts.finding(
        "slow-steps",
        severity_of(part * excess / float(lengths.sum())) or "low",
        round(part * excess) // len(longest),
        f"{len(numbers)} of {len(longest)} steps {'are' if len(numbers) > 1 else 'is'} slow "
        f"({format_steps(numbers)}): {format_ns(float(np.mean(lengths[slow])))}, "
        f"normally {format_ns(middle)}",
        f"{advice} (gputrace analyze TRACE --step {worst} says what that step has more of)",
        {
            "slow_steps": len(numbers),
            "steps": format_ranges(numbers),
            "rank": rank,
            "class": name,
            "more_ns": more,
            "epoch_steps": epochs,
            **took,
        },
        details,
    )


class _SlowSteps(NamedTuple):
    """Slow steps of a rank."""

    rank: int
    steps: Sequence[Step]
    others: Sequence[Step]
    """Steps that are not slow."""
    excess_ns: int
    """Time by which all of them together exceed the median."""
    most: str
    """Class or phase that grew most in them."""


def _steps_of_epoch(facts: Facts, slow: _SlowSteps) -> int | None:
    """Return the steps of an epoch, if slow steps mostly begin epochs."""
    begins = [p.step for p in facts.phases if (p.phase, p.rank) == ("epoch", slow.rank)]
    epochs = sorted(step for step in begins if step is not None)
    numbers = {step.step for step in slow.steps}
    begun = len(numbers.intersection(epochs)) >= _EPOCH_BEGINS_SHARE * len(numbers)
    return epochs[1] - epochs[0] if len(epochs) > 1 and begun else None


def _why(
    facts: Facts, slow: _SlowSteps, took: Mapping[str, int], epochs: int | None
) -> tuple[list[str], str]:
    """Return why steps are slow as far as the host shows it, and what to do.

    ``took`` has the nanoseconds of each slow step that each of `_HOST_TOOK` has.
    """
    details, advice = [], IN_SLOW_STEPS.get(slow.most, HOST_THEN)
    if slow.most == CHECKPOINT:
        advice = save_aside(facts.framework)
    keep = KEEP_LOADER.get(facts.framework, KEEP_LOADER[""])
    if epochs and facts.once(find_loaders):
        return [f"they begin epochs of {epochs} steps, where the loader restarts"], keep
    if epochs:
        details.append(f"they come every {epochs} steps")
        advice += f"; if epochs begin there, {keep}"
    # A GPU that works for longer does not wait for a thread that waits for a core.
    works = slow.most in CLASSES and slow.most not in IDLE_CAUSES
    for cause, (clause, remedy) in _HOST_TOOK.items():
        if works and cause == "queued_ns":
            continue
        if took[cause] >= _NAMED_REASON_SHARE * slow.excess_ns / len(slow.steps):
            each = "each" if len(slow.steps) > 1 else "it"
            details.append(clause.format(each=each, took=format_ns(took[cause])))
            advice = remedy
            break
    where, line = _where_longer(facts, slow)
    details += [where] if where else []
    if line and advice == HOST_THEN:
        advice = f"look at {line}: {DO_ELSEWHERE}"
    return details, advice


def _where_longer(facts: Facts, slow: _SlowSteps) -> tuple[str, str]:
    """Say at which line the host is in slow steps, and return that line if it is where most of the
    samples lie that these have beyond as many other ones; empty where samples are few.
    """
    if facts.lines is None:
        return "", ""
    process = facts.processes.get(slow.rank, -1)
    met = facts.lines.count(process, time_of(slow.steps))
    usual = facts.lines.count(process, time_of(slow.others))
    part = len(slow.steps) / max(len(slow.others), 1)
    grown = {line: count - part * usual[line] for line, count in met.items()}
    line = max(grown, key=lambda line: grown[line], default="")
    least = max(_FEWEST_SAMPLES, _NAMED_REASON_SHARE * (met.total() - part * usual.total()))
    if line and grown[line] >= least:
        who, whose = ("they are", "their") if len(slow.steps) > 1 else ("it is", "its")
        return f"{who} longer at {line} ({met[line]} of {whose} {met.total()} samples)", line
    slowest = max(slow.steps, key=lambda step: step.end_ns - step.start_ns)
    place = facts.line_in(time_of([slowest]), {process})
    if place is None or place.count < _FEWEST_SAMPLES:
        return "", ""
    return f"in step {slowest.step}: {place.line} ({place.count} of {place.samples} samples)", ""


def _where_most(numbers: Sequence[int], grown: Times) -> str:
    """Return which of the slow steps have nearly all of some growth; empty if most of them do."""
    many = grown > grown.mean()
    most = np.array(numbers)[many].tolist()
    is_few = 0 < len(most) <= _FEW_OF_SLOW * len(numbers)
    if not is_few or grown[many].sum() < NEARLY_ALL * grown.sum():
        return ""
    return f", most of it in step{'s' * (len(most) > 1)} {format_steps(most)}"


def _slowed_by_neighbours(
    facts: Facts, numbers: Collection[int]
) -> tuple[int, CardNeighbours | None]:
    """Return the nanoseconds that other processes on a card cost in some steps, by the card where
    that is most, and these processes.
    """
    most: tuple[int, CardNeighbours | None] = 0, None
    for met in facts.once(find_neighbours):
        costs = zip(met.steps, met.by_step.tolist(), strict=True)
        cost = sum(ns for step, ns in costs if step in numbers)
        most = (cost, met) if cost > most[0] else most
    return most


def _host_took(
    facts: Facts, rank: int, slow: Sequence[Step], others: Sequence[Step]
) -> dict[str, int]:
    """Return the nanoseconds of each slow step of a rank that each of `_HOST_TOOK` has."""
    state, process = facts.read(read_host_state), facts.processes.get(rank, -1)
    starts, loading = EMPTY, facts.read(read_loaders)
    if loading is not None:
        # With no workers to start, too, a loader begins.
        rows = loading.select((loading.process == process) & (loading.number > 0))
        rows = rows.of("start workers")
        starts = union(rows.start, rows.end)
    time, counted = time_of(slow), facts.read(read_counters).get(process)
    took = {
        "starting_workers_ns": starts.intersection(time).total,
        "collecting_ns": state.collections.get(process, EMPTY).intersection(time).total,
        "compiling_ns": state.compilations.get(process, EMPTY).intersection(time).total,
        "queued_ns": counted.queued_more(edges_of(slow), edges_of(others)) if counted else 0,
    }
    return {cause: ns // len(slow) for cause, ns in took.items()}


def _in_other_findings(
    facts: Facts, rank: int, slow: Sequence[Step], took: Mapping[str, int]
) -> int:
    """Return the nanoseconds of the slow steps of a rank without a GPU that other findings have."""
    each = took["collecting_ns"] + took["compiling_ns"]
    if facts.share_of(mean_restart(facts)) >= MEDIUM:
        each += took["starting_workers_ns"]
    if facts.share_of(max(amount_queued(facts).values(), default=0)) >= MEDIUM:
        each += took["queued_ns"]
    locked = 0.0
    if facts.lines is not None and facts.share_of(amount_locked(facts).get(rank, 0)) >= MEDIUM:
        time = time_of(slow)
        waits, samples, _ = facts.lines.waits_for_lock(facts.processes[rank], time)
        locked = time.total * waits / max(samples, 1)
    return each * len(slow) + round(locked)


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
) -> tuple[str, Times, float]:
    """Return the class that grew most in the slow steps, its growth in nanoseconds in each of them,
    and the part of the growth that no cause of idle time, and no other finding, is charged with.

    Of a rank without a GPU, the classes are its phases, as far as they are known.
    """
    shares = time_by_part(facts, rank, steps)
    table = np.array(list(shares.values()), np.int64)
    growth = table[:, slow] - np.array([[median(row[~slow])] for row in table], np.int64)
    most, grown = int(np.argmax(growth.sum(axis=1))), np.maximum(growth.mean(axis=1), 0)
    reported: set[str] = set()
    if not facts.per_gpu.operations:
        costs = {
            "host_data": facts.share_of(facts.mean("host_data")),
            CHECKPOINT: facts.share_of(float(np.mean(shares.get(CHECKPOINT, 0)))),
            "host": facts.once(find_own_work).share,
        }
        reported = {name for name, share in costs.items() if share >= MEDIUM}
    charged = np.array([name in IDLE_CAUSES or name in reported for name in shares])
    part = 1 - float(grown[charged].sum() / max(grown.sum(), 1))
    return list(shares)[most], growth[most], part
