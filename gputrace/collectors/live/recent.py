"""The last seconds of what one process writes down, as if it had written nothing before."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.files.host_events import EVENT, HOST, HostEvents, by_kind
from gputrace.collectors.files.host_events import take_text as take_host_text
from gputrace.collectors.files.records import CLOCKS, Records, read_records
from gputrace.collectors.files.spool import RECORDS, SPOOL, Spool
from gputrace.collectors.files.spool import take_text as take_spool_text
from gputrace.collectors.live.tail import ChunkTail
from gputrace.collectors.rows.nvtx import DOMAIN_CREATED as DOMAIN

_ALWAYS: Final = frozenset({b"DEVI", b"CLOK"})
"""Records that are few, and are kept from the start on."""
_TIMED: Final = frozenset(RECORDS) - _ALWAYS
_MOST_CHUNKS: Final = 256
"""Of 64 KiB at most, for each process."""
ON_GPU: Final = (b"KERN", b"COPY", b"MSET", b"GRPH")
_HOST_KEPT_NS: Final = 120_000_000_000


@dataclass(frozen=True, slots=True)
class _Kept:
    """One chunk of records."""

    tag: bytes
    rows: Records
    end: int
    """When the last of its records did."""


class RecentSpool:
    """What the collector in one process has written of late."""

    def __init__(self, path: Path) -> None:
        self._tail = ChunkTail(path, SPOOL)
        self._chunks: deque[_Kept] = deque(maxlen=_MOST_CHUNKS)
        self._few: dict[bytes, list[Records]] = {tag: [] for tag in RECORDS}
        self._spool: Spool | None = None
        self.latest = 0
        """When the last GPU operation that is known ended (CLOCK_REALTIME, ns)."""

    def read(self) -> None:
        """Takes in what was written since; raises InputError where it is no spool file."""
        chunks = self._tail.read(_TIMED)
        if self._spool is None and (head := self._tail.head) is not None:
            self._spool = Spool(head.pid, head.host, head.started)
        for tag, body in chunks:
            self._take(tag, body)

    def _take(self, tag: bytes, body: bytes) -> None:
        assert self._spool is not None
        if tag not in RECORDS:
            take_spool_text(self._spool, tag, body)
            return
        rows = read_records(memoryview(body), RECORDS[tag])
        lasting = np.full(len(rows), tag in _ALWAYS) | (tag == b"NVTX" and rows["kind"] == DOMAIN)
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
        """Whether the process came to its end and wrote that down."""
        return self._spool is not None and "ended" in self._spool.info

    def let_go(self, before: int) -> None:
        """Forgets what ended before a moment; what is not in order is kept a little longer."""
        while self._chunks and self._chunks[0].end < before:
            self._chunks.popleft()

    def last_ends(self, until: int, most: int) -> NDArray[np.int64]:
        """When records up to a moment ended, in any order: of each kind ``most``, and a few more.

        Kinds are told apart as a chunk of one may reach further back than ten of another.
        """
        parts, counts = [np.empty(0, np.int64)], Counter[bytes]()
        for kept in reversed(self._chunks):
            if counts[kept.tag] < most:
                ends = kept.rows["end"].astype(np.int64)
                parts.append(ends[ends <= until])
                counts[kept.tag] += len(parts[-1])
        return np.concatenate(parts)

    def between(self, since: int, until: int) -> Spool | None:
        """What began and ended in a stretch of CLOCK_REALTIME; None where nobody wrote yet."""
        if self._spool is None:
            return None
        records = {}
        for tag, kind in RECORDS.items():
            timed = (kept.rows for kept in self._chunks if kept.tag == tag)
            parts = [*self._few[tag], *(_within(rows, since, until) for rows in timed)]
            records[tag] = np.concatenate(parts) if parts else np.empty(0, kind)
        seen_until = int(records[b"CLOK"]["realtime"].max(initial=0))
        return replace(self._spool, records=records, seen_until=seen_until)


def _within(rows: Records, since: int, until: int) -> Records:
    kept: Records = rows[(rows["start"] >= since) & (rows["end"] <= until)]
    return kept


@dataclass(slots=True)
class RecentHost:
    """What the hooks in one process have written of late."""

    path: Path
    host: HostEvents | None = None
    _events: Records = field(default_factory=lambda: np.empty(0, EVENT))
    _clocks: Records = field(default_factory=lambda: np.empty(0, CLOCKS))
    _tail: ChunkTail | None = None

    def read(self) -> None:
        """Takes in what was written since; raises InputError where it is no host file."""
        if self._tail is None:
            self._tail = ChunkTail(self.path, HOST)
        chunks = self._tail.read({b"EVNT"})
        if self.host is None and (head := self._tail.head) is not None:
            self.host = HostEvents(head.pid, head.host, head.started)
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
        """What ended in a stretch of CLOCK_REALTIME; None where nobody wrote yet.

        Steps are those that lie in it and, by process, ended before a moment of ``done``.
        """
        if self.host is None:
            return None
        done_until = min(until, done.get(self.host.pid, until))

        def cut(kind: str, rows: Records) -> Records:
            if kind == "step":
                return rows[(rows["start"] >= since) & (rows["end"] <= done_until)]
            return rows[(rows["end"] > since) & (rows["end"] <= until)]

        records: dict[str, Any] = {k: cut(k, rows) for k, rows in self.host.records.items()}
        return replace(self.host, records=records, clocks=self._clocks)
