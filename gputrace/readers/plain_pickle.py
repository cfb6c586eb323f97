"""Pickles of plain values, as PyTorch dumps them: dicts, lists, tuples, texts and numbers.

The pickle is not unpickled: its opcodes (``pickletools`` of the standard library; protocols 2 to 5)
are interpreted here, and those that import or call anything are refused. Each takes a time that
does not depend on those before, and makes one object at most.

A few bytes can refer to a list or a text once more. What is made of the values is therefore to be
counted (`Allowance`).
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError

MOST_BYTES: Final = 1 << 28
"""Largest file that is read."""
MOST_OPCODES: Final = 1 << 24
"""Opcodes of a dump of a flight recorder: 20,000 collectives take about 2 million."""
MOST_RATIO: Final = 100
FREE_BYTES: Final = 16 << 20
"""Limits of what is made of a file: this many times its size, and these bytes whatever its size.

Dumps refer to the frames of their stacks again and again: with 40 to a stack, and none of them the
program's, that makes about 25 times the size.
"""
FREE_CONTAINERS: Final = 1 << 20
BYTES_A_CONTAINER: Final = 8
"""Limits of containers and remembered values: these, and one for so many bytes of the file."""
MALFORMED: Final = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RecursionError),
)
"""Errors of reading values that are not as expected."""
ADVICE: Final = "have it written again, or leave it out"


class Refused(ValueError):
    """A file holds what no such file does: more than plain values, or far more than its size."""


def content_of(path: Path, kind: str) -> bytes:
    """Return the content of a file, a ``kind`` such as ``flight recorder dump`` for the error.

    Raises InputError where it cannot be read, or is larger than any such file.
    """
    try:
        with path.open("rb") as file:
            # To read up to a limit would take that much memory for the smallest file.
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= MOST_BYTES else b""
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})") from error
    if size > MOST_BYTES:
        raise InputError(path, f"larger than any {kind}; {ADVICE}")
    return data


def problem(error: Exception, kind: str) -> str:
    """Return what is wrong with a file that is read as a ``kind``, given one of `MALFORMED`."""
    why = f": {error}" if isinstance(error, Refused) else ""
    return f"is not a {kind}{why}"


class Allowance:
    """Bytes that may still be made of a file of a size."""

    def __init__(self, size: int) -> None:
        self._left = FREE_BYTES + MOST_RATIO * size

    def spend(self, size: int) -> None:
        """Count so many bytes; raises Refused where that is more than is left."""
        self._left -= size
        if self._left < 0:
            raise Refused(f"its content unfolds to over {MOST_RATIO} times its size; {ADVICE}")


def plain_pickle(data: bytes, most: int = 0) -> Any:
    """Return the dicts, lists, tuples, texts and numbers that a pickle holds.

    ``most`` is the largest number of opcodes; `MOST_OPCODES` by default. Raises Refused for one
    that holds more, or too much, another of `MALFORMED` for what is not a pickle.
    """
    machine = _Machine(data)
    opcodes = machine.opcodes
    try:
        for _ in range(most or MOST_OPCODES):
            at = machine.at
            code = data[at]
            if code == _STOP:
                return machine.stack.pop()
            form, run = opcodes[code]
            machine.at = at + 1 + form.size
            run(*form.unpack_from(data, at + 1))
    except struct.error as error:
        raise ValueError("cut short") from error
    raise Refused(f"it holds over {most or MOST_OPCODES:,} values (at byte {machine.at}); {ADVICE}")


_STOP: Final = ord(".")
_MOST_BYTES_OF_NUMBER: Final = 128
"""Longer numbers take long to write, and may be referred to many times."""
_MADE: Final[dict[str, Callable[[], Any]]] = {
    **{"}": dict, "]": list, ")": tuple, "N": lambda: None},
    **{"\x88": lambda: True, "\x89": lambda: False},
}
_FILLED: Final[dict[str, tuple[type, int]]] = {
    **{"\x85": (tuple, 1), "\x86": (tuple, 2), "\x87": (tuple, 3), "t": (tuple, 0)},
    **{"a": (list, 1), "e": (list, 0), "s": (dict, 2), "u": (dict, 0)},
}
"""Containers that opcodes make or fill: with so many items, or with those since the last mark."""
_SIZED: Final[dict[str, tuple[str, type]]] = {
    **{"\x8c": ("<B", str), "X": ("<I", str), "\x8d": ("<Q", str)},
    **{"C": ("<B", bytes), "B": ("<I", bytes), "\x8e": ("<Q", bytes)},
    **{"\x8a": ("<B", int), "\x8b": ("<I", int)},
}
"""Forms of the size of texts, bytes and long numbers, and which of them follows."""


class _Machine:
    """Interpreter of opcodes.

    Attributes:
        at: where the next opcode is.
        stack: of what has been made since the last mark that is still open.
        opcodes: the form of the argument of each, and what it does.
    """

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self.stack: list[Any] = []
        self._data = data
        self._below: list[list[Any]] = []  # Stacks below each open mark, as in `pickle` itself.
        self._memo: dict[int, Any] = {}
        self._may_make = FREE_CONTAINERS + len(data) // BYTES_A_CONTAINER
        known: dict[str, tuple[str, Callable[..., object]]] = {
            **{"K": ("<B", self._push), "M": ("<H", self._push), "J": ("<i", self._push)},
            **{"G": (">d", self._push), "h": ("<B", self._get), "j": ("<I", self._get)},
            **{"q": ("<B", self._put), "r": ("<I", self._put), "\x94": ("", self._put)},
            **{"\x80": ("<B", id), "\x95": ("<Q", id), "(": ("", self._mark)},  # Protocol, frame.
            **{code: (form, partial(self._sized, of)) for code, (form, of) in _SIZED.items()},
            **{code: ("", partial(self._make, of)) for code, of in _MADE.items()},
            **{code: ("", partial(self._fill, *of)) for code, of in _FILLED.items()},
        }
        refused = "", self._refuse
        opcodes = (known.get(chr(code), refused) for code in range(256))
        self.opcodes = [(struct.Struct(form), run) for form, run in opcodes]

    def _refuse(self) -> None:
        import pickletools

        code = chr(self._data[self.at - 1])
        name = next((each.name for each in pickletools.opcodes if each.code == code), "")
        if not name:
            raise ValueError("not a pickle")
        raise Refused(f"it holds more than plain values ({name}), which are not read")

    def _count(self) -> None:
        """Count a container or a remembered value: each takes up to a hundred bytes."""
        self._may_make -= 1
        if self._may_make < 0:
            held = "more containers than its size allows"
            raise Refused(f"it holds {held} (at byte {self.at}); {ADVICE}")

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _make(self, of: Callable[[], Any]) -> None:
        self._count()
        self.stack.append(of())

    def _get(self, key: int) -> None:
        self.stack.append(self._memo[key])

    def _put(self, key: int | None = None) -> None:
        self._count()
        self._memo[len(self._memo) if key is None else key] = self.stack[-1]

    def _mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _sized(self, kind: type, size: int) -> None:
        """Push a text, bytes or a long number of so many bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise ValueError("cut short")
        if kind is int and size > _MOST_BYTES_OF_NUMBER:
            held = f"a number of over {8 * _MOST_BYTES_OF_NUMBER:,} bits"
            raise Refused(f"it holds {held} (at byte {start}); {ADVICE}")
        value: Any = self._data[start : self.at]
        if kind is int:
            value = int.from_bytes(value, "little", signed=True)
        self.stack.append(str(value, "utf-8", "surrogatepass") if kind is str else value)

    def _fill(self, kind: type, count: int) -> None:
        """Make a tuple, or put items into the list or the dict below them."""
        items = self.stack[-count:] if count else self.stack
        if count:
            del self.stack[-count:]
        else:
            self.stack = self._below.pop()
        if kind is tuple:
            self._count()
            self.stack.append(tuple(items))
            return
        target = self.stack[-1]
        found = type(target)
        if found is not kind:
            raise ValueError(f"no {kind.__name__}")
        if kind is list:
            target.extend(items)
            return
        # Keys that a dict finds at once: others may hash for ever, or all to the same.
        for key in items[::2]:
            if type(key) is not str and (type(key) is not int or abs(key) >= sys.hash_info.modulus):
                raise ValueError("no dict by text or number")
        target.update(zip(items[::2], items[1::2], strict=True))
