"""Names of kernels, cut to what tells them apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from gputrace.analyzers.kernels.naming import short_name


def short_kernels(names: Sequence[str], width: int) -> list[str]:
    """Names in a given width; those that would look the same show where they part."""
    short = [short_kernel(name, width) for name in names]
    return [
        text if short.count(text) == 1 else _parted(name, [n for n in names if n != name], width)
        for name, text in zip(names, short, strict=True)
    ]


def _parted(name: str, others: Sequence[str], width: int) -> str:
    """The function's name, and what follows the longest beginning that another name has too."""
    same = max(_common(name, other) for other in others)
    start = same - len(re.split(r"[\W_]", name[:same])[-1])
    head = short_kernel(name, width).split(" ")[0].rstrip("…")[: width // 2]
    told = f"{head}…{name[start:]}"
    return told if len(told) <= width else told[: width - 1] + "…"


def _common(a: str, b: str) -> int:
    """How many characters two texts have in common from their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def short_kernel(name: str, width: int) -> str:
    """The telling part of a name, cut with ``…`` at a width."""
    told = short_name(name)
    return told if len(told) <= width else told[: width - 1] + "…"
