"""A window of a large SQLite trace is read without the rest, and gives the same answer."""

from __future__ import annotations

from pathlib import Path

import pytest

import gputrace
from gputrace.api import OpenTrace, Report
from gputrace.errors import UsageError
from gputrace.traces import within
from tests.parts import Node, write_parts
from tests.synthetic import Plan, Recording, simulate, write_nsys, write_nvprof

NOTE = "a large trace, of which only "


@pytest.fixture(scope="module")
def recording() -> Recording:
    return simulate(Plan(steps=12, ranks=2, kernels_per_step=30, data_wait_ns=20_000_000))


@pytest.fixture(params=["nsys", "nvprof", "two machines"])
def paths(request: pytest.FixtureRequest, recording: Recording, tmp_path: Path) -> list[Path]:
    if request.param == "nsys":
        write_nsys(recording, tmp_path / "run.sqlite")
        return [tmp_path / "run.sqlite"]
    if request.param == "nvprof":
        write_nvprof(recording, tmp_path / "runs")
        return sorted((tmp_path / "runs").iterdir())
    nodes = [Node("node0", (0,)), Node("node1", (1,), began_ns=5_000_000)]
    return write_parts(recording, tmp_path / "parts", nodes)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trace is large, and little is read around a window."""
    monkeypatch.setattr(within, "_LARGE", 0)
    monkeypatch.setattr(within, "_AROUND_NS", 0)


def figures(report: Report) -> list[object]:
    gaps = [(g.gpu, g.start_ns, g.end_ns, g.cause) for g in report.gaps.largest]
    return [report.gpus, report.span_ns, report.origin_ns, report.paths, sorted(gaps)]


def middle(trace: OpenTrace) -> tuple[int, int]:
    """A window, after the trace's origin, about the middle of its GPUs' work."""
    report = trace.analyze()
    start = report.gpus[0].start_ns - report.origin_ns
    return start + report.span_ns // 3, start + report.span_ns // 2


def test_gpus_and_gaps_are_those_of_the_whole(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gputrace.open(*paths) as trace:
        window = middle(trace)
        whole = trace.analyze(time=window)
        monkeypatch.setattr(within, "_LARGE", 0)
        monkeypatch.setattr(within, "_AROUND_NS", 0)
        part = trace.analyze(time=window)
        after = trace.analyze()
    assert figures(part) == figures(whole)
    assert [note for note in part.warnings if NOTE in note]
    assert not [note for note in (*whole.warnings, *after.warnings) if NOTE in note]
    assert after.span_ns > whole.span_ns


def test_nothing_is_left_behind(
    large: None, paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with gputrace.open(*paths) as trace:
        window = middle(trace)
        trace.analyze(time=window)
        with pytest.raises(UsageError, match="in that window"):
            trace.analyze(time="500s:501s")
        trace.export("csv", tmp_path / "tables", time=window)
    assert (tmp_path / "tables" / "events.csv").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
