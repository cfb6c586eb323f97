"""Small files of Chrome's trace viewer: JSON, decoded whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError
from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.packed import Content, read_content

MOST_BYTES: Final = 1 << 30
_BEYOND: Final = 4e15
"""Microseconds past any clock, of which two together are still nanoseconds of 64 bits."""

Key = int | str | None
"""A pid or a tid."""

ChromeEvent = Mapping[str, Any]
"""One event as it stands in the file: any value may be missing, or of any type."""


def read_events(path: Path, breaks: Breaks = STOP) -> list[ChromeEvent]:
    """The events of a file; raises InputError where it is cut short or broken.

    Where breaks are allowed, the events before the break.
    """
    try:
        document = json.loads(read_content(path, MOST_BYTES))
    except InputError as error:
        breaks.meet(error)
        document = _before_break(path)
    except RecursionError:
        raise InputError(path, "broken JSON (too deep); record it again") from None
    except MemoryError:
        raise InputError(path, "not enough memory to decode it") from None
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        breaks.meet(InputError(path, f"broken JSON ({reason}); copy it or record it again"))
        document = _before_break(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(path, "JSON without a list of traceEvents; record it again")
    return [event for event in events if isinstance(event, dict)]


def _before_break(path: Path) -> list[Any]:
    """The events of a broken file that are whole."""
    from gputrace.traces.kineto.document import Document

    with Content(path) as content:
        return list(chain.from_iterable(Document(content, _decoded, Breaks(True)).parts()))


def _decoded(text: bytes) -> list[Any]:
    from gputrace.traces.kineto.document import BadJson

    try:
        events: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.pos) from error
    except (ValueError, RecursionError) as error:
        raise BadJson(str(error), 0) from error
    return events


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
