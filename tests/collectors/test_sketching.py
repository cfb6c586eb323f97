"""Sketches of what armed processes write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from gputrace.collectors.sketching import (
    WINDOW_STEPS,
    sketch,
    steps_between_windows,
    window_cost,
)
from gputrace.collectors.spool.host_events import EVENT, KINDS
from gputrace.store.sketches import SketchWriter

MS = 1_000_000
QUEUED = 1


def test_a_wait_for_a_core_is_in_the_sketch_of_one_step(tmp_path: Path) -> None:
    """Looks at the scheduler end anywhere; those of earlier steps are still in the file."""
    steps = np.zeros(10, EVENT)
    steps["start"], steps["number"] = 10 * MS * np.arange(1, 11), np.arange(10)
    steps["end"], steps["thread"] = steps["start"] + 10 * MS, 7
    looks = np.zeros(5, EVENT)
    looks["end"], looks["thread"], looks["name"] = 20 * MS * np.arange(1, 6) + 5 * MS, 7, QUEUED
    looks["number"] = 3 * MS
    kinds = dict.fromkeys(KINDS, steps[:0]) | {"step": steps, "counter": looks}
    host = cast("Any", SimpleNamespace(records=kinds, names={QUEUED: "queued"}))
    about = {"job": "j", "rank": 0, "host": "h", "pid": 1}
    writer = SketchWriter(tmp_path, about)
    queued = np.concatenate(
        [sketch(host, steps[a:b], writer)["queued"] for a, b in ((0, 4), (4, 7), (7, 10))]
    )
    assert (queued / MS).tolist() == [0, 3, 0, 3, 0, 3, 0, 3, 0, 3]


def _training(lengths_ms: list[float]) -> Any:
    """Steps from number 0 on, one after the other."""
    steps = np.zeros(len(lengths_ms), EVENT)
    ends = np.cumsum(np.array(lengths_ms) * MS).astype(np.int64)
    steps["end"], steps["start"] = ends, np.append(0, ends[:-1])
    steps["number"] = np.arange(len(steps))
    return steps


def test_a_window_costs_what_its_steps_and_the_next_ones_take_longer_than_those_before() -> None:
    window, echo = [30.0] * WINDOW_STEPS, [24.0] * 5
    cost = window_cost(_training([20.0] * 100 + window + echo + [20.0] * 60), 100)
    assert cost == (WINDOW_STEPS * 10 + 5 * 4) / 20


def test_what_a_window_in_the_first_steps_costs_is_not_known() -> None:
    assert window_cost(_training([20.0] * 100), 10) is None
    assert window_cost(_training([20.0] * 100), 100) is None


def test_windows_cost_a_hundredth_of_the_time_between_them_at_most() -> None:
    assert steps_between_windows(100, 10, ()) == 100
    assert steps_between_windows(100, 70, ()) == 200
    assert steps_between_windows(100, 10, [6.0] * 8) == 800
    assert steps_between_windows(100, 10, [6.0] * 7) == 100, "so few do not tell"
    # Checkpoints fell into three.
    assert steps_between_windows(100, 10, [0.5] * 5 + [90.0] * 3) == 100
