"""Names of kernels as people read them."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import cache, partial
from typing import Any, Final

LONGEST_NAME: Final = 1 << 14
"""Letters of a name that are read; those of real kernels, templates and all, are some thousand."""
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_TOKEN: Final = re.compile(r"S[0-9A-Z]*_|S[tabsiod]|T[0-9]*_|D[A-Za-z]|[A-Za-z]")
"""What is between the words of a mangled name: references to earlier parts, types, letters."""
_OPENS: Final = "NILXJZ"
_ANONYMOUS: Final = "_GLOBAL__N_"
_LITERAL: Final = re.compile(r"n?([0-9]*)[0-9a-f]*E")


def bounded(name: str) -> str:
    """A name as readers give it: all that looks at names takes time in proportion to them."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def demangle(name: str) -> str:
    """A C++ name (Itanium ABI) in clear; others as they are, and all without libstdc++."""
    library = _library()
    if library is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    pointer = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not pointer or status.value:
        return name
    try:
        return ctypes.string_at(pointer).decode("utf-8", "replace")
    finally:
        _free()(pointer)


def short(demangled: str) -> str:
    """The function's own name, without return type, namespaces, template and call arguments."""
    if demangled.startswith("_Z"):
        return _last_of_mangled(demangled)
    depth, end = 0, len(demangled)
    for index, character in enumerate(demangled):
        if character == "<" and not demangled.startswith("<unnamed>", index):
            if depth == 0:
                end = index
                break
            depth += 1
        if character == "(" and not demangled.startswith("(anonymous namespace)", index):
            end = index
            break
    head = demangled[:end].strip()
    return head.rsplit("::", 1)[-1].rsplit(" ", 1)[-1] or demangled


def words_of_mangled(name: str) -> list[str]:
    """The words of a mangled name, and its template arguments that are numbers, in order.

    References to earlier parts are left out, as is what follows a lambda. For names that cannot be
    made readable: libstdc++ refuses those of over 1,024 letters, and CUTLASS has such kernels.
    """
    words: list[str] = []
    inside: list[str] = []
    at, typed = 2, False
    while at < len(name):
        if inside[-1:] == ["L"] and typed:  # A literal's value, and the E that ends it.
            value = _LITERAL.match(name, at)
            if value is None:
                return words
            words += [value[1]] if name[at - 1].islower() and value[1] else []
            at, typed = value.end(), False
            inside.pop()
        elif (digits := _DIGITS.match(name, at)) is not None:
            at = digits.end() + int(digits[0])
            word = name[digits.end() : at]
            words += [] if word.startswith(_ANONYMOUS) else [word]
            typed = inside[-1:] == ["L"]
        else:
            token = _TOKEN.match(name, at)
            if token is None or token[0] == "U":
                return words
            at = token.end()
            if token[0] == "E" and inside:
                inside.pop()
            elif token[0] in _OPENS:
                inside.append(token[0])
            typed = inside[-1:] == ["L"] and token[0] != "L"
    return words


def _last_of_mangled(name: str) -> str:
    """Of a name that could not be demangled, the last part before any arguments.

    Each part is a length and so many letters.
    """
    part, at = name, 3 if name.startswith("_ZN") else 2
    while (digits := _DIGITS.match(name, at)) is not None:
        end = digits.end() + int(digits[0])
        part, at = name[digits.end() : end], end
    return part


@cache
def _library() -> Any | None:
    # Looking for it starts programs, so it is done where the usual name is not found only.
    for find in (lambda: "libstdc++.so.6", partial(ctypes.util.find_library, "stdc++")):
        try:
            name = find()
            library = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if library is not None:
            library.__cxa_demangle.restype = ctypes.c_void_p
            library.__cxa_demangle.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
            return library
    return None


@cache
def _free() -> Any:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free
