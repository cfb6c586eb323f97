"""Figures of Linux about the processes that a benchmark started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def folder_of(pid: int) -> Path:
    """Return the folder of a process in /proc; those of its threads are in its ``task``."""
    return Path("/proc", str(pid))


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    children = (folder_of(pid) / "task" / str(pid) / "children").read_text().split()
    found = [int(child) for child in children]
    return [*found, *(below for child in found for below in descendants(child))]


def name_of(process: Path) -> str:
    """Return the name of a process or a thread."""
    return (process / "comm").read_text().strip()


def cpu_s(process: Path) -> float:
    """User and system time of a process, with threads that have ended, or of a thread."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return _TICK_S * (int(fields[11]) + int(fields[12]))


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return _PAGE * int((folder_of(pid) / "statm").read_text().split()[1])


def collector_s(pid: int) -> float:
    """Processor time of the collector's thread in a process."""
    threads = (folder_of(pid) / "task").iterdir()
    return sum(cpu_s(thread) for thread in threads if name_of(thread) == "gputrace")
