"""Times as JSON's text has them: microseconds with decimals, to the nanosecond.

A double keeps a microsecond of the wall clock (1.7e15) to a quarter only, so the digits are read
as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import UNKNOWN

_PLAIN: Final = b"0123456789.,"
_DECIMALS: Final = 3
"""Of microseconds, that nanoseconds are."""

_DIGITS: Final = 19
"""Of the largest integer of 64 bits, whose first one is 9."""

_LARGEST: Final = Decimal((1 << 63) - 1).scaleb(-_DECIMALS)
"""In microseconds."""


def nanoseconds(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """The nanoseconds of numbers of microseconds, rounded where they have more than 3 decimals.

    What is not a number, or beyond 64 bits, is `UNKNOWN`.
    """
    joined = b",".join(texts)
    if not joined or joined.translate(None, _PLAIN) or b",," in b",%b," % joined:
        return _one_by_one(texts)
    characters = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(characters == ord(",")), len(joined))
    points = np.flatnonzero(characters == ord("."))
    owner = np.searchsorted(ends, points)
    decimals = np.zeros(len(texts), np.int64)
    decimals[owner] = ends[owner] - points - 1
    starts = np.append(0, ends[:-1] + 1)
    digits = ends - starts - decimals + _DECIMALS
    digits[owner] -= 1
    large = (digits > _DIGITS) | (digits == _DIGITS) & (characters[starts] == ord("9"))
    if (large | (decimals > _DECIMALS)).any() or (np.diff(owner) == 0).any():
        return _one_by_one(texts)
    found = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
    return found * 10 ** (_DECIMALS - decimals)


def _one_by_one(texts: Sequence[bytes]) -> NDArray[np.int64]:
    return np.array([_exact(bytes(text)) for text in texts], np.int64)


def _exact(text: bytes) -> int:
    try:
        number = Decimal(text.decode().strip('" '))
    except (InvalidOperation, UnicodeDecodeError):
        return UNKNOWN
    if not (number.is_finite() and abs(number) < _LARGEST):
        return UNKNOWN
    return round(number * 10**_DECIMALS)
