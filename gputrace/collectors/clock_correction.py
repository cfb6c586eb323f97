"""Correction of adjustments of the wall clock: all times of a recording on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.spool import LATEST, Loss
from gputrace.collectors.spool.activity import Spool
from gputrace.collectors.spool.host_events import HostEvents, by_kind

STEADY_NS: Final = 100_000
"""Maximum drift in nanoseconds from the monotonic clock that is not corrected."""
_EARLY_NS: Final = 1_000_000_000
"""Nanoseconds before the first clock reading in which events may lie."""
_NO_ADJUSTMENT: Final = np.int64(1 << 62)

Times = NDArray[np.int64]


class _Clock:
    """Wall clock of one process, as ordered stretches between its adjustments."""

    def __init__(self, looks: Times, axis: int) -> None:
        """``looks`` are readings of both clocks, ``axis`` the intended lead of the first."""
        monotonic = looks[:, 1]
        wander = looks[:, 0] - monotonic - axis
        starts, values = [0], wander.tolist()
        for at, value in enumerate(values):
            if abs(value - values[starts[-1]]) > STEADY_NS:
                starts.append(at)
        first: Times = np.array(starts)
        self.wanders = len(first) > 1 or abs(int(wander[0])) > STEADY_NS
        self.last = len(looks)
        self.until = int(monotonic[-1]) + axis
        self._wander = wander[first]
        self._stretch = np.repeat(np.arange(len(first)), np.diff([*first, len(wander)]))
        # Records lie between the last reading but one and the next.
        early = monotonic[:1] - _EARLY_NS
        self._looks = np.concatenate((early + axis, monotonic + axis, [_NO_ADJUSTMENT]))
        # An adjustment lies between two readings.
        self._begin = np.concatenate((early, monotonic[first[1:] - 1])) + axis
        self._end = np.concatenate((monotonic[first[1:]] + axis, [_NO_ADJUSTMENT]))

    def correct(self, moments: Times, after: Times) -> Times:
        """Return moments on the clock without adjustments; 0 means none, and stays.

        ``after`` is the number of clock readings before each, including that of the header. Most
        moments are close to the last of these; others, such as starts of long events, may lie in
        any earlier stretch.
        """
        look = np.clip(after - 1, 0, len(self._stretch) - 1)
        hint, result, rest = self._stretch[look], moments.copy(), np.flatnonzero(moments)
        since, until = self._looks[look], self._looks[look + 2]
        for further in (0, 1, -1):
            rest = self._correct_in(result, rest, hint + further, since, until)
        for further in range(0, -len(self._wander), -1):
            if not len(rest):
                return result
            which = np.clip(hint + further, 0, len(self._wander) - 1)
            rest = self._correct_in(result, rest, which, self._begin[which], self._end[which])
        result[rest] = np.clip(moments[rest] - self._wander[hint[rest]], since[rest], until[rest])
        return np.maximum(result, 0)

    def _correct_in(
        self, result: Times, rest: Times, which: Times, since: Times, until: Times
    ) -> Times:
        """Correct moments that a stretch's clock puts between two others; return the rest."""
        which = np.clip(which[rest], 0, len(self._wander) - 1)
        corrected = result[rest] - self._wander[which]
        fits = (since[rest] <= corrected) & (corrected <= until[rest])
        result[rest[fits]] = corrected[fits]
        return rest[~fits]

    def correct_moment(self, moment: int, after: int) -> int:
        """Correct one moment."""
        return int(self.correct(np.array([min(moment, LATEST)]), np.array([after]))[0])


def correct_clocks(spools: Sequence[Spool], hosts: Sequence[HostEvents]) -> None:
    """Correct all times in place; they are then on one axis, that of the first process."""
    processes: list[Spool | HostEvents] = [*spools, *hosts]
    looks = [_looks(process) for process in processes]
    firsts = [pairs[0].tolist() for pairs in looks if len(pairs)]
    if not firsts:
        return
    realtime, monotonic = min(firsts, key=lambda pair: pair[1])
    for process, pairs in zip(processes, looks, strict=True):
        if len(pairs) and (clock := _Clock(pairs, realtime - monotonic)).wanders:
            _correct(process, clock)


def _looks(process: Spool | HostEvents) -> Times:
    """Return readings of both clocks at the same moments, the first at the file's start."""
    rows = process.records[b"CLOK"] if isinstance(process, Spool) else process.clocks
    pairs = np.stack([rows["realtime"], rows["monotonic"]], axis=1)
    # Differences of impossible times must fit into 64 bits.
    pairs = np.minimum(pairs, LATEST - 1).astype(np.int64)
    first = (process.started, process.began) if process.began else pairs[:1].ravel().tolist()
    return np.concatenate([np.array(first, np.int64).reshape(-1, 2), pairs])


def _correct(process: Spool | HostEvents, clock: _Clock) -> None:
    process.started = clock.correct_moment(process.started, 1)
    if isinstance(process, HostEvents):
        _correct_rows(process.events, process.after, clock)
        if process.stopped:
            process.stopped = _corrected(process.stopped, clock)
        process.records = by_kind(process.events, process.started)
        return
    for tag, rows in process.records.items():
        if "end" in (rows.dtype.names or ()):
            _correct_rows(rows, process.after[tag], clock)
    process.seen_until = clock.until
    process.switches = {
        name: [(clock.correct_moment(at, n + 1), on, n) for at, on, n in switches]
        for name, switches in process.switches.items()
    }
    process.losses = [_corrected(loss, clock) for loss in process.losses]


def _correct_rows(rows: NDArray[Any], after: NDArray[Any], clock: _Clock) -> None:
    for name in ("start", "end"):
        rows[name] = clock.correct(rows[name].astype(np.int64), after + 1).astype(np.uint64)


def _corrected(loss: Loss, clock: _Clock) -> Loss:
    """Correct a loss, which is mostly the last thing that a process wrote."""
    at, records, why = loss
    return clock.correct_moment(at, clock.last), records, why
