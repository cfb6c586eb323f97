"""Sizes of the messages of collectives, as PyTorch's profiler tells them."""

from __future__ import annotations

from typing import Final

from gputrace.traces.events import UNKNOWN
from gputrace.traces.kineto.decode import Args, integer

_SIZES: Final = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes of an element by the name that PyTorch gives its type (c10/core/ScalarType.h)."""


def message_bytes(args: Args) -> int:
    """Bytes of the larger side of a collective, or `UNKNOWN`.

    An all-gather gives more than it takes and a reduce-scatter takes more than it gives; the larger
    is what nccl-tests calls the size.
    """
    element = str(args.element)
    size = 1 if element.startswith("Float8") else _SIZES.get(element, 0)
    count = max(integer(args.taken), integer(args.given)) if size else 0
    return size * count if count > 0 else UNKNOWN
