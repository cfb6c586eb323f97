"""The gate on a baseline: slower by more than allowed, and by more than noise."""

from __future__ import annotations

from gputrace.analyzers.check.results import Gate
from gputrace.analyzers.compare import Run, compare
from gputrace.analyzers.compare.results import Comparison, Pair


def gate_slowdown(run: Run, baseline: Run, limit: float) -> Gate:
    """Fails where the slow-down is past the limit and its bounds leave no doubt that it is one."""
    why = _why_not(run, baseline)
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


def _why_not(run: Run, baseline: Run) -> str:
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
