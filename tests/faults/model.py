"""Model of faults and their outcomes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

FORWARDED: Final = frozenset(
    (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
        *(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
        *(signal.SIGALRM, signal.SIGIO, signal.SIGPWR, signal.SIGXCPU, signal.SIGRTMIN),
    )
)
"""Signals that a recorder gives on to its program."""


class May(Enum):
    """Parts that a trace may lack after a fault."""

    NOTHING = "nothing"
    SECOND = "the last second"
    TOLD = "what it says is missing"
    GPU = "kernels, which it says"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal from outside, so many seconds after the program has begun.

    Attributes:
        at: ``program``, ``recorder``, ``both``; ``group``, to which all processes belong; ``each``
            or ``each_backwards``, the processes one after another; or ``merging``, the recorder
            once it makes the trace, ``after_s`` later.
        resume_s: after how many seconds SIGCONT follows; 0 for never.
    """

    number: signal.Signals
    after_s: float
    at: str = "program"
    resume_s: float = 0.0

    @property
    def reaches_program(self) -> bool:
        """Return true if it does so where nobody records."""
        if self.at == "recorder":
            return self.number in FORWARDED
        return self.at != "merging"


@dataclass(frozen=True, slots=True)
class Fault:
    """One program, recorded, and one thing that goes wrong.

    Attributes:
        words: of the subject: behaviour, seconds, further words.
        env: variables of the program, recorded or not.
        options: of ``gputrace record``.
        may_lack: what the trace may.
        recorder_dies: whether the exit code is not the program's: the recorder is killed, or cannot
            write the trace, and says so.
        jumps: (seconds after the start, seconds by which the wall clock is then set).
        disk: bytes of a file system of its own for the trace; 0 for none.
        nvml: what the stand-in for NVML does; None to leave it out.
        inner: words before the program: it is started by these (a second recorder).
        again: whether the same recorder is started a second time, to be refused.
        squeeze: MiB of address space that the recorder may take beyond what it has once the program
            has begun; None for no limit.
        control: whether some steps go unrecorded; kernels are not counted then.
        armed: whether the program is armed, and windows are opened in it all the time, in place of
            being recorded from start to end.
        ignored: signals that whoever starts the program, or its recorder, ignores.
    """

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ("--backend", "cupti")
    strikes: tuple[Strike, ...] = ()
    may_lack: May = May.NOTHING
    recorder_dies: bool = False
    jumps: tuple[tuple[float, float], ...] = ()
    disk: int = 0
    nvml: str | None = None
    inner: tuple[str, ...] = ()
    again: bool = False
    squeeze: int | None = None
    control: bool = False
    ignored: tuple[signal.Signals, ...] = ()
    armed: bool = False

    def arm(self) -> Fault | None:
        """Return the same for an armed program; None for what goes wrong in a recorder."""
        of_recorders = self.recorder_dies or self.disk or self.squeeze is not None
        of_recorders = of_recorders or bool(self.inner) or self.again or self.nvml is not None
        if of_recorders or any(s.at in ("recorder", "merging") for s in self.strikes):
            return None
        return replace(self, armed=True)


Maker = Callable[[random.Random], Fault]


@dataclass(frozen=True, slots=True)
class Kind:
    """Faults of one sort.

    Attributes:
        group: the heading that it comes under.
        name: what is injected.
        times: how often, in a full run.
        make: one of them, from random numbers.
        note: what a reader should know.
    """

    group: str
    name: str
    times: int
    make: Maker
    note: str = ""


@dataclass(slots=True)
class Outcome:
    """Outcome of one fault.

    Attributes:
        changed: how the program was not as without gputrace.
        broken: what is wrong with the trace, or was left behind.
        missing_s: how long before the program's last event the first one is that the trace lacks.
        events: how many there were.
        recovered: whether `gputrace recover` made the trace.
    """

    kind: str
    number: int
    fault: str = ""
    changed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    missing_s: float = 0.0
    events: int = 0
    recovered: bool = False

    @property
    def is_good(self) -> bool:
        return not self.changed and not self.broken
