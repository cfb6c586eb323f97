"""Kernels that the backward pass launches in the order in which the forward pass did.

Activation checkpointing keeps the inputs of blocks and computes the rest anew (T. Chen et al.,
Training Deep Nets with Sublinear Memory Cost, 2016). PyTorch's autograd does that from a thread of
its own.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gputrace.model.events import Mask, is_among

_IN_A_ROW: Final = 6
_DISTINCT: Final = 4
"""Kernels in a row, and how many of them must differ, to be a part of a network that is known when
met again."""
_LEAST_SHARE: Final = 0.1
"""Share of the launches that other threads must have to be a backward pass."""
_MOST_SHARE: Final = 0.9
"""Share of what other threads launch from which they do the same as the first, and nothing else."""
_FACTORS: Final = np.array(
    [0x9E3779B97F4A7C15 ** (2 * n + 1) % 2**64 for n in range(_IN_A_ROW)], np.uint64
)


def launched_again(names: NDArray[Any], threads: NDArray[Any], first: int) -> Mask:
    """Return which launches of other threads repeat a part of what the first thread launches.

    Args:
        names: ids of the kernels' names, thread by thread in the order of launch.
        threads: thread of each.
        first: the thread that launches the forward pass.
    """
    again, is_other = np.zeros(len(names), np.bool_), threads != first
    others = int(np.count_nonzero(is_other))
    if len(names) < _IN_A_ROW or others < _LEAST_SHARE * len(names):
        return again
    parts = sliding_window_view(names, _IN_A_ROW)
    numbers = names.astype(np.uint64)
    summands = (numbers[n : n + len(parts)] * factor for n, factor in enumerate(_FACTORS))
    keys = sum(summands, np.zeros(len(parts), np.uint64)).view(np.int64)
    whole = threads[: len(parts)] == threads[_IN_A_ROW - 1 :]
    forward = np.flatnonzero(whole & ~is_other[: len(parts)])
    backward = np.flatnonzero(whole & is_other[: len(parts)])
    met = backward[is_among(keys[backward], keys[forward])]
    in_order = np.sort(parts[met], axis=1)
    distinct = (in_order[:, 1:] != in_order[:, :-1]).sum(axis=1) + 1
    met = met[distinct >= _DISTINCT]
    for n in range(_IN_A_ROW):
        again[met + n] = True
    return again if np.count_nonzero(again) <= _MOST_SHARE * others else np.zeros_like(again)
