"""Writes the table of CUDA's calls that gputrace/readers/nvprof_calls.txt is.

    python tests/data/make_calls.py LIBCUPTI... > gputrace/readers/nvprof_calls.txt

Each libcupti.so is asked, through cuptiGetCallbackName, what it calls each number, with no GPU.
Where several are given they must agree, and what only one of them knows is kept.
"""

from __future__ import annotations

import ctypes
import re
import sys

_DOMAINS = {2: 0, 1: 1}
"""CUPTI's domains of the runtime's and the driver's calls, and nsys's event classes for them."""
_MOST = 2048
_PLACEHOLDER = re.compile(r"cu(da)?\d+(_|$)")


def names(library: str) -> dict[tuple[int, int], str]:
    cupti = ctypes.CDLL(library)
    found = {}
    for domain, event_class in _DOMAINS.items():
        for number in range(1, _MOST):
            name = ctypes.c_char_p()
            failed = cupti.cuptiGetCallbackName(domain, number, ctypes.byref(name))
            text = (name.value or b"").decode()
            if not failed and text.startswith("cu") and not _PLACEHOLDER.match(text):
                found[event_class, number] = text
    return found


def main() -> None:
    known: dict[tuple[int, int], str] = {}
    for library in sys.argv[1:]:
        for key, name in names(library).items():
            if known.setdefault(key, name) != name:
                sys.exit(f"{library}: {key} is {name}, and was {known[key]}")
    versions = ", ".join(str(_version(library)) for library in sys.argv[1:])
    sys.stdout.write(
        "# Names that CUPTI gives to the numbers of CUDA's calls: 0 runtime or 1 driver,\n"
    )
    sys.stdout.write(f"# number, name. make_calls.py asked libcupti of API versions {versions}.\n")
    for event_class, number in sorted(known):
        sys.stdout.write(f"{event_class} {number} {known[event_class, number]}\n")


def _version(library: str) -> int:
    version = ctypes.c_uint32()
    ctypes.CDLL(library).cuptiGetVersion(ctypes.byref(version))
    return version.value


if __name__ == "__main__":
    main()
