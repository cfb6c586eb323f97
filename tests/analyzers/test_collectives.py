"""Collectives are matched across ranks: which kernels are one, and when the last rank came."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.collectives import Collectives, match_collectives
from gputrace.analyzers.communicators import operation_of
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.api import Report
from gputrace.model.communication import CollectiveTotals
from gputrace.model.events import UNKNOWN, Events, Kind
from gputrace.model.trace import Process, Session
from gputrace.readers.in_memory import MemoryTrace
from gputrace.readers.registry import open_trace
from tests.helpers.examples import few
from tests.helpers.per_gpu import gpus_of, handmade
from tests.synthetic import Plan, Recording, simulate, write_kineto, write_nsys

MS = 1_000_000
ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"

Times = list[tuple[int, int]]
"""Starts and ends."""


def matched(*ranks: Times, name: str = ALLREDUCE, world: int | None = None) -> Collectives:
    """The collectives of ranks that ran one kernel at these times."""
    lanes = [lane(rank, times) for rank, times in enumerate(ranks)]
    session = Session(world_size=world)
    parts, processes = [own.events for own in lanes], [Process(1, rank=0) for _ in lanes]
    trace = MemoryTrace(Path("made"), "kineto", parts, [name], processes, session=session)
    return match_collectives(handmade(trace, lanes))


def lane(rank: int, times: Times) -> GpuOperations:
    start, end = np.array(times, np.int64).reshape(-1, 2).T
    columns = {"start": start, "end": end, "kind": np.full(len(start), Kind.KERNEL)}
    columns |= {"name": np.zeros(len(start)), "process": np.full(len(start), rank)}
    columns |= dict.fromkeys(("bytes", "correlation"), np.full(len(start), UNKNOWN))
    gpu = Gpu(rank, True, rank, 0, rank, True, "", 0, "", ((0, rank),))
    classes = np.full(len(start), OperationClass.COMMUNICATION, np.int8)
    return GpuOperations(gpu, Events(columns), classes)


def rows(found: Collectives, rank: int) -> list[int]:
    """The instance of each kernel of a rank, in order of its kernels."""
    mine = found.lane == rank
    numbers: list[int] = found.instance[mine][np.argsort(found.row[mine])].tolist()
    return numbers


def test_waiting_ends_when_the_last_rank_comes() -> None:
    found = matched([(10, 100), (200, 300)], [(60, 101), (150, 299)])
    assert found.operations == ("AllReduce",)
    assert found.instance.tolist() == [0, 0, 1, 1]
    assert found.arrival.tolist() == [60, 60, 200, 200]
    assert found.wait.tolist() == [50, 0, 0, 50]
    assert found.joint.all()


def regular(count: int, first: int = 0) -> Times:
    """All-reduces of 5 ms, 20 ms apart."""
    return [(i * 20 * MS, i * 20 * MS + 5 * MS) for i in range(first, first + count)]


def test_a_rank_that_lacks_the_first_ones_is_matched_by_time() -> None:
    found = matched(regular(10), regular(7, first=3))
    assert rows(found, 0) == list(range(10))
    assert rows(found, 1) == list(range(3, 10))
    known = found.known[found.lane == 0].tolist()
    assert known == [False] * 3 + [True] * 7


def test_ranks_that_lack_the_first_and_the_last_are_not_taken_for_each_other() -> None:
    """Equally many rows, but one rank's window began later."""
    found = matched(regular(10), regular(10, first=1))
    assert rows(found, 0) == list(range(10))
    assert rows(found, 1) == list(range(1, 11))
    assert np.count_nonzero(found.known) == 18


def test_a_row_that_was_lost_in_the_middle_shifts_no_other() -> None:
    whole = regular(20)
    found = matched(whole, whole[:8] + whole[9:])
    assert rows(found, 1) == [i for i in range(20) if i != 8]


def test_communicators_of_their_own_are_kept_apart_by_their_ends() -> None:
    early = regular(12)
    late = [(start + 2 * MS, end + 2 * MS) for start, end in early]
    found = matched(early, early, late, late)
    groups = [set(found.lane[found.instance == i].tolist()) for i in range(24)]
    assert groups.count({0, 1}) == groups.count({2, 3}) == 12
    assert found.known.all()
    assert not found.wait.any()


def test_the_root_of_a_broadcast_may_leave_before_others_come() -> None:
    root, early, late = [(10, 14)], [(2, 20)], [(30, 35)]
    found = matched(root, early, late, name=BROADCAST)
    assert found.instance.tolist() == [0, 0, 0]
    assert found.wait.tolist() == [0, 8, 0]


def test_a_rank_that_was_not_recorded_may_be_the_last() -> None:
    assert not matched(regular(5), regular(5), world=3).known.any()
    assert matched(regular(5), regular(5), world=2).known.all()
    assert not matched(regular(5)).known.any()


def test_what_overlaps_nothing_stands_alone() -> None:
    found = matched(regular(5), [(s + 10 * MS, e + 10 * MS) for s, e in regular(5)])
    assert len(set(found.instance.tolist())) == 10
    assert not found.known.any()


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(2, 9),
    count=st.integers(6, 60),
    missing=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=9, max_size=9),
)
def test_any_cut_of_any_arrivals_is_matched(
    seed: int, ranks: int, count: int, missing: list[tuple[int, int]]
) -> None:
    """Each rank comes in its own time, all leave within 5 µs, and windows are cut anywhere."""
    random = np.random.default_rng(seed)
    begin = np.cumsum(random.integers(300_000, 3 * MS, count))
    starts = begin + random.integers(0, 200_000, (ranks, count))
    ends = starts.max(axis=0) + random.integers(20_000, 80_000, count)
    leave = ends + random.integers(0, 5_000, (ranks, count))
    cuts = [slice(first, count - last) for first, last in missing[:ranks]]
    times = [list(zip(starts[r][c], leave[r][c], strict=True)) for r, c in enumerate(cuts)]
    found = matched(*times)
    true = np.concatenate([np.arange(count)[cut] for cut in cuts])
    lanes = np.concatenate([np.full(len(range(count)[c]), r) for r, c in enumerate(cuts)])
    order = np.lexsort((lanes, true))
    _, same = np.unique(true[order], return_inverse=True)
    assert found.instance.tolist() == same.tolist()
    assert found.lane.tolist() == lanes[order].tolist()
    whole = np.bincount(same)[same] == ranks
    assert found.known.tolist() == whole.tolist()
    assert (found.arrival == starts.max(axis=0)[true[order]])[whole].all()


@pytest.fixture(scope="module")
def training() -> Recording:
    plan = Plan(
        steps=12, ranks=4, allreduces=5, slow_rank=2, slow_factor=1.2, validation_after=(6,)
    )
    return simulate(plan)


def test_every_wait_of_a_training_run_is_exact(training: Recording, tmp_path: Path) -> None:
    write_nsys(training, tmp_path / "run.sqlite")
    with open_trace(tmp_path / "run.sqlite") as trace:
        gpus = gpus_of(trace)
        found = match_collectives(gpus)
    assert found.known.all()
    for index, own in enumerate(gpus.operations):
        true = training.collectives[training.collectives["rank"] == own.gpu.rank]
        mine = found.lane == index
        assert np.sort(found.arrival[mine]).tolist() == np.sort(true["arrived"]).tolist()
        assert found.waiting(index).waits.total == int((true["arrived"] - true["start"]).sum())


def test_peer_copies_are_of_both_gpus_and_wait_for_nobody(tmp_path: Path) -> None:
    write_nsys(simulate(Plan(steps=6, gpus_per_process=3)), tmp_path / "run.sqlite")
    with open_trace(tmp_path / "run.sqlite") as trace:
        found = match_collectives(gpus_of(trace))
    assert found.operations == ("PeerCopy",)
    assert set(np.bincount(found.instance).tolist()) == {2}
    assert found.known.all()
    assert not found.wait.any()
    assert (found.bytes > 0).all()


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        (ALLREDUCE, "AllReduce"),
        (BROADCAST, "Broadcast"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "AllReduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", "ReduceScatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "Reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", "SendRecv"),
        ("void vllm::cross_device_reduce_1stage<__half, 2>(RankData*)", "AllReduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgs)", "ncclDevKernel_Generic_4"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16>()", "AllReduce"),
    ],
)
def test_an_operation_is_known_by_its_kernel(kernel: str, operation: str) -> None:
    assert operation_of(kernel) == operation


@pytest.mark.parametrize("seed", range(few(2)))
def test_the_wait_is_the_exposed_part_of_communication_before_the_last_rank_comes(
    seed: int, tmp_path: Path
) -> None:
    late = Plan(seed=seed, ranks=3, allreduces=3, late_host_rank=seed % 3, late_host_ns=3 * MS)
    recording = simulate(late)
    write_nsys(recording, tmp_path / "run.sqlite")
    with gputrace.open(tmp_path / "run.sqlite") as trace:
        report = trace.analyze()
    assert [s.phase for s in report.step_list].count("steady") == 3 * (20 - 3)
    for row in report.breakdown:
        truth = recording.truth.breakdown[row.gpu or 0]
        assert row.communication_wait_ns == truth["communication_wait"]
        steps = [s for s in report.step_list if s.rank == row.rank and s.phase == "steady"]
        assert sum(s.communication_wait_ns or 0 for s in steps) == row.communication_wait_ns


def test_what_one_rank_of_several_waits_for_is_not_known(tmp_path: Path) -> None:
    recording = simulate(Plan(steps=8, ranks=2, allreduces=2))
    paths = write_kineto(recording, tmp_path)
    with gputrace.open(paths[0]) as trace:
        alone = trace.analyze()
    assert alone.breakdown[0].of("communication") > 0
    assert alone.breakdown[0].communication_wait_ns is None
    assert {s.communication_wait_ns for s in alone.step_list} == {None}
    with gputrace.open(*paths) as trace:
        both = trace.analyze()
    assert None not in {row.communication_wait_ns for row in both.breakdown}


def test_without_communication_nothing_waits(tmp_path: Path) -> None:
    write_nsys(simulate(Plan(steps=8)), tmp_path / "run.sqlite")
    with gputrace.open(tmp_path / "run.sqlite") as trace:
        assert [row.communication_wait_ns for row in trace.analyze().breakdown] == [0]


def named(report: Report, operation: str) -> CollectiveTotals:
    (found,) = [total for total in report.collectives if total.operation == operation]
    return found


def test_collectives_are_told_by_operation_with_wait_and_transfer(
    training: Recording, tmp_path: Path
) -> None:
    write_nsys(training, tmp_path / "run.sqlite")
    with gputrace.open(tmp_path / "run.sqlite") as trace:
        report = trace.analyze()
    found = named(report, "AllReduce")
    steps = report.steps.steady_count
    assert (found.count, found.steps) == (5 * steps, steps)
    assert (found.gpus, found.ranks) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert not found.one_process
    assert (found.bytes, found.bus_bandwidth) == (None, None)
    true = training.collectives[training.collectives["start"] >= report.step_list[3].start_ns]
    transfer = int((true["end"] - true["arrived"]).sum())
    assert found.transfer_total_ns == pytest.approx(transfer / (4 * steps), rel=0.05)
    waits = sum(s.communication_wait_ns or 0 for s in report.step_list if s.phase == "steady")
    assert (found.wait_total_ns or 0) * 4 * steps >= waits
    assert found.exposed_ns <= found.total_ns
    assert "AllReduce, data, gpus 0-3" in report.render("text")
    assert "AllReduce, data, gpus 0-3" in report.render("markdown")


def test_copies_between_the_gpus_of_one_process_show_their_speed(tmp_path: Path) -> None:
    write_nsys(simulate(Plan(steps=6, gpus_per_process=3)), tmp_path / "run.sqlite")
    with gputrace.open(tmp_path / "run.sqlite") as trace:
        found = named(trace.analyze(), "PeerCopy")
    assert found.one_process
    assert (found.gpus, found.wait_ns) == ((0, 1, 2), 0)
    assert found.bus_bandwidth == found.algorithm_bandwidth
    assert 30e9 < (found.bus_bandwidth or 0) < 41e9  # 40 bytes a nanosecond after 2 µs


def kineto(rank: int, start: int, args: str) -> str:
    """A rank's file with one all-reduce that ends at 1,000 µs."""
    event = (
        f'{{"ph": "X", "cat": "kernel", "name": "{ALLREDUCE}", "pid": {rank}, "tid": 7, '
        f'"ts": {start}, "dur": {1000 - start}, "args": {{"device": {rank}, "stream": 7, {args}}}}}'
    )
    run = f'{{"backend": "nccl", "rank": {rank}, "world_size": 4}}'
    around = f'"schemaVersion": 1, "distributedInfo": {run}, "deviceProperties": []'
    around += f', "host_name": "node0", "baseTimeNanoseconds": {10**18}'
    return f'{{{around}, "traceEvents": [{event}]}}'


def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path: Path) -> None:
    """An all-reduce of 4 MB in 400 µs: 10 GB/s, and 2 * 3 / 4 of that on the bus of 4 ranks."""
    size = '"In msg nelems": 1000000, "Out msg nelems": 1000000, "dtype": "Float", "Group size": 4'
    paths = []
    for rank, start in enumerate((100, 200, 600, 300)):
        paths.append(tmp_path / f"rank{rank}.pt.trace.json")
        paths[-1].write_text(kineto(rank, start, size))
    with gputrace.open(*paths) as trace:
        found = named(trace.analyze(), "AllReduce")
    assert found.bytes == 4_000_000
    assert found.transfer_ns == 400_000
    assert (found.algorithm_bandwidth, found.bus_bandwidth) == (10**10, 15 * 10**9)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ('"In msg nelems": 10, "Out msg nelems": 40, "dtype": "BFloat16"', 80),
        ('"In msg nelems": 40, "Out msg nelems": 10, "dtype": "Float8_e4m3fn"', 40),
        ('"In msg nelems": 40, "dtype": "Float99x"', None),
        ('"In msg nelems": "many", "dtype": "Float"', None),
        ('"In msg nelems": 4, "dtype": 7', None),
        (f'"In msg nelems": {1 << 62}, "dtype": "Double"', None),
    ],
)
def test_the_size_of_a_message_is_its_larger_side(
    args: str, size: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(kineto(0, 100, args))
    with gputrace.open(path) as trace:
        assert named(trace.analyze(), "AllReduce").bytes == size
