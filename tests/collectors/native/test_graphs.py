"""CUDA graphs: CUPTI bears one instantiation at a time; who captured which node."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.finalize import merge
from gputrace.collectors.spool.activity import read_spool
from tests.helpers.exports import KERNEL
from tests.native.build import Machine

SERIAL: Final = {"GPUTRACE_SERIAL_GRAPHS": "1"}
GRAPHS: Final = "graphs 20 4 at_once "


def said(machine: Machine, folder: Path, script: str, env: dict[str, str]) -> list[int]:
    done = machine.run(folder, f"inject {script}", env)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(line) for line in done.stdout.split()]


def test_one_waits_for_the_other(machine: Machine, tmp_path: Path) -> None:
    assert said(machine, tmp_path, GRAPHS, SERIAL) == [1]


def test_in_other_programs_nobody_waits_and_others_may_subscribe(
    machine: Machine, tmp_path: Path
) -> None:
    *taken, at_once = said(machine, tmp_path, f"taken {GRAPHS}", {})
    assert taken == [0]
    assert at_once > 1


def test_they_wait_in_each_window(machine: Machine, tmp_path: Path) -> None:
    env = SERIAL | {"GPUTRACE_CAPTURE": "manual", "GPUTRACE_HOLD_NS": "0"}
    window = "capture 1 plain graphs 10 4 capture 0 "
    script = f"{window}released 1 0 taken {window}at_once"
    assert said(machine, tmp_path, script, env) == [0, 1]


def test_another_profiler_has_the_place_meanwhile(machine: Machine, tmp_path: Path) -> None:
    script = f"taken pause 1 taken pause 0 taken {GRAPHS}"
    assert said(machine, tmp_path, script, SERIAL) == [1, 0, 1, 1]


@pytest.mark.parametrize("library", ["jaxlib/libjax_common.so", "libtensorflow_framework.so.2"])
def test_programs_that_do_so_are_known_by_their_libraries(
    machine: Machine, tmp_path: Path, library: str
) -> None:
    env = machine.with_library(tmp_path / "libs", library)
    (tmp_path / "spools").mkdir()
    assert said(machine, tmp_path / "spools", GRAPHS, env) == [1]


# ---- nodes ----

NODES: Final = {"GPUTRACE_GRAPH_NODES": "4"}
REPLAYS: Final = "replays 3 write nodes 1 replays 2 nodes 0"
"""Nodes 1000 to 1002 are captured, and copied as 2000 to 2002 when the graph is instantiated."""


def noted(machine: Machine, folder: Path, script: str, env: dict[str, str]) -> list[list[object]]:
    """The nodes that were made, copies last, and those that kernels are runs of."""
    spools = folder / "spools"
    spools.mkdir()
    said(machine, spools, script, env)
    merge(spools, folder / "t.sqlite", {})
    made = "SELECT graphNodeId, originalGraphNodeId FROM CUDA_GRAPH_NODE_EVENTS"
    ran = f"SELECT DISTINCT graphNodeId FROM {KERNEL} WHERE graphNodeId IS NOT NULL"
    with closing(sqlite3.connect(folder / "t.sqlite")) as rows:
        has = "SELECT count(*) FROM sqlite_master WHERE name = 'CUDA_GRAPH_NODE_EVENTS'"
        (tables,) = rows.execute(has).fetchone()
        nodes = sorted(rows.execute(made), key=str) if tables else []
        return [nodes, [id for (id,) in rows.execute(f"{ran} ORDER BY 1")]]


def test_nodes_and_what_they_are_copies_of_are_noted(machine: Machine, tmp_path: Path) -> None:
    made, ran = noted(machine, tmp_path, REPLAYS, NODES)
    originals = [(1000 + i, None) for i in range(3)] + [(2000 + i, None) for i in range(3)]
    assert made == sorted([*originals, *((2000 + i, 1000 + i) for i in range(3))], key=str)
    assert ran == [2000, 2001, 2002]


def test_the_thread_that_captures_is_known_and_the_moment(machine: Machine, tmp_path: Path) -> None:
    noted(machine, tmp_path, REPLAYS, NODES)
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as rows:
        threads = "SELECT DISTINCT globalTid FROM "
        (thread,) = rows.execute(f"{threads} CUDA_GRAPH_NODE_EVENTS").fetchall()
        assert thread in rows.execute(f"{threads} CUPTI_ACTIVITY_KIND_RUNTIME").fetchall()
        sql = "SELECT max(start), min(end) FROM CUDA_GRAPH_NODE_EVENTS"
        last, first = rows.execute(sql).fetchone()
        (replayed,) = rows.execute("SELECT min(start) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()
        assert 0 < first <= last <= replayed


def test_without_the_option_nobody_is_told_of_nodes(machine: Machine, tmp_path: Path) -> None:
    assert noted(machine, tmp_path, f"taken {REPLAYS}", {}) == [[], [2000, 2001, 2002]]


@pytest.mark.parametrize("before", ["", "replays 1 ", "rest 0 sleep 1200 plain replays 1 "])
def test_graphs_that_cupti_may_not_know_are_recorded_by_their_nodes(
    machine: Machine, tmp_path: Path, before: str
) -> None:
    """It crashes programs that replay such a graph while replays are recorded as a whole."""
    later = "rest" not in before
    env = {"GPUTRACE_CAPTURE": "manual", "GPUTRACE_HOLD_NS": "0"} if later else {}
    script = f"{before}capture 1 sleep 5 replays 3 capture 0 sleep 1500 plain finalized"
    assert said(machine, tmp_path, script, env) == [0]
    (spool,) = map(read_spool, tmp_path.glob("*.spool"))
    assert len(spool.records[b"GRPH"]) == 0
    assert len(spool.records[b"KERN"]) == 9


def test_nodes_of_xla_are_not_noted(machine: Machine, tmp_path: Path) -> None:
    """Nothing more than needed is asked of CUPTI where it has crashed."""
    env = NODES | machine.with_library(tmp_path / "libs")
    assert noted(machine, tmp_path, REPLAYS, env)[0] == []


def test_nodes_are_noted_outside_of_windows_but_not_while_another_profiler_records(
    machine: Machine, tmp_path: Path
) -> None:
    env = NODES | {"GPUTRACE_CAPTURE": "manual"}
    script = "taken replays 1 pause 1 taken pause 0 taken capture 1 plain capture 0"
    spools = tmp_path / "said"
    spools.mkdir()
    assert said(machine, spools, script, env) == [1, 0, 1]
    assert len(noted(machine, tmp_path, script, env)[0]) == 9
