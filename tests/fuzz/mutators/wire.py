"""Protobuf messages, without their schema: fields changed, moved, nested, and badly written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

from tests.fuzz import values
from tests.fuzz.mutators import raw

Field = list[Any]
"""Number, wire type, and the value: an integer, bytes, or the fields of a message."""


def mutate(rng: Random, data: bytes) -> bytes:
    """A message with other fields, or broken on the wire; packed at times."""
    kind = rng.random()
    if kind < 0.15:
        return raw.mutate(rng, data)
    if kind < 0.18:
        return raw.pack(rng, data)
    fields = parse(data)
    if not fields:
        return raw.mutate(rng, data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        _change(rng, fields)
    return write(fields)


def parse(data: bytes) -> list[Field] | None:
    """The fields of a message; None for what is none."""
    try:
        return list(_fields(data))
    except (IndexError, ValueError):
        return None


def _fields(data: bytes) -> Iterator[Field]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield [tag >> 3, 0, value]
            continue
        size, at = (8, at) if tag & 7 == 1 else (4, at) if tag & 7 == 5 else _varint(data, at)
        if tag & 7 not in (1, 2, 5) or not tag >> 3 or at + size > len(data):
            raise ValueError(tag)
        content = data[at : at + size]
        at += size
        yield [tag >> 3, tag & 7, (parse(content) or content) if tag & 7 == 2 else content]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] & 0x80:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1


def write(fields: list[Field]) -> bytes:
    """The message of the fields."""
    parts = []
    for number, kind, value in fields:
        parts.append(varint(number << 3 | kind))
        if isinstance(value, int):
            parts.append(varint(value))
            continue
        content = write(value) if isinstance(value, list) else value
        parts.append(varint(len(content)) + content if kind == 2 else content)
    return b"".join(parts)


def varint(number: int) -> bytes:
    """A number of up to 70 bits, as it is written."""
    number &= (1 << 70) - 1
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + [groups[-1]])


def _change(rng: Random, fields: list[Field]) -> None:
    where = fields
    index = rng.randrange(len(where)) if where else 0
    while where and isinstance(where[index][2], list) and where[index][2] and rng.random() < 0.85:
        where = where[index][2]
        index = rng.randrange(len(where))
    if not where:
        return
    kind = rng.randrange(8)
    if kind < 4:
        where[index][2] = _another(rng, where[index][2])
    elif kind == 4:
        where[index][0] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 1 << 29))
    elif kind == 5:
        where[index][1] = rng.randrange(8)
    elif kind == 6:
        where.insert(rng.randrange(len(where) + 1), list(where[index]))
    else:
        del where[index]


def _another(rng: Random, value: Any) -> Any:
    if isinstance(value, int):
        return values.near(rng, value) if rng.random() < 0.5 else values.integer(rng)
    if isinstance(value, list):
        return (
            [*value, *value] if rng.random() < 0.5 else values.text(rng).encode("utf-8", "ignore")
        )
    with suppress(UnicodeDecodeError):
        if rng.random() < 0.5:
            value.decode()
            return values.text(rng).encode("utf-8", "surrogatepass")
    return raw.mutate(rng, value)
