"""``.trace.json.gz``: what the profiler shows in the trace viewer, as lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.chrome import (
    ChromeEvent,
    Key,
    Labels,
    arguments,
    key,
    nanoseconds,
    read_events,
    read_labels,
)
from gputrace.traces.events import UNKNOWN
from gputrace.traces.memory import Names
from gputrace.traces.xla.lines import Line, Recording

_MARKS: Final = re.compile(rb'"(/host:CPU|/device:[A-Z]+:\d+)')
"""Names of planes, which the first event of the file tells."""
_MOST_EVENTS: Final = 1_000_000
"""What the profiler leaves out of the file beyond these is the shortest."""
_LEFT_OUT: Final = (
    "the file holds 1,000,000 events, the most that the profiler puts into it: short kernels may "
    "be missing; analyze the .xplane.pb beside it"
)


def is_trace_viewer(content: bytes) -> bool:
    """Whether a file begins as one of this profiler does; takes its first bytes, unpacked."""
    return content.lstrip().startswith(b"{") and _MARKS.search(content) is not None


def read_trace_viewer(path: Path, breaks: Breaks = STOP) -> Recording:
    """Raises InputError for a file that is cut short or broken."""
    events = read_events(path, breaks)
    labels = read_labels(events)
    found = Recording()
    rows: dict[tuple[Key, Key], list[ChromeEvent]] = {}
    complete = [event for event in events if event.get("ph") == "X"]
    for event in complete:
        rows.setdefault((key(event, "pid"), key(event, "tid")), []).append(event)
    for (pid, tid), own in rows.items():
        if labels.processes.get(pid, "").startswith(("/host:", "/device:GPU:")):
            found.lines.append(_line(found.names, labels, pid, tid, own))
    if len(complete) >= _MOST_EVENTS:
        found.warnings.append(_LEFT_OUT)
    return found


def _line(names: Names, labels: Labels, pid: Key, tid: Key, events: Sequence[ChromeEvent]) -> Line:
    timed = [
        (start, end, event)
        for event in events
        if (start := nanoseconds(event.get("ts"))) is not None
        and (end := nanoseconds(event.get("ts"), event.get("dur", 0))) is not None
    ]
    more = [arguments(event) for _, _, event in timed]
    return Line(
        plane=labels.processes.get(pid, ""),
        name=labels.threads.get((pid, tid), ""),
        id=tid if isinstance(tid, int) else 0,
        start=np.array([start for start, _, _ in timed], np.int64),
        end=np.array([end for _, end, _ in timed], np.int64),
        text=np.array([names.number(str(event.get("name"))) for _, _, event in timed], np.int32),
        correlation=np.array([_integer(of.get("correlation_id")) for of in more], np.int64),
        details=np.array([_details(names, of) for of in more], np.int32),
        step=np.array(["step_num" in of for of in more], bool),
    )


def _integer(value: Any) -> int:
    """A number of the file's, which has them as text."""
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else UNKNOWN


def _details(names: Names, more: Any) -> int:
    text = more.get("memcpy_details", more.get("Memset_details"))
    return UNKNOWN if text is None else names.number(str(text))
