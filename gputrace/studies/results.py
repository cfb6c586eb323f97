"""Results of a study. Field names are those of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from gputrace.analyzers.compare.runs import Bounds
from gputrace.model.comparison import Loss
from gputrace.model.struct import Column, Columns, Struct
from gputrace.units import format_bytes, format_change, format_ns, format_number

SCHEMA_VERSION = 1


def format_time(ns: float) -> str:
    """Format as ``12.3 ms``, and nothing as ``0``."""
    return format_ns(ns) if ns else "0"


def format_seconds(seconds: float) -> str:
    """Format as ``12.3 ms``, and nothing as ``0``."""
    return format_time(seconds * 1e9)


def count_range(counts: Iterable[int]) -> str:
    """Format counts as ``20`` or ``19 to 20``; empty without any."""
    return " to ".join(map(str, sorted({min(known), max(known)}))) if (known := [*counts]) else ""


def _bounds(bounds: Bounds) -> str:
    return f"{bounds.low:.2f}x–{bounds.high:.2f}x"


class Spread(Struct, frozen=True):
    """Statistic over the repeats of a configuration."""

    median: float
    """Median of the repeats."""
    low: float
    high: float
    """Minimum and maximum of the repeats."""
    count: int
    """Number of repeats."""

    @property
    def range(self) -> str:
        """Minimum and maximum, such as ``801–823``; empty without repeats."""
        ends = map(format_number, (self.low, self.high))
        return "–".join(dict.fromkeys(ends)) if self.count > 1 else ""


def _median(form: Callable[[float], str]) -> Callable[[Spread], str]:
    return lambda spread: form(spread.median)


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
    """Loss that the script reports first and last."""
    accuracy: float | None
    """Accuracy that the script reports, 0 to 1."""
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
    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("not done", "state"),
        Column("samples/s", "rate", _median(format_number)),
        Column("(range)", lambda row: row.rate and row.rate.range),
        Column("step", "step_ns", _median(format_time)),
        Column("overhead", "overhead", "{:+.1%}"),
        Column("to target", "target_s", _median(format_seconds)),
        Column("accuracy", "accuracy", "{:.1%}"),
        Column("data wait a step", "data_wait_ns", format_time),
        Column("by median step", "rate_of_median", _median(format_number)),
        Column("loss", "loss"),
    )

    @property
    def state(self) -> str:
        """Number of failed and skipped runs; empty if all are done."""
        counts = (("failed", self.failed), ("skipped", self.skipped))
        return ", ".join(f"{count} {word}" for word, count in counts if count)

    @property
    def loss(self) -> str:
        """First and last loss; empty if unknown."""
        if self.loss_first is None or self.loss_last is None:
            return ""
        return f"{format_number(self.loss_first)} → {format_number(self.loss_last)}"


class RecordingCheck(Struct, frozen=True):
    """Comparison of a configuration's recordings with its script's own report.

    Covers the repeat that agrees least.
    """

    label: str
    ok: bool | None
    """None if nothing ran."""
    reason: str
    """Why it does not hold; empty if it does."""
    steps_run: int | None
    """Number of steps that the script reports."""
    steps_found: Mapping[int, int]
    """Number of detected steps by rank."""
    wait_script_s: float | None
    """Total wait for data on the first rank, by the script's own clock."""
    wait_recorded_s: float | None
    difference: float | None
    """Relative difference of the recorded waits from the script's: 0.05 for 5 %."""
    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("steps run", "steps_run", "{}"),
        Column("found", "found"),
        Column("data waits", "wait_script_s", format_seconds),
        Column("waits recorded", "wait_recorded_s", format_seconds),
        Column("differ", "difference", "{:+.1%}"),
        Column("ok", lambda check: "yes" if check.ok else "NO"),
    )

    @property
    def found(self) -> str:
        """Detected steps, as ``20`` or ``19 to 20``; with the number of ranks if several."""
        counts = self.steps_found.values()
        return f"{len(counts)} × {count_range(counts)}" if len(counts) > 1 else count_range(counts)


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
    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("samples/s", "rate"),
        Column("speed-up", "speed_up", "{:.2f}x"),
        Column("(range)", "bounds", _bounds),
        Column("efficiency", "efficiency", "{:.0%}"),
    )


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
    COLUMNS: ClassVar[Columns] = (
        Column("", str),
        Column("samples/s", "speed_up", "{:.2f}x"),
        Column("(range)", "bounds", _bounds),
        Column("idle a step", "gap_ns", format_change),
    )

    def __str__(self) -> str:
        return f"{self.value} beside {self.base}" + f" ({self.others})" * bool(self.others)


_CURES = {"pinned": "pinned, own stream"}
"""Labels of cures whose id is also a setting but which change more than that."""


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
    COLUMNS: ClassVar[Columns] = (
        Column("", lambda row: row.change + (f" ({row.label})" if row.label != "all" else "")),
        Column("cure", lambda row: _CURES.get(row.cure, row.cure)),
        Column("step", "before_ns", format_time),
        Column("predicted", "predicted_ns", format_time),
        Column("measured", "measured_ns", format_time),
        Column("error", "error", "{:+.1%}"),
        Column("predicted by", lambda row: f"{row.made} of {row.recordings}"),
        Column("(range)", lambda row: f"{format_time(row.low_ns)}–{format_time(row.high_ns)}"),
        Column("idle a step", "gap"),
    )

    @property
    def gap(self) -> str:
        """Idle time without and with the setting, as far as it is known."""
        gaps = (self.gap_before_ns, self.gap_after_ns)
        return " → ".join(format_time(ns) for ns in gaps if ns is not None)


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
    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("link", "link", unknown="unknown"),
        Column("bandwidth", "bandwidth", lambda rate: f"{format_bytes(rate)}/s"),
        Column("step", "step_ns", format_time),
        Column("communication", "communication_ns", format_time),
        Column("samples/s", "rate", format_number),
    )


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
    COLUMNS: ClassVar[Columns] = (
        Column("", "label"),
        Column("card", "name"),
        Column("SM clock", "sm_clock_mhz", "{:,.0f} MHz"),
        Column("at most", "sm_clock_max_mhz", "{:,.0f} MHz"),
        Column("step", "step_ns", format_time),
        Column("samples/s", "rate", format_number),
        Column("beside the middle", "beside", "{:.2f}x"),
    )


class GpuShare(Struct, frozen=True):
    """Load of one GPU of a placement."""

    gpu: int
    rank: int
    compute_ns: int
    """Per step."""
    memory_bytes: int | None

    def __str__(self) -> str:
        used = [] if self.memory_bytes is None else [f"{self.memory_bytes / 2**30:.2f} GiB"]
        return ", ".join([format_time(self.compute_ns), *used])


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
    """Caveats of the figures."""
    left: int
    """Number of runs still to be made."""
    rows: tuple[ConfigurationResult, ...]
    """A row per configuration."""
    checks: tuple[RecordingCheck, ...]
    """Checks of the recorded configurations."""
    efficiency: tuple[Efficiency, ...]
    """A row per configuration with a base of fewer GPUs."""
    effects: tuple[Effect, ...]
    """A row per value of a setting, compared with its first value."""
    predictions: tuple[Predicted, ...]
    """A row per cure that the study tries."""
    pairs: tuple[PairOfGpus, ...]
    """A row per pair of GPUs that was tried."""
    cards: tuple[CardResult, ...]
    """A row per card that was tried."""
    placements: tuple[Placement, ...]
    """A row per way to use several GPUs."""

    @property
    def holds(self) -> bool:
        """Return whether all recordings agree with their scripts' own reports."""
        return all(check.ok is not False for check in self.checks)
