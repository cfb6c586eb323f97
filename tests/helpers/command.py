"""The real command, in a process of its own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.helpers.forked import ForkedProcess, Server

ROOT: Final = Path(__file__).parents[2]

UNREADABLE: Final = 3
"""The exit code for input that cannot be read."""

_SERVERS: Final[list[Server]] = []
_TIMEOUT_S: Final = 120.0
_OF_THE_CALLER: Final = ("GPUTRACE_NSYS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")
"""Variables that change what the command does, and are the person's who runs the tests."""


class Ran(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


NO_BYTECODE: Final = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Where files have a limit: Python does not notice that it wrote a compiled module in part."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that the command gets."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_CALLER}
    # numpy's threads cost more at its import than a small trace can give them to do.
    threads = {"OPENBLAS_NUM_THREADS": "1"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | threads | {"PYTHONPATH": os.pathsep.join(paths)} | dict(extra or {})


def python(*arguments: str, env: Mapping[str, str] | None = None) -> Ran:
    """Runs this Python with the arguments."""
    run = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment(env),
        check=False,
        timeout=_TIMEOUT_S,
    )
    return Ran(run.returncode, run.stdout.decode(), run.stderr.decode())


def gputrace(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Ran:
    """Runs ``gputrace`` with the arguments; ``env`` adds variables."""
    words, variables = [str(argument) for argument in arguments], environment(env)
    for server in _SERVERS:
        if ran := server.run(words, variables, _TIMEOUT_S):
            code, out, err = ran
            return Ran(code, out.decode(), err.decode())
    return python("-m", "gputrace", *words, env=env)


def start_on_terminal(
    words: Sequence[str], env: Mapping[str, str], folder: Path, streams: Sequence[int]
) -> ForkedProcess | None:
    """Fork ``gputrace``, with three streams and a terminal; nothing where only a new Python can."""
    started = (server.start_on_terminal(words, env, folder, streams) for server in _SERVERS)
    return next(filter(None, started), None)


@contextmanager
def forked() -> Iterator[None]:
    """Commands are forked meanwhile, unless they get variables that only a new Python reads."""
    server = Server(environment())
    _SERVERS.append(server)
    try:
        yield
    finally:
        _SERVERS.remove(server)
        server.stop()


def assert_refused(ran: Ran, code: int, *words: str) -> None:
    """The command ended with the code and one line on stderr that holds the words, no results.

    An empty line before it parts it from what a recorded program may have said.
    """
    assert ran.out == ""
    line = ran.err.removeprefix("\n")
    assert line.startswith("gputrace: ")
    assert line.count("\n") == 1, ran.err
    assert line.endswith("\n")
    for word in words:
        assert word in ran.err
    assert ran.code == code


State = dict[str, tuple[int, int, str]]


def state(folder: Path) -> State:
    """Each file of a folder: its mode, its time, its content."""
    return {
        path.name: (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in folder.iterdir()
    }


def assert_unreadable(path: Path, *words: str) -> None:
    """The command names the file, says the words, and leaves the folder as it was."""
    before = state(path.parent)
    assert_refused(gputrace("analyze", path), UNREADABLE, str(path), *words)
    assert state(path.parent) == before
