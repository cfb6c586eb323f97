"""A window of a large trace is read without the rest, and gives the same answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import gputrace
from gputrace.api import OpenTrace, Report
from gputrace.cli import analyze
from gputrace.errors import InputError, UsageError
from gputrace.model.options import Window
from gputrace.model.trace import Trace
from gputrace.readers import open as opening
from gputrace.readers.registry import try_open
from gputrace.store import slice as slicing
from tests.helpers.kineto import event, kernel, write
from tests.helpers.rank_files import Node, write_parts
from tests.synthetic import Plan, Recording, simulate, write_kineto, write_nsys, write_nvprof

NOTE = "of this large trace is read"


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
    monkeypatch.setattr(slicing, "LARGE", 0)
    monkeypatch.setattr(slicing, "_AROUND_NS", 0)


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
        monkeypatch.setattr(slicing, "LARGE", 0)
        monkeypatch.setattr(slicing, "_AROUND_NS", 0)
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


class TestText:
    """Text is gone through when it is opened, and again for each window."""

    @pytest.fixture(autouse=True)
    def long(self, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """All text is long."""
        monkeypatch.setattr(opening, "LARGE", 0)

    @pytest.fixture(params=["apart", "packed"])
    def ranks(
        self, request: pytest.FixtureRequest, recording: Recording, tmp_path: Path
    ) -> list[Path]:
        (tmp_path / "ranks").mkdir()
        return write_kineto(recording, tmp_path / "ranks", packed=request.param == "packed")

    @pytest.mark.parametrize(("number", "workers"), [(1, 2), (2, 1)])
    def test_a_window_gives_what_it_gives_of_the_whole(
        self, ranks: list[Path], number: int, workers: int
    ) -> None:
        with gputrace.open(*ranks[:number]) as trace:
            window = middle(trace)
            whole = trace.analyze(time=window)
        with gputrace.open(*ranks[:number], windows=True, workers=workers) as trace:
            part = trace.analyze(time=window)
            assert part == trace.analyze(time=window)
        assert figures(part) == figures(whole)
        assert [note for note in part.warnings if NOTE in note]
        assert not [note for note in whole.warnings if NOTE in note]

    def test_only_rows_around_the_window_are_held(self, ranks: list[Path]) -> None:
        rows = []
        with opening.open_traces(ranks[:1]) as whole:
            first, last = whole.origin, int(whole.events(whole.kinds, ["end"]).end.max())
            middle = (first + last) // 2
            rows.append(len(whole.events(whole.kinds, ["start"])))
        with opening.open_traces(ranks[:1], windows=True) as trace:
            window = Window(middle, middle + (last - first) // 50)
            with slicing.windowed(trace, window, None) as part:
                rows.append(len(part.events(part.kinds, ["start"])))
        assert rows[1] < rows[0] / 10

    def test_a_window_with_nothing_in_it_is_told(self, ranks: list[Path]) -> None:
        told = pytest.raises(UsageError, match="nothing was recorded in that window")
        with gputrace.open(*ranks, windows=True) as trace, told:
            trace.analyze(time="500s:501s")

    def test_without_a_window_it_is_read_whole(self, ranks: list[Path]) -> None:
        with gputrace.open(*ranks) as held, gputrace.open(*ranks, windows=True) as trace:
            assert trace.analyze() == held.analyze()

    def test_a_break_is_met_when_it_is_opened(self, ranks: list[Path], tmp_path: Path) -> None:
        broken = ranks[0].with_name("broken.json")
        broken.write_bytes(ranks[0].read_bytes()[:-2_000])
        with pytest.raises(InputError, match="cut off"):
            gputrace.open(broken, windows=True)
        with gputrace.open(broken, keep_going=True, windows=True) as trace:
            report = trace.analyze(time=(0, 300_000_000))
        assert [left.path for left in report.left_out] == [str(broken)]

    def test_rows_without_times_are_counted_once(self, tmp_path: Path) -> None:
        lost = event("cuda_runtime", "cudaLaunchKernel", 1, 1, ts="nothing")
        events = [kernel(1_000 * n, 500) for n in range(1, 100)]
        path = write(tmp_path / "run.json", lost, *events, lost)
        with gputrace.open(path) as held, gputrace.open(path, windows=True) as trace:
            window = (10_000_000, 20_000_000)
            dropped = [opened.analyze(time=window).dropped_rows for opened in (held, trace)]
        assert dropped[0] == dropped[1] == {"no timestamp": 2}

    def test_the_nearest_work_outside_tells_how_long_the_gpu_idles(self, tmp_path: Path) -> None:
        """A kernel runs for 1 ms at 0 s and at 60 s; a step lasts all the time."""
        step = event("user_annotation", "ProfilerStep#1", 100, 70e6)
        ends = [kernel(100 + 60e6 * n, 1_000) for n in range(2)]
        path = write(tmp_path / "run.json", step, *ends)
        with gputrace.open(path) as held, gputrace.open(path, windows=True) as trace:
            whole, part = (opened.analyze(time="20s:30s") for opened in (held, trace))
        assert figures(part) == figures(whole)
        assert part.gaps.total_ns == 10_000_000_000

    def test_the_command_holds_nothing_but_the_window(
        self, ranks: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[Trace] = []

        def noting(*how: object) -> Trace:
            opened.append(try_open(*how))  # type: ignore[arg-type]
            return opened[-1]

        monkeypatch.setattr(opening, "try_open", noting)
        for options, held in ((["--time", "0s:1s"], False), ([], True)):
            CliRunner().invoke(analyze.analyze, [str(ranks[0]), *options], catch_exceptions=False)
            assert opened[-1].held == held
