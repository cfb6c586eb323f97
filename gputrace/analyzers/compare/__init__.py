"""Comparison of runs: two side by side, or several by their number of GPUs, and its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from gputrace.analyzers.compare.pair import compare_pair, kernel_ns, scale, work_ratio
from gputrace.analyzers.compare.runs import Run, read_run
from gputrace.errors import InputError
from gputrace.model.comparison import (
    SCHEMA_VERSION,
    Change,
    ClassChange,
    Comparison,
    Pair,
    RunSummary,
    Scaling,
    ScalingRow,
)
from gputrace.model.time_class import CLASSES, TIME_CLASSES
from gputrace.units import format_change, format_ns, format_number

__all__ = ["Comparison", "Run", "compare", "read_run", "with_batch"]


def with_batch(run: Run, per_gpu: float | None, of_all: float | None) -> Run:
    """Return the run with the samples per step given by the user, per GPU or in total."""
    samples = of_all if per_gpu is None else per_gpu * len(run.keys)
    return replace(run, samples=samples)


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare two runs or more, in order of GPUs if they scale, else in that given.

    Raises InputError for a log of cards alone.
    """
    for run in runs:
        if not run.analysis.breakdown:
            raise InputError(run.analysis.path, "has no steps to compare, only samples of cards")
    unit, reason = common_unit(runs)
    scaling = None
    if unit != "span" and (len(runs) > 2 or len({len(run.keys) for run in runs}) > 1):
        runs = sorted(runs, key=lambda run: len(run.keys))
        scaling = scale(runs)
    warnings = list(_warnings(runs))
    pair, verdict = None, "scaling" if scaling else "unknown"
    if len(runs) == 2:
        ratio, source, doubt = work_ratio(*runs)
        warnings += [doubt] if doubt and scaling is None else []
        pair = compare_pair(runs[0], runs[1], unit, (ratio, source))
        verdict = verdict if scaling else judge(pair)
    summaries = tuple(_summary(run) for run in runs)
    labels = [run.label for run in runs]
    if scaling is not None:
        message = describe_scaling(scaling, unit)
    elif pair is not None:
        speed = _speed(verdict, pair, labels, unit)
        changes = ", ".join(_classes(verdict, pair, unit))
        message = f"{speed}{': ' if unit == 'span' else '; '}{changes}" if changes else speed
    else:
        message = f"these runs cannot be compared: {reason}"
    return Comparison(
        SCHEMA_VERSION, verdict, message, unit, reason, summaries, pair, scaling, tuple(warnings)
    )


def _summary(run: Run) -> RunSummary:
    analysis, loop = run.analysis, run.loop
    steps = analysis.steps
    mean = round(loop.length.value) if loop is not None else None
    return RunSummary(
        label=run.label,
        paths=analysis.paths,
        source=analysis.source,
        gpus=sum(gpu is not None for gpu, _ in run.keys),
        ranks=len({rank for _, rank in run.keys}),
        gpu_names=tuple(sorted({gpu.name for gpu in analysis.gpus if gpu.name})),
        steps_kind=steps.kind,
        steps=len(loop.numbers) if loop is not None else 0,
        span_ns=analysis.span_ns,
        mean_ns=mean,
        p50_ns=analysis.unrecorded(steps.p50_ns) if loop is not None else None,
        p95_ns=analysis.unrecorded(steps.p95_ns) if loop is not None else None,
        kernels=round(sum(use.count for use in run.kernels), 3) if loop is not None else None,
        kernel_ns=round(kernel_ns(run)) if loop is not None else None,
        input_bytes=round(run.input_bytes) if run.input_bytes is not None else None,
        samples=run.samples,
        throughput=run.samples / mean * 1e9 if run.samples and mean else None,
    )


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the reasons why the figures of these runs are hard to compare."""
    cards = {name for run in runs for gpu in run.analysis.gpus if (name := gpu.name)}
    if len(cards) > 1:
        yield f"The runs used different cards: {', '.join(sorted(cards))}"
    sources = sorted({run.analysis.source for run in runs})
    if len(sources) > 1:
        yield f"Different recorders ({', '.join(sources)}) name kernels and cost time differently"
    if any(not run.analysis.gpus for run in runs):
        yield "Some runs have no GPU activity recorded: ranks are counted instead"
    for run in runs:
        for finding in run.analysis.findings:
            if finding.id in ("recorder-overhead", "lost-records"):
                yield f"{run.label}: {finding.message}"
        few = len(run.loop.numbers) if run.loop is not None else None
        if few is not None and few < 10:
            yield f"{run.label}: only {few} steps are measured, so the bounds are rough"


_EQUAL_WORK_PART: Final = 0.9
"""Minimum common fraction of the kernels of an iteration, by name, of equal work."""


def common_unit(runs: Sequence[Run]) -> tuple[str, str]:
    """Return ``step``, ``iteration`` or ``span``, and the reason if it is not the step."""
    without = [run.label for run in runs if run.loop is None]
    if without:
        return "span", f"no steps were found in {' and '.join(without)}"
    kinds = {run.analysis.steps.kind for run in runs}
    if kinds <= {"training", "rl"}:
        return "step", ""
    if len(kinds) > 1:
        which = [run.label for run in runs if run.analysis.steps.kind not in ("training", "rl")]
        return "span", f"the repeating pattern in {' and '.join(which)} is not shown to be training"
    if min(alike(runs[0], run) for run in runs) < _EQUAL_WORK_PART:
        return "span", "what repeats is not shown to be training, and its kernels differ"
    return "iteration", "what repeats is not shown to be training; its kernels are the same"


def alike(a: Run, b: Run) -> float:
    """Return the common fraction of the kernels of a step, by name, 0 to 1."""
    counts = [{use.name: use.count for use in run.kernels} for run in (a, b)]
    names = counts[0].keys() | counts[1].keys()
    pairs = [(counts[0].get(name, 0.0), counts[1].get(name, 0.0)) for name in names]
    most = sum(max(pair) for pair in pairs)
    return sum(min(pair) for pair in pairs) / most if most else 0.0


WORDS: Final = {
    **{row.id: row.noun for row in TIME_CLASSES},
    "host_data": "time in the data loader",
    "communication_wait": "waiting for other ranks",
}
"""Nouns for the classes in sentences."""

NARROW: Final = 0.05
"""Half-width of the bounds, as a fraction of the step, within which two runs are the same."""
_CLASSES_NAMED: Final = 3
"""Maximum number of classes in a sentence."""
UNITS: Final = {"step": "a step", "iteration": "an iteration", "span": "the span"}


def judge(pair: Pair) -> str:
    """Return the verdict on two runs."""
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


def _speed(verdict: str, pair: Pair, labels: Sequence[str], unit: str) -> str:
    a, b = labels
    step = pair.step
    if step is None:
        return f"no steps to compare: {a} and {b} can only be compared by shares of their time"
    lengths = f"{UNITS[unit]} takes {format_ns(step.b_ns)} instead of {format_ns(step.a_ns)}"
    if pair.work_ratio != 1:
        lengths += f" and does {format_number(pair.work_ratio)}x the work"
    if verdict in ("faster", "slower"):
        factor = pair.speed_up or 1.0
        bounds = [pair.speed_up_low or factor, pair.speed_up_high or factor]
        if verdict == "slower":
            factor, bounds = 1 / factor, [1 / bound for bound in bounds[::-1]]
        return f"{b} is {factor:.2f}x {verdict} ({bounds[0]:.2f}x to {bounds[1]:.2f}x): {lengths}"
    if verdict == "same":
        is_sure = bool(step.low_ns and step.high_ns and step.low_ns * step.high_ns > 0)
        word = "hardly any" if is_sure else "no"
        return f"{word} difference between {a} and {b}: {lengths} ({_bounds(step)})"
    return f"cannot tell whether {a} or {b} is faster: {lengths} ({_bounds(step)})"


def _bounds(step: Change) -> str:
    if step.low_ns is None or step.high_ns is None:
        return "too few steps for bounds"
    low, high = (100 * ns / max(step.a_ns, 1) for ns in (step.low_ns, step.high_ns))
    return f"{low:+.1f} to {high:+.1f}%"


def _classes(verdict: str, pair: Pair, unit: str) -> Iterator[str]:
    """Yield the classes that changed in the direction of the difference, largest first."""
    if unit == "span":
        yield from _shares(pair)
        return
    rows = [row for row in pair.classes if row.name in WORDS]
    if verdict in ("faster", "slower") and pair.work_ratio == 1:
        rows = [row for row in rows if (row.difference_ns < 0) == (verdict == "faster")]
    rows.sort(key=lambda row: -abs(row.difference_ns))
    sure = [row for row in rows if row.changed and row.name in CLASSES]
    # Where classes vary against each other from step to step, sums and the loader are more certain.
    sure = sure or [row for row in rows if row.changed]
    for row in sure[:_CLASSES_NAMED]:
        word = "less" if row.difference_ns < 0 else "more"
        yield f"{format_ns(abs(row.difference_ns))} {word} {WORDS[row.name]}"
    if not sure and verdict in ("faster", "slower"):
        yield "no class of time by more than its own noise"


def _shares(pair: Pair) -> Iterator[str]:
    """Yield the classes in which the spans differ most, as shares."""

    def gap(row: ClassChange) -> float:
        return abs(row.b_share - row.a_share)

    rows = sorted((row for row in pair.classes if gap(row) >= 0.01), key=gap, reverse=True)
    for row in rows[:_CLASSES_NAMED]:
        yield f"{WORDS[row.name]} {row.a_share:.0%} and {row.b_share:.0%}"


def describe_scaling(scaling: Scaling, unit: str) -> str:
    """Describe the run with most GPUs, or the fastest of equally large ones, in one sentence."""
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
            f"{_lengths(last, base, unit)} on {gpus} instead of {base.gpus}, but the amount of "
            "work of each is unknown: give --batch or --global-batch"
        )
    sentence = (
        f"{gpus} are {_factor(last)} as fast as {base.gpus} ({last.efficiency:.0%} of ideal, "
        f"{scaling.kind} scaling): {_lengths(last, base, unit)}"
    )
    losses = sorted((loss for loss in last.losses if loss.changed), key=lambda loss: -abs(loss.ns))
    if losses:
        causes = ", ".join(
            f"{format_change(loss.ns)} {WORDS[loss.name]}" for loss in losses[:_CLASSES_NAMED]
        )
        lost = last.mean_ns - last.ideal_ns
        sentence += (
            f"; {format_ns(abs(lost))} {'more' if lost > 0 else 'less'} than ideal: {causes}"
        )
    return sentence


def _factor(row: ScalingRow) -> str:
    factor = f"{row.speed_up or 1:.2f}x"
    if row.speed_up_low is None or row.speed_up_high is None:
        return factor
    return f"{factor} ({row.speed_up_low:.2f}x to {row.speed_up_high:.2f}x)"


def _lengths(row: ScalingRow, base: ScalingRow, unit: str) -> str:
    return f"{UNITS[unit]} takes {format_ns(row.mean_ns)} instead of {format_ns(base.mean_ns)}"
