"""Data loaders: what their workers' time goes into, and how many workers would keep up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from gputrace.analyzers.loader import BatchTimes, Pace, batch_ns, without_late_batches
from gputrace.api import Report
from gputrace.model.host import Loader
from gputrace.model.intervals import union
from gputrace.model.results import Finding
from tests.helpers.exports import STEP, Export, global_id
from tests.helpers.handmade import MS, US, Run, analyze
from tests.helpers.sentences import words_of

# ---- the queue ----

ALONE: Final = BatchTimes(
    work=[np.array([40.0 * MS])],
    send=[np.array([0.0])],
    processor=[np.array([1.0 * MS])],
    receive=0.0,
    receive_idle=0.0,
    train=10.0 * MS,
    host=10.0 * MS,
    prefetch=2,
    pins=False,
    cores=8,
    busy=1.0 * MS,
)
"""Batches of 40 ms for steps of 10 ms."""


@pytest.mark.parametrize(("workers", "step"), [(0, 50), (1, 40), (2, 20), (3, 40 / 3), (4, 10)])
def test_workers_share_the_work_until_training_takes_longer(workers: int, step: float) -> None:
    assert batch_ns(ALONE, workers) == pytest.approx(step * MS)


def test_what_is_received_from_a_busy_worker_comes_at_once_from_an_idle_one() -> None:
    receives = replace(ALONE, receive=9.0 * MS, receive_idle=1.0 * MS)
    assert batch_ns(receives, 2) == pytest.approx(20 * MS)
    assert batch_ns(receives, 8) == pytest.approx(11 * MS)


def test_a_gpu_hides_what_its_host_does_meanwhile() -> None:
    gpu = replace(ALONE, receive=5.0 * MS, receive_idle=5.0 * MS, host=4.0 * MS)
    assert batch_ns(gpu, 8) == pytest.approx(10 * MS)
    assert batch_ns(gpu, 0) == pytest.approx(44 * MS)
    late = replace(gpu, host=8.0 * MS)
    assert batch_ns(late, 8) == pytest.approx(13 * MS)


def test_receiving_is_no_workers_to_hide_but_a_pinning_threads() -> None:
    receives = replace(ALONE, receive=5.0 * MS, receive_idle=5.0 * MS)
    assert batch_ns(receives, 8) == pytest.approx(15 * MS)
    assert batch_ns(replace(receives, pins=True), 8) == pytest.approx(10 * MS)
    slow = replace(receives, pins=True, receive=25.0 * MS, receive_idle=25.0 * MS)
    assert batch_ns(slow, 8) == pytest.approx(25 * MS)


def test_a_rank_does_not_train_while_it_waits_for_another_ranks_batch() -> None:
    """Of steps of 30 ms, one rank waits 12 for batches, the other 4, and 9 in a collective."""
    none = np.empty(0, np.int64)
    mine, other = (
        Pace(union(none, none), none, 30.0 * MS, wait, 30.0 * MS - wait, 8.0, late, 0.0, 2, False)
        for wait, late in ((4.0 * MS, 9.0 * MS), (12.0 * MS, 1.0 * MS))
    )
    apart = without_late_batches({0: mine, 1: other})
    assert [pace.train_ns / MS for pace in apart.values()] == [17, 17]
    alone = without_late_batches({0: mine})
    assert alone[0].train_ns == mine.train_ns, "it is late for another reason"


def test_workers_take_no_less_than_their_processor_time_on_the_cores() -> None:
    busy = replace(ALONE, processor=[np.array([40.0 * MS])], cores=2)
    assert batch_ns(busy, 2) == pytest.approx(20.5 * MS)
    assert batch_ns(busy, 8) == pytest.approx(20.5 * MS)


def test_a_slow_worker_holds_up_all() -> None:
    """Four workers have every fourth batch each, in order."""
    fast, slow = np.array([20.0 * MS]), np.array([120.0 * MS])
    none = [np.zeros(1)] * 4
    uneven = replace(ALONE, work=[fast, slow, fast, fast], send=none, processor=none)
    assert batch_ns(uneven, 4) == pytest.approx(30 * MS)


def test_work_in_processor_time_leaves_none_to_send_meanwhile() -> None:
    send = [np.array([30.0 * MS])]
    sleeps = replace(ALONE, send=send, processor=[np.array([30.0 * MS])])
    works = replace(ALONE, send=send, processor=[np.array([70.0 * MS])])
    assert batch_ns(sleeps, 1) == pytest.approx(40 * MS)
    assert batch_ns(works, 1) == pytest.approx(70 * MS)


def test_prefetching_evens_out_batches_that_differ() -> None:
    work = np.array([75.0 * MS, 5.0 * MS, 5.0 * MS, 5.0 * MS] * 4)
    zeros = np.zeros(len(work))
    varied = replace(
        ALONE, work=[work], send=[zeros], processor=[zeros], train=25.0 * MS, prefetch=1
    )
    assert batch_ns(varied, 1) > 1.2 * batch_ns(replace(varied, prefetch=8), 1)
    assert batch_ns(replace(varied, prefetch=8), 1) == pytest.approx(25 * MS, rel=0.05)


# ---- traces made by hand ----

PID: Final = 100
STEPS: Final = 40
RANGES: Final = "GPUTRACE_HOST_RANGE"


class Loading:
    """A program of 40 steps of 30 ms, 20 of which each waits for one of two workers.

    A batch takes a worker 60 ms: Decode 40, the rest of the samples 14, collate 4, send 2.
    """

    def __init__(self) -> None:
        self.export = Export()
        self.export.give("GPUTRACE_META", "name", "value")
        self.export.give(RANGES, "start", "end", "globalTid", "nameId", "kind", "number")
        self.export.rows.setdefault("GPUTRACE_META", [])
        self.workers, self.ready, self.receive, self.handle = 2, 0, MS, 0
        self.parts: dict[str, int] = {"fetch": 54, "transform Decode": 40, "collate": 4, "send": 2}
        self.times_as_long = [1.0, 1.0]
        self.is_torchs, self.in_bursts, self.thread = True, False, 0

    def add(self, name: str, start: int, length: int, owner: int, number: int, pid: int) -> None:
        thread = self.thread or pid
        who = {"globalTid": global_id(pid, thread=thread), "nameId": self.export.string(name)}
        row = {"start": start + 1, "end": start + 1 + length, "kind": 5}
        self.export.add(RANGES, **row, **who, number=owner << 32 | number)

    def begin(self, seed: int = 77) -> None:
        for name, number in {
            "loader": seed,
            "start workers": self.workers,
            "prefetch factor": 2,
            "cores": 16,
        }.items():
            self.add(name, 0, 0, 1, number, PID)
        for worker in range(self.workers):
            self.add("loader", 0, 0, worker + 1, seed, PID + 1 + worker)

    def crowd(self) -> None:
        """Have threads of the program be queued for cores."""
        export = self.export
        export.give("GPUTRACE_HOST_COUNTER", "start", "end", "globalTid", "nameId", "value")
        for thread, what, value in (
            (PID, "on core", 1200 * MS),
            (PID, "process on core", 1800 * MS),
            (PID + 50, "on core", 600 * MS),
            (PID + 50, "queued", 600 * MS),
        ):
            who = {"globalTid": global_id(PID, thread=thread), "nameId": export.string(what)}
            export.add("GPUTRACE_HOST_COUNTER", start=1, end=1200 * MS, value=value, **who)

    def report(self, folder: Path, step: int = 30, wait: int = 20) -> Report:
        if self.is_torchs:
            self.begin()
        name, waited = self.export.string("torch.step"), self.export.string("torch.wait")
        for number in range(STEPS):
            at = number * step * MS
            who = {"globalTid": global_id(PID, thread=PID)}
            self.export.add(
                STEP, start=at + 1, end=at + step * MS + 1, nameId=name, step=number, **who
            )
            span = {"start": at + 1, "end": at + wait * MS + 1, "nameId": waited}
            self.export.add(RANGES, **span, **who, kind=1, number=None)
            if not self.is_torchs:
                continue
            self.add("ask", at + US, 0, 1, self.ready, PID)
            received = max(wait * MS - self.receive - self.handle, US)
            self.add("receive", at + received, self.receive, 1, number, PID)
            worker = number % max(self.workers, 1)
            process = PID + 1 + worker if self.workers else PID
            for part, length in self.parts.items():
                length = round(length * MS * self.times_as_long[worker])
                if self.in_bursts:
                    length = length if number % 7 == 0 else length // 6
                self.add(part, at, length, worker + 1, number, process)
        return analyze(self.export, folder)


@pytest.fixture
def loading() -> Loading:
    return Loading()


def the(report: Report) -> Loader:
    (loader,) = report.loader
    return loader


def feeding(report: Report) -> Finding:
    (found,) = (finding for finding in report.findings if finding.id == "data-feeding")
    return found


def test_a_batch_is_divided_into_its_parts(loading: Loading, tmp_path: Path) -> None:
    loader = the(loading.report(tmp_path))
    assert {part.name: part.batch_ns for part in loader.parts} == {
        "transform Decode": 40 * MS,
        "read": 14 * MS,
        "collate": 4 * MS,
        "send": 2 * MS,
    }
    assert loader.batch_ns == 60 * MS
    assert sum(part.share for part in loader.parts) == pytest.approx(1, abs=0.001)
    assert (loader.workers, loader.cores, loader.prefetch_factor) == (2, 16, 2)
    assert loader.receive_ns == MS


def test_the_report_says_how_many_workers_would_keep_up(loading: Loading, tmp_path: Path) -> None:
    report = loading.report(tmp_path)
    found = feeding(report)
    assert "8 workers would keep up, while with 2 the program still waits 20.0 ms" in words_of(
        found
    )
    assert "Decode is 67% of the workers' time" in words_of(found)
    assert found.advice.startswith("num_workers=8 (now 2); make Decode cheaper")
    shown = report.render()
    assert "A batch in the data loader (2 workers, " in shown
    assert "2 (now)" in shown


def test_predictions_reach_from_no_worker_to_one_a_core(loading: Loading, tmp_path: Path) -> None:
    loader = the(loading.report(tmp_path))
    steps = {choice.workers: choice.step_ns / MS for choice in loader.predictions}
    assert list(steps) == [0, 1, 2, 4, 8, 16]
    # 58 ms to fetch and collate for each worker, 10 to train, 1 to receive.
    expected = [68, 58, 29, 14.5, 11, 11]
    assert list(steps.values()) == pytest.approx(expected, rel=0.03)
    assert loader.half_step_ns == pytest.approx(19 * MS, rel=0.03)


def test_what_a_loader_does_besides_in_the_process_that_trains_stays(
    loading: Loading, tmp_path: Path
) -> None:
    loading.handle = 2 * MS
    loader = the(loading.report(tmp_path))
    assert loader.receive_ns == MS
    assert loader.predictions[-1].step_ns == pytest.approx(13 * MS, rel=0.02)


def test_a_disk_and_a_cache_are_predicted(loading: Loading, tmp_path: Path) -> None:
    """Of a batch of 60 ms, 18 are processor time; all that workers read comes from a disk."""
    loading.parts = {"fetch": 54, "transform Decode": 4, "collate": 4, "send": 2}
    loading.parts["processor time"] = 18 - 2
    loading.parts["KiB read"] = loading.parts["KiB read from disk"] = 0
    found = feeding(report := loading.report(tmp_path))
    loader = the(report)
    # Training outlasts 16 ms, and 4 to collate, of two workers.
    assert loader.no_disk_step_ns == pytest.approx(11 * MS, rel=0.03)
    assert loader.cached_step_ns == pytest.approx(11 * MS, rel=0.03)
    assert "100% of what it reads comes from a disk" in words_of(found)
    assert "(a step would take 11.0 ms without waiting for the disk or with" in found.advice


def test_samples_that_are_computed_are_no_matter_of_a_disk(
    loading: Loading, tmp_path: Path
) -> None:
    """Workers read 64 KiB in all, from a disk, and have the processor in all of their time."""
    loading.parts = {"fetch": 54, "transform Decode": 4, "collate": 4, "send": 2}
    loading.parts["processor time"] = 58
    loading.parts["KiB read"] = loading.parts["KiB read from disk"] = 0
    found = feeding(loading.report(tmp_path))
    assert "reading samples is 83% of the workers' time, and computes" in words_of(found)
    assert "disk" not in words_of(found) + found.advice
    assert "make the dataset's computation per sample cheaper" in found.advice


@pytest.mark.parametrize("in_bursts", [False, True])
def test_batches_made_further_ahead_gain_where_they_differ(
    loading: Loading, tmp_path: Path, in_bursts: bool
) -> None:
    """Two workers are too slow on average; or fast enough, but for each seventh batch."""
    loading.in_bursts = in_bursts
    loader = the(loading.report(tmp_path))
    assert loader.now is not None
    assert loader.doubled_step_ns is not None
    if in_bursts:
        assert loader.doubled_step_ns < 0.95 * loader.now.step_ns
    else:
        assert loader.doubled_step_ns == loader.now.step_ns


def test_less_to_compute_is_less_processor_time(loading: Loading, tmp_path: Path) -> None:
    loading.parts["processor time"] = 58
    loader = the(loading.report(tmp_path))
    assert loader.half_step_ns == pytest.approx(20 * MS, rel=0.03)
    assert loader.no_disk_step_ns == pytest.approx(30 * MS, rel=0.03)


def test_nothing_is_predicted_where_threads_are_queued_for_cores(
    loading: Loading, tmp_path: Path
) -> None:
    """All that was measured would be shorter with cores for them."""
    loading.crowd()
    report = loading.report(tmp_path)
    loader = the(report)
    assert (loader.predictions, loader.half_step_ns) == ((), None)
    assert "workers would" not in words_of(feeding(report))
    assert "num_workers" not in words_of(feeding(report))
    assert "Predicted with" not in report.render()
    (crowded,) = (found for found in report.findings if found.id == "cpu-starved")
    assert "too few cores cost 50% of each step (15.0 of 30.0 ms)" in crowded.message


@pytest.mark.parametrize("crowded", [False, True])
def test_a_process_that_loads_by_itself_is_told_its_setting(
    loading: Loading, tmp_path: Path, crowded: bool
) -> None:
    loading.workers = 0
    if crowded:
        loading.crowd()
    found = feeding(loading.report(tmp_path))
    assert "the training process loads batches itself (num_workers=0)" in words_of(found)
    assert re.match(r"num_workers=\d+ .*\(now 0\)", found.advice)
    assert ("workers would" in words_of(found)) is not crowded


def test_nothing_is_predicted_where_a_thread_makes_batches_ahead(
    loading: Loading, tmp_path: Path
) -> None:
    """Batches of 18 ms in steps of 30 ms, of which none waits: another thread makes them."""
    loading.workers, loading.parts, loading.thread = 0, {"fetch": 17, "collate": 1}, PID + 1
    report = loading.report(tmp_path, wait=0)
    assert the(report).predictions == ()
    assert the(report).batch_ns == 18 * MS
    assert "Predicted with" not in report.render()


def test_a_worker_that_takes_longer_than_the_others_is_named(
    loading: Loading, tmp_path: Path
) -> None:
    loading.workers, loading.times_as_long = 4, [1.0, 1.0, 3.0, 1.0]
    message = words_of(feeding(loading.report(tmp_path)))
    assert "one worker of 4 (worker 2) takes 3.0 times as long as the others" in message


@pytest.mark.parametrize(
    ("parts", "message", "advice"),
    [
        (
            {"fetch": 10, "send": 50},
            "pickling and sending take 83% of the workers' time, and receiving 1.00 ms a batch",
            "return tensors",
        ),
        ({"fetch": 60}, "reading samples is 100% of the workers' time", "read less often"),
        ({"fetch": 10, "collate": 50}, "collating is 83% of the workers' time", "torch.stack"),
    ],
)
def test_the_part_that_takes_most_is_named(
    loading: Loading, tmp_path: Path, parts: dict[str, int], message: str, advice: str
) -> None:
    loading.parts = parts
    found = feeding(loading.report(tmp_path))
    assert message in words_of(found)
    assert advice in found.advice


def test_receiving_is_named_where_it_is_the_wait(loading: Loading, tmp_path: Path) -> None:
    loading.parts, loading.receive = {"fetch": 5}, 18 * MS
    found = feeding(loading.report(tmp_path))
    assert "receiving a batch takes 18.0 ms a step" in words_of(found)
    assert "workers would keep up" not in words_of(found)


def test_the_thread_that_pins_limits_any_number_of_workers(
    loading: Loading, tmp_path: Path
) -> None:
    loading.add("pins memory", 0, 0, 1, 1, PID)
    for number in range(STEPS):
        loading.add("pin", number * 30 * MS, 24 * MS, 1, number, PID)
    loader = the(report := loading.report(tmp_path))
    assert loader.pin_ns == 24 * MS
    assert loader.predictions[-1].step_ns == pytest.approx(25 * MS, rel=0.02)
    assert re.search(r"^ *pin +24.0 ms", report.render(), re.MULTILINE)


def test_no_cause_is_named_where_nothing_waits(loading: Loading, tmp_path: Path) -> None:
    loading.parts, loading.receive, loading.ready = {"fetch": 5}, 10 * US, 3
    report = loading.report(tmp_path, wait=0)
    assert "data-feeding" not in {finding.id for finding in report.findings}
    assert (the(report).queue_median, the(report).queue_empty) == (3, 0)


def test_of_several_loaders_the_one_that_most_steps_ask_counts(
    loading: Loading, tmp_path: Path
) -> None:
    loading.add("loader", 0, 0, 2, 88, PID)
    loading.add("start workers", 0, 0, 2, 5, PID)
    for number in range(10 * STEPS):  # a validation
        loading.add("ask", number * US, 0, 2, 0, PID)
    assert the(loading.report(tmp_path)).workers == 2


def test_with_a_gpu_its_waits_count(loading: Loading, tmp_path: Path) -> None:
    """It is busy for 9 of the 10 ms in which the program waits for no batch."""
    run = Run(export=loading.export, pid=PID)
    for step in range(STEPS):
        run.now = (step * 30 + 20) * MS
        run.kernel(9 * MS, "gemm")
    said = words_of(feeding(loading.report(tmp_path)))
    assert "8 workers would keep up, while with 2 the GPU still waits" in said


@pytest.mark.parametrize(("pageable", "trains"), [(False, 6.3), (True, 7.6)])
def test_a_host_that_is_ahead_has_launched_before_its_gpu_gets_there(
    loading: Loading, tmp_path: Path, pageable: bool, trains: float
) -> None:
    """A GPU has 6.3 ms of work, which comes in the last 5 of 30 ms, and waits twice for launches.

    Copies from pageable memory wait for the GPU, so that no host is ahead.
    """
    run = Run(export=loading.export, pid=PID)
    for step in range(STEPS):
        run.now = (step * 30 + 25) * MS
        run.input_copy(pageable=pageable)
        for pause in (MS, 7 * MS // 2):
            run.wait(pause)
            run.kernel(3 * MS, "gemm")
    loader = the(loading.report(tmp_path, wait=25))
    assert loader.predictions[-1].step_ns == pytest.approx(trains * MS, rel=0.02)


def test_a_loop_that_keeps_a_batch_to_itself_is_told_so(loading: Loading, tmp_path: Path) -> None:
    """It takes a batch after 1 ms, and does not copy it before 18 ms more have gone by."""
    run = Run(export=loading.export, pid=PID)
    for step in range(STEPS):
        run.now = (step * 30 + 19) * MS
        run.input_copy(MS)
        run.kernel(9 * MS, "gemm")
    found = feeding(loading.report(tmp_path, wait=1))
    assert "the loader accounts for" in words_of(found)
    assert "between taking a batch and copying it" in found.advice
    assert "num_workers" not in found.advice


def test_the_loader_is_in_the_json(loading: Loading, tmp_path: Path) -> None:
    (loader,) = json.loads(loading.report(tmp_path).render("json"))["loader"]
    assert loader["parts"][0] == {
        "name": "transform Decode",
        "batch_ns": 40 * MS,
        "share": 0.6667,
    }
    assert {choice["workers"] for choice in loader["predictions"]} >= {1, 2, 4, 8}


# ---- other input pipelines ----


def described(folder: Path, library: str, *settings: tuple[str, str, int]) -> Report:
    """Steps of 30 ms that wait 20 ms for a pipeline of these settings, on 16 cores."""
    loading = Loading()
    loading.is_torchs = False
    for stage, name, value in (("", "cores", 16), *settings):
        loading.add(f"{library}|{stage}|{name}", 0, 0, 1, value, PID)
    return loading.report(folder)


AUTOMATIC: Final = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("library", "settings", "says", "cure"),
    [
        (
            "tf.data",
            [("prefetch", "buffer_size", AUTOMATIC), ("map load", "num_parallel_calls", 1)],
            # 30 ms a batch in the pipeline's thread, and 10 ms of training beside it.
            "num_parallel_calls=1 on 16 cores; with 3, a step may take 10.0 ms",
            "num_parallel_calls=tf.data.AUTOTUNE in map load",
        ),
        (
            "tf.data",
            [("prefetch", "buffer_size", 0), ("map load", "num_parallel_calls", AUTOMATIC)],
            "tf.data tunes its settings itself; no batch is prefetched",
            "end the pipeline with .prefetch(tf.data.AUTOTUNE)",
        ),
        (
            "Grain",
            [("the loader", "worker_count", 0)],
            # 20 ms a batch in the thread that trains.
            "worker_count=0 on 16 cores; with 2, a step may take 10.0 ms; no batch is prefetched",
            "worker_count=2",
        ),
        (
            "DALI",
            [("the pipeline", "num_threads", 16), ("the pipeline", "prefetch_queue_depth", 2)],
            "the pipeline of DALI has num_threads=16 on 16 cores",
            "cache decoded samples",
        ),
    ],
)
def test_the_setting_that_makes_batches_late_is_named(
    tmp_path: Path, library: str, settings: list[tuple[str, str, int]], says: str, cure: str
) -> None:
    report = described(tmp_path, library, *settings)
    finding = feeding(report)
    assert says in words_of(finding)
    assert cure in finding.advice
    (pipeline,) = report.input_pipelines
    values = [row.value for row in pipeline.settings]
    assert values == [None if value == AUTOMATIC else value for *_, value in settings]
