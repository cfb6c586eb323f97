"""Configurations beside each other: what each setting changes, and what had been foretold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

from gputrace.bench.answer import Effect, Predicted, Spread
from gputrace.bench.efficiency import bounds
from gputrace.bench.groups import (
    VISIBLE,
    Group,
    label,
    mean_ns,
    plain_value,
    spread,
    told,
    value_text,
    varying,
    without,
)
from gputrace.bench.results import Prediction

_APART: Final = ("framework", "gpus", VISIBLE)
"""Settings that have tables of their own, or are too many to be set beside one of them."""


def _copies_ahead(before: Any, after: Any) -> bool:
    return before in ("off", False, None) and after in ("on", True)


def _more_workers(before: Any, after: Any) -> bool:
    return not before and bool(after)


def _processes(before: Any, after: Any) -> bool:
    return before in ("dataparallel", "dataparallel-loss") and after == "ddp"


CURED_BY: Final = (
    ("staging", _copies_ahead, ("prefetch",)),
    ("pinned", _copies_ahead, ("pinned",)),
    ("workers", _more_workers, ("prefetch",)),
    ("update", _processes, ("ddp",)),
)
"""Settings, which change of them is a cure of ``what_if``, and the ids of that cure."""
_PINNED_AHEAD: Final = "pinned"
"""The cure that copies from pinned memory, and beside the computation: what staging does where
memory is pinned already."""


def find_effects(groups: Sequence[Group]) -> tuple[Effect, ...]:
    """For each setting that varies: every value beside the first, where all others are the same."""
    names = varying([group.settings for group in groups])
    found: list[Effect] = []
    for name in names:
        if name not in _APART:
            for family in families(groups, name):
                found += _effects(name, family, [n for n in names if n != name])
    return tuple(found)


def families(groups: Sequence[Group], name: str) -> list[list[Group]]:
    """Configurations that are done and differ in one setting alone, two or more at a time."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        if group.done:
            found.setdefault(without(group.settings, name), []).append(group)
    return [family for family in found.values() if len(family) > 1]


def _effects(name: str, family: Sequence[Group], others: Sequence[str]) -> Iterator[Effect]:
    base, *rest = family
    first = spread(told(base.timed, "samples_per_second"))
    for group in rest:
        own = spread(told(group.timed, "samples_per_second"))
        if first is not None and own is not None and first.low > 0:
            yield _effect(name, base, group, others, first, own)


def _effect(
    name: str, base: Group, group: Group, others: Sequence[str], first: Spread, own: Spread
) -> Effect:
    gaps = [mean_ns(one.measures, lambda measure: measure.gap_ns) for one in (base, group)]
    return Effect(
        setting=name,
        others=label(group.settings, others) if others else "",
        base=value_text(base.settings, name),
        value=value_text(group.settings, name),
        speed_up=own.median / first.median,
        bounds=bounds(first, own),
        gap_ns=None if gaps[0] is None or gaps[1] is None else gaps[1] - gaps[0],
    )


def find_predictions(groups: Sequence[Group]) -> tuple[Predicted, ...]:
    """For each change of a setting that is a cure: its prediction, and the measured step."""
    names = varying([group.settings for group in groups])
    return tuple(
        row
        for name, cures, ids in CURED_BY
        for family in families(groups, name)
        for before in family
        for after in family
        if cures(before.settings.get(name), after.settings.get(name))
        for row in _predicted(name, before, after, (*ids, *_more(name, after)), names)
    )


def _more(name: str, after: Group) -> tuple[str, ...]:
    """The cure that staging is as well, of pinned memory: all other settings are the same."""
    pinned = after.settings.get("pinned") in ("on", True)
    return (_PINNED_AHEAD,) if name == "staging" and pinned else ()


def _predicted(
    name: str, before: Group, after: Group, ids: Sequence[str], names: Sequence[str]
) -> Iterator[Predicted]:
    """Of several repeats, the median prediction, and the widest range."""
    measured = mean_ns(after.measures, lambda one: one.step_ns)
    for cure in ids:
        made = [one for run in before.measures for one in run.predictions if one.id == cure]
        if made and measured:
            yield _row(name, before, after, made, measured, names)


def _row(
    name: str,
    before: Group,
    after: Group,
    made: Sequence[Prediction],
    measured: int,
    names: Sequence[str],
) -> Predicted:
    step = round(median(one.step_ns for one in made))
    old, new = (plain_value(one.settings.get(name)) for one in (before, after))
    return Predicted(
        label=label(after.settings, [one for one in names if one != name]),
        change=f"{name} {old} → {new}",
        cure=made[0].id,
        before_ns=round(median(one.now_ns for one in made)),
        predicted_ns=step,
        low_ns=min(one.low_ns for one in made),
        high_ns=max(one.high_ns for one in made),
        measured_ns=measured,
        made=len(made),
        recordings=len(before.measures),
        error=step / measured - 1,
        gap_before_ns=mean_ns(before.measures, lambda one: one.gap_ns),
        gap_after_ns=mean_ns(after.measures, lambda one: one.gap_ns),
    )
