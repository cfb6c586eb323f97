"""Runs one program to its end, and sees to it that nothing of it outlives that.

Every process of a run carries a variable with the results' folder, so that workers are found that
left their parent's group, and those of a study that was killed itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_MARK: Final = "GPUTRACE_BENCH"
_GRACE_S: Final = 10.0
"""What a program gets to end by itself once it is asked to."""
_GONE_S: Final = 5.0
_LOOK_S: Final = 0.05
_LOOKS: Final = 2


class Ended(NamedTuple):
    """How a program ended: its exit code, 128 + N for signal N."""

    code: int
    in_time: bool


class Program(NamedTuple):
    """What is run; ``folder`` is that of the results, ``out`` and ``err`` take what it says."""

    command: Sequence[str]
    variables: Mapping[str, str]
    folder: Path
    out: Path
    err: Path


def run(program: Program, timeout_s: float | None = None) -> Ended:
    """Runs a program to its end; KeyboardInterrupt goes on to it and comes back to the caller.

    Raises OSError where it cannot be started.
    """
    try:
        process = _start(program)
        try:
            return Ended(_code(process.wait(timeout_s)), True)
        except subprocess.TimeoutExpired:
            _ask_to_end(process, signal.SIGTERM)
            return Ended(128 + signal.SIGTERM, False)
        except KeyboardInterrupt:
            _ask_to_end(process, _interruption())
            raise
    finally:
        end_all(program.folder)


def _start(program: Program) -> subprocess.Popen[bytes]:
    # In a session of its own: what is typed at the terminal is for us, and goes on from here.
    with program.out.open("wb") as out, program.err.open("wb") as err:
        return subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **program.variables, _MARK: str(program.folder)},
            start_new_session=True,
        )


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status


def _interruption() -> signal.Signals:
    """What interrupts a program: not SIGINT in the background, where shells have all ignore it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return signal.SIGTERM if ignored else signal.SIGINT


def _ask_to_end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def end_all(folder: Path) -> None:
    """Kills what is left of the runs of a results' folder, of the user's own processes."""
    deadline = time.monotonic() + _GONE_S
    looks = 0
    # Twice: a process that is just being started has no variables for a moment.
    while looks < _LOOKS and time.monotonic() < deadline:
        left = _left(folder)
        looks = 0 if left else looks + 1
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if looks < _LOOKS:
            time.sleep(_LOOK_S)


def _left(folder: Path) -> list[int]:
    wanted = os.fsencode(f"{_MARK}={folder}")
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # One that has ended, or is another user's.
        with suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
