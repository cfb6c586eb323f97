"""Sketches of what armed processes write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from gputrace.collectors.sketching import sketch
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
