"""Columns that no reader reads: those that a trace fills from the process and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from gputrace.traces.events import COLUMN_TYPES, UNKNOWN, Column, Events
from gputrace.traces.ids import number_ids

if TYPE_CHECKING:
    from gputrace.traces.trace import Trace

DERIVED: Final = {"gpu": ("process", "device"), "rank": ("process",)}
"""What each is made of."""


def to_read(wanted: Sequence[str]) -> list[str]:
    """The columns that readers know and that the columns wanted are made of."""
    read = [name for name in COLUMN_TYPES if name in wanted and name not in DERIVED]
    for name in DERIVED.keys() & set(wanted):
        read += [column for column in DERIVED[name] if column not in read]
    return read


def derive(trace: Trace, events: Events, wanted: Sequence[str]) -> Events:
    """The columns wanted, of those that were read for them."""
    if not DERIVED.keys() & set(wanted):
        return events
    arrays: dict[str, Column] = {
        name: getattr(events, name) for name in events.columns if name in wanted
    }
    if "gpu" in wanted:
        arrays["gpu"] = _gpus(trace, events)
    if "rank" in wanted:
        ranks = np.array([process.rank for process in trace.processes] or [UNKNOWN])
        arrays["rank"] = ranks[events.process]
    return Events(arrays)


def _gpus(trace: Trace, events: Events) -> Column:
    pairs = events.process.astype(np.int32) << 16 | (events.device.astype(np.int32) & 0xFFFF)
    distinct, where = number_ids(pairs)
    devices = distinct.astype(np.int16).tolist()
    processes = (distinct >> 16).tolist()
    gpus = [trace.device(*pair).gpu for pair in zip(processes, devices, strict=True)]
    found: Column = np.array(gpus or [UNKNOWN]).take(where)
    return found
