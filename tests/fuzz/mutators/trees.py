"""Trees of lists, objects and plain values: JSON, and what is written as MessagePack."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any, Final

from tests.fuzz import values
from tests.fuzz.mutators import raw

_DEEP: Final = (3, 40, 600, 100_000)
_SHORT: Final = 10_000
"""Characters of what is repeated many times."""


def mutate_json(rng: Random, data: bytes) -> bytes:
    """JSON whose tree is another, or whose text is broken; packed at times."""
    kind = rng.random()
    if kind < 0.12:
        return raw.mutate(rng, data)
    if kind < 0.16:
        return raw.pack(rng, data)
    if kind < 0.19:
        return _deep(rng, data)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return raw.mutate(rng, data)
    text = json.dumps(change(rng, tree), ensure_ascii=rng.random() < 0.7)
    if rng.random() < 0.05:
        odd = rng.choice(("1e400", "-0", "007", "1.", "NaN", "0x1"))
        text = text.replace(": ", f": {odd}, ", 1)
    return text.encode("utf-8", "surrogatepass")


def _deep(rng: Random, data: bytes) -> bytes:
    """Nested deeper than anybody means."""
    depth, (left, right) = rng.choice(_DEEP), rng.choice((b"[]", b"{}"))
    inside = b'"a":' if left == b"{"[0] else b""
    nest = (bytes([left]) + inside) * depth + bytes([right]) * depth
    at = max(data.find(b":", rng.randrange(len(data) + 1)), 0) + 1
    return data[:at] + nest + b"," + data[at:]


def change(rng: Random, tree: Any) -> Any:
    """The tree, which it takes over, after one to eight changes, each at some place in it."""
    holder = [tree]
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        inside, key = _place(rng, holder)
        if rng.random() < 0.7:
            inside[key] = _another(rng, inside[key])
        elif inside is not holder:
            _rearrange(rng, inside, key)
    return holder[0]


def _place(rng: Random, holder: list[Any]) -> tuple[Any, Any]:
    """A list or object, and an index or key in it; deep ones as likely as others."""
    inside: Any = holder
    key: Any = 0
    while isinstance(inside[key], (list, dict)) and inside[key] and rng.random() < 0.85:
        inside = inside[key]
        key = rng.choice(list(inside)) if isinstance(inside, dict) else rng.randrange(len(inside))
    return inside, key


def _another(rng: Random, value: Any) -> Any:
    if isinstance(value, (int, float)) and rng.random() < 0.5 and abs(value) < 1e300:
        return values.near(rng, int(value))
    text = str(value)
    # Many of many, changed again and again, would take longer to write than to read.
    many = 50 if len(text) < _SHORT else 2
    pool: tuple[Any, ...] = (
        None, True, False, [], {}, [value], {"a": value}, values.integer(rng), values.integer(rng),
        values.integer(rng, 128), values.text(rng), values.text(rng), rng.choice(values.FLOATS),
        float("nan"), rng.random() * 1e15, text, [value] * many,
    )  # fmt: skip
    return rng.choice(pool)


def _rearrange(rng: Random, inside: Any, key: Any) -> None:
    kind = rng.randrange(3)
    if isinstance(inside, dict):
        value = inside[key] if kind else inside.pop(key)
        if kind:
            inside[rng.choice((values.text(rng), *inside))] = value
    elif kind == 0:
        del inside[key]
    elif kind == 1:
        inside.insert(rng.randrange(len(inside) + 1), copy.deepcopy(inside[key]))
    else:
        rng.shuffle(inside)
