"""The truth about trainings with planted faults, and how first lines are judged by it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.causes import judge as judging
from benchmarks.causes.judge import Answer, Truth, judge, of_gputrace, truths
from benchmarks.measure import ROOT
from gputrace.analyzers.findings import RULES

FOLDER = Path(judging.__file__).parent
TRUTHS = truths(tomllib.loads((FOLDER / "truth.toml").read_text(encoding="utf-8")), ROOT)
IDS = {rule.__name__.replace("_", "-") for rule in RULES}


def test_every_program_has_its_truth() -> None:
    programs = {path.stem for path in FOLDER.glob("programs/*.py")}
    assert programs - {truth.name for truth in TRUTHS} == {"parts", "trainer_lib"}


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: truth.name)
def test_the_truth_names_findings_and_functions_that_exist(truth: Truth) -> None:
    assert truth.path.is_file()
    assert set(truth.first) <= IDS
    within = {name for name in truth.where if not judging.lines_of(truth, (name,))}
    assert not within


def verdict(name: str, cause: str, words: str = "", *ranks: int) -> judging.Verdict:
    truth = next(truth for truth in TRUTHS if truth.name == name)
    return judge(truth, Answer(cause, words, ranks))


def test_a_first_line_must_name_the_cause_and_the_place() -> None:
    at = max(line for _, line in judging.lines_of(TRUTHS[4], TRUTHS[4].where))
    assert TRUTHS[4].name == "moving_average"
    found = verdict("moving_average", "launch-bound", f"the host is at moving_average.py:{at} x")
    assert (found.cause, found.place, found.accuses) == (True, True, False)
    other = verdict("moving_average", "data-feeding", "the host is at other.py:3 x")
    assert (other.cause, other.place, other.accuses) == (False, False, True)


def test_a_line_that_blames_nothing_accuses_nothing() -> None:
    silent = verdict("recommender", "compute-bound", "its speed is the limit")
    assert (silent.cause, silent.accuses) == (False, False)
    assert verdict("recommender", "compute-bound", "92% of it in the optimizer").cause


def test_the_rank_that_holds_others_up_is_a_part_of_the_place() -> None:
    words = "the host is at rank_zero_log.py:28 SamplePage.write"
    assert verdict("rank_zero_log", "late-host", words, 0).place
    assert not verdict("rank_zero_log", "late-host", words, 1).place


def test_a_finding_saves_a_part_of_the_step_by_the_programs_clock() -> None:
    first = {"id": "host-work", "message": "m", "advice": "a", "details": ["d"], "ranks": [0]}
    found: dict[str, Any] = {"findings": [first | {"impact_ns": 5_000_000}]}
    found["steps"] = {"mean_ns": 10_000_000}
    assert of_gputrace(found).saves == 0.5
    assert of_gputrace(found, 20.0).saves == 0.25
    assert of_gputrace({"findings": [], "steps": {}}) == Answer("")
