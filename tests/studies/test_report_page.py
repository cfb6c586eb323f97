"""The page of a study, and the studies that come with gputrace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from bokeh.models import FactorRange

from gputrace.studies import report
from gputrace.studies.database import Configuration
from gputrace.studies.framework_environments import Framework, find_workloads
from gputrace.studies.measures import RunResult
from gputrace.studies.plan import PlannedRun, arguments_of, read_study
from gputrace.studies.report import find_charts
from gputrace.studies.summary import summarize
from tests.helpers import planted_study as planted
from tests.helpers.chromium import Browser, chromium, needs_chromium
from tests.helpers.planted_study import run, study

STUDIES: Final = sorted((Path(__file__).parents[2] / "workloads" / "studies").glob("*.toml"))


@pytest.mark.parametrize(
    ("name", "charts"),
    [
        ("scaling", {"rates", "efficiency", "losses", "classes"}),
        ("placements", {"rates", "efficiency", "losses", "classes", "compute", "memory"}),
        ("loader", {"rates", "classes"}),
        ("host", {"rates"}),
    ],
)
def test_a_page_has_the_charts_that_fit_the_study(name: str, charts: set[str]) -> None:
    assert set(find_charts(summarize(getattr(planted, name)()))) == charts


def test_speeds_are_bars_where_lines_over_gpus_would_leave_some_out() -> None:
    frameworks = [run(100, framework="jax", gpus=gpus) for gpus in (1, 2)]
    alone = run(100, framework="keras", gpus=1)
    lines, bars = (
        find_charts(summarize(study(*runs)))["rates"] for runs in (frameworks, [*frameworks, alone])
    )
    assert lines.xaxis.axis_label == "GPUs"
    assert isinstance(bars.y_range, FactorRange)
    assert bars.y_range.factors == ["keras, 1 GPU", "jax, 2 GPUs", "jax, 1 GPU"]
    assert "The dashed line" in report.render_html(summarize(study(*frameworks)))
    assert "The dashed line" not in report.render_html(summarize(study(*frameworks, alone)))


def test_sentences_in_tables_begin_on_the_left() -> None:
    shown = report.render_html(summarize(planted.staging()))
    assert '<td class="text">the GPU waits for data</td>' in shown
    written = report.render(summarize(planted.staging()), "markdown")
    assert "|  | evidence |\n| :-- | :-- |" in written


def test_what_is_less_than_on_the_fewest_gpus_is_drawn_to_the_left() -> None:
    chart: Any = find_charts(summarize(planted.scaling()))["losses"]
    drawn = [own.data_source.data for own in chart.renderers]
    ends = {name: [data[name] for data in drawn if any(data[name])] for name in ("launch", "h2d")}
    assert all(value <= 0 for data in ends["launch"] for value in data)
    assert all(value >= 0 for data in ends["h2d"] for value in data)


def test_the_range_of_the_fastest_is_within_the_chart() -> None:
    bars = [run(rate, framework=name) for name in ("jax", "torch") for rate in (100, 300)]
    lines = [run(rate, gpus=gpus) for gpus in (1, 2) for rate in (50 * gpus, 150 * gpus)]
    for runs, axis in ((bars, "x_range"), (lines, "y_range")):
        chart = find_charts(summarize(study(*runs)))["rates"]
        assert getattr(chart, axis).end > 300


def test_words_of_scripts_are_no_html() -> None:
    failed = RunResult({"framework": "jax"}, 1, True, "failed", "<script>alert(1)</script>")
    text = report.render_html(summarize(study(run(100), failed, question="<b>Why?</b>")))
    assert "<script>alert(1)" not in text
    assert "<b>Why?" not in text


def test_a_study_of_which_nothing_ran_has_a_page() -> None:
    skipped = RunResult({"framework": "jax"}, 1, True, "skipped", "no GPU")
    assert "no GPU" in report.render_html(summarize(study(skipped)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as started:
        yield started


@needs_chromium
@pytest.mark.parametrize("name", ["scaling", "placements", "host"])
def test_the_page_opens_without_errors_and_loads_nothing(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    target = tmp_path / "results.html"
    target.write_text(report.render_html(summarize(getattr(planted, name)())), encoding="utf-8")
    browser.open(target.as_uri())
    assert browser.run("document.querySelectorAll('.chart').length") > 0
    assert browser.complaints == []
    assert [one for one in browser.requests if not one.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: str(path.stem))
def test_a_ready_study_is_short_and_asks_something(path: Path) -> None:
    ready = read_study(path)
    assert ready.question.endswith("?")
    assert ready.title != path.stem
    assert len(path.read_text(encoding="utf-8").splitlines()) < 30


def test_the_documentation_lists_every_ready_study() -> None:
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    assert [path.name for path in STUDIES if path.name not in text] == []
    assert STUDIES


def test_a_study_may_be_called_as_the_list_of_frameworks_is(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    for folder in (tmp_path, tmp_path / "studies"):
        (folder / "frameworks.toml").write_text("")
    found = find_workloads(tmp_path / "studies" / "frameworks.toml", None)
    assert found == tmp_path / "frameworks.toml"


def test_cores_are_those_of_the_machine_that_runs_it() -> None:
    settings = {"framework": "torch", "gpus": 1, "workers": "cores"}
    planned = PlannedRun(
        Configuration("abc", "torch", 1, settings), Framework("torch", "", Path()), 1, True
    )
    words = arguments_of(planned)
    assert words[words.index("--workers") + 1] == str(len(os.sched_getaffinity(0)))
