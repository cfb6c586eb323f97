"""How far the steps of a recording pin down a mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gputrace.analyzers.compare.runs import ABSENT, Mean, difference, means_of, ratio, student


def of(series: NDArray[np.float64]) -> Mean:
    (mean,) = means_of(series[:, None])
    return mean


def wandering(rng: np.random.Generator, count: int, memory: float) -> NDArray[np.float64]:
    """A series about 100 in which each value remembers a part of the one before."""
    values, level = [], rng.normal() / (1 - memory**2) ** 0.5
    for _ in range(count):
        values.append(level)
        level = memory * level + rng.normal()
    return 100 + np.array(values)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (20, 2.086), (1000, 1.962)]
)
def test_bounds_of_one_row_are_student_s_quantiles(freedom: int, quantile: float) -> None:
    assert student(1, freedom) == pytest.approx(quantile, rel=1e-3)


def test_bounds_of_more_rows_are_wider() -> None:
    assert student(1, 10) == pytest.approx(2.228, rel=1e-3)
    assert student(10, 10) == pytest.approx(3.581, rel=1e-3)


def test_the_error_of_unlike_steps_is_their_deviation_by_the_root_of_their_number() -> None:
    mean = of(np.array([1.0, 3.0] * 10))
    assert mean.value == 2
    assert mean.error == pytest.approx((20 / 19 / 20) ** 0.5)


@pytest.mark.parametrize("memory", [0.0, 0.3, 0.6])
def test_bounds_hold_nearly_as_often_as_they_say(memory: float) -> None:
    rng, holds = np.random.default_rng(7), 0
    for _ in range(400):
        bounds = difference(of(wandering(rng, 60, memory)), of(wandering(rng, 60, memory)))
        assert bounds is not None
        holds += bounds.low <= 0 <= bounds.high
    assert holds >= 0.90 * 400


def test_two_steps_give_no_bounds() -> None:
    few = of(np.array([1.0, 2.0]))
    assert (few.value, few.error) == (1.5, None)
    assert difference(few, ABSENT) is None
    assert ratio(few, few) is None


@given(
    st.lists(st.integers(1, 10**12), min_size=3, max_size=50),
    st.lists(st.integers(1, 10**12), min_size=3, max_size=50),
)
def test_a_difference_lies_in_its_bounds_and_turns_round_with_them(
    a: list[int], b: list[int]
) -> None:
    first, second = (of(np.array(values, float)) for values in (a, b))
    there, back = difference(first, second), difference(second, first)
    assert there is not None
    assert back is not None
    assert there.low <= second.value - first.value <= there.high
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))


def test_steps_of_one_length_leave_no_doubt() -> None:
    a, b = of(np.full(9, 100.0)), of(np.full(5, 80.0))
    bounds, speed = difference(a, b), ratio(a, b)
    assert bounds is not None
    assert speed is not None
    assert (bounds.low, bounds.high) == (-20, -20)
    assert (speed.low, speed.high) == (1.25, 1.25)
