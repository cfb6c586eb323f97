"""From a study to its runs: every combination, again and again, in turn."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gputrace.bench.cards import groups
from gputrace.bench.database import Configuration, Settings
from gputrace.bench.frameworks import Framework
from gputrace.bench.groups import label as settings_label
from gputrace.bench.groups import varying
from gputrace.bench.settings import CORES, KINDS, MADE, OPTIONS
from gputrace.bench.study import Study
from gputrace.bench.toml import nearest
from gputrace.errors import UsageError

_KEY_LENGTH: Final = 12


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to be made.

    Attributes:
        repeat: from 1.
        recorded: whether by `gputrace record`; else bare.
    """

    configuration: Configuration
    framework: Framework
    repeat: int
    recorded: bool

    @property
    def place(self) -> tuple[str, int, bool]:
        """As `Run.place`."""
        return self.configuration.key, self.repeat, self.recorded

    @property
    def name(self) -> str:
        """Of its files."""
        bare = "" if self.recorded else "-bare"
        return f"{self.framework.name}-{self.configuration.key}-{self.repeat}{bare}"


def make_plan(study: Study, frameworks: Mapping[str, Framework], gpus: int) -> list[Planned]:
    """All runs in their order: each configuration once, then all again.

    So a machine that grows warm, or is used by others for a while, disturbs all alike. Bare and
    recorded runs take turns in being the first.
    """
    # Two ways to write the same settings are one configuration.
    configurations = {each.key: each for each in _configurations(study, gpus)}.values()
    return [
        Planned(each, frameworks[each.framework], repeat, recorded)
        for repeat in range(1, study.repeats + 1)
        for each in configurations
        for recorded in _recorded(study, repeat)
    ]


def _recorded(study: Study, repeat: int) -> tuple[bool, ...]:
    if study.recording == "both":
        return (False, True) if repeat % 2 else (True, False)
    return (study.recording == "recorded",)


def _configurations(study: Study, gpus: int) -> Iterator[Configuration]:
    for settings in study.combinations:
        for visible in groups(study.cards, gpus):
            own: dict[str, Any] = {"visible": list(visible)} if visible else {}
            count = len(visible) or settings.get("gpus", 1)
            if settings.get("data") in MADE:
                own["images"] = study.images
            whole = {**settings, "gpus": count, **own}
            yield Configuration(key_of(whole), settings["framework"], count, whole)


def key_of(settings: Settings) -> str:
    """Of a configuration; the order in which the settings were written plays no part."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]


def configurations_of(plan: Iterable[Planned]) -> list[Configuration]:
    """Those of a plan, each once, in its order."""
    return list({run.configuration.key: run.configuration for run in plan}.values())


def arguments_of(planned: Planned, data: str | None = None, gpus: int | None = None) -> list[str]:
    """What the script gets.

    Args:
        planned: the run.
        data: the folder of images that were made for the study.
        gpus: of each machine, where the run takes several.
    """
    settings = dict(planned.configuration.settings)
    if data is not None:
        settings["data"] = data
    if gpus is not None:
        settings["gpus"] = gpus
    if settings.get("workers") == CORES:
        settings["workers"] = len(os.sched_getaffinity(0))
    if "learning-rate" in settings:
        # A larger batch in all, since the batch of each GPU stays: the linear rule.
        settings["learning-rate"] *= planned.configuration.gpus
    words = list(planned.framework.arguments)
    for name in ("gpus", *(option.name for option in OPTIONS)):
        if name in settings:
            value = settings[name]
            words += [f"--{name}", f"{value:.12g}" if isinstance(value, float) else str(value)]
    return words


def label(configuration: Configuration, among: Iterable[Configuration]) -> str:
    """Its framework and the settings in which it differs from others, as ``torch, 2 GPUs``."""
    names = varying([each.settings for each in among])
    return settings_label(configuration.settings, dict.fromkeys(("framework", *names)))


def why_not(planned: Planned, gpus: int) -> str:
    """Why a run cannot be made here, whatever is installed; empty where it can."""
    settings, updates = planned.configuration.settings, planned.framework.updates
    update = settings.get("update")
    if updates and update is not None and update not in updates:
        known = ", ".join(updates)
        return f"{planned.framework.title} knows no placement {update}; it has {known}"
    visible = settings.get("visible")
    needed = max(visible) + 1 if visible else planned.configuration.gpus
    device = settings.get("device", "auto")
    # A script that may choose takes the CPU where there is no GPU.
    free = device == "cpu" or (device == "auto" and needed == 1 and not visible)
    if free or needed <= gpus:
        return ""
    wanted = f"GPU {needed - 1}" if visible else f"{needed} GPU{'s' * (needed > 1)}"
    return f"takes {wanted}, and this machine has {gpus or 'none'}"


def only(plan: Iterable[Planned], filters: Iterable[tuple[str, str]]) -> list[Planned]:
    """The runs whose settings have these values, as the command line writes them."""
    wanted: dict[str, set[str]] = {}
    for name, value in filters:
        if name not in KINDS:
            raise UsageError(f"--only {name}={value}: no such setting; {nearest(name, KINDS)}")
        wanted.setdefault(name, set()).add(value)
    chosen = [
        run
        for run in plan
        if all(str(run.configuration.settings.get(name)) in wanted[name] for name in wanted)
    ]
    if not chosen:
        told = " ".join(f"{name}={','.join(sorted(wanted[name]))}" for name in wanted)
        raise UsageError(f"--only {told}: the study has no such run")
    return chosen
