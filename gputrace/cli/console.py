"""Messages and progress bars on stderr."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from gputrace.sanitize import clean, message

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from gputrace.model.trace import Progress


_after_program: list[None] = []
"""Not empty where a program has written to stderr and this process not yet."""


def log(text: str) -> None:
    """Write ``gputrace: `` and the text to stderr, as one line without control characters."""
    if _after_program:
        _after_program.clear()
        _begin_line()
    click.echo(f"gputrace: {message(text)}", err=True)


_said: list[str] = []
"""``quiet`` or ``verbose``, where asked for."""


def set_verbosity(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Obey ``--quiet`` or ``--verbose``; a callback of click."""
    if value and parameter.name is not None:
        _said.append(parameter.name)


def reset_verbosity() -> None:
    """Forget what an earlier command in this process was asked for."""
    _said.clear()


def is_verbose() -> bool:
    """Return whether ``--verbose`` was given."""
    return "verbose" in _said


def note(text: str) -> None:
    """Write a line as `log` does unless ``--quiet`` was given: for what is no error or result."""
    if "quiet" not in _said:
        log(text)


def log_after_program() -> None:
    """Have the next message begin a line, where a program may have left one without an end."""
    _after_program[:] = [None]


def _begin_line() -> None:
    """Begin a line on stderr.

    A terminal begins one only if it has to: spaces over its width wrap unless they began at its
    edge. Of a pipe it is not known; there is an empty line then, as of `time`.
    """
    with suppress(OSError, ValueError):
        stderr = sys.stderr.fileno()
        text, state = "\n", os.fstat(stderr)
        if os.isatty(stderr):
            text = " " * os.get_terminal_size(stderr).columns + "\r"
        elif stat.S_ISREG(state.st_mode):
            with Path(f"/proc/self/fd/{stderr}").open("rb") as file:
                file.seek(max(state.st_size - 1, 0))
                text = "" if file.read(1) in (b"", b"\n") else "\n"
        os.write(stderr, text.encode())


_PATIENCE_S = 1.0


@contextmanager
def progress_bar(what: str, then: str = "") -> Iterator[_Update | None]:
    """Yield a callback for work done and total work, and what it is, where that changes; None if
    stderr is not a terminal.

    What follows work of which the amount is known, if anything, is shown by a bar that runs.
    """
    if "quiet" in _said or not sys.stderr.isatty():
        yield None
        return
    bar = _LateBar(what, then)
    try:
        yield bar.update
    finally:
        bar.stop()


def reading(name: str) -> AbstractContextManager[Progress | None]:
    """Return the `progress_bar` for reading a trace, and working on it."""
    return progress_bar(f"reading {name}", f"analyzing {name}")


class _Update(Protocol):
    def __call__(self, done: int, total: int, what: str = ...) -> None: ...


class _LateBar:
    """Progress bar that appears, and imports rich, only when work takes long.

    A timer starts it, since much of an analysis reports nothing.
    """

    def __init__(self, what: str, then: str = "") -> None:
        from threading import Lock, Timer

        self._what, self._then = what, then
        self._state: tuple[str, int, int | None] = (what, 0, None)
        self._bar: Bar | None = None
        self._lock, self._is_over = Lock(), False
        self._timer = Timer(_PATIENCE_S, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        with self._lock:
            if not self._is_over:
                self._bar = Progress(console=Console(stderr=True), transient=True)
                self._bar.add_task("")
                self._draw()
                self._bar.start()

    def update(self, done: int, total: int, what: str = "") -> None:
        follows = bool(self._then) and done >= total
        # Without a total, the bar moves back and forth.
        amount = None if follows else max(total, done)
        self._state = (what or (self._then if follows else self._what), done, amount)
        with self._lock:
            self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            from rich.markup import escape

            what, done, total = self._state
            task = self._bar.tasks[0]
            task.total = total
            self._bar.update(task.id, description=escape(clean(what)), completed=done)

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._bar is not None:
                self._bar.stop()


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt; what `nohup` ignores stays ignored."""
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
