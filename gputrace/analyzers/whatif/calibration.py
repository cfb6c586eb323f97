"""Predictions beside what really came: pairs measured in studies, by which ranges are calibrated.

Each is the step of a training as recorded, the step predicted without a cause, and the step of the
same training recorded without it. Most are in docs/measurements and docs/studies, with how they
were measured. Misses are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from gputrace.analyzers.grouping import quantile
from gputrace.model.struct import Struct

_PAIRS: Final = Path(__file__).parents[2] / "data" / "pairs.csv"
FEWEST_OWN_PAIRS: Final = 3
"""Pairs of an optimization from which its range is made of them alone."""
_FEWEST_TRIMMED_PAIRS: Final = 10
"""Pairs from which the tenth at each end is left out."""
_TRIMMED_PART: Final = 0.1


class Pair(Struct, frozen=True):
    """Prediction, and what came. Times are milliseconds a step."""

    cure: str
    """Id of the optimization; empty where the notes name none."""
    program: str
    now_ms: float | None
    """Step as recorded; None where the notes do not say."""
    predicted_ms: float
    low_ms: float | None
    high_ms: float | None
    """Range that was given; None without one."""
    measured_ms: float
    counts: bool
    """False where the prediction was made in a way that has since been mended."""
    source: str

    @property
    def ratio(self) -> float:
        """Return the measured step as a fraction of the predicted one."""
        return self.measured_ms / self.predicted_ms

    @property
    def within(self) -> bool | None:
        """Return whether the range that was given holds the measured step; None without one."""
        if self.low_ms is None or self.high_ms is None:
            return None
        return self.low_ms <= self.measured_ms <= self.high_ms


@cache
def pairs() -> tuple[Pair, ...]:
    """Return all pairs, from the file ``gputrace/data/pairs.csv``."""
    import csv

    text = _PAIRS.read_text(encoding="utf-8")

    def number(cell: str) -> float | None:
        return float(cell) if cell else None

    return tuple(
        Pair(
            row["cure"],
            row["program"],
            number(row["now_ms"]),
            float(row["predicted_ms"]),
            number(row["low_ms"]),
            number(row["high_ms"]),
            float(row["measured_ms"]),
            row["counts"] == "yes",
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    )


class Calibration(Struct, frozen=True):
    """Factors of a predicted step between which measured ones lay."""

    below: float
    above: float
    pairs: int
    """Number of pairs that they are taken from."""
    sure: float = 1.0
    """Part of the predicted gain that nine in ten pairs of the optimization reached, or, with few
    of these, of all; at most 1."""


def calibrate(cure: str, known: Sequence[Pair] | None = None) -> Calibration:
    """Return the range of measured over predicted steps of an optimization's pairs.

    With few pairs, it is widened to the 10th to 90th percentile of all. It always includes 1.

    Args:
        cure: id of the optimization.
        known: pairs to learn from; None for those that come with gputrace.
    """
    counted = [pair for pair in (pairs() if known is None else known) if pair.counts]
    same = [pair.ratio for pair in counted if pair.cure == cure]
    ratios = [*same] if len(same) >= FEWEST_OWN_PAIRS else [pair.ratio for pair in counted]
    if not ratios:
        return Calibration(1.0, 1.0, 0)
    tail = _TRIMMED_PART if len(ratios) >= _FEWEST_TRIMMED_PAIRS else 0.0
    low, high = (quantile(ratios, part) for part in (tail, 1 - tail))
    gained = {
        pair: (pair.now_ms - pair.measured_ms) / (pair.now_ms - pair.predicted_ms)
        for pair in counted
        if pair.now_ms is not None and pair.now_ms > pair.predicted_ms
    }
    own = [part for pair, part in gained.items() if pair.cure == cure]
    parts = own if len(own) >= FEWEST_OWN_PAIRS else [*gained.values()]
    sure = min(1.0, max(0.0, quantile(parts, _TRIMMED_PART))) if parts else 1.0
    return Calibration(min(low, *same, 1.0), max(high, *same, 1.0), len(ratios), sure)
