"""Stable API for plugins: names that stay here wherever they are defined.

`docs/plugins.md` explains how to use them. Each is imported on first use, so that a view does not
import the collectors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gputrace.analyzers.findings.facts import Facts
    from gputrace.analyzers.ledger.causes import Cause, Host
    from gputrace.collectors.backend import Backend, Merged, Plan
    from gputrace.collectors.backends import HOST
    from gputrace.collectors.launch import Launch
    from gputrace.errors import InputError, MissingError, UsageError
    from gputrace.model.events import Events, Kind
    from gputrace.model.intervals import Intervals, union
    from gputrace.model.results import Analysis, ExtraTable, Finding
    from gputrace.model.trace import Device, Process, Selection, Session, Trace
    from gputrace.readers.in_memory import MemoryTrace, Names
    from gputrace.readers.registry import Candidate, Reader
    from gputrace.trials.cures import Cure
    from gputrace.units import format_ns

__all__ = [
    "HOST",
    "Analysis",
    "Backend",
    "Candidate",
    "Cause",
    "Cure",
    "Device",
    "Events",
    "ExtraTable",
    "Facts",
    "Finding",
    "Host",
    "InputError",
    "Intervals",
    "Kind",
    "Launch",
    "MemoryTrace",
    "Merged",
    "MissingError",
    "Names",
    "Plan",
    "Process",
    "Reader",
    "Selection",
    "Session",
    "Trace",
    "UsageError",
    "format_ns",
    "union",
]

_MODULES: Final = {
    "analyzers.findings.facts": ("Facts",),
    "analyzers.ledger.causes": ("Cause", "Host"),
    "model.results": ("Analysis", "ExtraTable", "Finding"),
    "collectors.backend": ("Backend", "Merged", "Plan"),
    "collectors.launch": ("Launch",),
    "collectors.backends": ("HOST",),
    "errors": ("InputError", "MissingError", "UsageError"),
    "model.events": ("Events", "Kind"),
    "model.intervals": ("Intervals", "union"),
    "readers.in_memory": ("MemoryTrace", "Names"),
    "readers.registry": ("Candidate", "Reader"),
    "model.trace": ("Device", "Process", "Selection", "Session", "Trace"),
    "trials.cures": ("Cure",),
    "units": ("format_ns",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"gputrace.{module}"), name)
    raise AttributeError(f"module 'gputrace.extend' has no attribute {name!r}")
