"""Sets of nanoseconds agree with Python's own sets, on times small enough to list."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gputrace import native
from gputrace.model.intervals import (
    EMPTY,
    Intervals,
    merge_touching,
    number_windows,
    search,
    union,
    union_of,
)

pytestmark = pytest.mark.usefixtures("columns")

Rows = list[tuple[int, int]]

MOMENTS = st.integers(-15, 45)
ROWS = st.lists(st.tuples(st.integers(-10, 30), st.integers(0, 10))).map(
    lambda rows: [(start, start + length) for start, length in rows]
)
"""Nested, touching, identical and empty intervals come up often among so few times."""
WINDOWS = st.tuples(MOMENTS, MOMENTS).map(lambda edges: (min(edges), max(edges)))


def covered(rows: Rows) -> set[int]:
    return {time for start, end in rows for time in range(start, end)}


def of(rows: Rows) -> Intervals:
    return union([start for start, _ in rows], [end for _, end in rows])


def members(intervals: Intervals) -> set[int]:
    """The nanoseconds of a set, which must be sorted, without empty or touching intervals."""
    start, end = intervals.start, intervals.end
    assert start.dtype == end.dtype == np.int64
    assert (start < end).all()
    assert (end[:-1] < start[1:]).all()
    return covered(list(zip(start.tolist(), end.tolist(), strict=True)))


@given(ROWS)
def test_a_union_holds_what_any_interval_holds(rows: Rows) -> None:
    assert members(of(rows)) == covered(rows)
    assert of(rows).total == len(covered(rows))
    assert of(rows).lengths.sum() == len(covered(rows))


@given(ROWS.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows))))
def test_the_order_of_rows_means_nothing(orders: tuple[Rows, Rows]) -> None:
    assert members(of(orders[0])) == members(of(orders[1]))


@given(ROWS)
def test_rows_known_to_be_sorted_give_the_same_union(rows: Rows) -> None:
    starts, ends = [start for start, _ in sorted(rows)], [end for _, end in sorted(rows)]
    assert members(union(starts, ends, is_sorted=True)) == covered(rows)


@given(st.lists(st.tuples(MOMENTS, st.integers(0, 9), st.integers(0, 3))), st.integers(0, 3))
def test_a_union_of_groups_holds_what_their_intervals_hold(
    rows: list[tuple[int, int, int]], last: int
) -> None:
    start, length, group = np.array(sorted(rows), np.int64).reshape(-1, 3).T
    some = union_of(start, start + length, group.astype(np.int8), range(1, last + 1))
    held = [(begin, begin + ns) for begin, ns, of in rows if 1 <= of <= last]
    assert members(some) == covered(held)


@given(st.lists(MOMENTS), st.lists(MOMENTS))
@example([], [1])
@example([-(1 << 63), 0, (1 << 63) - 1], [-(1 << 63), (1 << 63) - 1, 0])
def test_times_are_searched_before_and_after_their_equals(
    column: list[int], times: list[int]
) -> None:
    ordered, asked = np.array(sorted(column), np.int64), np.array(times, np.int64)
    assert search(ordered, asked).tolist() == np.searchsorted(ordered, asked).tolist()
    after = np.searchsorted(ordered, asked, "right")
    assert search(ordered, asked, "right").tolist() == after.tolist()


@given(ROWS, ROWS)
def test_what_is_made_of_two_sets_is_as_of_python_s(first: Rows, second: Rows) -> None:
    assert members(merge_touching(of(first), of(second))) == covered(first) | covered(second)
    assert members(of(first).intersection(of(second))) == covered(first) & covered(second)
    assert members(of(first).difference(of(second))) == covered(first) - covered(second)


@given(ROWS, WINDOWS)
@example([(0, 10)], (5, 5))
def test_clip_and_complement_share_a_window_between_them(
    rows: Rows, window: tuple[int, int]
) -> None:
    inside = covered(rows) & covered([window])
    assert members(of(rows).clip(*window)) == inside
    assert members(of(rows).complement(*window)) == covered([window]) - inside


@given(ROWS, st.lists(MOMENTS))
def test_before_counts_and_contains_tells_membership(rows: Rows, times: list[int]) -> None:
    before = [sum(member < time for member in covered(rows)) for time in times]
    assert of(rows).before(times).tolist() == before
    assert of(rows).contains(times).tolist() == [time in covered(rows) for time in times]


@given(ROWS, st.lists(WINDOWS))
def test_within_counts_what_lies_in_each_window(rows: Rows, windows: Rows) -> None:
    starts, ends = [start for start, _ in windows], [end for _, end in windows]
    expected = [len(covered(rows) & covered([window])) for window in windows]
    assert of(rows).within(starts, ends).tolist() == expected


@given(ROWS, st.lists(st.integers(-5, 45)))
def test_a_time_is_of_the_last_window_that_began_unless_it_ended(
    windows: Rows, times: list[int]
) -> None:
    ordered, windows = sorted(times), sorted(windows)
    starts, ends = np.array(windows, np.int64).reshape(-1, 2).T
    expected = []
    for time in ordered:
        began = max((n for n, (start, _) in enumerate(windows) if start <= time), default=-1)
        expected.append(began if began >= 0 and time < windows[began][1] else -1)
    assert number_windows(np.array(ordered, np.int64), starts, ends).tolist() == expected


def test_a_single_time_needs_no_list() -> None:
    assert of([(2, 5)]).before(4) == 2
    assert of([(2, 5)]).contains(4)
    assert EMPTY.before(4) == 0
    assert not EMPTY.contains(4)


def test_times_of_a_clock_since_1970_lose_no_nanosecond() -> None:
    now = 1_800_000_000 * 10**9
    both = of([(now, now + 3), (now + 1, now + 4)])
    assert members(both) == {now, now + 1, now + 2, now + 3}
    assert both.complement(now - 1, now + 6).total == 3


def test_a_library_of_an_older_gputrace_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "_analysis.so"
    source = "void gputrace_join_intervals(void) {} void gputrace_intersect(void) {}"
    command = ["cc", "-shared", "-x", "c", "-o", str(older), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setattr(native, "built", lambda _: older)
    assert native.library.__wrapped__() is None
