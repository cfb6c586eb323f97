"""What ``nvidia-smi --query-gpu=… --format=csv[,noheader][,nounits]`` prints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.smi.log import Row, SmiLog, is_unknown, nanoseconds, number

_VALUES: Final[Mapping[str, tuple[str, str]]] = {
    "utilization.gpu": ("utilization", "%"),
    "memory.used": ("memoryUsed", "MiB"),
    "clocks.current.sm": ("smClock", "MHz"),
    "clocks.sm": ("smClock", "MHz"),
    "clocks.current.memory": ("memoryClock", "MHz"),
    "clocks.mem": ("memoryClock", "MHz"),
    "power.draw": ("power", "W"),
    "power.draw.average": ("power", "W"),
    "power.draw.instant": ("powerInstant", "W"),
    "temperature.gpu": ("temperature", ""),
    "pcie.link.gen.current": ("pcieGen", ""),
    "pcie.link.gen.gpucurrent": ("pcieGen", ""),
    "pcie.link.width.current": ("pcieWidth", ""),
    "clocks_event_reasons.active": ("clocksEventReasons", ""),
    "clocks_throttle_reasons.active": ("clocksEventReasons", ""),
}
"""Columns by the name that the header has, with the unit that ``nounits`` leaves out."""

_CARD: Final[Mapping[str, tuple[str, str]]] = {
    "index": ("gpu", ""),
    "memory.total": ("memory_bytes", "MiB"),
    "clocks.max.sm": ("sm_clock_max", "MHz"),
    "clocks.max.memory": ("memory_clock_max", "MHz"),
    "clocks.max.mem": ("memory_clock_max", "MHz"),
    "clocks.applications.graphics": ("sm_clock_application", "MHz"),
    "clocks.applications.gr": ("sm_clock_application", "MHz"),
    "clocks.applications.memory": ("memory_clock_application", "MHz"),
    "clocks.applications.mem": ("memory_clock_application", "MHz"),
    "pcie.link.gen.max": ("pcie_gen_max", ""),
    "pcie.link.width.max": ("pcie_width_max", ""),
    "enforced.power.limit": ("power_limit_mw", "W"),
    "power.limit": ("power_limit_mw", "W"),
}
_TEXTS: Final = {
    "name": "name", "gpu_name": "name", "uuid": "uuid", "gpu_uuid": "uuid",
    "pci.bus_id": "pci", "gpu_bus_id": "pci",
}  # fmt: skip
_REASONS: Final = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8,
    "sync_boost": 0x10, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}  # fmt: skip
_REASON: Final = re.compile(r"clocks_(?:event|throttle)_reasons\.(\w+)")
_TIME: Final = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?")
_UNITS: Final = re.compile(r" (?:%|MiB|MHz|W)$")
_UUID: Final = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
_PCI: Final = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_COUNT: Final = re.compile(r"\d{1,4}")
_FEW: Final = 64
"""Rows that tell what the columns are, where there is no header."""
_NO_HEADER: Final = (
    "has no header to tell its columns by; write the names of --query-gpu as its first line"
)


@dataclass(frozen=True, slots=True)
class _Header:
    """Which column is what, by name and unit."""

    columns: tuple[tuple[str, str], ...]


def is_query(lines: Sequence[str], surely: bool = False) -> bool:
    """Whether the first lines of a file are of such a log; ``surely`` where nobody said so."""
    return any(
        _header(cells) is not None
        or (any(map(_TIME.fullmatch, cells)) and (not surely or any(map(_UNITS.search, cells))))
        for cells in map(_cells, lines[:5])
    )


def read_query(path: Path, lines: Iterable[str]) -> SmiLog:
    """The rows of a log; raises InputError where it does not tell what or when they are."""
    log = SmiLog(path)
    header: _Header | None = None
    waiting: list[list[str]] = []
    for line in lines:
        cells = _cells(line)
        if cells == [""]:
            continue
        if (found := _header(cells)) is not None:
            header = found
        elif header is None:
            waiting.append(cells)
        else:
            _take(log, header, cells)
    if waiting:
        header = header or _guessed(path, waiting, log)
        for cells in waiting:
            _take(log, header, cells)
        log.rows.sort(key=lambda row: row.time)
    if header is not None and not any(name == "timestamp" for name, _ in header.columns):
        raise InputError(path, "has no times; query timestamp too (--query-gpu=timestamp,…)")
    return log


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _header(cells: Sequence[str]) -> _Header | None:
    """A line with the name of a value and of something else that nvidia-smi knows."""
    columns = []
    for cell in cells:
        name, bracket, unit = cell[:-1].rpartition("[")
        has_unit = bracket and cell.endswith("]") and "]" not in unit
        columns.append((name.rstrip().lower(), unit) if has_unit else (cell.lower(), ""))
    values = sum(name in _VALUES or _REASON.fullmatch(name) is not None for name, _ in columns)
    others = sum(name == "timestamp" or name in _CARD or name in _TEXTS for name, _ in columns)
    return _Header(tuple(columns)) if values and values + others > 1 else None


def _take(log: SmiLog, header: _Header, cells: Sequence[str]) -> None:
    row = _row(header, cells) if len(cells) == len(header.columns) else None
    if row is None:
        log.bad += 1
    else:
        log.rows.append(row)


def _row(header: _Header, cells: Sequence[str]) -> Row | None:
    """None for what is no row: without a time, or with a number that is none."""
    time, values, card = None, dict[str, float](), dict[str, object]()
    for (name, unit), cell in zip(header.columns, cells, strict=True):
        if name == "timestamp":
            time = _time(cell)
        elif is_unknown(cell):
            continue
        elif name in _TEXTS:
            card[_TEXTS[name]] = cell
        elif (found := _REASON.fullmatch(name)) is not None and found[1] in _REASONS:
            bits = int(values.get("clocksEventReasons", 0.0))
            values["clocksEventReasons"] = float(bits | _REASONS[found[1]] * (cell == "Active"))
        elif not _take_number(name, unit, cell, values, card):
            return None
    return None if time is None else Row(time, values, card)


def _take_number(
    name: str, unit: str, cell: str, values: dict[str, float], card: dict[str, object]
) -> bool:
    """Whether a cell fits its column; what no column of ours takes always does."""
    ours, usual = _VALUES.get(name) or _CARD.get(name) or ("", "")
    if not ours:
        return True
    value = number(cell, unit or usual)
    if value is None:
        return False
    if name in _VALUES:
        values[ours] = value
    else:
        card[ours] = round(value)
    return True


def _time(text: str) -> int | None:
    if _TIME.fullmatch(text) is None:
        return None
    seconds, _, below = text.partition(".")
    whole = nanoseconds(seconds, "%Y/%m/%d %H:%M:%S")
    return None if whole is None else whole + int(below.ljust(9, "0"))


def _guessed(path: Path, rows: Sequence[Sequence[str]], log: SmiLog) -> _Header:
    """The columns of a log without header, as far as their values show what they are.

    Clocks of the SMs and of the memory look alike, and numbers without units like anything: they
    are left out.
    """
    few = [row for row in rows[:_FEW] if any(map(_TIME.fullmatch, row))]
    width = len(few[0]) if few else 0
    few = [row for row in few if len(row) == width]
    names: list[tuple[str, str]] = []
    for column in zip(*few, strict=True):
        told = _told_by_values(column)
        taken = told in {name for name, _ in names}
        names.append(("" if taken else told, ""))
    names = _used_and_total(few, names)
    kept = [name for name, _ in names if name]
    if not {"timestamp"} < set(kept) or not set(kept) & _VALUES.keys():
        raise InputError(path, _NO_HEADER)
    shown = ", ".join(name for name in kept if name != "timestamp")
    log.notes.append(
        f"{path.name} has no header; {shown} are told by their units, other columns are left out"
    )
    return _Header(tuple(names))


def _told_by_values(column: Sequence[str]) -> str:
    cell = next((cell for cell in column if not is_unknown(cell)), "")
    unit = cell.rpartition(" ")[2]
    for pattern, name in (
        (_TIME, "timestamp"), (_UUID, "uuid"), (_PCI, "pci.bus_id"),
        (re.compile(r"0x[0-9a-fA-F]{16}"), "clocks_event_reasons.active"),
    ):  # fmt: skip
        if pattern.fullmatch(cell):
            return name
    if unit in ("%", "W", "MiB"):
        return {"%": "utilization.gpu", "W": "power.draw", "MiB": "memory.used"}[unit]
    return "index" if _counts(column) else ""


def _counts(column: Sequence[str]) -> bool:
    """Whether values go 0, 1, 2, … and again, as indices of several GPUs do."""
    most = max((int(cell) for cell in column if _COUNT.fullmatch(cell)), default=0)
    return most > 0 and all(cell == str(place % (most + 1)) for place, cell in enumerate(column))


def _used_and_total(
    rows: Sequence[Sequence[str]], names: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Of two columns of MiB, the larger is the total; of more, it is not known which is which."""
    sizes = [
        at for at, cells in enumerate(zip(*rows, strict=True))
        if any(cell.endswith(" MiB") for cell in cells)
    ]  # fmt: skip
    if len(sizes) < 2:
        return names
    named = ["" if at in sizes else name for at, (name, _) in enumerate(names)]
    if len(sizes) == 2:
        first, second = (max(number(row[at]) or 0.0 for row in rows) for at in sizes)
        larger = sizes[0] if first > second else sizes[1]
        for at in sizes:
            named[at] = "memory.total" if at == larger else "memory.used"
    return [(name, "") for name in named]
