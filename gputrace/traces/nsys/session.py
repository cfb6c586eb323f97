"""Which run, machine and rank the processes of an export belong to, as far as it tells.

nsys says when the session started; the rest is in tables that gputrace writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gputrace.traces.events import UNKNOWN
from gputrace.traces.nsys.schema import process_key
from gputrace.traces.sqlite import Database
from gputrace.traces.trace import Session


@dataclass(frozen=True, slots=True)
class Member:
    """A process's place in the run."""

    host: str = ""
    rank: int = UNKNOWN
    world_size: int = 0
    """0 where it is not known."""


_FARTHEST_ZONE: Final = 15 * 3600
NOBODY: Final = Member()


def read_members(database: Database) -> dict[int, Member]:
    """The processes that gputrace wrote down, by the key of their ids."""
    if not database.has("GPUTRACE_PROCESS", "globalPid", "host", "rank", "worldSize"):
        return {}
    sql = (
        "SELECT globalPid, CAST(host AS TEXT), CAST(rank AS INTEGER), CAST(worldSize AS INTEGER) "
        "FROM GPUTRACE_PROCESS WHERE typeof(globalPid) = 'integer'"
    )
    return {
        process_key(id): Member(host or "", UNKNOWN if rank is None else rank, size or 0)
        for id, host, rank, size in database.query(sql)
    }


def read_session(database: Database) -> Session:
    """What the file says of its run.

    Ranks are those of processes that use a GPU: a launcher has a rank among launchers, and a
    worker of a data loader that of its trainer.
    """
    meta = _meta(database)
    members = read_members(database)
    users = _gpu_users(database)
    ranked = [
        member
        for key, member in members.items()
        if member.rank != UNKNOWN and (not users or key & 0xFFFFFF in users)
    ]
    hosts = {member.host for member in members.values()} or {meta.get("hostname", "")}
    return Session(
        epoch_ns=_epoch(database),
        job=meta.get("job", ""),
        hosts=frozenset(hosts - {""}),
        ranks=frozenset(member.rank for member in ranked),
        world_size=max((member.world_size for member in ranked), default=0) or None,
        utc_offset_ns=_utc_offset(database),
    )


def _meta(database: Database) -> dict[str, str]:
    if not database.has("GPUTRACE_META", "name", "value"):
        return {}
    return dict(database.query("SELECT name, value FROM GPUTRACE_META WHERE value IS NOT NULL"))


def _gpu_users(database: Database) -> set[int]:
    """Ids of the processes that CUDA devices are listed for."""
    if not database.has("TARGET_INFO_CUDA_DEVICE", "pid"):
        return set()
    sql = "SELECT DISTINCT pid FROM TARGET_INFO_CUDA_DEVICE WHERE pid IS NOT NULL"
    return {pid for (pid,) in database.query(sql)}


def _utc_offset(database: Database) -> int | None:
    """From the session's start in both times; zones differ by quarters of an hour."""
    if not database.has("TARGET_INFO_SESSION_START_TIME", "utcTime", "localTime"):
        return None
    sql = (
        "SELECT strftime('%s', localTime) - strftime('%s', utcTime) "
        "FROM TARGET_INFO_SESSION_START_TIME"
    )
    known = (seconds for (seconds,) in database.query(sql) if isinstance(seconds, int))
    seconds = next(known, _FARTHEST_ZONE)
    return round(seconds / 900) * 900 * 10**9 if abs(seconds) < _FARTHEST_ZONE else None


def _epoch(database: Database) -> int | None:
    if not database.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        return None
    sql = "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME WHERE utcEpochNs > 0"
    times = (time for (time,) in database.query(sql) if isinstance(time, int))
    return next(times, None)
