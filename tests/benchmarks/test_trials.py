"""The benchmark of trials under noise."""

from __future__ import annotations

import pytest

from benchmarks.trials import NOISES, tally


@pytest.mark.parametrize(
    "name", ["whole runs, 2%", "steps in turns, 5%", "an event each 3.5 turns"]
)
def test_an_interval_holds_the_effect_after_whichever_look(name: str) -> None:
    [noise] = [noise for noise in NOISES if name in noise.name]
    found = tally(noise, 0.8, trials=1000)
    assert found.covered >= 0.95
