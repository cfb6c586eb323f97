"""Gates on one run: shares, times, throughput and findings. What cannot be told is not met."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.check.results import Gate, Limit
from gputrace.analyzers.compare.run import Run
from gputrace.analyzers.findings.severities import SEVERITIES
from gputrace.analyzers.results import CLASSES, IDLE_CAUSES, Analysis
from gputrace.units import format_ns

FIGURES: Final = (*CLASSES, "idle", "step_time", "step_time_p95", "throughput")
_WORDS: Final = {
    "h2d": "host-to-device copies take",
    "other_copy": "other copies take",
    "alloc": "allocation keeps the GPUs idle for",
    "sync": "synchronisation keeps the GPUs idle for",
    "launch": "launching keeps the GPUs idle for",
    "recorder": "the recorder keeps the GPUs idle for",
    "other_idle": "nothing explains that the GPUs are idle for",
    "idle": "the GPUs are idle for",
}


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
    subject = _WORDS.get(limit.figure, f"{limit.figure.replace('_', ' ')} takes")
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
