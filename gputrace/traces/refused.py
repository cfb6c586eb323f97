"""Files that are known, and hold no timeline of a GPU: what to say of them."""

from __future__ import annotations

import re
from typing import Final

_RECORD: Final = "record the program with `gputrace record -- python train.py`"
_KNOWN: Final = (
    (
        re.compile(rb'^\s*\{\s*"call_history"\s*:'),
        "a TimerHook of Chainer: how long each call took, but not when, so there is no timeline; "
        + _RECORD,
    ),
    (
        re.compile(rb'^\s*\[\s*\{.{0,200}"start_time_since_epoch_in_micros"', re.DOTALL),
        "a timeline of Horovod: when tensors were negotiated and reduced, but not what a GPU ran; "
        + _RECORD,
    ),
    (
        re.compile(
            rb'"traceEvents".*"(Allocators|/[^"]{0,200}[/:]device:[^"]{1,40} (Compute|Tensors))"',
            re.DOTALL,
        ),
        "a timeline of one session.run of TensorFlow (RunMetadata): operations, but not what a GPU "
        "ran in a whole training; use TensorFlow's profiler (.xplane.pb), or " + _RECORD,
    ),
)


def explain(content: bytes) -> str:
    """What a file is that cannot be analyzed, and what to do; nothing where it is not known.

    Takes its first bytes, unpacked.
    """
    return next((told for pattern, told in _KNOWN if pattern.search(content)), "")
