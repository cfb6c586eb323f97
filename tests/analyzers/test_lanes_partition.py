"""Every nanosecond of a GPU belongs to one class, the first that applies; checked one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.kernel_names import is_communication
from gputrace.analyzers.lanes import Timeline, build_timeline
from gputrace.analyzers.operations import OperationClass, read_operations
from gputrace.analyzers.pipeline import analyze
from gputrace.model.events import Kind
from gputrace.model.options import Options, Window
from tests.helpers.memory_traces import MemoryTrace, Row

CLASSES: Final = ("compute", "communication", "h2d", "other_copy", "memset", "idle")
GEMM, NCCL = 0, 1
NAMES: Final = ("gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)")
CLASS_OF: Final = {
    (Kind.KERNEL, GEMM): 0,
    (Kind.GRAPH, GEMM): 0,
    (Kind.KERNEL, NCCL): 1,
    (Kind.COPY_PEER, GEMM): 1,
    (Kind.COPY_H2D, GEMM): 2,
    (Kind.COPY_D2H, GEMM): 3,
    (Kind.COPY_D2D, GEMM): 3,
    (Kind.COPY_OTHER, GEMM): 3,
    (Kind.MEMSET, GEMM): 4,
}
GPUS: Final = 3
CARDS: Final = {(process, ordinal): ordinal for process in range(2) for ordinal in range(GPUS)}
"""Both processes see all cards, by the same numbers."""


@st.composite
def operations(draw: st.DrawFn) -> Row:
    kind, name = draw(st.sampled_from(sorted(CLASS_OF)))
    start = draw(st.integers(1, 30))
    source, destination = draw(st.tuples(st.integers(0, GPUS - 1), st.integers(0, GPUS - 1)))
    return {
        "start": start,
        "end": start + draw(st.integers(0, 10)),
        "kind": kind,
        "name": name,
        "process": draw(st.integers(0, 1)),
        "device": draw(st.sampled_from([source, destination])),
        "stream": draw(st.integers(7, 9)),
        "source_device": source,
        "destination_device": destination,
    }


ROWS = st.lists(operations(), min_size=1, max_size=12)
"""Many streams; nested, touching, identical and empty operations; classes mixed."""
WINDOWS = st.tuples(st.integers(-5, 45), st.integers(1, 30)).map(lambda w: Window(w[0], sum(w)))


def gpus_of(row: Row) -> set[int]:
    peers = {row["source_device"], row["destination_device"]}
    return peers if row["kind"] == Kind.COPY_PEER else {row["device"]}


def counted(rows: Sequence[Row], gpu: int, window: Window) -> list[int]:
    """Nanoseconds of the window by class, counted one after another."""
    totals = [0] * len(CLASSES)
    mine = [row for row in rows if gpu in gpus_of(row)]
    for time in range(*window):
        running = [row for row in mine if row["start"] <= time < row["end"]]
        classes = [CLASS_OF[Kind(row["kind"]), row["name"]] for row in running]
        totals[min(classes, default=len(CLASSES) - 1)] += 1
    return totals


def span(rows: Sequence[Row], gpu: int) -> Window:
    mine = [row for row in rows if gpu in gpus_of(row)]
    return Window(min(row["start"] for row in mine), max(row["end"] for row in mine))


def timelines(rows: Sequence[Row], window: Window | None = None) -> dict[int, Timeline]:
    of_gpus = read_operations(MemoryTrace(rows, NAMES, CARDS))
    return {found.gpu.gpu: build_timeline(found, window) for found in of_gpus}


@given(ROWS)
def test_the_classes_of_a_span_are_those_counted_one_by_one(rows: list[Row]) -> None:
    found = timelines(rows)
    assert found.keys() == set().union(*map(gpus_of, rows))
    for gpu, timeline in found.items():
        assert timeline.window == span(rows, gpu)
        assert list(timeline.shares.values()) == counted(rows, gpu, timeline.window)


@given(ROWS, st.lists(WINDOWS, min_size=1))
def test_any_windows_can_be_partitioned_at_once(rows: list[Row], windows: list[Window]) -> None:
    for gpu, timeline in timelines(rows).items():
        starts, ends = zip(*windows, strict=True)
        found = timeline.split(starts, ends).tolist()
        assert found == [counted(rows, gpu, window) for window in windows]


@given(ROWS, st.lists(st.integers(0, 9), min_size=2))
def test_adjacent_windows_add_up_to_the_whole(rows: list[Row], lengths: list[int]) -> None:
    edges = list(accumulate(lengths, initial=-2))
    windows = list(pairwise(edges))
    for timeline in timelines(rows).values():
        parts = timeline.split([start for start, _ in windows], [end for _, end in windows])
        whole = timeline.split([edges[0]], [edges[-1]])
        assert parts.sum(axis=0).tolist() == whole[0].tolist()
        assert parts.sum(axis=1).tolist() == [end - start for start, end in windows]
        assert (parts >= 0).all()


@given(ROWS, st.none() | WINDOWS)
def test_gaps_and_busy_time_share_the_window(rows: list[Row], window: Window | None) -> None:
    for timeline in timelines(rows, window).values():
        inside = timeline.busy.clip(*timeline.window)
        assert timeline.gaps.total + inside.total == timeline.window.end - timeline.window.start
        assert timeline.gaps.total == timeline.shares["idle"]
        assert len(timeline.gaps.intersection(timeline.busy)) == 0


@given(ROWS, WINDOWS)
def test_a_window_narrows_the_span_and_never_widens_it(rows: list[Row], window: Window) -> None:
    for gpu, timeline in timelines(rows, window).items():
        whole = span(rows, gpu)
        start, end = max(whole.start, window.start), min(whole.end, window.end)
        assert sum(timeline.shares.values()) == max(end - start, 0)
        assert list(timeline.shares.values()) == counted(rows, gpu, Window(start, end))


@given(ROWS.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows))))
def test_the_order_of_rows_means_nothing(orders: tuple[list[Row], list[Row]]) -> None:
    first, second = (timelines(rows) for rows in orders)
    assert {gpu: found.shares for gpu, found in first.items()} == {
        gpu: found.shares for gpu, found in second.items()
    }


@given(ROWS)
def test_each_class_by_itself_is_as_long_as_its_share(rows: list[Row]) -> None:
    for timeline in timelines(rows).values():
        own = [timeline.of_class(which).total for which in OperationClass]
        assert own == list(timeline.shares.values())[:5]
        assert sum(own) == timeline.busy.total


@given(ROWS, st.none() | WINDOWS)
def test_the_analysis_reports_the_partition(rows: list[Row], window: Window | None) -> None:
    touched = {
        gpu: found for gpu, found in timelines(rows, window).items() if sum(found.shares.values())
    }
    if not touched:
        return
    analysis = analyze(MemoryTrace(rows, NAMES, CARDS), Options(window=window, gaps=10_000))
    reported = {total.gpu: total for total in analysis.gpus if total.span_ns}
    assert reported.keys() == touched.keys()
    for gpu, timeline in touched.items():
        shares = [getattr(reported[gpu], f"{name}_ns") for name in CLASSES]
        assert shares == list(timeline.shares.values())
        assert reported[gpu].span_ns == sum(shares)
    # But for GPUs that are only an end of another's copies.
    listed = {row.gpu for row in analysis.breakdown}
    gaps = [found.gaps.total for gpu, found in touched.items() if gpu in listed]
    assert analysis.gaps.total_ns == sum(gaps)
    assert sum(gap.length_ns for gap in analysis.gaps.largest) == analysis.gaps.total_ns
    assert sum(analysis.gaps.by_cause.values()) == analysis.gaps.total_ns


def test_kernels_and_copies_that_touch_the_window_are_counted() -> None:
    rows: list[Row] = [
        {"start": 0, "end": 10, "kind": Kind.KERNEL, "name": GEMM, "device": 0},
        {"start": 10, "end": 20, "kind": Kind.COPY_D2H, "name": GEMM, "device": 0},
        {"start": 20, "end": 30, "kind": Kind.GRAPH, "name": GEMM, "device": 0},
        {"start": 30, "end": 40, "kind": Kind.KERNEL, "name": NCCL, "device": 0},
    ]
    whole, part = timelines(rows)[0], timelines(rows, Window(5, 20))[0]
    assert (whole.kernels, whole.copies, whole.opaque_graphs) == (2, 1, 1)
    assert (part.kernels, part.copies, part.opaque_graphs) == (1, 1, 0)


def test_times_of_a_clock_since_1970_lose_no_nanosecond() -> None:
    now = 1_800_000_000 * 10**9
    rows: list[Row] = [
        {"start": now, "end": now + 7, "kind": Kind.KERNEL, "name": GEMM, "device": 0},
        {"start": now + 5, "end": now + 8, "kind": Kind.COPY_H2D, "name": GEMM, "device": 0},
        {"start": now + 10, "end": now + 11, "kind": Kind.MEMSET, "name": GEMM, "device": 0},
    ]
    assert list(timelines(rows)[0].shares.values()) == [7, 0, 1, 0, 1, 2]
    assert timelines(rows)[0].split([now], [now + 1]).dtype == np.int64


def test_kernels_of_collective_libraries_are_communication() -> None:
    for name in (
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_Sum_f32",
        "_Z40ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
        "void mscclpp::allreduce<float>()",
        "nvshmemi_proxy_barrier",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 8>()",
    ):
        assert is_communication(name), name


def test_kernels_that_only_mention_one_are_computation() -> None:
    for name in (
        "gemm",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>()",
        "void at::native::vectorized_elementwise_kernel<4, ncclDevKernel_AllReduce>()",
        "",
        "<name 17>",
        "void cunn_SoftMaxForward<8, float>()",
    ):
        assert not is_communication(name), name
