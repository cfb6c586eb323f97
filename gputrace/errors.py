"""The errors a person may see, each with the exit code of the command line.

    GputraceError
    ├── UsageError      2   the command was called wrongly
    ├── InputError      3   a trace cannot be read
    └── MissingError    4   this machine lacks something (nsys, a driver, an extra)

A message is one line: what is wrong, where, and what to do.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of every command but ``record``, which returns its child's."""

    DONE = 0
    GATE_NOT_MET = 1
    USAGE = 2
    UNREADABLE_INPUT = 3
    MISSING_HERE = 4
    DONE_IN_PART = 5
    RECORDING_FAILED = 125
    """Of ``record``, as of ``timeout`` and ``docker run``: not the program failed."""
    INTERRUPTED = 130


class GputraceError(Exception):
    """Base of all errors that gputrace raises on purpose; its text is one line."""

    exit_code = ExitCode.USAGE


class UsageError(GputraceError):
    """The command or the function was called with arguments that make no sense."""


class InputError(GputraceError):
    """A trace cannot be read: not there, not a trace, broken, or holding nothing to analyze."""

    exit_code = ExitCode.UNREADABLE_INPUT

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = Path(path)
        self.problem = problem

    def __reduce__(self) -> tuple[type[InputError], tuple[Path, str]]:
        """For pickle: files may be read in processes of their own."""
        return InputError, (self.path, self.problem)


class MissingError(GputraceError):
    """Something that the command needs is not on this machine."""

    exit_code = ExitCode.MISSING_HERE
