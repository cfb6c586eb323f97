"""gputrace: where each training step's time goes on NVIDIA GPUs, and what to change.

import gputrace
analysis = gputrace.open("trace.sqlite").analyze()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["GputraceError", "__version__", "annotate", "open", "step"]

if TYPE_CHECKING:
    from gputrace.api import open
    from gputrace.errors import GputraceError
    from gputrace.marks import annotate, step


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that ``import gputrace`` is light."""
    if name == "open":
        from gputrace.api import open

        return open
    if name in ("annotate", "step"):
        from gputrace import marks

        return getattr(marks, name)
    if name == "GputraceError":
        from gputrace.errors import GputraceError

        return GputraceError
    raise AttributeError(f"module 'gputrace' has no attribute {name!r}")
