"""Names of kernels, cut to what tells them apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

_TELLING: Final = re.compile(r"(\w*Functor\w*|\w+_kernel_cuda|\w+Ops?(?=[<,>]))")
"""Among the template's arguments, what says which operation an all-purpose kernel does."""


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
    """``elementwise_kernel MulFunctor`` of a C++ name; cut with ``…`` at a width."""
    plain = re.sub(r"<unnamed>::|\(anonymous namespace\)::", "", name.removeprefix("void "))
    function, _, rest = plain.partition("<")
    function = function.partition("(")[0].rpartition("::")[2] or plain
    telling = _TELLING.findall(rest)
    told = " ".join([function, *dict.fromkeys(telling[-1:])]).strip() or name
    return told if len(told) <= width else told[: width - 1] + "…"
