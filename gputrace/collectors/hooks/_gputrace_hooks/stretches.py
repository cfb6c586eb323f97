"""Stretches of steps that go unrecorded, by which the cost of recording is known, and kept low.

Control stretches (GPUTRACE_CONTROL): the first may begin after 64 steps, the next after twice as
many each. One lasts for 16 steps, or twice as many as often as it takes to hold CUPTI for a quarter
of a second and five steps, and then to measure as long, and ten steps. It is left out where it
would be more than a quarter of the steps so far.

Sampling (GPUTRACE_SAMPLE, the part by which recording may lengthen the run): from the first such
stretch on, 35 steps are recorded of as many as make up for their cost, which each cycle measures.
Where no part is given (nor ``all``), it begins before recording has cost nine seconds, at 0.5%:
together less than 2% of ten minutes. Where recording costs next to nothing, it never begins.

All begin and end at multiples of powers of two, at the same steps on all ranks: where ranks choose
different powers, what one leaves out is part of what the other does.
"""

import os

from . import control
from .host_file import time_ns

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
_FREELY_NS, _THEN, _NOTHING = 9000000000, 0.005, 0.015
# CUPTI is held for so long and so many steps, and then steps are measured for as long.
_HOLD_NS = _ENOUGH_NS = 250000000
# Part of the share that cycles use up; what comes before them costs, too.
_OF_SHARE = 0.75
_HELD, _MEASURED = 5, 10

_BEFORE, _RECORDED, _HOLDING, _FREE = range(4)


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
            control.capture(True)
            # What a recorder takes to begin is no part of a step.
            begun, now = now, time_ns()
            self.took = max(now - begun, 0)
            if self.may_begin and self._costs_much():
                self.may_begin, self.share = False, _THEN
            self._plan(count)
        return now

    def _rest(self, count: int) -> None:
        """Begin a stretch, unless it would be too long."""
        pace, steps = self.recorded, _LEAST
        hold = _HOLD_NS + _HELD * pace
        # No number of steps is enough where the clock was set back.
        while steps * pace < hold + max(_ENOUGH_NS, _MEASURED * pace) and steps < count:
            steps *= 2
        end = count + steps
        if self.share and self.free:
            cycle = self._cycle(count)
            end = -(-end // cycle) * cycle
        elif steps * _PART > count:
            self._plan(count)
            return
        # To come back costs each recorded step more, so CUPTI goes only where few are recorded.
        if control.rest(hold, not (self.share and self.free)):
            self.missed += end - count
            self.state, self.at, self.end = _HOLDING, (count + end) // 2, end
        else:
            self._plan(count)

    def _costs_much(self) -> bool:
        """Return True if recording would cost too much before the next stretch."""
        cost = sorted(self.costs)[len(self.costs) // 2]
        # The next stretch begins after twice as many steps.
        lost = (2 * self.begin - self.missed) * cost
        return cost > _NOTHING * self.free and lost > _FREELY_NS

    def _cycle(self, count: int) -> int:
        """Return the power of two of steps of which to record 35, at most 16 times those so far.

        It stays as it is for a while, so that ranks that differ a little do not part ways.
        """
        cost = self.took + (_SETTLES + _PACE) * max(self.recorded - self.free, 0)
        needed = cost / (_OF_SHARE * self.share * self.free)
        if not self.cycle / 4 < needed * _OF_SHARE <= self.cycle:
            self.cycle = _FIRST_AT
            while self.cycle < needed and self.cycle < 8 * count:
                self.cycle *= 2
        return self.cycle

    def _plan(self, count: int) -> None:
        """Choose when the next stretch begins."""
        self.state = _BEFORE
        if self.share and self.free:
            self.begin = count + _SETTLES + _PACE
        else:
            while self.begin < count + _PACE:
                self.begin *= 2
        self.at = self.begin - _PACE


def _number(name: str) -> float:
    try:
        return float(os.environ.get(name) or 0)
    except ValueError:
        return 0.0
