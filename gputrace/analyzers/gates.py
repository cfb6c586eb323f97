"""Gates for continuous integration: limits on the figures of a run."""

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
    """Raise UsageError for a word that is neither a severity nor a finding: it would never fail."""
    ids = {rule.__name__.replace("_", "-") for rule in (*RULES, *HOST_RULES)}
    ids |= set(names("analyzers"))
    for word in fail_on:
        if word not in ids and word not in SEVERITIES:
            known = ", ".join((*SEVERITIES, *sorted(ids)))
            raise UsageError(f"{word!r} is no finding and no severity; there are {known}")


def check(run: Run, asked: Asked, baseline: Run | None = None) -> Check:
    """Evaluate all gates; the baseline is given where a slow-down is limited."""
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
    """Compare a figure with its limit."""
    name = f"{'max' if limit.at_most else 'min'}-{limit.figure.replace('_', '-')}"
    why = _why_not(run, limit)
    if why:
        return Gate(name, False, False, None, limit.value, limit.unit, f"cannot be told: {why}")
    value = _figure(run, limit)
    passed = value <= limit.value if limit.at_most else value >= limit.value
    return Gate(name, passed, True, value, limit.value, limit.unit, _message(run, limit, value))


def _why_not(run: Run, limit: Limit) -> str:
    """Return why the figure is unknown; empty where it is known."""
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
    """Return the mean over steps and GPUs, in the unit of the limit."""
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
    """Fail where the slow-down exceeds the limit and is statistically significant."""
    why = _baseline_problem(run, baseline)
    if why:
        return _untold(limit, why)
    comparison = compare([baseline, run])
    pair = comparison.pair
    if pair is None or comparison.unit == "span" or pair.speed_up is None:
        return _untold(limit, comparison.unit_reason or "the baseline has nothing to compare with")
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
        "max-slowdown", passed, True, slowdown, limit, "share", message + _doubts(comparison, pair)
    )


def _baseline_problem(run: Run, baseline: Run) -> str:
    if len(run.keys) != len(baseline.keys):
        return f"the baseline ran on {len(baseline.keys)} GPUs, this on {len(run.keys)}"
    return ""


def _untold(limit: float, why: str) -> Gate:
    return Gate("max-slowdown", False, False, None, limit, "share", f"cannot be told: {why}")


def _by(slowdown: float) -> str:
    return f"{abs(slowdown):.1%} {'slower' if slowdown > 0 else 'faster'}"


def _doubts(comparison: Comparison, pair: Pair) -> str:
    """Return the assumptions of the gate."""
    assumptions = [f"a step does {pair.work_ratio:.3g}x the work"] if pair.work_ratio != 1 else []
    assumptions += [warning for warning in comparison.warnings if "equal work" in warning]
    return "".join(f"; {assumption}" for assumption in assumptions)


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper or lower limit of a figure."""

    figure: str
    """Class of ``breakdown``, ``idle``, ``step_time``, ``step_time_p95`` or ``throughput``."""
    value: float
    """Share (0 to 1), nanoseconds, or samples per second."""
    unit: str
    """``share``, ``ns`` or ``samples_per_s``."""
    at_most: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """Gates of a check."""

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
