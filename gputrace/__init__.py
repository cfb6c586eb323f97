"""gputrace: where each training step's time goes on NVIDIA GPUs, and what to change.

import gputrace
analysis = gputrace.open("trace.sqlite").analyze()
"""

from __future__ import annotations

__all__ = [
    "GputraceError",
    "__version__",
    "annotate",
    "arm",
    "compare",
    "environment",
    "open",
    "step",
    "try_cures",
]

TYPE_CHECKING = False  # Not typing's: the program that is recorded may have a typing.py.
if TYPE_CHECKING:
    from typing import Any

    from gputrace.api import compare, open
    from gputrace.collectors.in_process import arm, environment
    from gputrace.errors import GputraceError
    from gputrace.marks import annotate, step
    from gputrace.trials.trial import try_cures
    from gputrace.version import __version__


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that ``import gputrace`` is light."""
    modules = {
        "open": "api",
        "compare": "api",
        "annotate": "marks",
        "arm": "collectors.in_process",
        "environment": "collectors.in_process",
        "step": "marks",
        "try_cures": "trials.trial",
        "GputraceError": "errors",
        "__version__": "version",
    }
    if name not in modules:
        raise AttributeError(f"module 'gputrace' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"gputrace.{modules[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what is public, imported yet or not."""
    return list(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """Register ``%%gputrace``; called by ``%load_ext gputrace`` in a notebook."""
    from importlib import import_module

    import_module("gputrace.notebook_magic").load(ipython)
