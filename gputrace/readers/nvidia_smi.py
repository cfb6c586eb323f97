"""Logs of nvidia-smi (dmon, query-gpu) joined with a trace: its clock, its cards."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from gputrace.errors import InputError
from gputrace.model.events import GPU_KINDS, UNKNOWN, Kind
from gputrace.model.nvml import VALUES, Card, Nvml, Samples, merge_nvml, plain_uuid
from gputrace.model.struct import Struct
from gputrace.model.trace import NoGpu, Process, Trace
from gputrace.readers.compressed import read_content
from gputrace.readers.in_memory import MemoryTrace
from gputrace.units import format_count, format_ids

_QUARTER: Final = 15 * 60 * 10**9
_DAY: Final = 96 * _QUARTER
_ZONES: Final = range(-48, 57)
"""Quarters of an hour from UTC: from UTC-12 to UTC+14."""
_MARGIN: Final = 5 * 10**9
"""Nanoseconds of a log that are used before and after the run: it may be of a whole day."""
_Place = tuple[int, int]
_Header = Sequence[tuple[str, str]]
"""Names and units of the columns; names as in --query-gpu."""


class SmiSample(msgspec.Struct):
    """Sample of a GPU."""

    time: int
    """Nanoseconds since 1970 of the local time that was written, in any zone."""
    cells: dict[str, Any]
    """Values by column of `gputrace.model.nvml.VALUES`, and by field of
    `gputrace.model.nvml.Card`; ``gpu`` if the log has an index."""


class SmiLog(msgspec.Struct):
    """A log, its rows in the order written."""

    path: Path
    rows: list[SmiSample] = []
    bad: int = 0
    """Lines that are not a row: cut short, messages of the driver."""
    notes: list[str] = []
    """Guesses that were made."""
    has_date: bool = True
    """False if times count from 1970-01-01."""

    def add(self, row: SmiSample | None) -> None:
        self.bad += row is None
        self.rows += [row] if row is not None else []


def is_smi(head: bytes, surely: bool = False) -> bool:
    """Return True if a file that begins so is a log of nvidia-smi.

    ``surely`` requires more than a time in the first column, for files not named by the user.
    """
    lines = _lines(head)[:5]
    return any(map(_dmon_names, lines)) or any(
        _header(cells) is not None
        or (any(map(_TIME.fullmatch, cells)) and (not surely or any(map(_UNITS.search, cells))))
        for cells in map(_cells, lines)
    )


def _lines(data: bytes) -> list[str]:
    return [line for line in data.decode("utf-8-sig", "replace").splitlines() if line.strip()]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


class _Run(Struct, frozen=True):
    """Properties of a trace that show where a log belongs."""

    epoch: int
    start: int
    end: int
    """On the wall clock, in nanoseconds since 1970 UTC."""
    places: frozenset[_Place]
    """Host and index of every card; without an index, the CUDA ordinal."""
    by_uuid: dict[str, _Place]
    cards_known: bool


def join_logs(trace: Trace, paths: Sequence[Path]) -> None:
    """Add logs to `Trace.logged`, and to its notes how they were joined, or why not."""
    logs, session = [_read(path) for path in paths], trace.session
    if session.epoch_ns is None:
        names = ", ".join(path.name for path in paths)
        trace.quality.notes.append(
            f"{names} cannot be joined: the trace does not say when it was recorded"
        )
        return
    kinds = GPU_KINDS if trace.no_gpu is None else tuple(Kind)
    events = trace.events(kinds, ["start", "end", "process", "device"])
    pairs = sorted(set(zip(events.process.tolist(), events.device.tolist(), strict=True)))
    devices = [trace.device(*pair) for pair in pairs]
    places = [
        (trace.processes[card.process].host, card.gpu if card.gpu != UNKNOWN else card.device)
        for card in devices
    ]
    uuids = {plain_uuid(card.uuid): at for card, at in zip(devices, places, strict=True)}
    uuids |= {plain_uuid(card.uuid): (card.host, card.gpu) for card in trace.read_nvml().cards}
    uuids.pop("", None)
    start = int(events.start.min()) if len(events) else trace.origin
    end = int(events.end.max()) if len(events) else trace.origin
    known = all(card.gpu != UNKNOWN for card in devices)
    run = _Run(
        session.epoch_ns,
        session.epoch_ns + start,
        session.epoch_ns + end + 1,
        frozenset(places),
        uuids,
        known,
    )
    for log in logs:
        joined = _join(log, run, session.utc_offset_ns)
        _take_notes(trace, log, joined)
        trace.logged = merge_nvml([trace.logged, joined])


def read_logs(paths: Sequence[Path]) -> Trace:
    """Read logs of one or several machines that no trace goes with: cards and samples, no events.

    Times begin with the first sample of all.
    """
    process = [Process(0, number, host_name=path.stem) for number, path in enumerate(paths)]
    trace = MemoryTrace(paths[0], "nvidia-smi", [], [], process, no_gpu=_ALONE)
    trace.is_card_log = True
    logs = [_read(path) for path in paths]
    first = min(row.time for log in logs for row in log.rows)
    for host, log in enumerate(logs):
        rows = [((host, gpu), row) for gpu, row in _gpu_of_each_row(log)]
        rows.sort(key=lambda pair: pair[1].time)
        nvml = _nvml(rows, first)
        _take_notes(trace, log, nvml)
        trace.logged = merge_nvml([trace.logged, nvml])
    return trace


_ALONE: Final = NoGpu(
    "a log of nvidia-smi has no operations", "gputrace record -- COMMAND says what the GPUs run"
)


_MOST_BYTES: Final = 1 << 30


def _read(path: Path) -> SmiLog:
    lines = _lines(bytes(read_content(path, _MOST_BYTES)))
    log = (_read_dmon if any(map(_dmon_names, lines[:5])) else _read_query)(path, lines)
    if not log.rows:
        raise InputError(path, "an nvidia-smi log without a complete row; record it again")
    return log


def _take_notes(trace: Trace, log: SmiLog, nvml: Nvml) -> None:
    trace.quality.notes += log.notes
    sliced = sorted(card.gpu for card in nvml.cards if card.mig == "Enabled")
    if sliced and "utilization" not in nvml.samples.values:
        trace.quality.notes.append(
            f"utilization of {format_ids('GPU', sliced)} is unknown: the driver gives none of a "
            "card in MIG mode"
        )
    if log.bad:
        lines = format_count(log.bad, "line")
        trace.quality.notes.append(f"{lines} of {log.path.name} left out: no whole sample")


def _join(log: SmiLog, run: _Run, zone: int | None) -> Nvml:
    """Return the log on the trace's clock; nothing, and a note, if it does not fit."""
    rows = _gpu_of_each_row(log)
    name = log.path.name
    # Host and index by slot in the log: by uuid if both sides know it, else as they are. Empty if
    # the trace is of several machines, and no uuid shows which.
    uuids = {slot: plain_uuid(str(row.cells.get("uuid", ""))) for slot, row in rows}
    known = {slot: run.by_uuid[uuid] for slot, uuid in uuids.items() if uuid in run.by_uuid}
    hosts = {host for host, _ in known.values() or run.places}
    if known:
        taken = set(known.values())
        others = {slot: (min(hosts), slot) for slot in uuids if slot not in known}
        at = known | {slot: at for slot, at in others.items() if at not in taken}
    elif len(hosts) > 1:
        at = {}
    elif len(uuids) == len(run.places) and not all("gpu" in row.cells for _, row in rows):
        at = dict(zip(sorted(uuids), sorted(run.places), strict=True))
    else:
        at = {slot: (min(hosts, default=0), slot) for slot in uuids}
    if not at:
        log.notes.append(f"{name} cannot be joined: it does not say which machine it is from")
        return Nvml()
    offset = _offset(log, run, zone)
    if offset is None:
        log.notes.append(f"{name} cannot be joined: none of its times is within this run")
        return Nvml()
    first, last = run.start + offset - _MARGIN, run.end + offset + _MARGIN
    kept = [(at[slot], row) for slot, row in rows if slot in at and first < row.time < last]
    kept.sort(key=lambda pair: pair[1].time)
    gpus = sorted({gpu for _, gpu in at.values()})
    minutes = (offset if log.has_date else (offset + _DAY // 2) % _DAY - _DAY // 2) // (60 * 10**9)
    sign, minutes = "-" if minutes < 0 else "+", abs(minutes)
    log.notes.append(
        f"{name}: {len(kept):,} samples of {format_ids('GPU', gpus)}, its times taken as "
        f"UTC{sign}{minutes // 60:02}:{minutes % 60:02}"
    )
    if not run.cards_known:
        log.notes.append(f"the GPU indices of {name} are taken as the CUDA ordinals of the trace")
    return _nvml(kept, offset + run.epoch)


def _nvml(kept: Sequence[tuple[_Place, SmiSample]], begin: int) -> Nvml:
    """Return rows, which are in order of time, with times after the beginning in nanoseconds."""
    names = [name for name in VALUES if any(name in row.cells for _, row in kept)]
    samples = Samples(
        np.array([row.time - begin for _, row in kept], np.int64),
        np.array([host for (host, _), _ in kept], np.int64),
        np.array([gpu for (_, gpu), _ in kept], np.int64),
        {
            name: np.array([row.cells.get(name, np.nan) for _, row in kept], np.float64)
            for name in names
        },
    )
    latest: dict[_Place, dict[str, Any]] = {}
    for slot, row in kept:
        latest.setdefault(slot, {}).update(row.cells)
    known = {*Card.__struct_fields__} - {"gpu", "host"}
    cards = tuple(
        Card(gpu, host, **{name: value for name, value in cells.items() if name in known})
        for (host, gpu), cells in sorted(latest.items())
    )
    return Nvml(cards, (), samples)


def _offset(log: SmiLog, run: _Run, zone: int | None) -> int | None:
    """Return by how many nanoseconds the log's clock is ahead of UTC if it overlaps the trace most.

    The trace's own zone is preferred if the log then overlaps at all, then those of this machine
    and UTC, if they fit as well as any other. None if no zone fits.
    """
    times = [row.time for row in log.rows]
    first, last = min(times), max(times) + 1
    days = [0]
    if not log.has_date:
        day = first // _DAY * _DAY - run.start // _DAY * _DAY
        days = [day, day - _DAY, day + _DAY]

    def overlap(offset: int) -> int:
        return min(last - offset, run.end) - max(first - offset, run.start)

    here = time.localtime(run.start / 1e9).tm_gmtoff * 10**9
    zones = [here, 0, *(quarter * _QUARTER for quarter in sorted(_ZONES, key=abs))]
    for likely in ([] if zone is None else [zone], zones if zone is None else [zone, *zones]):
        best = max((day + ahead for day in days for ahead in likely), key=overlap, default=None)
        if best is not None and overlap(best) > 0:
            return best
    return None


_MIB: Final = 1 << 20
_SCALES: Final = {
    "B": 1.0, "KiB": 1024.0, "MiB": float(_MIB), "MB": float(_MIB), "GiB": 1024.0 * _MIB,
    "mW": 1.0, "W": 1000.0, "kHz": 1e-3, "MHz": 1.0, "GHz": 1000.0,
}  # fmt: skip
"""Factors of units to bytes, mW and MHz; nvidia-smi's MB are MiB."""
_MOST_NUMBER: Final = 2.0**62
_YEARS: Final = range(1970, 2200)
_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]+|%)?")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")
_UNKNOWN: Final = frozenset(
    {"n/a", "not supported", "unknown error", "insufficient permissions", "requested functionality "
     "has been deprecated", "gpu is lost", "gpu requires reset", "no data", "unknown"}
)  # fmt: skip


def _number(text: str, unit: str = "") -> float | None:
    """Return a cell as bytes, mW, MHz or a plain number; ``unit`` is for a cell without any."""
    if (match := _NUMBER.fullmatch(text)) is not None:
        value = float(match[1]) * _SCALES.get(match[2] or unit, 1.0)
    elif _HEX.fullmatch(text):
        value = float(int(text, 16))
    else:
        return None
    return round(value, 3) if abs(value) < _MOST_NUMBER else None


def _is_unknown(text: str) -> bool:
    """Return True for a cell without a value, in one of the ways of nvidia-smi."""
    return text in ("", "-") or text.strip("[]").lower() in _UNKNOWN


_COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "utilization.gpu": ("utilization", "%"),
    "memory.used": ("memoryUsed", "MiB"),
    **dict.fromkeys(("clocks.current.sm", "clocks.sm"), ("smClock", "MHz")),
    **dict.fromkeys(("clocks.current.memory", "clocks.mem"), ("memoryClock", "MHz")),
    **dict.fromkeys(("power.draw", "power.draw.average"), ("power", "W")),
    "power.draw.instant": ("powerInstant", "W"),
    "temperature.gpu": ("temperature", ""),
    **dict.fromkeys(("pcie.link.gen.current", "pcie.link.gen.gpucurrent"), ("pcieGen", "")),
    "pcie.link.width.current": ("pcieWidth", ""),
    "clocks_event_reasons.active": ("clocksEventReasons", ""),
    "clocks_throttle_reasons.active": ("clocksEventReasons", ""),
    "index": ("gpu", ""),
    "memory.total": ("memory_bytes", "MiB"),
    "clocks.max.sm": ("sm_clock_max", "MHz"),
    **dict.fromkeys(("clocks.max.memory", "clocks.max.mem"), ("memory_clock_max", "MHz")),
    "clocks.applications.graphics": ("sm_clock_application", "MHz"),
    "clocks.applications.gr": ("sm_clock_application", "MHz"),
    "clocks.applications.memory": ("memory_clock_application", "MHz"),
    "clocks.applications.mem": ("memory_clock_application", "MHz"),
    "pcie.link.gen.max": ("pcie_gen_max", ""),
    "pcie.link.width.max": ("pcie_width_max", ""),
    **dict.fromkeys(("enforced.power.limit", "power.limit"), ("power_limit_mw", "W")),
}
"""Fields of numbers by their column, with the unit that ``nounits`` leaves out."""
_TEXTS: Final = {
    "name": "name", "gpu_name": "name", "uuid": "uuid", "gpu_uuid": "uuid",
    "pci.bus_id": "pci", "gpu_bus_id": "pci", "mig.mode.current": "mig",
}  # fmt: skip
_REASONS: Final = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8,
    "sync_boost": 0x10, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}  # fmt: skip
_REASON: Final = re.compile(r"clocks_(?:event|throttle)_reasons\.(\w+)")
_TIME: Final = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?")


def _row(header: _Header, cells: Sequence[str]) -> SmiSample | None:
    """Return None for cells that are not a row: cut short, without a time, with a broken number."""
    time, values = None, dict[str, Any]()
    for (name, unit), cell in zip(header, cells, strict=False):
        column, usual_unit = _COLUMNS.get(name, ("", ""))
        reason = _REASON.fullmatch(name)
        if name == "timestamp":
            time = _time(cell)
        elif _is_unknown(cell):
            continue
        elif name in _TEXTS:
            values[_TEXTS[name]] = cell
        elif reason is not None and reason[1] in _REASONS:
            bits = int(values.get("clocksEventReasons", 0.0))
            values["clocksEventReasons"] = float(bits | _REASONS[reason[1]] * (cell == "Active"))
        elif column:
            value = _number(cell, unit or usual_unit)
            if value is None:
                return None
            values[column] = value if column in VALUES else round(value)
    return None if time is None or len(cells) != len(header) else SmiSample(time, values)


def _time(text: str) -> int | None:
    """Return a written moment in ns since 1970; None if it is none, or of another century."""
    seconds, _, fraction = text.partition(".")
    try:
        when = datetime.strptime(seconds, "%Y/%m/%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    if _TIME.fullmatch(text) is None or when.year not in _YEARS:
        return None
    return int(when.timestamp()) * 10**9 + int(fraction.ljust(9, "0"))


_DMON: Final = {
    "gpu": "index", "pwr": "power.draw", "gtemp": "temperature.gpu", "sm": "utilization.gpu",
    "mclk": "clocks.mem", "pclk": "clocks.sm", "fb": "memory.used",
}  # fmt: skip
"""Names in --query-gpu of the columns of dmon."""
_DMON_OTHERS: Final = {"mtemp", "mem", "enc", "dec", "jpg", "ofa", "bar1", "pviol", "rxpci"}
_SEPARATOR: Final = re.compile(r"[,\s]+")


def _dmon_names(line: str) -> list[str]:
    """Return the columns that a header names; none for other lines, such as that of the units."""
    if not line.lstrip().startswith("#"):
        return []
    names = [name.lower() for name in _SEPARATOR.split(line.lstrip()[1:].strip())]
    known = (_DMON.keys() | _DMON_OTHERS) - {"gpu"}
    return names if "gpu" in names and known & set(names) else []


def _read_dmon(path: Path, lines: Iterable[str]) -> SmiLog:
    """Read the rows of a log of dmon; raise InputError if it has no times."""
    log, names = SmiLog(path), list[str]()
    for line in lines:
        if line.lstrip().startswith("#"):
            names = _dmon_names(line) or names
            continue
        cells = _SEPARATOR.split(line.strip())
        named = {"date": "19700101", "time": "00:00:00"} | dict(zip(names, cells, strict=False))
        date, header = named["date"], ["timestamp", *(_DMON.get(name, "") for name in names)]
        written = f"{date[:4]}/{date[4:6]}/{date[6:]} {named['time']}"
        row = _row([(name, "") for name in header], [written, *cells])
        log.add(row if row is not None and "gpu" in row.cells else None)
    if "time" not in names:
        raise InputError(path, "has no times; record it with `nvidia-smi dmon -o DT`")
    log.has_date = "date" in names
    days = last = 0
    for row in [] if log.has_date else log.rows:
        # Times that begin again at 0 are of the next day.
        days += row.time < last - _DAY // 2
        last, row.time = row.time, row.time + days * _DAY
    return log


def _header(cells: Sequence[str]) -> _Header | None:
    """Return the columns if the line names a value and anything else that nvidia-smi knows."""
    columns = []
    for cell in cells:
        name, bracket, unit = cell[:-1].rpartition("[")
        has_unit = bracket and cell.endswith("]") and "]" not in unit
        columns.append((name.rstrip().lower(), unit) if has_unit else (cell.lower(), ""))
    known = [
        name
        for name, _ in columns
        if name == "timestamp" or name in _COLUMNS or name in _TEXTS or _is_value(name)
    ]
    return columns if len(known) > 1 and any(map(_is_value, known)) else None


def _is_value(name: str) -> bool:
    return _COLUMNS.get(name, ("",))[0] in VALUES or _REASON.fullmatch(name) is not None


def _read_query(path: Path, lines: Iterable[str]) -> SmiLog:
    """Read the rows of a log of --query-gpu; raise InputError if their columns are unclear."""
    log = SmiLog(path)
    header: _Header | None = None
    rows: list[tuple[_Header, list[str]]] = []
    waiting: list[list[str]] = []
    """Rows before any header."""
    for cells in map(_cells, lines):
        if (columns := _header(cells)) is not None:
            header = columns
        elif header is None:
            waiting.append(cells)
        else:
            rows.append((header, cells))
    if waiting:
        header = header or _guessed(path, waiting, log)
        rows += [(header, cells) for cells in waiting]
    for columns, cells in rows:
        log.add(_row(columns, cells))
    if waiting:
        log.rows.sort(key=lambda row: row.time)
    if header is not None and not any(name == "timestamp" for name, _ in header):
        raise InputError(path, "has no times; query timestamp too (--query-gpu=timestamp,…)")
    return log


_UNITS: Final = re.compile(r" (?:%|MiB|MHz|W)$")
_RECOGNIZED: Final = (
    (_TIME, "timestamp"),
    (re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{8,}"), "uuid"),
    (re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"), "pci.bus_id"),
    (re.compile(r"0x[0-9a-fA-F]{16}"), "clocks_event_reasons.active"),
    (re.compile(r"(?:.* )?%"), "utilization.gpu"),
    (re.compile(r"(?:.* )?W"), "power.draw"),
    (re.compile(r"(?:.* )?MiB"), "memory.used"),
)
"""Columns by the form of their cells."""
_COUNT: Final = re.compile(r"\d{1,4}")
_ROWS_GUESSED_FROM: Final = 64
"""Rows to guess the columns from, without a header."""
_NO_HEADER: Final = (
    "has no header that names its columns; write the names of --query-gpu as its first line"
)


def _guessed(path: Path, rows: Sequence[Sequence[str]], log: SmiLog) -> _Header:
    """Guess the columns of a log without a header by their values.

    Clocks of the SMs and of the memory look alike, and numbers without units like anything: they
    are left out. Of two columns of MiB, the larger is the total; of more, neither is known.
    """
    few = [row for row in rows[:_ROWS_GUESSED_FROM] if any(map(_TIME.fullmatch, row))]
    few = [row for row in few if len(row) == len(few[0])]
    columns = list(zip(*few, strict=True))
    names: list[str] = []
    for column in columns:
        name = _guessed_name(column)
        names.append("" if name in names else name)
    sizes = [at for at, column in enumerate(columns) if any(c.endswith(" MiB") for c in column)]
    if len(sizes) > 1:
        for at in sizes:
            names[at] = ""
    if len(sizes) == 2:
        largest = [max(_number(cell) or 0.0 for cell in columns[at]) for at in sizes]
        used, total = sizes if largest[0] <= largest[1] else sizes[::-1]
        names[used], names[total] = "memory.used", "memory.total"
    kept = [name for name in names if name]
    if "timestamp" not in kept or not any(map(_is_value, kept)):
        raise InputError(path, _NO_HEADER)
    shown = ", ".join(name for name in kept if name != "timestamp")
    log.notes.append(
        f"{path.name} has no header; {shown} are found by their units, other columns are left out"
    )
    return [(name, "") for name in names]


def _guessed_name(column: Sequence[str]) -> str:
    cell = next((cell for cell in column if not _is_unknown(cell)), "")
    for pattern, name in _RECOGNIZED:
        if pattern.fullmatch(cell):
            return name
    # Indices of several GPUs count 0, 1, 2, … repeatedly.
    most = max((int(cell) for cell in column if _COUNT.fullmatch(cell)), default=0)
    counts = (cell == str(index % (most + 1)) for index, cell in enumerate(column))
    return "index" if most > 0 and all(counts) else ""


_ROUND: Final = 0.5
"""Fraction of the pause between two rounds that separates them."""
_SAME_ROUND: Final = 500_000_000
"""Nanoseconds between most rows of one GPU alone; those of a round come within milliseconds."""
_MOST_GPUS: Final = 32
_WHOLE: Final = 0.9
"""Fraction of the rounds that must be of one size to show how many GPUs there are."""


def _gpu_of_each_row(log: SmiLog) -> list[tuple[int, SmiSample]]:
    """Return the rows, each with the slot of its GPU: the index if it is known, else the order.

    nvidia-smi asks the GPUs in the order of their indices, one after another, and then waits.
    Raises InputError if that does not show in the times either.
    """
    rows = log.rows
    if all("gpu" in row.cells for row in rows):
        return [(row.cells["gpu"], row) for row in rows]
    for name in ("uuid", "pci"):
        if all(name in row.cells for row in rows):
            places: dict[str, int] = {}
            return [(places.setdefault(row.cells[name], len(places)), row) for row in rows]
    pauses = np.diff([row.time for row in rows])
    edges = [0, len(rows)]
    if len(pauses) and np.quantile(pauses, 0.25) > _SAME_ROUND:
        edges = list(range(len(rows) + 1))
    elif len(pauses):
        # With one GPU in 32 rows after a pause, a few percent of all are pauses between rounds.
        longest = float(np.quantile(pauses, 1 - 1 / (2 * _MOST_GPUS), method="lower"))
        edges[1:1] = (np.flatnonzero(pauses > _ROUND * longest) + 1).tolist()
    rounds = [rows[a:b] for a, b in pairwise(edges)]
    sizes = Counter(map(len, rounds))
    size, often = sizes.most_common(1)[0]
    if size > _MOST_GPUS or often < _WHOLE * (len(rounds) - 1):
        problem = "does not say which GPU a row is from; query index or uuid too"
        raise InputError(log.path, problem)
    whole = [rows for rows in rounds if len(rows) == size]
    log.bad += sum(len(rows) for rows in rounds) - size * len(whole)
    if size > 1:
        log.notes.append(
            f"{log.path.name} does not name its {size} GPUs; they are numbered by the order of rows"
        )
    return [(slot, row) for rows in whole for slot, row in enumerate(rows)]
