"""What the other GPUs have, for each one: found once for all, since runs may have thousands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gputrace.analyzers.balance.work import Work
from gputrace.analyzers.medians import of_others


class Others:
    """The largest and the middle of all GPUs but one, by that one's place among them."""

    def __init__(self, works: Sequence[Work]) -> None:
        """Takes at least two."""
        self._having = Counter(sort for work in works for sort in work.amount)
        self._first: dict[int, tuple[float, int]] = {}
        self._second: dict[int, float] = {}
        for place, work in enumerate(works):
            for sort in work.amount:
                self._note(sort, work.each(sort), place)
        kernels = [work.kernels() for work in works]
        turns = np.array([work.turns for work in works])
        counted = [work.launches(own) for work, own in zip(works, kernels, strict=True)]
        spent = [work.spent(own) for work, own in zip(works, kernels, strict=True)]
        self._launches = of_others(np.array(counted) / turns)
        self._spent = of_others(np.array(spent) / turns)

    def _note(self, sort: int, amount: float, place: int) -> None:
        most = self._first.get(sort, (0.0, -1))[0]
        if amount > most:
            self._first[sort], self._second[sort] = (amount, place), most
        else:
            self._second[sort] = max(self._second.get(sort, 0.0), amount)

    def most(self, sort: int, place: int) -> float:
        """The most of a sort that another GPU has in a step."""
        most, owner = self._first.get(sort, (0.0, -1))
        return self._second.get(sort, 0.0) if owner == place else most

    def lack(self, sort: int) -> bool:
        """Whether a sort that one GPU has is no other's."""
        return self._having[sort] == 1

    def launches(self, place: int) -> float:
        """The middle one's kernels in a step."""
        return float(self._launches[place])

    def spent(self, place: int) -> float:
        """The middle one's nanoseconds in kernels in a step."""
        return float(self._spent[place])
