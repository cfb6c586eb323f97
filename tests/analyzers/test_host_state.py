"""Gaps and slow steps say what their host was at: a phase, a collection, a wait for a core."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.host_state import least_queued
from gputrace.api import Report
from gputrace.model.results import Gap
from tests.helpers.exports import SAMPLE, STEP, Export, global_id
from tests.helpers.handmade import MS, Run, analyze
from tests.helpers.sentences import words_of

PID: Final = 100
STEPS: Final = 20
COLLECTION, PHASE, LOADER = 3, 4, 5


class Host:
    """Steps of 10 ms, in which the GPU idles from 4 to 8.5 ms, and longer in some."""

    def __init__(self) -> None:
        self.export = Export()
        self.export.give("GPUTRACE_META", "name", "value")
        ranges, counters = "GPUTRACE_HOST_RANGE", "GPUTRACE_HOST_COUNTER"
        self.export.give(ranges, "start", "end", "globalTid", "nameId", "kind")
        self.export.give(counters, "start", "end", "globalTid", "nameId", "value")
        for table in ("GPUTRACE_META", ranges, counters):
            self.export.rows.setdefault(table, [])
        self.more_ms: dict[int, float] = {}
        self.steps, self.computes = STEPS, False

    def analyze(self, folder: Path) -> Report:
        run, at = Run(self.export, pid=PID), 0
        for number in range(self.steps):
            later = self.more_ms.get(number, 0)
            run.now = at + 2 * MS
            run.kernel(2 * MS, "gemm")
            busy = later if self.computes else 0
            run.now = at + round((8.5 + later - busy) * MS)
            run.kernel(round((1 + busy) * MS), "gemm")
            self.add(STEP, "torch.step", at, 10 + later, step=number)
            self.ranges(number, at, later)
            at += round((10 + later) * MS)
        return analyze(self.export, folder)

    def ranges(self, number: int, at: int, later: float) -> None:
        """Record what the host does in a step."""

    def add(self, table: str, name: str, start: int, length_ms: float, **more: int) -> None:
        who = {"globalTid": global_id(PID, thread=PID), "nameId": self.export.string(name)}
        end = start + round(length_ms * MS)
        self.export.add(table, start=start + 1, end=end + 1, **who, **more)


def longest(report: Report) -> Gap:
    return max(report.gaps.largest_in_steps, key=lambda gap: gap.length_ns)


class Backward(Host):
    def ranges(self, number: int, at: int, later: float) -> None:
        self.add("GPUTRACE_HOST_RANGE", "backward", at + 4 * MS, 5, kind=PHASE)
        self.add("GPUTRACE_HOST_RANGE", "optimizer", at + 9 * MS, 1, kind=PHASE)


def test_a_gap_says_the_phase_that_has_most_of_it(tmp_path: Path) -> None:
    assert longest(Backward().analyze(tmp_path)).evidence.endswith(", in the backward pass")


@pytest.mark.parametrize(("ms", "expected"), [(3, True), (1, False)])
def test_a_gap_says_that_its_thread_was_queued(tmp_path: Path, ms: int, expected: bool) -> None:
    class Queued(Host):
        def ranges(self, number: int, at: int, later: float) -> None:
            self.add("GPUTRACE_HOST_COUNTER", "queued", at, 10, value=ms * MS)

    said = ", queued for a core 3.00 ms of the 10.0 ms around it"
    assert longest(Queued().analyze(tmp_path)).evidence.endswith(said) is expected


def test_what_was_counted_over_much_longer_says_nothing_of_a_gap(tmp_path: Path) -> None:
    class Scanned(Host):
        def ranges(self, number: int, at: int, later: float) -> None:
            if number % 10 == 0:
                self.add("GPUTRACE_HOST_COUNTER", "queued", at, 100, value=50 * MS)

    assert "queued" not in longest(Scanned().analyze(tmp_path)).evidence


class Collecting(Host):
    def ranges(self, number: int, at: int, later: float) -> None:
        if later:
            self.add("GPUTRACE_HOST_RANGE", "generation 2", at + 5 * MS, later, kind=COLLECTION)


def test_steps_that_are_slow_for_collections_say_so_and_so_do_their_gaps(tmp_path: Path) -> None:
    host = Collecting()
    host.more_ms = {7: 12, 14: 12}
    report = host.analyze(tmp_path)
    assert ", garbage collection 12.0 ms" in longest(report).evidence
    (slow,) = (finding for finding in report.findings if finding.id == "slow-steps")
    assert "2 of " in words_of(slow)
    assert "in each, Python collects garbage for 12.0 ms" in words_of(slow)
    assert slow.advice.startswith("gc.freeze()")


class Restarting(Host):
    def __init__(self) -> None:
        super().__init__()
        self.export.give("GPUTRACE_HOST_RANGE", "number")

    def ranges(self, number: int, at: int, later: float) -> None:
        if later:
            first = 1 << 32 | 2
            self.add("GPUTRACE_HOST_RANGE", "start workers", at, later, kind=LOADER, number=first)


def test_steps_that_are_slow_for_a_loader_s_workers_say_so(tmp_path: Path) -> None:
    """At no distance of epochs."""
    host = Restarting()
    host.more_ms = {7: 12, 12: 12}
    (slow,) = (found for found in host.analyze(tmp_path).findings if found.id == "slow-steps")
    assert "in each, a loader starts its workers for 12.0 ms" in words_of(slow)
    assert "persistent_workers=True" in slow.advice


class Logging(Host):
    """One sample in each step, and another in slow ones where these write metrics."""

    def ranges(self, number: int, at: int, later: float) -> None:
        for place, after_ms in {"train.py:3 step": 1, "train.py:9 log": 9}.items():
            if after_ms < 9 or later:
                name = self.export.string(place)
                row = {"globalTid": global_id(PID, thread=PID), "nameId": name}
                sample = {"start": at + after_ms * MS, "innerNameId": name, "waitedNs": 0}
                self.export.add(SAMPLE, **sample, **row)


@pytest.mark.parametrize(("slow", "named"), [((4, 8, 12, 16), True), ((8, 16), False)])
def test_steps_that_are_slow_at_a_line_say_so_by_the_samples_of_all_of_them(
    tmp_path: Path, slow: tuple[int, ...], named: bool
) -> None:
    host = Logging()
    host.more_ms = dict.fromkeys(slow, 12)
    (found,) = (found for found in host.analyze(tmp_path).findings if found.id == "slow-steps")
    said = "they are longer at train.py:9 log (4 of their 8 samples)"
    assert (said in words_of(found)) is named
    assert found.advice.startswith("look at train.py:9 log: do that less often") is named


class Spent(NamedTuple):
    """How a thread spends some time."""

    on_core: float
    queued: float
    blocked: float


@given(
    *[st.builds(Spent, *[st.integers(0, 10**9)] * 3)] * 2,
    st.fractions(0, 1),
)
def test_a_look_says_no_more_of_a_step_than_is_certain(
    inside: Spent, outside: Spent, part: float
) -> None:
    """All that is certain, where it is known for how long the thread has a core beside the step:
    what it was queued for, less what it may have been in place of being blocked.
    """

    def least(busy: float) -> float:
        queued, on_core = inside.queued + outside.queued, inside.on_core + outside.on_core
        numbers = (queued, on_core, sum(inside), sum(outside), busy)
        return float(least_queued(*(np.array([number]) for number in numbers))[0])

    assert least(outside.on_core) == max(0, inside.queued - outside.blocked)
    assert least(int(part * outside.on_core)) <= least(outside.on_core) <= inside.queued
    assert least(0) == max(0, inside.queued - outside.blocked - outside.on_core)


class Looked(Host):
    """Steps that a thread spends as it does, which is counted from look to look at their ends."""

    def __init__(self, usual: Spent, of: dict[int, Spent], apart_ms: float) -> None:
        super().__init__()
        self.usual, self.of, self.apart_ms = usual, of, apart_ms
        self.more_ms = {number: sum(spent) - 10 for number, spent in of.items()}
        self.steps, self.since, self.spent = 2 * STEPS, 0, np.zeros(2)

    def ranges(self, number: int, at: int, later: float) -> None:
        spent = self.of.get(number, self.usual)
        self.spent += spent[:2]
        length_ms = (at - self.since) / MS + sum(spent)
        if length_ms >= self.apart_ms:
            for name, ms in zip(("on core", "queued"), self.spent, strict=True):
                value = round(ms * MS)
                self.add("GPUTRACE_HOST_COUNTER", name, self.since, length_ms, value=value)
            self.add("GPUTRACE_HOST_COUNTER", "process on core", self.since, length_ms, value=1)
            self.since, self.spent = round(self.since + length_ms * MS), np.zeros(2)


BUSY, IDLE = Spent(9.5, 0.5, 0), Spent(1, 0, 9)
CROWDED, IDLE_CROWDED = Spent(10, 55, 5), Spent(1, 66, 3)
ASLEEP = {12: Spent(1, 0, 69), **{number: Spent(1, 9, 0) for number in range(7, 12)}}


@pytest.mark.parametrize("apart_ms", [0, 25, 65])
@pytest.mark.parametrize(
    ("usual", "of", "queued_ms"),
    [
        (BUSY, {12: CROWDED}, 55 - 3.5),
        (IDLE, {12: IDLE_CROWDED}, 66),
        (IDLE, ASLEEP, 0),
    ],
)
def test_a_slow_step_says_that_its_thread_was_queued_as_far_as_looks_tell(
    tmp_path: Path, usual: Spent, of: dict[int, Spent], queued_ms: float, apart_ms: float
) -> None:
    """Beyond what is usual in 70 ms. A look may be longer than the step: of a thread that seldom
    has a core, one of 120 ms does not say whether it was queued in it or in the steps before.
    """
    host = Looked(usual, of, apart_ms)
    (slow,) = (found for found in host.analyze(tmp_path).findings if found.id == "slow-steps")
    assert "1 of " in words_of(slow)
    said_ns = slow.evidence["queued_ns"]
    assert isinstance(said_ns, int)
    assert said_ns <= queued_ms * MS
    is_said = queued_ms > 0 and not (usual is IDLE and apart_ms == 65)
    expected = f"queued for a core for at least {said_ns / MS:.1f} ms longer than usual"
    assert (expected in words_of(slow)) is is_said
    assert ("taskset" in slow.advice) is is_said
    if is_said and usual is BUSY:
        assert said_ns >= 0.98 * queued_ms * MS


def test_the_causes_of_a_slow_step_have_its_wait_for_a_core(tmp_path: Path) -> None:
    path = Looked(BUSY, {12: CROWDED}, 0).analyze(tmp_path).path
    with gputrace.open(path) as trace:
        (row,) = trace.explain_step(12).gpus
    parts = {part.cause: part for part in row.parts}
    assert parts["cpu-starved"].ns == pytest.approx(55 * MS, rel=0.01)
    assert sum(part.ns for part in row.parts) == row.total_ns
    assert row.parts[0].cause == "cpu-starved"


@pytest.mark.parametrize(
    ("queued_ms", "least_ms"), [((1, 9), 0), ((8, 9), 7)], ids=["10 of 20 ms", "17 of 20 ms"]
)
def test_a_look_of_two_steps_charges_one_with_no_wait_for_a_core_that_the_other_may_have(
    tmp_path: Path, queued_ms: tuple[int, int], least_ms: int
) -> None:
    of = {12 + at: Spent(1, ms, 9 - ms) for at, ms in enumerate(queued_ms)}
    with gputrace.open(Looked(IDLE, of, 20).analyze(tmp_path).path) as trace:
        (row,) = trace.explain_step(12).gpus
    charged_ns = sum(part.ns for part in row.parts if part.cause == "cpu-starved")
    assert max(least_ms - 1, 0) * MS <= charged_ns <= least_ms * MS


def test_a_slow_step_in_which_the_gpu_works_is_not_put_down_to_the_host(tmp_path: Path) -> None:
    host = Looked(BUSY, {12: CROWDED}, 0)
    host.computes = True
    (slow,) = (found for found in host.analyze(tmp_path).findings if found.id == "slow-steps")
    assert slow.evidence["class"] == "compute"
    assert "queued" not in words_of(slow)


def test_steps_that_are_slow_for_something_else_do_not(tmp_path: Path) -> None:
    host = Host()
    host.more_ms = {7: 12, 14: 12}
    (slow,) = (found for found in host.analyze(tmp_path).findings if found.id == "slow-steps")
    assert "garbage for" not in words_of(slow)
    assert slow.evidence["class"] == "launch"
    assert "batch" not in slow.advice, "they wait for no data"
