"""``gputrace record --live``: the recording in a child, on its own terminal; the screen here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gputrace.cli.telling import tell
from gputrace.collectors.program.aside import Aside
from gputrace.errors import ExitCode

if TYPE_CHECKING:
    from gputrace.collectors.prepare import Prepared


def record_live(prepared: Prepared, terminal: int, record: Callable[[], int]) -> int:
    """Calls ``record`` in a child, and shows what is recorded on a terminal; its exit code."""
    output = prepared.plan.output
    sys.stdout.flush()
    sys.stderr.flush()
    aside = Aside(terminal, output.with_name(f"{output.name}.log"))
    if aside.divide():
        return record()
    prepared.team.forget()
    _take_streams()
    problem = _show(prepared, aside)
    for line in (problem, aside.give_terminal()):
        if line:
            # The terminal may be gone; the exit code is the program's all the same.
            with suppress(OSError):
                tell(line)
    return aside.code if aside.code is not None else ExitCode.RECORDING_FAILED


def _show(prepared: Prepared, aside: Aside) -> str:
    """The screen, until the program has ended or the person has left; why it ended otherwise."""
    try:
        from gputrace.cli.following import RecordingFeed
        from gputrace.views.live.app import LiveApp

        feed = RecordingFeed(prepared.folder)
        app = LiveApp(feed, aside.lines, aside.interrupt, lambda: aside.is_over() or aside.hung_up)
        app.run()
    except Exception as error:
        # Whatever became of the screen, the program goes on.
        return f"nothing more is shown ({error}); the recording goes on"
    finally:
        # Textual's handlers would draw the screen anew, and it is gone.
        for number in (signal.SIGTSTP, signal.SIGCONT):
            signal.signal(number, signal.SIG_DFL)
    return ""


def _take_streams() -> None:
    """Python's own streams are those of the terminal, whatever they were."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)  # type: ignore[misc]
