"""The detail of a gap, read from around it, says what the analysis of the whole trace says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.timeline_model import Scene, read_scene
from gputrace.analyzers.timeline_model.gaps import GapDetail, describe_gap, finding_of
from gputrace.model.events import Kind
from gputrace.model.results import Gap
from gputrace.model.trace import Trace
from gputrace.readers.registry import open_trace
from tests.helpers.exports import NVTX, PUSH_POP_RANGE, SAMPLE, Export, global_id
from tests.synthetic import Plan, simulate, write_nsys

STARVED: Final = "h200x4-ddp-starved-9-15.sqlite"
THREAD: Final = global_id(100, thread=100)


def detail_of(trace: Trace, scene: Scene, gap: Gap) -> GapDetail:
    lanes = [(lane.gpu, lane.rank) for lane in scene.lanes]
    row = scene.gaps.find(lanes.index((gap.gpu, gap.rank)), gap.start_ns)
    assert row is not None
    return describe_gap(trace, scene, row)


@pytest.mark.parametrize(
    "name", [STARVED, "h200x4-dataparallel-7-9.sqlite", "nsys-ai-h100_2gpu_1s.sqlite"]
)
def test_details_agree_with_the_list_of_the_largest_gaps(
    name: str, recording: Callable[[str], Path]
) -> None:
    path = recording(name)
    with open_trace(path) as whole, open_trace(path) as fresh:
        scene = read_scene(whole)
        assert scene.analysis is not None
        for gap in (*scene.analysis.gaps.largest[:20], *scene.analysis.gaps.largest_in_steps[:20]):
            detail = detail_of(fresh, scene, gap)
            assert detail.gap == gap
            assert sum(detail.by_cause.values()) == gap.length_ns
            for shares in detail.others.values():
                assert sum(shares.values()) <= gap.length_ns


def test_a_gap_belongs_to_the_finding_of_what_most_of_it_is_charged_to(
    recording: Callable[[str], Path],
) -> None:
    with open_trace(recording(STARVED)) as trace:
        scene = read_scene(trace)
    assert scene.analysis is not None
    gap = scene.analysis.gaps.largest_in_steps[0]
    collects = replace(scene.analysis.findings[0], id="garbage-collection")
    found = replace(scene.analysis, findings=(*scene.analysis.findings, collects))
    assert gap.cause == "data_feeding"
    for charges, id in (
        ({"garbage-collection": 3, "data-feeding": 2}, "garbage-collection"),
        ({"data-feeding": 3, "garbage-collection": 2}, "data-feeding"),
        ({"host-work": 3, "garbage-collection": 2}, "data-feeding"),
    ):
        finding = finding_of(replace(gap, charges=charges), found)
        assert finding is not None
        assert finding.id == id


def test_a_planted_wait_is_told_with_what_is_around_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    write_nsys(simulate(Plan(ranks=2, steps=8, data_wait_ns=3_000_000, sync_every_step=True)), path)
    with open_trace(path) as trace:
        scene = read_scene(trace)
        assert scene.analysis is not None
        gap = scene.analysis.gaps.largest_in_steps[0]
        detail = detail_of(trace, scene, gap)
    assert gap.cause == "data_feeding"
    assert detail.finding is not None
    assert detail.finding.id == "data-feeding"
    assert detail.after is not None
    assert (detail.after.kind, detail.after.bytes) == (Kind.COPY_H2D, 38_535_168)
    assert detail.after.start_ns == gap.end_ns
    assert detail.before is not None
    assert detail.before.end_ns == gap.start_ns
    assert detail.launch is not None
    assert "Memcpy" in detail.launch.name
    assert gap.start_ns < detail.launch.start_ns < gap.end_ns
    waits = [each for each in detail.host if each.kind == Kind.OS_RUNTIME]
    assert waits
    assert waits[0].ns == pytest.approx(3_000_000, rel=0.25)
    assert len(detail.others) == 1


@pytest.fixture
def ranged(tmp_path: Path) -> Export:
    """A gap of 8 µs, for most of which the host is in two ranges of three."""
    export = Export()
    for number, (start, kernel) in enumerate([(0, "at::native::add"), (9_000, "gemm")], 1):
        export.call(start, start + 10, "cudaLaunchKernel", correlation=number)
        name = export.string(kernel)
        export.kernel(start + 20, start + 1_000, correlationId=number, demangledName=name)
    values = {"eventType": PUSH_POP_RANGE, "globalTid": THREAD, "domainId": 0}
    for start, end, text in (
        (0, 20_000, "epoch"),
        (500, 8_900, "optimizer"),
        (1_100, 1_200, "log"),
    ):
        export.add(NVTX, start=start, end=end, text=text, **values)
    return export


def test_a_gap_has_the_innermost_range_that_its_host_was_in(ranged: Export, tmp_path: Path) -> None:
    with open_trace(ranged.write(tmp_path / "trace.sqlite")) as trace:
        scene = read_scene(trace)
        assert scene.analysis is not None
        (gap,) = scene.analysis.gaps.largest
        assert gap.evidence.endswith(", in the range optimizer")
        assert detail_of(trace, scene, gap).gap == gap


def test_python_lines_are_asked_for_where_there_are_none(ranged: Export, tmp_path: Path) -> None:
    with open_trace(ranged.write(tmp_path / "without.sqlite")) as trace:
        assert "record again with `gputrace record --python`" in analyze(trace).gaps.hint
    line = ranged.string("train.py:7 step")
    ranged.add(SAMPLE, start=5_000, globalTid=THREAD, nameId=line, innerNameId=line)
    with open_trace(ranged.write(tmp_path / "with.sqlite")) as trace:
        gaps = analyze(trace).gaps
        assert gaps.largest[0].evidence.endswith("at train.py:7 step (1 of 1 samples)")
        assert gaps.hint == ""
