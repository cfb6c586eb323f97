"""Summary of a study: comparison of its configurations, and of recordings with their scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import PurePath
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from gputrace.analyzers.compare import split_loss
from gputrace.analyzers.compare.runs import Bounds, Mean, means_of
from gputrace.model.comparison import Loss
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES
from gputrace.studies.database import Settings
from gputrace.studies.framework_environments import LAUNCHERS
from gputrace.studies.measures import GpuMeasure, Measure, Results, RunResult
from gputrace.studies.results import (
    SCHEMA_VERSION,
    CardResult,
    ConfigurationResult,
    Effect,
    Efficiency,
    GpuShare,
    PairOfGpus,
    Placement,
    Predicted,
    RecordingCheck,
    Spread,
    Summary,
    count_range,
)

VISIBLE: Final = "visible"
"""Setting that names the GPUs of a run."""
_PLAIN: Final = ("framework", "update", "layout", "model")
"""Settings whose values are self-explanatory in labels."""


class Group(Struct, frozen=True):
    """Runs with equal settings."""

    settings: Settings
    label: str
    runs: tuple[RunResult, ...]

    @property
    def gpus(self) -> int:
        return int(self.settings.get("gpus", 1))

    @property
    def done(self) -> list[RunResult]:
        return [run for run in self.runs if run.state == "done"]

    @property
    def timed(self) -> list[RunResult]:
        """Return the runs whose speed counts: the bare ones if there are any."""
        return [run for run in self.done if not run.recorded] or self.done

    @property
    def rate(self) -> Spread | None:
        """Return samples per second."""
        return reported_values(self.timed, "samples_per_second")

    @property
    def measures(self) -> list[Measure]:
        """Return the measures of the readable recordings."""
        measures = (run.measure for run in self.done)
        return [each for each in measures if each is not None and not each.problem]

    @property
    def classes(self) -> dict[str, Mean] | None:
        """Return the mean of each class over the recordings, in whole nanoseconds."""
        tables = [measure.classes for measure in self.measures if measure.classes is not None]
        if not tables:
            return None
        means = means_of(np.array([[each.get(n, 0) for n in CLASSES] for each in tables], float))
        return {
            name: Mean(round(mean.value), mean.error, mean.freedom)
            for name, mean in zip(CLASSES, means, strict=True)
        }

    def mean_ns(self, name: str) -> int | None:
        """Return the mean over the recordings that have the value, in whole nanoseconds."""
        known = [value for each in self.measures if (value := getattr(each, name)) is not None]
        return round(sum(known) / len(known)) if known else None


def group_runs(runs: Sequence[RunResult]) -> list[Group]:
    """Group the runs by their settings, in order of first appearance."""
    by_settings: dict[str, list[RunResult]] = {}
    for run in runs:
        by_settings.setdefault(_key(run.settings), []).append(run)
    names = varying([repeats[0].settings for repeats in by_settings.values()])
    return [
        Group(repeats[0].settings, label(repeats[0].settings, names), tuple(repeats))
        for repeats in by_settings.values()
    ]


def varying(settings: Sequence[Settings]) -> tuple[str, ...]:
    """Return the names of the settings that vary, in the order of the study."""
    names = dict.fromkeys(name for table in settings for name in table)
    return tuple(n for n in names if len({_key(table.get(n)) for table in settings}) > 1)


def without(settings: Settings, *names: str) -> str:
    """Return a key of all settings except the named ones."""
    return _key({name: value for name, value in settings.items() if name not in names})


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def label(settings: Settings, names: Iterable[str]) -> str:
    """Format the named settings as ``torch, 2 GPUs, 4 workers``."""
    texts = (value_text(settings, name) for name in names if settings.get(name) is not None)
    return ", ".join(texts) or "all"


def value_text(settings: Settings, name: str) -> str:
    """Format one setting as ``2 GPUs``, ``batch 64``, ``staging on``, ``GPUs 0+1``."""
    value = settings.get(name)
    if value is None:
        return f"{name} default"
    if name == VISIBLE:
        return ("GPUs " if len(value) > 1 else "GPU ") + "+".join(map(str, value))
    if name in ("gpus", "workers") and isinstance(value, int):
        word = device_word(settings) if name == "gpus" else "worker"
        return f"{value} {word}" if value == 1 else f"{value} {word}s"
    if name == "cures":
        return str(value) or "as it is"
    if name == "data":
        return PurePath(str(value)).name
    return plain_value(value) if name in _PLAIN else f"{name} {plain_value(value)}"


def device_word(settings: Settings) -> str:
    """Return the noun for a GPU: ``device`` on a CPU, where ranks or devices stand in for GPUs."""
    return "device" if settings.get("device") == "cpu" else "GPU"


def plain_value(value: Any) -> str:
    """Format a value as in a study file, without quotation marks."""
    if value is None:
        return "default"
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def reported_values(runs: Iterable[RunResult], name: str) -> Spread | None:
    """Return the median and range of the numbers that the scripts reported under a name."""
    values = [run.result.get(name) for run in runs]
    known = [float(value) for value in values if isinstance(value, int | float)]
    return Spread(median(known), min(known), max(known), len(known)) if known else None


_NAMED: Final = 4
"""Maximum configurations that a note names."""


def summarize(results: Results) -> Summary:
    """Summarize a study, as far as its runs allow."""
    groups = group_runs(results.runs)
    recorded = ([run for run in group.runs if run.recorded] for group in groups)
    # The check of the run that agrees least: failed before skipped, then by the data waits.
    checks = tuple(
        max(
            (check_run(group.label, run) for run in runs),
            key=lambda check: ((True, None, False).index(check.ok), abs(check.difference or 0.0)),
        )
        for group, runs in zip(groups, recorded, strict=True)
        if runs
    )
    names = varying([group.settings for group in groups])
    same = groups[0].settings if groups else {}
    # Such runs count otherwise.
    doubts = (
        f"The recording of {check.label} does not hold: {check.reason}."
        for check in checks
        if check.ok is False and check.steps_run is not None
    )
    return Summary(
        schema_version=SCHEMA_VERSION,
        title=results.title,
        question=results.question,
        varies=names,
        same={name: value for name, value in same.items() if name not in names},
        notes=(*_notes(groups), *_not_done(groups), *doubts),
        left=results.left,
        rows=tuple(_row(group) for group in groups),
        checks=checks,
        efficiency=tuple(scale(groups)),
        effects=tuple(find_effects(groups)),
        predictions=tuple(find_predictions(groups)),
        # The fastest first.
        pairs=tuple(sorted(find_pairs(groups), key=lambda row: -(row.rate or 0.0))),
        cards=tuple(find_cards(groups)),
        placements=tuple(find_placements(groups)),
    )


def _row(group: Group) -> ConfigurationResult:
    states = [run.state for run in group.runs]
    classes, name = group.classes, "samples_per_second"
    bare = reported_values((run for run in group.done if not run.recorded), name)
    recorded = reported_values((run for run in group.done if run.recorded), name)
    overhead = None
    if bare is not None and recorded is not None and recorded.median > 0:
        overhead = bare.median / recorded.median - 1
    data_waits_s = [
        result["data_wait_s"] / result["steps"]
        for result in (run.result for run in group.timed)
        if result.get("data_wait_s") is not None and result.get("steps")
    ]
    return ConfigurationResult(
        label=group.label,
        settings=group.settings,
        gpus=group.gpus,
        done=states.count("done"),
        failed=states.count("failed"),
        skipped=states.count("skipped"),
        reason=next((run.reason for run in group.runs if run.state != "done"), ""),
        rate=group.rate,
        rate_of_median=reported_values(group.timed, "samples_per_second_median"),
        step_ns=_step(group),
        overhead=overhead,
        loss_first=_middle(group, "loss_first"),
        loss_last=_middle(group, "loss_last"),
        accuracy=_middle(group, "accuracy"),
        target_s=reported_values(group.timed, "target_s"),
        data_wait_ns=round(median(data_waits_s) * 1e9) if data_waits_s else None,
        recorded_step_ns=_whole(classes) if classes else group.mean_ns("step_ns"),
        classes=None if classes is None else {n: int(classes[n].value) for n in classes},
        wait_ns=group.mean_ns("wait_ns"),
        host_data_ns=group.mean_ns("host_data_ns"),
        gap_ns=group.mean_ns("gap_ns"),
        finding=next((each.findings[0].message for each in group.measures if each.findings), ""),
    )


def _step(group: Group) -> Spread | None:
    """Convert a rate to a step time: the samples of all GPUs over samples per second."""
    rate, batches = group.rate, set[float]()
    for result in (run.result for run in group.timed):
        with suppress(KeyError, TypeError, ValueError):
            batches.add(float(result["batch"]) * float(result["gpus"]))
    if rate is None or rate.low <= 0 or len(batches) != 1:
        return None
    samples = batches.pop()
    median_ns, low, high = (samples / value * 1e9 for value in (rate.median, rate.high, rate.low))
    return Spread(median_ns, low, high, rate.count)


def _middle(group: Group, name: str) -> float | None:
    values = reported_values(group.done, name)
    return None if values is None else values.median


def _notes(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the notes needed to read the tables."""
    if len({group.gpus for group in groups}) > 1:
        word = device_word(groups[0].settings)
        yield (
            f"The batch is that of a {word} and stays: a step of N {word}s has N times the samples."
        )
        rates = {float(group.settings.get("learning-rate", 0)) for group in groups} - {0.0}
        if rates:
            given = ", ".join(f"{rate:g}" for rate in sorted(rates))
            yield f"The learning rate is {given} for one {word}, and N times that for N {word}s."
    kinds = {run.recorded for group in groups for run in group.done}
    if kinds == {True, False}:
        yield "Speeds are those of the bare runs; the recorded ones say where time goes."
    elif kinds == {True}:
        yield "All runs were recorded, so speeds have the recorder's overhead in them."
    repeats = {len(group.timed) for group in groups if group.timed}
    if repeats and max(repeats) > 1:
        yield "Figures are medians of the repeats; in brackets, the least and the greatest."


def _not_done(groups: Sequence[Group]) -> Iterator[str]:
    """Yield notes on failed and skipped runs, grouped by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        for run in group.runs:
            if run.state != "done":
                labels = by_reason.setdefault((run.state, run.reason), [])
                labels += [group.label] if group.label not in labels else []
    for (state, reason), labels in by_reason.items():
        more = f"; and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
        yield f"{state.capitalize()}: {'; '.join(labels[:_NAMED])}{more}: {reason}"


MOST_APART: Final = 0.05
"""Maximum relative difference of recorded waits for data from the script's own clock."""
SLACK_S: Final = 100e-6
"""Allowed difference of each wait in seconds: time between the two clocks on a busy machine."""


def check_run(label: str, run: RunResult) -> RecordingCheck:
    """Compare one run with its recording."""
    if run.state != "done":
        ok = None if run.state == "skipped" else False
        return RecordingCheck(label, ok, run.reason, None, {}, None, None, None)
    result, measure = run.result, run.measure
    steps, script = result.get("steps"), result.get("data_wait_s")
    recorded = None if measure is None else measure.data_waits_ns
    recorded_s = recorded / 1e9 if recorded is not None else None
    reason = _reason(run, steps, script, recorded_s)
    return RecordingCheck(
        label=label,
        ok=not reason,
        reason=reason,
        steps_run=steps,
        steps_found=measure.steps if measure is not None else {},
        wait_script_s=script,
        wait_recorded_s=recorded_s,
        difference=recorded_s / script - 1 if script and recorded_s is not None else None,
    )


def _reason(run: RunResult, steps: int | None, script: float | None, recorded: float | None) -> str:
    """Return the first disagreement of a run and its recording; empty if they agree."""
    measure, result = run.measure, run.result
    if measure is None:
        return "was not measured"
    if measure.problem:
        return measure.problem
    counts = measure.steps.values()
    # Placements with a launcher have a process per GPU.
    if result.get("update") in LAUNCHERS and len(counts) != int(result.get("gpus", len(counts))):
        return f"{len(counts)} of {int(result['gpus'])} ranks were found"
    if steps is None or any(count != steps for count in counts):
        return f"{count_range(counts) or 'no'} steps were found, {steps} were run"
    if script is None:
        return ""
    if recorded is None:
        return "no wait for data was recorded"
    slack_s = max(MOST_APART * script, SLACK_S * (result.get("data_waits") or 0))
    is_apart = abs(recorded - script) > slack_s
    return f"waits for data differ by over {MOST_APART:.0%}" if is_apart else ""


_NOT_COMPARED: Final = ("framework", "gpus", VISIBLE)
"""Settings with their own tables, or with too many values to compare with the first."""

_OFF: Final = ("off", False, None)
_ON: Final = ("on", True)
CURED_BY: Final[tuple[tuple[str, Callable[[Any, Any], bool], tuple[str, ...]], ...]] = (
    ("staging", lambda before, after: before in _OFF and after in _ON, ("prefetch",)),
    ("pinned", lambda before, after: before in _OFF and after in _ON, ("pinned",)),
    ("workers", lambda before, after: not before and bool(after), ("prefetch",)),
    (
        "update",
        lambda before, after: before in ("dataparallel", "dataparallel-loss") and after == "ddp",
        ("ddp",),
    ),
)
"""Settings, the predicate for the change that is a cure of ``what_if``, and the cure's ids."""
_PINNED_AHEAD: Final = "pinned"
"""Cure that copies from pinned memory during the computation: the effect of staging if memory
is pinned already."""


def find_effects(groups: Sequence[Group]) -> Iterator[Effect]:
    """Compare every value of each varying setting with the first, all other settings equal."""
    names = varying([group.settings for group in groups])
    for name in names:
        others = [other for other in names if other != name]
        for base, *rest in families(groups, name) if name not in _NOT_COMPARED else ():
            for group in rest:
                if base.rate is None or group.rate is None or base.rate.low <= 0:
                    continue
                gaps = [side.mean_ns("gap_ns") for side in (base, group)]
                yield Effect(
                    setting=name,
                    others=label(group.settings, others) if others else "",
                    base=value_text(base.settings, name),
                    value=value_text(group.settings, name),
                    speed_up=group.rate.median / base.rate.median,
                    bounds=bounds(base.rate, group.rate),
                    gap_ns=None if gaps[0] is None or gaps[1] is None else gaps[1] - gaps[0],
                )


def families(groups: Sequence[Group], name: str) -> list[list[Group]]:
    """Group the finished configurations that differ only in one setting, two or more each."""
    by_others: dict[str, list[Group]] = {}
    for group in groups:
        if group.done:
            by_others.setdefault(without(group.settings, name), []).append(group)
    return [family for family in by_others.values() if len(family) > 1]


def find_predictions(groups: Sequence[Group]) -> Iterator[Predicted]:
    """Compare predicted and measured steps for each change of a setting that is a cure."""
    names = varying([group.settings for group in groups])
    for name, cures, ids in CURED_BY:
        others = [other for other in names if other != name]
        for family in families(groups, name):
            for before, after in product(family, family):
                if cures(before.settings.get(name), after.settings.get(name)):
                    yield from _predicted(name, before, after, ids, others)


def _predicted(
    name: str, before: Group, after: Group, ids: Sequence[str], others: Sequence[str]
) -> Iterator[Predicted]:
    """Yield a row per cure: the median prediction over the repeats, and the widest range."""
    measured = after.mean_ns("step_ns")
    if name == "staging" and after.settings.get("pinned") in _ON:
        ids = (*ids, _PINNED_AHEAD)
    values = [plain_value(side.settings.get(name)) for side in (before, after)]
    for cure in ids:
        made = [p for measure in before.measures for p in measure.predictions if p.id == cure]
        if not made or not measured:
            continue
        step = round(median(prediction.step_ns for prediction in made))
        yield Predicted(
            label=label(after.settings, others),
            change=f"{name} {' → '.join(values)}",
            cure=cure,
            before_ns=round(median(prediction.now_ns for prediction in made)),
            predicted_ns=step,
            low_ns=min(prediction.low_ns for prediction in made),
            high_ns=max(prediction.high_ns for prediction in made),
            measured_ns=measured,
            made=len(made),
            recordings=len(before.measures),
            error=step / measured - 1,
            gap_before_ns=before.mean_ns("gap_ns"),
            gap_after_ns=after.mean_ns("gap_ns"),
        )


_PLACE: Final = ("gpus", VISIBLE)
_SINGLE: Final = ("single", None)
"""Values of ``update`` for a run on one GPU."""
_LEAST_REPEATS: Final = 2
"""Minimum repeats for bounds."""


def scale(groups: Sequence[Group]) -> Iterator[Efficiency]:
    """Yield a row for each configuration with a base of fewer GPUs, and for these bases.

    Configurations whose speed is unknown have none.
    """
    done = [group for group in groups if group.done]
    pairs = [(group, base) for group in done if (base := find_base(group, done)) is not None]
    bases = {id(base) for group, base in pairs if base.gpus < group.gpus}
    names = [n for n in varying([group.settings for group in groups]) if n not in _PLACE]
    for group, base in pairs:
        rate, first = group.rate, base.rate
        if base.gpus == group.gpus and id(group) not in bases:
            continue
        if rate is None or first is None or min(rate.low, first.low) <= 0:
            continue
        speed_up, classes, ideal = rate.median / first.median, group.classes, base.classes
        step_ns, base_step_ns = _whole(classes), _whole(ideal)
        losses: tuple[Loss, ...] = ()
        if group is not base and ideal is not None and classes is not None:
            # The batch per GPU stays, so the base's step is the ideal. All are whole nanoseconds,
            # and sum to the difference of the steps exactly.
            losses = tuple(split_loss(ideal, classes, 1.0, base_step_ns or 0))
        yield Efficiency(
            label=group.label,
            series=label(group.settings, names) if names else "",
            gpus=group.gpus,
            base=base.label,
            base_gpus=base.gpus,
            rate=rate.median,
            speed_up=speed_up,
            bounds=None if group is base else bounds(first, rate),
            efficiency=speed_up / (group.gpus / base.gpus),
            step_ns=step_ns,
            base_step_ns=base_step_ns,
            losses=losses,
        )


def find_base(group: Group, groups: Sequence[Group]) -> Group | None:
    """Return the otherwise equal configuration with the fewest GPUs.

    One on a single GPU, which needs no placement, serves all placements.
    """

    def alike(other: Group, *names: str) -> bool:
        return without(other.settings, *names) == without(group.settings, *names)

    fewer = [other for other in groups if other.gpus <= group.gpus]
    same = [other for other in fewer if alike(other, *_PLACE)]
    single = [each for each in fewer if each.gpus == 1 and each.settings.get("update") in _SINGLE]
    same += [other for other in single if alike(other, *_PLACE, "update")]
    return min(same, key=lambda other: other.gpus, default=None)


def bounds(first: Spread, rate: Spread) -> Bounds | None:
    """Return slowest over the base's fastest repeat and fastest over slowest; None if too few."""
    if min(first.count, rate.count) < _LEAST_REPEATS or min(first.low, rate.low) <= 0:
        return None
    return Bounds(rate.low / first.high, rate.high / first.low)


def _whole(classes: Mapping[str, Mean] | None) -> int | None:
    """Return the sum of the classes."""
    return None if classes is None else round(sum(mean.value for mean in classes.values()))


def _on(groups: Sequence[Group], count: int) -> list[Group]:
    """Return the finished configurations with so many named GPUs; empty if all name the same."""
    chosen = [g for g in groups if g.done and len(g.settings.get(VISIBLE) or ()) == count]
    return chosen if len({tuple(g.settings[VISIBLE]) for g in chosen}) > 1 else []


def find_pairs(groups: Sequence[Group]) -> Iterator[PairOfGpus]:
    """Yield the runs on pairs of GPUs if several pairs were tried."""
    for group in _on(groups, 2):
        links = [link for measure in group.measures for link in measure.links]
        # The bandwidth of direct copies, else, as with NCCL, of collectives.
        bandwidths = [link.bandwidth for link in links if link.bandwidth is not None] or [
            each.bus_bandwidth for each in group.measures if each.bus_bandwidth is not None
        ]
        classes = group.classes
        yield PairOfGpus(
            label=group.label,
            gpus=tuple(group.settings[VISIBLE]),
            link=next((link.link for link in links if link.link), ""),
            bandwidth=round(median(bandwidths)) if bandwidths else None,
            step_ns=group.mean_ns("step_ns"),
            communication_ns=None if classes is None else int(classes["communication"].value),
            rate=group.rate.median if group.rate else None,
        )


def find_cards(groups: Sequence[Group]) -> Iterator[CardResult]:
    """Yield the runs on single GPUs if several were tried, each relative to the median."""
    singles = [(group, group.rate.median if group.rate else None) for group in _on(groups, 1)]
    rates = [rate for _, rate in singles if rate is not None]
    middle = median(rates) if rates else None
    for group, rate in singles:
        gpus = [gpu for measure in group.measures for gpu in measure.gpus]
        clocks = [gpu.sm_clock_mhz for gpu in gpus if gpu.sm_clock_mhz is not None]
        yield CardResult(
            label=group.label,
            gpus=tuple(group.settings[VISIBLE]),
            name=gpus[0].name if gpus else "",
            sm_clock_mhz=median(clocks) if clocks else None,
            sm_clock_max_mhz=gpus[0].sm_clock_max_mhz if gpus else None,
            step_ns=group.mean_ns("step_ns"),
            rate=rate,
            beside=rate / middle if rate is not None and middle else None,
        )


def find_placements(groups: Sequence[Group]) -> Iterator[Placement]:
    """Yield the load of each GPU if several placements were tried on several GPUs.

    Compute times are means over the repeats, memory is the peak.
    """
    done = [group for group in groups if group.done]
    if len({group.settings.get("update") for group in done}) < 2:
        return
    for group in done:
        seen: dict[tuple[int, int], list[GpuMeasure]] = {}
        for gpu in (gpu for measure in group.measures for gpu in measure.gpus):
            seen.setdefault((gpu.gpu, gpu.rank), []).append(gpu)
        shares = tuple(
            GpuShare(
                gpu=number,
                rank=rank,
                compute_ns=round(sum(row.compute_ns for row in rows) / len(rows)),
                memory_bytes=max((r.memory_bytes for r in rows if r.memory_bytes), default=None),
            )
            for (number, rank), rows in sorted(seen.items())
        )
        if shares and group.gpus > 1:
            first, *others = (share.compute_ns for share in shares)
            yield Placement(group.label, shares, first / fmean(others) if any(others) else None)
