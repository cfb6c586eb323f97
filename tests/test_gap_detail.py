"""The detail of a gap, read from around it, says what the analysis of the whole trace says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from gputrace.analyzers.findings.context import Facts
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.timeline_model import Scene, full_scene
from gputrace.analyzers.timeline_model.gaps import GapDetail, describe_gap
from gputrace.model.events import Kind
from gputrace.model.results import Gap
from gputrace.model.trace import Trace
from gputrace.readers.registry import open_trace
from tests.synthetic import Plan, simulate, write_nsys

STARVED: Final = "h200x4-ddp-starved-9-15.sqlite"


class Watcher:
    """Takes what the analysis was made of."""

    facts: Facts

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        pass

    def facts_found(self, facts: Facts) -> None:
        self.facts = facts


def scene_of(trace: Trace) -> Scene:
    watcher = Watcher()
    analysis = analyze(trace, watcher=watcher)
    return full_scene(watcher.facts, analysis)


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
        scene = scene_of(whole)
        assert scene.analysis is not None
        for gap in (*scene.analysis.gaps.largest[:20], *scene.analysis.gaps.largest_in_steps[:20]):
            detail = detail_of(fresh, scene, gap)
            assert detail.gap == gap
            assert sum(detail.by_cause.values()) == gap.length_ns
            for other in detail.others:
                assert sum(other.shares.values()) <= gap.length_ns


def test_a_planted_wait_is_told_with_what_is_around_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    write_nsys(simulate(Plan(ranks=2, steps=8, data_wait_ns=3_000_000, sync_every_step=True)), path)
    with open_trace(path) as trace:
        scene = scene_of(trace)
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
