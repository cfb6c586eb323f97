"""rocprofv3: a run has the steps, classes and gaps that nsys's export of it has."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.model.events import Kind
from gputrace.readers.registry import open_trace
from tests.helpers import command
from tests.synthetic import Plan, Recording, simulate, write_nsys, write_rocpd
from tests.synthetic.recording import Kind as Operation

PLANS: Final = {
    "late rank": Plan(
        ranks=2,
        steps=12,
        kernels_per_step=30,
        allreduces=2,
        late_host_rank=1,
        late_host_ns=2_000_000,
    ),
    "DataParallel": Plan(gpus_per_process=2, steps=12, kernels_per_step=30, data_wait_ns=3_000_000),
}


@pytest.fixture(scope="module", params=list(PLANS))
def recording(request: pytest.FixtureRequest) -> Recording:
    """A run without memsets, which are kernels of HIP's."""
    run = simulate(PLANS[request.param])
    return replace(run, ops=run.ops[run.ops["kind"] != Operation.MEMSET])


def figures(*paths: Path) -> dict[str, Any]:
    with gputrace.open(*paths) as trace:
        document = json.loads(trace.analyze(gaps=5).render("json"))
    gaps = document["gaps"]
    return {key: document[key] for key in ("span_ns", "steps", "breakdown")} | {
        "gaps": (gaps["count"], gaps["total_ns"], gaps["by_cause"]),
        "collectives": len(document["collectives"]),
        "findings": [finding["id"] for finding in document["findings"]],
    }


@pytest.mark.parametrize("tracked", [False, True], ids=["times", "tracks"])
def test_steps_classes_and_gaps_are_those_of_nsys(
    recording: Recording, tracked: bool, tmp_path: Path
) -> None:
    nsys = tmp_path / "run.sqlite"
    write_nsys(recording, nsys, osrt=False, nvtx=("step",), with_device_table=False)
    files = write_rocpd(recording, tmp_path / "amd", tracked=tracked, ranges=("step",))
    assert figures(*files) == figures(nsys)
    assert figures(*files)["steps"]["count"] == recording.plan.steps


def test_ranks_hosts_and_cards_are_what_the_file_says(tmp_path: Path) -> None:
    recording = simulate(PLANS["late rank"])
    _, second = write_rocpd(recording, tmp_path / "amd")
    with open_trace(second) as trace:
        assert trace.source == "rocprofv3"
        assert [process.rank for process in trace.processes] == [1]
        assert trace.session.hosts == {"node0"}
        assert trace.session.world_size == 2
        device = int(trace.events((Kind.KERNEL,), ("device",)).device[0])
        assert trace.device(0, device).name.startswith("GPU ")


def test_both_processes_of_one_merged_database_are_read(tmp_path: Path) -> None:
    recording = simulate(PLANS["late rank"])
    first, second = write_rocpd(recording, tmp_path / "amd")
    apart = figures(first, second)
    with closing(sqlite3.connect(first)) as database:
        database.execute("ATTACH ? AS other", (str(second),))
        tables = database.execute("SELECT name FROM other.sqlite_master WHERE type = 'table'")
        for (name,) in tables.fetchall():
            database.execute(f"CREATE TABLE main.{name} AS SELECT * FROM other.{name}")
        database.commit()
    assert figures(first) == apart


def test_a_database_without_gpu_activity_is_refused_with_what_to_do(tmp_path: Path) -> None:
    recording = simulate(Plan(steps=3, kernels_per_step=12))
    (path,) = write_rocpd(replace(recording, ops=recording.ops[:0]), tmp_path / "amd")
    command.assert_unreadable(path, "rocprofv3 recorded nothing that ran on a GPU")
