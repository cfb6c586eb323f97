"""Parts of a recording whose CUDA calls are kept: when they are, and which calls lie in them.

The collector's module for it runs by itself here, on clocks that the tests set.
"""

from __future__ import annotations

import ctypes
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from tests.native.build import compile_sampling

SECOND: Final = 1_000_000_000
DAY: Final = 86_400 * SECOND
"""The wall clock at the tests' start: a multiple of ten seconds."""
STEP: Final = SECOND // 100
"""How often the collector looks, and the program's calls come, here."""
RATE: Final = 200
"""Calls a second that are not too many."""
STRETCHES: Final = 64
"""As many without calls are known."""


class Sampling:
    """sampling.c, as the collector calls it; moments count from the tests' start."""

    def __init__(self, library: Path) -> None:
        self._c = ctypes.CDLL(str(library))
        self._realtime = ctypes.c_uint64.in_dll(self._c, "fake_realtime")
        self._monotonic = ctypes.c_uint64.in_dll(self._c, "fake_monotonic")
        self._wander = DAY
        self.set_time(0)
        self._c.sampling_init()

    def set_time(self, now: int) -> None:
        self._monotonic.value, self._realtime.value = DAY // 2 + now, self._wander + now

    def set_wall_clock(self, by: int) -> None:
        self._wander += by

    def begin(self) -> bool:
        return bool(self._c.sampling_begin_window(self._monotonic))

    def keep(self) -> bool:
        look = ctypes.c_uint64()
        return bool(self._c.sampling_update(self._monotonic, ctypes.byref(look)))

    def turn(self, on: bool) -> None:
        self._c.sampling_note_switch(int(on), self._realtime)

    def turn_at(self, now: int, on: bool) -> None:
        self.set_time(now)
        self.turn(on)

    def turn_from_the_beginning(self, on: bool) -> None:
        self._c.sampling_note_switch(int(on), ctypes.c_uint64(0))

    def look(self) -> None:
        self._c.sampling_check_clock()

    def takes(self, start: int, end: int) -> bool:
        times = [ctypes.c_uint64(DAY + moment) for moment in (start, end)]
        return bool(self._c.sampling_accepts(*times))

    def step(self) -> None:
        self._c.sampling_count_step()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_sampling(tmp_path_factory.mktemp("sampling"))


@pytest.fixture
def sampling(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sampling:
    """One that has seen nothing yet."""
    monkeypatch.setenv("GPUTRACE_API", "auto")
    monkeypatch.setenv("GPUTRACE_API_RATE", str(RATE))
    return Sampling(Path(shutil.copy(library, tmp_path)))


def parts_of(
    sampling: Sampling, seconds: int, calls: int, steps: int = 0
) -> list[tuple[float, float]]:
    """Parts in seconds from the start of a window on, at so many calls and steps in a second."""
    parts: list[tuple[float, float]] = []
    was = sampling.begin()
    began = 0
    for now in range(0, seconds * SECOND, STEP):
        sampling.set_time(now)
        for _ in range(calls * STEP // SECOND):
            sampling.takes(now, now + 1)
        if steps and now % (SECOND // steps) < STEP:
            sampling.step()
        on = sampling.keep()
        if on and not was:
            began = now
        elif was and not on:
            parts.append((began / SECOND, now / SECOND))
        was = on
    return parts


# ---- when parts begin and end ----


def test_parts_of_ten_seconds_have_as_many_calls_as_are_not_too_many(sampling: Sampling) -> None:
    """Keep 200 of 500 calls a second: four parts of ten seconds, from multiples of ten on."""
    first, *later = parts_of(sampling, 65, 500)
    assert first == pytest.approx((0, 14), abs=0.1), "a whole period is kept in any case"
    assert later == [pytest.approx((at, at + 4), abs=0.1) for at in (20, 30, 40, 50, 60)]


def test_where_calls_are_few_there_are_no_parts(sampling: Sampling) -> None:
    assert parts_of(sampling, 45, RATE) == []


def test_a_part_has_four_steps_and_is_as_much_rarer(sampling: Sampling) -> None:
    """Keep 200 of 2,000 a second: one part of ten seconds, of twenty with two for four steps."""
    _, *later = parts_of(sampling, 75, 2_000, steps=2)
    lengths = [end - begin for begin, end in later]
    assert len(later) == 3
    assert all(1.5 <= length <= 2.6 for length in lengths), lengths
    assert [begin % 10 for begin, _ in later] == [pytest.approx(0, abs=0.1)] * 3
    assert [b - a for (a, _), (b, _) in pairwise(later)] == [pytest.approx(20, abs=0.1)] * 2


# ---- which calls lie in them ----


def test_a_call_is_kept_that_begins_and_ends_in_a_part(sampling: Sampling) -> None:
    for now, on in ((100, False), (200, True), (300, False), (400, True)):
        sampling.turn_at(now, on)
    kept = [(10, 90), (90, 100), (200, 210), (210, 290), (290, 300), (400, 500)]
    out = [
        (90, 101),
        (100, 110),
        (110, 190),
        (199, 201),
        (50, 250),
        (299, 301),
        (350, 360),
        (0, 900),
    ]
    # In any order: records come late, and those of one thread after another's.
    for times in [*out, *kept, *reversed(kept), *reversed(out)]:
        assert sampling.takes(*times) == (times in kept), times


def test_a_call_of_the_stretch_that_lasts_is_left_out(sampling: Sampling) -> None:
    sampling.turn_at(100, False)
    sampling.turn_at(150, False)
    assert [sampling.takes(at, at + 10) for at in (90, 120, 140, 10**15)] == [True, *[False] * 3]


def test_the_last_64_stretches_are_known_and_before_them_all_calls_are_kept(
    sampling: Sampling,
) -> None:
    for at in range(100):
        sampling.turn_at(1_000 * at, False)
        sampling.turn_at(1_000 * at + 500, True)
    taken = [sampling.takes(1_000 * at + 200, 1_000 * at + 210) for at in range(100)]
    assert taken == [True] * (100 - STRETCHES) + [False] * STRETCHES
    assert all(sampling.takes(1_000 * at + 700, 1_000 * at + 710) for at in range(100))


def test_where_the_wall_clock_is_set_back_no_call_of_a_part_is_left_out(sampling: Sampling) -> None:
    sampling.look()
    sampling.turn_at(5 * SECOND, False)
    sampling.turn_at(8 * SECOND, True)
    sampling.set_wall_clock(-4 * SECOND)
    sampling.set_time(10 * SECOND)
    sampling.look()
    assert sampling.takes(6 * SECOND, 7 * SECOND), "by the clock as it is now, in the part"
    sampling.turn(False)
    sampling.set_wall_clock(-4 * SECOND)
    sampling.set_time(12 * SECOND)
    sampling.look()
    assert sampling.takes(5 * SECOND, 6 * SECOND), "of the part, if it comes late"
    sampling.turn(True)
    sampling.turn_at(13 * SECOND, False)
    assert [sampling.takes(at * SECOND, at * SECOND + 1) for at in (4, 5, 6)] == [
        True,
        False,
        False,
    ]


def test_calls_before_the_first_window_are_left_out_whatever_the_clock_does(
    sampling: Sampling,
) -> None:
    sampling.look()
    sampling.turn_from_the_beginning(False)
    sampling.set_wall_clock(-SECOND)
    sampling.look()
    assert not sampling.takes(-3 * SECOND, -2 * SECOND)
    sampling.turn_at(2 * SECOND, True)
    assert [sampling.takes(at * SECOND, at * SECOND + 1) for at in (0, 1)] == [False, True]


def test_where_the_wall_clock_is_set_forward_calls_stay_in_their_parts(sampling: Sampling) -> None:
    sampling.look()
    sampling.turn_at(5 * SECOND, False)
    sampling.set_wall_clock(3_600 * SECOND)
    sampling.set_time(6 * SECOND)
    sampling.look()
    sampling.turn(True)
    later = 3_606 * SECOND
    assert [sampling.takes(at, at + 1) for at in (4 * SECOND, 5 * SECOND, later - 1, later)] == [
        True,
        False,
        False,
        True,
    ]
