"""Readable kernel names: shortening, and demangling that is safe against untrusted names.

A component of a C++ name may refer to an earlier one twice, and the next one to that: 260
characters expand to eight gigabytes, and the library cannot be interrupted. Names that might grow
are therefore demangled in a process with limited memory and CPU time; where it fails, they stay
mangled.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from typing import Any, Final

_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_TOKEN: Final = re.compile(r"S[0-9A-Z]*_|S[tabsiod]|T[0-9]*_|D[A-Za-z]|[A-Za-z]")
"""Tokens between the words of a mangled name: substitutions, types, single letters."""
_OPENS: Final = "NILXJZ"
_ANONYMOUS: Final = "_GLOBAL__N_"
_ARGUMENTS: Final = re.compile(r"<(?!unnamed>)|\((?!anonymous namespace\))")
_LITERAL: Final = re.compile(r"n?([0-9]*)[0-9a-f]*E")


def demangle(name: str) -> str:
    """Demangle a C++ name (Itanium ABI); return others, or all without libstdc++, unchanged."""
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
        library.free(pointer)


def short(demangled: str) -> str:
    """Return the function name without return type, namespaces, template and call arguments."""
    if demangled.startswith("_Z"):
        # Could not be demangled: the last component, each a length and so many characters.
        part, at = demangled, 3 if demangled.startswith("_ZN") else 2
        while (digits := _DIGITS.match(demangled, at)) is not None:
            at = digits.end() + int(digits[0])
            part = demangled[digits.end() : at]
        return part
    # Up to the first bracket.
    head = _ARGUMENTS.split(demangled, maxsplit=1)[0].strip()
    return head.rsplit("::", 1)[-1].rsplit(" ", 1)[-1] or demangled


def words_of_mangled(name: str) -> list[str]:
    """Return the identifiers and the numeric template arguments of a mangled name, in order.

    Substitutions and everything after a lambda are omitted. Used for names that cannot be
    demangled: libstdc++ rejects those of over 1,024 characters, and CUTLASS has such kernels.
    """
    words: list[str] = []
    inside: list[str] = []
    at, typed = 2, False
    while at < len(name):
        if inside[-1:] == ["L"] and typed:  # The value of a literal and its closing E.
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


@cache
def _library() -> Any | None:
    # find_library starts subprocesses, so try the usual name first.
    for name in ("libstdc++.so.6", ""):
        with suppress(OSError):
            if not name:
                from ctypes.util import find_library

                name = find_library("stdc++") or "libstdc++.so"
            library = ctypes.CDLL(name)
            library.__cxa_demangle.restype = ctypes.c_void_p
            library.__cxa_demangle.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
            # It brings the C library's, which frees what it allocates.
            library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
            return library
    return None


_MOST_SUBSTITUTIONS: Final = 8
"""Substitutions allowed in this process; each ends in an underscore and may double the text."""
MEMORY: Final = 1 << 30
"""Bytes of address space of the process."""
SECONDS: Final = 5
"""CPU seconds of the process; real names take microseconds."""
_MOST_FAILURES: Final = 3
"""Failures after which the remaining names stay mangled."""

PROGRAM: Final = """
import json, resource, sys
sys.path[:] = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]),) * 2)
from gputrace.model.names import demangle
from gputrace.sanitize import bounded
for name in json.load(sys.stdin):
    print(json.dumps(bounded(demangle(name))), flush=True)
"""


def demangle_all(names: Collection[str]) -> dict[str, str]:
    """Return the demangled form of each name; unchanged if there is none, or it is too long."""
    growing = [
        name for name in names if name.startswith("_Z") and name.count("_") > _MOST_SUBSTITUTIONS
    ]
    clear = {name: demangle(name) for name in set(names).difference(growing)}
    done: list[str] = []
    for _ in range(_MOST_FAILURES):
        done += _demangle_limited(growing[len(done) :])
        # The name that it failed on stays mangled.
        done += growing[len(done) : len(done) + 1]
    return clear | dict(zip(growing, done + growing[len(done) :], strict=True))


def _demangle_limited(names: list[str]) -> list[str]:
    """Demangle the names in a limited process, up to the first that exceeds its limits."""
    if not names:
        return names
    import subprocess

    process = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, json.dumps(sys.path), str(MEMORY), str(SECONDS)],
        input=json.dumps(names),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.endswith('"')]
