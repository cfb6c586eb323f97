"""Processes that run ``gputrace``, each without a third of a second of imports.

A server that has imported what most commands need forks a process for each. All else that it has
is its own: arguments, variables, folder, output, exit code, and what Python does at its end.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

_IMPORTED: Final = (
    "cloudpickle",
    "gputrace.analyzers.pipeline",
    "gputrace.api",
    "gputrace.cli.analyze",
    "gputrace.cli.check",
    "gputrace.cli.record",
    "gputrace.collectors.session",
    "gputrace.readers.gputrace",
    "gputrace.report.text",
    "msgspec",
    "numpy.ma",
    "rich.console",
)
_ON_A_TERMINAL: Final = "on a terminal"
_SLOWLY_IMPORTED: Final = {
    "report": "gputrace.report.html.page",
    _ON_A_TERMINAL: "gputrace.cli.record_live",
}
"""What some commands import besides, and takes long: the server imports it for the first."""
_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "TZ")
"""How the variables begin that Python, or a library of it, reads when a process starts."""


class Server:
    """Forks one command at a time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._at_start = _read_at_start(env)
        self._busy = threading.Lock()
        self._socket, theirs = socket.socketpair()
        # Without a buffer, in which an exit code could come with the process's number.
        self._answers = self._socket.makefile("rb", buffering=0)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.forked", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as those of the commands will be
                stderr=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
                env=dict(env),
                pass_fds=[theirs.fileno()],
            )

    def run(
        self, words: Sequence[str], env: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, bytes] | None:
        """The exit code and what was written; nothing where only a Python of its own can tell."""
        if _read_at_start(env) != self._at_start or not self._busy.acquire(blocking=False):
            return None
        try:
            return self._run(words, env, timeout_s)
        finally:
            self._busy.release()

    def _run(
        self, words: Sequence[str], env: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        (out, out_writer), (err, err_writer) = os.pipe(), os.pipe()
        socket.send_fds(self._socket, [b"\n"], [out_writer, err_writer])
        os.close(out_writer)
        os.close(err_writer)
        self._socket.sendall(json.dumps([words, dict(env), str(Path.cwd())]).encode() + b"\n")
        process = self._answer()
        try:
            written = _read_to_the_end(out, err, timeout_s)
        except BaseException:
            os.kill(process, signal.SIGKILL)
            raise
        finally:
            code = self._answer()
            os.close(out)
            os.close(err)
        return code, *written

    def start_on_terminal(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, streams: Sequence[int]
    ) -> ForkedProcess | None:
        """Start a command with the three streams, in a session whose terminal is the fourth.

        Until it has ended and was asked for its exit code, the server forks nothing else.
        """
        if _read_at_start(env) != self._at_start or not self._busy.acquire(blocking=False):
            return None
        socket.send_fds(self._socket, [b"\n"], streams)
        self._socket.sendall(json.dumps([words, dict(env), str(folder)]).encode() + b"\n")
        return ForkedProcess(self._answer(), self._poll)

    def _poll(self) -> int | None:
        if not select.select([self._socket], [], [], 0)[0]:
            return None
        code = self._answer()
        self._busy.release()
        return code

    def _answer(self) -> int:
        line = self._answers.readline()
        assert line, self._process.communicate()
        return int(line)

    def stop(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.kill()
        self._process.communicate()


class ForkedProcess:
    """What tests ask of a ``subprocess.Popen``."""

    def __init__(self, pid: int, poll: Callable[[], int | None]) -> None:
        self.pid, self.returncode = pid, -1
        self._poll, self._has_ended = poll, False

    def poll(self) -> int | None:
        if not self._has_ended and (code := self._poll()) is not None:
            self.returncode, self._has_ended = code, True
        return self.returncode if self._has_ended else None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


def _read_to_the_end(out: int, err: int, timeout_s: float) -> tuple[bytes, bytes]:
    end = time.monotonic() + timeout_s
    read = {out: bytearray(), err: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in read:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            if not (ready := selector.select(end - time.monotonic())):
                raise TimeoutError(read)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                read[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
    return bytes(read[out]), bytes(read[err])


def _become_a_command(connection: socket.socket) -> bool:
    """Returns in each process that is to be a command, and at last in the server: false."""
    with connection, connection.makefile("rb") as requests:
        while True:
            _, streams, _, _ = socket.recv_fds(connection, 1, 4)
            if not streams:
                return False
            words, env, folder = json.loads(requests.readline())
            on_terminal = len(streams) == 4
            kind = _ON_A_TERMINAL if on_terminal else "".join(words[:1])
            if kind in _SLOWLY_IMPORTED:
                import_module(_SLOWLY_IMPORTED[kind])
                gc.freeze()
            if not (process := os.fork()):
                break
            for stream in streams:
                os.close(stream)
            connection.sendall(b"%d\n" % process)
            _, status = os.waitpid(process, 0)
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    if on_terminal:
        os.setsid()
        fcntl.ioctl(streams[3], termios.TIOCSCTTY, 0)
    for number, stream in enumerate(streams[:3], 0 if on_terminal else 1):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv[1:] = words
    return True


def main() -> None:
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()  # so that no process goes through what they left
    try:
        is_command = _become_a_command(socket.socket(fileno=int(sys.argv[1])))
    except KeyboardInterrupt:  # Ctrl+C also ends the tests
        return
    if is_command:
        runpy.run_module("gputrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
