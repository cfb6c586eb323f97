"""Change over the run: steps that grow, jump or have two sizes; and none where there is noise."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gputrace.analyzers.findings.growing_steps import find_drift

MS = 1e6


def noise(seed: int, count: int) -> NDArray[np.float64]:
    """Lengths about 20 ms: scatter, a pace that wanders, hiccups and the tail of a warm-up."""
    draw = np.random.default_rng(seed)
    lengths = 20 * MS * draw.lognormal(0, draw.uniform(0, 0.15), count)
    pace = np.zeros(count)
    for step in range(1, count):
        pace[step] = 0.95 * pace[step - 1] + draw.normal(0, 0.008)
    lengths *= 1 + pace
    lengths[draw.random(count) < 0.03] *= draw.uniform(2, 10)
    if draw.random() < 0.5:
        lengths *= 1 + 0.5 * np.exp(-np.arange(count) / draw.uniform(2, count / 8))
    return lengths


@pytest.mark.parametrize("count", [40, 60, 200, 3_000])
def test_noise_is_no_drift(count: int) -> None:
    found = [find_drift(noise(seed, count), {}) for seed in range(250)]
    assert sum(drift is not None for drift in found) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_growth_is_found_through_noise(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, factor = int(draw.integers(60, 400)), draw.uniform(1.8, 4)
    steps = 10 * MS * np.linspace(1, factor, count)
    lengths = steps * draw.lognormal(0, 0.08, count)
    lengths[draw.random(count) < 0.03] *= 5
    drift = find_drift(lengths, {"launch": lengths - 10 * MS, "compute": np.full(count, 10 * MS)})
    assert drift is not None
    assert drift.shape == "grow"
    assert drift.from_ns == pytest.approx(10 * MS, rel=0.15)
    assert drift.to_ns == pytest.approx(factor * 10 * MS, rel=0.1)
    assert [name for name, _ in drift.grew] == ["launch"]


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_is_found_with_the_step_it_comes_at(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(60, 400))
    since = int(count * draw.uniform(0.25, 0.75))
    lengths = 10 * MS * draw.lognormal(0, 0.05, count)
    lengths[since:] *= 1.6
    drift = find_drift(lengths, {})
    assert drift is not None
    assert (drift.shape, drift.since) == ("jump", since)
    assert drift.from_ns == pytest.approx(10 * MS, rel=0.05)
    assert drift.to_ns == pytest.approx(16 * MS, rel=0.05)


@pytest.mark.parametrize("pattern", [[10, 16], [10, 10, 10, 16], [10, 16, 16]])
def test_two_sizes_are_no_jump(pattern: list[int]) -> None:
    lengths = (
        np.array(pattern * 30) * MS * np.random.default_rng(1).lognormal(0, 0.03, 30 * len(pattern))
    )
    drift = find_drift(lengths, {})
    assert drift is not None
    assert drift.shape == "two sizes"
    assert (drift.from_ns / MS, drift.to_ns / MS) == pytest.approx((10, 16), rel=0.03)


@pytest.mark.parametrize("length", [0, 10 * MS])
def test_equal_steps_do_not_change(length: float) -> None:
    assert find_drift(np.full(100, length), {}) is None


def test_steps_that_become_shorter_are_not_told() -> None:
    assert find_drift(np.linspace(30, 10, 100) * MS, {}) is None


def test_a_queue_of_batches_that_runs_empty_is_no_jump() -> None:
    assert find_drift([10 * MS] * 10 + [20 * MS] * 90, {}) is None


def test_a_slow_stretch_that_ends_is_no_jump() -> None:
    lengths = np.full(200, 10 * MS)
    lengths[80:120] *= 2
    assert find_drift(lengths, {}) is None
