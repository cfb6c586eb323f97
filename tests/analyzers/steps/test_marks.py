"""Marks of steps: those of a process come the same whatever else was recorded beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.steps.marks import Marks, read_marks
from gputrace.model.events import Kind
from tests.helpers.handmade import US, Run, analyze
from tests.helpers.memory_traces import MemoryTrace, Row

NAMES: Final = ("step 1", "step 2", "batch 1", "batch 2", "train 1", "train 2", "iteration")
KIND_OF: Final = {"markers": Kind.STEP, "nvtx": Kind.RANGE}
Range = tuple[Kind, int, int, int]
"""Its kind, process, thread and name id."""


@st.composite
def recorded(draw: st.DrawFn) -> list[Range]:
    """Ranges of two processes, of which each has some of the names; three are enough for marks."""
    ids = st.lists(st.sampled_from(range(len(NAMES))), min_size=1, max_size=4)
    own = draw(ids), draw(ids)
    kinds, threads = st.sampled_from([Kind.STEP, Kind.RANGE]), st.integers(1, 2)
    some = st.integers(0, 1).flatmap(
        lambda process: st.tuples(kinds, st.just(process), threads, st.sampled_from(own[process]))
    )
    loops = draw(st.lists(st.tuples(some, st.integers(2, 4)), min_size=4, max_size=20))
    return [one for one, times in loops for _ in range(times)]


def marks_of(ranges: list[Row], names: list[str], process: int) -> list[Marks]:
    return [marks for marks in read_marks(MemoryTrace(ranges, names)) if marks.process == process]


def rows(ranges: list[Range]) -> list[Row]:
    """One range after another, from 1 on."""
    keys = ("kind", "process", "thread", "name")
    times = [{"start": 10 * at, "end": 10 * at + 5} for at in range(1, len(ranges) + 1)]
    return [
        dict(zip(keys, own, strict=True)) | time for own, time in zip(ranges, times, strict=True)
    ]


def family(name: str) -> str:
    """Return what the names of the steps of one loop have in common."""
    return re.sub(r"\d+", "#", name)


def told(marks: Marks) -> tuple[object, ...]:
    times = (marks.start.tolist(), marks.end.tolist(), marks.numbers.tolist())
    return marks.process, marks.name, marks.source, *times


@given(recorded(), st.permutations(NAMES))
def test_marks_of_a_process_are_those_of_it_alone(ranges: list[Range], names: list[str]) -> None:
    whole = rows(ranges)
    for process in range(2):
        alone = [row for row in whole if row["process"] == process]
        expected = marks_of(alone, names, process)
        assert [*map(told, marks_of(whole, names, process))] == [*map(told, expected)]


@given(recorded(), st.permutations(NAMES))
def test_marks_of_a_process_come_in_the_order_of_its_own_name_ids(
    ranges: list[Range], names: list[str]
) -> None:
    """Markers before ranges; a family is where the first of its names is that the process has."""
    for process in range(2):
        ids: dict[tuple[Kind, str], list[int]] = {}
        for kind, owner, _, name in ranges:
            if owner == process:
                ids.setdefault((kind, family(names[name])), []).append(name)
        found = [(KIND_OF[own.source], own.name) for own in marks_of(rows(ranges), names, process)]
        places = [(kind != Kind.STEP, min(ids[kind, name])) for kind, name in found]
        assert places == sorted(places)


def test_what_another_process_has_earlier_names_of_changes_no_order() -> None:
    """The first process has the name id 0 of a family of which the second has only id 2."""
    names = ["step 1", "train", "step 2"]
    first = [(Kind.STEP, 0, 1, 0)] * 3
    second = [(Kind.STEP, 1, 1, name) for name in (2, 2, 2, 1, 1, 1)]
    found = marks_of(rows(first + second), names, 1)
    assert [marks.name for marks in found] == ["train", "step #"]


@pytest.mark.parametrize(
    ("name", "count", "found"),
    [
        ("test", 20, 20),
        ("token_{turn}_processing", 12, 12),
        ("token_{turn}_processing", 6, 48),
        ("encoder_layer_{turn}", 20, 160),
        ("fold_{turn}", 20, 160),
    ],
)
def test_ranges_of_any_name_that_hold_the_work_are_iterations(
    tmp_path: Path, name: str, count: int, found: int
) -> None:
    """Ten and more, unless they are called parts of a turn; else what repeats eight times in each
    is one.
    """
    run = Run()
    for turn in range(count):
        start = run.now
        for part in range(8):
            begin = run.now
            run.kernel(50 * US, "first")
            run.kernel(50 * US, "second")
            run.synchronize()
            run.range(begin + 1, run.now - 1, f"layer_{part}_of_{turn}")
        run.range(start, run.now, name.format(turn=turn))
    steps = analyze(run, tmp_path).steps
    assert steps.kind == "iterations"
    assert abs(steps.count - found) <= 1
