"""The generator of synthetic traces is right about what it says it planted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import few
from tests.synthetic import Kind, Plan, Recording, random_plan, simulate, write_nsys
from tests.synthetic.recording import CAUSES, CLASSES
from tests.synthetic.truth import ops_of

PLANS = {
    "async": Plan(steps=8),
    "starved": Plan(steps=8, data_wait_ns=20_000_000, sync_every_step=True),
    "python": Plan(steps=8, data_wait_ns=20_000_000, data_wait="python", input_copies=2),
    "ddp": Plan(steps=8, ranks=4, allreduces=3, late_host_rank=2, late_host_ns=2_000_000),
    "slow": Plan(steps=8, ranks=2, allreduces=2, slow_rank=1, slow_factor=1.4, isolated=True),
    "dataparallel": Plan(steps=8, gpus_per_process=3, data_wait_ns=2_000_000),
    "phases": Plan(
        steps=9, ranks=2, allreduces=1, validation_after=(5,), validation_batches=3,
        validation_on_all=False, checkpoint_after=(5,),
    ),
    "graph": Plan(steps=8, graph=True, sync_every_step=True, first_gpu=2),
    "streams": Plan(steps=8, streams=3, pageable=True, allocs_per_step=5, micro_batches=2),
    "cut": Plan(steps=8, edges_cut=True, copy_stream=True, hiccup_rate=0.3, data_wait_ns=900_000),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(PLANS))
def recording(request: pytest.FixtureRequest) -> Recording:
    return simulate(PLANS[request.param])


def check_truth(recording: Recording) -> None:
    for gpu, partition in recording.truth.partitions.items():
        assert np.all(np.diff(partition.edges) > 0)
        assert np.all(np.diff(partition.classes) != 0)
        ops = ops_of(recording.ops, gpu)
        assert (partition.edges[0], partition.edges[-1]) == (ops["start"].min(), ops["end"].max())
        assert sum(partition.totals().values()) == partition.edges[-1] - partition.edges[0]
    for found in recording.truth.breakdown.values():
        assert min(found.values()) >= 0
        assert sum(found[name] for name in CLASSES) == found["total"]
        assert sum(found[cause] for cause in CAUSES) == found["idle"]
        assert found["communication_wait"] <= found["communication"]


def check_machine(recording: Recording) -> None:
    ops = recording.ops
    assert np.all(ops["start"] > ops["issue"])
    assert np.all(ops["end"] > ops["start"])
    for key in {(int(op["gpu"]), int(op["stream"])) for op in ops[["gpu", "stream"]]}:
        own = ops[(ops["gpu"] == key[0]) & (ops["stream"] == key[1])]
        assert np.all(own["start"][1:] >= own["end"][:-1])
    for table in (recording.api, recording.osrt, ops):
        assert np.all(np.diff(table["start"]) >= 0)


def check_host(recording: Recording) -> None:
    for rank in range(recording.plan.ranks):
        api = recording.api[recording.api["rank"] == rank]
        assert len(np.unique(api["correlation"])) == len(api)
        for thread in np.unique(api["thread"]):
            own = api[api["thread"] == thread]
            assert np.all(own["start"][1:] >= own["end"][:-1])


def test_classes_and_causes_sum(recording: Recording) -> None:
    check_truth(recording)


def test_streams_are_first_in_first_out_and_no_operation_precedes_its_call(
    recording: Recording,
) -> None:
    check_machine(recording)


def test_a_thread_makes_one_call_at_a_time(recording: Recording) -> None:
    check_host(recording)


def test_windows_follow_each_other(recording: Recording) -> None:
    for process in recording.processes:
        windows = [w for w in recording.truth.windows if w.rank == process.rank]
        assert all(a.end == b.start for a, b in pairwise(windows))
        ends = ops_of(recording.ops, process.devices[0][1])["end"]
        assert windows[-1].end == ends.max()
    steps = {w.step for w in recording.truth.windows}
    assert len(steps) >= recording.plan.steps - recording.plan.edges_cut


def test_all_reduces_end_together() -> None:
    recording = simulate(PLANS["ddp"])
    found = recording.of_kind(Kind.COMMUNICATION)
    by_rank = [found["end"][found["rank"] == rank] for rank in range(4)]
    assert all(np.array_equal(by_rank[0], ends) for ends in by_rank)
    assert len(by_rank[0]) == 8 * 3
    last = recording.collectives["arrived"] + recording.plan.allreduce_ns // 2
    assert np.all(recording.collectives["end"] > last)


@pytest.mark.parametrize("kind", ["os_wait", "python"])
def test_a_data_wait_shows_only_where_the_gpu_has_drained(kind: str) -> None:
    wait = 3_000_000
    ahead = simulate(Plan(data_wait_ns=wait, data_wait=kind))  # type: ignore[arg-type]
    waiting = simulate(Plan(data_wait_ns=wait, data_wait=kind, sync_every_step=True))  # type: ignore[arg-type]
    hidden, shown = ahead.truth.breakdown[0], waiting.truth.breakdown[0]
    assert hidden["host_data"] > 0.9 * wait * hidden["steps"]
    assert hidden["data_feeding"] < 0.01 * hidden["total"]
    assert shown["data_feeding"] == pytest.approx(wait * shown["steps"], rel=0.05)


@pytest.mark.parametrize("data_wait_ns", [0, 40_000])
@pytest.mark.parametrize("sync", [False, True])
def test_the_truth_is_what_painting_every_nanosecond_gives(data_wait_ns: int, sync: bool) -> None:
    recording = simulate(
        Plan(
            steps=6, warmup_steps=1, ranks=2, allreduces=2, allreduce_ns=9_000, kernel_ns=4_000,
            kernels_per_step=30, h2d_ns=12_000, allocs_per_step=3, alloc_ns=9_000, streams=2,
            data_wait_ns=data_wait_ns, sync_every_step=sync,
        )
    )  # fmt: skip
    for rank in (0, 1):
        painted = paint(recording, rank)
        found = recording.truth.breakdown[rank]
        names = [*CLASSES[:-1], *CAUSES]
        assert {name: found[name] for name in names} == {
            name: int((painted == index).sum()) for index, name in enumerate(names)
        }


def paint(recording: Recording, rank: int) -> npt.NDArray[np.int8]:
    """The class or cause of every ns of the steady steps, one operation and state at a time."""
    ops = recording.ops[recording.ops["rank"] == rank]
    base, length = int(ops["start"].min()), int(np.ptp(np.append(ops["start"], ops["end"])))
    canvas = np.full(length, -1, np.int8)
    priority = (Kind.MEMSET, Kind.D2H, Kind.H2D, Kind.COMMUNICATION, Kind.KERNEL)
    for colour, kind in zip((4, 3, 2, 1, 0), priority, strict=True):
        for op in ops[ops["kind"] == kind]:
            canvas[op["start"] - base : op["end"] - base] = colour
    gaps = np.flatnonzero(np.diff(np.concatenate(([0], canvas == -1, [0])))).reshape(-1, 2)
    states = recording.states[recording.states["rank"] == rank]
    for start, end in gaps:
        issue = int(ops["issue"][ops["start"] == end + base][0]) - base
        canvas[start:end] = 8 if issue > start else 9
        for state in states:
            low, high = max(state["start"] - base, start), min(state["end"] - base, issue, end)
            canvas[low : max(low, high)] = 5 + state["state"]
    steady = [w for w in recording.truth.windows if w.rank == rank and w.phase == "steady"]
    return np.concatenate([canvas[w.start - base : w.end - base] for w in steady])


def test_a_late_host_makes_the_others_wait() -> None:
    plan = Plan(ranks=2, allreduces=1, late_host_rank=1, late_host_ns=4_000_000,
                sync_every_step=True)  # fmt: skip
    early, late = (simulate(plan).truth.breakdown[gpu] for gpu in (0, 1))
    assert early["communication_wait"] > 3_000_000 * early["steps"]
    assert late["launch"] > 3_000_000 * late["steps"]


def test_cut_edges_leave_partial_windows() -> None:
    windows = simulate(PLANS["cut"]).truth.windows
    assert [w.whole for w in windows] == [False] + [True] * (len(windows) - 2) + [False]


@pytest.mark.parametrize("name", ["ddp", "dataparallel", "graph", "streams"])
def test_the_file_holds_every_row(name: str, tmp_path: Path) -> None:
    recording = simulate(PLANS[name])
    write_nsys(recording, tmp_path / "a.sqlite", nvtx=("step", "data", "nccl"))
    expected = {
        "CUPTI_ACTIVITY_KIND_KERNEL": recording.kernels,
        "CUPTI_ACTIVITY_KIND_MEMCPY": recording.copies,
        "CUPTI_ACTIVITY_KIND_MEMSET": recording.memsets,
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": recording.graphs,
        "CUPTI_ACTIVITY_KIND_RUNTIME": recording.api,
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": recording.sync,
        "OSRT_API": recording.osrt,
        "NVTX_EVENTS": recording.nvtx,
    }
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as file:
        tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
        for table, rows in expected.items():
            assert (table in tables) == (len(rows) > 0), table
            if len(rows):
                found = file.execute(
                    f"SELECT count(*), sum(end - start) FROM {table} WHERE end NOT NULL"
                ).fetchone()
                assert found == (len(rows), int((rows["end"] - rows["start"]).sum()))
        joined = file.execute(
            "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN CUPTI_ACTIVITY_KIND_RUNTIME r"
            " ON k.correlationId = r.correlationId AND r.globalTid & ~0xFFFFFF = k.globalPid"
        )
        assert joined.fetchone() == (len(recording.kernels),)


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_nsys(simulate(PLANS["ddp"]), tmp_path / folder / "run.sqlite", shuffle=True)
    files = [(tmp_path / folder / "run.sqlite").read_bytes() for folder in ("a", "b")]
    assert files[0] == files[1]


def test_shuffled_rows_are_the_same_rows(tmp_path: Path) -> None:
    recording = simulate(PLANS["phases"])
    rows = []
    for shuffle in (False, True):
        path = tmp_path / f"{shuffle}.sqlite"
        write_nsys(recording, path, shuffle=shuffle)
        with closing(sqlite3.connect(path)) as file:
            rows.append(file.execute("SELECT * FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchall())
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1])


@settings(max_examples=few(6), deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_random_plans_hold_what_they_promise(seed: int) -> None:
    assert random_plan(seed) == random_plan(seed)
    recording = simulate(random_plan(seed))
    check_truth(recording)
    check_machine(recording)
    check_host(recording)
