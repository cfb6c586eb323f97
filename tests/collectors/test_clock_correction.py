"""Moments that processes recorded, once what the wall clock was set by is taken out."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputrace.collectors.clock_correction import correct_clocks
from gputrace.collectors.nvml.log import make_steady as make_log_steady
from gputrace.collectors.nvml.log import read_nvml
from gputrace.collectors.spool.activity import RECORDS, Spool
from gputrace.collectors.spool.host_events import CLOCKS, EVENT, HostEvents

SECOND = 1_000_000_000
AXIS = 1_700_000_000 * SECOND
"""By how much the wall clock is ahead of the other one until somebody sets it."""


def look(at: int, by: int) -> tuple[int, int, int]:
    return AXIS + at + by, at, at


def host(began: int, parts: list[tuple[int, list[int]]], ends: list[int]) -> HostEvents:
    """A process that looks at its clocks, with what these were set by, and then writes its steps.

    ``ends`` are by the wall clock, as many as the numbers that the parts have.
    """
    host = HostEvents(1, "host", AXIS + began, began=began)
    host.clocks = np.array([look(at, by) for at, (by, _) in parts_at(began, parts)], CLOCKS)
    host.events = np.zeros(len(ends), EVENT)
    host.events["end"], host.events["kind"], host.events["number"] = ends, 2, range(len(ends))
    host.after = np.repeat(range(1, len(parts) + 1), [len(steps) for _, steps in parts])
    return host


def parts_at(
    began: int, parts: list[tuple[int, list[int]]]
) -> list[tuple[int, tuple[int, list[int]]]]:
    return [(began + number * SECOND, part) for number, part in enumerate(parts)]


SETTINGS = st.one_of(st.just(0), st.integers(3, 10**6), st.integers(-(10**6), -3))
"""Seconds; a clock that is set by less than a second is told from one that is not only by the next
look."""


@given(settings=st.lists(SETTINGS, min_size=1, max_size=6), data=st.data())
def test_every_moment_is_where_it_was_had_nobody_set_the_clock(
    settings: list[int], data: st.DataObject
) -> None:
    """The clock is set at some moment of each second, and looked at when that begins."""
    began, parts, wall, true = 5 * SECOND, [], [], []
    for number, by in enumerate(accumulate(settings, initial=0)):
        moments = data.draw(st.lists(st.integers(1, SECOND - 1), max_size=3).map(sorted))
        after = settings[number] if number < len(settings) else 0
        at = data.draw(st.integers(1, SECOND - 1))
        parts.append((by * SECOND, moments))
        for moment in moments:
            true.append(AXIS + began + number * SECOND + moment)
            wall.append(true[-1] + (by + after * (moment >= at)) * SECOND)
    process = host(began, parts, wall)
    correct_clocks([], [process])
    assert process.events["end"].tolist() == true


def test_the_first_step_is_there_though_the_clock_was_set_back() -> None:
    wall = [AXIS + 5 * SECOND + 10, AXIS + 5 * SECOND + 20 - 50 * SECOND]
    process = host(5 * SECOND, [(0, wall[:1]), (-50 * SECOND, wall[1:])], wall)
    correct_clocks([], [process])
    assert process.records["step"]["number"].tolist() == [0, 1]


def test_processes_that_began_before_and_after_are_on_one_axis() -> None:
    first = host(5 * SECOND, [(0, [1])], [AXIS + 6 * SECOND])
    later = host(9 * SECOND, [(-7 * SECOND, [1])], [AXIS + 10 * SECOND - 7 * SECOND])
    later.started -= 7 * SECOND
    correct_clocks([], [later, first])
    assert (first.started, later.started) == (AXIS + 5 * SECOND, AXIS + 9 * SECOND)
    assert later.events["end"].tolist() == [AXIS + 10 * SECOND]


def test_windows_and_losses_of_a_spool_are_corrected_too() -> None:
    spool = Spool(1, "host", AXIS + SECOND, began=SECOND)
    spool.records = {tag: np.empty(0, kind) for tag, kind in RECORDS.items()}
    spool.records[b"CLOK"] = np.array([look(SECOND, 0), look(3 * SECOND, -60 * SECOND)], CLOCKS)
    spool.after = {tag: np.zeros(len(rows), np.int64) for tag, rows in spool.records.items()}
    spool.switches["captures"] = [(AXIS + 4 * SECOND - 60 * SECOND, False, 2)]
    spool.losses = [(AXIS + 5 * SECOND - 60 * SECOND, 3, "lost")]
    correct_clocks([spool], [])
    assert spool.switches["captures"] == [(AXIS + 4 * SECOND, False, 2)]
    assert spool.losses == [(AXIS + 5 * SECOND, 3, "lost")]
    assert spool.seen_until == AXIS + 3 * SECOND


def test_a_clock_that_only_wanders_is_left_as_it_is() -> None:
    process = host(5 * SECOND, [(0, [1]), (90_000, [1])], [AXIS + 6 * SECOND, AXIS + 7 * SECOND])
    before = process.events.copy()
    correct_clocks([], [process])
    assert (process.events == before).all()


def test_samples_of_the_cards_are_corrected_by_their_own_ticks(tmp_path: Path) -> None:
    head = {"devices": [{}], "topology": [], "host": "h", "driver": "", "interval_ns": SECOND}
    lines = [head | {"columns": ["timeNs", "power"]}]
    for tick, by in enumerate((0, -60 * SECOND)):
        wall = AXIS + tick * SECOND + by
        told = {"time_ns": wall, "monotonic_ns": tick * SECOND, "gpus": [[wall + 5, 100]]}
        lines.append(told | ({"lost": {"0": "gone"}} if tick else {}))
    path = tmp_path / "h.nvml.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    log = read_nvml(path)
    make_log_steady(log, AXIS)
    assert log.samples["timeNs"].tolist() == [AXIS + 5, AXIS + SECOND + 5]
    assert log.devices[0]["lostNs"] == AXIS + SECOND
