"""The comparison in a word and in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gputrace.analyzers.compare.results import (
    Change,
    ClassChange,
    Loss,
    Pair,
    RunSummary,
    Scaling,
    ScalingRow,
)
from gputrace.analyzers.results import CLASSES
from gputrace.units import format_ns

WORDS: Final = {
    "compute": "compute",
    "communication": "communication",
    "h2d": "host-to-device copies",
    "other_copy": "other copies",
    "memset": "memset",
    "recorder": "idle for the recorder",
    "data_feeding": "data feeding",
    "sync": "idle for synchronisation",
    "alloc": "idle for allocation",
    "launch": "idle for launches",
    "other_idle": "unexplained idle time",
    "host_data": "time in the data loader",
    "communication_wait": "waiting for other ranks",
}
"""What a sentence calls the classes."""

NARROW: Final = 0.05
"""Bounds within this part of the step on either side tell that two runs are the same."""
_MOST: Final = 3
_UNIT: Final = {"step": "a step", "iteration": "an iteration", "span": "the span"}


def judge(pair: Pair) -> str:
    """The verdict on two runs."""
    step = pair.step
    if step is None:
        return "unknown"
    if step.low_ns is None or step.high_ns is None:
        return "unclear"
    if pair.work_ratio != 1 and pair.speed_up_low is not None and pair.speed_up_high is not None:
        low, high = pair.speed_up_low - 1, pair.speed_up_high - 1
        differs = abs((pair.speed_up or 1) - 1) >= 0.01 and (low > 0 or high < 0)
    else:
        low, high = step.low_ns / max(step.a_ns, 1), step.high_ns / max(step.a_ns, 1)
        differs = bool(step.changed)
    if differs:
        return "faster" if (pair.speed_up or 1) > 1 else "slower"
    return "same" if max(-low, high) <= NARROW else "unclear"


def tell_pair(verdict: str, pair: Pair, labels: Sequence[str], unit: str) -> str:
    """One sentence on two runs, without its full stop."""
    told = _speed(verdict, pair, labels, unit)
    more = ", ".join(_classes(verdict, pair, unit))
    return f"{told}{': ' if unit == 'span' else '; '}{more}" if more else told


def _speed(verdict: str, pair: Pair, labels: Sequence[str], unit: str) -> str:
    a, b = labels
    step = pair.step
    if step is None:
        return f"no steps to compare: {a} and {b} can only be compared by shares of their time"
    lengths = f"{_UNIT[unit]} takes {format_ns(step.b_ns)} instead of {format_ns(step.a_ns)}"
    if pair.work_ratio != 1:
        lengths += f" and does {pair.work_ratio:.3g}x the work"
    if verdict in ("faster", "slower"):
        factor = pair.speed_up or 1.0
        bounds = [pair.speed_up_low or factor, pair.speed_up_high or factor]
        if verdict == "slower":
            factor, bounds = 1 / factor, [1 / bound for bound in bounds[::-1]]
        return f"{b} is {factor:.2f}x {verdict} ({bounds[0]:.2f}x to {bounds[1]:.2f}x): {lengths}"
    if verdict == "same":
        return f"no difference between {a} and {b}: {lengths} ({_bounds(step)})"
    return f"whether {a} or {b} is faster can't be told: {lengths} ({_bounds(step)})"


def _bounds(step: Change) -> str:
    if step.low_ns is None or step.high_ns is None:
        return "too few steps for bounds"
    low, high = (100 * ns / max(step.a_ns, 1) for ns in (step.low_ns, step.high_ns))
    return f"{low:+.1f} to {high:+.1f} %"


def _classes(verdict: str, pair: Pair, unit: str) -> Iterator[str]:
    """What the difference is made of: the classes that changed its way, largest first."""
    if unit == "span":
        yield from _shares(pair)
        return
    rows = [row for row in pair.classes if row.name in WORDS]
    if verdict in ("faster", "slower") and pair.work_ratio == 1:
        rows = [row for row in rows if (row.difference_ns < 0) == (verdict == "faster")]
    rows.sort(key=lambda row: -abs(row.difference_ns))
    sure = [row for row in rows if row.changed and row.name in CLASSES]
    # Where classes trade places from step to step, their sum is surer than each; so is the loader.
    sure = sure or [row for row in rows if row.changed]
    for row in sure[:_MOST]:
        word = "less" if row.difference_ns < 0 else "more"
        yield f"{format_ns(abs(row.difference_ns))} {word} {WORDS[row.name]}"
    if not sure and verdict in ("faster", "slower"):
        yield "no class of time by more than its own noise"


def _shares(pair: Pair) -> Iterator[str]:
    """Where the spans differ most, as shares."""

    def apart(row: ClassChange) -> float:
        return abs(row.b_share - row.a_share)

    rows = sorted((row for row in pair.classes if apart(row) >= 0.01), key=apart, reverse=True)
    for row in rows[:_MOST]:
        yield f"{WORDS[row.name]} {row.a_share:.0%} and {row.b_share:.0%}"


def tell_scaling(scaling: Scaling, runs: Sequence[RunSummary], unit: str) -> str:
    """One sentence on the run with most GPUs, or the fastest of those with equal numbers."""
    base, rows = scaling.rows[0], scaling.rows[1:]
    if scaling.kind == "same":
        best = max(rows, key=lambda row: row.speed_up or 0)
        return (
            f"{best.label} is {_factor(best)} as fast as {base.label}: {_lengths(best, base, unit)}"
        )
    last = rows[-1]
    gpus = f"{last.gpus} GPUs" if last.gpus != 1 else "1 GPU"
    if last.speed_up is None or last.ideal_ns is None:
        return (
            f"{_lengths(last, base, unit)} on {gpus} instead of {base.gpus}, and nothing tells how "
            "much work either does: give --batch or --global-batch"
        )
    told = (
        f"{gpus} are {_factor(last)} as fast as {base.gpus} ({last.efficiency:.0%} of ideal, "
        f"{scaling.kind} scaling): {_lengths(last, base, unit)}"
    )
    eats = sorted((loss for loss in last.losses if loss.changed), key=lambda loss: -abs(loss.ns))
    if eats:
        what = ", ".join(_share_of_loss(loss) for loss in eats[:_MOST])
        lost = last.mean_ns - last.ideal_ns
        told += f"; {format_ns(abs(lost))} {'more' if lost > 0 else 'less'} than ideal: {what}"
    return told


def _share_of_loss(loss: Loss) -> str:
    return f"{'+' if loss.ns > 0 else ''}{format_ns(loss.ns)} {WORDS[loss.name]}"


def _factor(row: ScalingRow) -> str:
    factor = f"{row.speed_up or 1:.2f}x"
    if row.speed_up_low is None or row.speed_up_high is None:
        return factor
    return f"{factor} ({row.speed_up_low:.2f}x to {row.speed_up_high:.2f}x)"


def _lengths(row: ScalingRow, base: ScalingRow, unit: str) -> str:
    return f"{_UNIT[unit]} takes {format_ns(row.mean_ns)} instead of {format_ns(base.mean_ns)}"
