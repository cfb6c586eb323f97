"""Guard against what no input may do: crash, hang, take memory beyond reason, complain in more
than one line, or touch anything but the folders that are its own.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from gputrace.errors import ExitCode, GputraceError
from gputrace.model import names

LONGEST_S: Final = 10.0
"""Of processor time: a machine with other work to do is not the input's fault."""
MEMORY: Final = 200 << 20
MEMORY_PER_BYTE: Final = 10
"""What an input may take in all: so much, and so many times its size."""
_CODES: Final = (ExitCode.USAGE, ExitCode.UNREADABLE_INPUT, ExitCode.MISSING_HERE)
_CONTROL: Final = {chr(code) for code in (*range(32), *range(127, 160))}

_STATUS: Final = os.open("/proc/self/status", os.O_RDONLY)
_HIGHEST: Final = re.compile(rb"VmHWM:\s+(\d+) kB")

_PATHS: Final = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2,
    "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1, "shutil.rmtree": 1,
}  # fmt: skip
"""Audit events that change files, and how many of their arguments are paths."""
_NEVER: Final = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "os.forkpty", "pty.spawn", "socket.connect", "socket.bind", "urllib.Request", "os.kill",
    "sqlite3.load_extension",
)  # fmt: skip
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Verdict(NamedTuple):
    """Outcome of an input."""

    kind: str
    """``read``, ``refused`` or ``failed``."""
    about: str
    """What was found, the one line, or what is wrong; inputs alike have the same."""


class Guard:
    """Watches one process for the rest of its life."""

    def __init__(self, own: Path) -> None:
        """``own`` is the folder in which files may be written."""
        self._own = str(own.resolve())
        self._memory = _peak()
        self._trespasses: list[str] = []
        self._warned: list[str] = []
        self._watching = False
        sys.addaudithook(self._audit)
        warnings.simplefilter("always")
        warnings.showwarning = self._warn  # type: ignore[assignment]
        faulthandler.register(signal.SIGPROF, all_threads=True, chain=True)

    def settle(self) -> None:
        """Takes what memory there is now for what the modules need, whatever the input."""
        with suppress(OSError):
            # Linux then counts anew what was the most.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._memory = _peak()

    def judge(self, work: Callable[[], str], size: int) -> Verdict:
        """Gives one input, of so many bytes; a hang ends the process with SIGPROF."""
        if _peak() > self._memory + MEMORY // 4:
            self.settle()  # What made the input took it, not the input.
        self._trespasses.clear()
        self._warned.clear()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
        self._watching = True
        try:
            verdict = _outcome(work)
        finally:
            self._watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        taken = _peak() - self._memory
        if taken > MEMORY + MEMORY_PER_BYTE * size:
            self.settle()
            return Verdict("failed", f"{taken >> 20} MiB of memory for {size} bytes")
        wrong = [*self._trespasses, *self._warned]
        return Verdict("failed", wrong[0]) if wrong and verdict.kind != "failed" else verdict

    def _warn(self, message: Warning | str, kind: type[Warning], *place: Any) -> None:
        where = f"{Path(place[0]).name}:{place[1]}" if len(place) > 1 else ""
        self._warned.append(f"{kind.__name__}: {message} ({where})")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event in _NEVER and not _demangles(event, arguments):
            self._trespasses.append(f"{event} {arguments[0]!r}")
        elif event in _PATHS and arguments[-1] in (None, -1):
            # Else it is named by a folder that was opened before, as rmtree does.
            self._check(event, arguments[: _PATHS[event]])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            self._check(event, arguments[:1])
        elif event == "sqlite3.connect" and b"immutable=1" not in os.fsencode(arguments[0]):
            self._check(event, (_file_of(os.fsdecode(arguments[0])),))

    def _check(self, event: str, paths: tuple[Any, ...]) -> None:
        for path in paths:
            if isinstance(path, int) or path in (":memory:", os.devnull):
                continue
            where = os.path.realpath(os.fsdecode(path))
            if not where.startswith(self._own + os.sep):
                self._trespasses.append(f"{event} {where}")


def _demangles(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return true for the one process that readers start, with limited memory and time."""
    own = [sys.executable, "-I", "-c", names.PROGRAM]
    return event == "subprocess.Popen" and list(arguments[1][:4]) == own


def _file_of(database: str) -> str:
    """The file of a database that may be named by a URI."""
    uri = urlsplit(database)
    return unquote(uri.path) if uri.scheme == "file" else database


def _outcome(work: Callable[[], str]) -> Verdict:
    try:
        return Verdict("read", work())
    except GputraceError as error:
        line = " ".join(str(error).split())
        if not line or error.exit_code not in _CODES:
            return Verdict("failed", f"exit code {error.exit_code}, message {line!r}")
        if odd := _CONTROL & set(line):
            return Verdict("failed", f"control characters {sorted(odd)} in a message")
        return Verdict("refused", line)
    except Exception as error:
        return Verdict("failed", place_of(error))


def place_of(error: BaseException) -> str:
    """An exception by its type and the innermost of our own lines: alike for alike causes."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "gputrace" in Path(frame.filename).parts] or frames
    at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere"
    return f"{type(error).__name__} at {at}: {str(error)[:200]}"


def _peak() -> int:
    """The most memory that this process ever had at once, in bytes."""
    # Not from getrusage, which tells of what started this process, too.
    found = _HIGHEST.search(os.pread(_STATUS, 4096, 0))
    return int(found[1]) << 10 if found else 0
