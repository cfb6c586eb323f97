"""The benchmark of what no prediction may be shorter than, for a few runs."""

from __future__ import annotations

import pytest

from benchmarks.bounds import bounded


@pytest.mark.parametrize("seed", [20, 26, 50, 56, 59, 71, 77, 80, 86, 787])
def test_no_prediction_of_any_run_is_shorter_than_its_compute(seed: int) -> None:
    """They are quick, and have every cure between them but `peer-access`."""
    found = bounded(seed)
    assert found
    assert not [one for one in found if one.wrong]
