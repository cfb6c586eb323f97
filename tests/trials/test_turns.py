"""Turns of cures within a run: which steps count, and for which cure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gputrace.trials.cures import read_candidates
from gputrace.trials.history import History, Request, Row
from gputrace.trials.runs import Change, Turn, Turns
from gputrace.trials.statistics import MOST, Verdict, compare
from tests.helpers.tried_programs import InProgram, row_of


def test_turns_are_measured_in_the_order_in_which_they_are_switched(
    hooks: InProgram, tmp_path: Path
) -> None:
    """A step takes 10 with no cure, 7 with gc, 4 with bf16; the first of a turn takes long.

    After two rounds the second cure has no more turns. Another process makes a few steps too.
    """
    turns = Turns(tuple(read_candidates("gc,bf16,gc+bf16")), 5)
    asked = {"warmup": 6, "steps": 500, "folder": str(tmp_path)}
    hooks.state.asked.update(asked | turns.asked)
    trial, on = hooks.state.trial, hooks.state._on
    warm = []
    for count in range(6 + (2 * 4 + 2 * 3) * 5):
        warm.append(sorted(on))
        step = 10 - sum({"gc": 3, "bf16": 6}[cure] for cure in on)
        end = (trial.ends or [0])[-1] + step + 100 * (count >= 6 and (count - 6) % 5 == 0)
        trial.loss = float(end - (trial.ends or [0])[-1])
        if count == 6 + 2 * 4 * 5 - 1:
            (tmp_path / "going").write_text("[1, 3]")
        trial.step_ended(0, end)
        trial.ends[-1] = end
    assert warm[1:6] == [["gc"], ["bf16"], ["bf16"], ["bf16", "gc"], ["bf16", "gc"]]
    left: Any = SimpleNamespace(
        ends=trial.ends, losses=trial.losses, rank=0, rounds=trial.rounds[:4], batches=[]
    )
    other: Any = SimpleNamespace(
        ends=trial.ends[:9], losses=[None] * 9, rank=None, rounds=[], batches=[]
    )
    assert turns.measured([other, left], 6) == tuple(
        (Turn(10, with_cure, (10, with_cure)),) * rounds
        for with_cure, rounds in [(7, 4), (4, 2), (1, 4)]
    )


def rounds_of(turns: Turns, step: Callable[[int], float]) -> tuple[tuple[Turn, ...], ...]:
    """The rounds of a run of which each step takes as long as its number says."""
    total = MOST * (len(turns.each) + 1) * turns.stretch
    ends = np.cumsum([1.0, *map(step, range(total))]).tolist()
    rounds = itertools.islice(itertools.cycle(turns.orders), MOST)
    left: Any = SimpleNamespace(
        ends=ends, losses=[None] * len(ends), rank=0, rounds=list(rounds), batches=[]
    )
    return turns.measured([left], 1)


@pytest.mark.parametrize("cures", ["gc", "gc,bf16,tf32"])
@pytest.mark.parametrize("every", [2, 3, 4, 6, 8])
def test_what_comes_back_every_few_turns_makes_no_cure_faster(cures: str, every: int) -> None:
    """A validation, say, that takes as long as a step, in one of so many turns."""
    turns = Turns(tuple(read_candidates(cures)), 5)
    noise = np.random.default_rng(3).normal(1, 0.004, 10_000)

    def step(begins: int, at: int) -> float:
        turn, number = divmod(at + begins * 5, 5)
        return float(noise[at]) + (turn % every == 0 and number == 2)

    for begins in range(every):
        for pairs in rounds_of(turns, partial(step, begins)):
            ratio = compare([pair.bare_ns for pair in pairs], [pair.cured_ns for pair in pairs])
            assert ratio is not None
            assert ratio.verdict not in (Verdict.FASTER, Verdict.SLOWER)


def test_what_drifts_falls_on_all_turns() -> None:
    turns = Turns(tuple(read_candidates("gc,bf16,tf32")), 5)
    for pairs in rounds_of(turns, lambda at: 1 + at * 1e-3):
        whole = pairs[: len(pairs) // 2 * 2]
        bare, cured = sum(pair.bare_ns for pair in whole), sum(pair.cured_ns for pair in whole)
        assert bare == pytest.approx(cured)


def test_turns_of_a_loader_pass_over_what_was_ready_before() -> None:
    history = History(Request(("x",)))
    history.pilot = SimpleNamespace(step_ns=50_000_000, buffered=4)  # type: ignore[assignment]
    cures = read_candidates("gc,workers=6,pinned,prefetch=4,workers=6+prefetch=4")
    turns = [history.turns([Row(cure)]) for cure in cures]
    # Eight steps are 0.4 s; batches come in bursts of as many as there are workers.
    assert [(each.passed, each.stretch - each.passed) for each in turns] == [
        (1, 8),
        (13, 36),
        (5, 12),
        (9, 24),
        (25, 72),
    ]


class Workers:
    """Loader of workers that take the same time for each batch, in turn; a step takes 20 ms."""

    def __init__(self, count: int, prefetch: int, batch: float) -> None:
        self.free, self.batch, self.made = [0.0] * count, batch, 0
        self.due: list[float] = []
        for _ in range(count * prefetch):
            self.ask(0.0)

    def ask(self, now: float) -> None:
        worker = self.made % len(self.free)
        self.made += 1
        self.free[worker] = max(self.free[worker], now) + self.batch
        self.due.append(self.free[worker])

    def step(self, now: float) -> float:
        """The end of the step that asks for a batch now."""
        now = max(now, self.due.pop(0))
        self.ask(now)
        return now + 20

    def ready(self, now: float) -> int:
        return sum(due <= now for due in self.due)

    def mean(self) -> float:
        """The mean step of a run with this loader alone."""
        ends = [0.0]
        for _ in range(400):
            ends.append(self.step(ends[-1]))
        return (ends[400] - ends[200]) / 200


class Sharing(Workers):
    """Such a loader, whose workers share two cores with those of other loaders."""

    def __init__(
        self, count: int, prefetch: int, batch: float, all_of_them: list[Sharing] | None = None
    ) -> None:
        self.all = [] if all_of_them is None else all_of_them
        self.all.append(self)
        self.tasks: list[list[list[float]]] = [[] for _ in range(count)]
        self.done: set[float] = set()
        self.given = 0
        super().__init__(count, prefetch, batch)

    def ask(self, now: float) -> None:
        self.tasks[self.made % len(self.tasks)].append([self.made, self.batch])
        self.made += 1

    def work(self) -> None:
        """Have the workers of all loaders work for a millisecond."""
        busy = [(each, tasks) for each in self.all for tasks in each.tasks if tasks]
        for each, tasks in busy:
            tasks[0][1] -= min(1.0, 2 / len(busy))
            if tasks[0][1] <= 1e-6:
                each.done.add(tasks.pop(0)[0])

    def step(self, now: float) -> float:
        while self.given not in self.done:
            self.work()
            now += 1
        self.done.remove(self.given)
        self.given += 1
        self.ask(now)
        for _ in range(20):
            self.work()
        return now + 20

    def ready(self, now: float) -> int:
        return len(self.done)


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("cure", ["prefetch=4", "workers=4", "workers=1"])
@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        *((Workers, batch) for batch in (38.0, 44.0, 48.0, 60.0, 120.0)),
        (Sharing, 60),
        (Sharing, 99),
    ],
)
def test_a_turn_of_a_loader_does_not_live_on_what_others_had_it_make(
    kind: type[Workers], cure: str, batch: float, batches: int
) -> None:
    """What two workers get ready while another loader has its turn makes none faster.

    Where they share cores with those of the other, they make it little slower. A step that
    accumulates gradients takes several batches.
    """
    [candidate] = read_candidates(cure)
    history = History(Request(("x",)))
    history.pilot = SimpleNamespace(step_ns=30_000_000, buffered=4)  # type: ignore[assignment]
    turns = history.turns([Row(candidate)])
    values = {"workers": 2, "prefetch": 2} | {s.cure.id: s.value for s in candidate.settings}
    given: Any = (values["workers"], values["prefetch"], batch)
    together: Any = [[]] if kind is Sharing else []
    loaders = [kind(2, 2, batch, *together), kind(*given, *together)]
    orders = turns.orders[:11]
    ends, counted = [0.0], []
    for turn in itertools.chain(*orders):
        for step in range(1, turns.stretch + 1):
            end = ends[-1]
            for _ in range(batches):
                end = loaders[turn].step(end)
            ends.append(end)
            if step in (turns.passed, turns.stretch):
                counted.append([loaders[turn].ready(end), batches * (len(ends) - 1)])
    losses = [None] * len(ends)
    left: Any = SimpleNamespace(ends=ends, losses=losses, rank=0, rounds=orders, batches=counted)
    [pairs] = turns.measured([left], 1)
    ratio = compare([pair.bare_ns for pair in pairs], [pair.cured_ns for pair in pairs])
    by_hand = kind(*given).mean() / kind(2, 2, batch).mean()
    assert ratio is not None
    assert ratio.ratio == pytest.approx(by_hand, rel=0.05)


@pytest.mark.parametrize(
    ("cure", "ratio", "verdict"),
    [
        ("prefetch=4", 0.98, "cannot tell yet"),
        ("prefetch=4", 0.95, "faster"),
        ("prefetch=4", 1.0, "no difference"),
        ("fused", 0.975, "faster"),
    ],
)
def test_a_part_of_a_batch_makes_no_loader_faster(cure: str, ratio: float, verdict: str) -> None:
    """In a turn, its batches are counted as whole ones."""
    row = row_of(cure)
    run: Any = SimpleNamespace(
        changes=[Change(row.candidate.settings[0].cure.id, "f", "", -1, "", "", "", 0)],
        seconds=1.0,
        turns=((),),
        reasons={},
    )
    scatter = [1.001, 0.999, 1.0] * 7
    row.take(run, [Turn(1e7, 1e7 * ratio * each) for each in scatter])
    assert str(row.verdict) == verdict


@pytest.mark.parametrize("cure", ["less-often=train.py:9", "async-checkpoint", "gc"])
def test_turns_and_runs_are_whole_periods_of_the_checkpoints_that_they_cure(cure: str) -> None:
    """Else a checkpoint every 20 steps is in some turns, and hides what a cure gains."""
    history = History(Request(("x",), budget_s=100.0))
    history.pilot = SimpleNamespace(  # type: ignore[assignment]
        step_ns=27_000_000, buffered=0, start_s=9.0, threads=0
    )
    phases = [SimpleNamespace(phase="checkpoint", step=step) for step in (19, 39, 59)]
    analysis: Any = SimpleNamespace(
        phases=phases,
        findings=[],
        ledger=[],
        steps=SimpleNamespace(mean_ns=None),
        step_phases=[],
        loader=[],
        what_if=[],
    )
    history.enter(read_candidates(cure), analysis)
    counted = history.turns(history.rows).stretch - 1
    assert (counted % 20 == 0) is (cure != "gc")
    assert (history.steps % 20 == 0) is (cure == "async-checkpoint")


def test_a_program_of_long_steps_passes_and_measures_few(hooks: InProgram) -> None:
    history = History(Request(("x",), budget_s=60.0))
    history.pilot = SimpleNamespace(  # type: ignore[assignment]
        step_ns=2_000_000_000, buffered=0, start_s=9.0, threads=0
    )
    history.enter(read_candidates("dynamic"), None)
    assert (history.warmup, history.steps) == (3, 5)
