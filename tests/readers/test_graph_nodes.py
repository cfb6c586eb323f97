"""What CUDA graphs run: their nodes in a few steps, by which replays elsewhere are known."""

from __future__ import annotations

import importlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.api import Report
from gputrace.collectors.finalize import merge
from gputrace.collectors.session import HOOKS
from gputrace.collectors.spool.activity import (
    RECORDS,
    Spool,
    drop_unsettled_nodes,
    node_stretches_of,
)
from gputrace.model.events import GPU_KINDS, Kind
from gputrace.model.options import Window
from gputrace.readers.gputrace import GraphNodes, _medians
from gputrace.readers.registry import open_trace
from tests.helpers.command import ROOT
from tests.helpers.exports import GRAPH_TRACE, KERNEL, STEP, Export, global_id
from tests.helpers.handmade import US, analyze
from tests.native.build import Machine

ALL_REDUCE: Final = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"

# ---- a program, the collector, and a CUPTI of our own ----


def recorded(machine: Machine, folder: Path, script: str) -> tuple[list[str], Path]:
    spools = folder / "spools"
    spools.mkdir()
    done = machine.run(spools, f"inject {script}")
    assert (done.returncode, done.stderr) == (0, "")
    merge(spools, folder / "t.sqlite", {})
    return done.stdout.split(), folder / "t.sqlite"


def test_replays_are_the_nodes_that_others_had_and_shorter_by_their_pauses(
    machine: Machine, tmp_path: Path
) -> None:
    script = "replays 10 write nodes 1 replays 4 nodes 0 replays 10"
    said, path = recorded(machine, tmp_path, script)
    assert said == ["0", "0"]
    with open_trace(path) as trace:
        columns = ("start", "end", "kind", "name", "correlation")
        rows = trace.events(GPU_KINDS, columns)
        rows = rows.select(np.argsort(rows.start, kind="stable"))
        (note,) = [text for text in trace.quality.notes if "CUDA graph" in text]
        texts = trace.names(np.unique(rows.name))
    assert note == (
        "what 20 replays of 1 CUDA graph ran is taken from 4 recorded with their nodes, and "
        "fitted to each one's length: to 0.0% of a replay's work, by the spread of these"
    )
    replays = [rows.select(rows.correlation == id) for id in np.unique(rows.correlation)]
    assert len(replays) == 24
    for number, replay in enumerate(replays):
        assert replay.kind.tolist() == [Kind.COPY_H2D, *[Kind.KERNEL] * 3]
        assert [texts[id] for id in replay.name[1:].tolist()] == [
            "sgemm_128x64",
            ALL_REDUCE,
            "adam",
        ]
        spans = np.stack([replay.start, replay.end]) - replay.start[0]
        has_nodes = 10 <= number < 14
        assert spans.tolist() == (
            [[0, 2000, 4500, 7000], [500, 3000, 5500, 8000]]
            if has_nodes
            else [[0, 1000, 2500, 4000], [500, 2000, 3500, 5000]]
        )


def test_classes_of_time_within_replays_are_known(machine: Machine, tmp_path: Path) -> None:
    script = "replays 50 write nodes 1 replays 4 nodes 0 replays 50"
    _, path = recorded(machine, tmp_path, script)
    with gputrace.open(path) as trace:
        report = trace.analyze()
    (gpu,) = report.gpus
    assert (gpu.kernels, gpu.copies) == (3 * 104, 104)
    assert (gpu.compute_ns, gpu.communication_ns, gpu.h2d_ns) == (208_000, 104_000, 52_000)
    assert "graph-opaque" not in {finding.id for finding in report.findings}


def test_nodes_are_recorded_only_where_graphs_are_not_known(
    machine: Machine, tmp_path: Path
) -> None:
    known = "replays 3 write nodes 1 replays 1 nodes 0 write nodes 1 nodes 0"
    said, path = recorded(machine, tmp_path, f"plain nodes 1 {known}")
    assert said == ["-1", "0", "0", "-1", "-1"]
    with closing(sqlite3.connect(path)) as rows:
        assert rows.execute("SELECT count(*) FROM GPUTRACE_GRAPH_NODES").fetchone() == (1,)


def test_a_window_that_ends_ends_them(machine: Machine, tmp_path: Path) -> None:
    script = "replays 3 write nodes 1 replays 1 pause 1 pause 0 nodes 0 replays 2"
    said, path = recorded(machine, tmp_path, script)
    assert said == ["0", "-1"]
    with closing(sqlite3.connect(path)) as rows:
        assert rows.execute(f"SELECT count(*) FROM {GRAPH_TRACE}").fetchone() == (5,)
        ((begin, end),) = rows.execute("SELECT start, end FROM GPUTRACE_GRAPH_NODES").fetchall()
        sql = f"SELECT min(start) > ?, max(end) <= ? FROM {KERNEL} WHERE graphId = 99"
        assert rows.execute(sql, (begin, end)).fetchone() == (1, 1)


def test_a_node_without_an_end_of_its_own_lengthens_nothing() -> None:
    """As CUPTI 13.0 gave some of the last nodes: no times, or the end of a later flush."""
    ends = {1: 1100, 2: 2100, 3: 900_000_000, 4: 0}
    spool = Spool(1, "host", 1, {tag: np.zeros(0, form) for tag, form in RECORDS.items()})
    nodes = np.zeros(8, RECORDS[b"KERN"])
    nodes["graph"], nodes["correlation"] = 7, np.repeat([1, 2, 3, 4], 2)
    nodes["start"] = nodes["correlation"] * 1000 + np.tile([0, 50], 4)
    nodes["end"] = nodes["start"] + 40
    nodes["end"][1::2] = list(ends.values())
    whole = np.zeros(1, RECORDS[b"GRPH"])
    whole["graph"], whole["start"], whole["end"] = 7, 5_000_000, 5_001_000
    calls = np.zeros(4, RECORDS[b"API "])
    calls["correlation"] = [1, 2, 3, 4]
    calls["start"] = calls["correlation"].astype(np.uint64) * 1000 - 500
    spool.records |= {b"KERN": nodes, b"GRPH": whole, b"API ": calls}
    spool.switches["nodes"] = [(400, True, 0), (4200, False, 0)]
    assert drop_unsettled_nodes(spool) == 2
    assert spool.records[b"KERN"]["end"].tolist() == [1040, 1100, 2040, 2100, 3040, 4040]
    assert node_stretches_of(spool) == [(400, 4200)]


def test_nodes_that_begin_after_a_later_replay_are_left_out() -> None:
    """As CUPTI 13.0 gave nearly all of the last replay: the times of their delivery."""
    spool = Spool(1, "host", 1, {tag: np.zeros(0, form) for tag, form in RECORDS.items()})
    nodes = np.zeros(4, RECORDS[b"KERN"])
    nodes["graph"], nodes["correlation"] = 7, np.repeat([1, 2], 2)
    nodes["start"] = [1000, 1050, 900_000_000, 900_000_050]
    nodes["end"] = nodes["start"] + 40
    fills = np.zeros(1, RECORDS[b"MSET"])
    fills["correlation"], fills["start"], fills["end"] = 2, 2000, 900_000_000
    whole = np.zeros(2, RECORDS[b"GRPH"])
    whole["graph"], whole["correlation"], whole["start"] = 7, [3, 4], [3000, 950_000_000]
    whole["end"] = whole["start"] + 900
    spool.records |= {b"KERN": nodes, b"MSET": fills, b"GRPH": whole}
    assert drop_unsettled_nodes(spool) == 3
    assert spool.records[b"KERN"]["end"].tolist() == [1040, 1090]
    # The second launch has lost its nodes: what it ran has ended when the next replay begins.
    calls = np.zeros(3, RECORDS[b"API "])
    calls["correlation"], calls["start"], calls["name"] = [1, 2, 3], [500, 600, 900], 5
    spool.records[b"API "], spool.names[5] = calls, b"cudaGraphLaunch_v10000"
    spool.switches["nodes"] = [(400, True, 0), (800, False, 0)]
    assert node_stretches_of(spool) == [(400, 3000)]


def test_a_replay_that_is_many_times_as_long_counts_for_nothing() -> None:
    def replay(end: int) -> list[tuple[int, int, int, int, int, int, int, int]]:
        return [(Kind.KERNEL, 1, -1, 0, 100, 0, 7, 0), (Kind.KERNEL, 2, -1, 110, end, 0, 7, 0)]

    nodes = _medians([replay(200), replay(210), replay(700_000)])
    assert nodes.replays == 2
    assert nodes.error is not None
    assert nodes.error < 0.05


def test_nodes_that_are_alike_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    """Two of one name on two streams, of which now one and now the other begins first."""
    export = Export()
    export.give("GPUTRACE_META", "name", "value").add("GPUTRACE_META", name="job", value="")
    export.give("GPUTRACE_GRAPH_NODES", "start", "end", "globalPid")
    export.give(KERNEL, "graphId", "graphNodeId")
    for replay in range(5):
        at, late = 10_000 * replay + 1, 100 * (replay % 2)
        for node, begin, length, stream in ((7, late, 500, 1), (8, 100 - late, 50, 2)):
            place = {"correlationId": replay + 1, "graphId": 1, "streamId": stream}
            start = at + begin
            export.kernel(start, start + length, "gemm", graphNodeId=node, **place)
    export.graph(90_001, 90_501, correlationId=9)
    export.add("GPUTRACE_GRAPH_NODES", globalPid=global_id(100), start=1, end=50_000)
    with open_trace(export.write(tmp_path / "t.sqlite")) as trace:
        rows = trace.events([Kind.KERNEL], ("start", "end", "stream", "node"))
    rows = rows.select(rows.start > 90_000)
    rows = rows.select(np.argsort(rows.node))
    assert (rows.node.tolist(), rows.stream.tolist()) == ([7, 8], [1, 2])
    assert (rows.end - rows.start).tolist() == [500, 50]


# ---- when they are recorded ----


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module of the hooks, as a program would load it."""
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.setenv("GPUTRACE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUTRACE_GRAPH_NODES", "4")
    before = set(sys.modules)
    yield importlib.import_module("_gputrace_hooks.control")
    for name in set(sys.modules) - before:
        if name.startswith("_gputrace_hooks"):
            del sys.modules[name]


@pytest.mark.parametrize("seen_at", [0, 40, 64])
def test_they_begin_at_a_power_of_two_and_last_for_four_steps(
    control: Any, monkeypatch: pytest.MonkeyPatch, seen_at: int
) -> None:
    """Ranks that see a graph a little earlier or later mostly choose the same steps."""
    turns: list[tuple[int, bool]] = []
    step = 0

    def record(on: bool) -> bool:
        if on and (step < seen_at or turns):
            return False
        turns.append((step, on))
        return True

    monkeypatch.setattr(control, "record_nodes", record)
    nodes = control.NodeSteps()
    for step in range(1, 400):
        if step >= nodes.at:
            nodes.look(step)
    begin = 16 if not seen_at else 64
    assert turns == [(begin, True), (begin + 4, False)]


PROGRAM: Final = """
import ctypes, os, struct, time
import gputrace

collector = ctypes.CDLL(os.environ["GPUTRACE_LIBRARY"])
collector.InitializeInjection()
cupti = ctypes.CDLL(os.environ["GPUTRACE_CUPTI"])
name = ctypes.create_string_buffer(b"gemm")

def emit(end, *values):
    record = bytearray(256)
    for at, form, value in values:
        struct.pack_into(form, record, at, value)
    cupti.fake_emit(bytes(record), ctypes.c_uint64(end))

for step in range(30):
    now, graph = time.time_ns(), 7
    emit(now, (0, "<I", 5), (4, "<I", 311), (8, "<Q", now), (16, "<Q", now + 900),
         (24, "<I", os.getpid()), (32, "<I", step + 1))
    if cupti.fake_graphs():
        emit(now, (0, "<I", 51), (4, "<I", step + 1), (8, "<Q", now), (16, "<Q", now + 5000),
             (28, "<I", graph))
    else:
        emit(now, (0, "<I", 10), (16, "<Q", now), (24, "<Q", now + 6000), (92, "<I", step + 1),
             (104, "<Q", ctypes.addressof(name)), (156, "<I", graph))
    if step == 8:
        collector.gputrace_write()
    gputrace.step()
"""


def test_marks_of_steps_decide_when(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "spools").mkdir()
    env = machine.environment(tmp_path / "spools", {"GPUTRACE_GRAPH_NODES": "4"})
    env |= {"GPUTRACE_LIBRARY": str(machine.folder / "collector.so")}
    env |= {"PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    merge(tmp_path / "spools", tmp_path / "t.sqlite", {})
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as rows:
        sql = f"SELECT correlationId - 1, graphId FROM {KERNEL} ORDER BY 1"
        assert rows.execute(sql).fetchall() == [(step, 7) for step in range(16, 20)]
        assert rows.execute(f"SELECT count(*) FROM {GRAPH_TRACE}").fetchone() == (26,)


# ---- the analysis ----

STEPS: Final = 60
WITH_NODES: Final = range(16, 20)
LENGTH: Final = 800 * US
NODES: Final = ((0, 300, "gemm"), (310, 610, "gemm"), (620, 710, ALL_REDUCE), (720, 800, "adam"))
"""Start and end in µs, and the name."""


def training(scale: float = 1.5, opaque: bool = True) -> Export:
    """Steps of one CUDA graph, of which some, longer by the pauses, have their nodes recorded."""
    export = Export()
    export.give("GPUTRACE_META", "name", "value").add("GPUTRACE_META", name="job", value="")
    export.give("GPUTRACE_GRAPH_NODES", "start", "end", "globalPid")
    export.give(KERNEL, "graphId")
    process, mark = global_id(100), export.string("gputrace.step")
    now = 0
    for step in range(STEPS):
        begin, now = now, now + 10 * US
        export.call(now, now + 5 * US, "cudaGraphLaunch", correlation=step + 1)
        now += 20 * US
        has_nodes = step in WITH_NODES
        if has_nodes or not opaque:
            late = 0
            for start, end, name in NODES:
                late += round(30 * US * (scale - 1)) * has_nodes
                times = now + start * US + late, now + end * US + late
                export.kernel(*times, name, correlationId=step + 1, graphId=1)
            now = times[1]
        else:
            export.graph(now, now + LENGTH, correlationId=step + 1)
            now += LENGTH
        row = {"globalTid": global_id(100, thread=100), "nameId": mark, "step": step}
        export.add(STEP, start=begin + 1, end=now, **row)
        if step == WITH_NODES[-1]:
            first = next(r["start"] for r in export.rows[STEP] if r["step"] == WITH_NODES[0])
            export.add("GPUTRACE_GRAPH_NODES", start=first, end=now, globalPid=process)
    return export


def classes(report: Report) -> dict[str, int]:
    (row,) = report.breakdown
    return {name: getattr(row, f"{name}_ns") // row.steps for name in ("compute", "communication")}


def test_opaque_replays_are_analyzed_as_the_program_without_graphs(tmp_path: Path) -> None:
    report, whole = analyze(training(), tmp_path), analyze(training(opaque=False), tmp_path)
    assert classes(report) == classes(whole) == {"compute": 680 * US, "communication": 90 * US}
    assert report.kernels is not None
    assert whole.kernels is not None
    assert [k.name for k in report.kernels.top] == [k.name for k in whole.kernels.top]


def test_steps_with_nodes_are_longer_and_count_nowhere(tmp_path: Path) -> None:
    report = analyze(training(scale=4), tmp_path)
    assert {step.end_ns - step.start_ns for step in report.step_list[1:]} == {LENGTH + 30 * US}
    assert len(report.step_list) == STEPS - len(WITH_NODES)
    assert not {"slow-steps", "lost-records"} & {finding.id for finding in report.findings}
    assert any(text.startswith("4 steps in which CUDA graph nodes") for text in report.warnings)


def test_a_part_of_a_trace_has_the_nodes_too(tmp_path: Path) -> None:
    path = training().write(tmp_path / "t.sqlite")
    with open_trace(path) as trace:
        columns = ("start", "end", "name", "kind")
        every = trace.events(GPU_KINDS, columns)
        window = Window(40 * LENGTH, 41 * LENGTH)
        part = trace.events([Kind.KERNEL], columns, window)
        in_it = every.select((every.start < window.end) & (every.end >= window.start))
        assert sorted(part.start.tolist()) == sorted(in_it.start.tolist())
        in_parts = np.concatenate([p.start for p in trace.parts(GPU_KINDS, columns)])
        assert sorted(in_parts.tolist()) == sorted(every.start.tolist())


def test_replays_with_too_many_nodes_to_hold_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gputrace.readers.gputrace._MOST_NODES", 223)
    report = analyze(training(), tmp_path)
    assert "graph-opaque" in {finding.id for finding in report.findings}
    assert not any("is taken from" in text for text in report.warnings)
    monkeypatch.setattr("gputrace.readers.gputrace._MOST_NODES", 224)
    assert "graph-opaque" not in {f.id for f in analyze(training(), tmp_path).findings}


# ---- the fit ----


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 1000)), min_size=1, max_size=20),
    st.integers(0, 10_000),
)
def test_nodes_keep_their_order_and_fill_the_replay(
    steps: list[tuple[int, int]], length: int
) -> None:
    """``steps`` are pauses and nodes after them; the first node begins the replay."""
    pauses, work = np.array(steps, np.float64).T
    pauses[0] = 0
    busy, paused = np.cumsum(work), np.cumsum(pauses)
    nodes = GraphNodes({}, np.stack([busy - work, busy]), np.stack([paused, paused]), 1, None)
    start = np.array([7])
    starts, ends = nodes.fit(start, start + length)[:, 0]
    assert (starts[0], ends[-1]) == (7, 7 + length)
    assert (np.diff(np.stack([starts, ends], axis=1).ravel()) >= 0).all()
    if busy[-1] <= length <= (busy + paused)[-1]:
        assert np.abs(ends - starts - work).max() <= 1
