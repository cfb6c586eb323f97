"""Files of `gputrace export --to perfetto` keep the rules of the Trace Event Format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.timeline_model.trace_rows import nesting_lanes
from gputrace.report.export.perfetto import MOST_GAPS, microseconds
from tests.helpers import command
from tests.helpers.exports import Export
from tests.helpers.handmade import MS, Run, train
from tests.helpers.kineto import kernel
from tests.synthetic import Plan, simulate, write_kineto, write_nsys, write_nvprof

Event = dict[str, Any]


def export(whole: Path, target: Path, time: str | None = None) -> list[Event]:
    with gputrace.open(whole) as trace:
        trace.export("perfetto", target, time=time, force=True)
    return validated(target)


def validated(path: Path) -> list[Event]:
    """The events of a file that keeps all rules of the format which Perfetto needs kept."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    loaded = json.loads(
        content.decode("utf-8"),
        parse_float=Decimal,
        parse_constant=forbidden,
        object_pairs_hook=without_repetition,
    )
    assert set(loaded) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert loaded["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = loaded["traceEvents"]
    named: dict[str, dict[tuple[int, int], object]] = defaultdict(dict)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        place = event["pid"], event["tid"]
        assert all(type(id) is int and 0 <= id < 1 << 31 for id in place)
        assert isinstance(event["name"], str)
        assert event["name"]
        if event["ph"] == "M":
            check_about(event)
            assert place not in named[event["name"]]
            named[event["name"]][place] = event["args"]
            continue
        check_slice(event)
        assert place in named["thread_name"], "named before it is used"
        tracks[place].append((ns(event["ts"]), ns(event["dur"])))
    assert named["thread_name"].keys() == named["thread_sort_index"].keys() == tracks.keys()
    assert {(pid, 0) for pid, _ in tracks} == named["process_name"].keys()
    assert named["process_name"].keys() == named["process_sort_index"].keys()
    # Perfetto gives a name to a thread by its id alone, and shows the process's id as main thread.
    threads = [tid for _, tid in tracks]
    assert len(set(threads)) == len(threads)
    assert set(threads).isdisjoint({0, *(pid for pid, _ in tracks)})
    for slices in tracks.values():
        assert_nested([(start, start + length) for start, length in slices])
    return events


def forbidden(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


ABOUT: Final = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_about(event: Event) -> None:
    """An event that names a process or a thread, or gives it a place."""
    what, kind = ABOUT[event["name"]]
    assert event.keys() == {"ph", "name", "pid", "tid", "args"}
    assert event["args"].keys() == {what}
    assert type(event["args"][what]) is kind


def check_slice(event: Event) -> None:
    """A whole one: no beginning that lacks its end, no flow that would need an id."""
    assert event["ph"] == "X"
    assert event.keys() - {"args"} == {"ph", "name", "ts", "dur", "pid", "tid"}
    for time in (event["ts"], event["dur"]):
        assert type(time) in (int, Decimal)
        assert 0 <= time < (1 << 53) / 1_000
    assert isinstance(event.get("args", {}), dict)


def ns(microseconds: Decimal) -> int:
    """Nanoseconds: the same if cut off, rounded, or taken from a double as Perfetto does."""
    nanoseconds = round(microseconds * 1_000)
    assert nanoseconds == int(microseconds * 1_000)
    assert nanoseconds == int(float(microseconds) * 1000.0)
    return nanoseconds


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


def test_a_gpu_has_a_track_of_why_it_loses_time(training: Path, tmp_path: Path) -> None:
    events = export(training, tmp_path / "out.json")
    with gputrace.open(training) as trace:
        report = trace.analyze()
    lost = track(events, "device 0", "lost time: why")
    (total,) = report.gpus
    assert sum(ns(each["dur"]) for each in lost) == total.span_ns - total.compute_ns
    longest = max(lost, key=lambda each: each["dur"])
    cause = next(iter(report.gaps.largest[0].charges))
    assert longest["args"] == {"cause": cause}
    assert longest["name"] == report.cause_label(cause)


def test_a_process_has_its_threads_calls_and_ranges(training: Path, tmp_path: Path) -> None:
    events = export(training, tmp_path / "out.json")
    calls = track(events, "process 100", "100 CUDA calls")
    assert len(calls) == 12 * 45
    assert {e["name"] for e in calls} == {
        "cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"
    }  # fmt: skip
    assert [e["name"] for e in track(events, "process 100", "ranges")] == ["epoch"]


@pytest.mark.parametrize("form", ["nsys", "nvprof", "kineto"])
def test_all_ranks_are_on_one_axis_with_their_steps_gaps_and_findings(
    form: str, tmp_path: Path
) -> None:
    plan = Plan(steps=12, ranks=3, allreduces=2, kernels_per_step=30, data_wait_ns=9_000_000)
    recording = simulate(replace(plan, late_host_rank=1, late_host_ns=3_000_000))
    if form == "nvprof":
        write_nvprof(recording, tmp_path / "in")
    else:
        (tmp_path / "in").mkdir()
        if form == "nsys":
            write_nsys(recording, tmp_path / "in" / "run.sqlite")
        else:
            write_kineto(recording, tmp_path / "in")
    events = export(tmp_path / "in", tmp_path / "out.json.gz")
    with gputrace.open(tmp_path / "in") as trace:
        report = trace.analyze(gaps=MOST_GAPS)
    zero = report.origin_ns
    for rank in range(3):
        gpu = f"(rank {rank})"
        steps = [(ns(e["ts"]), ns(e["dur"])) for e in track(events, gpu, "steps")]
        own = [step for step in report.step_list if step.rank == rank]
        assert steps == [(step.start_ns - zero, step.end_ns - step.start_ns) for step in own]
        gaps = [(ns(e["ts"]), e["name"]) for e in track(events, gpu, "gaps")]
        listed = [gap for gap in report.gaps.largest if gap.rank == rank]
        assert gaps == sorted((gap.start_ns - zero, gap.cause) for gap in listed)
        found = {e["name"].split()[0] for e in track(events, gpu, "findings")}
        assert found == {f.id for f in report.findings if not f.ranks or rank in f.ranks}
    operations = [e for e in track(events, "(rank", "stream") if "correlation" in e["args"]]
    assert len(operations) == len(recording.ops)
    starts = sorted(ns(e["ts"]) for e in operations)
    assert [start - starts[0] for start in starts] == [
        start - int(recording.ops["start"].min())
        for start in sorted(recording.ops["start"].tolist())
    ]


def test_text_that_is_no_unicode_does_no_harm(tmp_path: Path) -> None:
    whole = tmp_path / "run.json"
    events = [kernel(10, 5, 'half ? of "two" \n'), kernel(20, 5, "\u2028")]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    whole.write_bytes(text.replace(b"?", b"\xff"))
    names = {e["name"] for e in track(export(whole, tmp_path / "out.json"), "device 0", "stream")}
    assert names == {'half ? of "two" \n', "\u2028"}


@given(st.integers(0, 1 << 53))
def test_a_moment_is_the_same_to_whoever_reads_it(nanoseconds: int) -> None:
    """But beyond 50 days, where a double keeps no nanosecond of microseconds."""
    text = microseconds(nanoseconds)
    assert round(Decimal(text) * 1_000) == int(Decimal(text) * 1_000) == nanoseconds
    if nanoseconds < 1 << 52:
        assert int(float(text) * 1000.0) == nanoseconds


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
