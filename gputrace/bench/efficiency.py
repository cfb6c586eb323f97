"""How configurations scale with their GPUs, and which class of time eats what is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.compare.noise import Bounds, Mean, means_of
from gputrace.analyzers.compare.results import Loss
from gputrace.analyzers.compare.scaling import split_loss
from gputrace.analyzers.results import CLASSES
from gputrace.bench.answer import Efficiency, Spread
from gputrace.bench.groups import VISIBLE, Group, label, spread, told, varying, without
from gputrace.bench.results import Measure

_PLACE: Final = ("gpus", VISIBLE)
_SINGLE: Final = ("single", None)
"""Placements of a run on one GPU."""
_FEWEST: Final = 2
"""Repeats of which it can be said how far they are apart."""


def scale(groups: Sequence[Group]) -> tuple[Efficiency, ...]:
    """A row for each configuration that has a base; of bases themselves too, where they serve."""
    done = [group for group in groups if group.done]
    pairs = [(group, base) for group in done if (base := find_base(group, done)) is not None]
    fewer = [(group, base) for group, base in pairs if base.gpus < group.gpus]
    bases = {id(base) for _, base in fewer}
    shown = [(g, base) for g, base in pairs if base.gpus < g.gpus or id(g) in bases]
    names = varying([group.settings for group in groups])
    return tuple(row for group, base in shown for row in _row(group, base, names))


def find_base(group: Group, groups: Sequence[Group]) -> Group | None:
    """The configuration of the fewest GPUs that is the same otherwise.

    One without a placement, as a single GPU needs none, serves all placements.
    """
    fewer = [one for one in groups if one.gpus <= group.gpus]
    same = [one for one in fewer if _alike(one, group, *_PLACE)]
    single = [
        one
        for one in fewer
        if one.gpus == 1
        and one.settings.get("update") in _SINGLE
        and _alike(one, group, *_PLACE, "update")
    ]
    return min([*same, *single], key=lambda one: one.gpus, default=None)


def _alike(a: Group, b: Group, *names: str) -> bool:
    return without(a.settings, *names) == without(b.settings, *names)


def _row(group: Group, base: Group, names: Sequence[str]) -> Iterator[Efficiency]:
    """Nothing where either did not tell its speed."""
    own, first = (spread(told(one.timed, "samples_per_second")) for one in (group, base))
    if own is None or first is None or min(own.low, first.low) <= 0:
        return
    others = [name for name in names if name not in _PLACE]
    speed_up, more = own.median / first.median, group.gpus / base.gpus
    tables = mean_of_classes(base.measures), mean_of_classes(group.measures)
    steps = [step_of(table) for table in tables]
    yield Efficiency(
        label=group.label,
        series=label(group.settings, others) if others else "",
        gpus=group.gpus,
        base=base.label,
        base_gpus=base.gpus,
        rate=own.median,
        speed_up=speed_up,
        bounds=None if group is base else bounds(first, own),
        efficiency=speed_up / more,
        step_ns=steps[1],
        base_step_ns=steps[0],
        losses=() if group is base else find_losses(*tables),
    )


def bounds(first: Spread, own: Spread) -> Bounds | None:
    """Of the slowest repeat beside the fastest of the base, and the other way round."""
    if min(first.count, own.count) < _FEWEST or min(first.low, own.low) <= 0:
        return None
    return Bounds(own.low / first.high, own.high / first.low)


def mean_of_classes(measures: Sequence[Measure]) -> dict[str, Mean] | None:
    """Each class over the repeats: its mean in whole nanoseconds, and how sure that is."""
    known = [one.classes for one in measures if one.classes is not None]
    if not known:
        return None
    means = means_of(np.array([[table.get(name, 0) for name in CLASSES] for table in known], float))
    return {
        name: Mean(round(mean.value), mean.error, mean.freedom)
        for name, mean in zip(CLASSES, means, strict=True)
    }


def step_of(classes: Mapping[str, Mean] | None) -> int | None:
    """The step that classes make together."""
    return None if classes is None else round(sum(mean.value for mean in classes.values()))


def find_losses(
    first: Mapping[str, Mean] | None, own: Mapping[str, Mean] | None
) -> tuple[Loss, ...]:
    """What each class adds to the base's step, which is the ideal one: the batch of a GPU stays.

    All are whole nanoseconds, so they sum to the difference of the steps exactly.
    """
    if first is None or own is None:
        return ()
    return tuple(split_loss(first, own, 1.0, step_of(first) or 0))
