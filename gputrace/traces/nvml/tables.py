"""The NVML tables that ``gputrace record`` writes; any of them, and any column, may be missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np

from gputrace.traces.nvml.model import VALUES, Card, Link, Nvml, Samples
from gputrace.traces.sqlite import Database, quoted

_CARD: Final = {
    "gpu": "gpu",
    "uuid": "uuid",
    "name": "name",
    "pci": "pciBusId",
    "memory_bytes": "memoryTotal",
    "sm_clock_max": "smClockMax",
    "memory_clock_max": "memoryClockMax",
    "sm_clock_application": "smClockApplication",
    "memory_clock_application": "memoryClockApplication",
    "pcie_gen_max": "pcieGenMax",
    "pcie_width_max": "pcieWidthMax",
    "power_limit_mw": "powerLimit",
    "lost_ns": "lostNs",
}
_LINK: Final = {
    "gpu": "gpu",
    "peer": "peer",
    "link": "link",
    "ancestor": "ancestor",
    "nvlinks": "nvlinks",
    "p2p_read": "p2pRead",
    "p2p_write": "p2pWrite",
    "p2p_nvlink": "p2pNvlink",
}
_TEXTS: Final = frozenset(
    {"uuid", "name", "pci", "link", "ancestor", "p2p_read", "p2p_write", "p2p_nvlink"}
)
_ANY_HOST: Final = (
    ("GPUTRACE_PROCESS", "globalPid"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", "globalPid"),
)
_TABLES: Final = ("GPUTRACE_NVML_DEVICE", "GPUTRACE_NVML_SAMPLE", "GPUTRACE_TOPOLOGY")


def read_nvml(database: Database, epoch_ns: int | None) -> Nvml:
    """What a file holds; an empty one where NVML was not asked.

    ``epoch_ns`` is the wall clock at 0 of the trace's own. Raises InputError on a broken file.
    """
    if not database.tables.keys() & set(_TABLES):
        return Nvml()
    host = _host(database)
    _, samples, topology = _TABLES
    return Nvml(
        read_cards(database, epoch_ns),
        tuple(Link(**row, host=host) for row in _rows(database, topology, _LINK, ["gpu", "peer"])),
        _samples(database, samples, host),
    )


def read_cards(database: Database, epoch_ns: int | None = None) -> tuple[Card, ...]:
    """The cards alone; without an epoch, it is not known when one was lost."""
    rows = list(_rows(database, "GPUTRACE_NVML_DEVICE", _CARD, ["gpu"]))
    host = _host(database) if rows else 0
    return tuple(_card(row, host, epoch_ns) for row in rows)


def _host(database: Database) -> int:
    """The machine's number in the ids of its processes; a trace file is of one machine."""
    for table, column in _ANY_HOST:
        if database.has(table, column):
            sql = f"SELECT {column} FROM {table} WHERE typeof({column}) = 'integer' LIMIT 1"
            if (row := next(database.query(sql), None)) is not None:
                return int(row[0]) >> 48
    return 0


def _rows(
    database: Database, table: str, columns: Mapping[str, str], required: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Rows by our names of their columns: text, a whole number or None."""
    if not database.has(table, *required):
        return
    there = {ours: column for ours, column in columns.items() if database.has(table, column)}
    shown = ", ".join(map(quoted, there.values()))
    for values in database.query(f"SELECT {shown} FROM {quoted(table)}"):
        row = {ours: _value(ours, value) for ours, value in zip(there, values, strict=True)}
        if all(row[name] is not None for name in required):
            yield row


def _value(name: str, value: object) -> int | str | None:
    if name in _TEXTS:
        return value if isinstance(value, str) else ""
    return value if isinstance(value, int) else None


def _card(row: dict[str, Any], host: int, epoch_ns: int | None) -> Card:
    """The table has the wall clock when a card was found gone."""
    lost = row.pop("lost_ns", None)
    known = lost is not None and epoch_ns is not None
    return Card(**row, host=host, lost_ns=lost - epoch_ns if known else None)


def _samples(database: Database, table: str, host: int) -> Samples:
    if not database.has(table, "gpu", "timeNs"):
        return Samples()
    names = [name for name in VALUES if database.has(table, name)]
    shown = ", ".join(["CAST(timeNs AS INTEGER)", "CAST(gpu AS INTEGER)", *map(_number, names)])
    sql = (
        f"SELECT {shown} FROM {quoted(table)} WHERE timeNs IS NOT NULL AND gpu IS NOT NULL "
        "ORDER BY timeNs"
    )
    columns = list(zip(*database.query(sql), strict=True))
    if not columns:
        return Samples()
    time, gpu = (np.array(column, np.int64) for column in columns[:2])
    values = {
        name: np.array(column, np.float64)
        for name, column in zip(names, columns[2:], strict=True)
        if any(value is not None for value in column)
    }
    return Samples(time, np.full(len(time), host), gpu, values)


def _number(name: str) -> str:
    """A value as a number; what is none is NULL."""
    return f"CASE WHEN typeof({name}) IN ('integer', 'real') THEN CAST({name} AS REAL) END"
