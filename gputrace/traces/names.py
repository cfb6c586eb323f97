"""Names of kernels as people read them."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import cache
from typing import Any, Final

_DIGITS: Final = re.compile(r"[0-9]+")


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
    for name in ("libstdc++.so.6", ctypes.util.find_library("stdc++")):
        try:
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
