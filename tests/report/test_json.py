"""The names and sums that other programs rely on, in the JSON of every recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import gputrace
from gputrace.model.results import Analysis
from gputrace.report import to_json
from tests.helpers.recordings import SMALL

CAUSES: Final = ("recorder", "data_feeding", "sync", "alloc", "launch", "other_idle")
BUSY: Final = ("compute", "communication", "h2d", "other_copy", "memset")
NAMES: Final = {
    "": "schema_version source path paths span_ns gpus steps step_list phases breakdown gaps "
    "ledger causes findings",
    "gpus": "gpu gpu_known device rank host name kernels copies span_ns compute_ns "
    "communication_ns h2d_ns other_copy_ns memset_ns idle_ns",
    "steps": "source kind confidence count warmup_count steady_count mean_ns p50_ns p95_ns"
    " control_count",
    "step_list": "step rank gpu start_ns end_ns phase compute_ns communication_ns h2d_ns "
    "other_copy_ns memset_ns recorder_ns data_feeding_ns sync_ns alloc_ns launch_ns other_idle_ns",
    "phases": "phase rank start_ns end_ns idle_ns evidence step cost_ns before_ns after_ns "
    "communication_ns waits_for causes",
    "breakdown": "gpu device rank steps total_ns compute_ns communication_ns "
    "communication_wait_ns h2d_ns other_copy_ns memset_ns recorder_ns data_feeding_ns sync_ns "
    "alloc_ns launch_ns other_idle_ns host_data_ns",
    "gaps": "count total_ns by_cause largest",
    "gaps.largest": "gpu rank step start_ns end_ns cause evidence charges",
    "ledger": "cause path of gpu rank thread line ns evidence frame paid_by",
    "causes": "id parent label",
    "kernels": "steps total_ns count distinct top rest_count rest_ns families products "
    "has_tensor_cores has_tf32 first_gpu_only launches",
    "kernels.top": "name short family tensor_cores converts_layout count total_ns median_ns max_ns "
    "share by_gpu",
    "findings": "id severity gpus ranks impact_ns message advice evidence",
}
KINDS: Final = {
    *("training", "rl", "benchmark", "evaluation", "generation", "iterations", "pass"),
    *("start-up", "none"),
}
PHASES: Final = {"warmup", "steady", "validation", "checkpoint"}
SEVERITIES: Final = ["high", "medium", "low", "info"]


def total(row: dict[str, Any], names: tuple[str, ...]) -> int:
    return sum(row[f"{name}_ns"] for name in names)


@lru_cache
def read(path: Path) -> dict[str, Any]:
    with gputrace.open(path) as trace:
        text = trace.analyze().render("json")
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(params=SMALL)
def report(request: pytest.FixtureRequest, recording: Callable[[str], Path]) -> dict[str, Any]:
    return read(recording(request.param))


def rows(report: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The objects at one place of the report."""
    found: Any = report
    for name in filter(None, where.split(".")):
        found = found[name]
    return found if isinstance(found, list) else [found]


def test_types_are_those_of_the_schema(report: dict[str, Any]) -> None:
    assert json.loads(to_json(msgspec.convert(report, Analysis))) == report


@pytest.mark.parametrize("where", NAMES)
def test_all_names_are_there(where: str, report: dict[str, Any]) -> None:
    for row in rows(report, where):
        assert set(NAMES[where].split()) <= row.keys()


def test_the_words_are_those_agreed_on(report: dict[str, Any]) -> None:
    assert report["schema_version"] == 1
    assert report["source"] == "nsys"
    assert report["steps"]["kind"] in KINDS
    assert {step["phase"] for step in report["step_list"]} <= PHASES
    assert {gap["cause"] for gap in report["gaps"]["largest"]} <= set(CAUSES)
    assert report["gaps"]["by_cause"].keys() <= set(CAUSES)


def test_durations_and_counts_are_integers(report: dict[str, Any]) -> None:
    for where in NAMES:
        for row in rows(report, where):
            for name, value in row.items():
                if name.endswith("_ns") and value is not None:
                    assert type(value) is int, name
    assert all(type(gpu["gpu_known"]) is bool for gpu in report["gpus"])


def test_the_classes_of_a_gpu_sum_to_its_span(report: dict[str, Any]) -> None:
    for gpu in report["gpus"]:
        assert total(gpu, (*BUSY, "idle")) == gpu["span_ns"] <= report["span_ns"]


def test_the_classes_of_the_breakdown_sum_to_its_total(report: dict[str, Any]) -> None:
    assert len(report["breakdown"]) == len(report["gpus"])
    for row, gpu in zip(report["breakdown"], report["gpus"], strict=True):
        assert total(row, (*BUSY, *CAUSES)) == row["total_ns"]
        assert (row["communication_wait_ns"] or 0) <= row["communication_ns"]
        if row["steps"] == 0:
            assert row["total_ns"] == gpu["span_ns"]
            assert total(row, CAUSES) == gpu["idle_ns"]


def test_the_classes_of_a_step_sum_to_its_length(report: dict[str, Any]) -> None:
    for step in report["step_list"]:
        assert total(step, (*BUSY, *CAUSES)) == step["end_ns"] - step["start_ns"]


def test_the_gaps_are_the_idle_time(report: dict[str, Any]) -> None:
    gaps = report["gaps"]
    assert gaps["total_ns"] == sum(gpu["idle_ns"] for gpu in report["gpus"])
    assert gaps["total_ns"] == sum(gaps["by_cause"].values())
    assert len(gaps["largest"]) == min(50, gaps["count"])
    lengths = [gap["end_ns"] - gap["start_ns"] for gap in gaps["largest"]]
    assert lengths == sorted(lengths, reverse=True)


def test_the_ledger_of_a_gpu_sums_to_the_time_without_computing(report: dict[str, Any]) -> None:
    for row in report["breakdown"] if report["gpus"] else ():
        mine = [each for each in report["ledger"] if each["paid_by"] == row["rank"]]
        lost = [
            each["ns"] for each in mine if each["gpu"] == row["gpu"] and each["of"] != "compute"
        ]
        assert sum(lost) == row["total_ns"] - row["compute_ns"]


def test_every_cause_is_in_the_tree(report: dict[str, Any]) -> None:
    parents = {node["id"]: node["parent"] for node in report["causes"]}
    assert set(parents.values()) <= {"", *parents}
    for row in report["ledger"]:
        assert {row["cause"], *row["path"]} <= set(parents)


def test_the_causes_of_a_gap_sum_to_its_length(report: dict[str, Any]) -> None:
    for gap in (*report["gaps"]["largest"], *report["gaps"]["largest_in_steps"]):
        assert sum(gap["charges"].values()) == gap["end_ns"] - gap["start_ns"]
        assert list(gap["charges"].values()) == sorted(gap["charges"].values(), reverse=True)


def test_findings_come_in_order_of_severity(report: dict[str, Any]) -> None:
    predicted = {cure["finding"] for cure in report["what_if"]}
    moved = predicted | {"compute-bound", "launch-bound", "communication-exposed"}
    rest = [finding for finding in report["findings"] if finding["id"] not in moved]
    severities = [SEVERITIES.index(finding["severity"]) for finding in rest]
    assert severities == sorted(severities)
    ids = {gpu["gpu"] for gpu in report["gpus"]}
    for finding in report["findings"]:
        assert set(finding["gpus"]) <= ids
        assert finding["message"]
        assert finding["advice"]
        assert "\n" not in finding["message"] + finding["advice"]


def test_steps_are_counted_as_they_are_listed(report: dict[str, Any]) -> None:
    steps, listed = report["steps"], report["step_list"]
    assert 0 <= steps["confidence"] <= 1
    if steps["kind"] == "none":
        assert (steps["count"], listed, steps["mean_ns"]) == (0, [], None)
    else:
        assert steps["count"] == len({step["step"] for step in listed})
