"""What the profiler of TensorFlow and JAX writes, whichever file it is in: lines of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.memory import Names


@dataclass(frozen=True, slots=True)
class Line:
    """One stream of a GPU, or one host thread; all columns are of one length.

    Attributes:
        plane: what the line is of: ``/device:GPU:0``, ``/host:CPU``.
        name: ``Stream #13(Compute)``, ``python``; other lines of a GPU repeat what streams hold.
        id: of the stream or the thread.
        start, end: nanoseconds.
        text: the event's name, a number of `Recording.names`.
        correlation: joins the call and what it issued; `UNKNOWN` where there is none.
        details: of a copy or memset, as a number of `Recording.names`, or `UNKNOWN`.
        step: whether it is marked as a step, by a step number.
    """

    plane: str
    name: str
    id: int
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    text: NDArray[np.int32]
    correlation: NDArray[np.int64]
    details: NDArray[np.int32]
    step: NDArray[np.bool_]


@dataclass(slots=True)
class Recording:
    """All of a file.

    Attributes:
        cards: name of the card by CUDA ordinal, where it is told.
        host: name of the machine.
        epoch_ns: the wall clock at 0 of the lines' clock.
        warnings: the profiler's own complaints.
    """

    lines: list[Line] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    cards: dict[int, str] = field(default_factory=dict)
    host: str = ""
    epoch_ns: int | None = None
    warnings: list[str] = field(default_factory=list)
