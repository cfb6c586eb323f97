"""Traces as PyTorch's profiler writes them, made event by event, and where the real ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.helpers.recordings import DATA, shared

PID: Final = 4711
STEPS: Final = {"cat": "user_annotation", "pid": PID, "tid": PID}


def event(cat: str, name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    """One with a duration; microseconds. ``args`` and the rest as keywords."""
    place = {"pid": 0, "tid": 7} if cat.lower().startswith(("kernel", "gpu", "mem")) else {}
    own = {"ph": "X", "cat": cat, "name": name, "pid": PID, "tid": PID, "ts": start, "dur": length}
    return own | place | more


def kernel(start: float, length: float, name: str = "gemm", **args: Any) -> dict[str, Any]:
    return event("kernel", name, start, length, args={"device": 0, "stream": 7} | args)


def write(path: Path, *events: Any, **around: Any) -> Path:
    """A file of these events; ``around`` is what else stands in it."""
    path.write_text(json.dumps({"schemaVersion": 1, **around, "traceEvents": events}))
    return path


def real(folder: str, name: str) -> Path:
    """A real recording, in the checkout or beside it, where it may be lacking."""
    small = DATA / name
    return small if small.exists() else shared("traces", folder, name)
