"""The truth about trainings with planted faults, and how first lines are judged by it."""

from __future__ import annotations

import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.causes import judge as judging
from benchmarks.causes import peers
from benchmarks.causes.judge import Answer, Truth, judge, of_gputrace, truths
from benchmarks.causes.table import sums, table
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


def test_what_is_foretold_is_of_the_first_cure_of_the_finding() -> None:
    first = {"id": "host-work", "message": "m", "advice": "a", "details": [], "ranks": [0]}
    cure = {"finding": "host-work", "now_ns": 100, "step_ns": 60, "low_ns": 50, "high_ns": 90}
    other = cure | {"finding": "launch-bound", "step_ns": 10}
    found = {"findings": [first | {"impact_ns": 30}], "steps": {"mean_ns": 100}}
    foretold = of_gputrace(found | {"what_if": [other, cure]}).foretold
    assert foretold == pytest.approx((0.1, 0.4, 0.5))
    assert of_gputrace(found | {"what_if": [other]}).foretold is None


def test_a_peers_answer_counts_as_what_it_could_mean() -> None:
    truth = next(truth for truth in TRUTHS if truth.name == "moving_average")
    waits = Answer("host_wait", means=("launch-bound",), broad=True)
    assert judge(truth, waits).cause
    elsewhere = next(truth for truth in TRUTHS if truth.name == "tidy_memory")
    assert not judge(elsewhere, waits).cause
    assert not judge(elsewhere, waits).accuses
    assert judge(elsewhere, Answer("cuda-sync-api", means=("sync-bound",))).accuses


def test_the_table_has_a_row_for_each_program_and_a_column_for_each_peer() -> None:
    ours = {"part": "tidy_memory", "tool": "gputrace", "words": "", "ranks": [], "saves": 0.4}
    answers = [
        ours | {"run": 1, "cause": "alloc-stall", "foretold": [0.1, 0.3, 0.5]},
        ours | {"run": 2, "cause": "launch-bound", "foretold": None},
        {"part": "tidy_memory", "tool": "HTA", "run": 1, "cause": "host_wait", "words": ""}
        | {"means": ["launch-bound"], "broad": True, "ranks": []},
    ]
    steps = [
        {"part": "tidy_memory", "how": how, "ms": ms} for how, ms in (("sick", 8), ("cured", 6))
    ]
    kept = {"answers": answers, "steps": steps}
    head, row = table(TRUTHS, kept)
    shown = dict(zip(head, row, strict=True))
    assert shown["first line"] == "`alloc-stall` ×1, `launch-bound` ×1"
    assert (shown["right"], shown["accuses"], shown["measured"]) == ("1", "1", "25 %")
    assert (shown["costs"], shown["foretold"]) == ("40 %", "30 (10 to 50) %")
    assert shown["HTA"] == "host_wait: names no cause"
    assert sums(TRUTHS, kept).splitlines() == [
        "gputrace: 1 of 2 first lines right, 0 of 2 places, 1 false accusations",
        "HTA: 0 of 1 first lines right, 0 of 1 places, 0 false accusations",
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A recording with kernels from 0 to 90 ms."""
    path = tmp_path / "trace.sqlite"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
        made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 10), (80000000, 90000000)")
    return path


def program(path: Path, words: str) -> str:
    path.write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("ns", "cause", "broad"), [(4_000_000, "cuda-sync-api", False), (2_000_000, "gpu-starv", True)]
)
def test_nsys_says_first_what_takes_longest_and_idle_time_where_that_is_little(
    ns: int, cause: str, broad: bool, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"""case "$*" in
*cuda-sync-api:rows=1000000:start=30000000:end=90000000*) each={ns} ;;
*gpu-starv*) each=50000000 ;;
*) exit ;;
esac
printf 'Duration (ns),Start (ns)\n%s,1\n99000000,2\n99000000,3\n' $each"""
    monkeypatch.setenv("GPUTRACE_BENCH_NSYS", program(tmp_path / "nsys", said))
    answer = peers.nsys(trace)
    assert answer is not None
    assert (answer.cause, answer.broad) == (cause, broad)


def test_tracelens_says_the_largest_part_of_its_timeline_and_where_the_costliest_operation_is(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = """while [ "$1" != --output_csvs_dir ]; do shift; done
cd "$2"
printf 'type,percent\nidle_time,20\ncomputation_time,80\n' >gpu_timeline.csv
printf 'name,call_stack_full\naten::mm,main.py(7): f\n' >unified_perf_summary.csv"""
    program(tmp_path / "TraceLens_generate_perf_report_pytorch", said)
    monkeypatch.setenv("GPUTRACE_BENCH_TRACELENS_PYTHON", str(tmp_path / "python"))
    answer = peers.tracelens(trace)
    assert answer is not None
    assert (answer.cause, answer.means) == ("computation_time", ("compute-bound",))
    assert "main.py:7: f" in answer.words
