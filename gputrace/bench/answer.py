"""What a study's results say. Field names are those of its JSON.

Times are integer nanoseconds; what scripts told by their own clock is in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gputrace.analyzers.compare.noise import Bounds
from gputrace.analyzers.compare.results import Loss

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repeats of a configuration."""

    median: float
    low: float
    high: float
    """The least and the greatest of the repeats."""
    count: int


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration."""

    label: str
    """The settings that vary, as text."""
    settings: Mapping[str, Any]
    """All of them."""
    gpus: int
    done: int
    failed: int
    skipped: int
    """Runs by their state."""
    reason: str
    """Why the first run that is not done is not."""
    rate: Spread | None
    """Samples a second of all GPUs, over the steady steps; of bare runs where there are any."""
    rate_of_median: Spread | None
    """Likewise, by the median steady step."""
    step_ns: Spread | None
    """What ``rate`` makes of a step."""
    overhead: float | None
    """What recording adds to the time of a step, 0.02 for 2 %; None unless both were run."""
    loss_first: float | None
    loss_last: float | None
    accuracy: float | None
    target_s: Spread | None
    """Seconds to the target accuracy."""
    data_wait_ns: int | None
    """A step's wait for data on the first rank, by the script's own clock."""
    recorded_step_ns: int | None
    """The mean steady step of the recordings; ``classes`` sum to it."""
    classes: Mapping[str, int] | None
    """Nanoseconds a step and GPU; None where no GPU was recorded."""
    wait_ns: int | None
    """The part of communication that waits for other ranks."""
    host_data_ns: int | None
    gap_ns: int | None
    """Idle time, a step and GPU."""
    finding: str
    """The verdict of the first recording; nothing where it has none."""


@dataclass(frozen=True, slots=True)
class Check:
    """Whether the recordings of a configuration agree with what its script says of itself.

    Of several repeats, the one that agrees least.
    """

    label: str
    ok: bool | None
    """None where nothing ran."""
    reason: str
    steps_run: int | None
    steps_found: Mapping[int, int]
    """By rank."""
    wait_script_s: float | None
    """All waits for data on the first rank, by the script's own clock."""
    wait_recorded_s: float | None
    difference: float | None
    """Of the recorded waits from the script's: 0.05 for 5 %."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """A configuration beside the one of the fewest GPUs that is the same otherwise."""

    label: str
    series: str
    """The label without the GPUs: equal for configurations that belong together."""
    gpus: int
    base: str
    """The base's label."""
    base_gpus: int
    rate: float
    speed_up: float
    bounds: Bounds | None
    """``low`` and ``high`` of the speed-up: of the slowest repeat beside the fastest of the base,
    and the other way round; None of the base, and where there is but one repeat."""
    efficiency: float
    step_ns: int | None
    """Of the recordings, as the base's."""
    base_step_ns: int | None
    losses: tuple[Loss, ...]
    """They sum to ``step_ns`` less ``base_step_ns``; largest first; none without recordings."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one setting changes where all others are the same."""

    setting: str
    others: str
    """The other settings that vary, as text."""
    base: str
    value: str
    speed_up: float
    bounds: Bounds | None
    """As of `Efficiency`."""
    gap_ns: int | None
    """Idle time a step and GPU that it adds; below 0 is less."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the recording without a setting foretold of it, beside what came."""

    label: str
    """The other settings that vary."""
    change: str
    """``staging off → on``."""
    cure: str
    """The id in ``what_if``."""
    before_ns: int
    """A step as it was recorded without."""
    predicted_ns: int
    low_ns: int
    high_ns: int
    measured_ns: int
    error: float
    """Of the prediction: 0.05 where it is 5 % over the measured step."""
    made: int
    recordings: int
    """How many of the recordings without it foretold it, as a gain of under 1 % is not told;
    ``before_ns`` and ``predicted_ns`` are of these."""
    gap_before_ns: int | None
    gap_after_ns: int | None
    """Idle time, a step and GPU."""


@dataclass(frozen=True, slots=True)
class PairOfGpus:
    """A run on two GPUs."""

    label: str
    gpus: tuple[int, ...]
    link: str
    bandwidth: int | None
    """Bytes a second of large copies between them; else of their collectives (bus bandwidth)."""
    step_ns: int | None
    communication_ns: int | None
    rate: float | None


@dataclass(frozen=True, slots=True)
class Card:
    """A run on one GPU of several that were tried."""

    label: str
    gpus: tuple[int, ...]
    name: str
    sm_clock_mhz: float | None
    sm_clock_max_mhz: int | None
    step_ns: int | None
    rate: float | None
    beside: float | None
    """Its rate for each of the median card's."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """One GPU of a placement."""

    gpu: int
    rank: int
    compute_ns: int
    """A step."""
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """How evenly a way to use several GPUs loads them."""

    label: str
    shares: tuple[GpuShare, ...]
    skew: float | None
    """Compute time of the first GPU for each of the others' mean."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The answer to a study."""

    schema_version: int
    title: str
    question: str
    varies: tuple[str, ...]
    """The settings that are not the same in all runs."""
    same: Mapping[str, Any]
    """The others."""
    notes: tuple[str, ...]
    left: int
    """Runs that are still to be made."""
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    """Of configurations that were recorded."""
    efficiency: tuple[Efficiency, ...]
    effects: tuple[Effect, ...]
    predictions: tuple[Predicted, ...]
    pairs: tuple[PairOfGpus, ...]
    cards: tuple[Card, ...]
    placements: tuple[Placement, ...]
