"""``gputrace compare``: its forms, its words, its exit codes."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.api import ComparisonReport
from gputrace.model.comparison import Comparison
from gputrace.model.trace import Trace
from tests.helpers import command
from tests.helpers.command import assert_refused
from tests.helpers.handmade import MS, Run, train

FORMS = ("text", "json", "markdown", "csv")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run, and one that waits 1 ms for data in each step."""
    folder = tmp_path_factory.mktemp("compared")
    made = []
    for name, wait in (("before", 0), ("after", MS)):
        run = Run()
        train(run, wait=wait)
        made.append(run.export.write(folder / f"{name}.sqlite"))
    return made


@pytest.fixture(scope="module")
def report(paths: list[Path]) -> ComparisonReport:
    return gputrace.compare(*paths)


@pytest.mark.parametrize("form", FORMS)
def test_the_command_prints_what_the_comparison_renders(
    form: str, paths: list[Path], report: ComparisonReport
) -> None:
    ran = command.gputrace("compare", *paths, "--format", form)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == report.render(form)


def test_the_verdict_comes_first(report: ComparisonReport) -> None:
    first = report.render().splitlines()[0]
    assert first.startswith("B is 1.40x slower (1.35x to 1.44x): a step takes 3.35 ms")
    assert report.render("markdown").startswith("**B is 1.40x slower")


def test_the_text_fits_in_80_columns(report: ComparisonReport) -> None:
    lines = report.render().splitlines()
    assert max(len(line) for line in lines if str(report.runs[0].paths[0])[:8] not in line) <= 80


def test_the_json_has_the_fields_of_the_results(report: ComparisonReport) -> None:
    found: dict[str, Any] = json.loads(report.render("json"))
    assert list(found) == [field.name for field in fields(Comparison)]
    assert (found["schema_version"], found["scaling"]) == (1, None)
    assert found["pair"]["step"]["difference_ns"] == 950_000
    assert [run["label"] for run in found["runs"]] == ["A", "B"]


def test_the_causes_that_grew_or_shrank_come_below_the_classes(report: ComparisonReport) -> None:
    grown = report.pair.causes[0] if report.pair else None
    assert grown is not None
    assert (grown.cause, grown.label) == ("data-feeding", "input: waiting for the next batch")
    assert (grown.a_ns, grown.b_ns, grown.difference_ns) == (2_850, 952_850, 950_000)
    lines = report.render().splitlines()
    title = "Why (a step, mean over the GPUs; largest changes first)"
    row = lines[lines.index(title) + 2]
    assert " ".join(row.split()) == "input: waiting for the next batch 2.85 µs 953 µs +950 µs"
    assert lines.index(title) > next(n for n, line in enumerate(lines) if line[:5] == "Where")


def test_causes_sum_to_the_step_without_computing(report: ComparisonReport) -> None:
    assert report.pair is not None
    assert report.pair.step is not None
    computing = next(row for row in report.pair.classes if row.name == "compute")
    for run in ("a_ns", "b_ns"):
        lost = sum(getattr(row, run) for row in report.pair.causes)
        whole = getattr(report.pair.step, run) - getattr(computing, run)
        assert lost == pytest.approx(whole, abs=len(report.pair.causes))


def test_the_csv_has_a_row_for_each_class_and_their_total(report: ComparisonReport) -> None:
    rows = list(csv.DictReader(report.render("csv").splitlines()))
    assert rows[0]["name"] == "total"
    assert (rows[0]["difference_ns"], rows[0]["changed"]) == ("950000", "True")
    assert {"compute", "h2d", "data_feeding"} <= {row["name"] for row in rows}


def test_runs_may_be_labelled(paths: list[Path]) -> None:
    ran = command.gputrace("compare", *paths, "--label", "main", "--label", "branch")
    assert ran.out.startswith("branch is 1.40x slower")
    assert "  main: " in ran.out


def test_a_folder_is_a_run(tmp_path: Path, paths: list[Path]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "part.sqlite").write_bytes(paths[0].read_bytes())
    found = json.loads(command.gputrace("compare", folder, paths[1], "--json").out)
    assert found["runs"][0]["paths"] == [str(folder / "part.sqlite")]


def test_steps_may_be_chosen(paths: list[Path]) -> None:
    found = json.loads(command.gputrace("compare", *paths, "--steps", "2:9", "--json").out)
    assert [run["steps"] for run in found["runs"]] == [7, 7]


def test_one_trace_is_open_at_a_time(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    enter, leave = Trace.__enter__, Trace.__exit__

    def entered(self: Trace) -> Trace:
        told.append("open")
        return enter(self)

    def left(self: Trace, *error: Any) -> None:
        told.append("closed")
        leave(self, *error)

    monkeypatch.setattr(Trace, "__enter__", entered)
    monkeypatch.setattr(Trace, "__exit__", left)
    gputrace.compare(*paths)
    assert told == ["open", "closed"] * 2


def test_a_notebook_shows_the_tables(report: ComparisonReport) -> None:
    assert report._repr_markdown_() == report.render("markdown")
    assert str(report) == report.render()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--batch", "many"), "64"),
        (("--batch", "0"), "above 0"),
        (("--batch", "1", "--global-batch", "2"), "not both"),
        (("--label", "one"), "label"),
        (("--steps", "x"), "FIRST:END"),
    ],
)
def test_wrong_usage(paths: list[Path], options: tuple[str, ...], word: str) -> None:
    assert_refused(command.gputrace("compare", *paths, *options), 2, word)


def test_one_run_is_no_comparison(paths: list[Path]) -> None:
    assert_refused(command.gputrace("compare", paths[0]), 2, "two traces")


def test_a_run_that_cannot_be_read(paths: list[Path], tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.sqlite"
    assert_refused(command.gputrace("compare", paths[0], nowhere), 3, str(nowhere))
