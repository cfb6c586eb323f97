"""The recorder follows the steps: windows of them, and those that go unrecorded."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import pytest

from gputrace.collectors.session import HOOKS
from tests.helpers.handmade import MS
from tests.helpers.programs import LOAD, LOOP, Program, calls, event_names


def test_a_window_of_steps_is_captured_from_its_first_step_to_its_last(
    torch: Program, library: dict[str, str]
) -> None:
    out = torch.quietly(
        LOOP + LOAD + "load(); optimizer = Optimizer()\n"
        "for i in range(6): print(i, calls()); optimizer.step()\n",
        GPUTRACE_STEPS="2:4",
        **library,
    )
    on, off = "capture 1", "capture 1,capture 0"
    assert out.splitlines() == ["0 none", "1 none", f"2 {on}", f"3 {on}", f"4 {off}", f"5 {off}"]
    assert event_names(torch.events(), "note") == [
        "recording from step 2",
        "recorded to the end of step 3",
    ]


def test_the_collector_learns_of_each_step_once_it_is_loaded(
    torch: Program, library: dict[str, str]
) -> None:
    """It is looked for when the hooks write: each second."""
    out = torch.quietly(
        LOOP + LOAD + "import time\noptimizer = Optimizer()\n"
        "library = os.environ['GPUTRACE_LIBRARY']\n"
        "def steps(): return ctypes.c_int.in_dll(ctypes.CDLL(library), 'steps').value\n"
        "load(); optimizer.step(); time.sleep(1.2); optimizer.step(); before = steps()\n"
        "for i in range(5): optimizer.step()\n"
        "print(steps() - before)\n",
        **library,
    )
    assert out == "5\n"


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("2:10", ". . + . . . + . . . . ."),
        ("1:", ". + . . . + . . . + . ."),
    ],
)
def test_recurring_windows_include_the_step_before_each(
    torch: Program, library: dict[str, str], window: str, expected: str
) -> None:
    """One step (+) of each four: the one before it is captured too, as the gap between is its."""
    out = torch.quietly(
        LOOP + LOAD + "load(); optimizer = Optimizer()\n"
        "for i in range(12): print(calls().split(',')[-1]); optimizer.step()\n",
        GPUTRACE_STEPS=window,
        GPUTRACE_EVERY="4:1",
        **library,
    )
    on = [line == "capture 1" for line in out.splitlines()]
    wanted = [step == "+" for step in expected.split()]
    first = wanted.index(True)
    before = [number + 1 < 12 and number >= first and wanted[number + 1] for number in range(12)]
    assert on == [a or b for a, b in zip(wanted, before, strict=True)]
    assert event_names(torch.events(), "note") == []


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("0:2", ["capture 1", "capture 0"]),
        (":2", ["capture 1", "capture 0"]),
        ("2:", ["capture 1"]),
        ("9:10", []),
    ],
)
def test_a_library_that_is_loaded_late_gets_the_calls_it_missed(
    torch: Program, library: dict[str, str], window: str, expected: list[str]
) -> None:
    torch.quietly(
        LOOP + LOAD + "import time\noptimizer = Optimizer()\n"
        "for item in _BaseDataLoaderIter(range(6), 0.11):\n"
        "    if item == 0: load()\n"
        "    optimizer.step()\n",
        GPUTRACE_STEPS=window,
        **library,
    )
    assert calls(library) == expected


def test_a_window_that_cannot_be_parsed_is_noted(torch: Program) -> None:
    torch.quietly(LOOP + "Optimizer().step()", GPUTRACE_STEPS="early")
    assert event_names(torch.events(), "note") == ["GPUTRACE_STEPS=early names no steps"]


WITH_DRIVER: Final = """
import ctypes, os
def calls():
    path = os.environ["CALLS"]
    return ",".join(open(path).read().splitlines()) if os.path.exists(path) else "none"
def load(): ctypes.CDLL("libcuda.so.1").start_cuda()
"""


def test_other_recorders_follow_the_steps_through_cudas_profiler_api(
    torch: Program, driver: dict[str, str]
) -> None:
    out = torch.quietly(
        LOOP + WITH_DRIVER + "load(); optimizer = Optimizer()\n"
        "for i in range(4): print(i, calls()); optimizer.step()\n",
        GPUTRACE_STEPS="1:3",
        **driver,
    )
    assert out.splitlines() == ["0 none", "1 start", "2 start", "3 start,synchronize,stop"]


def test_a_window_from_the_first_step_waits_for_cuda(
    torch: Program, driver: dict[str, str]
) -> None:
    torch.quietly(
        LOOP + WITH_DRIVER + "optimizer = Optimizer(); ctypes.CDLL('libcuda.so.1')\n"
        "for item in _BaseDataLoaderIter(range(6), 0.3):\n"
        "    if item == 2: load()\n"
        "    optimizer.step()\n",
        GPUTRACE_STEPS="0:6",
        **driver,
    )
    assert calls(driver) == ["start", "synchronize", "stop"]


def test_each_rank_ends_its_window_by_itself(torch: Program, driver: dict[str, str]) -> None:
    script = LOOP + WITH_DRIVER + "load(); optimizer = Optimizer()\n"
    script += "for i in range(3): optimizer.step()\n"
    ranks = {"LOCAL_WORLD_SIZE": "2", "GPUTRACE_STEPS": "1:2"}
    torch.quietly(script, **ranks, **driver)
    assert calls(driver) == ["start", "synchronize", "stop"]


def test_the_driver_is_not_called_in_a_program_without_cuda(
    torch: Program, driver: dict[str, str]
) -> None:
    torch.quietly(
        LOOP + "optimizer = Optimizer()\nfor i in range(3): optimizer.step()\n",
        GPUTRACE_STEPS="1:2",
        **driver,
    )
    assert calls(driver) == []


# ---- control stretches and sampling, on a clock of the test's ----


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
