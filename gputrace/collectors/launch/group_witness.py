"""Witness of signals to a process group, to tell them from signals to one process.

Nothing in a signal says whether it was sent to a process or to its group: `kill`, `killpg` and the
terminal fill in the same fields. So a process in our group, the witness, blocks all signals that
are forwarded. One that is pending there, too, was sent to more than us: the program, in the same
group, has got its own.

The words of the recorded command are on the witness's command line, and gputrace's name is not.
So `pkill -f train.py`, which finds the recorder and the program, also finds the witness, and
`pkill -f gputrace`, which does not find the program, does not.

The witness is this file as a program, so the file imports the standard library alone:
`python -I -S FILE NUMBERS WORDS`. It has the signals NUMBERS (``signals:1,2,15``) blocked and
ignores all others. For each byte that it reads from stdin it writes a line to stdout: the signals
since the last one, each as ``number:code:sender`` (si_code and si_pid). It ends with its stdin.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from gputrace.collectors.launch import ReceivedSignal

GRACE_S: Final = 0.5
"""Seconds by which a signal may reach one process later than another, where a supervisor sends it
to each: on a busy machine, it may have to wait for a core in between."""
_POLL_S: Final = 0.01
_PATIENCE: Final = 50
_PATIENT_MS: Final = 100
"""Number and length of the waits for an answer, which comes at once unless somebody has stopped
the witness. A wait ends early for a process that was stopped meanwhile."""
RECORDED_BY: Final = ("GPUTRACE_", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Prefixes of variables that have a process recorded; the recorder's own must not inherit them."""


class _Sighting(NamedTuple):
    """Signal that the witness has got."""

    number: int
    code: int
    sender: int


class GroupWitness:
    """Witness in our process group or, if it is ``apart``, in one of its own.

    A signal that reaches one which is apart was sent to each of our processes, or to each of that
    name. It is asked about the signals that this process takes with `wait_for`. If it cannot be
    started or is killed, only signals from the kernel count as sent to the group.
    """

    def __init__(
        self, command: Sequence[str], watched: Collection[int], apart: bool = False
    ) -> None:
        """Start it; ``watched`` are the signals to look for. It ends with this process."""
        self._apart = apart
        self._pid = 0
        self._seen: list[tuple[_Sighting, float]] = []
        asked, self._questions = os.pipe()
        self._answers, answered = os.pipe()
        with suppress(OSError):  # There may be no room for another process.
            self._pid = _start(asked, answered, command, watched, apart)
        os.close(asked)
        os.close(answered)

    def close(self) -> None:
        """End it."""
        self._end()
        os.close(self._questions)
        os.close(self._answers)

    def saw(self, came: ReceivedSignal) -> bool:
        """Return True if a signal that has come to us was sent to the witness as well.

        Waits a little before it says that it was not.
        """
        sighting = _Sighting(came.number, came.code, came.sender)
        # The kernel signals all of a group at once, the newest process first.
        grace_s = _POLL_S if came.is_from_kernel else GRACE_S
        until, is_first = time.monotonic() + grace_s, True
        while self._ask():
            if any(seen == sighting for seen, _ in self._seen):
                is_pending = came.number in signal.sigpending()
                if is_pending and not is_first:
                    # Both have got that one; this one came before, to us alone.
                    return False
                del self._seen[[seen for seen, _ in self._seen].index(sighting)]
                if is_pending and came.number < signal.SIGRTMIN:
                    # A signal sent twice at once may count once there, as it does for the program.
                    signal.sigtimedwait([came.number], 0)
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL_S))
            is_first = False
        return came.is_from_kernel and not self._apart

    def forget(self) -> None:
        """Forget all signals so far."""
        self._ask()
        self._seen.clear()

    def forget_old(self) -> None:
        """Forget signals that have not come to us; to be called now and then."""
        oldest = time.monotonic() - GRACE_S
        self._seen = [(seen, at) for seen, at in self._seen if at > oldest]
        self._ask()

    def unmatched(self) -> set[int]:
        """Return the signals that the witness has got and we have not yet."""
        self._ask()
        return {seen.number for seen, _ in self._seen}

    def _ask(self) -> bool:
        """Take what the witness has got since the last question; return False if it is gone."""
        answer = b""
        if self._pid:
            with suppress(OSError):
                os.write(self._questions, b"?")
                answer = self._answer()
        if not answer:
            self._end()
            return False
        now = time.monotonic()
        for word in answer.split():
            self._seen.append((_Sighting(*map(int, word.split(b":"))), now))
        return True

    def _answer(self) -> bytes:
        """Return a line; empty if there is none in time."""
        answer, waits = b"", 0
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not waiting.poll(_PATIENT_MS):
                waits += 1
                if waits == _PATIENCE:
                    return b""
                continue
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                return b""
            answer += piece
        return answer

    def _end(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _start(
    asked: int, answered: int, command: Sequence[str], watched: Collection[int], apart: bool
) -> int:
    """Start the witness with its ends of the two pipes; return its pid."""
    numbers = ",".join(str(int(number)) for number in watched)
    words = [sys.executable, "-I", "-S", "/dev/fd/3", f"signals:{numbers}", *command]
    free = max(asked, answered) + 1
    duplicated = ((asked, free), (answered, free + 1), (free, 0), (free + 1, 1))
    actions = [
        *((os.POSIX_SPAWN_DUP2, source, target) for source, target in duplicated),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 3, __file__, os.O_RDONLY, 0),
    ]
    variables = {n: text for n, text in os.environ.items() if not n.startswith(RECORDED_BY)}
    # What comes before it has set itself up waits.
    blocked = signal.valid_signals()
    if apart:
        return os.posix_spawn(
            words[0], words, variables, file_actions=actions, setsigmask=blocked, setpgroup=0
        )
    return os.posix_spawn(words[0], words, variables, file_actions=actions, setsigmask=blocked)


def _witness(numbers: str) -> None:
    """Answer, as the witness, until nobody is there to ask."""
    watched = {int(number) for number in numbers.partition(":")[2].split(",")}
    # Hold nothing that others wait to see closed or want to unmount.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    for number in signal.valid_signals() - watched - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, watched)
    while os.read(0, 1):
        seen = []
        while pending := signal.sigpending() & watched:
            info = signal.sigwaitinfo(pending)
            seen.append(f"{info.si_signo}:{info.si_code}:{info.si_pid}")
        os.write(1, f"{' '.join(seen)}\n".encode())


if __name__ == "__main__":
    _witness(sys.argv[1])
