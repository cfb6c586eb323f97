"""Gates for continuous integration: limits on the figures of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from gputrace.analyzers.compare import changed_parts, compare, without_waits, work_ratio
from gputrace.analyzers.compare.runs import SLOW_RATIO, Mean, Run, difference, lost_ns
from gputrace.analyzers.findings import ALL_RULES, CAUSES, HOST_RULES
from gputrace.analyzers.findings.facts import SEVERITIES
from gputrace.analyzers.ledger.causes import path_of, tree_of
from gputrace.errors import UsageError
from gputrace.model.events import Kind
from gputrace.model.host import FORWARD, UPDATE
from gputrace.model.results import Analysis
from gputrace.model.time_class import BY_ID, CLASSES, IDLE_CAUSES
from gputrace.plugins import names
from gputrace.units import format_ns, format_number

__all__ = [
    "FIGURES",
    "SEVERITIES",
    "Check",
    "CheckOptions",
    "Gate",
    "Limit",
    "cause_of",
    "check",
    "check_words",
]


def check_words(fail_on: Iterable[str]) -> None:
    """Raise UsageError for a word that is neither a severity nor a finding: it would never fail."""
    ids = _finding_ids()
    for word in fail_on:
        if word not in ids and word not in SEVERITIES:
            known = ", ".join((*SEVERITIES, *sorted(ids)))
            raise UsageError(f"{word!r} is neither a finding nor a severity; choose from {known}")


def _finding_ids() -> set[str]:
    return {*(rule.__name__.replace("_", "-") for rule in ALL_RULES), *names("analyzers")}


def cause_of(text: str) -> str:
    """Return the id of a cause, given that or its label in any case; raises UsageError."""
    nodes = (*tree_of(CAUSES), *tree_of(CAUSES, waits_known=False))
    places = {node.id: place for place, node in reversed(list(enumerate(nodes)))}
    in_order = sorted(places, key=lambda id: [places[each] for each in path_of(id, CAUSES)])
    known = (*in_order, *names("causes"))
    ids = {node.label.casefold(): node.id for node in reversed(nodes)}
    ids |= {cause.casefold(): cause for cause in known}
    word = text.strip().casefold()
    if cause := ids.get(word) or ids.get(word.rpartition(": ")[2]):
        return cause
    if word in _finding_ids():
        raise UsageError(f"{text!r} is a finding and no cause: give --fail-on {word}")
    raise UsageError(f"{text!r} is not a cause of lost time; choose from {', '.join(known)}")


def check(run: Run, asked: CheckOptions, baseline: Run | None = None) -> Check:
    """Evaluate all gates; the baseline is given where a slow-down is limited."""
    gates = [gate(run, limit, baseline) for limit in asked.limits]
    if asked.max_slowdown is not None and baseline is not None:
        gates.append(gate_slowdown(run, baseline, asked.max_slowdown))
    gates += [gate_findings(run.analysis, word) for word in asked.fail_on]
    return Check(
        SCHEMA_VERSION,
        run.analysis.paths,
        baseline.analysis.paths if baseline is not None else None,
        all(gate.passed for gate in gates),
        tuple(gates),
    )


FIGURES: Final = (
    *(*CLASSES, "idle", "data_wait", "slow_steps", "step_time", "step_time_p95", "throughput"),
)
_OF_HOSTS: Final = tuple(cause.id for cause in CAUSES if cause.rule in HOST_RULES)
"""Causes that are found without a GPU."""
OF_CAUSE: Final = "cause "
"""Beginning of the figures of causes, before the id."""


def gate(run: Run, limit: Limit, baseline: Run | None = None) -> Gate:
    """Compare a figure with its limit; of classes, the mean over steps and GPUs."""
    figure, unit, steps, loop = limit.figure, limit.unit, run.analysis.steps, run.loop
    parts = {"idle": IDLE_CAUSES, "data_wait": ("host_data",)}.get(figure, (figure,))
    name = f"{'max' if limit.at_most else 'min'}-{figure.replace('_', '-')}"
    why = _why_unknown(run, figure, parts)
    if loop is None or why:
        return Gate(name, False, False, None, limit.value, unit, f"unknown: {why}")
    if limit.relative and baseline is not None:
        return _gate_growth(name, run, baseline, limit, parts)
    length = loop.length.value
    if figure == "throughput":
        value, subject, object = (run.samples or 0) / length * 1e9, "the throughput is", ""
    elif figure == "slow_steps":
        value, object = loop.slow_share, " of all"
        subject = f"steps over {SLOW_RATIO} times the median are"
    elif figure == "step_time":
        value, subject, object = length, "a step takes", ""
    elif figure == "step_time_p95":
        value, object = float(run.analysis.unrecorded(steps.p95_ns) or 0), ""
        subject = "the 95th percentile of the steps is"
    else:
        time, subject = _time_of(run, figure, parts)
        value, object = time.value / (length if unit == "share" else 1), " of a step"
    bound = f"{'at most' if limit.at_most else 'at least'} {_formatted(limit.value, unit)}"
    message = f"{subject} {_formatted(value, unit)}{object}; {bound} asked for"
    passed = value <= limit.value if limit.at_most else value >= limit.value
    return Gate(name, passed, True, value, limit.value, unit, message)


def _gate_growth(name: str, run: Run, baseline: Run, limit: Limit, parts: Sequence[str]) -> Gate:
    """Fail where a time of a step exceeds the baseline's by more than the limit and the noise of
    the steps; a share is of the baseline's step. The baseline's times are of as many samples.
    """
    unit, bound, runs, work = limit.unit, limit.value, (baseline, run), 1.0
    why, bounds = _why_unknown(baseline, limit.figure, parts), None
    if len({(len(each.keys), bool(each.analysis.gpus)) for each in runs}) > 1:
        why = "it ran on other GPUs"
    elif not why:
        (before, _), (after, what) = (_time_of(each, limit.figure, parts) for each in runs)
        work = work_ratio(*runs)[0]
        error = None if before.error is None else work * before.error
        before = replace(before, value=work * before.value, error=error)
        bounds = difference(before, after)
    if bounds is None or baseline.loop is None:
        why = f"in the baseline, {why}" if why else "too few steps to tell growth from noise"
        return Gate(name, False, False, None, bound, unit, f"unknown: {why}")
    whole = work * baseline.loop.length.value if unit == "share" else 1.0
    differences = after.value - before.value, bounds.low, bounds.high
    # Nothing gets shorter by more than all of it.
    value, low, high = (max(ns, -before.value) / whole + 0.0 for ns in differences)
    signs = " to ".join(f"{'+' * (ns > 0)}{_formatted(ns, unit)}" for ns in (low, high))
    message = f"{what} {_formatted(abs(value), unit)} of a step {'less' if value < 0 else 'more'}"
    message += f" than in the baseline ({signs}); at most {_formatted(bound, unit)} more asked for"
    if low <= bound < value:
        decides = _what_decides(value - low, value - bound, runs)
        message += f"; the noise of the steps could explain it: {decides}"
    if work != 1:
        times = f"{format_number(work)}x"
        message += f"; a step does {times} the work, and the baseline's times count {times}"
    return Gate(name, low <= bound, True, value, bound, unit, message)


def _time_of(run: Run, figure: str, parts: Sequence[str]) -> tuple[Mean, str]:
    """Return the nanoseconds of a step that go to classes or to a cause, as uncertain as the step
    where they are not known step by step, and what to call them.
    """
    assert run.loop is not None
    classes, length = run.loop.classes, run.loop.length
    if not figure.startswith(OF_CAUSE):
        subjects = {"idle": "the GPUs are idle for", "data_wait": "the host waits for data for"}
        ns = sum(classes[part].value for part in parts)
        mean = replace(classes[parts[0]] if len(parts) == 1 else length, value=ns)
        return mean, subjects.get(figure) or BY_ID[figure].gate
    cause = figure.removeprefix(OF_CAUSE)
    general, _, label = run.analysis.cause_label(cause).rpartition(": ")
    label += f" ({general})" if general else ""
    lost = lost_ns(run) if "compute" in classes else _lost_by_hosts(run.analysis)
    return replace(length, value=lost.get(cause, 0.0)), f"the time lost to {label} is"


def _lost_by_hosts(analysis: Analysis) -> dict[str, float]:
    """Return the time lost in a step by cause, and by each more general one, as findings say."""
    lost: dict[str, float] = {}
    for finding in analysis.findings:
        if finding.id in _OF_HOSTS:
            for cause in path_of(finding.id, CAUSES):
                lost[cause] = lost.get(cause, 0.0) + finding.impact_ns
    # Some are known by how long they last, and not when: they may overlap.
    return {cause: min(ns, analysis.steps.mean_ns or ns) for cause, ns in lost.items()}


def _why_unknown(run: Run, figure: str, parts: Sequence[str]) -> str:
    """Return why a figure is unknown; empty where it is known."""
    steps = run.analysis.steps
    if run.loop is None:
        return f"no measured steps ({steps.reason})"
    if steps.kind != "training" and not any(row.steps for row in run.analysis.breakdown):
        return (
            "the repeating pattern in the trace is not shown to be training steps; choose steps "
            "with --steps"
        )
    if figure == "throughput":
        return "" if run.samples else "the batch size is not given (--batch)"
    if figure in ("data_wait", "slow_steps"):
        is_known = figure == "slow_steps" or "host_data" in run.loop.classes
        return "" if is_known else _no_waits(run.analysis)
    cause = figure.removeprefix(OF_CAUSE)
    needs = {kind for each in CAUSES if each.id == cause for kind in each.needs}
    if Kind.COUNTER in needs and not run.analysis.host_load:
        return "the time of the host's threads was not counted"
    if Kind.SAMPLE in needs and not run.analysis.host_lines:
        return "the host was not sampled"
    on_hosts = figure.startswith(OF_CAUSE) and "compute" not in run.loop.classes
    if on_hosts and cause == "host-work" and not _knows_passes(run.analysis):
        return "no forward passes were recorded, which a program's own work is told from"
    if on_hosts and path_of(cause, CAUSES)[0] == "data":
        return "" if "host_data" in run.loop.classes else _no_waits(run.analysis)
    if on_hosts and (some := [id for id in _OF_HOSTS if cause in path_of(id, CAUSES)]):
        how = f"no GPU activity was recorded; without a GPU, limit its parts: {', '.join(some)}"
        return "" if cause in some else how
    needed = ("compute",) if figure.startswith(OF_CAUSE) else parts
    known = figure.startswith("step_time") or all(name in run.loop.classes for name in needed)
    instead = "host_data" in run.loop.classes and figure == "data_feeding"
    hint = "; without a GPU use --max-data-wait" if instead else ""
    return "" if known else f"no GPU activity was recorded{hint}"


def _knows_passes(analysis: Analysis) -> bool:
    return any(phases.of(name).host_ns for phases in analysis.step_phases for name in _PASSES)


_PASSES: Final = (FORWARD, UPDATE)


def _no_waits(analysis: Analysis) -> str:
    """Say why waits for data are unknown; by samples alone, a gate would know no fast run's."""
    waits = (finding for finding in analysis.findings if finding.id == "data-feeding")
    line = next((f"; {f.evidence['line']} may be one" for f in waits if f.evidence.get("line")), "")
    return (
        f"no waits for data were recorded{line}; if gputrace knows no loader of the loop, wrap "
        "what makes its batches in `with gputrace.annotate('data'):`, or leave this limit out"
    )


def _formatted(value: float, unit: str) -> str:
    if unit == "ns":
        return format_ns(value)
    return f"{100 * value:.3g}%" if unit == "share" else f"{value:,.6g} samples/s"


def gate_findings(analysis: Analysis, word: str) -> Gate:
    """Require the absence of a finding, or of all findings from a severity upwards."""
    if word in SEVERITIES:
        bad = SEVERITIES[: SEVERITIES.index(word) + 1]
        matching = [finding for finding in analysis.findings if finding.severity in bad]
    else:
        matching = [finding for finding in analysis.findings if finding.id == word]
    messages = "; ".join(f"{finding.id}: {finding.message}" for finding in matching)
    what = f"{word} or worse" if word in SEVERITIES[1:] else word
    return Gate(
        f"fail-on {word}",
        not matching,
        True,
        len(matching),
        0,
        "findings",
        messages or f"no finding {what}",
    )


def gate_slowdown(run: Run, baseline: Run, limit: float) -> Gate:
    """Fail where the slow-down exceeds the limit by more than the noise of the steps.

    That is, where all of its 95 % bounds do: those of the steps, and, without GPUs, those of the
    steps without their waits for cores that other programs had, which say nothing of the program.
    """
    if len(run.keys) != len(baseline.keys):
        why = f"the baseline ran on {len(baseline.keys)} GPUs, this on {len(run.keys)}"
        return Gate("max-slowdown", False, False, None, limit, "share", f"unknown: {why}")
    comparison = compare([baseline, run])
    pair = comparison.pair
    if pair is None or comparison.unit == "span" or pair.speed_up is None:
        why = comparison.unit_reason or "the baseline has nothing to compare"
    elif pair.speed_up_low is None or pair.speed_up_high is None:
        why = f"too few steps to tell a slow-down from noise: record {_FEW_STEPS} of each or more"
    else:
        slowdown, low, high = (
            1 / speed - 1 for speed in (pair.speed_up, pair.speed_up_high, pair.speed_up_low)
        )
        alone = without_waits([baseline, run], pair)
        own, own_high, own_low = (1 / speed - 1 for speed in alone)
        passed = slowdown <= limit or min(low, own_low) <= limit
        message = f"{abs(slowdown):.1%} {'slower' if slowdown > 0 else 'faster'} than the baseline"
        message += f" ({low:+.1%} to {high:+.1%}); the limit is {100 * limit:.3g}% slower"
        noise = slowdown - low if slowdown > limit else high - slowdown
        decides = _what_decides(noise, abs(slowdown - limit), [baseline, run])
        if passed and low > limit:
            message += (
                f"; passes, as other programs had the cores: without them, it is {own:+.1%}"
                f" ({own_low:+.1%} to {own_high:+.1%}); record both while the machine is quiet"
            )
        elif passed and slowdown > limit and low > 0:
            message += f"; it is slower, but not for certain by more than that: {decides}"
        elif passed and slowdown > limit:
            message += f"; the noise of the steps could explain it: {decides}"
        elif passed and high > limit and high - slowdown > limit:
            message += f"; passes, but the noise is larger than the limit: {decides}"
        elif passed and high > limit:
            message += f"; more is not excluded: {decides}"
        if pair.work_ratio != 1:
            message += f"; a step does {format_number(pair.work_ratio)}x the work"
        parts = () if passed else changed_parts("slower", pair, comparison.unit)
        doubts = [warning for warning in comparison.warnings if "equal work" in warning]
        message = "; ".join([message, *filter(None, [", ".join(parts)]), *doubts])
        return Gate("max-slowdown", passed, True, slowdown, limit, "share", message)
    return Gate("max-slowdown", False, False, None, limit, "share", f"unknown: {why}")


_FEW_STEPS: Final = 10
"""Steps below which the bounds are rough."""
_MANY_TIMES: Final = 100
"""Multiple of the recorded steps from which more would hardly decide."""


def _what_decides(noise: float, distance: float, runs: Sequence[Run]) -> str:
    """Say how many steps would decide a gate: bounds shrink with the root of their number.

    Args:
        noise: distance of the slow-down from its bound towards the limit.
        distance: of the slow-down from the limit.
        runs: the runs, which have steps.
    """
    times = (noise / max(distance, 1e-9)) ** 2
    if times > _MANY_TIMES:
        return "it is too close to the limit for more steps to decide; choose another limit"
    counts = [len(run.loop.numbers) for run in runs if run.loop is not None]
    wanted = ceil(times * max(counts, default=_FEW_STEPS))
    rounding = 10 ** max(len(str(wanted)) - 2, 0)
    wanted = max(ceil(wanted / rounding) * rounding, _FEW_STEPS)
    return f"about {wanted:,} steps of each would decide"


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper or lower limit of a figure."""

    figure: str
    """Class of ``breakdown``, ``idle``, ``data_wait``, ``slow_steps``, ``step_time``,
    ``step_time_p95``, ``throughput``, or ``cause`` and the id of one."""
    value: float
    """Share (0 to 1), nanoseconds, or samples per second."""
    unit: str
    """``share``, ``ns`` or ``samples_per_s``."""
    at_most: bool = True
    relative: bool = False
    """True where it limits by how much the figure exceeds the baseline's, which must be given."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Gates that a check is to evaluate."""

    limits: tuple[Limit, ...] = ()
    max_slowdown: float | None = None
    """Maximum slow-down against the baseline, as a fraction."""
    fail_on: tuple[str, ...] = ()
    """Ids of findings, or severities, each of which includes the worse ones."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of a gate."""

    id: str
    """Option of the gate: ``max-data-feeding``, ``max-slowdown``, ``fail-on high``."""
    passed: bool
    evaluated: bool
    """False where the figure is unknown; such a gate is not met."""
    value: float | None
    limit: float | None
    unit: str | None
    """``share``, ``ns``, ``samples_per_s`` or ``findings``."""
    message: str
    """Figure and limit in words, or why the figure is unknown."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of all gates for one trace."""

    schema_version: int
    paths: tuple[str, ...]
    baseline: tuple[str, ...] | None
    """Files of the baseline."""
    passed: bool
    """True if all gates are met."""
    gates: tuple[Gate, ...]
