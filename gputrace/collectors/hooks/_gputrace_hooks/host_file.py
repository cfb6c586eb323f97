"""The file that the events of a process are written to: GPUTRACE_DIR/HOST.PID.host.

It is a header of 32 bytes (magic, version, pid, CLOCK_REALTIME, CLOCK_MONOTONIC, both of when the
process began or was forked), then chunks as in spool files: a tag of four letters, the length of
what follows in bytes, and that; all of it little-endian, times in nanoseconds of CLOCK_REALTIME.

FULL  u64 time, u64 events, u32 errno, u32 0: the first chunk, zeros until writing has failed
EVNT  records of 32 bytes: u64 start, u64 end, u32 thread, u32 name, u16 kind, u16 rank, u32 number
      (of a sample, the name is the user's line, the number that of the innermost line's name)
NAME  u32 id, text          INFO  "key=value"          CLOK  u64 realtime, monotonic, monotonic_raw

gputrace/collectors/spool/host_events.py reads it; keep the two alike.

In a ring a new file, HOST.PID~NUMBER.host, follows after each GPUTRACE_SEGMENT_NS; of the older
ones the last GPUTRACE_SEGMENTS stay. Each holds the names of its events.
"""

import os
import sys
import time
from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit
from struct import pack

from . import FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

MAGIC = b"GPUTRHST"
VERSION = 1

TOO_LARGE = 5000
"""In place of errno: the recording has become as large as it may."""
_PLACE = 40
"""Offset of the body of FULL: after the header, a tag and a length."""
_HIGH = 200
_NOT_OPEN = 9
"""EBADF."""
_TOO_LONG = 27
"""EFBIG."""
_HAS_REST = 4
"""CO_VARARGS."""
_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
    "OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMI_SIZE SLURM_PROCID SLURM_NTASKS SLURM_LOCALID "
    "PMIX_RANK PMI_LOCAL_RANK MPI_LOCALRANKID HOROVOD_RANK HOROVOD_SIZE CUDA_VISIBLE_DEVICES "
    "TORCHELASTIC_RESTART_COUNT"
)

if sys.version_info >= (3, 7):
    time_ns = time.time_ns
else:

    def time_ns() -> int:
        """Return nanoseconds of CLOCK_REALTIME."""
        return int(time.time() * 1e9)


def is_handlers(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised it, which Python ran while we were at
    work.

    A handler is known by its code, or, where it has made way for another meanwhile, by what Python
    gives it: the number of the signal and the frame that it interrupts.
    """
    trace, interrupted, codes = error.__traceback__, None, _codes_of_handlers()
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in codes or (interrupted and _got_frame(frame, interrupted)):
            return True
        trace, interrupted = trace.tb_next, frame
    return False


def _got_frame(frame: "FrameType", interrupted: "FrameType") -> bool:
    """Return whether a number and the interrupted frame are arguments of a call, side by side."""
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _HAS_REST:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return any(isinstance(n, int) and f is interrupted for n, f in zip(given, given[1:]))


def _codes_of_handlers() -> "set[object]":
    import _signal  # type: ignore[import-not-found]

    codes: set[object] = set()
    for number in range(1, _signal.NSIG):
        handler = _signal.getsignal(number)
        if not callable(handler):
            continue
        handler = getattr(handler, "func", handler)  # of a functools.partial
        if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
            handler = type(handler).__call__
        codes.add(getattr(getattr(handler, "__func__", handler), "__code__", None))
    return codes - {None}


class Suppress:
    """Suppress errors of these types, as contextlib's does, but not what a signal handler of the
    program raised.

    Not for what Python calls after a fork: handlers run at calls of these methods, too, and what
    one raises there is printed and dropped.
    """

    def __init__(self, *kinds: "type[Exception]") -> None:
        self.kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: "Any", error: "Any", __: "Any") -> bool:
        return isinstance(error, self.kinds) and not is_handlers(error)


class HostFile:
    """The file of one process; it is made when it is first opened, and holds whole chunks alone."""

    def __init__(self, pid: int, began: "tuple[int, int]") -> None:
        """``began`` is when the process did, on CLOCK_REALTIME and CLOCK_MONOTONIC."""
        self.pid = pid
        self.held = 0
        self._began = began
        self._path = ""
        self._file = -1
        self._identity = (0, 0)
        self._tried = ""
        self._segment = 0

    def open(self) -> None:
        """Open the file unless it is open; a new one begins with the process's identity."""
        if self._is_open():
            return
        self._identity = (0, 0)
        try:
            host = os.uname().nodename
            if self._path:
                self._open_as(self._path, 0)
            else:
                self._create(host)
            if not os.fstat(self._file).st_size:
                self.append(_beginning(self.pid, self._began, host))
        except BaseException:
            # Begun again next time: without its beginning it is no file of ours.
            if self._identity != (0, 0):
                self._identity = (0, 0)
                os.close(self._file)
            raise

    def rotate(self, keep: int) -> None:
        """Continue in a new file, which appears together with its header.

        Where none can be made, the one that is open goes on.
        """
        start = self._path[: -len(".host")].partition("~")[0]
        if self._segment >= keep:
            _remove(_segment(start, self._segment - keep))
        path, before = _segment(start, self._segment + 1), (self._file, self._identity, self._path)
        try:
            self._open_as(f"{path}.new", os.O_CREAT | os.O_TRUNC)
            self.append(_beginning(self.pid, both_clocks(), os.uname().nodename))
            os.rename(self._path, path)
        except BaseException as error:
            begun = self._file
            self._file, self._identity, self._path = before
            if begun != before[0]:
                os.close(begun)
            _remove(f"{path}.new")
            if not isinstance(error, OSError) or is_handlers(error):
                raise
            return
        self._path = path
        self._segment += 1
        os.close(before[0])

    def append(self, data: bytes, holds: int = 0) -> None:
        """Append complete chunks to the open file, all or none of them.

        ``held`` is ``holds`` then, whatever a signal handler does next.
        """
        size = os.fstat(self._file).st_size
        try:
            assert_fits(size + len(data))
            while data:
                data = data[os.write(self._file, data) :]
            self.held = holds
        except BaseException:
            # The disk is full, say, or a signal came: leave whole chunks.
            os.ftruncate(self._file, size)
            raise

    def write_stop(self, stopped: int, lost: int, errno: int) -> None:
        """Write in FULL when writing ended, and how many events are lost, which takes no space."""
        import fcntl

        if self._is_open() and os.fstat(self._file).st_size > _PLACE:
            # Appending would override the place.
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_APPEND)
            data = pack("<QQI4x", stopped, lost, errno)
            assert_fits(_PLACE + len(data))
            os.pwrite(self._file, data, _PLACE)

    def close(self) -> None:
        """Close the parent's file in a forked child."""
        if self._is_open():
            os.close(self._file)

    def _is_open(self) -> bool:
        # The program may have closed all descriptors and opened its own.
        try:
            status = os.fstat(self._file)
        except OSError as error:
            if error.errno != _NOT_OPEN and is_handlers(error):
                raise
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def _create(self, host: str) -> None:
        folder = os.environ.get("GPUTRACE_DIR") or FOLDER
        start = os.path.join(folder, f"{host}.{self.pid}")
        # One that is there is from a program that this process ran before it called exec, unless a
        # signal interrupted us once it was made: then it is empty.
        for part in ("", ".1", ".2", ".3"):
            path = f"{start}{part}.host"
            flags = os.O_CREAT if path == self._tried else os.O_CREAT | os.O_EXCL
            self._tried = path
            try:
                self._open_as(path, flags)
            except FileExistsError:
                continue
            if not os.fstat(self._file).st_size:
                return
            os.close(self._file)
        raise OSError("no name is left")

    def _open_as(self, path: str, flags: int) -> None:
        self._file = open_high(path, flags)
        status = os.fstat(self._file)
        self._identity = (status.st_dev, status.st_ino)
        self._path = path


def assert_fits(end: int) -> None:
    """Raise OSError for a file that would end beyond the limit on the size of files.

    To write there would send SIGXFSZ, which is for the program's own files, and may end it.
    """
    limit = getrlimit(RLIMIT_FSIZE)[0]
    if limit != RLIM_INFINITY and end > limit:
        raise OSError(_TOO_LONG, os.strerror(_TOO_LONG))


def _segment(start: str, number: int) -> str:
    return f"{start}~{number:06d}.host" if number else f"{start}.host"


def _remove(path: str) -> None:
    with Suppress(OSError):
        os.unlink(path)


def folder_bytes() -> int:
    """Return the bytes that all processes of the recording have written; 0 if unknown."""
    total = 0
    with Suppress(OSError):
        for entry in os.scandir(os.environ.get("GPUTRACE_DIR") or FOLDER):
            total += entry.stat(follow_symlinks=False).st_size
    return total


def open_high(path: str, flags: int) -> int:
    """Open a file for appending, with a number that no program counts on."""
    always = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    low = os.open(path, always | flags, 0o600)
    if flags & os.O_CREAT:
        # Whatever files of the program are to be.
        os.fchmod(low, 0o600)
    return move_high(low)


def move_high(low: int) -> int:
    """Give a descriptor a number that no program counts on; where there is none, it stays."""
    import fcntl

    try:
        # Out of the way of programs that count on low numbers.
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError as error:
        if is_handlers(error):
            os.close(low)
            raise
        return low
    os.close(low)
    return high


def both_clocks() -> "tuple[int, int]":
    """Return the present time in nanoseconds of CLOCK_REALTIME and of CLOCK_MONOTONIC."""
    return time_ns(), _clock_ns(time.CLOCK_MONOTONIC)


def _beginning(pid: int, began: "tuple[int, int]", host: str) -> bytes:
    header = pack("<8sIIQQ", MAGIC, VERSION, pid, *began)
    known = [(name, os.environ[name]) for name in _VARIABLES.split() if name in os.environ]
    script = (getattr(sys, "argv", None) or [""])[0]
    said = [("host", host), ("python", sys.version.split()[0]), ("script", script), *known]
    return b"".join([header, chunk(b"FULL", bytes(24)), *(info(*pair) for pair in said)])


def chunk(tag: bytes, body: bytes) -> bytes:
    """Return a chunk in the form of the file."""
    return pack("<4sI", tag, len(body)) + body


def info(key: str, value: object) -> bytes:
    """Return the chunk of a key-value pair about the process."""
    return chunk(b"INFO", f"{key}={value}".encode("utf-8", "replace"))


def clocks() -> bytes:
    """Return the chunk of a reading of three clocks."""
    others = _clock_ns(time.CLOCK_MONOTONIC), _clock_ns(time.CLOCK_MONOTONIC_RAW)
    return chunk(b"CLOK", pack("<QQQ", time_ns(), *others))


def _clock_ns(clock: int) -> int:
    return int(time.clock_gettime(clock) * 1e9)
