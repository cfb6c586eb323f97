"""Recording in progress: its steps, its NVML samples, and a trace of its last seconds."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.attempts import rank_of
from gputrace.collectors.backend import bytes_in
from gputrace.collectors.finalize import DOMAIN_CREATED as DOMAIN
from gputrace.collectors.finalize import LEAD_NS, write_all, write_host, write_logs
from gputrace.collectors.job_tasks import began, holds_lock, read_meta
from gputrace.collectors.nvml.log import NvmlLines, NvmlLog
from gputrace.collectors.processes import orphans_of
from gputrace.collectors.spool import ChunkTail, LineTail, base_of, in_order
from gputrace.collectors.spool.activity import ON_GPU, RECORDS, SPOOL, Spool, join_spools
from gputrace.collectors.spool.activity import take_text as take_spool_text
from gputrace.collectors.spool.host_events import (
    CLOCKS,
    EVENT,
    HOST,
    HostEvents,
    Records,
    by_kind,
    read_records,
)
from gputrace.collectors.spool.host_events import take_text as take_host_text
from gputrace.errors import InputError
from gputrace.store.writer import TraceWriter

_ALWAYS: Final = frozenset({b"DEVI", b"CLOK"})
"""Tags of the few records that are kept from the start on."""
_TIMED: Final = frozenset(RECORDS) - _ALWAYS
_MOST_CHUNKS: Final = 256
"""Maximum chunks, of at most 64 KiB, kept of each process."""
_HOST_KEPT_NS: Final = 120_000_000_000


class _Kept(NamedTuple):
    """Chunk of records, and the last end of any."""

    tag: bytes
    rows: Records
    end: int


class RecentSpool:
    """Recent output of the collector in one process."""

    def __init__(self, path: Path) -> None:
        self._tail = ChunkTail(path, SPOOL)
        self._chunks: deque[_Kept] = deque(maxlen=_MOST_CHUNKS)
        self._few: dict[bytes, list[Records]] = {tag: [] for tag in RECORDS}
        self._spool: Spool | None = None
        self.latest = 0
        """End of the last known GPU operation (CLOCK_REALTIME, ns)."""

    def read(self) -> None:
        """Read what has been written since; raise InputError if it is not a spool file."""
        chunks = self._tail.read(_TIMED)
        if self._spool is None and (head := self._tail.head) is not None:
            self._spool = Spool(head.pid, head.host, head.started)
        for tag, body in chunks:
            if tag not in RECORDS:
                if self._spool is not None:
                    take_spool_text(self._spool, tag, body)
                continue
            rows = read_records(memoryview(body), RECORDS[tag])
            lasting = np.full(len(rows), tag in _ALWAYS)
            lasting |= tag == b"NVTX" and rows["kind"] == DOMAIN
            if lasting.any():
                self._few[tag].append(rows[lasting])
                rows = rows[~lasting]
            if len(rows):
                # A mark has no end.
                end = int(max(rows["end"].max(), rows["start"].max()))
                self._chunks.append(_Kept(tag, rows, end))
                if tag in ON_GPU:
                    self.latest = max(self.latest, end)

    @property
    def has_ended(self) -> bool:
        """Return True if the process has recorded its regular end."""
        return self._spool is not None and "ended" in self._spool.info

    def let_go(self, before: int) -> None:
        """Drop what ended before a moment; rows out of order are kept a little longer."""
        while self._chunks and self._chunks[0].end < before:
            self._chunks.popleft()

    def last_ends(self, until: int, most: int) -> NDArray[np.int64]:
        """Return the ends of records up to a moment: ``most`` of each kind, and a few more.

        Kinds are counted separately, as a chunk of one may reach further back than ten of another.
        """
        parts, counts = [np.empty(0, np.int64)], Counter[bytes]()
        for kept in reversed(self._chunks):
            if counts[kept.tag] < most:
                ends = kept.rows["end"].astype(np.int64)
                parts.append(ends[ends <= until])
                counts[kept.tag] += len(parts[-1])
        return np.concatenate(parts)

    def between(self, since: int, until: int) -> Spool | None:
        """Return the activity in a window of CLOCK_REALTIME; None if nothing was written yet."""
        if self._spool is None:
            return None
        records = {}
        for tag, kind in RECORDS.items():
            parts = [np.empty(0, kind), *self._few[tag]]
            for rows in (kept.rows for kept in self._chunks if kept.tag == tag):
                parts.append(rows[(rows["start"] >= since) & (rows["end"] <= until)])
            records[tag] = np.concatenate(parts)
        seen_until = int(records[b"CLOK"]["realtime"].max(initial=0))
        return replace(self._spool, records=records, seen_until=seen_until)


class RecentHost:
    """Recent output of the hooks in one process."""

    def __init__(self, path: Path) -> None:
        self.host: HostEvents | None = None
        self._tail = ChunkTail(path, HOST)
        self._events: Records = np.empty(0, EVENT)
        self._clocks: Records = np.empty(0, CLOCKS)

    def read(self) -> None:
        """Read what has been written since; raise InputError if it is not a host file."""
        chunks = self._tail.read({b"EVNT"})
        if self.host is None and (head := self._tail.head) is not None:
            records = by_kind(self._events, head.started)
            self.host = HostEvents(head.pid, head.host, head.started, records)
        if self.host is None or not chunks:
            return
        events, clocks = [self._events], [self._clocks]
        for tag, body in chunks:
            if tag == b"EVNT":
                events.append(read_records(memoryview(body), EVENT))
            elif tag == b"CLOK":
                clocks.append(read_records(memoryview(body), CLOCKS))
            else:
                take_host_text(self.host, tag, body)
        self.host.host = self.host.info.get("host", self.host.host)
        self._clocks, all_events = np.concatenate(clocks), np.concatenate(events)
        recent = int(all_events["end"].max(initial=0)) - _HOST_KEPT_NS
        self._events = all_events[all_events["end"].astype(np.int64) >= recent]
        self.host.records = by_kind(self._events, self.host.started)

    def between(self, since: int, until: int, done: Mapping[int, int]) -> HostEvents | None:
        """Return events that ended in a window of CLOCK_REALTIME; None if nothing was written yet.

        Steps must lie in it, and have ended by the moment of ``done`` for the process.
        """
        if self.host is None:
            return None
        records: dict[str, Records] = {}
        for kind, rows in self.host.records.items():
            records[kind] = rows[(rows["end"] > since) & (rows["end"] <= until)]
        done_until = min(until, done.get(self.host.pid, until))
        steps = self.host.records["step"]
        records["step"] = steps[(steps["start"] >= since) & (steps["end"] <= done_until)]
        return replace(self.host, records=records, clocks=self._clocks)


WINDOW_NS: Final = 10_000_000_000
"""Maximum nanoseconds in a trace of the end of the recording."""
MOST_RECORDS: Final = 40_000
"""Maximum records of all processes in such a trace."""
_NVML_NS: Final = 120_000_000_000
_SILENT_NS: Final = 5_000_000_000
"""Nanoseconds without GPU activity after which a process does not hold up the others."""
_LEAST_NS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Last steps of a rank, as recorded by the hooks in its process."""

    rank: int
    number: int
    """Number of the last one, from 0."""
    ends: tuple[int, ...]
    """Nanoseconds of CLOCK_REALTIME."""
    lengths: tuple[int, ...]
    """Nanoseconds."""


_Kind = TypeVar("_Kind", RecentSpool, RecentHost)


class RecordingFollower:
    """Follower of a recording's folder, which reads what is added to it."""

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
        """Return True if a recorder is at work in the folder."""
        return self.folder.is_dir() and (
            holds_lock(self.folder) or bool(orphans_of(self.folder.resolve()))
        )

    @property
    def has_ended(self) -> bool:
        """Return True if all processes have recorded their regular ends."""
        last = {base_of(path): self._spools[path] for path in in_order(self._spools)}
        return bool(last) and all(spool.has_ended for spool in last.values())

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since the recording began."""
        return max(time.time_ns() - round(self._began * 1e9), 0)

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return bytes_in(self.folder)

    @property
    def processes(self) -> int:
        """Return the number of processes that have written anything."""
        return len({base_of(path).split(".")[-1] for path in (*self._spools, *self._hosts)})

    def read(self) -> None:
        """Read what has been written since the last call; unreadable files are left out."""
        self.meta = self.meta or read_meta(self.folder)
        self._read(self._spools, "*.spool", RecentSpool)
        self._read(self._hosts, "*.host", RecentHost)
        latest = max((spool.latest for spool in self._spools.values()), default=0)
        for spool in self._spools.values():
            spool.let_go(latest - 2 * WINDOW_NS)
        for path in sorted(self.folder.glob("*.nvml.jsonl")):
            tail, lines = self._nvml.setdefault(path, (LineTail(path), NvmlLines()))
            for line in tail.read():
                lines.take(line)
            lines.let_go(time.time_ns() - _NVML_NS)

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

    def nvml(self) -> list[NvmlLog]:
        """Return the samples of the last two minutes; times are CLOCK_REALTIME."""
        return [lines.log() for _, lines in self._nvml.values()]

    def host_events(self, pid: int) -> HostEvents | None:
        """Return what is known of the last two minutes of a process; None before anything is."""
        parts = [self._hosts[path].host for path in in_order(self._hosts)]
        known = [part for part in parts if part is not None and part.pid == pid]
        if not known:
            return None
        names = {id: name for part in known for id, name in part.names.items()}
        kinds = known[0].records
        joined = {kind: np.concatenate([part.records[kind] for part in known]) for kind in kinds}
        return replace(known[-1], names=names, records=joined)

    def steps(self, most: int) -> list[RankSteps]:
        """Return the last steps of each rank that has any, in order of rank."""
        steps: dict[int, RankSteps] = {}
        for host in (recent.host for recent in self._hosts.values()):
            if host is not None and len(rows := host.records["step"][-most:]):
                rank, ends = rank_of(host.info) or 0, rows["end"].astype(np.int64)
                lengths = (ends - rows["start"].astype(np.int64)).tolist()
                number = int(rows["number"][-1])
                steps[rank] = RankSteps(rank, number, tuple(ends.tolist()), tuple(lengths))
        return [steps[rank] for rank in sorted(steps)]

    def window(self) -> tuple[int, int] | None:
        """Return the last window in which everything is known, of bounded size; None without any.

        Without GPU activity, it covers the last seconds of the steps.
        """
        began_ns = round(self._began * 1e9)
        ends = [spool.latest for spool in self._spools.values() if spool.latest]
        if not ends:
            steps = [max(rank.ends) for rank in self.steps(1)]
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
        """Write the trace of a window (CLOCK_REALTIME); raise OSError if that fails."""
        since, until = window
        parts: dict[str, list[Spool]] = {}
        for path in in_order(self._spools):
            if (part := self._spools[path].between(since, until)) is not None:
                parts.setdefault(base_of(path), []).append(part)
        spools = [join_spools(files) for files in parts.values()]
        done = {spool.pid: _issued(spool) or until for spool in spools}
        parts_of_hosts = (host.between(since, until, done) for host in self._hosts.values())
        hosts = [host for host in parts_of_hosts if host is not None]
        logs = [log for log in self.nvml() if log.devices]
        for columns in (kept for log in logs for kept in (log.samples, log.activity)):
            recent = columns["timeNs"] >= since
            columns.update({name: column[recent] for name, column in columns.items()})
        start = since - LEAD_NS
        with TraceWriter(output) as writer:
            write_all(writer, spools, hosts, start, self.meta)
            for host in hosts:
                write_host(writer, host, start)
            write_logs(writer, logs, start)


def _issued(spool: Spool) -> int | None:
    """Return when the last GPU operation was issued, before which steps must end to be done."""
    ran = [rows[["end", "correlation"]] for tag in ON_GPU if len(rows := spool.records[tag])]
    if not ran:
        return None
    last = max(int(rows["correlation"][rows["end"].argmax()]) for rows in ran)
    calls = spool.records[b"API "]
    starts = calls["start"][calls["correlation"] == last]
    return int(starts[0]) if len(starts) else None
