"""The medians of all, of all others for each at once, and of what is known."""

from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from gputrace.analyzers.grouping import median, median_of_known, median_of_others


@given(
    st.sampled_from([np.int64, np.float64]).flatmap(
        lambda kind: arrays(
            kind,
            array_shapes(min_dims=1, max_dims=2, min_side=2, max_side=9),
            elements=st.integers(-5, 5) | st.integers(-(2**40), 2**40),
        )
    )
)
def test_it_is_what_numpy_gives_without_each(values: np.ndarray) -> None:
    expected = [np.median(np.delete(values, row, axis=0), axis=0) for row in range(len(values))]
    assert (median_of_others(values) == np.array(expected)).all()


COLUMNS = arrays(
    np.float64,
    array_shapes(min_dims=1, max_dims=2, max_side=9),
    elements=st.integers(-5, 5).map(float) | st.floats(-1e12, 1e12) | st.just(np.nan),
)


@given(arrays(np.int64, array_shapes(min_dims=1, max_dims=2, max_side=9)))
def test_it_is_what_numpy_gives_of_integers(values: np.ndarray) -> None:
    for axis in (None, 0):
        np.testing.assert_array_equal(median(values, axis), np.median(values, axis))


@given(COLUMNS)
def test_it_is_what_numpy_gives(values: np.ndarray) -> None:
    for axis in (None, 0):
        np.testing.assert_array_equal(median(values, axis), np.median(values, axis))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # All of a column may be NaN.
        expected = np.nanmedian(values, axis=0)
    np.testing.assert_array_equal(median_of_known(values), expected)
