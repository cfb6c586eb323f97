"""Words of strangers made fit for a terminal, and moments as words.

Names of kernels, ranges and files may hold anything: escape sequences, markup, ten thousand
letters. What is drawn has no control characters and no more letters than there is room for.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Final

from rich.cells import cell_len

from gputrace.traces.names import short
from gputrace.units import format_ns

_LONGEST: Final = 400


def clean(text: str, most: int = _LONGEST) -> str:
    """The text on one line, without control characters, cut with an ellipsis."""
    kept = text[: most + 1]
    if not (kept.isascii() and kept.isprintable()):
        kept = "".join(_shown(letter) for letter in kept)
    return kept if len(kept) <= most and len(text) <= most else kept[: most - 1] + "…"


def _shown(letter: str) -> str:
    """Spaces for white space; a mark for what moves the cursor, turns the writing or hides."""
    if letter.isspace():
        return " "
    hidden = unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "\N{REPLACEMENT CHARACTER}" if hidden else letter


@lru_cache(maxsize=4096)
def label(name: str) -> str:
    """A kernel's own name, every letter one column wide."""
    own = short(name) if len(name) < 10 * _LONGEST else name
    own = clean(own, 80)
    return own if own.isascii() else "".join(c if cell_len(c) == 1 else "·" for c in own)


def moment(ns: int, step_ns: int = 1_000) -> str:
    """``28.6547s``: with as many decimals as tell apart what lies ``step_ns`` apart."""
    decimals = min(max(0, 10 - len(str(max(step_ns, 1)))), 9)
    sign, size = ("-", -ns) if ns < 0 else ("", ns)
    whole, below = divmod(size, 10**9)
    if not decimals:
        return f"{sign}{whole}s"
    return f"{sign}{whole}.{below:09d}"[: len(f"{sign}{whole}") + 1 + decimals] + "s"


def duration(ns: int) -> str:
    """As reports write it."""
    return format_ns(ns)
