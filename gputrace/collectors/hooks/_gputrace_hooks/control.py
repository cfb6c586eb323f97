"""Control of what records this process: when to begin, to end and to make way, which steps go
unrecorded, and of which the nodes of CUDA graphs are recorded.

That is a library which is loaded when the program starts CUDA, the collector's or, where another
tool follows CUDA's profiler API (GPUTRACE_PROFILER_API), the driver's. A call that comes before
that is kept, and made as soon as the library is found.

Control stretches (GPUTRACE_CONTROL) go unrecorded, by which the cost of recording is known, and
kept low: the first may begin after 64 steps, the next after twice as many each. One lasts for 16
steps, or twice as many as often as it takes to hold CUPTI for a quarter of a second and five steps,
and then to measure as long, and ten steps. It is left out where it would be more than a quarter of
the steps so far.

Sampling (GPUTRACE_SAMPLE, the part by which recording may lengthen the run): from the first such
stretch on, 35 steps are recorded of as many as make up for their cost, which each cycle measures.
Where no part is given (nor ``all``), it begins before recording has cost two seconds, at 0.75%.
A CUPTI that stays in the process still has about a third of its cost, which the stretches do not
see (ResNet-18 on an H100, CUPTI 13.0): together less than 2% of ten minutes. Where recording costs
next to nothing, it never begins.

All begin and end at multiples of powers of two, at the same steps on all ranks: where ranks choose
different powers, what one leaves out is part of what the other does.

Nodes (GPUTRACE_GRAPH_NODES, the number of steps): from step 16, 32, 64 and so on, where graphs were
replayed by then of which no node is known.
"""

import os

from . import recorder
from .host_file import Suppress, time_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from typing import Any

_DRIVER = "libcuda.so.1"
_START = "cuProfilerStart"

_NEVER = 1 << 62
# Steps that are recorded before a stretch, by which it is planned; those not yet at speed before.
_PACE, _SETTLES = 32, 3
# The shortest stretch, the shortest cycle, and when the first stretch may begin.
_LEAST = 16
_FIRST_AT = 64
# One in so many steps so far may go unrecorded.
_PART = 4
# Where no share is given: what recording may cost first, and the share then, and what is next to
# nothing, as a part of a step.
_FREELY_NS, _THEN, _NOTHING = 2000000000, 0.0075, 0.015
# CUPTI is held for so long and so many steps, and then steps are measured for as long.
_HOLD_NS = _ENOUGH_NS = 250000000
# Part of the share that cycles use up; what comes before them costs, too.
_OF_SHARE = 0.75
_HELD, _MEASURED = 5, 10

_BEFORE, _RECORDED, _HOLDING, _FREE = range(4)
# The first step of which nodes may be recorded: graphs are captured before.
_NODES_AT = 16

graphs_made: "list[None]" = []
"""Not empty once the program has made a CUDA graph, which may not survive that CUPTI leaves."""
_pending: "dict[str, tuple[int, ...]]" = {}
_step: "list[Callable[[], object]]" = []


def pause(on: bool) -> None:
    """Make way for another user of CUPTI, or come back."""
    _ask("gputrace_pause", int(on))


def capture(on: bool) -> None:
    """Begin or end the window to record.

    For a tool that follows the program's calls: nsys records all processes from the first start
    until each that started has stopped (seen with 2025.3), nvprof each process by itself.
    """
    if not os.environ.get("GPUTRACE_PROFILER_API"):
        _ask("gputrace_capture", int(on))
    elif on:
        _keep(_START)
    else:
        # What the GPU was given in the window, it shall finish in the window.
        _keep("cuCtxSynchronize")
        _keep("cuProfilerStop")


def rest(hold_ns: int, stays: bool) -> bool:
    """Begin a control stretch, which ``capture(True)`` ends; return True if it has begun.

    If CUPTI ``stays``, it is idle after ``hold_ns``, which the GPU has to end what it was given;
    else it is out of the process as soon as the GPU has ended that, and after ``hold_ns`` at most.
    """
    import ctypes

    return _does("gputrace_begin_stretch", ctypes.c_uint64(hold_ns), int(stays))


def end_capture(pace_ns: int) -> None:
    """End a window after which no other is planned, with steps of ``pace_ns`` nanoseconds: CUPTI
    leaves the process as soon as the GPU can have ended what it was given, or is idle then.
    """
    if not rest(hold_ns(pace_ns), bool(graphs_made)):
        capture(False)


def hold_ns(pace_ns: int) -> int:
    """Return how long CUPTI is held at most after a window with steps of ``pace_ns``."""
    return _HOLD_NS + _HELD * pace_ns


def record_nodes(on: bool) -> bool:
    """Begin or end the steps of which the nodes of graphs are recorded; return True if so done."""
    return _does("gputrace_record_nodes", int(on))


def keeps_cupti() -> bool:
    """Return True if the collector keeps CUPTI from a profiler that takes it out of the process.

    CUDA graphs that were made while it was recorded do not survive that.
    """
    return _does("gputrace_keep_cupti")


def is_loaded() -> bool:
    """Return True if the collector is in this process: the program has started CUDA, or NVTX."""
    return bool(os.environ.get("GPUTRACE_LIBRARY")) and _loaded_library() is not None


def has_context() -> bool:
    """Return True if this process uses a GPU; one that compiles for another starts CUDA, too.

    Asks the driver for primary contexts, which frameworks use; True if it cannot say.
    """
    import ctypes

    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        driver.cuDeviceGetCount(ctypes.byref(count))
        for device in range(count.value):
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                return True
    except (OSError, AttributeError):
        return True
    return False


def write() -> None:
    """Have the collector write all that it has."""
    _does("gputrace_write")


def _does(function: str, *values: "Any") -> bool:
    """Call a function of the collector; return True if there is one, and it does as asked."""
    try:
        library = _loaded_library() if os.environ.get("GPUTRACE_LIBRARY") else None
        return library is not None and getattr(library, function)(*values) == 0
    except Exception:
        recorder.note_ours("reaching the collector")
        return False


def step_ended() -> None:
    """Notify the collector, which may record the calls of some steps only."""
    if _step:
        _step[0]()


def _find_step() -> None:
    """Look for the collector's function each second, since a step must cost next to nothing."""
    if _step or not os.environ.get("GPUTRACE_LIBRARY"):
        return
    try:
        function = getattr(_loaded_library(), "gputrace_step", None)
        if function is not None:
            _step.append(function)
    except Exception:
        recorder.note_ours("reaching the collector")


def _ask(function: str, value: int) -> None:
    if os.environ.get("GPUTRACE_LIBRARY"):
        _keep(function, value)


def _keep(function: str, *values: int) -> None:
    _pending.pop(function, None)
    _pending[function] = values
    deliver()


def deliver() -> None:
    """Make the pending calls."""
    if not _pending:
        return
    try:
        library = _loaded_library()
        while library and _pending:
            function, values = next(iter(_pending.items()))
            del _pending[function]
            result = getattr(library, function)(*values)
            if function == _START and result:
                # No context yet.
                _pending[function] = values
                break
    except Exception:
        recorder.note_ours("reaching the collector")
        _pending.clear()


def _loaded_library() -> "ctypes.CDLL | None":
    import ctypes

    with Suppress(OSError):
        # Symbols stay out of the program's scope: found through this handle only.
        name = os.environ.get("GPUTRACE_LIBRARY", _DRIVER)
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


class Stretches:
    """When the next stretch begins and ends; ``at`` is the step to look again."""

    def __init__(self) -> None:
        self.share = _number("GPUTRACE_SAMPLE")
        self.may_begin = not os.environ.get("GPUTRACE_SAMPLE")
        is_asked = self.share or os.environ.get("GPUTRACE_CONTROL")
        self.begin, self.end = _FIRST_AT, 0
        self.at = _FIRST_AT - _PACE if is_asked else _NEVER
        self.state = _BEFORE
        self.since = (0, 0)
        # Nanoseconds of a step, and of the recorder's return; steps of a cycle.
        self.recorded = self.free = self.took = self.cycle = 0
        # By how much a step took longer, in nanoseconds, at each stretch; steps unrecorded.
        self.costs: list[int] = []
        self.missed = 0

    def look(self, count: int, now: int) -> int:
        """Proceed after ``count`` steps, the last ended ``now``; return when the next one began."""
        # The clock may have been set back.
        pace = max(now - self.since[1], 1) // max(count - self.since[0], 1)
        self.since = (count, now)
        if self.state == _BEFORE:
            self.state, self.at = _RECORDED, self.begin
        elif self.state == _RECORDED:
            self.recorded = pace
            self._rest(count)
        elif self.state == _HOLDING:
            self.state, self.at = _FREE, self.end
        else:
            self.free = pace
            self.costs.append(max(self.recorded - pace, 0))
            capture(True)
            # What a recorder takes to begin is no part of a step.
            begun, now = now, time_ns()
            self.took = max(now - begun, 0)
            cost = sorted(self.costs)[len(self.costs) // 2]
            # The next stretch begins after twice as many steps.
            lost = (2 * self.begin - self.missed) * cost
            if self.may_begin and cost > _NOTHING * self.free and lost > _FREELY_NS:
                self.may_begin, self.share = False, _THEN
                more = cost / max(self.free, 1)
                recorder.note(
                    f"recording lengthens a step by {more:.0%}: from step {count} on, "
                    f"{_SETTLES + _PACE} steps are recorded now and then "
                    f"(as with --sample {_THEN:.2%}; --sample all records every step)"
                )
            self._plan(count)
        return now

    def _rest(self, count: int) -> None:
        """Begin a stretch, unless it would be too long."""
        pace, steps = self.recorded, _LEAST
        hold = hold_ns(pace)
        # No number of steps is enough where the clock was set back.
        while steps * pace < hold + max(_ENOUGH_NS, _MEASURED * pace) and steps < count:
            steps *= 2
        end = count + steps
        if self.share and self.free:
            # Of a cycle of steps, 35 are recorded. It is a power of two, at most 16 times the steps
            # so far, and stays for a while, so that ranks that differ a little do not part ways.
            cost = self.took + (_SETTLES + _PACE) * max(self.recorded - self.free, 0)
            needed = cost / (_OF_SHARE * self.share * self.free)
            if not self.cycle / 4 < needed * _OF_SHARE <= self.cycle:
                self.cycle = _FIRST_AT
                while self.cycle < needed and self.cycle < 8 * count:
                    self.cycle *= 2
            end = -(-end // self.cycle) * self.cycle
        elif steps * _PART > count:
            self._plan(count)
            return
        # To come back costs each recorded step more, so CUPTI goes only where few are recorded.
        if rest(hold, not (self.share and self.free)):
            self.missed += end - count
            self.state, self.at, self.end = _HOLDING, (count + end) // 2, end
        else:
            self._plan(count)

    def _plan(self, count: int) -> None:
        """Choose when the next stretch begins."""
        self.state = _BEFORE
        if self.share and self.free:
            self.begin = count + _SETTLES + _PACE
        else:
            while self.begin < count + _PACE:
                self.begin *= 2
        self.at = self.begin - _PACE


class NodeSteps:
    """When the nodes of CUDA graphs are recorded; ``at`` is the step to look again."""

    def __init__(self) -> None:
        self.steps = int(_number("GPUTRACE_GRAPH_NODES"))
        self.begin = _NODES_AT
        self.at = self.begin if self.steps else _NEVER
        self.is_on = False

    def look(self, count: int) -> None:
        """Proceed after ``count`` steps."""
        if self.is_on:
            record_nodes(False)
            self.is_on = False
        else:
            self.is_on = record_nodes(True)
        while self.begin <= count:
            self.begin *= 2
        self.at = count + self.steps if self.is_on else self.begin


def _number(name: str) -> float:
    try:
        return float(os.environ.get(name) or 0)
    except ValueError:
        return 0.0


recorder.on_write += [deliver, _find_step]
recorder.on_fork.append(_pending.clear)
