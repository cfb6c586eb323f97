"""Answers of `gputrace try` in generated trials, whose truth is known, as a table.

Steps of a program resemble those before them, some take far longer than most, and a validation or a
checkpoint comes back every few turns. Of each kind of noise, trials are decided as `gputrace try`
does, look by look, in the orders of its turns: the interval that is shown must hold the planted
effect in 95 % of them, and a cure without effect be called faster or slower in 5 % at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import Options
from benchmarks.tables import show, verdict
from gputrace.trials.cures import Candidate
from gputrace.trials.runs import Turns
from gputrace.trials.statistics import LOOKS, MOST, Ratio, Verdict, compare

TRIALS: Final = 2_000
EFFECTS: Final = (1.0, 0.95, 0.8, 0.5)
"""Steps with a cure as parts of those without."""
COVERED, WRONG = 0.95, 0.05
_STEPS: Final = 20
"""Steps of a turn."""
_EVENT: Final = 3.0
"""Median length of an event, in steps."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of steps, whose logarithms are correlated and of Student's distribution."""

    name: str
    scatter: float
    """Standard deviation of a step's logarithm."""
    correlation: float = 0.8
    """Correlation of a step with the one before it."""
    freedom: int = 3
    """Degrees of freedom of the distribution: 3 is one of heavy tails."""
    steps: int = _STEPS
    """Steps of a turn; 1 for a run as a whole."""
    event_turns: float = 0.0
    """Turns from one event to the next; 0 for none."""
    drift: float = 0.0
    """Standard deviation by which the speed of the machine changes from turn to turn."""

    def turns(self, count: int, trials: int, seed: int) -> NDArray[np.float64]:
        """Return the mean steps of turns, a row a trial."""
        random, steps = np.random.default_rng(seed), count * self.steps
        scale = self.scatter * math.sqrt(
            (1 - self.correlation**2) * (self.freedom - 2) / self.freedom
        )
        logs = scale * random.standard_t(self.freedom, (trials, steps))
        for step in range(1, steps):
            logs[:, step] += self.correlation * logs[:, step - 1]
        times = np.exp(logs)
        if self.event_turns:
            between = self.event_turns * self.steps
            since = (np.arange(steps) + random.uniform(0, between, (trials, 1))) % between
            times += (since < 1) * random.lognormal(math.log(_EVENT), 0.5, (trials, steps))
        speeds = np.exp(self.drift * random.normal(size=(trials, count)).cumsum(axis=1))
        means: NDArray[np.float64] = times.reshape(trials, count, -1).mean(axis=2) * speeds
        return means


NOISES: Final = (
    *(
        Noise(f"whole runs, {100 * part:g}%", part, 0.0, 30, 1)
        for part in (0.005, 0.01, 0.02, 0.05)
    ),
    *(Noise(f"runs like those before, {p:.0%}", p, 0.5, 3, 1) for p in (0.01, 0.02, 0.05)),
    *(Noise(f"steps in turns, {part:.0%}", part) for part in (0.02, 0.05, 0.2)),
    *(Noise(f"and an event each {n:g} turns", 0.05, event_turns=n) for n in (2, 3, 3.5, 4, 7)),
    Noise("turns, and drift of 1%", 0.05, drift=0.01),
)


@dataclass(frozen=True, slots=True)
class Tally:
    """Outcome of the trials of one effect under one kind of noise, as parts of all."""

    covered: float
    """Trials whose interval holds the effect."""
    wrong: float
    """Answers that are wrong: the opposite, or a difference where there is none."""
    decided: float
    """Answers that are right."""
    rounds: float
    """Mean rounds of a trial."""


def tally(noise: Noise, effect: float, trials: int = TRIALS, seed: int = 1) -> Tally:
    """Decide trials of a cure of some effect."""
    orders = Turns((Candidate(),), _STEPS).orders
    means = noise.turns(2 * MOST, trials, seed)
    rounds = means.reshape(trials, MOST, 2)
    cured_at = np.array([orders[number % len(orders)].index(1) for number in range(MOST)])
    each = np.arange(MOST)
    bare, cured = rounds[:, each, 1 - cured_at], rounds[:, each, cured_at] * effect
    right = Verdict.ALIKE if effect == 1 else Verdict.FASTER
    answers = [_decided(*pair) for pair in zip(bare, cured, strict=True)]
    verdicts = [answer.verdict for answer in answers]
    return Tally(
        sum(answer.low <= effect <= answer.high for answer in answers) / trials,
        sum(answer not in (right, Verdict.OPEN) for answer in verdicts) / trials,
        verdicts.count(right) / trials,
        sum(answer.rounds for answer in answers) / trials,
    )


def _decided(bare: Sequence[float], cured: Sequence[float]) -> Ratio:
    """Return the answer at the first look that is enough."""
    answers = (compare(bare[:look], cured[:look]) for look in LOOKS)
    return next(answer for answer in answers if answer is not None and answer.enough)


def run(options: Options) -> int:
    """Print the table; 1 where an interval or an answer is wrong more often than it says."""
    rows, met = [], True
    for noise in NOISES:
        for effect in EFFECTS:
            found = tally(noise, effect)
            fine = found.covered >= COVERED and found.wrong <= WRONG
            met &= fine
            shares = (f"{100 * part:.1f}" for part in (found.covered, found.wrong, found.decided))
            name = noise.name if effect == EFFECTS[0] else ""
            rows.append((name, f"{effect:g}", *shares, f"{found.rounds:.1f}", verdict(fine)))
    header = ("noise", "step", "covered, %", "wrong, %", "right, %", "rounds", "")
    show(f"{TRIALS:,} generated trials each", header, rows)
    return int(not met)
