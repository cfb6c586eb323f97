"""Proofs that a budget of `gputrace try` buys in simulated programs with planted cures, as a table.

The programs start, step and scatter as those of `workloads/sick` did on an H100, or by chance; a
clock that is simulated too has each run take what it would. In most trials the best planted cure
must be proven, the intervals that are shown hold what was planted in 95 %, and cures without
effect be called faster or slower in 5 % at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from benchmarks.options import Options
from benchmarks.tables import show, verdict
from gputrace.trials.cures import Candidate, read_candidates
from gputrace.trials.history import Request
from gputrace.trials.ledger import Entry
from gputrace.trials.runs import Change, Measured, Spent, Turn, Turns
from gputrace.trials.trial import Trial

BUDGETS_S: Final = (30, 45, 60, 120, 300)
TRIALS: Final = 20
CHANCE: Final = 30
"""Programs by chance."""
COVERED, WRONG = 0.95, 0.05
MOST: Final = 0.8
"""Trials of at least a minute in which the best cure must be proven."""
_ALL: Final = "compute-bound"
"""Finding that no lost time is charged to."""
_RECORDING_S: Final = 4.0
"""Seconds that recording and the analysis of the trace add to a run."""


@dataclass(frozen=True, slots=True)
class Planted:
    """Program, and steps with each of its cures as parts of those without; 0: changes nothing."""

    name: str
    cures: Mapping[str, float]
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Steps as a recording foretells them, by ids of predictions, and of ``workers``."""
    findings: Mapping[str, float] = field(default_factory=dict)
    """Parts of a step that findings cost."""
    step_s: float = 0.03
    start_s: float = 6.0
    slow_s: float = 40.0
    """Seconds that compiling takes."""
    run_scatter: float = 0.01
    turn_scatter: float = 0.03
    buffered: int = 0
    """Batches that its loader may have ready."""
    launches: Mapping[str, float] = field(default_factory=dict)
    """Part of a step in which the GPU waits for launches, by phase."""

    def factor(self, candidate: Candidate) -> float:
        """Return the step with all cures of a candidate."""
        return math.prod(self.cures.get(str(each), 1.0) or 1.0 for each in candidate.settings)

    @property
    def best(self) -> float:
        """Return the step with the best single cure."""
        return min(factor for factor in self.cures.values() if factor)

    @property
    def analysis(self) -> Any:
        """Return as much of a recording's analysis as a trial reads."""
        now = 1e9 * self.step_s
        effects = [
            SimpleNamespace(
                id=id, now_ns=now, step_ns=now * part, low_ns=now * part, high_ns=now * high
            )
            for id, part in self.predicted.items()
            for high in [(1 + part) / 2]
        ]
        workers = self.predicted.get("workers")
        choices = [
            SimpleNamespace(workers=number, step_ns=now * workers)
            for number in (4, 8, 16)
            if workers
        ]
        loader = SimpleNamespace(
            predictions=choices,
            now=SimpleNamespace(step_ns=now),
            wait_ns=0,
            prefetch_factor=2,
            doubled_step_ns=now * self.predicted.get("prefetch", 1.0),
        )
        phases = [
            SimpleNamespace(name=name, launch_ns=now * part, host_ns=1.2 * now * part)
            for name, part in self.launches.items()
        ]
        return SimpleNamespace(
            step_phases=[SimpleNamespace(step_ns=now, phases=phases)] if phases else [],
            phases=(),
            what_if=effects,
            loader=[loader],
            findings=[SimpleNamespace(id=i, impact_ns=p * now) for i, p in self.findings.items()],
            causes=[],
            breakdown=[SimpleNamespace(total_ns=now)],
            ledger=[
                SimpleNamespace(cause=id, ns=part * now, line=None)
                for id, part in self.findings.items()
                if id != _ALL
            ],
            steps=SimpleNamespace(mean_ns=now),
        )


_PLAIN: Final = {"fused": 1.0, "foreach": 1.0, "set-to-none": 0.0, "compile=default": 1.0}
SICK: Final = (
    Planted(
        "optimizer",
        {"graphs": 0.8, "fused": 0.36, "foreach": 0.4, "set-to-none": 0, "compile=default": 0.8},
        {"graphs": 0.2},
        {"launch-bound": 0.8},
        0.045,
        turn_scatter=0.08,
        launches={"forward": 0.12, "backward": 0.16, "optimizer": 0.55},
    ),
    Planted(
        "launches",
        {"graphs": 0.18, **_PLAIN, "fused": 0.95, "compile=default": 0.5},
        {"graphs": 0.155},
        {"launch-bound": 0.85},
        0.033,
        turn_scatter=0.1,
        launches={"forward": 0.35, "backward": 0.4, "optimizer": 0.04},
    ),
    Planted(
        "starved",
        {
            **{"workers=4": 0.56, "workers=8": 0.54, "workers=16": 0.54},
            **{"prefetch=4": 1.0, "persistent": 1.0, "pinned": 0.98, "staging": 0.98},
            **{"graphs": 0.98, **_PLAIN},
        },
        {"workers": 0.59, "graphs": 0.91, "pinned": 0.97},
        {"data-feeding": 0.4, "launch-bound": 0.1},
        0.029,
        buffered=4,
    ),
    Planted(
        "pageable",
        {"pinned": 0.62, "non-blocking": 0, "staging": 0.87, "graphs": 1.0, **_PLAIN},
        {"pinned": 0.66},
        {"h2d-pageable": 0.4, "launch-bound": 0.05},
        0.044,
        buffered=4,
    ),
    Planted(
        "fp32",
        {
            **{"tf32": 0.263, "bf16": 0.209, "channels-last": 0},
            **{"compile=default": 1.0, "cudnn-benchmark=on": 1.0},
        },
        {"tf32": 0.286, "bf16": 0.208},
        {"no-tensor-cores": 0.7, "compute-bound": 0.5},
        0.0245,
        turn_scatter=0.01,
    ),
    Planted(
        "nchw",
        {
            **{"channels-last": 0.7, "tf32": 1.0, "bf16": 1.0},
            **{"compile=default": 1.0, "cudnn-benchmark=on": 1.0},
        },
        {},
        {"layout-transposes": 0.12, "compute-bound": 0.5},
        0.0305,
        turn_scatter=0.04,
    ),
)


def by_chance(seed: int) -> Planted:
    """Return a program of which one to three cures help; predictions are off by tenths."""
    random = np.random.default_rng(seed)
    pool = (*_PLAIN, "graphs", "staging", "gc", "cudnn-benchmark=on", "workers=8", "pinned")
    names = random.permutation(pool)[: random.integers(3, len(pool) + 1)]
    effects = dict.fromkeys(map(str, names), 1.0)
    for name in names[: random.integers(1, 4)]:
        effects[str(name)] = float(random.uniform(0.3, 0.9))
    known = {"workers=8": "workers", "pinned": "pinned", "graphs": "graphs"}
    return Planted(
        "by chance",
        effects,
        {
            id: min(float(effects[name] * random.lognormal(0, 0.15)), 1.0)
            for name, id in known.items()
            if name in effects
        },
        {"launch-bound": 0.3},
        float(np.exp(random.uniform(math.log(0.005), math.log(0.2)))),
        float(random.uniform(2, 8)),
        float(random.uniform(10, 60)),
        float(np.exp(random.uniform(math.log(0.003), math.log(0.03)))),
        float(np.exp(random.uniform(math.log(0.005), math.log(0.1)))),
    )


class World:
    """Runs of a planted program, and the clock of their trial."""

    def __init__(self, planted: Planted, seed: int) -> None:
        self.planted, self.random, self.now = planted, np.random.default_rng(seed), 0.0

    def run(
        self,
        candidate: Candidate,
        warmup: int,
        steps: int,
        record: Path | None,
        turns: Turns | None,
        going: Callable[[Measured], Sequence[int]] | None,
        left_s: float,
        sign_s: float,
        enough_s: float,
    ) -> Measured:
        """Take the time that a run would, and return what it would measure."""
        planted, began, until = self.planted, self.now, self.now + left_s
        settings = candidate.settings
        slow = planted.slow_s * any(setting.cure.slow for setting in settings)
        idle = {each.cure.id for each in settings if planted.cures.get(str(each)) == 0}
        self.now += planted.start_s + slow
        start_s = self.now - began
        scatter = 0.0 if turns else planted.run_scatter
        step_s = planted.step_s * math.exp(self.random.normal(0, scatter))
        step_s *= 1 if turns else planted.factor(candidate)
        self.now += warmup * step_s + (0 if turns else steps * step_s)
        self.now += _RECORDING_S if record else 0
        if self.now > min(until, began + sign_s):
            self.now = min(until, began + sign_s)
            raise Spent
        run = Measured(
            step_ns=1e9 * step_s,
            steps=steps,
            ranks=1,
            losses=(),
            changes=tuple(
                Change(each.cure.id, "f", "", -1, "", "", "", 0)
                for each in settings
                if each.cure.id not in idle
            ),
            reasons=dict.fromkeys(idle, "it is so already"),
            main="",
            versions={"torch": "2"},
            gpu="simulated",
            buffered=planted.buffered,
            seconds=self.now - began,
            ended=True,
            start_s=start_s,
        )
        return self._by_turns(run, turns, going, steps, until) if turns and going else run

    def _by_turns(
        self,
        run: Measured,
        turns: Turns,
        going: Callable[[Measured], Sequence[int]],
        steps: int,
        until: float,
    ) -> Measured:
        planted = self.planted
        pairs: list[list[Turn]] = [[] for _ in turns.each]
        factors = np.array([1.0, *map(planted.factor, turns.each)])
        kept: Sequence[int] = range(1, len(factors))
        began, left = self.now - run.seconds, steps // turns.stretch
        while kept and left > len(kept):
            left -= 1 + len(kept)
            noise = np.exp(self.random.normal(0, planted.turn_scatter, len(factors)))
            step = [
                planted.step_s * factor * one for factor, one in zip(factors, noise, strict=True)
            ]
            self.now += turns.stretch * sum(step[turn] for turn in (0, *kept))
            if self.now > until:
                self.now = until
                break
            for turn in kept:
                pairs[turn - 1].append(Turn(1e9 * step[0], 1e9 * step[turn]))
            run = replace(run, turns=tuple(map(tuple, pairs)), seconds=self.now - began)
            kept = going(run)
        if not run.turns:
            raise Spent
        return run


class _Simulated(Trial):
    """Trial on a planted program, with its clock."""

    def __init__(self, planted: Planted, budget_s: float, seed: int, ledger: Path) -> None:
        candidates = tuple(read_candidates(",".join(planted.cures)))
        request = Request(("simulated",), candidates, budget_s=budget_s, ledger=ledger)
        super().__init__(request)
        self._world = World(planted, seed)
        self._program: Any = self._world

    def _begin(self) -> Any:
        self._history.pilot = self._go(Candidate(), "recording", Path("trace"))
        return self._world.planted.analysis

    def _spent(self) -> float:
        return self._world.now


@dataclass(frozen=True, slots=True)
class Tally:
    """Outcomes of trials, as parts of all; intervals and wrong answers as parts of the cures."""

    proven: float
    """The best planted cure, or one that is nearly as good, is proven to be faster."""
    found: float
    """It is the best single one of those that are proven."""
    covered: float
    wrong: float
    answered: float
    """Cures with any answer."""


def tally(programs: Sequence[Planted], budget_s: float, trials_each: int = 1) -> Tally:
    """Try the cures of programs."""
    proven = found = 0
    held, wrong, answered = list[bool](), list[bool](), list[bool]()
    with TemporaryDirectory() as folder:
        for number, planted in enumerate(programs):
            for seed in range(trials_each):
                ledger = Path(folder, "ledger.sqlite")
                outcome = _Simulated(planted, budget_s, 100 * number + seed, ledger).run()
                single = [row for row in outcome.rows if "+" not in row.cure]
                good = [row for row in single if _is_good(planted, row)]
                proven += any(row.verdict == "faster" for row in good)
                found += _fastest(single) in good
                answered += [row.verdict != "cannot tell yet" for row in single]
                for row in outcome.rows:
                    effect = planted.factor(read_candidates(row.cure)[0])
                    if row.low is not None and row.high is not None:
                        held.append(row.low <= effect <= row.high)
                    if effect == 1:
                        wrong.append(row.verdict in ("faster", "slower"))
    count = len(programs) * trials_each
    return Tally(
        proven / count, found / count, _part(held, 1.0), _part(wrong, 0.0), _part(answered, 0.0)
    )


def _is_good(planted: Planted, row: Entry) -> bool:
    """Return whether a cure is the best one, or brings nearly as much."""
    effect = planted.cures[row.cure]
    return effect != 0 and 1 / effect - 1 >= 0.9 * (1 / planted.best - 1)


def _fastest(rows: Sequence[Entry]) -> Entry | None:
    faster = [row for row in rows if row.verdict == "faster"]
    return min(faster, key=lambda row: row.ratio or 1.0, default=None)


def _part(answers: Sequence[bool], otherwise: float) -> float:
    return sum(answers) / len(answers) if answers else otherwise


def run(options: Options) -> int:
    """Print the table; 1 where less is proven than asked, or intervals hold too rarely."""
    rows, met = [], True
    chance = [by_chance(seed) for seed in range(CHANCE)]
    for name, programs in [*((each.name, [each]) for each in SICK), ("by chance", chance)]:
        for budget_s in BUDGETS_S:
            found = tally(programs, budget_s, TRIALS)
            fine = found.covered >= COVERED and found.wrong <= WRONG
            fine &= found.proven >= MOST or budget_s < 60
            met &= fine
            parts = (found.proven, found.found, found.answered, found.covered, found.wrong)
            shown = (f"{100 * part:.1f}" for part in parts)
            rows.append((name, f"{budget_s}", *shown, verdict(fine)))
    header = ("program", "s", "proven, %", "best, %", "answers, %", "covered, %", "wrong, %", "")
    show(f"{TRIALS} trials each", header, rows)
    return int(not met)
