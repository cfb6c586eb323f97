"""Lives of a run's processes: attempts that a launcher made one after another, and early ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from gputrace.model.events import UNKNOWN
from gputrace.model.struct import Struct
from gputrace.units import format_count, format_ids, format_ns

_FEWEST_STEPS: Final = 3
"""Steps from which on an attempt can be analyzed."""
_MOST_SHOWN: Final = 5
"""Maximum number of attempts, or of ranks, of which each is described."""
_STEPS_APART: Final = 2
"""Steps by which ranks may differ when they end together."""
_UNWRITTEN_NS: Final = 1_000_000_000


class Life(Struct, frozen=True):
    """Life of a recorded process; times are nanoseconds on the trace's clock."""

    process: int
    """Number that the trace gives it."""
    rank: int
    """`UNKNOWN` if it has none."""
    attempt: int
    """Number of the attempt it belongs to, from 1; 0 for a process of all attempts."""
    start: int
    end: int
    """When it ended or, where that is unknown, its last record."""
    steps: int = 0
    """Number of its last step, counted from 1; 0 for a process that does not train."""
    first_step: int = 0
    """End of the first step that it has; 0 without one."""
    last_step: int = 0
    """End of its last step."""
    exit_code: int | None = None
    """-N if signal N ended it; None if unknown."""

    def moved(self, ns: int, process: int) -> Life:
        """Return the life on a clock that is ahead by nanoseconds, of a process of a number."""
        first, last = (moment and moment + ns for moment in (self.first_step, self.last_step))
        start, end = self.start + ns, self.end + ns
        return replace(
            self, process=process, start=start, end=end, first_step=first, last_step=last
        )

    @property
    def how_ended(self) -> str:
        """Return how it ended, after "ended"; empty if by itself, or if it is unknown."""
        code = self.exit_code
        if not code:
            return ""
        with suppress(ValueError):
            return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return f" by signal {-code}"


class Attempt(Struct, frozen=True):
    """One attempt at a run, of all ranks that it has."""

    number: int
    """From 1, as the launcher counts, where it says so."""
    lives: tuple[Life, ...]
    """Processes that train."""
    start: int
    end: int
    steps: int
    """Number of the last step of any rank, from 1."""

    @property
    def resumed(self) -> int:
        """Moment at which all ranks had made their first step, or their start without steps."""
        return max(life.first_step for life in self.lives) or self.start

    @property
    def stopped(self) -> int:
        """Moment of the last step of any rank, or the end without steps."""
        return max(life.last_step for life in self.lives) or self.end

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process that failed first; None if none is known to have."""
        return None if (first := self._first_failed) is None else first.exit_code

    @property
    def _first_failed(self) -> Life | None:
        failed = (life for life in self.lives if life.exit_code)
        return min(failed, key=lambda life: life.end, default=None)

    def __str__(self) -> str:
        how, first = "", self._first_failed
        if first is not None:
            is_one = len(self.lives) == 1 or first.rank == UNKNOWN
            how = first.how_ended if is_one else f"{first.how_ended} of rank {first.rank}"
        took, steps = format_ns(self.end - self.start), format_count(self.steps, "step")
        return f"ended after {took}{how} ({steps} recorded)"


def attempts_of(lives: Sequence[Life]) -> list[Attempt]:
    """Return the attempts of some processes in order; with one alone, nothing was restarted."""
    attempts: list[Attempt] = []
    later: list[Life] = []
    for number in sorted({life.attempt for life in lives} - {0}, reverse=True):
        # Ranks that were not restarted belong to the next attempt, too, which tells more.
        members = [life for life in _members(lives, number) if life not in later]
        later = later + members
        trained = [life for life in members if life.steps] or members
        start = min(life.start for life in trained if life.attempt == number)
        end, steps = (max(getattr(life, of) for life in trained) for of in ("end", "steps"))
        attempts.insert(0, Attempt(number, tuple(trained), start, end, steps))
    return attempts


def _members(lives: Sequence[Life], number: int) -> list[Life]:
    """Return the processes of an attempt, and those of earlier ones that were not restarted."""
    began = min((life.start for life in lives if life.attempt == number), default=0)
    restarted = {life.rank for life in lives if life.attempt == number} - {UNKNOWN}

    def goes_on(life: Life) -> bool:
        return 0 < life.attempt < number and life.end > began and life.rank not in restarted

    return [life for life in lives if life.attempt == number or goes_on(life)]


def choose_attempt(lives: Sequence[Life], until: int | None = None) -> int:
    """Return the number of the attempt to analyze: the last one with enough steps, else the one
    with most; 0 without attempts.

    ``until`` leaves out attempts that began later.
    """
    attempts = [a for a in attempts_of(lives) if until is None or a.start < until]
    enough = [attempt for attempt in attempts if attempt.steps >= _FEWEST_STEPS]
    chosen = enough[-1:] or sorted(attempts, key=lambda attempt: attempt.steps)[-1:]
    return chosen[0].number if chosen else 0


def of_other_attempts(lives: Sequence[Life], number: int) -> set[int]:
    """Return the processes that belong to other attempts than one."""
    own = {life.process for life in _members(lives, number)}
    return {life.process for life in lives if life.attempt} - own


def describe_lives(lives: Sequence[Life], number: int, origin: int = 0) -> Iterator[str]:
    """Yield a line on the attempts, if there are several, and on each rank that ended early.

    ``number`` is the attempt that is analyzed, ``origin`` time 0 of the trace.
    """
    attempts = attempts_of(lives)
    count = attempts[-1].number if attempts else 0
    if count > 1:
        ranks = sorted({life.rank for a in attempts[:-1] or attempts for life in a.lives})
        who = format_ids("rank", ranks) if ranks[0] != UNKNOWN else "the program"
        lost = sorted(set(range(1, count)) - {attempt.number for attempt in attempts})
        parts = [f"attempt {attempt.number} {attempt}" for attempt in attempts[-_MOST_SHOWN:]]
        parts += [f"{format_ids('attempt', lost)} left nothing"] if lost else []
        others = [a for a in attempts if a.number != number]
        if others:
            start, end = ((t - origin) / 1e9 for t in (others[-1].start, others[-1].end))
            shows = f"`--time {max(start, 0):.3f}s:{end:.3f}s` shows attempt {others[-1].number}"
            parts.append(f"the analysis covers attempt {number}, {shows}")
        yield f"{who}: {count} attempts: {'; '.join(parts)}"
    elif count and len(attempts[0].lives) > 1 and attempts[0].exit_code:
        yield f"the run {attempts[0]}"
    yield from _early_ends([life for life in _members(lives, number) if life.steps])


def _early_ends(lives: Sequence[Life]) -> Iterator[str]:
    """Yield a line for each rank that made fewer steps than the others and ended before them."""
    most = max((life.steps for life in lives), default=0)
    latest = max((life.last_step for life in lives), default=0)
    early = []
    for life in lives:
        mean = (life.last_step - life.first_step) / max(life.steps - 1, 1)
        # A process that is killed takes its last steps along, a second at most, unwritten.
        unsure = _UNWRITTEN_NS if life.exit_code is None else 0
        reached = life.last_step if life.exit_code == 0 else life.end
        ahead = latest - reached > max(_STEPS_APART * mean, unsure)
        if life.steps <= most - _STEPS_APART and ahead:
            early.append(life)
    for life in sorted(early, key=lambda life: life.last_step)[:_MOST_SHOWN]:
        who = f"rank {life.rank}" if life.rank != UNKNOWN else "a process"
        ended = f", and it ended{life.how_ended}" if life.how_ended else ""
        yield (
            f"{who} ended early: its last recorded step, {life.steps:,} of {most:,}, was "
            f"{format_ns(latest - life.last_step)} before the others'{ended}; the rest of it is "
            "missing"
        )
    if len(early) > _MOST_SHOWN:
        yield f"{len(early) - _MOST_SHOWN:,} more ended early"
