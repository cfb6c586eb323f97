"""numpy without threads, for a process that other programs' signals come to."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from mmap import mmap
from typing import Final

_THREADS: Final = "OPENBLAS_NUM_THREADS"
_ROOM: Final = 96 << 20
"""Bytes of address space that numpy takes, and some more."""


def load_numpy() -> None:
    """Imports numpy without the threads of its linear algebra, of which there are as many as cores.

    A recorder multiplies no matrices, and they would take signals from it that are its program's.
    Raises MemoryError where there is no room: OpenBLAS would end the process, and say so its way.
    """
    if "numpy" in sys.modules:
        return
    try:
        mmap(-1, _ROOM).close()
    except OSError as error:
        raise MemoryError from error
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before
