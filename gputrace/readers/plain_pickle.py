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
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError

MOST_BYTES: Final = 1 << 28
"""Largest file that is read."""
MOST_OPCODES: Final = 1 << 24
"""Opcodes of a pickle. 20,000 collectives take about 2 million, 250,000 allocations 15 million."""
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


_Opcode = Callable[[int], int]


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


def plain_pickle(data: bytes) -> Any:
    """Return the dicts, lists, tuples, texts and numbers that a pickle holds.

    Raises Refused for one that holds more, or too much, another of `MALFORMED` for what is not a
    pickle.
    """
    machine, at = _Machine(data), 0
    run = machine.opcodes
    try:
        for _ in range(MOST_OPCODES):
            code = data[at]
            if code == _STOP:
                return machine.stack.pop()
            at = run[code](at + 1)
    except struct.error as error:
        raise ValueError("cut short") from error
    raise Refused(f"it holds over {MOST_OPCODES:,} values (at byte {at}); {ADVICE}")


_STOP: Final = ord(".")
_MOST_BYTES_OF_NUMBER: Final = 128
"""Longer numbers take long to write, and may be referred to many times."""
_NEW: Final[dict[bytes, Callable[[], Any]]] = {
    b"}": dict,
    b"]": list,
    b")": tuple,
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
}
_NUMBERS: Final = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_GETS: Final = {b"h": "<B", b"j": "<I"}
_PUTS: Final = {b"q": "<B", b"r": "<I"}
_SIZED: Final[dict[bytes, tuple[str, type]]] = {
    **{b"\x8c": ("<B", str), b"X": ("<I", str), b"\x8d": ("<Q", str)},
    **{b"C": ("<B", bytes), b"B": ("<I", bytes), b"\x8e": ("<Q", bytes)},
    **{b"\x8a": ("<B", int), b"\x8b": ("<I", int)},
}
"""Texts, bytes and long numbers: the form of their size, and what they are."""
_FILLED: Final[dict[bytes, tuple[type, int]]] = {
    **{b"\x85": (tuple, 1), b"\x86": (tuple, 2), b"\x87": (tuple, 3), b"t": (tuple, 0)},
    **{b"a": (list, 1), b"e": (list, 0), b"s": (dict, 2), b"u": (dict, 0)},
}
"""Containers that opcodes make or fill: with this many items, or those since the last mark."""


class _Machine:
    """Interpreter of opcodes: functions of the place after the opcode that return the next one's.

    Attributes:
        stack: of what has been made since the last mark that is still open.
    """

    def __init__(self, data: bytes) -> None:
        self.stack: list[Any] = []
        self._data = data
        self._below: list[list[Any]] = []  # Stacks below each open mark, as in `pickle` itself.
        self._memo: dict[int, Any] = {}
        self._may_make = FREE_CONTAINERS + len(data) // BYTES_A_CONTAINER
        known: dict[bytes, _Opcode] = {
            **{code: self._new(make) for code, make in _NEW.items()},
            **{code: self._number(form) for code, form in _NUMBERS.items()},
            **{code: self._get(form) for code, form in _GETS.items()},
            **{code: self._put(form) for code, form in _PUTS.items()},
            **{code: self._sized(*of) for code, of in _SIZED.items()},
            **{code: self._fill(*of) for code, of in _FILLED.items()},
            **{b"(": self._mark, b"\x94": self._memoize},
            **{b"\x80": lambda at: at + 1, b"\x95": lambda at: at + 8},  # Protocol, frame.
        }
        self.opcodes = [known.get(bytes((code,)), self._refuse) for code in range(256)]

    def _refuse(self, at: int) -> int:
        import pickletools

        code = chr(self._data[at - 1])
        name = next((each.name for each in pickletools.opcodes if each.code == code), "")
        if not name:
            raise ValueError("not a pickle")
        raise Refused(f"it holds more than plain values ({name}), which are not read")

    def _count(self, at: int) -> int:
        """Count a container or a remembered value: each takes up to a hundred bytes."""
        self._may_make -= 1
        if self._may_make < 0:
            raise Refused(f"it holds more containers than its size allows (at byte {at}); {ADVICE}")
        return at

    def _new(self, make: Callable[[], Any]) -> _Opcode:
        def push(at: int) -> int:
            self.stack.append(make())
            return self._count(at)

        return push

    def _number(self, form: str) -> _Opcode:
        data, read = self._data, struct.Struct(form)

        def push(at: int) -> int:
            self.stack.append(read.unpack_from(data, at)[0])
            return at + read.size

        return push

    def _get(self, form: str) -> _Opcode:
        data, read, memo = self._data, struct.Struct(form), self._memo

        def push(at: int) -> int:
            self.stack.append(memo[read.unpack_from(data, at)[0]])
            return at + read.size

        return push

    def _put(self, form: str) -> _Opcode:
        data, read, memo = self._data, struct.Struct(form), self._memo

        def keep(at: int) -> int:
            memo[read.unpack_from(data, at)[0]] = self.stack[-1]
            return self._count(at + read.size)

        return keep

    def _memoize(self, at: int) -> int:
        self._memo[len(self._memo)] = self.stack[-1]
        return self._count(at)

    def _sized(self, form: str, kind: type) -> _Opcode:
        data, read = self._data, struct.Struct(form)

        def push(at: int) -> int:
            start = at + read.size
            end: int = start + read.unpack_from(data, at)[0]
            text = data[start:end]
            if end > len(data):
                raise ValueError("cut short")
            if kind is int:
                if len(text) > _MOST_BYTES_OF_NUMBER:
                    bits = 8 * _MOST_BYTES_OF_NUMBER
                    raise Refused(
                        f"it holds a number of over {bits:,} bits (at byte {at}); {ADVICE}"
                    )
                self.stack.append(int.from_bytes(text, "little", signed=True))
            else:
                self.stack.append(str(text, "utf-8", "surrogatepass") if kind is str else text)
            return end

        return push

    def _mark(self, at: int) -> int:
        self._below.append(self.stack)
        self.stack = []
        return at

    def _fill(self, kind: type, count: int) -> _Opcode:
        """Make a tuple, or put items into the list or the dict below them."""

        def fill(at: int) -> int:
            items = self.stack[-count:] if count else self.stack
            if count:
                del self.stack[-count:]
            else:
                self.stack = self._below.pop()
            if kind is tuple:
                self.stack.append(tuple(items))
                return self._count(at)
            target = self.stack[-1]
            found = type(target)
            if found is not kind:
                raise ValueError(f"no {kind.__name__}")
            if kind is list:
                target.extend(items)
                return at
            keys = items[::2]
            # Keys that a dict finds at once: others may hash for ever, or all to the same.
            if not all(
                type(key) is str or (type(key) is int and abs(key) < sys.hash_info.modulus)
                for key in keys
            ):
                raise ValueError("no dict by text or number")
            target.update(zip(keys, items[1::2], strict=True))
            return at

        return fill
