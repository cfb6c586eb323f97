"""Curves of what NVML sampled: the mean of each cell, exact at any zoom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.timeline_model.cells import Curve, edges_of


def curve(*values: float, every: int = 10) -> Curve:
    """Values that hold for 10 ns each, from 100 on."""
    times = 100 + every * np.arange(len(values) + 1, dtype=np.int64)
    return Curve("power", times, np.array(values), max(values))


def test_a_cell_has_the_mean_of_what_held_in_it() -> None:
    means = curve(1.0, 3.0).means(np.array([100, 105, 115, 120]))
    assert means.tolist() == [1.0, 2.0, 3.0]


def test_nothing_is_known_before_the_first_sample_and_after_the_last() -> None:
    means = curve(1.0, 3.0).means(np.array([0, 100, 120, 130]))
    assert np.isnan(means).tolist() == [True, False, True]


def test_a_cell_that_is_sampled_in_part_has_the_mean_of_that_part() -> None:
    assert curve(4.0).means(np.array([90, 105])).tolist() == [4.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(1, 60))
def test_cells_average_to_the_mean_of_the_whole_at_every_zoom(
    values: list[float], cells: int
) -> None:
    own = curve(*values, every=1_000_000)
    edges = edges_of(int(own.time[0]), int(own.time[-1]), cells)
    means = own.means(edges)
    weighted = float((means * np.diff(edges)).sum() / (edges[-1] - edges[0]))
    assert weighted == pytest.approx(np.mean(values), rel=1e-6, abs=1e-6)
