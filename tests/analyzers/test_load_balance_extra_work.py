"""Cost of extra work: the time in which one GPU does it and no other does any of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.gpu_shards import PerGpu
from gputrace.analyzers.lanes import Lane
from gputrace.analyzers.load_balance import GpuWork, alone, find_works, sort_of
from gputrace.model.events import Kind
from gputrace.model.intervals import Intervals, union
from tests.helpers.memory_traces import MemoryTrace, Row
from tests.helpers.per_gpu import gpus_with_lanes

GEMM, ADAM, NCCL = 0, 1, 2
NAMES: Final = ("gemm", "adam", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)")
PEER: Final = sort_of("peer")
SORTS: Final = {
    (Kind.KERNEL, GEMM): 0,
    (Kind.KERNEL, ADAM): 1,
    (Kind.COPY_H2D, GEMM): sort_of("h2d"),
    (Kind.COPY_D2H, GEMM): sort_of("d2h"),
    (Kind.COPY_PEER, GEMM): PEER,
}
"""The sort of work of what counts; kernels that communicate and memsets are none."""
OTHERS: Final = ((Kind.KERNEL, NCCL), (Kind.MEMSET, GEMM))

Stretch = tuple[int, int]


@dataclass(frozen=True)
class Planted:
    """A GPU by hand, in few nanoseconds."""

    operations: list[tuple[tuple[Kind, int], Stretch]]
    windows: list[Stretch]
    """The measured time."""
    feeding: list[Stretch]
    """When it waits for data of its own."""
    extra: dict[int, int]
    """Nanoseconds of its extra work, by sort."""

    def counted(self) -> list[tuple[int, range]]:
        """The sort and the time of each operation that starts in the measured time."""
        measured = nanoseconds(self.windows)
        return [
            (SORTS[what], range(*time))
            for what, time in self.operations
            if what in SORTS and time[0] in measured
        ]

    def does(self, sorts: Sequence[int]) -> set[int]:
        """The nanoseconds in which it does work of some sorts."""
        return {at for sort, time in self.counted() if sort in sorts for at in time}


def nanoseconds(stretches: Sequence[Stretch]) -> set[int]:
    return {at for stretch in stretches for at in range(*stretch)}


STRETCHES = st.tuples(st.integers(0, 40), st.integers(0, 15)).map(lambda s: (s[0], sum(s)))
GPUS = st.builds(
    Planted,
    st.lists(st.tuples(st.sampled_from([*SORTS, *OTHERS]), STRETCHES), min_size=1, max_size=8),
    st.lists(STRETCHES, max_size=3) | st.just([(0, 60)]),
    st.lists(STRETCHES, max_size=2),
    st.dictionaries(st.sampled_from([*SORTS.values()]), st.integers(1, 60), max_size=3),
)


def made(planted: Sequence[Planted]) -> tuple[PerGpu, list[GpuWork]]:
    """The GPUs, each of a process of its own, and their work in the measured time."""
    rows: list[Row] = [
        {"start": start, "end": end, "kind": kind, "name": name, "process": gpu, "device": 0}
        for gpu, own in enumerate(planted)
        for (kind, name), (start, end) in own.operations
    ]
    gpus, _ = gpus_with_lanes(MemoryTrace(rows, NAMES, {(n, 0): n for n in range(len(planted))}))
    shard = gpus.whole
    lanes = [lane for lane in shard.lanes if isinstance(lane, Lane)]
    shard.take_lanes([with_feeding(*pair) for pair in zip(lanes, planted, strict=True)])
    works = find_works(gpus, gpus.lanes, ())
    return gpus, [
        replace(work, windows=intervals(own.windows), numbers={GEMM: 0, ADAM: 1, NCCL: 2})
        for work, own in zip(works, planted, strict=True)
    ]


def with_feeding(lane: Lane, own: Planted) -> Lane:
    of = {**lane.causes.of, "data_feeding": intervals(own.feeding)}
    return replace(lane, causes=replace(lane.causes, of=of))


def intervals(stretches: Sequence[Stretch]) -> Intervals:
    return union([start for start, _ in stretches], [end for _, end in stretches])


@given(st.lists(GPUS, min_size=1, max_size=4))
def test_extra_work_costs_the_time_in_which_no_other_gpu_has_any(planted: list[Planted]) -> None:
    """A GPU in a collective or a peer copy has none; one that waits for its own data has."""
    gpus, works = made(planted)
    own_sorts = [sort for sort in SORTS.values() if sort != PEER]
    for place, found in enumerate(alone(gpus, works, [own.extra for own in planted])):
        own, others = planted[place], planted[:place] + planted[place + 1 :]
        left = own.does([*own.extra]) & nanoseconds(own.windows)
        for other in others:
            left -= other.does(own_sorts) | nanoseconds(other.feeding)
        assert found == min(len(left), sum(own.extra.values()))
