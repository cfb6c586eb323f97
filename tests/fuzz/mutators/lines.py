"""Text in lines: tables with separators, and files of settings."""

from __future__ import annotations

import re
from random import Random
from typing import Final

from tests.fuzz import values
from tests.fuzz.mutators import raw

_CELL: Final = re.compile(r"[^\s,=\[\]\"{}#/:]+")


def mutate(rng: Random, data: bytes) -> bytes:
    """Lines with other words in them, or in another order; or broken bytes."""
    if rng.random() < 0.15:
        return raw.mutate(rng, data)
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    if rng.random() < 0.02:
        lines.insert(rng.randrange(len(lines) + 1), "a = " + "[" * rng.choice((3, 300, 30_000)))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        _change(rng, lines)
    encoding = "utf-16" if rng.random() < 0.01 else "utf-8"
    errors = "surrogatepass" if rng.random() < 0.5 else "replace"
    return "\n".join(lines).encode(encoding, errors)


def _change(rng: Random, lines: list[str]) -> None:
    at = rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind < 5:
        lines[at] = _another(rng, lines[at])
    elif kind == 5:
        lines.insert(rng.randrange(len(lines) + 1), lines[at])
    elif kind == 6 and len(lines) > 1:
        del lines[at]
    else:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]


def _another(rng: Random, line: str) -> str:
    cells = list(_CELL.finditer(line))
    if not cells or rng.random() < 0.1:
        at = rng.randrange(len(line) + 1)
        return line[:at] + rng.choice((",", "#", "=", "[", '"', "\t", values.text(rng))) + line[at:]
    start, end = rng.choice(cells).span()
    word = line[start:end]
    if word.isdecimal() and len(word) < 40 and rng.random() < 0.5:
        word = str(values.near(rng, int(word)))
    else:
        word = rng.choice((values.text(rng), str(values.integer(rng)), "[N/A]", "", word * 30))
    return line[:start] + word + line[end:]
