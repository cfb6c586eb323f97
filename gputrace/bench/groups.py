"""Runs by configuration, figures over repeats, and settings as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Any, Final

from gputrace.bench.answer import Spread
from gputrace.bench.results import Measure, RunResult
from gputrace.bench.rows import Settings

VISIBLE: Final = "visible"
"""The setting that names the cards of a run."""
_PLAIN: Final = ("framework", "update", "layout", "model")
"""Settings whose values speak for themselves."""


@dataclass(frozen=True, slots=True)
class Group:
    """All runs with the same settings."""

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
        """Whose speed counts: the bare ones where there are any."""
        bare = [run for run in self.done if not run.recorded]
        return bare or self.done

    @property
    def measures(self) -> list[Measure]:
        """Of the recordings that could be read."""
        found = (run.measure for run in self.done)
        return [one for one in found if one is not None and not one.problem]


def group(runs: Sequence[RunResult]) -> list[Group]:
    """The runs by their settings, in the order in which these come first."""
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        found.setdefault(_key(run.settings), []).append(run)
    names = varying([own[0].settings for own in found.values()])
    return [
        Group(own[0].settings, label(own[0].settings, names), tuple(own)) for own in found.values()
    ]


def varying(settings: Sequence[Settings]) -> tuple[str, ...]:
    """Names of the settings that are not the same in all, in the order of the study."""
    names = dict.fromkeys(name for own in settings for name in own)
    return tuple(n for n in names if len({_key(own.get(n)) for own in settings}) > 1)


def without(settings: Settings, *names: str) -> str:
    """What tells configurations apart that are the same but for the settings named."""
    return _key({name: value for name, value in settings.items() if name not in names})


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def label(settings: Settings, names: Iterable[str]) -> str:
    """The values of some settings: ``torch, 2 GPUs, 4 workers``."""
    texts = (value_text(settings, name) for name in names if settings.get(name) is not None)
    return ", ".join(texts) or "all"


def value_text(settings: Settings, name: str) -> str:
    """One setting: ``2 GPUs``, ``batch 64``, ``staging on``, ``GPUs 0+1``."""
    value = settings.get(name)
    if value is None:
        return f"{name} default"
    if name == VISIBLE:
        return ("GPUs " if len(value) > 1 else "GPU ") + "+".join(map(str, value))
    if name in ("gpus", "workers") and isinstance(value, int):
        word = device_word(settings) if name == "gpus" else "worker"
        return f"{value} {word}" if value == 1 else f"{value} {word}s"
    if name == "data":
        return PurePath(str(value)).name
    return plain_value(value) if name in _PLAIN else f"{name} {plain_value(value)}"


def device_word(settings: Settings) -> str:
    """What a run takes several of: on a CPU, ranks or devices that stand in for GPUs."""
    return "device" if settings.get("device") == "cpu" else "GPU"


def plain_value(value: Any) -> str:
    """A value as a study file would have it, without quotation marks."""
    if value is None:
        return "default"
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def spread(values: Iterable[float | None]) -> Spread | None:
    """The median and the extremes of those that are known; None without any."""
    known = [value for value in values if value is not None]
    return Spread(median(known), min(known), max(known), len(known)) if known else None


def told(runs: Iterable[RunResult], name: str) -> list[float | None]:
    """What each run's script says under a name."""
    return [_number((run.told or {}).get(name)) for run in runs]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def mean_ns(measures: Sequence[Measure], get: Callable[[Measure], int | None]) -> int | None:
    """The mean over the recordings that know it, in whole nanoseconds."""
    known = [value for value in map(get, measures) if value is not None]
    return round(sum(known) / len(known)) if known else None


def mean_classes(measures: Sequence[Measure]) -> dict[str, int] | None:
    """The mean of each class over the recordings, in whole nanoseconds."""
    tables: list[Mapping[str, int]] = [one.classes for one in measures if one.classes is not None]
    if not tables:
        return None
    return {name: round(sum(t[name] for t in tables) / len(tables)) for name in tables[0]}
