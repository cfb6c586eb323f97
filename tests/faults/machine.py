"""Faults of the machine: memory, disks, clocks, threads."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from typing import Final

from tests.faults.model import Fault, Kind, Maker, May

_MEMORY, _DISK, _CLOCK = "Memory and threads", "Disks", "Clocks"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_GONE: Final = (errno.EROFS, errno.EIO, errno.ESTALE)


def _limited(choose: random.Random) -> Fault:
    words = ("short_of_memory", f"{choose.uniform(1.2, 2.5):.2f}", str(choose.randint(0, 12)))
    return Fault(words, may_lack=May.SECOND)


def _refused(choose: random.Random) -> Fault:
    first = choose.randint(1, 60)
    last = first + choose.choice((0, 0, 5, 1_000_000))
    env = {"FAULT_MEMORY": f"{first} {last}"}
    return Fault(("plain", f"{choose.uniform(0.4, 1.5):.2f}"), env)


def _recorder_short(choose: random.Random) -> Fault:
    return Fault(("plain", "0.5"), recorder_dies=True, squeeze=choose.randint(0, 120))


def _no_threads(choose: random.Random) -> Fault:
    return Fault(
        ("plain", f"{choose.uniform(0.2, 0.8):.2f}"), {"FAULT_THREADS": "1"}, may_lack=May.GPU
    )


def _of_the_program(errors: Sequence[int], may: May) -> Maker:
    """Limit what the collector and the hooks may write, by process."""

    def make(choose: random.Random) -> Fault:
        room = choose.choice((1, 100, 4000, 20_000, 50_000, 100_000))
        disk = f"{choose.choice(errors)} {room} .sqlite.spool/"
        return Fault(("plain", "1.6"), {"FAULT_DISK": disk, "FAULT_IN": "program"}, may_lack=may)

    return make


def _of_the_trace(choose: random.Random) -> Fault:
    env = {
        "FAULT_DISK": f"{choose.choice(_FULL + _GONE)} {choose.randint(0, 150_000)} /.t.sqlite.",
        "FAULT_IN": "recorder",
    }
    return Fault(("plain", "0.7"), env, recorder_dies=True)


def _small(choose: random.Random) -> Fault:
    """A file system of its own, which the spool or the trace may fill."""
    pages = choose.choice((6, 12, 16, 24, 32, 48, 64, 90))
    return Fault(("plain", "1.5"), may_lack=May.TOLD, recorder_dies=True, disk=pages << 12)


def _slow(who: str) -> Maker:
    def make(choose: random.Random) -> Fault:
        needle = ".spool/" if who == "program" else ".t.sqlite."
        slow = choose.randint(1000, 400_000) if who == "program" else choose.randint(1000, 20_000)
        env = {"FAULT_SLOW": f"{slow} {needle}", "FAULT_IN": who}
        return Fault(("plain", "1"), env)

    return make


def _jumps(forwards: int, most_s: float) -> Maker:
    def make(choose: random.Random) -> Fault:
        count = choose.choice((1, 1, 2, 3))
        jumps = tuple(
            (
                choose.uniform(0.3, 4.5),
                (forwards or choose.choice((-1, 1))) * choose.uniform(0.001, 1) * most_s,
            )
            for _ in range(count)
        )
        return Fault(("plain", "6"), jumps=jumps)

    return make


YEAR_S: Final = 365.0 * 86_400
_CAN_MOUNT: Final = os.geteuid() == 0

KINDS: Final = (
    Kind(_MEMORY, "the program's address space ends 0 to 12 MiB above what it uses", 40, _limited),
    Kind(
        _MEMORY,
        "requests of the collector for memory are refused: one, six, or all from some on",
        50,
        _refused,
    ),
    Kind(
        _MEMORY,
        "the recorder's address space ends 0 to 120 MiB above what it uses",
        20,
        _recorder_short,
    ),
    Kind(_MEMORY, "no thread can be started for the collector", 10, _no_threads),
    Kind(
        _DISK,
        "ENOSPC or EDQUOT for the processes' files, from some byte on",
        40,
        _of_the_program(_FULL, May.TOLD),
    ),
    Kind(
        _DISK,
        "EROFS, EIO or ESTALE for the processes' files, from some byte on",
        40,
        _of_the_program(_GONE, May.ALL),
        "what was written is there; that more is missing cannot be written down then, and is said "
        "as of a process that ended without warning",
    ),
    Kind(_DISK, "one of these five for the trace", 30, _of_the_trace),
    *(
        [Kind(_DISK, "a file system of 24 to 360 KiB that fills up", 30, _small)]
        if _CAN_MOUNT
        else []
    ),
    Kind(_DISK, "each write of the processes takes up to 0.4 s longer", 20, _slow("program")),
    Kind(_DISK, "each write of the trace takes up to 20 ms longer", 10, _slow("recorder")),
    Kind(
        _CLOCK, "the wall clock is set forward, up to 3 times, up to an hour", 20, _jumps(1, 3600)
    ),
    Kind(_CLOCK, "the wall clock is set back, up to 3 times, up to an hour", 20, _jumps(-1, 3600)),
    Kind(_CLOCK, "the wall clock is set by up to 20 years", 20, _jumps(0, 20 * YEAR_S)),
    Kind(_CLOCK, "the wall clock is set by up to 0.3 s", 20, _jumps(0, 0.3)),
)
