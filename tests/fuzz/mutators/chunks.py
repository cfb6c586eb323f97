"""Files of tagged chunks, which recorded processes leave: other numbers, tags, sizes and orders."""

from __future__ import annotations

import struct
from random import Random
from typing import Final

from gputrace.collectors.spool import CHUNK, HEADER
from tests.fuzz import values
from tests.fuzz.mutators import raw

_TAGS: Final = (
    b"KERN", b"COPY", b"MSET", b"API ", b"SYNC", b"GRPH", b"OVER", b"NVTX", b"NAME", b"CLOK",
    b"LOSS", b"FULL", b"INFO", b"DEVI", b"THRD", b"EVNT", b"\0\0\0\0",
)  # fmt: skip


def mutate(rng: Random, data: bytes) -> bytes:
    """A file with other chunks, or broken bytes."""
    if rng.random() < 0.15 or len(data) < HEADER.size:
        return raw.mutate(rng, data)
    head = bytearray(data[: HEADER.size])
    parts = list(_parts(data))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        if parts and rng.random() < 0.95:
            _change(rng, parts)
        else:
            _number(rng, head)
    return bytes(head) + b"".join(CHUNK.pack(t, n % (1 << 32)) + body for t, n, body in parts)


def _parts(data: bytes) -> list[tuple[bytes, int, bytes]]:
    """Tag, the size that is told, and the body."""
    parts, at = [], HEADER.size
    while at + CHUNK.size <= len(data):
        tag, size = CHUNK.unpack_from(data, at)
        at += CHUNK.size
        parts.append((tag, size, data[at : at + size]))
        at += size
    return parts


def _change(rng: Random, parts: list[tuple[bytes, int, bytes]]) -> None:
    at = rng.randrange(len(parts))
    tag, size, body = parts[at]
    kind = rng.randrange(10)
    if kind < 5 and body:
        changed = bytearray(body)
        _number(rng, changed)
        parts[at] = tag, size, bytes(changed)
    elif kind == 5:
        parts[at] = rng.choice(_TAGS), size, body
    elif kind == 6:
        parts[at] = tag, values.integer(rng, 32) % (1 << 32), body
    elif kind == 7:
        parts.insert(rng.randrange(len(parts) + 1), parts[at])
    elif kind == 8:
        del parts[at]
    else:
        changed_body = raw.mutate(rng, body)
        parts[at] = tag, len(changed_body), changed_body


def _number(rng: Random, data: bytearray) -> None:
    """Puts a number in the place of one of 1, 2, 4 or 8 bytes."""
    width, letter = rng.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q"), (8, "Q")))
    if len(data) < width:
        return
    at = rng.randrange(len(data) // width) * width
    (old,) = struct.unpack_from(f"<{letter}", data, at)
    new = values.near(rng, old) if rng.random() < 0.3 else values.integer(rng)
    struct.pack_into(f"<{letter}", data, at, new % (1 << 8 * width))
