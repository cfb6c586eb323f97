"""Names of kernels, cut to what tells them apart."""

from __future__ import annotations

import re
from typing import Final

_TELLING: Final = re.compile(r"(\w*Functor\w*|\w+_kernel_cuda|\w+Ops?(?=[<,>]))")
"""Among the template's arguments, what says which operation an all-purpose kernel does."""


def short_kernel(name: str, width: int) -> str:
    """``elementwise_kernel MulFunctor`` of a C++ name; cut with ``…`` at a width."""
    plain = re.sub(r"<unnamed>::|\(anonymous namespace\)::", "", name.removeprefix("void "))
    function, _, rest = plain.partition("<")
    function = function.partition("(")[0].rpartition("::")[2] or plain
    telling = _TELLING.findall(rest)
    told = " ".join([function, *dict.fromkeys(telling[-1:])]).strip() or name
    return told if len(told) <= width else told[: width - 1] + "…"
