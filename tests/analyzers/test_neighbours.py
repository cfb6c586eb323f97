"""Other processes on the cards and cores of a run, planted in generated and handmade traces."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import gputrace
from gputrace.api import Report
from gputrace.model.results import Finding
from tests.analyzers.findings.test_host_threads import counted, the, with_counters
from tests.helpers.examples import few
from tests.helpers.handmade import MS, analyze
from tests.helpers.sentences import words_of
from tests.synthetic import Plan, Recording, simulate, write_nsys
from tests.synthetic.nvml import NEIGHBOUR, write_neighbour, write_nvml
from tests.synthetic.plants import steady_ns
from tests.synthetic.variants import ddp_plan

Value = int | float | str | None
USES: Final = "GPUTRACE_PROCESS_USE"
ONE: Final = Plan(
    steps=40, warmup_steps=2, seed=5, neighbour_rank=0, neighbour_use=0.4, kernel_ns=200_000
)


def report_of(
    recording: Recording, path: Path, *changes: str, nvtx: tuple[str, ...] = ("nccl",)
) -> Report:
    path.unlink(missing_ok=True)
    write_nsys(recording, path, nvtx=nvtx)
    write_nvml(recording, path)
    write_neighbour(recording, path)
    with closing(sqlite3.connect(path)) as database, database:
        for change in changes:
            database.execute(change)
    with gputrace.open(path) as trace:
        return trace.analyze()


def shared(report: Report) -> Finding | None:
    return next((found for found in report.findings if found.id == "shared-gpu"), None)


def blamed(report: Report) -> list[Finding]:
    """Return what speaks of another process."""
    return [found for found in report.findings if "another process (" in words_of(found)]


def small(seed: int) -> Plan:
    """Return a plan of one to three ranks without anything planted."""
    plan = replace(ddp_plan(np.random.default_rng(seed), seed), ranks=1 + seed % 3, group_size=0)
    return replace(plan, allreduces=plan.allreduces if plan.ranks > 1 else 0, steps=24)


def test_of_ten_neighbours_on_a_card_nine_are_named(tmp_path: Path) -> None:
    """Half of them compute all the time, the others in a few steps."""
    named = 0
    for seed in range(10):
        rng, plan, odd = np.random.default_rng(seed), small(seed), range(10, 15) if seed % 2 else ()
        rank, use = int(rng.integers(plan.ranks)), float(rng.uniform(0.3, 0.65))
        plan = replace(plan, neighbour_rank=rank, neighbour_use=use, odd_steps=tuple(odd))
        recording = simulate(plan)
        found = shared(report_of(recording, tmp_path / "t.sqlite"))
        gpu = recording.processes[rank].devices[0][1]
        if found is not None and found.gpus == (gpu,) and found.severity != "info":
            named += f"another process (pid {NEIGHBOUR}, python) uses" in words_of(found)
    assert named >= 9


def test_of_healthy_runs_none_names_a_neighbour(tmp_path: Path) -> None:
    """Half of them have a process with a context on each card, which computes nothing."""
    for seed in range(few(8)):
        recording, path = simulate(small(seed)), tmp_path / "t.sqlite"
        kept = f"DELETE FROM {USES} WHERE isRecorded = 0" if seed % 2 else "SELECT 1"
        report = report_of(recording, path, kept)
        assert blamed(report) == []
        assert not [line for line in report.warnings if "another process" in line]


@pytest.mark.parametrize("use", [0.25, 0.5])
@pytest.mark.parametrize("odd", [(), tuple(range(10, 20))])
def test_a_neighbour_is_charged_what_the_run_is_longer_by(
    tmp_path: Path, use: float, odd: tuple[int, ...]
) -> None:
    plan = replace(ONE, neighbour_use=use, odd_steps=odd)
    recording = simulate(plan)
    found = shared(report_of(recording, tmp_path / "t.sqlite"))
    alone = steady_ns(simulate(replace(plan, neighbour_rank=-1)))
    steps = sum(window.phase == "steady" for window in recording.truth.windows)
    assert found is not None
    assert found.impact_ns == pytest.approx((steady_ns(recording) - alone) / steps, rel=0.15)
    assert found.evidence["use"] == pytest.approx(use, rel=0.1)
    assert ("of 38 steps" in words_of(found)) == bool(odd)


def test_the_ledger_charges_it_as_computation(tmp_path: Path) -> None:
    report = report_of(simulate(ONE), tmp_path / "t.sqlite")
    (row,) = (row for row in report.ledger if row.cause == "shared-gpu" and row.of == "compute")
    assert row.path == ("neighbours", "shared-gpu")
    found = shared(report)
    assert found is not None
    assert row.ns // 38 == found.evidence["kernels_ns"]


def test_a_neighbour_that_costs_nothing_is_noted_and_not_blamed(tmp_path: Path) -> None:
    plan = replace(ONE, neighbour_rank=-1)
    report = report_of(
        simulate(plan), tmp_path / "t.sqlite", f"UPDATE {USES} SET use = 0.1 WHERE isRecorded = 0"
    )
    assert blamed(report) == []
    (note,) = (line for line in report.warnings if "another process" in line)
    assert note == (
        f"another process (pid {NEIGHBOUR}, python) uses 10% of GPU 0; no cost of that can be "
        "measured"
    )


DDP: Final = replace(ddp_plan(np.random.default_rng(3), 3), ranks=3, isolated=False, steps=30)


def test_who_waits_for_a_card_with_a_neighbour_is_not_told_of_a_straggler(tmp_path: Path) -> None:
    plan = replace(DDP, neighbour_rank=1, neighbour_use=0.5, turn_ns=1_000_000, kernel_ns=300_000)
    report = report_of(simulate(plan), tmp_path / "t.sqlite")
    assert report.findings[0].id == "shared-gpu"
    assert "straggler" not in [found.id for found in report.findings]
    waits = [row for row in report.ledger if row.cause == "shared-gpu" and row.paid_by != 1]
    assert {row.rank for row in waits} == {1}
    assert {row.of for row in waits} == {"communication"}


def test_slow_steps_name_the_process_that_computes_meanwhile(tmp_path: Path) -> None:
    plan = replace(ONE, neighbour_use=0.6, odd_steps=(12, 13, 14, 15, 30, 31))
    report = report_of(simulate(plan), tmp_path / "t.sqlite")
    assert report.findings[0].id == "shared-gpu"
    slow = [found for found in report.findings if found.id == "slow-steps"]
    for found in slow:
        assert f"another process (pid {NEIGHBOUR}, python) uses" in words_of(found)
        assert "exclusive mode" in found.advice
        assert found.impact_ns < 0.2 * report.findings[0].impact_ns


def test_under_mps_all_kernels_are_slower_and_other_cards_tell_by_how_much(
    tmp_path: Path,
) -> None:
    plan = replace(DDP, slow_rank=2, slow_factor=1.4)
    path, mps = tmp_path / "t.sqlite", f"ALTER TABLE {USES} ADD COLUMN sharing"
    uses = f"UPDATE {USES} SET sharing = 'MPS', use = 0.7 WHERE isRecorded = 0 AND gpu = 2"
    recording = simulate(plan)
    gpu = recording.processes[2].devices[0][1]
    report = report_of(recording, path, mps, uses.replace("gpu = 2", f"gpu = {gpu}"))
    found = report.findings[0]
    assert (found.id, found.gpus) == ("shared-gpu", (gpu,))
    assert "at the same time (MPS)" in words_of(found)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in found.advice


@pytest.mark.parametrize("use", ["0.49", "NULL"])
def test_in_turns_what_is_slower_in_all_kernels_is_the_work_of_the_rank(
    tmp_path: Path, use: str
) -> None:
    """A process that starts or ends beside a rank with longer inputs does not make them longer."""
    recording = simulate(replace(DDP, slow_rank=2, slow_factor=1.9))
    gpu = recording.processes[2].devices[0][1]
    uses = f"UPDATE {USES} SET use = {use} WHERE isRecorded = 0 AND gpu = {gpu}"
    report = report_of(recording, tmp_path / "t.sqlite", uses)
    found = report.findings[0]
    assert (found.id, found.gpus) == ("straggler", (gpu,))
    assert "another process" not in words_of(found)
    assert "exclusive mode" not in found.advice
    assert shared(report) is None


def test_on_an_only_card_under_mps_the_cost_is_not_known(tmp_path: Path) -> None:
    mps, path = f"ALTER TABLE {USES} ADD COLUMN sharing", tmp_path / "t.sqlite"
    use = f"UPDATE {USES} SET sharing = 'MPS', use = 0.7 WHERE isRecorded = 0"
    report = report_of(simulate(replace(ONE, neighbour_rank=-1)), path, mps, use)
    assert blamed(report) == []
    (note,) = (line for line in report.warnings if "another process" in line)
    assert "by how much that slows its kernels is not known" in note


def test_a_process_of_another_mig_instance_is_no_neighbour(tmp_path: Path) -> None:
    mig = (
        f"ALTER TABLE {USES} ADD COLUMN sharing",
        f"UPDATE {USES} SET sharing = CASE isRecorded WHEN 1 THEN 'MIG 1/0' ELSE 'MIG 2/0' END",
    )
    assert blamed(report_of(simulate(ONE), tmp_path / "t.sqlite", *mig)) == []
    same = mig[1].replace("2/0", "1/0")
    assert blamed(report_of(simulate(ONE), tmp_path / "t.sqlite", mig[0], same))


HIDDEN: Final = f"UPDATE {USES} SET isRecorded = 0, pid = pid + 900000, name = NULL, use = NULL"


def test_where_the_ids_are_of_another_namespace_more_processes_than_the_runs_are_a_neighbour(
    tmp_path: Path,
) -> None:
    found = shared(report_of(simulate(ONE), tmp_path / "t.sqlite", HIDDEN))
    assert found is not None
    assert "another process computes on GPU 0, in turns" in words_of(found)
    assert found.evidence["pid"] is None


def test_where_no_process_is_listed_it_is_said_that_neighbours_are_unknown(tmp_path: Path) -> None:
    plan, path = replace(DDP, slow_rank=2, slow_factor=1.5), tmp_path / "t.sqlite"
    none = f"DELETE FROM {USES} WHERE isRecorded = 0", f"UPDATE {USES} SET pid=NULL, isRecorded=0"
    found = report_of(simulate(plan), path, *none).findings[0]
    assert found.id == "straggler"
    assert "whether another process computes on it is not known" in words_of(found)
    # Of an older trace nothing is known at all.
    found = report_of(simulate(plan), path, f"DROP TABLE {USES}").findings[0]
    assert "not known" not in words_of(found)


def test_a_process_that_another_file_recorded_is_no_neighbour(tmp_path: Path) -> None:
    recording = simulate(ONE)
    (process,) = recording.processes
    ours = f"UPDATE {USES} SET pid = {process.pid} WHERE isRecorded = 0"
    assert blamed(report_of(recording, tmp_path / "t.sqlite", ours)) == []


def test_what_graphs_recorded_as_a_whole_lose_to_a_neighbour_is_not_known(tmp_path: Path) -> None:
    """Kernels run in warm-up only, and none can be compared with another."""
    kernels, graphs = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    columns = "start, end, deviceId, contextId, streamId, correlationId, globalPid, 1 AS graphId"
    later = "start > (SELECT min(start) + 1000000 FROM CUPTI_ACTIVITY_KIND_KERNEL)"
    report = report_of(
        simulate(ONE),
        tmp_path / "t.sqlite",
        f"CREATE TABLE {graphs} AS SELECT {columns} FROM {kernels} WHERE {later}",
        f"DELETE FROM {kernels} WHERE start IN (SELECT start FROM {graphs})",
        nvtx=("step",),
    )
    assert report.steps.steady_count == 38
    assert [line for line in report.warnings if "no cost of that can be" in line]
    assert shared(report) is None


def test_inputs_of_changing_length_are_no_neighbour(tmp_path: Path) -> None:
    """A process that computes a little all the time does not make long inputs its fault."""
    plan = replace(ONE, neighbour_rank=-1, jitter=0.3)
    use = f"UPDATE {USES} SET use = 0.05 WHERE isRecorded = 0"
    report = report_of(simulate(plan), tmp_path / "t.sqlite", use)
    assert blamed(report) == []


def on_cores(tmp_path: Path, use: float, queued: int, **more: Value) -> Report:
    export = with_counters()
    counted(export, {"on core": 10 * MS - queued, "queued": queued}, {}, runnable=1, cores=8)
    row: dict[str, Value] = {"gpu": None, "pid": 4711, "name": "stress", "isRecorded": 0}
    row |= {"use": use, "cpus": "0-2", "sharing": None, "numaNode": 1}
    row |= {"timeNs": 400 * MS, "durationNs": 300 * MS}
    export.give(USES, *row).add(USES, **row | more)
    return analyze(export, tmp_path)


def test_a_program_on_the_cores_for_which_training_threads_queue_is_named(tmp_path: Path) -> None:
    found = the(on_cores(tmp_path, 2.9, 4 * MS), "cpu-starved")
    says = "another program (pid 4711, stress) uses 2.9 of the 8 cores (NUMA node 1)"
    assert says in words_of(found)
    assert "dedicated cores" in found.advice


def test_a_look_that_began_before_the_steps_counts_with_its_whole_length(tmp_path: Path) -> None:
    found = the(on_cores(tmp_path, 2.9, 4 * MS, timeNs=50 * MS), "cpu-starved")
    assert "another program (pid 4711, stress) uses 2.9 of the 8 cores" in words_of(found)


def test_programs_that_cannot_be_seen_are_named_as_that(tmp_path: Path) -> None:
    hidden = on_cores(tmp_path, 2.9, 4 * MS, pid=None, name=None)
    assert "another program uses 2.9 of the 8 cores" in words_of(the(hidden, "cpu-starved"))


@pytest.mark.parametrize(
    ("use", "change"), [(0.1, {}), (2.9, {"sharing": "SMT"}), (2.9, {"isRecorded": 1})]
)
def test_a_program_that_does_not_explain_the_queue_is_not_named(
    tmp_path: Path, use: float, change: dict[str, Value]
) -> None:
    found = the(on_cores(tmp_path, use, 4 * MS, **change), "cpu-starved")
    assert "4711" not in words_of(found)


def test_a_program_for_which_nobody_queues_is_not_blamed(tmp_path: Path) -> None:
    report = on_cores(tmp_path, 2.9, MS // 10)
    assert not [found for found in report.findings if "4711" in words_of(found)]


def test_a_program_on_the_other_threads_of_the_cores_is_noted(tmp_path: Path) -> None:
    (note,) = (line for line in on_cores(tmp_path, 2.9, 0, sharing="SMT").warnings if "SMT" in line)
    assert note.startswith("another program (pid 4711, stress) uses 2.9 of the other hardware")
