"""Watch for how recorded processes end, which are no children of the recorder.

A process that writes into the recording's folder gets a pidfd when its first file appears there.
When it has ended, its exit status is that of the zombie in /proc or, once its parent has read it,
what the pidfd knows (PIDFD_GET_INFO, from Linux 6.15 on). What is not seen
stays unknown.

The file is a program, too: `python -I -S FILE FOLDER`, so it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_OF_A_PROCESS: Final = re.compile(r"(.+)\.(\d+)(?:[-.]\d+)?(?:~\d+)?\.(?:spool|host)")
_FILE: Final = "processes.exits"
_CREATED_OR_MOVED: Final = 0x180
"""IN_CREATE and IN_MOVED_TO."""
_WITHOUT_INOTIFY_MS: Final = 1000
_INFO: Final = struct.Struct("QQ11Ii")
"""struct pidfd_info: what is known, cgroup, pids and users, exit status."""
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_HAS_EXIT: Final = 1 << 3
_PATIENCE_S: Final = 5.0


class ExitWatch:
    """Watch of one recording's processes on this machine, in a process of its own.

    Threads of the recorder would get signals that are meant for its program.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start to watch; without room for another process, ends stay unknown."""
        words = [sys.executable, "-I", "-S", __file__, str(self._folder.absolute())]
        kept = {n: text for n, text in os.environ.items() if not n.startswith("GPUTRACE_")}
        # In a session of its own: what is typed at the terminal is for the program.
        with suppress(OSError):
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=kept,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Have it written down what has ended until now."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class _Watcher:
    """Watch, as the process of an `ExitWatch`, until the input ends."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._host = folder, os.uname().nodename
        self._open: dict[int, int] = {}
        """Pid by pidfd."""
        self._seen: set[int] = set()
        self._poll = select.poll()

    def run(self) -> None:
        """Write a line for each process that ends: pid, nanoseconds, code, host."""
        libc = ctypes.CDLL(None)
        created = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if created >= 0:
            libc.inotify_add_watch(created, os.fsencode(self._folder), _CREATED_OR_MOVED)
            self._poll.register(created, select.POLLIN)
        self._poll.register(0, select.POLLIN)
        goes_on = True
        # A full disk, or no folder any more: ends stay unknown.
        with suppress(OSError), (self._folder / _FILE).open("a", buffering=1) as output:
            while goes_on:
                self._meet()
                for file, _ in self._poll.poll(None if created >= 0 else _WITHOUT_INOTIFY_MS):
                    if file == created:
                        os.read(created, 1 << 16)
                    elif file == 0:
                        goes_on = False
                    else:
                        pid, now = self._open[file], time.time_ns()
                        if (code := _exit_code(pid, file)) is not None:
                            output.write(f"{pid} {now} {code} {self._host}\n")
                        self._poll.unregister(file)
                        self._seen.discard(self._open.pop(file))
                        os.close(file)

    def _meet(self) -> None:
        """Open pidfds of the processes that have begun to write."""
        for path in self._folder.glob("*"):
            match = _OF_A_PROCESS.fullmatch(path.name)
            if match is None or match[1] != self._host or int(match[2]) in self._seen:
                continue
            pid = int(match[2])
            self._seen.add(pid)
            # A process of a container may have the number of another one here.
            with suppress(OSError):
                if b"GPUTRACE_DIR=" in Path(f"/proc/{pid}/environ").read_bytes():
                    file = os.pidfd_open(pid)
                    self._open[file] = pid
                    self._poll.register(file, select.POLLIN)


def _exit_code(pid: int, file: int) -> int | None:
    """Return the exit code of a process that has ended, -N for signal N; None if it is unknown."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":
            return os.waitstatus_to_exitcode(int(fields[49]))
    with suppress(OSError):
        asked = _INFO.pack(_HAS_EXIT, *[0] * 13)
        known, *_, status = _INFO.unpack(fcntl.ioctl(file, _GET_INFO, asked))
        if known & _HAS_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def read_exits(folder: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Return when processes ended (nanoseconds of CLOCK_REALTIME) and how, by host and pid."""
    exits: dict[tuple[str, int], tuple[int, int]] = {}
    with suppress(OSError):
        for line in (folder / _FILE).read_text(errors="replace").splitlines():
            with suppress(ValueError):  # The disk was full.
                pid, at, code, host = line.split(" ", 3)
                exits[host, int(pid)] = int(at), int(code)
    return exits


if __name__ == "__main__":
    _Watcher(Path(sys.argv[1])).run()
