"""Summaries by `gputrace bench` of studies whose truth is known."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.model.time_class import CLASSES
from gputrace.studies import report
from gputrace.studies.database import Configuration, Database, Run, StudyHeader, StudyPlan
from gputrace.studies.measures import (
    GpuMeasure,
    Measure,
    Prediction,
    Results,
    RunResult,
    measure,
    measure_runs,
    read_results,
)
from gputrace.studies.results import Summary
from gputrace.studies.summary import check_run, summarize
from tests.helpers import command
from tests.helpers import planted_study as planted
from tests.helpers.handmade import STEP
from tests.helpers.handmade import Run as Thread
from tests.helpers.planted_study import MS, classes, measured, run, study

ALL: Final = ("scaling", "pairs", "cards", "staging", "placements", "loader", "host")


def made(name: str) -> Results:
    results: Results = getattr(planted, name)()
    return results


def lost(summary: Summary, label: str) -> dict[str, int]:
    (row,) = (row for row in summary.efficiency if row.label == label)
    return {loss.name: loss.ns for loss in row.losses}


def test_speed_up_and_efficiency_are_beside_the_fewest_gpus() -> None:
    rows = summarize(planted.scaling()).efficiency
    assert [row.gpus for row in rows] == [1, 2, 4]
    assert [row.speed_up for row in rows] == pytest.approx([1, 2 / 1.1, 4 / 1.25])
    assert [row.efficiency for row in rows] == pytest.approx([1, 1 / 1.1, 1 / 1.25])
    assert {row.base for row in rows} == {"1 GPU"}


def test_the_range_of_a_speed_up_is_of_the_repeats_that_are_furthest_apart() -> None:
    first, second, _ = summarize(planted.scaling()).efficiency
    assert first.bounds is None
    assert second.bounds is not None
    assert second.bounds.low == pytest.approx(2 / 1.1 * 0.99 / 1.01)
    assert second.bounds.high == pytest.approx(2 / 1.1 * 1.01 / 0.99)


def test_what_is_lost_is_split_by_class_and_sums_to_the_loss() -> None:
    summary = summarize(planted.scaling())
    assert lost(summary, "2 GPUs") == {
        "communication": 12 * MS,
        "compute": 0,
        "h2d": 0,
        "launch": -2 * MS,
    }
    assert sum(lost(summary, "4 GPUs").values()) == 25 * MS


steps = st.fixed_dictionaries({name: st.integers(0, 10**10) for name in CLASSES})


@given(base=st.lists(steps, min_size=1, max_size=4), own=st.lists(steps, min_size=1, max_size=4))
def test_losses_sum_to_the_loss_whatever_was_measured(
    base: list[dict[str, int]], own: list[dict[str, int]]
) -> None:
    runs = [
        run(100.0, measured(table), gpus=gpus, repeat=repeat)
        for gpus, tables in ((1, base), (4, own))
        for repeat, table in enumerate(tables, 1)
    ]
    summary = summarize(study(*runs))
    row = summary.efficiency[-1]
    assert row.step_ns is not None
    assert row.base_step_ns is not None
    assert sum(loss.ns for loss in row.losses) == row.step_ns - row.base_step_ns
    for shown in summary.rows:
        assert shown.classes is not None
        assert sum(shown.classes.values()) == shown.recorded_step_ns


def test_runs_of_other_settings_are_no_base() -> None:
    small = run(100, gpus=1, batch=32)
    large = run(300, gpus=2, batch=64)
    assert summarize(study(small, large)).efficiency == ()


def test_one_gpu_is_the_base_of_every_placement() -> None:
    rows = {row.label: row for row in summarize(planted.placements()).efficiency}
    assert rows["4 GPUs, dataparallel"].efficiency == pytest.approx(0.5)
    assert rows["4 GPUs, ddp"].efficiency == pytest.approx(0.8)
    assert rows["4 GPUs, ddp"].base == "1 GPU, single"


def test_the_first_gpu_of_dataparallel_has_twice_the_work() -> None:
    skews = {row.label: row.skew for row in summarize(planted.placements()).placements}
    assert skews == {"4 GPUs, dataparallel": pytest.approx(2.0), "4 GPUs, ddp": pytest.approx(1.0)}


def test_figures_are_medians_with_the_least_and_the_greatest() -> None:
    rate = summarize(planted.scaling()).rows[0].rate
    assert rate is not None
    assert (rate.median, rate.low, rate.high, rate.count) == pytest.approx((640, 633.6, 646.4, 3))


def test_a_step_is_what_the_rate_makes_of_the_batches_of_all_gpus() -> None:
    found = [row.step_ns and row.step_ns.median for row in summarize(planted.scaling()).rows]
    assert found == pytest.approx([100 * MS, 110 * MS, 125 * MS])


def test_bare_runs_tell_the_speed_and_what_recording_costs() -> None:
    bare = run(1000, gpus=1, recorded=False)
    recorded = run(980, measured(classes(compute=64)), gpus=1)
    (row,) = summarize(study(bare, recorded)).rows
    assert row.rate is not None
    assert row.rate.median == 1000
    assert row.overhead == pytest.approx(1000 / 980 - 1)
    assert row.classes is not None


def test_a_prediction_is_set_beside_what_came() -> None:
    (row,) = summarize(planted.staging()).predictions
    assert (row.change, row.cure) == ("staging off → on", "prefetch")
    assert (row.before_ns, row.predicted_ns, row.measured_ns) == (100 * MS, 82 * MS, 80 * MS)
    assert row.error == pytest.approx(0.025)
    assert (row.gap_before_ns, row.gap_after_ns) == (20 * MS, 4 * MS)


def test_the_way_back_is_no_cure() -> None:
    foretold = Prediction("prefetch", 100 * MS, 82 * MS, 80 * MS, 90 * MS)
    runs = [run(800, measured(classes(compute=80), predictions=(foretold,)), staging="on")]
    assert summarize(study(*runs, run(640, staging="off"))).predictions == ()


def test_staging_is_what_the_cure_pinned_does_only_where_memory_is_pinned() -> None:
    foretold = tuple(
        Prediction(name, 100 * MS, 82 * MS, 80 * MS, 90 * MS) for name in ("prefetch", "pinned")
    )
    before = measured(classes(compute=100), predictions=foretold)
    after = measured(classes(compute=80))

    def cures(**pinned: str) -> list[str]:
        runs = (run(640, before, staging="off", **pinned), run(800, after, staging="on", **pinned))
        return [row.cure for row in summarize(study(*runs)).predictions]

    assert cures() == cures(pinned="off") == ["prefetch"]
    assert cures(pinned="on") == ["prefetch", "pinned"]


def test_a_prediction_says_how_many_of_the_recordings_made_it() -> None:
    foretold = Prediction("prefetch", 100 * MS, 82 * MS, 80 * MS, 90 * MS)
    runs = [
        run(640, measured(classes(compute=99)), staging="off", repeat=1),
        run(640, measured(classes(compute=100), predictions=(foretold,)), staging="off", repeat=2),
        run(800, measured(classes(compute=80)), staging="on"),
    ]
    summary = summarize(study(*runs))
    (row,) = summary.predictions
    assert (row.made, row.recordings) == (1, 2)
    assert "1 of 2" in report.render(summary, "text", 120)
    assert "predicted by" not in report.render(summarize(planted.staging()), "text", 120)


def test_ddp_was_foretold_by_both_kinds_of_dataparallel() -> None:
    ddp = Prediction("ddp", 160 * MS, 95 * MS, 90 * MS, 110 * MS)
    before = measured(classes(compute=160), predictions=(ddp,))
    runs = [run(800, before, gpus=2, update=n) for n in ("dataparallel", "dataparallel-loss")]
    last = run(1600, measured(classes(compute=80)), gpus=2, update="ddp")
    changes = [row.change for row in summarize(study(*runs, last)).predictions]
    assert changes == ["update dataparallel → ddp", "update dataparallel-loss → ddp"]


def test_placements_that_failed_are_none_to_set_beside_another() -> None:
    gpus = tuple(GpuMeasure(n, 0, "", 80 * MS, None, None, None) for n in (0, 1))
    done = run(800, measured(classes(compute=80), gpus=gpus), gpus=2, update="ddp")
    failed = RunResult({"framework": "torch", "gpus": 2, "update": "dataparallel"}, state="failed")
    assert summarize(study(done, failed)).placements == ()


def test_a_table_of_single_gpus_does_not_speak_of_means_over_gpus() -> None:
    assert "(mean over steps)" in report.render(summarize(planted.staging()), "text", 120)
    assert "(mean over steps and GPUs)" in report.render(summarize(planted.scaling()), "text", 120)


def test_each_setting_is_compared_where_all_others_are_the_same() -> None:
    effects = summarize(planted.loader()).effects
    workers = [row for row in effects if row.setting == "workers"]
    assert [(row.others, row.value) for row in workers] == [
        ("png", "2 workers"),
        ("png", "6 workers"),
        ("jpeg", "2 workers"),
        ("jpeg", "6 workers"),
    ]
    assert workers[0].speed_up == pytest.approx(120 / 92)
    assert workers[0].gap_ns == -28 * MS


def test_pairs_are_told_apart_by_their_link() -> None:
    pairs = summarize(planted.pairs()).pairs
    assert [(pair.gpus, pair.link) for pair in pairs] == [
        ((0, 1), "NV18"),
        ((0, 2), "PIX"),
        ((0, 3), "SYS"),
    ]
    assert [pair.communication_ns for pair in pairs] == [10 * MS, 20 * MS, 30 * MS]


def test_the_bandwidth_of_a_pair_is_that_of_copies_or_else_of_collectives() -> None:
    copies = planted.pairs().runs[0]
    own = classes(compute=80, communication=10)
    nccl = run(100, measured(own, bus_bandwidth=90 * 10**9), gpus=2, visible=[4, 5])
    found = {pair.gpus: pair.bandwidth for pair in summarize(study(copies, nccl)).pairs}
    assert found == {(0, 1): 200 * 10**9, (4, 5): 90 * 10**9}


def test_pairs_of_one_kind_of_link_are_said_to_be_so() -> None:
    assert "linked by NV18" in report.render(summarize(planted.pairs(["NV18"] * 3)), "text", 120)
    assert "linked by" not in report.render(summarize(planted.pairs()), "text", 120)


def test_a_card_with_a_lower_clock_is_slower_by_as_much() -> None:
    cards = summarize(planted.cards()).cards
    assert [card.sm_clock_mhz for card in cards] == [1980, 1980, 1782]
    assert [card.beside for card in cards] == pytest.approx([1, 1, 0.9])


@pytest.mark.parametrize(("name", "ok"), [("torch", True), ("mxnet", False), ("chainer", False)])
def test_recordings_are_held_against_what_scripts_say(name: str, ok: bool) -> None:
    checks = {check.label: check for check in summarize(planted.host()).checks}
    assert checks[name].ok is ok
    assert checks["cntk"].ok is None
    assert checks["torch"].difference == pytest.approx(0.02)
    assert "11 steps were found, 12 were run" in checks["chainer"].reason


def ranked(found: dict[int, int], **told: Any) -> RunResult:
    own = measured(None, found, step_ns=MS)
    return run(100, own, gpus=2, told={"steps": 20, "gpus": 2, "update": "ddp", **told})


def test_every_rank_must_have_all_steps() -> None:
    assert check_run("", ranked({0: 20, 1: 20})).ok
    assert not check_run("", ranked({0: 20, 1: 19})).ok
    assert not check_run("", ranked({0: 20})).ok
    assert check_run("", ranked({0: 20}, update="dataparallel")).ok


@pytest.mark.parametrize(("recorded_ms", "ok"), [(18.1, True), (21.9, True), (17.9, False)])
def test_short_waits_may_differ_by_what_lies_between_two_clocks(
    recorded_ms: float, ok: bool
) -> None:
    waits = {"data_wait_s": 0.020, "data_waits": 20}
    own = measured(None, {0: 20}, step_ns=MS, data_waits_ns=round(recorded_ms * MS))
    check = check_run("", run(100, own, told={"steps": 20, **waits}))
    assert check.ok is ok
    assert check.difference == pytest.approx(recorded_ms / 20 - 1)


def test_a_script_that_waits_unseen_does_not_hold() -> None:
    own = measured(None, {0: 20}, step_ns=MS)
    check = check_run("", run(100, own, told={"data_wait_s": 0.5, "data_waits": 20}))
    assert not check.ok
    assert check.reason == "no wait for data was recorded"


def test_a_trace_that_cannot_be_read_says_why_and_its_run_stays() -> None:
    broken = run(100, Measure(problem="t.sqlite: is empty"), gpus=1)
    summary = summarize(study(broken))
    assert summary.rows[0].done == 1
    assert summary.rows[0].rate is not None
    assert summary.checks[0].reason == "t.sqlite: is empty"
    assert any("t.sqlite: is empty" in note for note in summary.notes)


def test_the_batch_and_the_learning_rate_are_said() -> None:
    notes = " ".join(summarize(planted.scaling()).notes)
    assert "N times the samples" in notes
    assert "0.1 for one GPU, and N times that for N GPUs" in notes


def test_failed_and_skipped_runs_say_why() -> None:
    failed = RunResult({"framework": "jax"}, 1, True, "failed", "exit code 1: ValueError")
    skipped = RunResult({"framework": "cntk"}, 1, True, "skipped", "no Python 3.6")
    shown = report.render(summarize(study(run(100, measured(None)), failed, skipped)), "text", 100)
    assert "1 failed, 1 skipped" in shown
    assert "exit code 1: ValueError" in shown
    assert "no Python 3.6" in shown


def test_the_table_of_classes_says_how_much_of_communication_is_waiting() -> None:
    summary = summarize(planted.scaling())
    rows = [replace(row, wait_ns=(row.gpus - 1) * MS) for row in summary.rows]
    shown = report.render(replace(summary, rows=tuple(rows)), "markdown")
    assert (
        "| communication | 0 | 12.0 ms | 25.0 ms |\n| of that waiting | 0 | 1.00 ms | 3.00 ms |"
        in shown
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    shown = report.render(summarize(made(name)), "text", width)
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("name", ["scaling", "placements", "host"])
def test_the_report_is_as_it_was(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"bench-{name}.txt", report.render(summarize(made(name)), "text", 100))


@pytest.mark.parametrize("name", ALL)
def test_the_json_has_a_version_and_is_one_line(name: str) -> None:
    shown = report.render(summarize(made(name)), "json")
    assert shown.count("\n") == 1
    assert json.loads(shown)["schema_version"] == 1


def test_the_csv_has_a_row_for_each_configuration() -> None:
    rows = list(csv.DictReader(io.StringIO(report.render(summarize(planted.scaling()), "csv"))))
    assert [row["gpus"] for row in rows] == ["1", "2", "4"]
    assert float(rows[0]["rate"]) == 640
    assert int(rows[1]["communication_ns"]) == 12 * MS


def test_a_run_that_failed_is_not_told_to_have_a_recording_that_does_not_hold() -> None:
    failed = RunResult({"framework": "jax"}, 1, True, "failed", "exit code 1")
    shown = report.render(summarize(study(run(100, recorded=False), failed)), "text")
    assert "1 run of 2 configurations is done, 1 failed.\n" in shown
    assert "The recordings beside" not in shown


@pytest.mark.parametrize("width", [60, 100])
def test_what_is_not_done_is_shown_however_narrow_the_terminal(width: int) -> None:
    skipped = RunResult({"framework": "cntk"}, 1, True, "skipped", "no Python 3.6")
    told = {"loss_first": 2.5, "loss_last": 1.5, "data_wait_s": 0.5, "steps": 20}
    shown = report.render(summarize(study(run(100, told=told), skipped)), "text", width)
    assert "1 skipped" in shown.split("The runs")[1].split("note:")[0]


def test_words_of_scripts_are_no_markdown() -> None:
    failed = RunResult({"framework": "jax"}, 1, True, "failed", "<b>*no*</b>")
    shown = report.render(summarize(study(failed)), "markdown")
    assert "\\<b\\>\\*no\\*" in shown


@pytest.mark.parametrize("name", ALL)
def test_measures_are_kept_and_come_back(name: str, tmp_path: Path) -> None:
    runs = made(name).runs
    each = {str(number): run for number, run in enumerate(runs)}
    with Database(tmp_path, create=True) as database:
        asked = (Configuration(key, "torch", 1, run.settings) for key, run in each.items())
        database.set_plan(StudyPlan(StudyHeader("", "", 1000, "both", ""), tuple(asked)))
        for key, run in each.items():
            saved = database.save(Run(key, run.repeat, run.recorded, "done"))
            if run.measure is not None:
                database.save_measure(saved, run.measure)
        kept = read_results(database).runs
    assert [run.measure for run in kept] == [run.measure for run in runs]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty steps on one GPU."""
    thread = Thread()
    for _ in range(20):
        thread.input_copy()
        thread.model()
        thread.optimizer()
    path = tmp_path / "trace.sqlite"
    thread.export.write(path)
    return path


def test_a_recording_is_measured(trace: Path) -> None:
    own = measure(trace)
    assert own.problem == ""
    assert own.kind == "training"
    assert own.steps == {0: 20}
    assert own.classes is not None
    assert own.step_ns == sum(own.classes.values())
    assert own.classes["h2d"] + own.classes["compute"] == STEP
    assert [(gpu.gpu, gpu.compute_ns) for gpu in own.gpus] == [(0, own.classes["compute"])]


MARKED: Final = """
import gputrace, time

for _ in range(12):
    time.sleep(0.004)
    gputrace.step()
"""


def test_every_mark_is_a_step_also_where_nothing_marks_the_begin_of_the_first(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.sqlite"
    words = ("record", "--backend", "host", "--no-nvml", "-o", path, "--", sys.executable, "-c")
    assert command.gputrace(*words, MARKED).code == 0
    own = measure(path)
    assert own.steps == {0: 12}
    assert (own.classes, own.data_waits_ns) == (None, None)


def test_a_file_that_is_no_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    path.write_text("nothing")
    assert "trace.sqlite" in measure(path).problem


def test_results_are_read_back_from_the_database(tmp_path: Path, trace: Path) -> None:
    settings = {"framework": "torch", "gpus": 1}
    told = {"samples_per_second": 64.0, "batch": 64, "gpus": 1, "steps": 20}
    with Database(tmp_path, create=True) as database:
        row = StudyHeader("Title", "Question?", 2, "recorded", "study.toml")
        database.set_plan(StudyPlan(row, (Configuration("abc", "torch", 1, settings),)))
        database.save(Run("abc", 1, True, "done", result=told, trace=trace.name))
        database.save(Run("abc", 2, True, "failed", why="exit code 1"))
        measure_runs(database)
        results = read_results(database)
    first, second = results.runs
    assert (results.title, results.question) == ("Title", "Question?")
    assert first.measure == measure(trace)
    assert (second.state, second.reason, second.measure) == ("failed", "exit code 1", None)
    assert summarize(results).rows[0].done == 1
