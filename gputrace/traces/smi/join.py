"""A log of nvidia-smi laid over a trace: its times on the trace's clock, its GPUs as cards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.errors import InputError
from gputrace.traces.events import GPU_KINDS, UNKNOWN, Kind
from gputrace.traces.nvml.model import VALUES, Card, Nvml, Samples, plain_uuid, together
from gputrace.traces.smi.apart import tell_apart
from gputrace.traces.smi.dmon import is_dmon, read_dmon
from gputrace.traces.smi.log import Row, SmiLog
from gputrace.traces.smi.query import is_query, read_query
from gputrace.traces.sqlite import open_input
from gputrace.traces.trace import Trace
from gputrace.units import format_ranges

_QUARTER: Final = 15 * 60 * 10**9
_DAY: Final = 96 * _QUARTER
_ZONES: Final = range(-48, 57)
"""Quarters of an hour from UTC: from UTC-12 to UTC+14."""
_AROUND: Final = 5 * 10**9
"""How much of a log is taken before the run and after it: it may be of a whole day."""
_Place = tuple[int, int]


def is_smi(head: bytes, surely: bool = False) -> bool:
    """Whether a file that begins so is a log of nvidia-smi.

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
    """What of a trace tells where a log belongs."""

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
        trace.quality.notes += [*log.notes, *_left_out(log)]
        trace.logged = together([trace.logged, found])


def _left_out(log: SmiLog) -> list[str]:
    rows = f"{log.bad:,} line{'' if log.bad == 1 else 's'}"
    return [f"{rows} of {log.path.name} left out: no whole sample"] if log.bad else []


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
    """What the log says on the trace's clock; nothing, and a note, where it does not fit."""
    rows = tell_apart(log)
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
    """What the latest row that says it says of each card."""
    told: dict[_Place, dict[str, Any]] = {}
    for at, row in rows:
        told.setdefault(at, {}).update(row.card)
    names = {one.name for one in fields(Card)} - {"gpu", "host"}
    return tuple(
        Card(gpu=gpu, host=host, **{name: value for name, value in said.items() if name in names})
        for (host, gpu), said in sorted(told.items())
    )
