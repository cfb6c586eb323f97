"""User-facing errors, each with its exit code on the command line.

    GputraceError
    ├── UsageError      2   the command was called wrongly
    ├── InputError      3   a trace cannot be read
    ├── MissingError    4   this machine lacks something (nsys, a driver, an extra)
    └── PluginError     4   a plugin does not work

A message is one line: what is wrong, where, and what to do.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Final

_CONTROL: Final = (*range(32), *range(127, 160))
_SPACES: Final = "\t\n\v\f\r\x85\u2028\u2029"
_SHOWN: Final = dict.fromkeys(_CONTROL, "\ufffd") | dict.fromkeys(map(ord, _SPACES), " ")
"""Replacements of control characters, which a file may hold to manipulate a terminal."""


class ExitCode(IntEnum):
    """Exit codes of every command but ``record`` and ``arm``, which have their program's own."""

    DONE = 0
    GATE_NOT_MET = 1
    USAGE = 2
    UNREADABLE_INPUT = 3
    MISSING_HERE = 4
    DONE_IN_PART = 5
    RECORDING_FAILED = 125
    """``record`` itself failed, not its program; the code of ``timeout`` and ``docker run``."""
    INTERRUPTED = 130


class GputraceError(Exception):
    """Base of all errors that gputrace raises on purpose; its text is one line."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str = "") -> None:
        super().__init__(message.translate(_SHOWN))


class UsageError(GputraceError):
    """Error for invalid arguments of a command or function."""


class InputError(GputraceError):
    """Error for a trace that is missing, not a trace, corrupt, or has nothing to analyze."""

    exit_code = ExitCode.UNREADABLE_INPUT

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = Path(path)
        self.problem = problem.translate(_SHOWN)

    def __reduce__(self) -> tuple[type[InputError], tuple[Path, str]]:
        """Support pickling between processes."""
        return InputError, (self.path, self.problem)


class MissingError(GputraceError):
    """Error for something that the command needs and this machine lacks."""

    exit_code = ExitCode.MISSING_HERE


class PluginError(GputraceError):
    """Error for a plugin that does not work."""

    exit_code = ExitCode.MISSING_HERE


KEEP_GOING: Final = ", or read what is whole with --keep-going"
"""Advice on a file of which a part can be read."""


class ErrorPolicy:
    """Policy for recoverable errors in one file: raise them, or collect them in ``errors``."""

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.errors: list[InputError] = []

    def meet(self, error: InputError) -> None:
        """Record a recoverable error; raise it unless errors are allowed, and name the option."""
        if not self.allowed:
            raise InputError(error.path, error.problem + KEEP_GOING)
        self.errors.append(error)


STOP: Final = ErrorPolicy()
"""Policy that raises every error."""
