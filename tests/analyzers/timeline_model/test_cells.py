"""Cells of a timeline: at any zoom they sum to the window, and bars show what most of a cell is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.timeline_model.cells import Layers, edges_of, stack
from gputrace.model.intervals import union

INTERVALS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=30)


def layers(*sets: list[tuple[int, int]]) -> Layers:
    """Disjoint sets: of two at once, the first counts."""
    own, given_away = [], union([], [])
    for each in sets:
        made = union([start for start, _ in each], [start + length for start, length in each])
        own.append(made.difference(given_away))
        given_away = union(
            np.concatenate([given_away.start, made.start]),
            np.concatenate([given_away.end, made.end]),
        )
    return Layers(tuple("abc"[: len(own)]), tuple(own))


@given(st.integers(-(1 << 60), 1 << 60), st.integers(1, 1 << 60), st.integers(1, 400))
def test_cells_divide_a_window_evenly(start: int, length: int, cells: int) -> None:
    edges = edges_of(start, start + length, cells)
    assert (edges[0], edges[-1]) == (start, start + length)
    sizes = np.diff(edges)
    assert sizes.max() - sizes.min() <= 1


@given(INTERVALS, INTERVALS, st.integers(0, 500), st.integers(1, 500), st.integers(1, 90))
def test_cells_sum_to_the_window_at_every_zoom(
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    start: int,
    length: int,
    cells: int,
) -> None:
    lanes = layers(first, second)
    shares = lanes.split(edges_of(start, start + length, cells))
    whole = lanes.split([start, start + length])
    assert shares.shape == (cells, 2)
    assert (shares.sum(axis=0) == whole[0]).all()


@given(INTERVALS, st.integers(0, 400), st.integers(1, 40))
def test_a_cell_holds_the_nanoseconds_that_are_in_it(
    some: list[tuple[int, int]], start: int, cells: int
) -> None:
    lanes = layers(some)
    edges = edges_of(start, start + 100, cells)
    counted = [
        int(lanes.sets[0].contains(np.arange(low, high)).sum()) for low, high in pairwise(edges)
    ]
    assert lanes.split(edges)[:, 0].tolist() == counted


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_bars_show_every_cell_to_the_nearest_eighth(shares: list[list[int]], rows: int) -> None:
    cells = np.array(shares, np.int64)
    lengths = np.maximum(cells.sum(axis=1), 1)
    bars = stack(cells, lengths, rows)
    assert bars.level.shape == (rows, len(cells))
    assert ((bars.level >= 1) & (bars.level <= 8)).all()
    assert (bars.lower <= bars.upper).all()


def test_a_cell_of_one_class_is_full() -> None:
    bars = stack(np.array([[0, 80]]), np.array([80]))
    assert (bars.lower[0, 0], bars.upper[0, 0], bars.level[0, 0]) == (1, 1, 8)


def test_a_cell_of_two_classes_is_divided_between_them() -> None:
    bars = stack(np.array([[60, 20]]), np.array([80]))
    assert (bars.lower[0, 0], bars.upper[0, 0], bars.level[0, 0]) == (0, 1, 6)


def test_what_is_not_known_lies_on_top() -> None:
    bars = stack(np.array([[40, 0]]), np.array([80]))
    assert (bars.lower[0, 0], bars.upper[0, 0], bars.level[0, 0]) == (0, 2, 4)


def test_the_rows_of_a_bar_are_filled_from_the_ground() -> None:
    bars = stack(np.array([[60, 20]]), np.array([80]), rows=2)
    assert bars.lower[:, 0].tolist() == [0, 0]
    assert bars.upper[:, 0].tolist() == [1, 0]
    assert bars.level[:, 0].tolist() == [4, 8]
