"""Signals from outside: to the program, to its recorder, to both."""

from __future__ import annotations

import random
from signal import (
    SIGABRT,
    SIGALRM,
    SIGBUS,
    SIGCHLD,
    SIGFPE,
    SIGHUP,
    SIGILL,
    SIGINT,
    SIGIO,
    SIGKILL,
    SIGPWR,
    SIGQUIT,
    SIGRTMIN,
    SIGSEGV,
    SIGSTOP,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    SIGXCPU,
    Signals,
)
from typing import Final

from tests.faults.model import FORWARDED, Fault, Kind, Maker, May, Strike

_PROGRAM, _RECORDER = "Signals to the program", "Signals to the recorder"
_ALL: Final = "Signals to all, or to one of all"
_BACKENDS: Final = (("--backend", "cupti"), ("--backend", "cupti"), ("--backend", "host"))
_OTHERS: Final = (SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU)


def _ends(at: str, *numbers: Signals) -> Maker:
    """The program works until it is killed."""

    def make(choose: random.Random) -> Fault:
        number = choose.choice(numbers)
        strike = Strike(number, choose.uniform(0, 2.4), at)
        dies = at == "both" or (at == "recorder" and number not in FORWARDED)
        words = ("plain", f"{strike.after_s + 1.2:.2f}") if dies else ("until_killed", "0")
        if at == "both":
            words = ("until_killed", "0")
        may = May.NOTHING if dies and at == "recorder" else May.SECOND
        return Fault(words, {}, choose.choice(_BACKENDS), (strike,), may, dies)

    return make


def _handled(choose: random.Random) -> Fault:
    number = choose.choice((SIGTERM, SIGINT, SIGUSR1, SIGHUP))
    strike = Strike(number, choose.uniform(0, 1.2), choose.choice(("program", "recorder")))
    words = ("handles", "0", str(int(number)))
    return Fault(words, {}, choose.choice(_BACKENDS), (strike,))


def _saves(*places: str) -> Maker:
    """A trainer that saves at the first signal, and gives up at the second one."""

    def make(choose: random.Random) -> Fault:
        number = choose.choice((SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGQUIT))
        code, children = choose.choice((0, 42, 55)), choose.choice((0, 2))
        strike = Strike(number, choose.uniform(0, 1.2), choose.choice(places))
        options = (*choose.choice(_BACKENDS), *choose.choice(((), ("--python",))))
        return Fault(
            ("saves", "0", str(int(number)), str(code), str(children)), {}, options, (strike,)
        )

    return make


def _ignored(choose: random.Random) -> Fault:
    words = (("exits", "0.3", "9"), ("forks", "0.3"), ("kills_itself", "0.3", str(int(SIGTERM))))
    ignored = choose.choice(((SIGCHLD,), (SIGCHLD, SIGHUP), (SIGINT, SIGHUP, SIGQUIT)))
    lacks = May.SECOND
    return Fault(choose.choice(words), {}, choose.choice(_BACKENDS), (), lacks, ignored=ignored)


def _stopped(at: str) -> Maker:
    def make(choose: random.Random) -> Fault:
        strike = Strike(SIGSTOP, choose.uniform(0, 1), at, choose.uniform(0.05, 1.5))
        return Fault(("plain", "1.5"), {}, choose.choice(_BACKENDS), (strike,))

    return make


def _stopped_for_long(choose: random.Random) -> Fault:
    """Beyond the five seconds for which a recorder waits for signals at a time."""
    strike = Strike(SIGSTOP, choose.uniform(0, 1), choose.choice(("recorder", "both")), 5.2)
    return Fault(("plain", "7"), {}, choose.choice(_BACKENDS), (strike,))


def _stopped_and_killed(choose: random.Random) -> Fault:
    begin = choose.uniform(0, 1.5)
    strikes = (Strike(SIGSTOP, begin), Strike(SIGKILL, begin + choose.uniform(0.1, 1)))
    return Fault(("until_killed", "0"), {}, choose.choice(_BACKENDS), strikes, May.SECOND)


def _merging(*numbers: Signals) -> Maker:
    """Once the program has ended."""

    def make(choose: random.Random) -> Fault:
        strike = Strike(choose.choice(numbers), choose.uniform(0, 0.03), "merging")
        return Fault(("plain", "0.5"), strikes=(strike,), recorder_dies=True)

    return make


KINDS: Final = (
    Kind(_PROGRAM, "SIGKILL at any moment", 100, _ends("program", SIGKILL)),
    Kind(_PROGRAM, "SIGTERM at any moment", 50, _ends("program", SIGTERM)),
    Kind(_PROGRAM, "SIGINT, SIGHUP or SIGSEGV", 30, _ends("program", SIGINT, SIGHUP, SIGSEGV)),
    Kind(_PROGRAM, "one of eight other signals that end it", 40, _ends("program", *_OTHERS)),
    Kind(_PROGRAM, "a signal that it handles, and ends by itself", 30, _handled),
    Kind(_PROGRAM, "SIGSTOP, and SIGCONT up to 1.5 s later", 30, _stopped("program")),
    Kind(_PROGRAM, "SIGSTOP, then SIGKILL", 10, _stopped_and_killed),
    Kind(_RECORDER, "SIGKILL; the program goes on", 50, _ends("recorder", SIGKILL)),
    Kind(_RECORDER, "SIGSEGV or SIGABRT", 20, _ends("recorder", SIGSEGV, SIGABRT)),
    Kind(_RECORDER, "SIGTERM, which goes on to the program", 30, _ends("recorder", SIGTERM)),
    Kind(
        _RECORDER,
        "SIGINT, SIGHUP, SIGQUIT, SIGUSR1 or SIGUSR2",
        30,
        _ends("recorder", SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2),
    ),
    Kind(
        _RECORDER,
        "SIGALRM, SIGIO, SIGPWR, SIGXCPU or a real-time signal",
        20,
        _ends("recorder", SIGALRM, SIGIO, SIGPWR, SIGXCPU, SIGRTMIN),
    ),
    Kind(_RECORDER, "SIGCHLD or others ignored by whoever started it", 20, _ignored),
    Kind(_RECORDER, "SIGSTOP to it alone, and SIGCONT up to 1.5 s later", 20, _stopped("recorder")),
    Kind(_RECORDER, "SIGSTOP to it or both, and SIGCONT 5.2 s later", 10, _stopped_for_long),
    Kind(_RECORDER, "SIGKILL to both at once", 30, _ends("both", SIGKILL)),
    Kind(_RECORDER, "SIGKILL while it makes the trace", 30, _merging(SIGKILL)),
    Kind(_RECORDER, "SIGINT or SIGTERM while it makes the trace", 20, _merging(SIGINT, SIGTERM)),
    Kind(_ALL, "to the process group of a program that saves once", 50, _saves("group")),
    Kind(_ALL, "to each process of one that saves once", 50, _saves("each", "each_backwards")),
    Kind(
        _ALL, "to the recorder or the program, which saves once", 50, _saves("recorder", "program")
    ),
)
