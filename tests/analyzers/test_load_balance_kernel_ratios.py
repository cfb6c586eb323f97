"""How fast each GPU runs what others run too, apart from how much it has to run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.breakdown import list_steps, measured
from gputrace.analyzers.load_balance import KernelRatio, _sorted, kernel_ratios
from gputrace.readers.open import open_traces
from tests.helpers.exports import KERNEL, global_id
from tests.helpers.handmade import MS, US, Run
from tests.helpers.per_gpu import gpus_with_lanes
from tests.helpers.rank_files import Node, write_parts
from tests.synthetic import Plan, simulate, write_nsys


def ratios(*paths: Path, stepless: bool = False) -> list[KernelRatio]:
    """Over the steady steps, or over everything."""
    with open_traces(paths) as trace:
        gpus, found = gpus_with_lanes(trace)
        all_steps = list_steps(gpus, gpus.lanes, found, None)
        steps = () if stepless else measured(gpus, gpus.lanes, all_steps, found)
        assert stepless or steps
        return list(kernel_ratios(gpus, steps))


def plan(path: Path, plan: Plan) -> Path:
    write_nsys(simulate(plan), path)
    return path


def by_hand(path: Path, *programs: dict[str, int]) -> Path:
    """Processes on a GPU each that run named kernels, of so many ns, 10 times each in turn."""
    runs = [Run()]
    runs += [Run(runs[0].export, pid=101 + n, device=n + 1) for n in range(len(programs) - 1)]
    for run, kernels in zip(runs, programs, strict=True):
        for _ in range(10):
            for name, length in kernels.items():
                run.kernel(length, name)
            run.wait(MS)
    runs[0].export.write(path)
    return path


def all_reduce(run: Run, start: int, end: int) -> None:
    """A kernel of NCCL on a stream of its own."""
    name = run.export.string("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)")
    place = {"deviceId": run.device, "contextId": 1, "streamId": 9, "correlationId": 0}
    process = global_id(100 + run.device)
    values = {"demangledName": name, "shortName": name, "globalPid": process}
    run.export.add(KERNEL, start=start, end=end, **place, **values)


def test_equal_gpus_have_equal_ratios(tmp_path: Path) -> None:
    found = ratios(plan(tmp_path / "t", Plan(steps=12, ranks=4, allreduces=2)))
    assert [one.gpu.gpu for one in found] == [0, 1, 2, 3]
    assert all(1 <= one.ratio < 1.01 for one in found)
    assert [one.own_ns for one in found] == [0, 0, 0, 0]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_gpu_whose_kernels_take_a_fifth_longer_has_1_2(tmp_path: Path, ranks: int) -> None:
    slow = Plan(steps=12, ranks=ranks, allreduces=2, slow_rank=1, slow_factor=1.2)
    found = ratios(plan(tmp_path / "t", slow))
    assert found[1].ratio == pytest.approx(1.2, rel=0.02)
    assert all(one.ratio < 1.01 for one in found if one.gpu.rank != 1)
    assert found[1].compared_ns * (1 - 1 / found[1].ratio) == pytest.approx(
        found[1].compared_ns / 6, rel=0.1
    )


def test_kernels_that_only_one_gpu_runs_are_more_work_and_no_slower_work(tmp_path: Path) -> None:
    """Figures by hand: 10 times 30 µs and 10 µs; the other also 10 times 50 µs."""
    same = {"gemm": 30 * US, "relu": 10 * US}
    found = ratios(by_hand(tmp_path / "t", same, same | {"loss": 20 * US}), stepless=True)
    assert [one.ratio for one in found] == [1.0, 1.0]
    assert [one.compared_ns for one in found] == [400 * US, 400 * US]
    assert [one.own_ns for one in found] == [0, 200 * US]
    assert [one.launches for one in found] == [20, 20]


def test_launches_beyond_the_number_of_the_others_are_more_work(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "t", {"gemm": 30 * US}, {"gemm": 30 * US})
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 0 AND rowid IN (SELECT rowid "
            "FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 0 ORDER BY start LIMIT 4 OFFSET 3)"
        )
    found = ratios(path, stepless=True)
    assert [one.compared_ns for one in found] == [180 * US, 180 * US]
    assert [one.own_ns for one in found] == [0, 120 * US]


def test_a_kernel_counts_by_its_time(tmp_path: Path) -> None:
    """Many short kernels that are slower do not outweigh a long one that is not."""
    fast = {"gemm": 900 * US, **{f"short{n}": 10 * US for n in range(5)}}
    slow = {name: 2 * length if length < MS / 2 else length for name, length in fast.items()}
    found = ratios(by_hand(tmp_path / "t", fast, slow), stepless=True)
    assert [one.ratio for one in found] == [1.0, 1.0]


def test_the_quartiles_tell_a_clock_from_larger_batches(tmp_path: Path) -> None:
    """A clock slows all kernels alike; a larger batch leaves the optimizer's as they are."""
    usual = {"gemm": 60 * US, "adam": 40 * US}
    clock = by_hand(tmp_path / "a", usual, {"gemm": 72 * US, "adam": 48 * US})
    batch = by_hand(tmp_path / "b", usual, {"gemm": 120 * US, "adam": 40 * US})
    _, slow = ratios(clock, stepless=True)
    assert slow.high / slow.low == pytest.approx(1.0)
    _, large = ratios(batch, stepless=True)
    assert (large.low, large.ratio, large.high) == pytest.approx((1.5, 2.0, 2.0))


def test_kernels_beside_communication_do_not_count_where_others_are(tmp_path: Path) -> None:
    """A collective that waits slows what runs beside it: 40 µs instead of 30 on the first GPU."""
    first = Run()
    second = Run(first.export, pid=101, device=1)
    for run, beside in ((first, 40 * US), (second, 30 * US)):
        for _ in range(10):
            run.kernel(20 * US, "forward")
            run.kernel(beside, "backward")
            end = run.gpu_free[run.device]
            all_reduce(run, end - beside, end)
            run.wait(MS)
    first.export.write(tmp_path / "t")
    assert [one.ratio for one in ratios(tmp_path / "t", stepless=True)] == [1.0, 1.0]


def test_gpus_that_run_different_kernels_are_not_compared(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "t", {"first": 30 * US}, {"second": 30 * US})
    assert ratios(path, stepless=True) == []


def test_a_gpu_alone_is_not_compared(tmp_path: Path) -> None:
    assert ratios(plan(tmp_path / "t", Plan(steps=12))) == []


def test_the_files_of_several_machines_name_the_same_kernels(tmp_path: Path) -> None:
    recording = simulate(Plan(steps=12, ranks=2, allreduces=2, slow_rank=1, slow_factor=1.5))
    nodes = [Node("node0", (0,)), Node("node1", (1,), began_ns=5_000_000)]
    paths = write_parts(recording, tmp_path / "parts", nodes)
    with closing(sqlite3.connect(paths[1])) as database, database:
        for table, columns in (("KERNEL", ("demangledName", "shortName", "mangledName")),
                               ("RUNTIME", ("nameId",))):  # fmt: skip
            for column in columns:
                database.execute(
                    f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET {column} = {column} + 5000"
                )
        database.execute("UPDATE StringIds SET id = id + 5000")
    found = ratios(*paths)
    assert [round(one.ratio, 2) for one in found] == [1.0, 1.5]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 30), st.booleans())))
def test_launches_too_long_to_pack_with_their_names_are_in_the_same_order(
    rows: list[tuple[int, int, int, bool]],
) -> None:
    texts, places, lengths, free = np.array(rows, np.int64).reshape(-1, 4).T
    keys, packed, _ = _sorted(texts, places, lengths, free == 1)
    alike, apart, _ = _sorted(texts, places, lengths + (1 << 60), free == 1)
    expected = sorted((text << 32 | place, length) for text, place, length, _ in rows)
    assert list(zip(keys.tolist(), packed.tolist(), strict=True)) == expected
    assert list(zip(alike.tolist(), (apart - (1 << 60)).tolist(), strict=True)) == expected
