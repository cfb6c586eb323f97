"""Which GPU each row of a log is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from gputrace.errors import InputError
from gputrace.traces.smi.log import Row, SmiLog

_ROUND: Final = 0.5
"""Part of the pause between two rounds that parts them."""
_MOST_GPUS: Final = 32
_WHOLE: Final = 0.9
"""Part of the rounds that must be of one size to tell how many GPUs there are."""


def tell_apart(log: SmiLog) -> list[tuple[int, Row]]:
    """The rows, each with the place of its GPU: the index where it is known, else the order.

    nvidia-smi asks the GPUs in the order of their indices, one after another, and then waits.
    Raises InputError where that does not show in the times either.
    """
    rows = log.rows
    if all("gpu" in row.card for row in rows):
        return [(int(str(row.card["gpu"])), row) for row in rows]
    for name in ("uuid", "pci"):
        if all(name in row.card for row in rows):
            places: dict[object, int] = {}
            return [(places.setdefault(row.card[name], len(places)), row) for row in rows]
    return _by_rounds(log)


def _by_rounds(log: SmiLog) -> list[tuple[int, Row]]:
    rounds = _rounds(log.rows)
    sizes = Counter(map(len, rounds))
    size, often = sizes.most_common(1)[0]
    if size > _MOST_GPUS or often < _WHOLE * (len(rounds) - 1):
        problem = "does not tell which GPU a row is of; query index or uuid too"
        raise InputError(log.path, problem)
    whole = [rows for rows in rounds if len(rows) == size]
    log.bad += sum(len(rows) for rows in rounds) - size * len(whole)
    if size > 1:
        log.notes.append(
            f"{log.path.name} does not name its {size} GPUs; they are told by the order of its rows"
        )
    return [(place, row) for rows in whole for place, row in enumerate(rows)]


def _rounds(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows between two pauses."""
    pauses = np.diff([row.time for row in rows])
    if not len(pauses):
        return [list(rows)]
    # With one GPU in 32 rows after a pause, a few percent of all are pauses between rounds.
    longest = float(np.quantile(pauses, 1 - 1 / (2 * _MOST_GPUS), method="lower"))
    edges = [0, *(np.flatnonzero(pauses > _ROUND * longest) + 1).tolist(), len(rows)]
    return [list(rows[a:b]) for a, b in pairwise(edges)]
