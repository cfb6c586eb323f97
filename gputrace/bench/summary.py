"""The answer to a study: its runs by configuration, and what these say beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from gputrace.bench.answer import SCHEMA_VERSION, Check, Row, Spread, Summary
from gputrace.bench.checks import check_groups
from gputrace.bench.compared import find_effects, find_predictions
from gputrace.bench.devices import find_cards, find_pairs, find_placements
from gputrace.bench.efficiency import scale
from gputrace.bench.groups import (
    Group,
    device_word,
    group,
    mean_classes,
    mean_ns,
    spread,
    told,
    varying,
)
from gputrace.bench.results import Results, RunResult

_NAMED: Final = 4
"""Configurations that a note names."""


def summarize(results: Results) -> Summary:
    """The tables of a study, of whatever its runs allow."""
    groups = group(results.runs)
    checks = check_groups(groups)
    names = varying([one.settings for one in groups])
    same = groups[0].settings if groups else {}
    return Summary(
        schema_version=SCHEMA_VERSION,
        title=results.title,
        question=results.question,
        varies=names,
        same={name: value for name, value in same.items() if name not in names},
        notes=(*_notes(groups), *_not_done(groups), *_apart(checks)),
        left=results.left,
        rows=tuple(_row(one) for one in groups),
        checks=checks,
        efficiency=scale(groups),
        effects=find_effects(groups),
        predictions=find_predictions(groups),
        pairs=find_pairs(groups),
        cards=find_cards(groups),
        placements=find_placements(groups),
    )


def _row(own: Group) -> Row:
    states = [run.state for run in own.runs]
    rate = spread(told(own.timed, "samples_per_second"))
    classes = mean_classes(own.measures)
    verdicts = [one.findings[0].message for one in own.measures if one.findings]
    return Row(
        label=own.label,
        settings=own.settings,
        gpus=own.gpus,
        done=states.count("done"),
        failed=states.count("failed"),
        skipped=states.count("skipped"),
        reason=next((run.reason for run in own.runs if run.state != "done"), ""),
        rate=rate,
        rate_of_median=spread(told(own.timed, "samples_per_second_median")),
        step_ns=_step(own, rate),
        overhead=_overhead(own),
        loss_first=_middle(own, "loss_first"),
        loss_last=_middle(own, "loss_last"),
        accuracy=_middle(own, "accuracy"),
        target_s=spread(told(own.timed, "target_s")),
        data_wait_ns=_data_wait(own.timed),
        recorded_step_ns=(
            sum(classes.values()) if classes else mean_ns(own.measures, lambda one: one.step_ns)
        ),
        classes=classes,
        wait_ns=mean_ns(own.measures, lambda one: one.wait_ns),
        host_data_ns=mean_ns(own.measures, lambda one: one.host_data_ns),
        gap_ns=mean_ns(own.measures, lambda one: one.gap_ns),
        finding=verdicts[0] if verdicts else "",
    )


def _step(own: Group, rate: Spread | None) -> Spread | None:
    """What a rate makes of a step: the batches of all GPUs, over the samples a second."""
    batches = {_samples(run) for run in own.timed} - {None}
    if rate is None or rate.low <= 0 or len(batches) != 1:
        return None
    samples = batches.pop() or 0.0
    median_ns, low, high = (samples / value * 1e9 for value in (rate.median, rate.high, rate.low))
    return Spread(median_ns, low, high, rate.count)


def _samples(run: RunResult) -> float | None:
    """In a step of all GPUs."""
    result = run.told or {}
    try:
        return float(result["batch"]) * float(result["gpus"])
    except (KeyError, TypeError, ValueError):
        return None


def _overhead(own: Group) -> float | None:
    """What recording adds to a step, by the median speeds of bare and recorded runs."""
    bare = spread(told([run for run in own.done if not run.recorded], "samples_per_second"))
    recorded = spread(told([run for run in own.done if run.recorded], "samples_per_second"))
    if bare is None or recorded is None or recorded.median <= 0:
        return None
    return bare.median / recorded.median - 1


def _middle(own: Group, name: str) -> float | None:
    found = spread(told(own.done, name))
    return None if found is None else found.median


def _data_wait(runs: Sequence[RunResult]) -> int | None:
    """A step's, the median of the repeats."""
    told_by = ((run.told or {}) for run in runs)
    waits = [
        result["data_wait_s"] / result["steps"]
        for result in told_by
        if result.get("data_wait_s") is not None and result.get("steps")
    ]
    return round(median(waits) * 1e9) if waits else None


def _notes(groups: Sequence[Group]) -> Iterator[str]:
    """What one must know to read the tables."""
    if len({one.gpus for one in groups}) > 1:
        word = device_word(groups[0].settings)
        yield (
            f"The batch is that of a {word} and stays: a step of N {word}s has N times the samples."
        )
        rates = {float(one.settings.get("learning-rate", 0)) for one in groups} - {0.0}
        if rates:
            given = ", ".join(f"{rate:g}" for rate in sorted(rates))
            yield f"The learning rate is {given} for one {word}, and N times that for N {word}s."
    kinds = {run.recorded for one in groups for run in one.done}
    if kinds == {True, False}:
        yield "Speeds are those of the bare runs; where time goes is told by the recorded ones."
    elif kinds == {True}:
        yield "All runs were recorded, so speeds have the recorder's overhead in them."
    repeats = {len(one.timed) for one in groups if one.timed}
    if repeats and max(repeats) > 1:
        yield "Figures are medians of the repeats; in brackets, the least and the greatest."


def _not_done(groups: Sequence[Group]) -> Iterator[str]:
    """What failed or was skipped, and why: those of one reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in groups:
        for run in one.runs:
            if run.state != "done":
                labels = found.setdefault((run.state, run.reason), [])
                labels += [one.label] if one.label not in labels else []
    for (state, reason), labels in found.items():
        more = f"; and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
        yield f"{state.capitalize()}: {'; '.join(labels[:_NAMED])}{more}: {reason}"


def _apart(checks: Sequence[Check]) -> Iterator[str]:
    """Recordings that do not hold, of runs that count for all else."""
    for check in checks:
        if check.ok is False and check.steps_run is not None:
            yield f"The recording of {check.label} does not hold: {check.reason}."
