"""Statistics of the other GPUs, computed once for all, equal those of each computed alone."""

from __future__ import annotations

from statistics import median
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.load_balance import GpuWork, Others

AMOUNTS = st.dictionaries(st.integers(-3, 4), st.integers(0, 50), max_size=6)


def work(amount: dict[int, int], steps: int) -> GpuWork:
    nobody: Any = None
    spent = {sort: 7 * count for sort, count in amount.items()}
    return GpuWork(nobody, steps, nobody, {}, amount, spent, 0, 0)


@given(st.lists(st.builds(work, AMOUNTS, st.integers(0, 3)), min_size=2, max_size=6))
def test_the_most_and_the_middle_of_the_others(works: list[GpuWork]) -> None:
    others = Others(works)
    for place, own in enumerate(works):
        rest = [other for other in works if other is not own]
        for sort in range(-3, 6):
            assert others.most(sort, place) == max(other.each(sort) for other in rest)
        for sort in own.amount:
            assert others.lack(sort) == all(sort not in other.amount for other in rest)
        launches = [other.launches(other.kernels()) / other.turns for other in rest]
        assert others.launches[place] == median(launches)
        assert others.spent[place] == median(
            other.spent(other.kernels()) / other.turns for other in rest
        )
