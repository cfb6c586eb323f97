"""Logs of nvidia-smi (dmon, query-gpu) laid over a trace: its clock, its GPUs as cards."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.errors import InputError
from gputrace.model.events import GPU_KINDS, UNKNOWN, Kind
from gputrace.model.nvml import VALUES, Card, Nvml, Samples, merge_nvml, plain_uuid
from gputrace.model.trace import Trace
from gputrace.store.sqlite import open_input
from gputrace.units import format_ranges

_QUARTER: Final = 15 * 60 * 10**9
_DAY: Final = 96 * _QUARTER
_ZONES: Final = range(-48, 57)
"""Quarters of an hour from UTC: from UTC-12 to UTC+14."""
_AROUND: Final = 5 * 10**9
"""Nanoseconds of a log that are taken before the run and after it: it may be of a whole day."""
_Place = tuple[int, int]


def is_smi(head: bytes, surely: bool = False) -> bool:
    """Return whether a file that begins so is a log of nvidia-smi.

    ``surely`` asks for more than a time in the first column, where nobody named the file.
    """
    if b"\0" in head:
        return False
    lines = _lines(head)
    return is_dmon(lines) or is_query(lines, surely)


def read_smi(path: Path) -> SmiLog:
    """A log; raises InputError where nothing in it can be used."""
    with open_input(path) as file:
        lines = _lines(file.read())
    log = read_dmon(path, lines) if is_dmon(lines) else read_query(path, lines)
    if not log.rows:
        raise InputError(path, "a log of nvidia-smi without a whole row; record it again")
    return log


def _lines(data: bytes) -> list[str]:
    return [line for line in data.decode("utf-8-sig", "replace").splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class _Run:
    """Properties of a trace that show where a log belongs."""

    start: int
    end: int
    """On the wall clock, in nanoseconds since 1970 UTC."""
    places: frozenset[_Place]
    """Host and index of every card; where that is not known, the CUDA ordinal."""
    by_uuid: dict[str, _Place]
    cards_known: bool


def join_logs(trace: Trace, paths: Sequence[Path]) -> None:
    """Adds what logs say to `Trace.logged`, and to its notes how, or why not.

    Raises InputError for a log that cannot be read.
    """
    logs = [read_smi(path) for path in paths]
    epoch = trace.session.epoch_ns
    if epoch is None:
        names = ", ".join(path.name for path in paths)
        trace.quality.notes.append(
            f"{names} cannot be joined: the trace does not say when it was recorded"
        )
        return
    run = _run(trace, epoch)
    for log in logs:
        found = _join(log, run, epoch, trace.session.utc_offset_ns)
        trace.quality.notes += log.notes
        if log.bad:
            rows = f"{log.bad:,} line{'' if log.bad == 1 else 's'}"
            trace.quality.notes.append(f"{rows} of {log.path.name} left out: no whole sample")
        trace.logged = merge_nvml([trace.logged, found])


def _run(trace: Trace, epoch: int) -> _Run:
    kinds = GPU_KINDS if trace.no_gpu is None else tuple(Kind)
    events = trace.events(kinds, ["start", "end", "process", "device"])
    pairs = sorted(set(zip(events.process.tolist(), events.device.tolist(), strict=True)))
    devices = [trace.device(*pair) for pair in pairs]
    places = [
        (trace.processes[own.process].host, own.gpu if own.gpu != UNKNOWN else own.device)
        for own in devices
    ]
    uuids = {plain_uuid(own.uuid): at for own, at in zip(devices, places, strict=True)}
    uuids |= {plain_uuid(card.uuid): (card.host, card.gpu) for card in trace.read_nvml().cards}
    uuids.pop("", None)
    start = int(events.start.min()) if len(events) else trace.origin
    end = int(events.end.max()) if len(events) else trace.origin
    known = all(own.gpu != UNKNOWN for own in devices)
    return _Run(epoch + start, epoch + end + 1, frozenset(places), uuids, known)


def _join(log: SmiLog, run: _Run, epoch: int, zone: int | None) -> Nvml:
    """Return the log on the trace's clock; nothing, and a note, if it does not fit."""
    rows = gpu_of_each_row(log)
    name = log.path.name
    at = _places(rows, run)
    if not at:
        log.notes.append(f"{name} cannot be joined: it does not tell which machine it is of")
        return Nvml()
    offset = _offset(log, run, zone)
    if offset is None:
        log.notes.append(f"{name} cannot be joined: none of its times is of this run")
        return Nvml()
    first, last = run.start + offset - _AROUND, run.end + offset + _AROUND
    kept = [(at[place], row) for place, row in rows if place in at and first < row.time < last]
    kept.sort(key=lambda pair: pair[1].time)
    samples = _samples(kept, -offset - epoch)
    gpus = sorted({gpu for _, gpu in at.values()})
    log.notes.append(
        f"{name}: {len(samples):,} samples of GPU{'s' if len(gpus) > 1 else ''} "
        f"{format_ranges(gpus)}, its times taken as {_zone(offset, log.has_date)}"
    )
    if not run.cards_known:
        log.notes.append(f"the GPUs of {name} are taken for the CUDA ordinals of the trace")
    return Nvml(_cards(kept), (), samples)


def _places(rows: Sequence[tuple[int, Row]], run: _Run) -> dict[int, _Place]:
    """Host and index by place in the log: by uuid where both sides know it, else as they are.

    Nothing where the trace is of several machines, and no uuid tells.
    """
    uuids = {place: plain_uuid(str(row.card.get("uuid", ""))) for place, row in rows}
    if any(uuid in run.by_uuid for uuid in uuids.values()):
        hosts = {run.by_uuid[uuid][0] for uuid in uuids.values() if uuid in run.by_uuid}
        known = {place: run.by_uuid[uuid] for place, uuid in uuids.items() if uuid in run.by_uuid}
        taken = set(known.values())
        others = {place: (min(hosts), place) for place in uuids if place not in known}
        return known | {place: at for place, at in others.items() if at not in taken}
    hosts = {host for host, _ in run.places}
    if len(hosts) > 1:
        return {}
    indexed = all("gpu" in row.card for _, row in rows)
    if not indexed and len(uuids) == len(run.places):
        return dict(zip(sorted(uuids), sorted(run.places), strict=True))
    host = min(hosts, default=0)
    return {place: (host, place) for place in uuids}


def _offset(log: SmiLog, run: _Run, zone: int | None) -> int | None:
    """Nanoseconds that the log's clock is ahead of UTC, by which it lies over the trace best.

    The zone that the trace itself was recorded in is believed if the log fits then; of others, that
    of this machine and UTC come first where several fit alike. None where none does.
    """
    times = [row.time for row in log.rows]
    first, last = min(times), max(times) + 1
    day = 0 if log.has_date else first // _DAY * _DAY - run.start // _DAY * _DAY
    here = time.localtime(run.start / 1e9).tm_gmtoff * 10**9
    days = (0,) if log.has_date else (0, -_DAY, _DAY)
    likely = [found for found in (zone, here, 0) if found is not None]
    offsets = [quarter * _QUARTER for quarter in sorted(_ZONES, key=abs)]

    def over(offset: int) -> int:
        return min(last - offset, run.end) - max(first - offset, run.start)

    every = [day + turn + offset for turn in days for offset in [*likely, *offsets]]
    if zone is not None:
        told = max((day + turn + zone for turn in days), key=over)
        if over(told) > 0:
            return told
    best = max(every, key=over)
    return best if over(best) > 0 else None


def _zone(offset: int, has_date: bool) -> str:
    """``UTC+02:00``."""
    if not has_date:
        offset = (offset + _DAY // 2) % _DAY - _DAY // 2
    minutes = abs(offset) // (60 * 10**9)
    return f"UTC{'-' if offset < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"


def _samples(rows: Sequence[tuple[_Place, Row]], shift: int) -> Samples:
    names = [name for name in VALUES if any(name in row.values for _, row in rows)]
    return Samples(
        np.array([row.time + shift for _, row in rows], np.int64),
        np.array([host for (host, _), _ in rows], np.int64),
        np.array([gpu for (_, gpu), _ in rows], np.int64),
        {
            name: np.array([row.values.get(name, np.nan) for _, row in rows], np.float64)
            for name in names
        },
    )


def _cards(rows: Sequence[tuple[_Place, Row]]) -> tuple[Card, ...]:
    """Return the properties of each card from the latest row that has them."""
    told: dict[_Place, dict[str, Any]] = {}
    for at, row in rows:
        told.setdefault(at, {}).update(row.card)
    names = {one.name for one in fields(Card)} - {"gpu", "host"}
    return tuple(
        Card(gpu=gpu, host=host, **{name: value for name, value in said.items() if name in names})
        for (host, gpu), said in sorted(told.items())
    )


MIB: Final = 1 << 20

_SCALES: Final = {
    "B": 1.0, "KiB": 1024.0, "MiB": float(MIB), "MB": float(MIB), "GiB": 1024.0 * MIB,
    "mW": 1.0, "W": 1000.0, "kHz": 1e-3, "MHz": 1.0, "GHz": 1000.0,
}  # fmt: skip
"""Factors of units to bytes, mW and MHz; nvidia-smi's MB are MiB."""

_TOO_LARGE: Final = 2.0**62
_YEARS: Final = range(1970, 2200)
_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]+|%)?")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")


@dataclass(slots=True)
class Row:
    """A GPU at a moment."""

    time: int
    """Nanoseconds since 1970 of the local time that was written, whatever the zone is."""
    values: dict[str, float]
    """By column of `gputrace.model.nvml.VALUES`."""
    card: Mapping[str, object]
    """By field of `gputrace.model.nvml.Card`; ``gpu`` where the log has an index."""


@dataclass(slots=True)
class SmiLog:
    """A log, its rows in the order written."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    bad: int = 0
    """Lines that are no row: cut short, messages of the driver."""
    notes: list[str] = field(default_factory=list)
    """Guesses that were made."""
    has_date: bool = True
    """Else times count from 1970-01-01."""


def number(text: str, unit: str = "") -> float | None:
    """A cell as bytes, mW, MHz or a plain number; None for ``[N/A]`` and the like.

    ``unit`` is what the header says, where the cell has none.
    """
    if (found := _NUMBER.fullmatch(text)) is not None:
        value = float(found[1]) * _SCALES.get(found[2] or unit, 1.0)
    elif _HEX.fullmatch(text):
        value = float(int(text, 16))
    else:
        return None
    return round(value, 3) if abs(value) < _TOO_LARGE else None


def nanoseconds(text: str, form: str) -> int | None:
    """A written moment since 1970; None for what is none, or of another century."""
    try:
        when = datetime.strptime(text, form).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(when.timestamp()) * 10**9 if when.year in _YEARS else None


def is_unknown(text: str) -> bool:
    """Return whether a cell says that there is no value, in one of the ways of nvidia-smi."""
    return text in ("", "-") or text.strip("[]").lower() in _UNKNOWN


_UNKNOWN: Final = frozenset(
    {"n/a", "not supported", "unknown error", "insufficient permissions", "requested functionality "
     "has been deprecated", "gpu is lost", "gpu requires reset", "no data", "unknown"}
)  # fmt: skip


_DMON_VALUES: Final = {
    "pwr": ("power", "W"),
    "gtemp": ("temperature", ""),
    "sm": ("utilization", "%"),
    "mclk": ("memoryClock", "MHz"),
    "pclk": ("smClock", "MHz"),
    "fb": ("memoryUsed", "MiB"),
}
"""Columns by name, with their unit."""

_OTHERS: Final = frozenset({"mtemp", "mem", "enc", "dec", "jpg", "ofa", "bar1", "pviol", "rxpci"})
_DMON_DAY: Final = 86_400 * 10**9
_APART: Final = re.compile(r"[,\s]+")


def is_dmon(lines: Sequence[str]) -> bool:
    """Return whether the first lines of a file are of such a log."""
    return any(_names(line) for line in lines[:5])


def read_dmon(path: Path, lines: Iterable[str]) -> SmiLog:
    """The rows of a log; raises InputError where it has no times."""
    log, names = SmiLog(path), list[str]()
    for line in lines:
        if line.lstrip().startswith("#"):
            names = _names(line) or names
            continue
        cells = _APART.split(line.strip())
        if cells != [""]:
            row = _dmon_row(names, cells)
            log.bad += row is None
            log.rows += [row] if row is not None else []
    if "time" not in names:
        raise InputError(path, "has no times; record it with `nvidia-smi dmon -o DT`")
    log.has_date = "date" in names
    if not log.has_date:
        _count_days(log.rows)
    return log


def _names(line: str) -> list[str]:
    """The columns that a header names; nothing for any other line, such as that of the units."""
    if not line.lstrip().startswith("#"):
        return []
    names = [name.lower() for name in _APART.split(line.lstrip()[1:].strip())]
    return names if "gpu" in names and {*_DMON_VALUES, *_OTHERS} & set(names) else []


def _dmon_row(names: Sequence[str], cells: Sequence[str]) -> Row | None:
    if len(cells) != len(names):
        return None
    named = dict(zip(names, cells, strict=True))
    date, gpu = named.get("date", "19700101"), number(named["gpu"])
    time = nanoseconds(f"{date} {named.get('time', '00:00:00')}", "%Y%m%d %H:%M:%S")
    if time is None or gpu is None:
        return None
    values = {}
    for name, (ours, unit) in _DMON_VALUES.items():
        if name in named and not is_unknown(named[name]):
            value = number(named[name], unit)
            if value is None:
                return None
            values[ours] = value
    return Row(time, values, {"gpu": int(gpu)})


def _count_days(rows: Sequence[Row]) -> None:
    """Times without a date that begin again at 0 are of the next day."""
    days = last = 0
    for row in rows:
        days += row.time < last - _DMON_DAY // 2
        last, row.time = row.time, row.time + days * _DMON_DAY


_QUERY_VALUES: Final[Mapping[str, tuple[str, str]]] = {
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


_Header = Sequence[tuple[str, str]]
"""Names and units of the columns."""


def is_query(lines: Sequence[str], surely: bool = False) -> bool:
    """Return whether the first lines of a file are of such a log; ``surely`` where nobody
    said so.
    """
    return any(
        _header(cells) is not None
        or (any(map(_TIME.fullmatch, cells)) and (not surely or any(map(_UNITS.search, cells))))
        for cells in map(_cells, lines[:5])
    )


def read_query(path: Path, lines: Iterable[str]) -> SmiLog:
    """The rows of a log; raises InputError where it does not tell what or when they are."""
    log = SmiLog(path)
    header: _Header | None = None
    rows: list[tuple[_Header | None, list[str]]] = []
    for line in lines:
        cells = _cells(line)
        if cells == [""]:
            continue
        if (found := _header(cells)) is not None:
            header = found
        else:
            rows.append((header, cells))
    waiting = [cells for of, cells in rows if of is None]
    if waiting:
        header = header or _guessed(path, waiting, log)
        rows.sort(key=lambda row: row[0] is None)
    for of, cells in rows:
        row = _query_row(of or header or (), cells)
        log.bad += row is None
        log.rows += [row] if row is not None else []
    if waiting:
        log.rows.sort(key=lambda row: row.time)
    if header is not None and not any(name == "timestamp" for name, _ in header):
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
    values = sum(
        name in _QUERY_VALUES or _REASON.fullmatch(name) is not None for name, _ in columns
    )
    others = sum(name == "timestamp" or name in _CARD or name in _TEXTS for name, _ in columns)
    return columns if values and values + others > 1 else None


def _query_row(header: _Header, cells: Sequence[str]) -> Row | None:
    """Return None for what is no row: cut short, without a time, or with an invalid number."""
    if len(cells) != len(header):
        return None
    time, values, card = None, dict[str, float](), dict[str, object]()
    for (name, unit), cell in zip(header, cells, strict=True):
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
    """Return whether a cell fits its column; cells of unused columns always do."""
    ours, usual = _QUERY_VALUES.get(name) or _CARD.get(name) or ("", "")
    if not ours:
        return True
    value = number(cell, unit or usual)
    if value is None:
        return False
    if name in _QUERY_VALUES:
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
    if not {"timestamp"} < set(kept) or not set(kept) & _QUERY_VALUES.keys():
        raise InputError(path, _NO_HEADER)
    shown = ", ".join(name for name in kept if name != "timestamp")
    log.notes.append(
        f"{path.name} has no header; {shown} are told by their units, other columns are left out"
    )
    return names


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
    # Indices of several GPUs count 0, 1, 2, … repeatedly.
    most = max((int(cell) for cell in column if _COUNT.fullmatch(cell)), default=0)
    counts = (cell == str(index % (most + 1)) for index, cell in enumerate(column))
    return "index" if most > 0 and all(counts) else ""


def _used_and_total(
    rows: Sequence[Sequence[str]], names: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return used and total of two columns of MiB: the larger is the total; of more, neither is
    known.
    """
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


_ROUND: Final = 0.5
"""Part of the pause between two rounds that parts them."""
_MOST_GPUS: Final = 32
_WHOLE: Final = 0.9
"""Part of the rounds that must be of one size to tell how many GPUs there are."""


def gpu_of_each_row(log: SmiLog) -> list[tuple[int, Row]]:
    """The rows, each with the place of its GPU: the index where it is known, else the order.

    nvidia-smi asks the GPUs in the order of their indices, one after another, and then waits.
    Raises InputError where that does not show in the times either.
    """
    rows = log.rows
    if all("gpu" in row.card for row in rows):
        return [(int(str(row.card["gpu"])), row) for row in rows]
    for name in ("uuid", "pci"):
        if all(name in row.card for row in rows):
            places: dict[object, int] = {}
            return [(places.setdefault(row.card[name], len(places)), row) for row in rows]
    pauses = np.diff([row.time for row in rows])
    edges = [0, len(rows)]
    if len(pauses):
        # With one GPU in 32 rows after a pause, a few percent of all are pauses between rounds.
        longest = float(np.quantile(pauses, 1 - 1 / (2 * _MOST_GPUS), method="lower"))
        edges[1:1] = (np.flatnonzero(pauses > _ROUND * longest) + 1).tolist()
    rounds = [rows[a:b] for a, b in pairwise(edges)]
    sizes = Counter(map(len, rounds))
    size, often = sizes.most_common(1)[0]
    if size > _MOST_GPUS or often < _WHOLE * (len(rounds) - 1):
        problem = "does not tell which GPU a row is of; query index or uuid too"
        raise InputError(log.path, problem)
    whole = [rows for rows in rounds if len(rows) == size]
    log.bad += sum(len(rows) for rows in rounds) - size * len(whole)
    if size > 1:
        log.notes.append(
            f"{log.path.name} does not name its {size} GPUs; they are told by the order of its rows"
        )
    return [(place, row) for rows in whole for place, row in enumerate(rows)]
