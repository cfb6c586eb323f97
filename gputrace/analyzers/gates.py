"""Gates for continuous integration: limits that the figures of a run must keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.compare import compare
from gputrace.analyzers.compare.results import Comparison, Pair
from gputrace.analyzers.compare.runs import Run
from gputrace.analyzers.findings import HOST_RULES, RULES
from gputrace.analyzers.findings.context import SEVERITIES
from gputrace.errors import UsageError
from gputrace.model.results import Analysis
from gputrace.model.time_class import BY_ID, CLASSES, IDLE_CAUSES
from gputrace.plugins import names
from gputrace.units import format_ns

__all__ = ["FIGURES", "SEVERITIES", "Asked", "Check", "Gate", "Limit", "check", "check_words"]


def check_words(fail_on: Iterable[str]) -> None:
    """Raises UsageError for what is neither a severity nor a finding: it would never fail."""
    ids = {rule.__name__.replace("_", "-") for rule in (*RULES, *HOST_RULES)}
    ids |= set(names("analyzers"))
    for word in fail_on:
        if word not in ids and word not in SEVERITIES:
            known = ", ".join((*SEVERITIES, *sorted(ids)))
            raise UsageError(f"{word!r} is no finding and no severity; there are {known}")


def check(run: Run, asked: Asked, baseline: Run | None = None) -> Check:
    """Every gate asked for; the baseline is there where a slow-down is limited."""
    gates = [gate(run, limit) for limit in asked.limits]
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


FIGURES: Final = (*CLASSES, "idle", "step_time", "step_time_p95", "throughput")


def gate(run: Run, limit: Limit) -> Gate:
    """Whether a figure keeps its limit."""
    name = f"{'max' if limit.at_most else 'min'}-{limit.figure.replace('_', '-')}"
    why = _why_not(run, limit)
    if why:
        return Gate(name, False, False, None, limit.value, limit.unit, f"cannot be told: {why}")
    value = _figure(run, limit)
    passed = value <= limit.value if limit.at_most else value >= limit.value
    return Gate(name, passed, True, value, limit.value, limit.unit, _message(run, limit, value))


def _why_not(run: Run, limit: Limit) -> str:
    """Why there is no figure; nothing where there is one."""
    steps = run.analysis.steps
    if run.loop is None:
        return f"no measured steps ({steps.reason})"
    if steps.kind != "training" and not any(row.steps for row in run.analysis.breakdown):
        return (
            "what repeats in the trace is not shown to be training steps; choose some with --steps"
        )
    if limit.figure == "throughput":
        return "" if run.samples else "nobody said how large the batch is (--batch)"
    if limit.figure.startswith("step_time"):
        return ""
    return "" if _known(run, limit.figure) else "nothing was recorded of the GPUs"


def _known(run: Run, figure: str) -> bool:
    assert run.loop is not None
    return all(name in run.loop.classes for name in _parts(figure))


def _parts(figure: str) -> tuple[str, ...]:
    return IDLE_CAUSES if figure == "idle" else (figure,)


def _figure(run: Run, limit: Limit) -> float:
    """In the unit of the limit: the mean over steps and GPUs."""
    assert run.loop is not None
    length, steps = run.loop.length.value, run.analysis.steps
    if limit.figure == "throughput":
        return (run.samples or 0) / length * 1e9
    if limit.figure == "step_time":
        return length
    if limit.figure == "step_time_p95":
        return float(steps.p95_ns or 0)
    taken = sum(run.loop.classes[name].value for name in _parts(limit.figure))
    return taken / length if limit.unit == "share" else taken


def _message(run: Run, limit: Limit, value: float) -> str:
    assert run.loop is not None
    bound = f"{'at most' if limit.at_most else 'at least'} {_told(limit.value, limit.unit)}"
    what = {
        "throughput": "the throughput is",
        "step_time": "a step takes",
        "step_time_p95": "the 95th percentile of the steps is",
    }.get(limit.figure)
    if what is not None:
        return f"{what} {_told(value, limit.unit)}; {bound} asked for"
    row = BY_ID.get(limit.figure)
    subject = row.gate if row is not None else "the GPUs are idle for"
    return f"{subject} {_told(value, limit.unit)} of a step; {bound} asked for"


def _told(value: float, unit: str) -> str:
    if unit == "ns":
        return format_ns(value)
    return f"{100 * value:.3g}%" if unit == "share" else f"{value:,.6g} samples/s"


def gate_findings(analysis: Analysis, word: str) -> Gate:
    """Whether a finding, or any of a severity or a worse one, is absent."""
    if word in SEVERITIES:
        bad = SEVERITIES[: SEVERITIES.index(word) + 1]
        found = [finding for finding in analysis.findings if finding.severity in bad]
    else:
        found = [finding for finding in analysis.findings if finding.id == word]
    told = "; ".join(f"{finding.id}: {finding.message}" for finding in found)
    what = f"{word} or worse" if word in SEVERITIES[1:] else word
    return Gate(
        f"fail-on {word}", not found, True, len(found), 0, "findings", told or f"no finding {what}"
    )


def gate_slowdown(run: Run, baseline: Run, limit: float) -> Gate:
    """Fails where the slow-down is past the limit and its bounds leave no doubt that it is one."""
    why = _baseline_problem(run, baseline)
    if why:
        return _untold(limit, why)
    found = compare([baseline, run])
    pair = found.pair
    if pair is None or found.unit == "span" or pair.speed_up is None:
        return _untold(limit, found.unit_reason or "the baseline has nothing to compare with")
    if pair.speed_up_low is None or pair.speed_up_high is None:
        return _untold(limit, "too few steps to tell a slow-down from noise")
    slowdown, low, high = (
        1 / speed - 1 for speed in (pair.speed_up, pair.speed_up_high, pair.speed_up_low)
    )
    passed = slowdown <= limit or low <= 0
    message = f"{_by(slowdown)} than the baseline ({low:+.1%} to {high:+.1%})"
    message += f"; at most {100 * limit:.3g}% slower asked for"
    if passed and slowdown > limit:
        message += "; the noise of the steps explains as much"
    return Gate(
        "max-slowdown", passed, True, slowdown, limit, "share", message + _doubts(found, pair)
    )


def _baseline_problem(run: Run, baseline: Run) -> str:
    if len(run.keys) != len(baseline.keys):
        return f"the baseline ran on {len(baseline.keys)} GPUs, this on {len(run.keys)}"
    return ""


def _untold(limit: float, why: str) -> Gate:
    return Gate("max-slowdown", False, False, None, limit, "share", f"cannot be told: {why}")


def _by(slowdown: float) -> str:
    return f"{abs(slowdown):.1%} {'slower' if slowdown > 0 else 'faster'}"


def _doubts(found: Comparison, pair: Pair) -> str:
    """What the gate took for granted."""
    taken = [f"a step does {pair.work_ratio:.3g}x the work"] if pair.work_ratio != 1 else []
    taken += [warning for warning in found.warnings if "equal work" in warning]
    return "".join(f"; {doubt}" for doubt in taken)


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure may be at most, or must be at least."""

    figure: str
    """A class of ``breakdown``, ``idle``, ``step_time``, ``step_time_p95``, ``throughput``."""
    value: float
    """A share (0 to 1), nanoseconds, or samples a second."""
    unit: str
    """``share``, ``ns`` or ``samples_per_s``."""
    at_most: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """All gates of a check."""

    limits: tuple[Limit, ...] = ()
    max_slowdown: float | None = None
    """Part by which it may be slower than the baseline."""
    fail_on: tuple[str, ...] = ()
    """Ids of findings, or severities: that one and the worse."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate, and whether it is met."""

    id: str
    """The option that asked for it: ``max-data-feeding``, ``max-slowdown``, ``fail-on high``."""
    passed: bool
    evaluated: bool
    """False where the trace cannot tell; such a gate is not met."""
    value: float | None
    limit: float | None
    unit: str | None
    """``share``, ``ns``, ``samples_per_s`` or ``findings``."""
    message: str
    """The figure and the limit in words, or why there is no figure."""


@dataclass(frozen=True, slots=True)
class Check:
    """The answer for one trace."""

    schema_version: int
    paths: tuple[str, ...]
    baseline: tuple[str, ...] | None
    """Its files."""
    passed: bool
    """Whether all gates are met."""
    gates: tuple[Gate, ...]
