"""Messages and progress bars on stderr."""

from __future__ import annotations

import os
import stat
import sys
import time
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
    if not sys.stderr.isatty():
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
    """Progress bar that appears, and imports rich, only when work takes long."""

    def __init__(self, what: str, then: str = "") -> None:
        self._what, self._then, self._began = what, then, time.monotonic()
        self._bar: Bar | None = None

    def update(self, done: int, total: int, what: str = "") -> None:
        if self._bar is None:
            if time.monotonic() - self._began < _PATIENCE_S:
                return
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        from rich.markup import escape

        is_over = bool(self._then) and done >= total
        task = self._bar.tasks[0]
        # Without a total, the bar moves back and forth.
        task.total = None if is_over else max(total, done)
        shown = escape(clean(what or (self._then if is_over else self._what)))
        self._bar.update(task.id, description=shown, completed=done)

    def stop(self) -> None:
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
