"""Remote control of an armed process: the socket by which ``gputrace on`` opens a window in it.

GPUTRACE_ARM names the folder of this user's armed processes, or is 1 for /tmp/gputrace-UID. In it
each Python that no armed one has started makes a folder, to which all processes below it write, as
into a ring. It listens there, as do those below it that may train, at PID.socket; PID.token has a
word to show. Modes are 0700 and 0600, and peers of another user are sent away before anything they
say is read.

A request is a line of words: the token, what to do, and numbers:

status                        only the answer
record FIRST END LIMIT_NS     record steps FIRST to END - 1, but not beyond the limit
begin LIMIT_NS                record from now on, until ``end`` or the limit
end                           close the window, or open none
write                         write all that was recorded so far

The answer is a line of ``key=value``: ``step``, how many have ended; ``state``, of cold, waiting
and recording; ``windows``, how many have ended; ``gpu``, of none (not to be recorded), unstarted
and ready; ``rank``, -1 if unknown; ``began`` and ``ended``, of the last window in nanoseconds of
CLOCK_REALTIME. Or it is ``error=`` and one word, and nothing was done.

The thread that answers waits in accept(2). Where Python would warn of it at a fork, which is where
the program has no other, it is gone for the fork; a child listens once it trains itself.
"""

import _socket
import _thread
import atexit
import os
import sys
from time import monotonic, sleep

from . import FOLDER, control, recorder, steps
from .host_file import Suppress, is_handlers, move_high, time_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_BYTES = 256
_PATIENCE_S = 0.5
"""How long a peer may take for its line, and for the answer to be taken."""
_PEER_CREDENTIALS = 17
"""SO_PEERCRED."""
_UNKNOWN_PACE_NS = 200000000
_WAITING = 64
_ALL_SIGNALS = set(range(1, 65)) - {32, 33}
"""But for the two that are the C library's own."""
_GONE_S = 0.05
_KEPT_S = 600
"""Files of processes that have ended are removed after so long, as the ring's are."""
_BETWEEN_LOOKS_S = 60
_COUNTS_THREADS = sys.version_info >= (3, 12)
"""A fork warns of threads."""
_OURS = 3
"""Threads where the program has one: it, this one and the sampler's."""
_MOST_NS = 600 * 1000000000
_RANKS = "RANK OMPI_COMM_WORLD_RANK HOROVOD_RANK PMI_RANK PMIX_RANK SLURM_PROCID LOCAL_RANK"
"""Variables of which the first that is set has the rank: within a job of Slurm, a launcher's own
comes first; the rank on its machine is better than none."""


class _Window:
    """The window that was asked for over the socket."""

    def __init__(self) -> None:
        self.until = 0.0
        """End of it at the latest, on the monotonic clock; 0 where none is open or awaited."""
        self.is_timed = False
        self.ended = 0

    def look(self) -> None:
        """Close it at its limit, and notice that its steps have ended."""
        if self.until and not self.is_timed and steps.window() == (None, None):
            self.until, self.ended = 0.0, self.ended + 1
        elif self.until and monotonic() >= self.until:
            self.close()

    def open(self, limit_ns: int, first: "int | None" = None, end: "int | None" = None) -> None:
        self.is_timed = end is None
        steps.set_window(first, end)
        if self.is_timed:
            steps.span[:] = [time_ns(), 0]
            control.capture(True)
        self.until = monotonic() + limit_ns / 1e9

    def close(self) -> None:
        if self.until:
            begun = steps.span[0]
            steps.set_window(None, None)
            steps.span[:] = [begun, time_ns()]
            control.end_capture(_UNKNOWN_PACE_NS)
            self.until, self.ended = 0.0, self.ended + 1

    def state(self) -> str:
        if not self.until:
            return "cold"
        return "waiting" if steps.window()[0] is not None else "recording"


class _Listener:
    """The socket of this process, and the thread that answers."""

    def __init__(self, folder: str) -> None:
        self.pid, self.base = os.getpid(), os.path.join(folder, str(os.getpid()))
        self.token = os.urandom(32).hex()
        self.window = _Window()
        self.leaves = self.runs = False
        self.thread = 0
        self.peer: _socket.socket | None = None
        self.remove()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.base + ".token", flags, 0o600)
        try:
            os.fchmod(file, 0o600)
            os.write(file, self.token.encode())
        finally:
            os.close(file)
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        # Nobody is to find it before it listens: a socket that refuses is taken for a dead one's.
        self.socket.bind(self.base + ".new")
        os.chmod(self.base + ".new", 0o600)
        self.socket.listen(_WAITING)
        os.rename(self.base + ".new", self.base + ".socket")
        self.socket = _socket.socket(fileno=move_high(self.socket.detach()))
        self.identity = self._identify()
        self.start()

    def remove(self) -> None:
        """Remove what this process, or one of its number, has left in the folder."""
        for ending in (".new", ".socket", ".token"):
            with Suppress(FileNotFoundError):
                os.unlink(self.base + ending)

    def start(self) -> None:
        """Start the thread, unless it runs; no signal of the program's is to reach it."""
        if self.runs or self.pid != os.getpid():
            return
        import _signal  # type: ignore[import-not-found]
        from ctypes import CDLL

        with Suppress(OSError):
            # Else the C library loads it for a thread that Python ends at the end of the process,
            # and aborts where the program has changed its root.
            CDLL("libgcc_s.so.1")
        before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            self.leaves, self.runs = False, True
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            self.runs = False
        finally:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, before)

    def stop(self, for_good: bool = False) -> None:
        """Stop the thread; returns when the system no longer counts it, or after a moment.

        ``for_good`` shuts the socket, which needs no path.
        """
        if not self.runs or self.pid != os.getpid():
            return
        self.leaves = True
        with Suppress(OSError, AttributeError):
            self.peer.shutdown(_socket.SHUT_RDWR)  # type: ignore[union-attr]
        if for_good and self.is_open():
            with Suppress(OSError):
                self.socket.shutdown(_socket.SHUT_RDWR)
        elif not for_good:
            caller = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            with Suppress(OSError):
                caller.setblocking(False)
                caller.connect(self.base + ".socket")
            caller.close()
        until = monotonic() + _GONE_S
        while monotonic() < until and not self._is_gone():
            sleep(0.0001)

    def _is_gone(self) -> bool:
        return not self.runs and not os.path.exists(f"/proc/self/task/{self.thread}")

    def close(self) -> None:
        """Close the parent's socket in a forked child."""
        if self.is_open():
            self.socket.close()
        else:
            self.socket.detach()

    def is_open(self) -> bool:
        """Return whether the descriptor is still ours: it may be a file of the program's by now."""
        with Suppress(OSError):
            return self._identify() == self.identity
        return False

    def _identify(self) -> "tuple[int, int]":
        status = os.fstat(self.socket.fileno())
        return status.st_dev, status.st_ino

    def _run(self) -> None:
        try:
            self.thread = recorder.thread_id()
            while not self.leaves and self.is_open():
                self.window.look()
                left = self.window.until - monotonic() if self.window.until else None
                self.socket.settimeout(left if left is None else max(left, 0.001))
                try:
                    file, _ = self.socket._accept()  # type: ignore[attr-defined]
                except (TimeoutError, _socket.timeout, InterruptedError, ConnectionError):
                    continue
                self.peer = peer = _socket.socket(fileno=file)
                try:
                    self._serve(peer)
                except OSError:
                    pass
                finally:
                    self.peer = None
                    peer.close()
        except Exception:
            # Closed, no descriptor or memory is left. It starts again with the next events.
            pass
        finally:
            self.runs = False

    def _serve(self, peer: "_socket.socket") -> None:
        """Answer one request of this user's."""
        from _operator import _compare_digest

        credentials = peer.getsockopt(_socket.SOL_SOCKET, _PEER_CREDENTIALS, 12)
        if int.from_bytes(credentials[4:8], sys.byteorder) != os.geteuid() or self.leaves:
            return
        until, line = monotonic() + _PATIENCE_S, b""
        while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
            peer.settimeout(max(until - monotonic(), 0.001))
            part = peer.recv(_MOST_BYTES - len(line))
            if not part or monotonic() > until:
                return
            line += part
        token, _, rest = line.partition(b" ")
        if not line.endswith(b"\n") or not _compare_digest(token, self.token.encode()):
            return
        words = rest.decode("ascii", "replace").split()
        try:
            problem = self._do(words[0], [int(word) for word in words[1:]])
        except (ValueError, IndexError, TypeError, OverflowError):
            problem = "request"
        peer.settimeout(_PATIENCE_S)
        answer = f"error={problem}" if problem else self._status()
        peer.sendall(answer.encode() + b"\n")

    def _do(self, word: str, numbers: "Sequence[int]") -> str:
        """Do what was asked for; return a word for why not, if so."""
        window = self.window
        window.look()
        if word == "record":
            first, end, limit = numbers
            if window.until:
                return "busy"
            if steps.ended() >= first:
                return "late"
            if not (first < end <= 1 << 32 and 0 < limit <= _MOST_NS):
                return "request"
            window.open(limit, first, end)
            if steps.ended() >= first and window.state() == "waiting":
                # It may have begun in the very step, or will at the end of the next: too late.
                window.close()
                return "late"
        elif word == "begin":
            (limit,) = numbers
            if window.until:
                return "busy"
            if not 0 < limit <= _MOST_NS:
                return "request"
            window.open(limit)
        elif word == "end":
            window.close()
        elif word == "write":
            recorder.write(time_ns())
            control.write()
        elif word != "status":
            return "request"
        return ""

    def _status(self) -> str:
        gpu = "none"
        if os.environ.get("GPUTRACE_LIBRARY"):
            gpu = "ready" if control.is_loaded() and control.has_context() else "unstarted"
        ranks = (os.environ.get(name, "") for name in _RANKS.split())
        rank, window = next(filter(str.isdigit, ranks), "-1"), self.window
        return (
            f"step={steps.ended()} state={window.state()} windows={window.ended} gpu={gpu} "
            f"rank={rank} began={steps.span[0]} ended={steps.span[1]}"
        )


_listeners: "list[_Listener]" = []
_looked = [0.0]


def _folder() -> str:
    return os.environ.get("GPUTRACE_DIR") or FOLDER


def is_first() -> bool:
    """Return whether this process made its folder: no armed Python has started it."""
    return os.path.basename(_folder()).startswith(f"{os.getpid()}-")


def listen_unless_worker() -> None:
    """Listen before the first step: a program may have none that the hooks know.

    What multiprocessing has started is a loader's worker until it trains.
    """
    if "--multiprocessing-fork" not in getattr(sys, "orig_argv", sys.argv):
        _listen()


def _on_step(_rank: int, _end: int) -> None:
    if not _listeners:
        _listen()


def _listen() -> None:
    if _listeners:
        return
    try:
        _listeners.append(_Listener(_folder()))
    except OSError as error:
        if is_handlers(error):
            raise
        recorder.note_failure("listening for `gputrace on`")


def _before_fork() -> None:
    if _listeners and _COUNTS_THREADS and len(os.listdir("/proc/self/task")) <= _OURS:
        _listeners[0].stop()


def _after_fork() -> None:
    # Python has counted the threads by now.
    for listener in _listeners:
        listener.start()


def _go_on() -> None:
    if _listeners and not _listeners[0].is_open():
        # The program has closed all files that it did not open.
        _listeners.pop().close()
        _listen()
    for listener in _listeners:
        listener.start()
    if _listeners and monotonic() >= _looked[0]:
        _looked[0] = monotonic() + _BETWEEN_LOOKS_S
        with Suppress(OSError):
            _remove_ended(_folder(), _KEPT_S)


def _in_forked_child() -> None:
    for listener in _listeners:
        if listener.peer is not None:
            listener.peer.close()
        listener.close()
    del _listeners[:]


def _remove_ended(folder: str, kept_s: float) -> None:
    """Remove the files of processes that ended, once they are old, as a ring does its own."""
    start, now = os.uname().nodename + ".", time_ns() / 1e9
    for entry in os.scandir(folder):
        # HOST.PID.host, HOST.PID~000001.spool, and so on.
        numbers = entry.name[len(start) :].replace("~", ".").replace("-", ".").split(".")
        has_ended = not any(n.isdigit() and os.path.exists(f"/proc/{n}") for n in numbers)
        is_old = entry.stat().st_mtime < now - kept_s
        if entry.name.startswith(start) and has_ended and is_old:
            os.unlink(entry.path)


def _leave() -> None:
    """Remove the socket, and the folder if this process made it and no other listens there."""
    import fcntl

    folder = _folder()
    try:
        for listener in _listeners:
            if listener.pid == os.getpid():
                listener.stop(for_good=True)
                listener.close()
                listener.remove()
        others = [name[: -len(".socket")] for name in os.listdir(folder) if ".socket" in name]
        if not is_first() or any(os.path.exists(f"/proc/{pid}") for pid in others):
            return
        # Held by who makes a trace of what is there, who then removes it.
        lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError as error:
        # Another user's by now, or gone: `gputrace list` removes what is left.
        if is_handlers(error):
            raise


steps.on_step.append(_on_step)
recorder.on_write.append(_go_on)
recorder.on_fork.append(_in_forked_child)
atexit.register(_leave)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
