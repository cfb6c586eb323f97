"""The benchmark of what a budget buys: planted trainings have their answers in time."""

from __future__ import annotations

import pytest

from benchmarks import budgets


def test_the_best_cure_is_proven_in_a_minute_in_most_trials() -> None:
    """Of simulated programs by chance; the others need more than four starts for it."""
    found = budgets.tally([budgets.by_chance(seed) for seed in range(20)], 60, 3)
    assert found.proven >= 0.8
    assert found.found >= 0.8
    assert found.covered >= 0.95
    assert found.wrong <= 0.05


@pytest.mark.parametrize("planted", budgets.SICK, ids=lambda planted: planted.name)
def test_each_sick_training_has_its_answer_in_two_minutes(planted: budgets.Planted) -> None:
    found = budgets.tally([planted], 120, 8)
    assert found.proven >= 0.8
