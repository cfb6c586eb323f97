"""What `gputrace export --to perfetto` writes keeps the rules of the Trace Event Format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.scene.tracks import nesting_lanes
from tests import command
from tests.exports import Export
from tests.handmade import MS, Run, train

Event = dict[str, Any]


def export(whole: Path, target: Path, time: str | None = None) -> list[Event]:
    with gputrace.open(whole) as trace:
        trace.export("perfetto", target, time=time, force=True)
    return validated(target)


def validated(path: Path) -> list[Event]:
    """The events of a file, of which structure, names, times and nesting are right."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    loaded = json.loads(content, parse_float=Decimal)
    assert set(loaded) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[Event] = loaded["traceEvents"]
    named: dict[str, set[object]] = defaultdict(set)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["dur"])))
    assert named["thread_name"] == set(tracks)
    assert {(pid, 0) for pid, _ in tracks} == named["process_name"]
    for slices in tracks.values():
        assert_nested([(start, start + length) for start, length in slices])
    return events


def ns(microseconds: Decimal) -> int:
    """Nanoseconds, which must be whole."""
    nanoseconds = microseconds * 1_000
    assert nanoseconds == int(nanoseconds)
    return int(nanoseconds)


def assert_nested(slices: list[tuple[int, int]]) -> None:
    open_: list[int] = []
    for (start, end), (previous, _) in zip(slices, [(slices[0][0], 0), *slices], strict=False):
        assert start >= previous
        while open_ and open_[-1] <= start:
            open_.pop()
        assert not open_ or end <= open_[-1]
        open_.append(end)


def track(events: list[Event], process: str, thread: str) -> list[Event]:
    """The slices of a track, by parts of its names."""
    pids = {e["pid"] for e in events if e["name"] == "process_name" and process in told(e)}
    tids = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and thread in told(e) and e["pid"] in pids
    }
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in tids]


def told(event: Event) -> str:
    return str(event["args"]["name"])


@pytest.fixture
def training(tmp_path: Path) -> Path:
    run = Run()
    train(run, 12, wait=5 * MS)
    run.range(0, run.now, "epoch")
    return run.export.write(tmp_path / "whole.sqlite")


def test_a_gpu_is_a_process_with_its_streams_steps_gaps_and_findings(
    training: Path, tmp_path: Path
) -> None:
    events = export(training, tmp_path / "out.json")
    with gputrace.open(training) as trace:
        report = trace.analyze()
    gpu = "device 0 (rank 0)"
    assert len(track(events, gpu, "stream 7")) == 12 * 44
    assert [e["name"] for e in track(events, gpu, "steps")][-1] == "step 11 (steady)"
    gaps = track(events, gpu, "gaps")
    assert len(gaps) == report.gaps.count
    longest = max(gaps, key=lambda gap: gap["dur"])
    assert (ns(longest["ts"]), longest["name"]) == (
        report.gaps.largest[0].start_ns,
        "data_feeding",
    )
    assert longest["args"]["evidence"] == report.gaps.largest[0].evidence
    found = {e["name"].split()[0]: e["args"] for e in track(events, gpu, "findings")}
    assert set(found) == {finding.id for finding in report.findings}
    assert found["data-feeding"]["advice"] == report.findings[0].advice


def test_a_process_has_its_threads_calls_and_ranges(training: Path, tmp_path: Path) -> None:
    events = export(training, tmp_path / "out.json")
    calls = track(events, "process 100", "100 CUDA calls")
    assert len(calls) == 12 * 45
    assert {e["name"] for e in calls} == {
        "cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"
    }  # fmt: skip
    assert [e["name"] for e in track(events, "process 100", "ranges")] == ["epoch"]


def test_nanoseconds_are_kept(tmp_path: Path) -> None:
    start = 1_234_567_890_123_457
    whole = Export().kernel(start, start + 1).kernel(start + 5, start + 9).write(tmp_path / "a")
    slices = track(export(whole, tmp_path / "out.json"), "device 0", "stream")
    assert [(ns(e["ts"]), ns(e["dur"])) for e in slices] == [(start, 1), (start + 5, 4)]


def test_operations_of_a_stream_that_overlap_get_a_track_more(tmp_path: Path) -> None:
    whole = Export().kernel(0, 10).kernel(5, 15).kernel(20, 30).write(tmp_path / "a")
    events = export(whole, tmp_path / "out.json")
    assert len(track(events, "device 0", "stream")) == 3
    assert len(track(events, "device 0", "(2)")) == 1


def test_a_window_has_what_touches_it(training: Path, tmp_path: Path) -> None:
    events = export(training, tmp_path / "out.json", "10ms:20ms")
    for event in track(events, "device 0", "stream 7") + track(events, "process", "calls"):
        assert ns(event["ts"]) < 20 * MS
        assert ns(event["ts"]) + ns(event["dur"]) >= 10 * MS


def test_a_real_trace_of_four_gpus_is_valid(
    recording: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = recording("h200x4-dataparallel-7-9.sqlite")
    events = export(whole, tmp_path / "out.json.gz", "36.2s:37s")
    assert {told(e) for e in events if e["name"] == "process_name" and "GPU" in told(e)} == {
        f"GPU {gpu} (rank 0) NVIDIA H200" for gpu in range(4)
    }


def test_the_command_compresses_where_the_name_says_so(training: Path, tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json", tmp_path / "b.json.gz"
    for target in (plain, packed):
        assert command.gputrace("export", training, "--to", "perfetto", "-o", target).code == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


_SLICES: Final = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1)


@given(_SLICES)
def test_slices_of_a_lane_nest_and_none_is_lost(slices: list[tuple[int, int]]) -> None:
    ordered = sorted(((s, s + length) for s, length in slices), key=lambda p: (p[0], -p[1]))
    starts, ends = (np.array(column) for column in zip(*ordered, strict=True))
    lanes = nesting_lanes(starts, ends)
    for lane in range(int(lanes.max()) + 1):
        own = [pair for pair, at in zip(ordered, lanes.tolist(), strict=True) if at == lane]
        assert own
        assert_nested(own)
