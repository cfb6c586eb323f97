"""Counts training steps.

A step ends where a source says so, and the next begins there. Sources have ranks, since one step of
a training loop may hold several calls of optimizers: what the user marks counts before a loop that
a framework runs, and that before an optimizer. All are recorded; the highest rank seen counts.

Of several optimizers (a GAN's, a parameter's each) one leads, the first that steps. Another takes
its place when the leader is gone, or has not stepped while the other did 50 times.
"""

import os

from . import control, load
from .host_file import time_ns
from .recorder import STEP, note, note_ours, on_fork, record, too_deep, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZER, LOOP, USER = 1, 2, 3

on_step: "list[Callable[[int, int], None]]" = []
"""Called at the end of each step that counts, with its rank and moment; may raise SystemExit."""

_PATIENCE = 50
_by_user = word("gputrace.step")
_is_armed = bool(os.environ.get("GPUTRACE_ARM"))


class _Source:
    """Steps of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0
        self.count = 0
        self.last = 0
        self.leader: Callable[[], object | None] = _nobody
        self.rival: Callable[[], object | None] = _nobody
        self.held: list[int] = []

    def ends(self, owner: object, end: int) -> "list[int]":
        """Return the ends of steps that a call by the owner proves."""
        leader = self.leader()
        if leader is owner:
            if self.held:
                self.held = []
            return [end]
        if leader is None:
            self.leader, self.held = weak(owner), []
            return [end]
        if self.rival() is not owner:
            self.rival, self.held = weak(owner), []
        self.held.append(end)
        if len(self.held) < _PATIENCE:
            return []
        proven, self.leader, self.held = self.held, self.rival, []
        return proven

    def add(self, what: int, end: int) -> None:
        start, number = self.last, self.count
        # First: what a signal handler raises may end the call that follows.
        self.last, self.count = end, number + 1
        record(start, end, what, STEP | self.rank << 16 | (number & 0xFFFFFFFF) << 32)


def _nobody() -> None:
    return None


def weak(owner: object) -> "Callable[[], object | None]":
    """Return a weak reference to the owner, if it supports one."""
    import _weakref

    try:
        return _weakref.ref(owner)
    except TypeError:
        return lambda: owner


_sources: "dict[int, _Source]" = {}
_window: "list[int | None]" = [None, None]
# Where windows come again: after how many steps, for how many, and the step that ends them all.
_again: "list[int | None]" = [None, None, None]
_begin = [0]
# The step from which on is recorded; None outside of a window.
_since: "list[int | None]" = [0]
span = [0, 0]
"""When the last window began and ended, in nanoseconds of CLOCK_REALTIME; 0 where it has not."""
_stretches = control.Stretches()
_nodes = control.NodeSteps()


def step_ended(what: int, rank: int, owner: object) -> None:
    """Count the end of a step, now; raises no error of ours."""
    try:
        end = time_ns()
        source = _sources.get(rank)
        if source is None:
            source = _sources[rank] = _Source(rank)
        source.calls += 1
        counts = rank == max(_sources)
        for proven in source.ends(owner, end):
            source.add(what, proven)
            if counts:
                control.step_ended()
                load.step_ended(proven)
                for call in on_step:
                    call(rank, proven)
        if counts and (source.count >= min(_stretches.at, _nodes.at) or _window != [None, None]):
            _apply_window(source)
    except RecursionError:
        too_deep[:] = [True]
    except Exception:
        note_ours("counting steps")


def calls(rank: int) -> int:
    """Count the calls of a source of the rank, whether they are steps or not."""
    source = _sources.get(rank)
    return source.calls if source else 0


def recorded() -> "tuple[int, int | None]":
    """Return how many steps of the window have ended, -1 outside of it, and of how many it is."""
    since, end = _since[0], _window[1]
    if since is None or not _sources:
        return -1, None
    return _sources[max(_sources)].count - since, None if end is None else end - since


def ended() -> int:
    """Return how many steps have ended."""
    return _sources[max(_sources)].count if _sources else 0


def window() -> "tuple[int | None, int | None]":
    """Return the step with which a window will open, and the one that closes it; None for none."""
    return _window[0], _window[1]


def set_window(first: "int | None", end: "int | None") -> None:
    """Have the window of these steps recorded, from ``first`` to the one before ``end``."""
    span[:] = [0, 0]
    _window[:] = [first, end]
    _since[0] = None


def step_by_user(samples: int = 0, tokens: int = 0, flop: float = 0) -> None:
    """Mark the end of a step, for ``gputrace.step()``, and record the work that it did."""
    step_ended(_by_user, USER, step_by_user)
    if samples or tokens or flop:
        mega, rest = divmod(flop, 1e6)
        counts = {"samples": samples, "tokens": tokens, "MFLOP": mega, "FLOP": rest}
        load.record_counts(counts)


def _apply_window(source: _Source) -> None:
    if source.count >= _stretches.at:
        source.last = _stretches.look(source.count, source.last)
    if source.count >= _nodes.at:
        _nodes.look(source.count)
        source.last = time_ns()
    first, end = _window
    if first is not None and source.count >= first:
        _window[0] = None
        span[:] = [time_ns(), 0]
        control.capture(True)
        _since[0] = source.count
        # What a recorder takes to begin is no part of a step.
        source.last = time_ns()
        _note_window(f"recording from step {first}")
    if end is not None and source.count >= end:
        span[1] = time_ns()
        if _is_armed:
            control.end_capture((span[1] - span[0]) // max(end - (_since[0] or 0), 1))
        else:
            control.capture(False)
        _window[1] = _since[0] = None
        _note_window(f"recorded to the end of step {end - 1}")
        _set_next(source.count)


def _note_window(text: str) -> None:
    """Note the window; of several windows the trace has all in a table."""
    if _again[0] is None and not _is_armed:
        note(text)


def _set_next(count: int) -> None:
    every, length, last = _again
    if every is None or length is None:
        return
    first = _begin[0] + (count - _begin[0] + every - 1) // every * every
    if last is None or first < last:
        # The step before is recorded too: without its end the gap before the next one is not known.
        begin = max(first - 1, _begin[0], count)
        _window[:] = [begin, first + length if last is None else min(first + length, last)]


def read_window() -> None:
    """Parse GPUTRACE_STEPS, ``A:B``, of which one may be missing, and GPUTRACE_EVERY, ``N:M``."""
    text, every = os.environ.get("GPUTRACE_STEPS", ""), os.environ.get("GPUTRACE_EVERY", "")
    first, _, end = text.partition(":")
    try:
        _window[:] = [int(first or 0), int(end) if end else None] if text else [None, None]
        _again[:] = [None, None, None]
        if every:
            distance, _, length = every.partition(":")
            _begin[0] = int(first or 0)
            _again[:] = [int(distance), int(length), _window[1]]
            _set_next(_begin[0])
    except ValueError:
        note(f"GPUTRACE_STEPS={text} names no steps")
    _since[0] = None if _window[0] or _is_armed else 0
    if _window[0] == 0:
        # No note: a process that trains nothing should leave no file.
        _window[0] = None
        control.capture(True)


def _restart_stretches() -> None:
    global _stretches, _nodes
    _stretches, _nodes = control.Stretches(), control.NodeSteps()


def restart() -> None:
    """Count from 0 again, for a cell of a notebook; the first step begins with its data wait."""
    _sources.clear()


read_window()
on_fork.extend([_sources.clear, read_window, _restart_stretches])
