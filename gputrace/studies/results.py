"""Results of a study. Field names are those of its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gputrace.analyzers.compare.runs import Bounds
from gputrace.model.comparison import Loss
from gputrace.model.struct import Struct

SCHEMA_VERSION = 1


class Spread(Struct, frozen=True):
    """Statistic over the repeats of a configuration."""

    median: float
    low: float
    high: float
    """Minimum and maximum of the repeats."""
    count: int


class ConfigurationResult(Struct, frozen=True):
    """Configuration with its results."""

    label: str
    """Varying settings, as text."""
    settings: Mapping[str, Any]
    """All settings."""
    gpus: int
    done: int
    failed: int
    skipped: int
    """Number of runs by state."""
    reason: str
    """Reason of the first run that is not done."""
    rate: Spread | None
    """Samples per second of all GPUs, over the steady steps; of bare runs if there are any."""
    rate_of_median: Spread | None
    """Samples per second, by the median steady step."""
    step_ns: Spread | None
    """Step time that corresponds to ``rate``."""
    overhead: float | None
    """Overhead of recording on a step, 0.02 for 2 %; None without bare and recorded runs."""
    loss_first: float | None
    loss_last: float | None
    accuracy: float | None
    target_s: Spread | None
    """Seconds to the target accuracy."""
    data_wait_ns: int | None
    """Wait for data per step on the first rank, by the script's own clock."""
    recorded_step_ns: int | None
    """Mean steady step of the recordings; ``classes`` sum to it."""
    classes: Mapping[str, int] | None
    """Nanoseconds per step and GPU; None if no GPU was recorded."""
    wait_ns: int | None
    """Part of communication that waits for other ranks."""
    host_data_ns: int | None
    gap_ns: int | None
    """Idle time, a step and GPU."""
    finding: str
    """Verdict of the first recording; empty if it has none."""


class RecordingCheck(Struct, frozen=True):
    """Comparison of a configuration's recordings with its script's own report.

    Covers the repeat that agrees least.
    """

    label: str
    ok: bool | None
    """None if nothing ran."""
    reason: str
    steps_run: int | None
    steps_found: Mapping[int, int]
    """Number of detected steps by rank."""
    wait_script_s: float | None
    """Total wait for data on the first rank, by the script's own clock."""
    wait_recorded_s: float | None
    difference: float | None
    """Relative difference of the recorded waits from the script's: 0.05 for 5 %."""


class Efficiency(Struct, frozen=True):
    """Configuration relative to its base, the otherwise equal one with the fewest GPUs."""

    label: str
    series: str
    """Label without the GPUs: equal for configurations of one series."""
    gpus: int
    base: str
    """Label of the base."""
    base_gpus: int
    rate: float
    speed_up: float
    bounds: Bounds | None
    """``low`` and ``high`` of the speed-up: slowest repeat over the base's fastest, and fastest
    over slowest; None for the base, and with a single repeat."""
    efficiency: float
    step_ns: int | None
    """Step of the recordings, like ``base_step_ns``."""
    base_step_ns: int | None
    losses: tuple[Loss, ...]
    """Sum to ``step_ns`` minus ``base_step_ns``; largest first; empty without recordings."""


class Effect(Struct, frozen=True):
    """Effect of one setting with all others equal."""

    setting: str
    others: str
    """Other varying settings, as text."""
    base: str
    value: str
    speed_up: float
    bounds: Bounds | None
    """Bounds of the speed-up, see `Efficiency`."""
    gap_ns: int | None
    """Added idle time per step and GPU; negative if saved."""


class Predicted(Struct, frozen=True):
    """Predicted effect of a setting, from the recording without it, and the measured one."""

    label: str
    """Other varying settings."""
    change: str
    """``staging off → on``."""
    cure: str
    """Id in ``what_if``."""
    before_ns: int
    """Recorded step without the setting."""
    predicted_ns: int
    low_ns: int
    high_ns: int
    measured_ns: int
    error: float
    """Error of the prediction: 0.05 if it is 5 % above the measured step."""
    made: int
    recordings: int
    """``made`` of the recordings without it predicted it (gains below 1 % are not reported);
    ``before_ns`` and ``predicted_ns`` cover these."""
    gap_before_ns: int | None
    gap_after_ns: int | None
    """Idle time, a step and GPU."""


class PairOfGpus(Struct, frozen=True):
    """Result of a run on two GPUs."""

    label: str
    gpus: tuple[int, ...]
    link: str
    bandwidth: int | None
    """Bytes per second of large copies between them; else bus bandwidth of their collectives."""
    step_ns: int | None
    communication_ns: int | None
    rate: float | None


class CardResult(Struct, frozen=True):
    """Result on one of several GPUs that were tried."""

    label: str
    gpus: tuple[int, ...]
    name: str
    sm_clock_mhz: float | None
    sm_clock_max_mhz: int | None
    step_ns: int | None
    rate: float | None
    beside: float | None
    """Rate relative to the median card's."""


class GpuShare(Struct, frozen=True):
    """Load of one GPU of a placement."""

    gpu: int
    rank: int
    compute_ns: int
    """Per step."""
    memory_bytes: int | None


class Placement(Struct, frozen=True):
    """Load balance of a way to use several GPUs."""

    label: str
    shares: tuple[GpuShare, ...]
    skew: float | None
    """Compute time of the first GPU relative to the others' mean."""


class Summary(Struct, frozen=True):
    """Summary of a study."""

    schema_version: int
    title: str
    question: str
    varies: tuple[str, ...]
    """Names of the settings that vary."""
    same: Mapping[str, Any]
    """Settings that do not vary."""
    notes: tuple[str, ...]
    left: int
    """Number of runs still to be made."""
    rows: tuple[ConfigurationResult, ...]
    checks: tuple[RecordingCheck, ...]
    """Checks of the recorded configurations."""
    efficiency: tuple[Efficiency, ...]
    effects: tuple[Effect, ...]
    predictions: tuple[Predicted, ...]
    pairs: tuple[PairOfGpus, ...]
    cards: tuple[CardResult, ...]
    placements: tuple[Placement, ...]

    @property
    def holds(self) -> bool:
        """Return whether all recordings agree with their scripts' own reports."""
        return all(check.ok is not False for check in self.checks)
