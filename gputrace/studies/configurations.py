"""Runs grouped by configuration, and statistics over their repeats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Any, Final

from gputrace.studies.database import Settings
from gputrace.studies.measures import Measure, RunResult
from gputrace.studies.results import Spread

VISIBLE: Final = "visible"
"""Setting that names the GPUs of a run."""
_PLAIN: Final = ("framework", "update", "layout", "model")
"""Settings whose values are self-explanatory in labels."""


@dataclass(frozen=True, slots=True)
class Group:
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
    values = [(run.told or {}).get(name) for run in runs]
    known = [float(value) for value in values if isinstance(value, int | float)]
    return Spread(median(known), min(known), max(known), len(known)) if known else None


def mean_ns(measures: Iterable[Measure], name: str) -> int | None:
    """Return the mean over the recordings that have the value, in whole nanoseconds."""
    known = [value for each in measures if (value := getattr(each, name)) is not None]
    return round(sum(known) / len(known)) if known else None


def count_range(counts: Iterable[int]) -> str:
    """Format counts as ``20`` or ``19 to 20``; empty without any."""
    return " to ".join(map(str, sorted({min(known), max(known)}))) if (known := [*counts]) else ""
