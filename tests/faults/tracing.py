"""Checks that the trace has what the program did."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from tests.faults import ledger
from tests.faults.ledger import Told
from tests.faults.model import Fault, May, Outcome
from tests.faults.running import Life, Ran, recover

SECOND: Final = 1_000_000_000
PATIENCE_NS: Final = SECOND // 2
"""Beyond its second, how late a machine that is busy may wake what writes."""
_OFF_NS: Final = SECOND // 20
"""By how much a moment in the trace may be off the ledger's: the program may lose the processor
between noting it and doing it."""
_AROUND_NS: Final = SECOND * 3 // 2
"""How long before and after the wall clock was set times are not looked at: the recorder looks at
the clocks each second."""
OWN_FAILURE: Final = 125


def find_trace(fault: Fault, life: Life, recorded: Ran, outcome: Outcome) -> None:
    tell = outcome.broken.append
    # A recorder that is killed when its trace is made may not have removed the folder.
    is_left = fault.recorder_dies and Path(f"{life.output}.spool").exists()
    if not life.output.exists() or is_left:
        env = {k: v for k, v in life.environment().items() if not k.startswith(("FAULT_", "LD_P"))}
        if fault.disk:
            larger = ["mount", "-o", "remount,size=64m", str(life.folder / "disk")]
            subprocess.run(larger, check=True, capture_output=True)
        if recorded.code not in (None, OWN_FAILURE) and not fault.recorder_dies:
            tell(f"no trace, and exit code {recorded.code}")
        code, said = recover(life, env)
        outcome.recovered = True
        if code or "Traceback" in said:
            tell(f"recover: {code} {said}")
            return
    ledgers = [told for path in life.folder.glob("ledger*") if (told := ledger.read(path))]
    jumps = [recorded.began + int(at * SECOND) for at, _ in fault.jumps]
    with closing(sqlite3.connect(life.trace)) as database:
        moments = [moment for told in ledgers for moment in _check(fault, told, database, outcome)]
    _check_times(moments, jumps, outcome)


def _check(
    fault: Fault, told: Told, database: sqlite3.Connection, outcome: Outcome
) -> list[tuple[int, int]]:
    """Looks for the events of one process; when they were by its ledger, and by the trace."""
    process = 1 << 48 | (told.pid & 0xFFFFFF) << 24
    found = {
        "kernels": _rows(
            database,
            "CUPTI_ACTIVITY_KIND_KERNEL",
            f"gridX, end FROM {{}} WHERE globalPid = {process}",
        ),
        "steps": _rows(
            database,
            "GPUTRACE_STEP",
            f"step, end FROM {{}} WHERE globalTid >> 24 = {process >> 24}",
        ),
    }
    if fault.words[0] == "executes":
        # Each program counts its own steps.
        found["steps"] = list(enumerate(sorted(end for _, end in found["steps"])))
    times = {"kernels": list(told.kernels), "steps": list(told.steps)}
    if "host" in fault.options:
        times["kernels"] = []
    if fault.control:
        found["kernels"], times["kernels"] = [], []
    end = min([told.last, *_told_ends(fault, told, database)])
    for what, rows in found.items():
        _check_events(fault, what, rows, times[what], (told.left, end), outcome)
    if fault.may_lack == May.GPU and len(found["kernels"]) < len(times["kernels"]):
        _check_told(process, database, outcome)
    if fault.words[0] == "executes":
        del found["steps"]
    return [
        (times[what][number], at)
        for what, rows in found.items()
        for number, at in rows
        if number < len(times[what])
    ]


def _check_told(process: int, database: sqlite3.Connection, outcome: Outcome) -> None:
    """The trace must say that kernels are missing."""
    notes = database.execute(
        f"SELECT note FROM GPUTRACE_PROCESS WHERE globalPid = {process} AND note IS NOT NULL"
    ).fetchall()
    if not notes and not _rows(
        database, "GPUTRACE_LOSS", f"0, 0 FROM {{}} WHERE globalPid = {process}"
    ):
        outcome.broken.append("kernels are missing, and the trace does not say so")


def _rows(database: sqlite3.Connection, table: str, sql: str) -> list[tuple[int, int]]:
    there = database.execute(
        "SELECT count(*) FROM sqlite_master WHERE name = ?", (table,)
    ).fetchone()
    rows = database.execute(f"SELECT {sql.format(table)}").fetchall() if there[0] else []
    return sorted(rows)


def _told_ends(fault: Fault, told: Told, database: sqlite3.Connection) -> Iterator[int]:
    """The moments, on the ledger's clock, from which on the trace says that things are missing."""
    if fault.may_lack != May.TOLD:
        return
    rows = _rows(database, "GPUTRACE_LOSS", "timeNs, 0 FROM {} WHERE timeNs IS NOT NULL")
    if _rows(database, "GPUTRACE_LOSS", "0, 0 FROM {} WHERE reason LIKE '%: empty: %'"):
        # A file that did not get its beginning.
        yield 0
    start = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    if rows:
        yield rows[0][0] + start[0] - time.time_ns() + time.monotonic_ns()


def _check_events(
    fault: Fault,
    what: str,
    rows: Sequence[tuple[int, int]],
    times: Sequence[int],
    ends: tuple[int, int],
    outcome: Outcome,
) -> None:
    """``ends`` are when the process executed another program, if it did, and when it ended."""
    outcome.events += len(times)
    there = {number for number, _ in rows}
    if len(there) != len(rows):
        outcome.broken.append(f"{what} are there twice")
    # What a program was killed at comes into its ledger last.
    if extra := there - set(range(len(times) + 1)):
        outcome.broken.append(f"{what} that never were: {sorted(extra)[:5]}")
    lacks = [moment for number, moment in enumerate(times) if number not in there]
    if not lacks:
        return
    missing = max(_until(ends, moment) - moment for moment in lacks)
    told = f"{len(lacks)} of {len(times)} {what} are missing, the first {missing / 1e9:.2f} s"
    if fault.may_lack in (May.SECOND, May.TOLD):
        outcome.missing_s = max(outcome.missing_s, missing / 1e9)
        if missing > SECOND + PATIENCE_NS:
            outcome.broken.append(f"{told} before the end")
    elif fault.may_lack == May.NOTHING or (fault.may_lack == May.GPU and what != "kernels"):
        outcome.broken.append(f"{told} before the end")


def _until(ends: tuple[int, int], moment: int) -> int:
    return ends[0] if moment < ends[0] else ends[1]


def _check_times(
    moments: Sequence[tuple[int, int]], jumps: Sequence[int], outcome: Outcome
) -> None:
    """Distances from event to event, in all processes, are those of a clock that nobody sets."""
    offsets = [
        at - moment
        for moment, at in moments
        if all(abs(moment - jump) > _AROUND_NS for jump in jumps)
    ]
    middle = sorted(offsets)[len(offsets) // 2] if offsets else 0
    off = [abs(offset - middle) for offset in offsets if abs(offset - middle) > _OFF_NS]
    if len(off) > len(offsets) // 20:
        told = (
            f"times of {len(off)} of {len(offsets)} events are off by up to {max(off) / 1e9:.2f} s"
        )
        outcome.broken.append(told)
