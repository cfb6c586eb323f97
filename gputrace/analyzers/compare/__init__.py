"""Comparison of runs: two side by side, or several by their number of GPUs, and its verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import log
from typing import Final

from gputrace.analyzers.compare.runs import (
    ABSENT,
    NAMES,
    Mean,
    Run,
    difference,
    lost_ns,
    ratio,
    read_run,
    waits_for_others,
)
from gputrace.errors import InputError
from gputrace.model.comparison import (
    SCHEMA_VERSION,
    CauseChange,
    Change,
    ClassChange,
    Comparison,
    FindingChange,
    GpuPair,
    KernelChange,
    LineChange,
    Loss,
    Pair,
    RunSummary,
    Scaling,
    ScalingRow,
    Worst,
)
from gputrace.model.time_class import CLASSES, TIME_CLASSES
from gputrace.units import format_change, format_count, format_ns, format_number

MATTERS: Final = 0.01
"""Minimum difference of a step or class that matters, as a fraction of the step: two recordings of
one program differ by about as much."""
KERNEL_MATTERS: Final = 0.001
"""Minimum difference of a kernel that matters, as a fraction of the step."""
OF_ITS_OWN: Final = 0.02
"""Minimum difference of a kernel that matters, as a fraction of its time."""


def compare_pair(a: Run, b: Run, unit: str, work: tuple[float, str]) -> Pair:
    """Compare B with A in a unit that both have.

    Args:
        a, b: the runs.
        unit: ``step``, ``iteration`` or ``span``.
        work: samples in a step of B for each in one of A, and the source of that ratio.
    """
    step = change(*lengths(a, b), MATTERS) if unit != "span" else None
    speed = ratio(*lengths(a, b)) if step is not None else None
    return Pair(
        step=step,
        speed_up=step.a_ns / max(step.b_ns, 1) * work[0] if step is not None else None,
        speed_up_low=speed.low * work[0] if speed is not None else None,
        speed_up_high=speed.high * work[0] if speed is not None else None,
        work_ratio=work[0],
        work_source=work[1],
        classes=tuple(_class_changes(a, b, unit)),
        kernels=tuple(_kernels(a, b, unit)),
        gpus=tuple(_gpus(a, b)),
        findings=tuple(_findings(a, b)),
        causes=_causes(a, b) if unit != "span" else (),
        lines=_lines(a, b) if unit != "span" else (),
    )


def lengths(a: Run, b: Run) -> tuple[Mean, Mean]:
    """Return the step lengths of both, which they must have."""
    assert a.loop is not None
    assert b.loop is not None
    return a.loop.length, b.loop.length


def change(
    a: Mean, b: Mean, matters: float, rows: int = 1, step: float = 0, relative: float = 0
) -> Change:
    """Compare one figure of two runs.

    Args:
        a, b: the figure in both runs.
        matters: minimum difference as a fraction of ``step``.
        rows: number of figures whose bounds must hold together.
        step: length of the step; 0 for the figure itself.
        relative: minimum difference as a fraction of the larger figure.
    """
    bounds = difference(a, b, rows)
    distance = abs(b.value - a.value)
    least = max(matters * (step or a.value), relative * max(a.value, b.value))
    low = high = changed = None
    if bounds is not None:
        low, high = round(bounds.low), round(bounds.high)
        changed = 0 < distance >= least and (bounds.low > 0 or bounds.high < 0)
    return Change(round(a.value), round(b.value), round(b.value - a.value), low, high, changed)


def _class_changes(a: Run, b: Run, unit: str) -> Iterator[ClassChange]:
    """Yield every class that both know and that is not zero in both."""
    first, second = classes_of(a, unit), classes_of(b, unit)
    whole = _whole(a, unit), _whole(b, unit)
    names = [n for n in NAMES if n in first and n in second]
    some = [n for n in names if first[n].value or second[n].value]
    for name in some:
        both = change(first[name], second[name], MATTERS, len(some), whole[0])
        worst = [_worst(run, name) if unit != "span" else None for run in (a, b)]
        yield ClassChange(
            **asdict(both),
            name=name,
            a_share=first[name].value / whole[0],
            b_share=second[name].value / whole[1],
            a_worst=worst[0],
            b_worst=worst[1],
        )


def classes_of(run: Run, unit: str) -> dict[str, Mean]:
    """Return the classes of a step, or of the whole span, with unknown errors."""
    if unit != "span" and run.loop is not None:
        return dict(run.loop.classes)
    return {name: Mean(value, None, 0) for name, value in run.span.items()}


def _whole(run: Run, unit: str) -> float:
    if unit != "span" and run.loop is not None:
        return max(run.loop.length.value, 1)
    return max(sum(run.span.values()), 1)


def _worst(run: Run, name: str) -> Worst | None:
    """Return the GPU that has most of a class; None where there is only one."""
    rows = run.loop.of_gpu if run.loop is not None else {}
    if len(rows) < 2:
        return None
    (gpu, rank), row = max(rows.items(), key=lambda item: item[1][name])
    return Worst(gpu, rank, round(row[name]))


def _kernels(a: Run, b: Run, unit: str) -> list[KernelChange]:
    """Compare all kernels, largest difference first."""
    first, second = (
        {use.name: use for use in (run.kernels_of_span if unit == "span" else run.kernels)}
        for run in (a, b)
    )
    names, step, rows = first.keys() | second.keys(), _whole(a, unit), []
    for name in names:
        x, y = first.get(name), second.get(name)
        totals = (x.total if x else ABSENT), (y.total if y else ABSENT)
        figures = change(*totals, KERNEL_MATTERS, len(names), step, OF_ITS_OWN)
        rows.append(
            KernelChange(
                **asdict(figures),
                name=name,
                communication=any(use.communication for use in (x, y) if use),
                status="both" if x and y else "gone" if x else "new",
                a_count=round(x.count, 3) if x else 0.0,
                b_count=round(y.count, 3) if y else 0.0,
                a_median_ns=round(x.median_ns) if x else None,
                b_median_ns=round(y.median_ns) if y else None,
            )
        )
    return sorted(rows, key=lambda row: (-abs(row.difference_ns), row.name))


def _gpus(a: Run, b: Run) -> Iterator[GpuPair]:
    first, second = ({(r.gpu, r.rank): r for r in run.analysis.breakdown} for run in (a, b))
    for key in dict.fromkeys([*first, *second]):
        yield GpuPair(*key, first.get(key), second.get(key))


def _findings(a: Run, b: Run) -> Iterator[FindingChange]:
    """Yield new findings, then those gone, then those in both, each most severe first."""
    first, second = ({f.id: f for f in run.analysis.findings} for run in (a, b))
    ids = {
        "appeared": [id for id in second if id not in first],
        "gone": [id for id in first if id not in second],
        "stayed": [id for id in second if id in first],
    }
    for status, id in ((status, id) for status, some in ids.items() for id in some):
        x, y = first.get(id), second.get(id)
        yield FindingChange(
            id=id,
            status=status,
            a_severity=x.severity if x is not None else None,
            b_severity=y.severity if y is not None else None,
            a_impact_ns=x.impact_ns if x is not None else None,
            b_impact_ns=y.impact_ns if y is not None else None,
            message=(second if id in second else first)[id].message,
        )


def _causes(a: Run, b: Run) -> tuple[CauseChange, ...]:
    """Compare the time lost to each cause, largest difference first."""
    first, second = lost_ns(a), lost_ns(b)
    rows = []
    for cause in {row.cause for run in (a, b) for row in run.analysis.ledger}:
        label = (b if cause in second else a).analysis.cause_label(cause)
        x, y = round(first.get(cause, 0)), round(second.get(cause, 0))
        rows.append(CauseChange(cause, label, x, y, y - x))
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_ns), row.cause)))


_LINE_MATTERS: Final = 0.02
"""Minimum difference of a function's time that matters, as a fraction of the step."""
_LINE_DEVIATIONS: Final = 3
"""Minimum difference of a function's time, in standard deviations of the counted samples."""


def _lines(a: Run, b: Run) -> tuple[LineChange, ...]:
    """Compare the time in the functions of the program: lines move when it is changed. In a file of
    one run only, which may be the other's under another name, a function is known by its own.
    """
    common = _files(a) & _files(b)
    times: list[dict[str, float]] = []
    squares: defaultdict[str, float] = defaultdict(float)
    label: dict[str, str] = {}
    for run in (a, b):
        rows, of_run = run.analysis.host_lines, dict[str, float]()
        ranks, most = len({row.rank for row in rows}), dict[str, int]()
        for row in rows:
            place, _, function = row.line.partition(" ")
            file = place.rpartition(":")[0]
            key = f"{file if file in common else ''} {function}"
            of_run[key] = of_run.get(key, 0) + row.step_ns / ranks
            squares[key] += (row.step_ns / ranks) ** 2 / row.samples
            if row.samples > most.get(key, 0):
                most[key], label[key] = row.samples, row.line
        times.append(of_run)
    first, second = times
    if not first or not second:
        return ()
    changes = {key: second.get(key, 0) - first.get(key, 0) for key in label}
    least = _LINE_MATTERS * lengths(a, b)[0].value
    found = [
        LineChange(label[key], round(first.get(key, 0)), round(second.get(key, 0)), round(change))
        for key, change in changes.items()
        if abs(change) >= max(least, _LINE_DEVIATIONS * squares[key] ** 0.5)
    ]
    return tuple(sorted(found, key=lambda row: -abs(row.difference_ns)))


def _files(run: Run) -> set[str]:
    """Return the program's files in which samples met the hosts."""
    return {row.line.partition(" ")[0].rpartition(":")[0] for row in run.analysis.host_lines}


_EQUAL_INPUT_DIFFERENCE: Final = 0.02
"""Relative difference of input copies up to which they bring the same batch."""
_GROWTH_DEVIATION: Final = 0.5
"""Maximum deviation of the growth of kernel time from that of the input, in logarithms, relative to
the latter."""


def kernel_ns(run: Run) -> float:
    """Return the time of compute kernels in nanoseconds, per step and GPU."""
    return sum(use.total.value for use in run.kernels if not use.communication)


_SAME_BATCH_DIFFERENCE: Final = 0.005
"""Difference of the samples in a mean step, such as a last batch that is smaller makes, up to which
two runs have the same batch."""


def work_ratio(a: Run, b: Run) -> tuple[float, str, str]:
    """Return the samples in a step of B for each in one of A, the source, and a warning or "".

    Input copies of different sizes mean a different batch only if the kernels agree: the data may
    be of another type, or pictures of another size.
    """
    if a.samples and b.samples:
        ratio = b.samples / a.samples
        return ratio if abs(ratio - 1) > _SAME_BATCH_DIFFERENCE else 1.0, "batch", ""
    equal = len(b.keys) / len(a.keys) if bool(a.analysis.gpus) == bool(b.analysis.gpus) else 1.0
    if not a.input_bytes or not b.input_bytes:
        return equal, "assumed", ""
    ratio = b.input_bytes / a.input_bytes
    if abs(ratio / equal - 1) <= _EQUAL_INPUT_DIFFERENCE:
        return equal, "input_bytes", ""
    bytes_of_gpu = log(ratio / equal)
    work = log(max(kernel_ns(b), 1) / max(kernel_ns(a), 1))
    if abs(work - bytes_of_gpu) <= _GROWTH_DEVIATION * abs(bytes_of_gpu):
        return ratio, "input_bytes", ""
    sizes = f"{a.input_bytes / 1e6:,.2f} MB and {b.input_bytes / 1e6:,.2f} MB"
    return (
        equal,
        "assumed",
        f"The input copies of a step are {sizes}, and the kernels do not show whether the batch "
        "size or only its data type differs: steps are taken as equal work; use --batch otherwise",
    )


_SCALING_DISTANCE: Final = 0.25
"""Maximum distance from weak (0) or strong (1) scaling on the scale of `_position`."""


def scale(runs: Sequence[Run]) -> Scaling:
    """Compare runs, in order of GPUs and all with steps, with the first of them."""
    kind, source = _kind(runs)
    return Scaling(kind, source, tuple(_row(runs[0], run, kind) for run in runs))


def _kind(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the kind of scaling (constant work per GPU or per step), and the source."""
    base = runs[0]
    others = [run for run in runs[1:] if len(run.keys) != len(base.keys)]
    gpus = [len(run.keys) / len(base.keys) for run in others]

    def kind(amount: Callable[[Run], float | None]) -> str:
        """Return the kind by the amount of input of a step on all GPUs."""
        parts = [(amount(run) or 0) / (amount(base) or 1) for run in others]
        return _agreed([_position(part / n, n) for part, n in zip(parts, gpus, strict=True)])

    if all(run.samples for run in runs):
        return kind(lambda run: run.samples), "batch"
    if not others:
        return "same", "none"
    if all(run.input_bytes for run in runs):
        by_bytes = kind(lambda run: run.input_bytes)
        if by_bytes != "unknown":
            return by_bytes, "input_bytes"
    work = [kernel_ns(run) / max(kernel_ns(base), 1) for run in others]
    by_kernels = _agreed([_position(part, n) for part, n in zip(work, gpus, strict=True)])
    return by_kernels, "kernels" if by_kernels != "unknown" else "none"


def _position(work: float, gpus: float) -> float:
    """Return 0 if the work per GPU is that of the first run, 1 if it is divided among the GPUs."""
    return -log(max(work, 1e-9)) / log(gpus)


def _agreed(positions: Sequence[float]) -> str:
    """Return the kind of scaling that the positions of all runs agree on."""
    if not positions:
        return "same"
    if all(abs(at) <= _SCALING_DISTANCE for at in positions):
        return "weak"
    return "strong" if all(abs(at - 1) <= _SCALING_DISTANCE for at in positions) else "unknown"


def _row(base: Run, run: Run, kind: str) -> ScalingRow:
    first, length = lengths(base, run)
    gpus = len(run.keys) / len(base.keys)
    if base.samples and run.samples:  # Work of a step relative to the first run's, if known.
        work: float | None = run.samples / base.samples
    else:
        known = {"weak": gpus, "strong": 1.0, "same": gpus}
        work = known.get(kind, 1.0 if gpus == 1 else None)
    speed = ratio(first, length) if work is not None and run is not base else None
    speed_up = work and first.value / max(length.value, 1) * work
    ideal, losses = work and first.value * work / gpus, []
    if ideal is not None and run is not base:  # In the ideal step, all classes shrink alike.
        classes = classes_of(base, "step"), classes_of(run, "step")
        losses = split_loss(*classes, ideal / max(first.value, 1), ideal)
    return ScalingRow(
        label=run.label,
        gpus=len(run.keys),
        mean_ns=round(length.value),
        throughput=run.samples and run.samples / length.value * 1e9,
        speed_up=speed_up,
        speed_up_low=speed.low * (work or 0) if speed is not None else None,
        speed_up_high=speed.high * (work or 0) if speed is not None else None,
        efficiency=speed_up and speed_up / gpus,
        ideal_ns=round(ideal) if ideal is not None else None,
        losses=tuple(losses),
    )


def split_loss(
    first: Mapping[str, Mean], classes: Mapping[str, Mean], part: float, ideal: float
) -> list[Loss]:
    """Return what each class adds to the ideal step, largest first.

    Args:
        first: classes of the first run.
        classes: classes of the run in question.
        part: fraction of the first run's classes that remains in the ideal step.
        ideal: the ideal step, in nanoseconds.
    """
    common = [name for name in CLASSES if name in classes and name in first]
    names = [name for name in common if first[name].value or classes[name].value]
    losses = []
    for name in names:
        value, error, freedom = first[name].value, first[name].error, first[name].freedom
        rest = Mean(value * part, None if error is None else error * part, freedom)
        lost = change(rest, classes[name], MATTERS, len(names), ideal)
        losses.append(Loss(name, lost.difference_ns, lost.low_ns, lost.high_ns, lost.changed))
    return sorted(losses, key=lambda loss: -loss.ns)


__all__ = ["Comparison", "Run", "compare", "read_run", "with_batch"]


def with_batch(run: Run, per_gpu: float | None, of_all: float | None) -> Run:
    """Return the run with the samples per step given by the user, per GPU or in total; else with
    those that its program gave on all ranks.
    """
    samples = of_all if per_gpu is None else per_gpu * len(run.keys)
    given = [row.samples_per_step or 0.0 for row in run.analysis.throughput]
    return replace(run, samples=samples or (sum(given) if all(given) else None) or None)


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare two runs or more: more than two in order of GPUs if they scale, else in that given.

    Raises InputError for a log of cards alone.
    """
    for run in runs:
        if not run.analysis.breakdown:
            raise InputError(run.analysis.path, "has no steps to compare, only samples of cards")
    unit, reason = common_unit(runs)
    scaling = None
    counts = {len(run.keys) for run in runs}
    if unit != "span" and (len(runs) > 2 or (len(counts) > 1 and not _is_mixed(runs))):
        by_gpus = sorted(runs, key=lambda run: len(run.keys))
        scaling = scale(by_gpus)
        # Two are A and B to whoever named them.
        runs = by_gpus if len(runs) > 2 else runs
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
        message = describe_scaling(scaling, unit, "GPU" if runs[0].analysis.gpus else "rank")
    elif pair is not None:
        speed = _speed(verdict, pair, labels, unit)
        changes = _waits_that_decide(runs, pair, verdict) or ", ".join(
            changed_parts(verdict, pair, unit)
        )
        message = f"{speed}{': ' if unit == 'span' else '; '}{changes}" if changes else speed
    else:
        message = f"these runs cannot be compared: {reason}"
    return Comparison(
        SCHEMA_VERSION, verdict, message, unit, reason, summaries, pair, scaling, tuple(warnings)
    )


def _is_mixed(runs: Sequence[Run]) -> bool:
    """Return whether only some of the runs have GPUs, of which ranks are no equals."""
    return len({bool(run.analysis.gpus) for run in runs}) > 1


def without_waits(runs: Sequence[Run], pair: Pair) -> tuple[float, ...]:
    """Return the speed-up of the second of two runs and its bounds, without the time for which
    either waits for cores that other programs have; empty where these are unknown.
    """
    speeds = pair.speed_up, pair.speed_up_low, pair.speed_up_high
    a, b = map(waits_for_others, runs)
    return tuple(speed * (1 - a) / (1 - b) for speed in speeds if speed)


def _waits_that_decide(runs: Sequence[Run], pair: Pair, verdict: str) -> str:
    """Say how long the steps of both wait for cores that other programs have, if without these
    waits the verdict is not certain; else nothing.
    """
    a, b = map(waits_for_others, runs)
    if verdict not in ("faster", "slower") or a == b or pair.step is None or _is_mixed(runs):
        return ""
    _, low, high = without_waits(runs, pair)
    if (low > 1 + MATTERS) if verdict == "faster" else (high < 1 - MATTERS):
        return ""
    first, second = (
        format_ns(share * ns) if share else "none"
        for share, ns in ((a, pair.step.a_ns), (b, pair.step.b_ns))
    )
    a_step = f"{first} of a step in {runs[0].label}, {second} in {runs[1].label}"
    return f"waits for cores that other programs use may explain it ({a_step})"


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


_OTHER_PROGRAM: Final = 0.1
"""Common fraction of the kernels of a step, by name, below which programs may be different."""


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the reasons why the figures of these runs are hard to compare."""
    cards = {name for run in runs for gpu in run.analysis.gpus if (name := gpu.name)}
    if len(cards) > 1:
        yield f"The runs used different cards: {', '.join(sorted(cards))}"
    sources = sorted({run.analysis.source for run in runs})
    if len(sources) > 1:
        yield f"Different recorders ({', '.join(sources)}) name kernels and cost time differently"
    if _is_mixed(runs):
        yield "Some runs have no GPU activity recorded: their steps are taken as equal work"
    others = [run for run in runs[1:] if not _files(run) & _files(runs[0])]
    comparable = len(sources) == 1 and all(run.kernels for run in runs)
    if comparable and any(alike(runs[0], run) < _OTHER_PROGRAM for run in others):
        yield "The runs have hardly a kernel in common: they may be different programs"
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
    "host_data": "waiting for data on the host",
    "communication_wait": "waiting for other ranks",
}
"""Nouns for the classes in sentences."""

NARROW: Final = 0.05
"""Half-width of the bounds, as a fraction of the step, within which two runs are the same."""
_CLASSES_NAMED: Final = 3
"""Maximum number of classes in a sentence."""
_MOST_OF_STEP: Final = 2
"""Maximum difference of a function that is named for one of the step, relative to that."""
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
        return f"{word} difference between {a} and {b}: {lengths} ({_bounds(pair, step)})"
    return f"cannot tell whether {a} or {b} is faster: {lengths} ({_bounds(pair, step)})"


def _bounds(pair: Pair, step: Change) -> str:
    """Return the change of a step with its bounds, which are those of the speed-up: no step can get
    shorter by more than all of it.
    """
    speeds = pair.speed_up, pair.speed_up_high, pair.speed_up_low
    if step.low_ns is None or step.high_ns is None or not all(speeds):
        return "too few steps for bounds"
    change, low, high = (100 * (1 / (speed or 1) - 1) for speed in speeds)
    return f"{change:+.1f}%: {low:+.1f} to {high:+.1f}%"


def changed_parts(verdict: str, pair: Pair, unit: str) -> Iterator[str]:
    """Yield the classes that changed in the direction of the difference, largest first, and the
    line of the host that did, where no GPU was recorded or no class did.
    """
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
    more = {True: "less", False: "more"}
    for row in sure[:_CLASSES_NAMED]:
        word = more[row.difference_ns < 0]
        yield f"{format_ns(abs(row.difference_ns))} {word} {WORDS[row.name]}"
    on_hosts = not any(row.name in CLASSES for row in pair.classes)
    if verdict not in ("faster", "slower") or (sure and not on_hosts):
        return
    step = pair.step.difference_ns if pair.step is not None else 0
    lines = [line for line in pair.lines if (line.difference_ns < 0) == (verdict == "faster")]
    # Time that has only moved to another function explains nothing.
    most = (1 if sure else _MOST_OF_STEP) * abs(step)
    if lines := [line for line in lines if abs(line.difference_ns) <= most]:
        place, _, function = lines[0].line.partition(" ")
        time, where = abs(lines[0].difference_ns), f"{more[lines[0].difference_ns < 0]} in"
        if len(sure) == 1:
            # What else of the step changed may leave no room for most of the line's time.
            others = abs(step - sure[0].difference_ns)
            if 2 * others < time <= abs(sure[0].difference_ns):
                where = "of it in"
        amount = f"{format_ns(time)} {where}" if time <= abs(step) else "all of that in"
        yield f"{amount} {function} ({place})"
    elif not sure and not on_hosts:
        yield "no class of time explains it beyond its noise"


def _shares(pair: Pair) -> Iterator[str]:
    """Yield the classes in which the spans differ most, as shares."""

    def gap(row: ClassChange) -> float:
        return abs(row.b_share - row.a_share)

    rows = sorted((row for row in pair.classes if gap(row) >= 0.01), key=gap, reverse=True)
    for row in rows[:_CLASSES_NAMED]:
        yield f"{WORDS[row.name]} {row.a_share:.0%} and {row.b_share:.0%}"


def describe_scaling(scaling: Scaling, unit: str, what: str = "GPU") -> str:
    """Describe the run with most GPUs or ranks, or the fastest of equally large ones, in one
    sentence.
    """
    base, rows = scaling.rows[0], scaling.rows[1:]
    if scaling.kind == "same":
        best = max(rows, key=lambda row: row.speed_up or 0)
        return (
            f"{best.label} is {_factor(best)} as fast as {base.label}: {_lengths(best, base, unit)}"
        )
    last = rows[-1]
    gpus = format_count(last.gpus, what)
    if last.speed_up is None or last.ideal_ns is None:
        return (
            f"on {gpus} {_lengths(last, base, unit)} on {base.gpus}; whether it does as much work "
            "is unknown: give --batch or --global-batch"
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
