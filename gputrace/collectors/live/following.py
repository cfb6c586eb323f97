"""All of a recording under way: where its steps are, what NVML sampled, and a trace of its end.

What is read, kept and written is bounded, however long and however busy the recording is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from gputrace.collectors.files.chunks import base_of, in_order
from gputrace.collectors.files.host_events import HostEvents
from gputrace.collectors.files.records import Records
from gputrace.collectors.files.spool import Spool, join_spools
from gputrace.collectors.growth import bytes_in
from gputrace.collectors.live.recent import ON_GPU, RecentHost, RecentSpool
from gputrace.collectors.live.tail import LineTail
from gputrace.collectors.merge import LEAD_NS, write_all
from gputrace.collectors.nvml.log import NvmlLines, NvmlLog
from gputrace.collectors.program.underway import processes_of
from gputrace.collectors.record_meta import read_meta
from gputrace.collectors.rows.host import write_host
from gputrace.collectors.rows.nvml import write_logs
from gputrace.collectors.rows.processes import rank_of
from gputrace.collectors.tasks.team import assert_ours, began, holds_lock
from gputrace.errors import InputError
from gputrace.traces.writer import TraceWriter

WINDOW_NS: Final = 10_000_000_000
"""How much of its end is made a trace at most."""
MOST_RECORDS: Final = 40_000
"""Of all processes together, in such a trace."""
_NVML_NS: Final = 120_000_000_000
_SILENT_NS: Final = 5_000_000_000
"""A process whose GPU has done nothing for so long does not hold up the others."""
_LEAST_NS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The last steps of a rank, as the hooks in its process saw them."""

    rank: int
    number: int
    """Of the last one, from 0."""
    ends: tuple[int, ...]
    """Nanoseconds of CLOCK_REALTIME."""
    lengths: tuple[int, ...]
    """Nanoseconds."""


_Kind = TypeVar("_Kind", RecentSpool, RecentHost)


class Following:
    """Reads what a recording's folder gains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._began = began(folder)
        self.meta: Mapping[str, str] = {}
        self._spools: dict[Path, RecentSpool] = {}
        self._hosts: dict[Path, RecentHost] = {}
        self._nvml: dict[Path, tuple[LineTail, NvmlLines]] = {}
        self._unreadable: set[Path] = set()

    @property
    def is_under_way(self) -> bool:
        """Whether a recorder is at work in the folder."""
        return self.folder.is_dir() and (
            holds_lock(self.folder) or bool(processes_of(self.folder.resolve()))
        )

    @property
    def has_ended(self) -> bool:
        """Whether all processes have written down that they ended: the trace is being made."""
        last = {base_of(path): self._spools[path] for path in in_order(self._spools)}
        return bool(last) and all(spool.has_ended for spool in last.values())

    @property
    def elapsed_ns(self) -> int:
        """Since the recording began."""
        return max(time.time_ns() - round(self._began * 1e9), 0)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return bytes_in(self.folder)

    @property
    def processes(self) -> int:
        """Those that have written anything."""
        return len({base_of(path).split(".")[-1] for path in (*self._spools, *self._hosts)})

    def read(self) -> None:
        """Takes in what was written since the last call; what cannot be read is left out."""
        self.meta = self.meta or read_meta(self.folder)
        self._read(self._spools, "*.spool", RecentSpool)
        self._read(self._hosts, "*.host", RecentHost)
        latest = max((spool.latest for spool in self._spools.values()), default=0)
        for spool in self._spools.values():
            spool.let_go(latest - 2 * WINDOW_NS)
        self._read_nvml()

    def _read(self, known: dict[Path, _Kind], pattern: str, make: Callable[[Path], _Kind]) -> None:
        paths = in_order(self.folder.glob(pattern))
        # A ring has let go of the others.
        for path in known.keys() - set(paths):
            del known[path]
        for path in paths:
            if path in self._unreadable:
                continue
            try:
                known.setdefault(path, make(path)).read()
            except InputError:
                self._unreadable.add(path)
                del known[path]

    def _read_nvml(self) -> None:
        for path in sorted(self.folder.glob("*.nvml.jsonl")):
            tail, lines = self._nvml.setdefault(path, (LineTail(path), NvmlLines()))
            for line in tail.read():
                lines.take(line)
            lines.let_go(time.time_ns() - _NVML_NS)

    def nvml(self) -> list[NvmlLog]:
        """What was sampled in the last two minutes; times are CLOCK_REALTIME."""
        return [lines.log() for _, lines in self._nvml.values()]

    def steps(self, most: int) -> list[RankSteps]:
        """The last steps of each rank that tells of some, by rank."""
        found = {}
        for recent in self._hosts.values():
            rows = recent.host.records.get("step") if recent.host else None
            if recent.host is not None and rows is not None and len(rows):
                rank = rank_of(recent.host.info) or 0
                found[rank] = _rank_steps(rank, rows[-most:])
        return [found[rank] for rank in sorted(found)]

    def window(self) -> tuple[int, int] | None:
        """The stretch of which all is known and that is not too much; None before there is any.

        Where no GPU is at work, the last seconds of the steps.
        """
        began_ns = round(self._began * 1e9)
        ends = [spool.latest for spool in self._spools.values() if spool.latest]
        if not ends:
            steps = [max(own.ends) for own in self.steps(1)]
            until = min(steps, default=0)
            return (max(until - WINDOW_NS, began_ns), until) if steps else None
        until = min(end for end in ends if end >= max(ends) - _SILENT_NS)
        since = max(until - WINDOW_NS, began_ns)
        known = np.concatenate(
            [spool.last_ends(until, MOST_RECORDS) for spool in self._spools.values()]
        )
        if len(known) > MOST_RECORDS:
            first = int(np.partition(known, -MOST_RECORDS)[-MOST_RECORDS])
            since = max(since, min(first, until - _LEAST_NS))
        return since, until

    def write(self, output: Path, window: tuple[int, int]) -> None:
        """Makes a trace of a window (CLOCK_REALTIME); raises OSError where it cannot be written."""
        since, until = window
        parts: dict[str, list[Spool]] = {}
        for path in in_order(self._spools):
            if (part := self._spools[path].between(since, until)) is not None:
                parts.setdefault(base_of(path), []).append(part)
        spools = [join_spools(own) for own in parts.values()]
        done = {spool.pid: _issued(spool) or until for spool in spools}
        hosts: list[HostEvents] = [
            *_there(h.between(since, until, done) for h in self._hosts.values())
        ]
        start = since - LEAD_NS
        with TraceWriter(output) as writer:
            write_all(writer, spools, hosts, start, self.meta)
            for host in hosts:
                write_host(writer, host, start)
            write_logs(writer, self._nvml_since(since), start)

    def _nvml_since(self, since: int) -> Iterator[NvmlLog]:
        for log in self.nvml():
            if log.devices:
                late = log.samples["timeNs"] >= since
                log.samples = {name: column[late] for name, column in log.samples.items()}
                yield log


def is_recordings(folder: Path) -> bool:
    """Whether a recorder made the folder."""
    try:
        assert_ours(folder)
    except InputError:
        return False
    return True


def _issued(spool: Spool) -> int | None:
    """When the process issued its GPU's last operation; steps that it ended later are not done."""
    ran = [rows[["end", "correlation"]] for tag in ON_GPU if len(rows := spool.records[tag])]
    if not ran:
        return None
    last = max(int(rows["correlation"][rows["end"].argmax()]) for rows in ran)
    calls = spool.records[b"API "]
    found = calls["start"][calls["correlation"] == last]
    return int(found[0]) if len(found) else None


def _rank_steps(rank: int, rows: Records) -> RankSteps:
    ends = rows["end"].astype(np.int64)
    lengths = ends - rows["start"].astype(np.int64)
    return RankSteps(rank, int(rows["number"][-1]), tuple(ends.tolist()), tuple(lengths.tolist()))


_Thing = TypeVar("_Thing", Spool, HostEvents)


def _there(found: Iterator[_Thing | None]) -> Iterator[_Thing]:
    return (each for each in found if each is not None)
