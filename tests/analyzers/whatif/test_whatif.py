"""Predictions of a step without one cause, compared with the run in which it is gone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gputrace.analyzers.breakdown import list_steps, measured
from gputrace.analyzers.collectives import match_collectives
from gputrace.analyzers.cuda_api_calls import Call, read_calls
from gputrace.analyzers.parallelism import Groups
from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.whatif import (
    MOST_ERROR,
    Calibration,
    Pair,
    calibrate,
    pairs,
    predict,
    replay_error,
)
from gputrace.analyzers.whatif.build import build_graph, find_waits
from gputrace.analyzers.whatif.graph import Graph, Recorded, replay, with_quick_host
from gputrace.analyzers.whatif.step_rows import (
    MOST_ITEMS,
    Items,
    choose_steps,
    find_instances,
    read_rows,
    when_issued,
)
from gputrace.api import Report
from gputrace.model.events import Kind
from gputrace.model.results import Analysis, WhatIf
from gputrace.readers.registry import open_trace
from tests.helpers import recordings
from tests.helpers.command import gputrace
from tests.helpers.examples import few
from tests.helpers.per_gpu import gpus_with_lanes
from tests.synthetic import Plan, random_plan, simulate, write_nsys
from tests.synthetic.cured import CURED, compare, fair, step_ns

MS = 1_000_000
US = 1_000
CLOSE = 0.05
BALANCED = Plan(
    steps=16, warmup_steps=1, kernels_per_step=80, kernel_ns=60_000, h2d_ns=20_000, seed=5
)
"""A step of some 5 ms in which the GPU computes and nothing else matters."""


def written(plan: Plan, folder: Path, **options: object) -> Path:
    path = folder / "run.sqlite"
    path.unlink(missing_ok=True)
    write_nsys(simulate(plan), path, **options)  # type: ignore[arg-type]
    return path


def cures(path: Path) -> dict[str, WhatIf]:
    with open_trace(path) as trace:
        return {cure.id: cure for cure in analyze(trace).what_if}


def graph_of(path: Path) -> Graph:
    """The graph of a trace, without its waits for data."""
    with open_trace(path) as trace:
        gpus, found = gpus_with_lanes(trace)
        every = list_steps(gpus, gpus.lanes, found, None)
        chosen = measured(gpus, gpus.lanes, every, found)
        steps = choose_steps(gpus, found, chosen)
        assert steps is not None
        window = when_issued(gpus, found, steps)
        assert window is not None
        calls = gpus.calls_within(window)
        assert calls is not None
        rows = read_rows(Groups(gpus, match_collectives(gpus), (), ()), calls, found, steps)
        return build_graph(trace, rows, calls, {})


PLANTED = {
    "prefetch": replace(BALANCED, data_wait_ns=3 * MS, sync_every_step=True),
    "pinned": replace(BALANCED, pageable=True, h2d_ns=2 * MS, input_bytes=80_000_000),
    "straggler": replace(BALANCED, ranks=4, allreduces=3, slow_rank=2, slow_factor=1.3),
    "late-host": replace(
        BALANCED, ranks=3, allreduces=2, late_host_rank=1, late_host_ns=2 * MS, sync_every_step=True
    ),
    "overlap": replace(BALANCED, ranks=2, allreduces=2, allreduce_ns=800 * US),
    "graphs": replace(BALANCED, kernel_ns=40_000, launch_ns=50_000, python_ns=30_000),
    "sync": replace(BALANCED, kernel_ns=15_000, launch_ns=6_000, sync_every_step=True),
    "alloc": replace(BALANCED, allocs_per_step=6, alloc_ns=300 * US, sync_every_step=True),
}  # fmt: skip
"""For each cure, a run with its cause."""


@pytest.mark.parametrize("cure", CURED)
def test_a_cure_takes_the_step_that_the_cured_run_takes(cure: str, tmp_path: Path) -> None:
    plan = PLANTED[cure]
    true = step_ns(simulate(CURED[cure](plan)))
    predicted = cures(written(plan, tmp_path))[cure]
    assert predicted.step_ns == pytest.approx(true, rel=CLOSE)
    assert predicted.low_ns <= predicted.step_ns <= predicted.high_ns <= predicted.now_ns
    assert predicted.gain_ns == predicted.now_ns - predicted.step_ns > 0.01 * predicted.now_ns
    assert predicted.now_ns == pytest.approx(step_ns(simulate(plan)), rel=0.02)


def test_a_call_more_on_one_rank_changes_little_of_what_a_late_host_costs(tmp_path: Path) -> None:
    path = written(PLANTED["late-host"], tmp_path)
    before = cures(path)["late-host"]
    with closing(sqlite3.connect(path)) as trace, trace:
        trace.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start, end, eventClass, globalTid,"
            " correlationId, nameId, returnValue)"
            " SELECT end + 100, end + 900, eventClass, globalTid, 987654321,"
            " (SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId"
            " WHERE value LIKE '%Synchronize%'), 0 FROM CUPTI_ACTIVITY_KIND_RUNTIME"
            " ORDER BY start LIMIT 1 OFFSET 1800"
        )
    assert cures(path)["late-host"].step_ns == pytest.approx(before.step_ns, rel=0.03)


def test_ranks_with_different_numbers_of_gpus_are_not_compared(tmp_path: Path) -> None:
    graph = graph_of(written(PLANTED["late-host"], tmp_path))
    assert with_quick_host(graph, [1]) is not None
    # The first rank takes part in each exchange with two GPUs.
    exchanges = np.flatnonzero((graph.rank == 0) & (graph.group >= 0))
    others = np.setdiff1d(np.flatnonzero((graph.rank == 0) & (graph.thread >= 0)), exchanges)
    group = graph.group.copy()
    group[others[: len(exchanges)]] = group[exchanges]
    assert with_quick_host(graph.changed(group=group), [1]) is None


def test_a_call_waits_for_an_event_that_was_recorded_before_the_last_launches() -> None:
    """Twelve kernels of 1 ms are launched at once; a call returns as the sixth ends."""
    launches = np.arange(12, dtype=np.int64)
    zeros, none = np.zeros(13, np.int64), np.full(13, -1, np.int64)
    items = Items(
        call=np.arange(13), operation=np.append(launches, -1), leader=none, process=zeros,
        thread=zeros, begin=np.append(launches * 10_000, 120_000),
        returned=np.append(launches * 10_000 + 8_000, 6 * MS + 10_000),
        stream=np.append(zeros[:12] + 7, -1), start=np.append(launches * MS, 120_000),
        end=np.append((launches + 1) * MS, 120_000), base=0,
    )  # fmt: skip
    sort = np.append(np.full(12, Call.ISSUE), Call.SYNC)
    kind = np.append(np.full(12, Kind.KERNEL), -1)
    waiting = find_waits(
        items, sort, kind, np.zeros(13, bool), {0: "cudaEventSynchronize_v3020"}, zeros
    )
    assert [cause for cause, _ in waiting.waits[12]] == [5]
    assert waiting.own[12] < 10_000


@settings(max_examples=few(3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(1_000, 1_040))
def test_on_random_runs_predictions_are_close(seed: int) -> None:
    """Graphs less so: their kernels follow each other without a pause in generated runs."""
    plan = replace(fair(random_plan(seed)), steps=14, validation_after=(), checkpoint_after=())
    assume(not plan.graph)  # of which steps may not be found
    for score in compare(plan):
        assert abs(score.error) < (0.15 if score.cure == "graphs" else 0.10), score


@pytest.mark.parametrize("name", recordings.SMALL)
def test_no_prediction_is_shorter_than_the_compute_that_stays(
    name: str, analyzed: Callable[[str], Report]
) -> None:
    check_compute(analyzed(name))


def test_compute_is_left_as_far_as_an_edit_leaves_it(tmp_path: Path) -> None:
    graph = graph_of(written(replace(PLANTED["straggler"], steps=12), tmp_path))
    run = Recorded(np.array([1.0, 2.0, 4.0, 3.5]) * MS, {}, 5 * MS)
    last = graph.gpu == 2
    assert run.floor(graph, graph) == 4 * MS
    halved = graph.changed(ns=np.where(last, graph.ns // 2, graph.ns))
    assert run.floor(graph, halved) == 3.5 * MS
    dropped = graph.changed(stream=np.where(graph.gpu > 0, -1, graph.stream))
    assert run.floor(graph, dropped) == 1 * MS
    assert replace(run, mean_ns=3 * MS).floor(graph, graph) == 3 * MS


def test_a_rank_with_little_to_compute_lowers_no_bound(tmp_path: Path) -> None:
    """Three ranks compute as much as before once the fourth is no longer slow."""
    ranks = ((0, 0.3), (3, 1.4))
    plan = replace(BALANCED, ranks=4, allreduces=3, slow_ranks=ranks)
    path = written(plan, tmp_path)
    with open_trace(path) as trace:
        analysis = analyze(trace)
    cure = next(cure for cure in analysis.what_if if cure.id == "straggler")
    compute = sorted(row.of("compute") / row.steps for row in analysis.breakdown)
    assert compute[0] < 0.4 * compute[1]
    assert compute[1] <= cure.low_ns <= cure.step_ns < compute[3]


def test_ddp_leaves_the_first_gpu_its_compute_and_at_best_that_of_the_least(tmp_path: Path) -> None:
    plan = replace(BALANCED, gpus_per_process=4, exchange="gpu-server", exchange_bytes=200_000_000)
    path = written(plan, tmp_path)
    with open_trace(path) as trace:
        analysis = analyze(trace)
    cure = next(cure for cure in analysis.what_if if cure.id == "ddp")
    compute = [row.of("compute") / row.steps for row in analysis.breakdown]
    assert compute[0] > 1.02 * min(compute)
    assert cure.step_ns >= compute[0]
    assert 0.999 * min(compute) <= cure.low_ns < compute[0]


def check_compute(analysis: Analysis | Report) -> None:
    """A GPU computes as long as before, but where a cure takes work from it."""
    compute = [row.of("compute") // row.steps for row in analysis.breakdown if row.steps]
    for cure in analysis.what_if:
        least = min(compute) if cure.id in ("ddp", "straggler") else max(compute)
        assert least <= cure.low_ns <= cure.step_ns <= cure.high_ns <= cure.now_ns, cure


def test_what_hides_behind_another_cause_is_not_saved(tmp_path: Path) -> None:
    """The GPU is idle for launches while one waits, but the host is then late all the same."""
    plan = replace(PLANTED["graphs"], ranks=2, allreduces=2, allreduce_ns=400 * US)
    path = written(plan, tmp_path)
    with open_trace(path) as trace:
        analysis = analyze(trace)
    exposed = analysis.breakdown[0].of("communication") / analysis.breakdown[0].steps
    overlap = next((cure for cure in analysis.what_if if cure.id == "overlap"), None)
    assert exposed > 0.1 * MS
    saved = 0 if overlap is None else overlap.gain_ns
    true = step_ns(simulate(plan)) - step_ns(simulate(replace(plan, joined=False)))
    assert saved == pytest.approx(true, abs=0.02 * step_ns(simulate(plan)))


def test_a_run_that_computes_all_the_time_has_nothing_to_gain(tmp_path: Path) -> None:
    assert cures(written(BALANCED, tmp_path)) == {}


def test_the_replay_of_an_unchanged_graph_gives_the_recorded_times(tmp_path: Path) -> None:
    for plan in PLANTED.values():
        graph = graph_of(written(plan, tmp_path))
        runs = graph.stream >= 0
        assert np.abs(replay(graph) - graph.end)[runs].max() < 20 * US
        assert replay_error(graph) < 0.02


def test_what_is_replayed_is_bounded(tmp_path: Path) -> None:
    graph = graph_of(written(replace(BALANCED, steps=200, kernels_per_step=400), tmp_path))
    assert MOST_ITEMS / 2 < np.count_nonzero(graph.stream >= 0) <= MOST_ITEMS


def test_nothing_is_predicted_where_the_dependencies_explain_too_little(tmp_path: Path) -> None:
    graph = graph_of(written(PLANTED["graphs"], tmp_path))
    free = Recorded(np.zeros(1), {}, 5 * MS)
    assert list(predict(graph, free, {}))
    odd = np.flatnonzero(graph.stream >= 0)[::10]
    late = graph.residual.copy()
    late[odd] += 1 * MS
    unexplained = graph.changed(residual=late)
    unexplained = unexplained.changed(end=replay(unexplained))
    assert replay_error(unexplained) > MOST_ERROR
    assert not list(predict(unexplained, free, {}))


def test_without_host_calls_nothing_is_predicted(tmp_path: Path) -> None:
    path = written(PLANTED["prefetch"], tmp_path)
    assert cures(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME")
    with open_trace(path) as trace:
        assert read_calls(trace) is None
    assert cures(path) == {}


def test_a_cure_belongs_to_its_finding_and_the_report_says_what_it_saves(tmp_path: Path) -> None:
    path = written(PLANTED["prefetch"], tmp_path)
    ran = gputrace("analyze", path, "--json")
    told = json.loads(ran.out)
    cure = next(cure for cure in told["what_if"] if cure["id"] == "prefetch")
    assert cure["finding"] == "data-feeding"
    assert cure["finding"] in [finding["id"] for finding in told["findings"]]
    report = " ".join(gputrace("analyze", path).out.split())
    assert "Expected gain: 1.83 to 3.04 ms" in report
    markdown = gputrace("analyze", path, "--format", "markdown").out
    assert "Expected gain: 1.83 to 3.04 ms" in markdown


@pytest.mark.parametrize("data_wait_ns", [0, 8 * MS])
def test_dataparallel_as_ddp_is_about_as_fast_as_one_of_its_gpus_alone(
    data_wait_ns: int, tmp_path: Path
) -> None:
    """Each process loads a fourth of what the one process loaded for all."""
    plan = replace(BALANCED, gpus_per_process=4, kernel_ns=30_000, data_wait_ns=data_wait_ns)
    alone = replace(
        plan, gpus_per_process=1, h2d_ns=plan.h2d_ns // 4, data_wait_ns=data_wait_ns // 4
    )
    predicted = cures(written(plan, tmp_path))["ddp"]
    assert predicted.step_ns == pytest.approx(step_ns(simulate(alone)), rel=0.1)
    assert predicted.high_ns >= predicted.step_ns + data_wait_ns // 2


def test_the_sleep_of_a_real_starved_run_is_what_a_loader_that_keeps_up_saves(
    tmp_path: Path,
) -> None:
    """The program slept for 25.1 to 25.2 ms before every batch; the hosts are the limit then."""
    found = cures(recordings.unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path))
    assert found["prefetch"].gain_ns == pytest.approx(25.15 * MS, rel=0.03)
    assert "overlap" not in found  # though 8 ms of communication are exposed: the hosts come late


def test_a_range_allows_for_what_measured_pairs_were_off_by() -> None:
    def pair(cure: str, predicted: float, measured: float, counts: bool = True) -> Pair:
        return Pair(cure, "", None, predicted, None, None, measured, counts, "")

    few = [pair("pinned", 10, 8), pair("graphs", 10, 12), pair("graphs", 10, 40, counts=False)]
    assert calibrate("pinned", few) == Calibration(0.8, 1.2, 2)
    enough = [pair("pinned", 10, 11), *[pair("graphs", 10, off) for off in (9, 12, 13)]]
    assert calibrate("graphs", enough) == Calibration(0.9, 1.3, 3)
    assert calibrate("pinned", [pair("pinned", 10, 12)]) == Calibration(1.0, 1.2, 1)
    assert calibrate("pinned", []) == Calibration(1.0, 1.0, 0)


def test_calibrated_ranges_hold_pairs_that_they_do_not_know() -> None:
    """Each counted pair is held against the range that all other pairs give it."""
    held = dict.fromkeys(("as given", "calibrated"), 0)
    given = [pair for pair in pairs() if pair.counts and pair.low_ms and pair.high_ms]
    for pair in given:
        known = calibrate(pair.cure, [other for other in pairs() if other is not pair])
        low = min(pair.low_ms or 0, pair.predicted_ms * known.below)
        high = max(pair.high_ms or 0, pair.predicted_ms * known.above)
        held["as given"] += bool(pair.within)
        held["calibrated"] += low <= pair.measured_ms <= high
    # The figures of docs/measurements/predictions.md and docs/benchmarks.md.
    assert (held, len(given)) == ({"as given": 26, "calibrated": 29}, 32)


def test_a_prediction_says_how_many_pairs_its_range_allows_for(tmp_path: Path) -> None:
    predicted = cures(written(PLANTED["prefetch"], tmp_path))["prefetch"]
    assert predicted.pairs == calibrate("prefetch").pairs >= 4
    assert predicted.high_ns >= min(1.2 * predicted.step_ns, predicted.now_ns)


_FEW = st.integers(0, 3)
_MATCHED = st.lists(st.tuples(_FEW, _FEW, _FEW, st.integers(0, 99)))


@given(_MATCHED, st.lists(st.tuples(_FEW, _FEW, _FEW)))
def test_an_operation_is_of_the_collective_of_its_gpu_start_and_id(
    matched: list[tuple[int, int, int, int]], rows: list[tuple[int, int, int]]
) -> None:
    known = {row[:3]: row[3] for row in matched}
    columns = np.array(matched, np.int64).reshape(-1, 4).T
    names = "lane", "start", "correlation", "instance"
    collectives: Any = SimpleNamespace(**dict(zip(names, columns, strict=True)))
    gpu, start, correlation = np.array(rows, np.int64).reshape(-1, 3).T
    events: Any = SimpleNamespace(start=start, correlation=correlation)
    found = find_instances(collectives, events, gpu, 4)
    assert found.tolist() == [known.get(row, -1) for row in rows]
