"""The benchmark of diagnosis, for a moment: planted causes are found first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.diagnosis import NONE, diagnose, good, table
from tests.helpers.examples import few
from tests.synthetic import PLANTS, Plant


@pytest.mark.parametrize("seed", range(few(5)))
def test_planted_causes_are_found_first(seed: int) -> None:
    found = diagnose(seed)
    assert found.wrong == ""
    assert (found.found == NONE) == (not found.plant.expects)


@pytest.mark.parametrize("plant", PLANTS[-8:], ids=lambda plant: plant.name)
def test_causes_like_those_of_recordings_of_others_are_found_first(plant: Plant) -> None:
    assert diagnose(1002, plant).wrong == ""


def test_every_plant_has_a_row_in_the_table_of_confusions() -> None:
    one = diagnose(0)
    lines = table([one]).splitlines()
    assert lines[2].startswith("| nothing | 1 | 1 | 1 |")
    assert all(any(line.startswith(f"| {plant.name} |") for line in lines) for plant in PLANTS)
    assert good([one])
    assert not good([replace(one, wrong="late-host of rank 3")])
