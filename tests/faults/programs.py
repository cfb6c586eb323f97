"""Behaviours of programs that a recorder may stumble over."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Final

from tests.faults.model import Fault, Kind, Maker, May

_ENDS, _OTHERS, _OWN = "Ways to end", "Other processes", "What is the process's own"
_WATCHED, _RANKS, _TWO = "Programs that watch themselves", "Ranks", "Two recorders at once"


def _does(
    name: str,
    words: Sequence[str] = ("",),
    may: May = May.NOTHING,
    least_s: float = 0.4,
    most_s: float = 1.4,
    host_too: bool = True,
) -> Maker:
    """The behaviour of the subject, with one of the words."""

    def make(choose: random.Random) -> Fault:
        seconds = f"{choose.uniform(least_s, most_s):.2f}"
        said = choose.choice(words)
        backend = choose.choice(("cupti", "cupti", "host")) if host_too else "cupti"
        options = ("--backend", backend, *choose.choice(_OPTIONS))
        return Fault((name, seconds, *([said] if said else [])), {}, options, may_lack=may)

    return make


_OPTIONS: Final = ((), (), (), ("--python",), ("--keep", "30s"))
_SIGNALS: Final = ("1", "2", "3", "4", "6", "7", "8", "9", "10", "11", "12", "15", "24")
_CODES: Final = ("0", "1", "7", "255")


def _rank_dies(choose: random.Random) -> Fault:
    count = choose.randint(2, 4)
    words = (str(count), str(choose.randrange(count)), choose.choice(_SIGNALS))
    seconds = f"{choose.uniform(0.5, 2):.2f}"
    return Fault(("launches", seconds, *words), may_lack=May.SECOND)


def _inner(*words: str, may: May = May.NOTHING) -> Maker:
    """A recorder that a recorder starts."""

    def make(choose: random.Random) -> Fault:
        inner = (sys.executable, "-m", "gputrace", "record", *words, "--no-nvml", "--")
        return Fault(("plain", f"{choose.uniform(0.3, 1):.2f}"), inner=inner, may_lack=may)

    return make


def _again(choose: random.Random) -> Fault:
    return Fault(("plain", f"{choose.uniform(1, 1.5):.2f}"), again=True)


KINDS: Final = (
    Kind(_ENDS, "os._exit", 20, _does("leaves", _CODES, May.SECOND, most_s=2)),
    Kind(_ENDS, "sys.exit, exit handlers that work", 15, _does("exits", _CODES)),
    Kind(_ENDS, "an exception that nobody catches", 15, _does("raises")),
    Kind(_ENDS, "SystemExit with words", 5, _does("exits_with_words")),
    Kind(_ENDS, "abort", 15, _does("aborts", may=May.SECOND, most_s=2)),
    Kind(_ENDS, "a read of no memory", 15, _does("reads_nowhere", may=May.SECOND, most_s=2)),
    Kind(_ENDS, "a signal to itself", 25, _does("kills_itself", _SIGNALS, May.SECOND, most_s=2)),
    Kind(_ENDS, "threads that outlive the main one", 15, _does("threads_at_exit", may=May.SECOND)),
    Kind(_ENDS, "a thread in the midst of a launch", 10, _does("hurried", may=May.SECOND)),
    Kind(_OWN, "handlers that raise, 1,000 times a second", 15, _does("handles_in_work")),
    Kind(
        _OWN,
        "a handler on a stack of its own (sigaltstack)",
        10,
        _does("own_stack", ("11", "10", "7"), May.SECOND),
    ),
    Kind(_OWN, "blocked signals, taken by sigwait", 10, _does("waits_for_signals", may=May.SECOND)),
    Kind(_OWN, "ignored signals", 10, _does("ignores")),
    Kind(_OWN, "closes all files, and opens 300 of its own", 15, _does("closes_files")),
    Kind(_OWN, "closes its streams", 10, _does("closes_streams", may=May.SECOND)),
    Kind(_OWN, "uses up all descriptors", 10, _does("uses_all_files", ("start", "midst"))),
    Kind(_OWN, "changes directory; the output is relative", 10, _does("changes_folder")),
    Kind(_OWN, "changes its root", 5, _does("changes_root")),
    Kind(_OWN, "drops its privileges in the midst", 10, _does("drops_privileges", ("midst",))),
    Kind(
        _OWN,
        "drops its privileges before its first step",
        5,
        _does("drops_privileges", ("start",), May.ALL),
        "steps and waits are missing: the folder is the first user's alone",
    ),
    Kind(_OWN, "umask 777", 5, _does("masks_files")),
    Kind(
        _OWN,
        "limits the size of files, heeding SIGXFSZ",
        10,
        _does("limits_files", ("0", "4000", "20000"), May.TOLD),
    ),
    Kind(
        _OWN,
        "limits the size of files, not heeding it",
        10,
        _does("limits_files_unaware", ("0", "4000", "20000"), May.TOLD),
    ),
    Kind(_OWN, "clears its environment", 5, _does("clears_environment")),
    Kind(_OWN, "leaves its process group", 5, _does("leaves_the_session")),
    Kind(_OTHERS, "forks children that work", 15, _does("forks", may=May.SECOND)),
    Kind(
        _OTHERS,
        "forks all the time while a thread launches",
        15,
        _does("forks_much", may=May.SECOND),
    ),
    Kind(_OTHERS, "multiprocessing", 10, _does("multiprocesses", ("fork", "spawn", "forkserver"))),
    Kind(_OTHERS, "subprocess, system, an empty environment", 10, _does("starts_others")),
    Kind(_OTHERS, "executes another program", 15, _does("executes", may=May.SECOND)),
    Kind(_OTHERS, "becomes a daemon", 10, _does("becomes_a_daemon")),
    Kind(_WATCHED, "cProfile", 10, _does("profiles")),
    Kind(_WATCHED, "sys.setprofile", 10, _does("sets_profile")),
    Kind(_WATCHED, "sys.settrace", 10, _does("sets_trace")),
    Kind(_WATCHED, "subscribes to CUPTI itself", 10, _does("uses_cupti", host_too=False)),
    Kind(_WATCHED, "is at the end of Python's stack", 5, _does("goes_deep")),
    Kind(_WATCHED, "replaces time.time", 5, _does("freezes_time")),
    Kind(_RANKS, "one of 2 to 4 ranks dies; the launcher ends the others", 40, _rank_dies),
    Kind(
        _TWO, "a recorder within a recorder", 10, _inner("-o", "inner.sqlite", "--backend", "cupti")
    ),
    Kind(_TWO, "the same, of the host alone", 5, _inner("-o", "inner.sqlite", "--backend", "host")),
    Kind(_TWO, "another with the same output, which is refused", 10, _again),
)
