"""Statistics of a trial: intervals hold, and wrong verdicts are rare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gputrace.trials.race import order
from gputrace.trials.statistics import (
    ALIKE,
    MOST,
    Ratio,
    Verdict,
    across,
    compare,
    compare_with_first,
    glance,
    losses_differ,
    turn_losses_differ,
)


@pytest.mark.parametrize("scatter", [0.0, 0.005, 0.02, 0.15])
def test_intervals_of_several_starts_hold_what_a_start_gains_on_average(scatter: float) -> None:
    random, held = np.random.default_rng(3), 0
    for _ in range(1000):
        starts = np.exp(random.normal(np.log(0.5), scatter, 3))
        ratios = []
        for start in starts:
            ratio = compare([1.0] * 6, start * np.exp(random.normal(0, 0.01, 6)))
            assert ratio is not None
            ratios.append(ratio)
        joined = across(ratios)
        held += joined.low <= 0.5 <= joined.high
    assert held >= 950


@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.3, 1.0])
def test_two_whole_runs_decide_only_what_is_many_times_as_fast(scatter: float) -> None:
    random = np.random.default_rng(3)

    def ratio(effect: float) -> Ratio | None:
        bare, cured = np.exp(random.normal(0, scatter, (2, 2)))
        return glance(bare, effect * cured)

    assert sum(ratio(1.0) is not None for _ in range(2000)) < 20
    found = [each for each in (ratio(0.05) for _ in range(500)) if each]
    assert all(each.verdict == Verdict.FASTER and not each.enough for each in found)
    assert sum(not each.low <= 0.05 <= each.high for each in found) < 0.05 * 500
    assert len(found) == 500 or scatter > 0.1
    assert glance([1.0, 1.0], [0.6, 0.6]) is None


def verdicts(
    effect: float, noise: float, drift: float = 0.0, busy: float = 0.0, tries: int = 300
) -> list[Verdict]:
    """Answers to trials of a cure that makes steps longer by a factor; runs differ by the noise,
    and a part of them falls into a busy time of the machine, which doubles their steps."""
    answers, random = [], np.random.default_rng(1)
    for _ in range(tries):
        pairs: list[tuple[float, float]] = []
        answer = None
        while answer is None or not answer.enough:
            at, steps = 2 * len(pairs), [1.0, effect]
            for place, which in enumerate(order([0, 1], len(pairs))):
                steps[which] *= np.exp(random.normal(drift * (at + place), noise))
                steps[which] *= 2 if random.random() < busy else 1
            pairs.append((steps[0], steps[1]))
            answer = compare(*zip(*pairs, strict=True))
        answers.append(answer.verdict)
    return answers


@pytest.mark.parametrize(("noise", "busy"), [(0.001, 0), (0.01, 0), (0.1, 0), (0.01, 0.1)])
def test_what_makes_no_difference_is_called_different_in_less_than_one_try_of_twenty(
    noise: float, busy: float
) -> None:
    answers = verdicts(1.0, noise, busy=busy)
    assert sum(answer in (Verdict.FASTER, Verdict.SLOWER) for answer in answers) < len(answers) / 20


def test_no_difference_is_said_to_be_one_in_19_of_20_tries() -> None:
    assert verdicts(1.0, 0.01).count(Verdict.ALIKE) > 0.95 * 300
    assert verdicts(1.0, 0.005, busy=0.02).count(Verdict.ALIKE) > 0.95 * 300


def test_runs_that_scatter_by_as_much_as_is_no_difference_are_rarely_judged_wrong() -> None:
    answers = verdicts(1.0, 0.02)
    assert answers.count(Verdict.FASTER) + answers.count(Verdict.SLOWER) < 0.05 * len(answers)
    assert answers.count(Verdict.ALIKE) > 0.7 * len(answers)


@pytest.mark.parametrize(("effect", "verdict"), [(0.8, Verdict.FASTER), (1.25, Verdict.SLOWER)])
def test_a_fifth_is_found_also_where_the_machine_slows_down(
    effect: float, verdict: Verdict
) -> None:
    answers = verdicts(effect, 0.03, drift=0.01)
    assert answers.count(verdict) > 0.95 * len(answers)


@pytest.mark.parametrize(
    ("steps", "verdict", "enough"),
    [
        ([0.0967, 0.0955, 0.098], Verdict.FASTER, True),
        ([0.5, 0.51, 0.49], Verdict.FASTER, True),
        ([1 / 0.5, 1 / 0.51, 1 / 0.49], Verdict.SLOWER, True),
        ([0.5, 0.8, 0.6], Verdict.OPEN, False),
        ([0.8, 0.81, 0.79], Verdict.FASTER, False),
    ],
)
def test_what_is_seen_at_a_glance_is_said_after_three_rounds(
    steps: Sequence[float], verdict: Verdict, enough: bool
) -> None:
    answer = compare([1.0] * 3, steps)
    assert answer is not None
    assert (answer.verdict, answer.enough) == (verdict, enough)


def test_a_single_run_is_compared_with_the_first_by_how_many_steps_were_slow() -> None:
    """Of five steps, one took 101: by then at least 0.5% of all do, and at most 72%."""
    ratio = compare_with_first([1.3, 101, 1, 1, 1], [1.0] * 9)
    assert ratio is not None
    times = [1 / each for each in (ratio.high, ratio.ratio, ratio.low)]
    assert times == pytest.approx([1.51, 21, 72.6], rel=0.01)
    assert compare_with_first([1.3, 101, 1, 1, 1], [1.0] * 8 + [51]) is None, "one with it, too"
    assert compare_with_first([1, 31, 1, 1, 1], [1.0] * 9) is None, "too rare to be clear"
    assert compare_with_first([1.9] * 40, [1.0] * 40) is None, "the first run is recorded"


def test_a_single_run_is_hardly_ever_wrong_about_how_often_steps_are_slow() -> None:
    random = np.random.default_rng(3)
    for part in (0.01, 0.1, 0.5):
        truth, wrong = 1 / (1 + 99 * part), 0
        for _ in range(500):
            steps = np.where(random.random(6) < part, 100.0, 1.0)
            ratio = compare_with_first(steps.tolist(), [1.0] * 6)
            wrong += ratio is not None and not ratio.low <= truth <= ratio.high
        assert wrong <= 0.05 * 500


def test_little_that_is_sure_is_no_difference_and_noise_ends_undecided() -> None:
    assert compare([1, 1, 1], [0.99, 0.99, 0.99]).verdict == Verdict.ALIKE  # type: ignore[union-attr]
    assert ALIKE == 0.02
    noisy = compare([1.0] * MOST, [0.5, 1.5, 2, 1, *[0.4, 2.5] * MOST][:MOST])
    assert noisy is not None
    assert (noisy.verdict, noisy.enough) == (Verdict.OPEN, True)
    assert compare([1, 1], [2, 2]) is None


def falling(scale: float, seed: int = 0, scatter: float = 0.05) -> list[float]:
    steps = np.arange(40)
    noise = np.random.default_rng(seed).normal(0, scatter, 40)
    return [float(value) for value in scale * np.exp(-steps / 40) * (1 + noise)]


@pytest.mark.parametrize(
    ("cured", "differs"),
    [
        ([falling(1.0)] * 3, False),
        ([falling(1.0, seed) for seed in range(4, 7)], False),
        ([falling(1.3)] * 3, True),
        ([[float("nan")] * 40], True),
        ([[]], None),
    ],
)
def test_a_loss_that_leaves_its_scatter_is_flagged(
    cured: Sequence[Sequence[float]], differs: bool | None
) -> None:
    assert losses_differ([falling(1.0, seed) for seed in range(3)], cured) is differs


@pytest.mark.parametrize(
    ("pairs", "differs"),
    [
        ([(1.00, 1.001), (0.9, 0.9), (0.8, 0.8)], False),
        ([(1.0, 0.9), (0.9, 1.0), (0.8, 0.7), (0.7, 0.8)], False),
        ([(1.00, 1.30), (0.9, 1.2), (0.8, 1.11)], True),
        ([(1.0, 1.0), (0.9, float("nan")), (0.8, 0.8)], True),
        ([(1.0, 1.0), (float("nan"), 1.0), (0.8, 0.8)], None),
        ([(1.0, 2.0)] * 2, None),
    ],
)
def test_a_loss_that_differs_by_turns_is_flagged(
    pairs: Sequence[tuple[float, float]], differs: bool | None
) -> None:
    assert turn_losses_differ(pairs) is differs
