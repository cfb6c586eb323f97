"""Kernels counted on each GPU, and over all: as if every launch were in one place."""

from __future__ import annotations

from itertools import repeat
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.gpu_shards import PerGpu
from gputrace.analyzers.kernels import Counted, count_by_name, forget_counts, medians
from gputrace.model.events import Kind
from gputrace.model.intervals import union
from tests.helpers.memory_traces import MemoryTrace, Row
from tests.helpers.per_gpu import gpus_of

LONGEST: Final = 2**40 - 1
"""Nanoseconds: a kernel that takes longer counts as this long."""
NAMES: Final = 4
Lengths = list[tuple[int, int]]
"""Names of kernels, from 0, and nanoseconds."""

LENGTHS = st.one_of(
    st.sampled_from([0, 1, LONGEST - 1, LONGEST]), st.integers(0, 5), st.integers(0, LONGEST)
)
KERNELS = st.lists(st.tuples(st.integers(0, NAMES - 1), LENGTHS), max_size=25)
RUNS = st.lists(KERNELS, min_size=1, max_size=5)
"""The kernels of each GPU; some have none, and some names are only some GPUs'."""


def id_of(gpu: int, name: int) -> int:
    """Each GPU has name ids of its own, as files have."""
    return gpu * NAMES + name


def counted(run: list[Lengths]) -> tuple[PerGpu, list[Counted]]:
    """Return the GPUs and the counts of each, one that launches no kernel included."""
    rows: list[Row] = []
    for gpu, kernels in enumerate(run):
        place = {"process": gpu, "device": 0, "correlation": -1}
        rows.append({"start": 0, "end": 1, "kind": Kind.MEMSET, "name": 0, **place})
        rows += (
            {"start": at, "end": at + ns, "kind": Kind.KERNEL, "name": id_of(gpu, name), **place}
            for at, (name, ns) in enumerate(kernels)
        )
    cards = {(gpu, 0): gpu for gpu in range(len(run))}
    gpus = gpus_of(MemoryTrace(rows, [""] * (len(run) * NAMES), cards))
    whole = union([0], [max(map(len, run)) + 1])
    codes = [{id_of(gpu, name): name for name in range(NAMES)} for gpu in range(len(run))]
    found = gpus.each(
        count_by_name,
        gpus.operations,
        repeat(whole, len(run)),
        codes,
        repeat(1, len(run)),
        keeps=True,
    )
    return gpus, found


def by_name(kernels: Lengths) -> dict[int, list[int]]:
    """The lengths of the kernels of each name, in order."""
    found: dict[int, list[int]] = {}
    for name, ns in sorted(kernels):
        found.setdefault(name, []).append(ns)
    return found


def lower_median(lengths: list[int]) -> int:
    return sorted(lengths)[(len(lengths) - 1) // 2]


@given(RUNS)
def test_the_median_over_gpus_is_that_of_all_launches_together(run: list[Lengths]) -> None:
    gpus, found = counted(run)
    together = by_name([kernel for kernels in run for kernel in kernels])
    expected = {name: lower_median(lengths) for name, lengths in together.items()}
    assert medians(gpus, gpus.operations, found) == expected


@given(RUNS, st.data())
def test_the_median_over_some_gpus_is_that_of_their_launches(
    run: list[Lengths], data: st.DataObject
) -> None:
    gpus, found = counted(run)
    some = data.draw(st.lists(st.sampled_from(range(len(run))), min_size=1, unique=True))
    together = by_name([kernel for gpu in some for kernel in run[gpu]])
    expected = {name: lower_median(lengths) for name, lengths in together.items()}
    of = [gpus.operations[gpu] for gpu in some]
    assert medians(gpus, of, [found[gpu] for gpu in some]) == expected


@given(RUNS)
def test_each_gpu_counts_its_own(run: list[Lengths]) -> None:
    _, found = counted(run)
    for own, kernels in zip(found, run, strict=True):
        expected = by_name(kernels)
        assert own.code.tolist() == sorted(expected)
        assert own.count.tolist() == [len(expected[name]) for name in own.code.tolist()]
        assert own.total.tolist() == [sum(expected[name]) for name in own.code.tolist()]
        assert own.median.tolist() == [lower_median(expected[name]) for name in own.code.tolist()]
        assert own.kernels == len(kernels)


def test_a_kernel_that_takes_longer_than_can_be_told_is_the_longest() -> None:
    gpus, found = counted([[(0, 2**41)], [(0, 2**42), (0, 3)], [(1, 7), (1, 2**50)]])
    assert medians(gpus, gpus.operations, found) == {0: LONGEST, 1: 7}


def test_nothing_is_kept_once_all_is_known() -> None:
    gpus, _ = counted([[(0, 5)], [(0, 6)]])
    assert any(len(kept) for kept in gpus.whole.kept.values())
    gpus.each(forget_counts, gpus.operations, keeps=True)
    assert all(kept is None for kept in gpus.whole.kept.values())
