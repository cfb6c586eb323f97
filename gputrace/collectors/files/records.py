"""What chunks hold many of: records of one size, as numpy's."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.void]

CLOCKS: Final = np.dtype([("realtime", "<u8"), ("monotonic", "<u8"), ("raw", "<u8")])
"""Records of CLOK, in both kinds of files: the same moment on three clocks, nanoseconds."""


def read_records(body: memoryview, kind: np.dtype[Any]) -> Records:
    """The whole records of a chunk."""
    return np.frombuffer(body[: len(body) - len(body) % kind.itemsize], kind)
