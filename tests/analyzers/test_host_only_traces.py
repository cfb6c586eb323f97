"""Traces of programs that used no GPU: what the host's signals alone tell, and what they do not."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import gputrace
from gputrace.api import Report
from gputrace.errors import InputError, UsageError
from tests.helpers import command
from tests.helpers.examples import few
from tests.helpers.lookups import finding_of
from tests.helpers.sentences import words_of
from tests.report.test_json import NAMES
from tests.report.test_json import rows as rows_of

MS: Final = 1_000_000
STEP, WAIT, COUNT = 20 * MS, 12 * MS, 30

TRAINING: Final = """
import gputrace, time

@gputrace.annotate("load batch")
def load():
    time.sleep(0.012)

for _ in range(12):
    load()
    time.sleep(0.004)
    gputrace.step()
"""
RANKS: Final = f"""
import os, subprocess, sys
code = {TRAINING!r}
runs = [
    subprocess.Popen(
        [sys.executable, "-c", code if rank else code.replace("0.012", "0.002")],
        env=os.environ | {{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}},
    )
    for rank in (1, 0)
]
sys.exit(max(run.wait() for run in runs))
"""

Recorded = Callable[..., Path]


def record(folder: Path, program: str, *options: str) -> Path:
    trace = folder / "trace.sqlite"
    words = ("--backend", "host", "--no-nvml", *options, "-o", str(trace))
    ran = command.gputrace("record", *words, "--", sys.executable, "-c", program)
    assert ran.code == 0, ran.err
    return trace


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process of 12 steps that waits 12 ms of each for data."""
    return record(tmp_path_factory.mktemp("training"), TRAINING)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 1 as above, and rank 0 that waits 2 ms a step; rank 1 starts first."""
    return record(tmp_path_factory.mktemp("ranks"), RANKS)


def analyze(trace: Path, **options: Any) -> Report:
    with gputrace.open(trace) as opened:
        return opened.analyze(**options)


TEXTS: Final = (
    "torch.optim.Optimizer.step",
    "torch.utils.data.dataloader._Iter",
    "model",
    "backward",
)
"""Texts of the rows that tests put in, by their ids."""


class Made:
    """A trace with the host's rows that a test puts in; moments in milliseconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[tuple[str, tuple[object, ...]]] = []
        self._steps = Counter[int]()
        self._meta = {"backend": "host", "driver": "no"}

    def step(self, start: float, end: float, pid: int = 1, thread: int = 1) -> None:
        self._steps[pid] += 1
        self._add("GPUTRACE_STEP", start, end, pid, thread, 0, self._steps[pid] - 1)

    def wait(self, start: float, end: float, pid: int = 1, thread: int = 1) -> None:
        self._add("GPUTRACE_HOST_RANGE", start, end, pid, thread, 1, 1, None)

    def phase(self, name: str, start: float, end: float) -> None:
        self._add("GPUTRACE_HOST_RANGE", start, end, 1, 1, TEXTS.index(name), 4, None)

    def _add(
        self, table: str, start: float, end: float, pid: int, thread: int, *rest: int | None
    ) -> None:
        times = round(start * MS), round(end * MS)
        self._rows.append((table, (*times, 1 << 48 | pid << 24 | thread, *rest)))

    def process(self, pid: int, rank: int | None, note: str | None = None) -> None:
        values = (1 << 48 | pid << 24, pid, "node", rank, 2, rank, 1, note)
        self._rows.append(("GPUTRACE_PROCESS", values))

    def told(self, **meta: str) -> None:
        self._meta |= meta

    def report(self, **options: Any) -> Report:
        from gputrace.store.writer import TABLES, TraceWriter

        with TraceWriter(self.path) as writer:
            writer.add_rows("GPUTRACE_META", ["name", "value"], self._meta.items())
            for text in TEXTS:
                writer.string(text)
            for table, values in self._rows:
                names = [column.split()[0] for column in TABLES[table].split(", ")]
                writer.add_rows(table, names, [values])
        return analyze(self.path, **options)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "made.sqlite")


def train(made: Made, pid: int = 1, wait: float = 12) -> None:
    """30 steps of 20 ms, of which each begins with a wait."""
    for number in range(COUNT):
        made.wait(20 * number, 20 * number + wait, pid)
        made.step(20 * number, 20 * number + 20, pid)


@pytest.mark.parametrize(("batches", "kind"), [(12, "iterations"), (9, "none")])
def test_batches_are_iterations_where_no_step_was_marked(
    batches: int, kind: str, made: Made
) -> None:
    made.process(1, 0)
    for number in range(batches + 1):  # The last wait is for the loader's end.
        made.wait(20 * number, 20 * number + 12)
    steps = made.report().steps
    assert (steps.kind, steps.count) == (kind, batches * (kind != "none"))
    assert "no step was marked" in steps.reason


def test_steps_that_take_no_time_tell_nothing(made: Made) -> None:
    made.process(1, 0)
    made.step(10, 10)
    made.step(20, 20)
    with pytest.raises(InputError, match="neither steps nor waits for data"):
        made.report()


# ---- recorded for real ----


def test_steps_and_waits_of_a_program_are_told_to_the_millisecond(training: Path) -> None:
    report = analyze(training)
    assert (report.source, report.gpus, report.gaps.count) == ("gputrace", (), 0)
    found = report.steps
    assert (found.source, found.kind, found.confidence, found.count) == (
        "markers",
        "training",
        1.0,
        12,
    )
    [row] = report.breakdown
    assert row.steps == found.steady_count
    assert found.mean_ns is not None
    assert found.mean_ns >= 16 * MS
    assert row.host_data_ns is not None
    assert 12 * MS * row.steps <= row.host_data_ns < row.total_ns - 4 * MS * row.steps


def test_the_verdict_says_that_no_gpu_was_seen(training: Path) -> None:
    ran = command.gputrace("analyze", training)
    assert (ran.code, ran.err) == (0, "")
    told = " ".join(ran.out.split())
    # It sleeps for 12 ms, and a busy machine lets it sleep longer.
    waits = re.match(r"The program waits for data \d+% of each step \(([\d.]+) of ", told)
    assert waits is not None
    assert float(waits[1]) >= 12
    assert f"Expected gain: up to {waits[1]} ms a step." in told
    assert "What to do: record on a machine with an NVIDIA" in told
    assert max(map(len, ran.out.splitlines())) <= 80


def test_lines_of_a_program_without_a_framework_are_sampled(tmp_path: Path) -> None:
    """A hundred times a second, which is no multiple of its steps."""
    report = analyze(record(tmp_path, TRAINING.replace("range(12)", "range(60)"), "--python"))
    (most, *_) = report.host_lines
    assert most.line.endswith(" load")
    assert sum(row.share for row in report.host_lines) == pytest.approx(1)
    few, many = (
        structs.replace(report, host_lines=(structs.replace(most, samples=samples, share=1.0),))
        for samples in (3, 20)
    )
    for form in ("text", "markdown"):
        assert "Where the host is, by line" in many.render(form)
        assert "Where the host is" not in few.render(form)


def test_lines_of_a_program_without_steps_are_of_its_whole_time(tmp_path: Path) -> None:
    program = """
import time
def work():
    end = time.monotonic() + 1
    while time.monotonic() < end:
        sum(range(1000))
work()
"""
    trace = record(tmp_path, program, "--python")
    report = analyze(trace)
    assert {row.rank for row in report.host_lines} == {0}
    assert sum(row.share for row in report.host_lines) == pytest.approx(1)
    (only,) = report.findings
    assert re.match(r"the host is at .* work in \d+% of the samples", only.message)
    assert "no GPU activity was recorded" in words_of(only)
    assert re.match(r"look at .* work; mark the steps", only.advice)
    assert "mark the steps (gputrace.step())" in only.advice
    assert "Where the host is, by line (whole span, " in report.render("text")


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_every_form_says_what_is_missing(form: str, training: Path) -> None:
    report = analyze(training)
    text = " ".join((report._repr_html_() if form == "html" else report.render(form)).split())
    for told in ("waits for data", "rank 0", "o GPU activity was recorded", "NVIDIA driver"):
        assert told in text


def test_ranks_are_those_of_the_environment(ranks: Path) -> None:
    with closing(sqlite3.connect(ranks)) as database:
        sql = "SELECT rank, worldSize, localRank, whole FROM GPUTRACE_PROCESS ORDER BY rank"
        assert database.execute(sql).fetchall() == [(0, 2, 0, 1), (1, 2, 1, 1)]
        sql = "SELECT count(*) FROM PROCESSES JOIN GPUTRACE_PROCESS USING (globalPid, pid)"
        assert database.execute(sql).fetchall() == [(2,)]
    report = analyze(ranks)
    assert [row.rank for row in report.breakdown] == [0, 1]
    assert {step.rank for step in report.step_list} == {0, 1}
    waited = [(row.host_data_ns or 0) / row.steps for row in report.breakdown]
    assert 2 * MS <= waited[0] < 12 * MS <= waited[1]


def test_a_process_that_becomes_another_program_is_one_process(tmp_path: Path) -> None:
    begin = "import gputrace, os, sys; gputrace.step(); "
    trace = record(tmp_path, f"{begin}os.execv(sys.executable, ['python', '-c', {TRAINING!r}])")
    with closing(sqlite3.connect(trace)) as database:
        assert database.execute("SELECT count(*) FROM GPUTRACE_PROCESS").fetchall() == [(1,)]
    assert [row.rank for row in analyze(trace).breakdown] == [0]


def test_a_recorded_program_without_steps_and_waits_cannot_be_analyzed(tmp_path: Path) -> None:
    trace = record(tmp_path, "pass")
    ran = command.gputrace("analyze", trace)
    words = ("no GPU activity", "neither steps nor waits", "record --python", "gputrace.step()")
    command.assert_refused(ran, command.UNREADABLE, *words)


@pytest.mark.parametrize(
    ("program", "code", "next_"),
    [
        ("import gputrace\nfor _ in range(3): gputrace.step()", 0, "next: gputrace analyze"),
        ("pass", 0, "no steps were seen: `gputrace record --python` names the lines of a Python"),
        (
            "import gputrace; gputrace.step()",
            0,
            "only one step was seen: `gputrace record --python` names",
        ),
        (
            "raise SystemExit(7)",
            7,
            "the program failed before its second step: there is nothing to analyze yet; if it "
            "lacks the module gputrace, install that into its Python, too",
        ),
    ],
)
def test_only_what_can_be_analyzed_is_sent_to_analyze(
    program: str, code: int, next_: str, tmp_path: Path
) -> None:
    words = ("--backend", "host", "--no-nvml", "-o", str(tmp_path / "trace.sqlite"), "--")
    ran = command.gputrace("record", *words, sys.executable, "-c", program)
    assert ran.code == code
    assert ran.err.splitlines()[-1].startswith(f"gputrace: {next_}")


# ---- the shape that other programs rely on ----


@pytest.mark.parametrize("where", [name for name in NAMES if not name.startswith("kernels")])
def test_the_json_has_the_names_of_every_trace(where: str, training: Path) -> None:
    report = json.loads(analyze(training).render("json"))
    for row in rows_of(report, where):
        assert set(NAMES[where].split()) <= row.keys()


def test_what_only_a_gpu_shows_is_null_and_never_0(training: Path) -> None:
    report = json.loads(analyze(training).render("json"))
    assert report["gpus"] == []
    for row in (*report["breakdown"], *report["step_list"]):
        unknown = {name for name, value in row.items() if value is None}
        classes = {name for name in row if name.endswith("_ns")}
        classes -= {"total_ns", "host_data_ns", "start_ns", "end_ns"}
        assert unknown - {"device", "number"} == classes | {"gpu"}
    assert [finding["gpus"] for finding in report["findings"]] == [[]] * len(report["findings"])


def test_a_csv_row_has_empty_cells_for_what_is_unknown(training: Path) -> None:
    header, row = analyze(training).render("csv").splitlines()
    cells = dict(zip(header.split(","), row.split(","), strict=True))
    assert (cells["gpu"], cells["rank"], cells["compute_ns"]) == ("", "0", "")
    assert int(cells["host_data_ns"]) > 0


def test_the_page_of_a_comparison_has_no_empty_chart(training: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = command.gputrace("report", "--compare", training, training, "-o", page)
    assert (ran.code, ran.err) == (0, f"gputrace: wrote {page}\n")
    assert "What came of it" not in page.read_text()


def test_runs_one_after_another_are_not_taken_for_parts_of_one(
    training: Path, tmp_path: Path
) -> None:
    later = record(tmp_path, "import gputrace\nfor _ in range(6):\n    gputrace.step()\n")
    ran = command.gputrace("analyze", later, training)
    assert ran.code == 3
    assert f"after the end of {training}: not one run" in ran.err


def test_tables_for_pandas_have_the_ranks(ranks: Path) -> None:
    report = analyze(ranks)
    assert list(report.to_pandas()["rank"]) == [0, 1]
    assert len(report.to_pandas("step_list")) == 24
    assert len(report.to_pandas("gaps")) == 0


# ---- figures that can be checked by hand ----


def test_waits_are_summed_within_each_step(made: Made) -> None:
    train(made)
    report = made.report()
    assert {step.host_data_ns for step in report.step_list} == {WAIT}
    [row] = report.breakdown
    assert (row.steps, row.total_ns, row.host_data_ns) == (COUNT, COUNT * STEP, COUNT * WAIT)
    times = report.steps
    assert (times.mean_ns, times.p50_ns, times.p95_ns) == (STEP, STEP, STEP)
    assert report.span_ns == COUNT * STEP
    first = report.findings[0]
    assert (first.id, first.severity, first.impact_ns) == ("data-feeding", "high", WAIT)
    assert "num_workers" in first.advice


@settings(max_examples=few(8))
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=20),
)
def test_each_moment_of_a_step_that_any_wait_covers_counts_once(
    lengths: list[int], waits: list[tuple[int, int]]
) -> None:
    ends = list(accumulate(lengths, initial=1))
    with TemporaryDirectory() as folder:
        made = Made(Path(folder) / "made.sqlite")
        made.wait(0.5, 1.5)
        for start, end in pairwise(ends):
            made.step(start, end)
        for start, length in waits:
            made.wait(start + 2, start + 2 + length)
        report = made.report()
    steps = report.step_list
    # The first step begins with the first wait; one may follow an epoch's end, and begin later.
    assert [step.end_ns - steps[0].end_ns for step in steps] == [
        (end - ends[1]) * MS for end in ends[1:]
    ]
    marked = [MS // 2, *(end * MS for end in ends[1:-1])]
    assert all(step.start_ns >= mark for step, mark in zip(steps, marked, strict=True))
    # In half milliseconds, within the steps as they are reported.
    waited = {1, 2} | {half for s, n in waits for half in range(2 * s + 4, 2 * (s + n) + 4)}
    edges = [(2 * step.start_ns // MS, 2 * step.end_ns // MS) for step in steps]
    expected = [len(waited & set(range(*edge))) * MS // 2 for edge in edges]
    assert [step.host_data_ns for step in steps] == expected


def test_slow_steps_say_whether_they_waited_for_data(made: Made) -> None:
    train(made)
    made.step(600, 660)
    made.wait(600, 652)
    report = made.report()
    slow = finding_of(report, "slow-steps")
    assert slow.evidence["class"] == "host_data"
    assert "waiting for data (40.0 ms)" in words_of(slow)
    added = "they add 1.29 ms to the mean step"
    assert f"{added}; all of that is counted under its causes, not here" in slow.details
    assert slow.advice.startswith("check the batches of these steps")


def test_slow_steps_at_equal_distances_may_begin_epochs_where_no_loader_was_recorded(
    made: Made,
) -> None:
    now = 0.0
    for number in range(60):
        wait = 60 if number % 20 == 10 else 2
        made.wait(now, now + wait)
        made.step(now, now + wait + 18)
        now += wait + 18
    (slow,) = (finding for finding in made.report().findings if finding.id == "slow-steps")
    assert "they come every 20 steps" in slow.details
    assert slow.advice.startswith("check the batches of these steps")
    assert "; if epochs begin there, keep the loader" in slow.advice


def test_what_slow_loads_add_is_charged_to_the_waits_for_data_alone(made: Made) -> None:
    """A load that takes long now and then is the cause, and no step is slow besides."""
    now = 0.0
    for number in range(60):
        wait = 102 if number % 5 == 3 else 2
        made.wait(now, now + wait)
        made.step(now, now + wait + 10)
        now += wait + 10
    first, *others = made.report().findings
    assert first.id == "data-feeding"
    slow = next(finding for finding in others if finding.id == "slow-steps")
    assert (slow.severity, slow.impact_ns) == ("low", 0)


@pytest.mark.parametrize("waits", [True, False])
def test_steps_without_gpu_have_the_program_s_numbers_too(made: Made, waits: bool) -> None:
    """Without a wait for data nothing tells how long the first one is."""
    for number in range(COUNT):
        if waits:
            made.wait(20 * number, 20 * number + 2)
        made.step(20 * number, 20 * number + 20)
    report = made.report()
    assert report.steps.count == COUNT - (not waits)
    assert [step.number for step in report.step_list] == list(range(not waits, COUNT))
    said = f"Steps 0-{COUNT - 2} here are the program's steps 1-{COUNT - 1}."
    assert (said in report.render()) == (not waits)


@pytest.mark.parametrize("evaluates", [True, False])
def test_slow_steps_say_whether_they_evaluate(made: Made, evaluates: bool) -> None:
    """An evaluation comes between a step and the next one, which it makes longer."""
    train(made)
    made.step(600, 660)
    for number in range(COUNT):
        made.phase("model", 20 * number + 12, 20 * number + 15)
        made.phase("backward", 20 * number + 15, 20 * number + 19)
    if evaluates:
        made.phase("model", 605, 640)
    made.phase("model", 652, 655)
    made.phase("backward", 655, 659)
    slow = finding_of(made.report(), "slow-steps")
    assert slow.evidence["class"] == ("forward" if evaluates else "host")
    assert ("grew most is forward passes" in words_of(slow)) == evaluates
    assert slow.advice.startswith("look for a periodic evaluation or rollout") == evaluates


def test_warm_up_is_told_apart(made: Made) -> None:
    made.wait(-500, -480)
    made.step(-500, 0)
    train(made)
    report = made.report()
    assert (report.steps.warmup_count, report.steps.steady_count) == (1, COUNT)
    [phase] = report.phases
    assert (phase.phase, phase.end_ns - phase.start_ns, phase.idle_ns) == ("warmup", 500 * MS, None)


def test_what_another_thread_waits_for_the_training_does_not(made: Made) -> None:
    for number in range(COUNT):
        made.step(20 * number, 20 * number + 20)
        made.wait(20 * number, 20 * number + 19, thread=2)
    report = made.report()
    assert report.steps.count == COUNT - 1
    assert report.breakdown[0].host_data_ns is None
    assert [finding.id for finding in report.findings] == ["no-gpu-activity"]
    assert "unknown" in report.render()


def test_a_first_step_that_nothing_marks_the_start_of_is_left_out(made: Made) -> None:
    for number in range(COUNT):
        made.step(20 * number + (0 if number else 19), 20 * number + 20)
    report = made.report()
    assert report.steps.count == COUNT - 1
    assert {step.end_ns - step.start_ns for step in report.step_list} == {STEP}


def test_the_first_step_begins_with_the_wait_before_its_mark(made: Made) -> None:
    made.wait(-15, -3)
    made.step(-3, 0)
    train(made)
    first = made.report().step_list[0]
    assert (first.start_ns, first.end_ns, first.host_data_ns) == (-15 * MS, 0, WAIT)


def test_waits_without_steps_are_measured_over_the_whole_span(made: Made) -> None:
    made.wait(10, 310)
    made.wait(910, 1010)
    report = made.report()
    assert (report.steps.kind, report.step_list) == ("none", ())
    [row] = report.breakdown
    assert (row.steps, row.total_ns, row.host_data_ns) == (0, 1000 * MS, 400 * MS)
    assert "waits for data 40% of the time (400 ms of 1.00 s)" in report.findings[0].message


def test_workers_of_a_rank_are_not_taken_for_it(made: Made) -> None:
    for pid, rank in ((1, 0), (2, 0), (3, 1)):
        made.process(pid, rank)
    made.step(0, 5, pid=2)
    train(made, pid=1)
    train(made, pid=3, wait=1)
    report = made.report()
    assert [(row.rank, row.steps) for row in report.breakdown] == [(0, COUNT), (1, COUNT)]
    assert report.breakdown[0].host_data_ns == COUNT * WAIT


def test_processes_without_ranks_are_numbered_by_their_ids(made: Made) -> None:
    train(made, pid=9, wait=1)
    train(made, pid=4)
    report = made.report()
    assert [row.host_data_ns for row in report.breakdown] == [COUNT * WAIT, COUNT * MS]
    assert "ranks were not recorded" in report.steps.reason


def test_a_window_and_steps_can_be_chosen(made: Made) -> None:
    train(made)
    assert {s.step for s in made.report(time=(100 * MS, 200 * MS)).step_list} == {5, 6, 7, 8, 9}
    assert made.report(steps="3:5").breakdown[0].total_ns == 2 * STEP
    with pytest.raises(UsageError, match=r"no steps 40:50; it has steps 0 to 29"):
        made.report(steps="40:50")
    with pytest.raises(UsageError, match=r"no step and no wait .* from 0\.000s to 0\.600s"):
        made.report(time="5s:6s")


@pytest.mark.parametrize(
    ("meta", "note", "told"),
    [
        ({}, None, "there was no NVIDIA driver"),
        ({"driver": "yes"}, None, "--backend host was asked for"),
        ({"backend": "cupti"}, None, "no process of the recorded program ran anything on a GPU"),
        ({"backend": "cupti"}, "no libcupti was found", "no libcupti was found"),
    ],
)
def test_the_reason_for_no_gpu_activity_is_told(
    made: Made, meta: dict[str, str], note: str | None, told: str
) -> None:
    made.told(**meta)
    made.process(1, 0, note)
    train(made)
    finding = next(f for f in made.report().findings if f.id == "no-gpu-activity")
    assert told in words_of(finding)


@pytest.mark.parametrize("waits", [0, 1])
def test_neither_steps_nor_waits_with_work_between_is_an_error(made: Made, waits: int) -> None:
    """One wait would be all of the time that is known."""
    made.process(1, 0)
    for _ in range(waits):
        made.wait(1, 2)
    with pytest.raises(InputError, match="neither steps nor waits for data"):
        made.report()
