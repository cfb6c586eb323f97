"""The rows of a study's results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["done", "failed", "skipped"]
Recording = Literal["recorded", "bare", "both"]
Settings = Mapping[str, Any]
"""How a run was made: framework, gpus, batch, ... by the names of the study file."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """What the study file said when it was last run."""

    title: str
    question: str
    repeats: int
    recording: Recording
    file: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """One combination of settings.

    Attributes:
        key: the same for the same settings, whatever else the study has.
        settings: as the study says them, ``framework``, ``gpus`` and ``visible`` among them.
    """

    key: str
    framework: str
    gpus: int
    settings: Settings


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of a configuration that is over, or cannot be.

    Attributes:
        configuration: key of the configuration.
        repeat: from 1.
        recorded: whether by `gputrace record`; else bare.
        why: one line, for what failed or was skipped.
        result: the object that the script printed last; None unless done.
        trace, log: below the results' folder.
        id: None until it is saved.
    """

    configuration: str
    repeat: int
    recorded: bool
    state: State
    why: str = ""
    started_ns: int | None = None
    ended_ns: int | None = None
    exit_code: int | None = None
    result: Mapping[str, Any] | None = None
    trace: str | None = None
    log: str | None = None
    id: int | None = None

    @property
    def place(self) -> tuple[str, int, bool]:
        """What tells it from other runs."""
        return self.configuration, self.repeat, self.recorded
