"""What ``nvidia-smi dmon`` prints: columns under lines with ``#``, times with ``-o DT`` alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.smi.log import Row, SmiLog, is_unknown, nanoseconds, number

_VALUES: Final = {
    "pwr": ("power", "W"),
    "gtemp": ("temperature", ""),
    "sm": ("utilization", "%"),
    "mclk": ("memoryClock", "MHz"),
    "pclk": ("smClock", "MHz"),
    "fb": ("memoryUsed", "MiB"),
}
"""Columns by name, with their unit."""

_OTHERS: Final = frozenset({"mtemp", "mem", "enc", "dec", "jpg", "ofa", "bar1", "pviol", "rxpci"})
_DAY: Final = 86_400 * 10**9
_APART: Final = re.compile(r"[,\s]+")


def is_dmon(lines: Sequence[str]) -> bool:
    """Whether the first lines of a file are of such a log."""
    return any(_names(line) for line in lines[:5])


def read_dmon(path: Path, lines: Iterable[str]) -> SmiLog:
    """The rows of a log; raises InputError where it has no times."""
    log, names = SmiLog(path), list[str]()
    for line in lines:
        if line.lstrip().startswith("#"):
            names = _names(line) or names
            continue
        cells = _split(line)
        if cells != [""]:
            row = _row(names, cells)
            log.bad += row is None
            log.rows += [row] if row is not None else []
    if "time" not in names:
        raise InputError(path, "has no times; record it with `nvidia-smi dmon -o DT`")
    log.has_date = "date" in names
    if not log.has_date:
        _count_days(log.rows)
    return log


def _split(line: str) -> list[str]:
    return _APART.split(line.strip())


def _names(line: str) -> list[str]:
    """The columns that a header names; nothing for any other line, such as that of the units."""
    if not line.lstrip().startswith("#"):
        return []
    names = [name.lower() for name in _split(line.lstrip()[1:])]
    return names if "gpu" in names and {*_VALUES, *_OTHERS} & set(names) else []


def _row(names: Sequence[str], cells: Sequence[str]) -> Row | None:
    if len(cells) != len(names):
        return None
    named = dict(zip(names, cells, strict=True))
    date, gpu = named.get("date", "19700101"), number(named["gpu"])
    time = nanoseconds(f"{date} {named.get('time', '00:00:00')}", "%Y%m%d %H:%M:%S")
    if time is None or gpu is None:
        return None
    values = {}
    for name, (ours, unit) in _VALUES.items():
        if name in named and not is_unknown(named[name]):
            value = number(named[name], unit)
            if value is None:
                return None
            values[ours] = value
    return Row(time, values, {"gpu": int(gpu)})


def _count_days(rows: Sequence[Row]) -> None:
    """Times without a date that begin again at 0 are of the next day."""
    days = 0
    last = 0
    for row in rows:
        days += row.time < last - _DAY // 2
        last, row.time = row.time, row.time + days * _DAY
