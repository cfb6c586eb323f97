"""What a check asks for and says. Field names are those of its JSON."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure may be at most, or must be at least."""

    figure: str
    """A class of ``breakdown``, ``idle``, ``step_time``, ``step_time_p95``, ``throughput``."""
    value: float
    """A share (0 to 1), nanoseconds, or samples a second."""
    unit: str
    """``share``, ``ns`` or ``samples_per_s``."""
    at_most: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """All gates of a check."""

    limits: tuple[Limit, ...] = ()
    max_slowdown: float | None = None
    """Part by which it may be slower than the baseline."""
    fail_on: tuple[str, ...] = ()
    """Ids of findings, or severities: that one and the worse."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate, and whether it is met."""

    id: str
    """The option that asked for it: ``max-data-feeding``, ``max-slowdown``, ``fail-on high``."""
    passed: bool
    evaluated: bool
    """False where the trace cannot tell; such a gate is not met."""
    value: float | None
    limit: float | None
    unit: str | None
    """``share``, ``ns``, ``samples_per_s`` or ``findings``."""
    message: str
    """The figure and the limit in words, or why there is no figure."""


@dataclass(frozen=True, slots=True)
class Check:
    """The answer for one trace."""

    schema_version: int
    paths: tuple[str, ...]
    baseline: tuple[str, ...] | None
    """Its files."""
    passed: bool
    """Whether all gates are met."""
    gates: tuple[Gate, ...]
