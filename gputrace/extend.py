"""What plugins are made of: the names that stay, wherever they are defined.

`docs/plugins.md` says how they go together. Each is imported when it is first used, so that a view
brings no collectors with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gputrace.analyzers.findings.facts import Facts
    from gputrace.analyzers.results import Analysis, ExtraTable, Finding
    from gputrace.collectors.backend import Backend, Launch, Merged, Plan
    from gputrace.collectors.host import HOST
    from gputrace.errors import InputError, MissingError, UsageError
    from gputrace.traces.candidate import Candidate
    from gputrace.traces.events import Events, Kind
    from gputrace.traces.memory import MemoryTrace, Names
    from gputrace.traces.readers import Reader
    from gputrace.traces.trace import Device, Process, Session, Trace
    from gputrace.units import format_ns

__all__ = [
    "HOST",
    "Analysis",
    "Backend",
    "Candidate",
    "Device",
    "Events",
    "ExtraTable",
    "Facts",
    "Finding",
    "InputError",
    "Kind",
    "Launch",
    "MemoryTrace",
    "Merged",
    "MissingError",
    "Names",
    "Plan",
    "Process",
    "Reader",
    "Session",
    "Trace",
    "UsageError",
    "format_ns",
]

_MODULES: Final = {
    "analyzers.findings.facts": ("Facts",),
    "analyzers.results": ("Analysis", "ExtraTable", "Finding"),
    "collectors.backend": ("Backend", "Launch", "Merged", "Plan"),
    "collectors.host": ("HOST",),
    "errors": ("InputError", "MissingError", "UsageError"),
    "traces.candidate": ("Candidate",),
    "traces.events": ("Events", "Kind"),
    "traces.memory": ("MemoryTrace", "Names"),
    "traces.readers": ("Reader",),
    "traces.trace": ("Device", "Process", "Session", "Trace"),
    "units": ("format_ns",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"gputrace.{module}"), name)
    raise AttributeError(f"module 'gputrace.extend' has no attribute {name!r}")
