"""Runs with different numbers of GPUs: speed-up, efficiency, and what eats the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from typing import Final

from gputrace.analyzers.compare.noise import Mean, difference, ratio
from gputrace.analyzers.compare.pair import MATTERS, classes_of, lengths
from gputrace.analyzers.compare.results import Loss, Scaling, ScalingRow
from gputrace.analyzers.compare.run import Run
from gputrace.analyzers.compare.work import kernel_ns
from gputrace.analyzers.results import CLASSES

_NEAR: Final = 0.25
"""How far from one kind of scaling, on the way to the other, the work of a GPU may be."""


def scale(runs: Sequence[Run]) -> Scaling:
    """Runs in order of GPUs, that all have steps, beside the first of them."""
    kind, source = _kind(runs)
    return Scaling(kind, source, tuple(_row(runs[0], run, kind) for run in runs))


def _kind(runs: Sequence[Run]) -> tuple[str, str]:
    """Whether the work of a GPU or that of a step stays, and what tells."""
    base, others = runs[0], [run for run in runs[1:] if len(run.keys) != len(runs[0].keys)]
    if all(run.samples for run in runs):
        return _told([_by_gpu(base, run, run.samples, base.samples) for run in others]), "batch"
    if not others:
        return "same", "none"
    if all(run.input_bytes for run in runs):
        by_bytes = _told([_by_gpu(base, run, run.input_bytes, base.input_bytes) for run in others])
        if by_bytes != "unknown":
            return by_bytes, "input_bytes"
    work = [
        _place(kernel_ns(run) / max(kernel_ns(base), 1), len(run.keys) / len(base.keys))
        for run in others
    ]
    by_kernels = _told(work)
    return by_kernels, "kernels" if by_kernels != "unknown" else "none"


def _by_gpu(base: Run, run: Run, own: float | None, of_base: float | None) -> float:
    """The place of a run by what a step brings to each GPU."""
    gpus = len(run.keys) / len(base.keys)
    return _place((own or 0) / (of_base or 1) / gpus, gpus)


def _place(work: float, gpus: float) -> float:
    """0 where the work of a GPU is that of the first run, 1 where it is spread over the GPUs."""
    return -log(max(work, 1e-9)) / log(gpus)


def _told(places: Sequence[float]) -> str:
    if not places:
        return "same"
    if all(abs(place) <= _NEAR for place in places):
        return "weak"
    return "strong" if all(abs(place - 1) <= _NEAR for place in places) else "unknown"


def _work(base: Run, run: Run, kind: str) -> float | None:
    """Samples of a step for each of the first run's; None where nothing tells."""
    if base.samples and run.samples:
        return run.samples / base.samples
    gpus = len(run.keys) / len(base.keys)
    return {"weak": gpus, "strong": 1.0, "same": gpus}.get(kind, 1.0 if gpus == 1 else None)


def _row(base: Run, run: Run, kind: str) -> ScalingRow:
    first, own = lengths(base, run)
    work, gpus = _work(base, run, kind), len(run.keys) / len(base.keys)
    speed = ratio(first, own) if work is not None and run is not base else None
    speed_up = work and first.value / max(own.value, 1) * work
    ideal = work and first.value * work / gpus
    return ScalingRow(
        label=run.label,
        gpus=len(run.keys),
        mean_ns=round(own.value),
        throughput=run.samples and run.samples / own.value * 1e9,
        speed_up=speed_up,
        speed_up_low=speed.low * (work or 0) if speed is not None else None,
        speed_up_high=speed.high * (work or 0) if speed is not None else None,
        efficiency=speed_up and speed_up / gpus,
        ideal_ns=round(ideal) if ideal is not None else None,
        losses=() if ideal is None or run is base else tuple(_losses(base, run, ideal)),
    )


def _losses(base: Run, run: Run, ideal: float) -> Iterator[Loss]:
    """Each class less what it would be in the ideal step, in which all shrink alike."""
    part = ideal / max(lengths(base, run)[0].value, 1)
    yield from split_loss(classes_of(base, "step"), classes_of(run, "step"), part, ideal)


def split_loss(
    first: Mapping[str, Mean], own: Mapping[str, Mean], part: float, ideal: float
) -> list[Loss]:
    """What each class adds to the ideal step, largest first.

    Args:
        first: the classes of the first run.
        own: those of the run in question.
        part: of the first run's classes that is left in the ideal step.
        ideal: the ideal step.
    """
    known = [name for name in CLASSES if name in own and name in first]
    names = [name for name in known if first[name].value or own[name].value]
    losses = [_loss(n, _times(first[n], part), own[n], len(names), ideal) for n in names]
    return sorted(losses, key=lambda loss: -loss.ns)


def _times(mean: Mean, factor: float) -> Mean:
    error = None if mean.error is None else mean.error * factor
    return Mean(mean.value * factor, error, mean.freedom)


def _loss(name: str, ideal: Mean, own: Mean, rows: int, step: float) -> Loss:
    bounds, lost = difference(ideal, own, rows), own.value - ideal.value
    sure = bounds is not None and (bounds.low > 0 or bounds.high < 0)
    return Loss(
        name,
        round(lost),
        round(bounds.low) if bounds is not None else None,
        round(bounds.high) if bounds is not None else None,
        None if bounds is None else sure and abs(lost) >= MATTERS * step,
    )
