"""Small files of Chrome's trace viewer: JSON, decoded whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError
from gputrace.traces.packed import read_content

_MOST_BYTES: Final = 1 << 30
_BEYOND: Final = 4e15
"""Microseconds past any clock, of which two together are still nanoseconds of 64 bits."""

Key = int | str | None
"""A pid or a tid."""

ChromeEvent = Mapping[str, Any]
"""One event as it stands in the file: any value may be missing, or of any type."""


def read_events(path: Path) -> list[ChromeEvent]:
    """The events of a file; raises InputError where it is cut short or broken."""
    try:
        document = json.loads(read_content(path, _MOST_BYTES))
    except RecursionError:
        raise InputError(path, "broken JSON (too deep); record it again") from None
    except MemoryError:
        raise InputError(path, "not enough memory to decode it") from None
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(path, f"broken JSON ({reason}); copy it or record it again") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(path, "JSON without a list of traceEvents; record it again")
    return [event for event in events if isinstance(event, dict)]


def arguments(event: ChromeEvent) -> Mapping[str, Any]:
    """What an event says more."""
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def nanoseconds(*microseconds: object) -> int | None:
    """The sum of times as events tell them; None where one is no time."""
    total: int | float = 0
    for time in microseconds:
        if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < _BEYOND:
            return None
        total += time
    return round(total * 1000)


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of processes by pid, and of threads by pid and tid."""

    processes: Mapping[Key, str]
    threads: Mapping[tuple[Key, Key], str]


def read_labels(events: Sequence[ChromeEvent]) -> Labels:
    """What events of phase M name."""
    processes: dict[Key, str] = {}
    threads: dict[tuple[Key, Key], str] = {}
    for event in events:
        name = arguments(event).get("name")
        if event.get("ph") != "M" or not isinstance(name, str):
            continue
        pid, tid = key(event, "pid"), key(event, "tid")
        if event.get("name") == "process_name":
            processes[pid] = name
        elif event.get("name") == "thread_name":
            threads[pid, tid] = name
    return Labels(processes, threads)


def key(event: ChromeEvent, name: str) -> Key:
    """A pid or tid; None for what is no id."""
    found = event.get(name)
    return found if isinstance(found, int | str) else None
