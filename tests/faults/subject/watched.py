"""Programs that watch themselves."""

from __future__ import annotations

import cProfile
import ctypes
import os
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

from gputrace import marks
from tests.faults.subject.common import TURN_S, behaviour, say, turn, work


@behaviour
def profiles(seconds: float) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(int(seconds / TURN_S / 2)):
        turn()
    profile.disable()
    calls = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = {name: count for (_, _, name), (count, *_) in calls.items() if name == "turn"}
    say(f"{found}")


def _watch(seconds: float, install: Callable[[Any], None]) -> None:
    seen = [0]

    def look(frame: Any, event: str, _argument: Any) -> Any:
        seen[0] += frame.f_code is turn.__code__ and event == "call"
        return look

    install(look)
    turns = int(seconds / TURN_S / 2)
    for _ in range(turns):
        turn()
    install(None)
    say(f"{seen[0] == turns}")


@behaviour
def sets_profile(seconds: float) -> None:
    _watch(seconds, sys.setprofile)


@behaviour
def sets_trace(seconds: float) -> None:
    _watch(seconds, sys.settrace)


@behaviour
def uses_cupti(seconds: float) -> None:
    """Holds the only place that CUPTI has for a subscriber."""
    work(seconds / 2)
    cupti = ctypes.CDLL(os.environ["GPUTRACE_CUPTI"])
    place, calls = ctypes.c_void_p(), ctypes.CFUNCTYPE(None)(lambda: None)
    say(f"subscribed: {cupti.cuptiSubscribe(ctypes.byref(place), calls, None)}")
    say(f"unsubscribed: {cupti.cuptiUnsubscribe(place)}")
    work(seconds / 2)


@behaviour
def goes_deep(seconds: float) -> None:
    """Has something to record where Python has no room for another call."""
    work(seconds / 2)

    def below(room: int) -> None:
        if room:
            below(room - 1)
            return
        time.sleep(0.26)
        with marks.annotate("load batch"):
            pass

    depth = sys.getrecursionlimit() - 4
    for room in range(10):
        try:
            below(depth - room)
        except RecursionError:
            continue
    work(seconds / 2)


@behaviour
def freezes_time(seconds: float) -> None:
    """Replaces the clock of the standard library for a while, as tests do."""
    work(seconds / 2)
    kept = time.time, time.time_ns
    time.time, time.time_ns = lambda: 1.0, lambda: 1_000_000_000
    work(0.6)
    time.time, time.time_ns = kept
    work(seconds / 2)
