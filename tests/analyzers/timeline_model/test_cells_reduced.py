"""Runs of a lane: whatever is reduced, no nanosecond changes its class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gputrace.analyzers.timeline_model.cells import (
    BEGINS_CELL,
    IN_CELL,
    RUN_CLASSES,
    Layers,
    Runs,
    reduce,
    tile,
)
from gputrace.model.intervals import union
from gputrace.model.options import Window

CLASSES = ("compute", "h2d", "launch")
MOST = 400
lengths = st.lists(
    st.tuples(st.sampled_from([*CLASSES, "unknown"]), st.integers(1, 60)), min_size=1, max_size=900
)


def layers_of(stretches: Sequence[tuple[str, int]], start: int = 0) -> tuple[Layers, Window]:
    """Neighbouring stretches of classes as a lane, and the time that they fill."""
    edges = start + np.concatenate([[0], np.cumsum([length for _, length in stretches])])
    rows = {name: [at for at, (own, _) in enumerate(stretches) if own == name] for name in CLASSES}
    sets = tuple(union(edges[rows[name]], edges[1:][rows[name]]) for name in CLASSES)
    return Layers(CLASSES, sets), Window(start, int(edges[-1]))


def edges_of(runs: Runs, span: Window) -> NDArray[np.int64]:
    return span.start + np.concatenate([[0], np.cumsum(runs.length.astype(np.int64))])


def assert_exact(runs: Runs, layers: Layers, span: Window) -> None:
    """Every run that keeps its place, and every cell, holds what the lane does."""
    edges = edges_of(runs, span)
    assert edges[-1] == span.end
    begins = ((runs.kind & IN_CELL) == 0) | ((runs.kind & BEGINS_CELL) != 0)
    assert begins[0]
    first = np.append(np.flatnonzero(begins), len(runs))
    told = layers.split(edges[first])
    classes = [RUN_CLASSES[kind & 0x3F] for kind in runs.kind]
    for which, name in enumerate(CLASSES):
        own = np.where([c == name for c in classes], runs.length, 0).astype(np.int64)
        assert np.add.reduceat(own, first[:-1]).tolist() == told[:, which].tolist()


@given(lengths)
def test_few_runs_are_kept_as_they_are(stretches: list[tuple[str, int]]) -> None:
    layers, span = layers_of(stretches, start=10**15)
    (runs,) = reduce([tile(layers, span)], span, 1000)
    assert runs.whole
    assert_exact(runs, layers, span)


@given(lengths, st.integers(0, 20_000), st.integers(1, 2_000))
def test_many_runs_become_cells_that_hold_the_same(
    stretches: list[tuple[str, int]], first: int, length: int
) -> None:
    layers, span = layers_of(stretches)
    lane, window = tile(layers, span), Window(first, first + length)
    (runs,) = reduce([lane], span, MOST, [window])
    assert len(runs) <= max(MOST, 0)
    assert_exact(runs, layers, span)
    (narrow,) = reduce([lane], span, MOST, [window], between=Window(span.start, span.end))
    assert_exact(narrow, layers, span)


def test_a_window_that_matters_keeps_its_runs() -> None:
    stretches = [("compute", 7), ("launch", 3)] * 5_000
    layers, span = layers_of(stretches)
    (runs,) = reduce([tile(layers, span)], span, MOST, [Window(20_000, 20_200)])
    edges = edges_of(runs, span)
    inside = (edges[:-1] >= 20_000) & (edges[1:] <= 20_200)
    assert runs.length[inside].tolist() == [7, 3] * 20
    assert not np.any(runs.kind[inside] & IN_CELL)
    assert len(runs) <= MOST
    assert not runs.whole


def test_a_window_that_does_not_fit_is_reduced_too() -> None:
    layers, span = layers_of([("compute", 7), ("launch", 3)] * 5_000)
    (runs,) = reduce([tile(layers, span)], span, MOST, [Window(0, 40_000), Window(100, 200)])
    assert len(runs) <= MOST
    edges = edges_of(runs, span)
    inside = (edges[:-1] >= 100) & (edges[1:] <= 200)
    assert runs.length[inside].tolist() == [7, 3] * 10


def test_cells_lie_where_one_looks() -> None:
    layers, span = layers_of([("compute", 7), ("launch", 3)] * 500_000)
    window = Window(2_000_000, 2_100_000)
    (runs,) = reduce([tile(layers, span)], span, 4_000, [window], between=window)
    edges = edges_of(runs, span)
    inside = (edges[:-1] >= window.start) & (edges[1:] <= window.end)
    assert np.count_nonzero(inside) > 2_000
    assert_exact(runs, layers, span)


def test_a_run_of_hours_is_several_of_32_bits() -> None:
    layers, span = layers_of([("compute", 10**13), ("launch", 5)])
    (runs,) = reduce([tile(layers, span)], span, MOST)
    assert int(runs.length.astype(np.int64).sum()) == 10**13 + 5
    assert {RUN_CLASSES[kind] for kind in runs.kind[:-1]} == {"compute"}
    assert_times_of_one_class(runs)


def assert_times_of_one_class(runs: Runs) -> None:
    compute = runs.kind == RUN_CLASSES.index("compute")
    assert int(runs.length[compute].astype(np.int64).sum()) == 10**13
