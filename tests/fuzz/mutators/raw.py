"""Bytes without a form: flipped, cut, doubled, filled with what is never there."""

from __future__ import annotations

import gzip
from random import Random

from tests.fuzz import values


def mutate(rng: Random, data: bytes) -> bytes:
    """One to eight changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        _change(rng, changed)
    return bytes(changed)


def _change(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 64, 512)))
    kind = rng.randrange(7)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at:end] = rng.randbytes(end - at)
    elif kind == 2:
        data[at:end] = values.integer(rng).to_bytes(16, "little", signed=True)[: end - at]
    elif kind == 3:
        del data[at:end]
    elif kind == 4:
        data[at:at] = data[at:end]
    elif kind == 5:
        other = rng.randrange(len(data) + 1)
        data[at:end] = data[other : other + end - at]
    elif rng.random() < 0.2:
        del data[at:]


def pack(rng: Random, data: bytes) -> bytes:
    """Pack the input with gzip; at times cut off, or broken."""
    packed = gzip.compress(data, 1, mtime=0)
    return packed if rng.random() < 0.5 else mutate(rng, packed)
