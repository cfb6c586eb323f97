"""When steps go unrecorded: control stretches, and sampling, on clocks of our own."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import pytest

from gputrace.collectors.session import HOOKS

MS: Final = 1_000_000


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[ModuleType]:
    """The module of the hooks, as a program would load it."""
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.setenv("GPUTRACE_DIR", str(tmp_path))
    before = set(sys.modules)
    yield importlib.import_module("_gputrace_hooks.control")
    for name in set(sys.modules) - before:
        if name.startswith("_gputrace_hooks"):
            del sys.modules[name]


class Training:
    """Steps on a clock of its own, that take longer while they are recorded."""

    def __init__(
        self,
        module: ModuleType,
        bare: float,
        recorded: float,
        *,
        begin_ms: float = 50,
        idle: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.now, self.is_recorded, self.has_let_go = 10**18, True, False
        self.steps: list[int] = []
        self._lengths = {False: bare * MS, True: recorded * MS}
        self._idle = (bare + idle * (recorded - bare)) * MS
        self._stays = False
        self._begin_ns, self._random = int(begin_ms * MS), random.Random(seed)
        self._module = module

    def run(self, count: int, jumps: dict[int, int] | None = None) -> None:
        module: Any = self._module
        module.capture = lambda on: self._record()
        module.rest = lambda hold, stays: self._rest(stays)
        module.time_ns = lambda: self.now
        stretches = module.Stretches()
        for step in range(1, count + 1):
            if self.is_recorded:
                self.steps.append(step)
            length = self._idle if self._stays else self._lengths[self.is_recorded]
            self.now += round(length * self._random.uniform(0.97, 1.03))
            self.now += (jumps or {}).get(step, 0)
            if step >= stretches.at:
                stretches.look(step, self.now)

    def _record(self) -> None:
        self.is_recorded, self._stays = True, False
        self.now += self._begin_ns

    def _rest(self, stays: bool) -> bool:
        self.is_recorded, self._stays = False, stays
        self.has_let_go |= not stays
        return True


def left_out(training: Training, count: int) -> list[int]:
    return sorted(set(range(1, count + 1)) - set(training.steps))


@pytest.mark.parametrize(
    ("bare", "recorded", "first"), [(25, 33, 128), (7, 7.5, 512), (1000, 1000, 64)]
)
def test_control_stretches_begin_at_powers_of_two_and_are_few(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch, bare: float, recorded: float, first: int
) -> None:
    monkeypatch.setenv("GPUTRACE_CONTROL", "1")
    monkeypatch.setenv("GPUTRACE_SAMPLE", "all")
    training = Training(stretches, bare, recorded)
    training.run(20_000)
    out = left_out(training, 20_000)
    assert out[0] == first + 1
    begins = [step for step, before in zip(out, [0, *out], strict=False) if step != before + 1]
    assert all((step - 1).bit_count() == 1 for step in begins)
    assert len(out) < 0.05 * 20_000
    assert not training.has_let_go


@pytest.mark.parametrize(("bare", "recorded"), [(25.6, 33.8), (7.5, 9.1), (28.5, 28.8), (60, 81)])
def test_sampling_keeps_the_cost_below_its_share(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch, bare: float, recorded: float
) -> None:
    monkeypatch.setenv("GPUTRACE_SAMPLE", "0.02")
    training = Training(stretches, bare, recorded)
    count = int(600_000 / bare)
    training.run(count)
    lengthened = (training.now - 10**18) / (count * bare * MS) - 1
    assert lengthened < 0.02
    assert len(training.steps) > 200
    assert training.has_let_go


@pytest.mark.parametrize(("bare", "recorded"), [(25.6, 33.8), (7.5, 9.1), (34, 52), (200, 260)])
def test_a_long_recording_that_costs_much_goes_on_with_samples(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch, bare: float, recorded: float
) -> None:
    """Though a CUPTI that stays in a control stretch has a third of the cost, as on an H100."""
    notes: list[str] = []
    monkeypatch.setattr(stretches.recorder, "note", notes.append)
    monkeypatch.setenv("GPUTRACE_CONTROL", "1")
    training = Training(stretches, bare, recorded, idle=0.35)
    count = int(600_000 / bare)
    training.run(count)
    lengthened = (training.now - 10**18) / (count * bare * MS) - 1
    assert lengthened < 0.02
    assert len(training.steps) >= min(3_000 / (recorded - bare), 0.8 * count)
    assert max(training.steps) > 0.5 * count
    (note,) = notes
    assert "35 steps are recorded now and then" in note


def test_one_that_costs_next_to_nothing_stays_whole(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_CONTROL", "1")
    training = Training(stretches, 28.5, 28.8)
    training.run(100_000)
    assert len(left_out(training, 100_000)) < 0.01 * 100_000


def test_ranks_that_train_together_record_the_same_steps(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_SAMPLE", "0.02")
    # Those that train together wait for each other: what delays one delays all.
    ranks = [Training(stretches, 25 + rank / 50, 33) for rank in range(4)]
    for training in ranks:
        training.run(20_000)
    steps = [{step for step in training.steps if step > 2_000} for training in ranks]
    fewest = min(steps, key=len)
    assert len(set.intersection(*steps)) > 0.8 * len(fewest)


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_that_is_set_costs_no_more_than_a_cycle(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    monkeypatch.setenv("GPUTRACE_SAMPLE", "0.02")
    training = Training(stretches, 25, 33)
    training.run(20_000, {300: jump_s * 10**9, 5_100: jump_s * 10**9})
    assert max(training.steps) > 15_000
    assert len(training.steps) > 200


def test_neither_is_asked_for_all_steps_are_recorded(stretches: ModuleType) -> None:
    training = Training(stretches, 1, 1)
    training.run(5_000)
    assert left_out(training, 5_000) == []
