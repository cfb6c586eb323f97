"""Sketches of armed processes, made of what their hooks write while they train.

Nothing is added to the processes: their files are read from outside.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.armed import ArmedProcess
from gputrace.collectors.live import RecordingFollower
from gputrace.collectors.spool.host_events import HostEvents, Records, counts
from gputrace.model.host import BACKWARD, CHECKPOINT, DATA_RANGE, FORWARD, OPTIMIZER
from gputrace.model.intervals import union
from gputrace.store.sketches import STEP, SketchWriter, Steps

_SETTLES_NS: Final = 1_000_000_000
"""Age of a step from which all that belongs to it has been written."""
_PHASES: Final = (CHECKPOINT, FORWARD, BACKWARD, OPTIMIZER)


class Sketcher:
    """Follower of armed processes that writes sketches of their steps into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._followers: dict[Path, RecordingFollower] = {}
        self._writers: dict[int, SketchWriter] = {}

    def look(self, members: Sequence[ArmedProcess]) -> int:
        """Write sketches of what ended since the last look; return the number of steps.

        Raises OSError if the folder cannot be written.
        """
        settled, written = time.time_ns() - _SETTLES_NS, 0
        for folder in {member.folder for member in members}:
            self._followers.setdefault(folder, RecordingFollower(folder)).read()
        for member in members:
            host = self._followers[member.folder].host_events(member.pid)
            if host is None or not len(host.records["step"]):
                continue
            if member.pid not in self._writers:
                about = {
                    "job": member.job,
                    "rank": member.rank or 0,
                    "host": socket.gethostname(),
                    "pid": member.pid,
                }
                self._writers[member.pid] = SketchWriter(self._folder, about)
            writer = self._writers[member.pid]
            rows = host.records["step"]
            new = rows[(rows["number"].astype(np.int64) > writer.last) & (rows["end"] <= settled)]
            if len(new):
                writer.append(sketch(host, new, writer))
                written += len(new)
        return written


def sketch(host: HostEvents, ended: Records, writer: SketchWriter) -> Steps:
    """Return the records of some steps of a process."""
    steps, records = np.zeros(len(ended), STEP), host.records
    start, end = (ended[name].astype(np.int64) for name in ("start", "end"))
    steps["end"], steps["length"], steps["step"] = end, end - start, ended["number"]
    id_of = {name: id for id, name in host.names.items()}
    phases = {name: _named(records["phase"], id_of, name) for name in _PHASES}
    ranges = records["annotation"]
    loads = [id for id, name in host.names.items() if re.search(DATA_RANGE, name)]
    of_parts = {
        "data": np.concatenate([records["data_wait"], ranges[np.isin(ranges["name"], loads)]]),
        "gc": records["gc"],
        "compilation": records["compilation"],
        **phases,
    }
    for part, rows in of_parts.items():
        steps[part] = union(rows["start"], rows["end"]).within(start, end)
    ends = np.sort(phases[FORWARD]["end"].astype(np.int64))
    last = np.searchsorted(ends, end, side="right") - 1
    inside = (last >= 0) & (ends[last] > start) if len(ends) else np.zeros(len(start), np.bool_)
    steps["forward_end"][inside] = ends[last[inside]]
    counters = records["counter"]
    queued = _named(counters, id_of, "queued")
    # The looks of earlier steps are in their sketches.
    is_new = queued["end"].astype(np.int64) > start[0]
    queued = queued[is_new & np.isin(queued["thread"], ended["thread"])]
    at = np.searchsorted(end, queued["end"].astype(np.int64))
    within = at < len(end)
    steps["queued"] = np.bincount(at[within], counts(queued)[within], len(end))
    memory = _named(counters, id_of, "resident memory")
    if len(memory):
        seen = np.searchsorted(memory["end"], ended["end"], side="right") - 1
        steps["resident_bytes"] = np.where(seen >= 0, counts(memory)[seen], 0)
    samples = records["sample"]
    samples = samples[np.isin(samples["thread"], ended["thread"])]
    seen = np.searchsorted(samples["start"], ended["end"], side="right") - 1
    for index in np.flatnonzero(seen >= 0).tolist():
        sample = samples[seen[index]]
        if sample["start"] >= start[index]:
            steps["line"][index] = writer.number(host.names.get(int(sample["name"]), "?"))
    return steps


def _named(rows: Records, id_of: dict[str, int], name: str) -> NDArray[Any]:
    named: NDArray[Any] = rows[rows["name"] == id_of[name]] if name in id_of else rows[:0]
    return named
