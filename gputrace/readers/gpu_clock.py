"""Skew of a GPU's clock against its host's in an nsys export.

Reports of nsys 2021 exist whose times on the GPU are all hundreds of milliseconds before or after
those of the calls. Work that begins before its launch shows it, and so do copies to pageable memory
that end after their call: cudaMemcpyAsync returns when such a copy is done.
"""

from __future__ import annotations

from typing import Final

from gputrace.store.sqlite_reader import Database
from gputrace.units import format_ns

RIGHT_NS: Final = 1_000_000
"""Nanoseconds by which clocks may be wrong: no recorder's are that wrong by accident."""
_ENOUGH: Final = 3
"""Minimum number of operations that show a skew."""
_FEW: Final = 500
_SAMPLE: Final = 20_000
"""Operations of each table to inspect at first, and then: a wrong clock is wrong for all."""
_CALLS: Final = 20
"""Calls to inspect, as a multiple."""
_COPIES: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
_ON_GPU: Final = ("CUPTI_ACTIVITY_KIND_KERNEL", _COPIES, "CUPTI_ACTIVITY_KIND_MEMSET")
_TO_PAGEABLE: Final = "copyKind = 2 AND dstKind = 0"


def measure_skew(database: Database) -> int:
    """Return the least nanoseconds to take off the GPUs' times for them to be possible, or 0.

    GPUs whose clocks differ are left alone.
    """
    soonest = _delays(database, _ON_GPU, "min", "start", _FEW)
    if not soonest or all(abs(delay) <= RIGHT_NS for delay in soonest.values()):
        return 0
    soonest = _delays(database, _ON_GPU, "min", "start", _SAMPLE)
    latest = {}
    if database.has(_COPIES, "copyKind", "dstKind"):
        latest = _delays(database, (_COPIES,), "max", "end", _SAMPLE, _TO_PAGEABLE)
    skews = [
        delay if delay < -RIGHT_NS else max(latest.get(gpu, 0), 0) for gpu, delay in soonest.items()
    ]
    is_one = max(skews) - min(skews) <= RIGHT_NS
    return skews[0] if is_one and abs(skews[0]) > RIGHT_NS else 0


def moved(skew: int) -> str:
    """Return a note that the GPUs' times were moved by a skew."""
    way = "after" if skew > 0 else "before"
    return (
        f"the times of the GPU's work were {format_ns(abs(skew))} {way} its CUDA calls: moved by "
        "as much"
    )


def _delays(
    database: Database,
    tables: tuple[str, ...],
    choose: str,
    edge: str,
    operations: int,
    where: str = "1",
) -> dict[tuple[int, int], int]:
    """Return the least or largest time from an edge of a call to that of what it issued, by process
    and device.
    """
    calls = "CUPTI_ACTIVITY_KIND_RUNTIME"
    if not database.has(calls, "start", "end", "correlationId", "globalTid"):
        return {}
    found: dict[tuple[int, int], int] = {}
    where += " AND start NOT IN (0, -1)"
    columns = ("start", "end", "correlationId", "globalPid", "deviceId")
    for table in (table for table in tables if database.has(table, *columns)):
        sql = (
            f"SELECT o.process, o.deviceId, CAST({choose}(o.{edge} - c.{edge}) AS INTEGER) FROM "
            f"(SELECT *, globalPid >> 24 AS process FROM {table} WHERE {where} "
            f"LIMIT {operations}) AS o JOIN (SELECT *, globalTid >> 24 AS process FROM {calls} "
            f"LIMIT {_CALLS * operations}) AS c USING (process, correlationId) "
            f"GROUP BY o.process, o.deviceId HAVING count(*) >= {_ENOUGH}"
        )
        for process, device, delay in database.query(sql):
            known = found.get((process, device), delay)
            found[process, device] = min(known, delay) if choose == "min" else max(known, delay)
    return found
