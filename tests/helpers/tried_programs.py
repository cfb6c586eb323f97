"""Programs to try: real ones with modules that stand for torch, and simulated ones."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gputrace.cli import run as run_command
from gputrace.studies.runner import Failed
from gputrace.trials import ledger
from gputrace.trials.cures import LACKS, Candidate, Prediction, combine, read_candidates
from gputrace.trials.history import Row
from gputrace.trials.runs import Change, Measured, Turn, Turns
from gputrace.trials.runs import Program as ProgramToTry
from gputrace.trials.statistics import Verdict, compare
from gputrace.trials.trial import Trial
from tests.helpers import command
from tests.helpers.command import Ran

FASTER, NOT_FASTER, USAGE, UNREADABLE, INTERRUPTED = 0, 1, 2, 3, 130

TORCH: Final = {
    "torch/__init__.py": "__version__ = '2.13.0'",
    "torch/optim/__init__.py": "from .optimizer import Optimizer, SGD",
    "torch/optim/optimizer.py": """
_hooks = []
def register_optimizer_step_post_hook(hook): _hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in _hooks: hook(self, (), {})
class SGD(Optimizer):
    def __init__(self, params, lr=0.1, *, foreach=None): self.foreach = foreach
""",
    "torch/utils/data/__init__.py": "from .dataloader import DataLoader",
    "torch/utils/data/dataloader.py": """
import time
class DataLoader:
    def __init__(self, dataset, batch_size=1, num_workers=0, prefetch_factor=None,
                 persistent_workers=False, pin_memory=False):
        if num_workers > 8: raise RuntimeError(f"no room for {num_workers} workers")
        self.dataset, self.num_workers = dataset, num_workers
    def __iter__(self):
        for item in self.dataset:
            time.sleep(0.016 / max(self.num_workers, 1))
            yield item
""",
}
"""Stands for torch: a batch takes 16 ms, which workers share."""

PROGRAM: Final = """\
import sys
from torch.optim import SGD
from torch.utils.data import DataLoader

optimizer = SGD([], 0.1)
loader = DataLoader(range(500), num_workers=1)
for item in loader:
    optimizer.step()
print("done")
"""


class Real:
    """Makes runs of a program, with modules that stand for torch, in real processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.script = folder, folder / "train.py"
        for name, source in TORCH.items():
            path = folder / "modules" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        (folder / "modules" / "torch" / "utils" / "__init__.py").touch()
        paths = os.pathsep.join([str(folder / "modules"), str(command.ROOT)])
        monkeypatch.setenv("PYTHONPATH", paths)
        monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))

    def run(self, cures: str, program: str = PROGRAM, *, steps: int = 8, **how: Any) -> Measured:
        """Makes a run with all cures together."""
        self.script.write_text(program, encoding="utf-8")
        words = how.pop("command", (sys.executable, str(self.script)))
        candidate = combine(read_candidates(cures))
        return ProgramToTry(tuple(words), **how).run(candidate, warmup=2, steps=steps)


class InProgram:
    """What changes a program, as it would load it, with cures that are on."""

    def __init__(self) -> None:
        names = ("_gputrace_hooks.cures." + name for name in ("host", "model", "trial"))
        self.host, self.model, self.state = map(importlib.import_module, names)

    def start(self, *cures: str) -> None:
        self.state.cures.update(dict.fromkeys(cures, True))
        self.state._on.update(cures)

    @property
    def changes(self) -> list[dict[str, Any]]:
        return list(self.state.trial.changes)


class Simulated:
    """Runs of a program whose steps take 10 ms times the factors of its cures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.factors: dict[str, float] = {}
        self.failing: dict[str, str] = {}
        self.changes: dict[str, Change] = {}
        self.reasons: dict[str, str] = {}
        self.made: list[str] = []
        self.trace: Path | None = None
        self.seconds, self.spent, self.noise = 0.0, 0.0, 0.002
        self.random = np.random.default_rng(5)
        self.path = path
        self.before: Callable[[], object] = lambda: None
        """Called at the beginning of each run."""
        monkeypatch.setattr(ProgramToTry, "run", lambda _, *given: self.run(*given))
        monkeypatch.setattr(Trial, "_spent", lambda _: self.spent)

    def factor(self, candidate: Candidate) -> float:
        names = map(str, candidate.settings)
        return float(np.prod([self.factors.get(name, 1.0) for name in names]))

    def run(
        self,
        candidate: Candidate,
        warmup: int,
        steps: int,
        record: Path | None = None,
        turns: Turns | None = None,
        going: Callable[[Measured], Sequence[int]] | None = None,
        left_s: float = 0.0,
        sign_s: float = 0.0,
        enough_s: float = 0.0,
    ) -> Measured:
        names = [str(setting) for setting in candidate.settings]
        self.made.append(str(candidate))
        self.before()
        self.spent += self.seconds
        if record is not None and self.trace is not None:
            shutil.copy(self.trace, record)
        for name in names:
            if name in self.failing:
                raise Failed(self.failing[name])
        factor = self.factor(candidate)
        unchanged = Change("", "f", "", -1, "", "", "", 0)
        changes = [
            replace(self.changes.get(name, unchanged), cure=setting.cure.id)
            for name, setting in zip(names, candidate.settings, strict=True)
            if self.factors.get(name) != 0
        ]
        run = Measured(
            step_ns=1e7 * (factor or 1.0) * float(np.exp(self.random.normal(0, self.noise))),
            steps=steps,
            ranks=1,
            losses=(),
            changes=tuple(changes),
            reasons=self.reasons,
            main=str(self.path),
            versions={"torch": "2.13.0"},
            gpu="",
            buffered=0,
            seconds=self.seconds,
            ended=True,
            start_s=self.seconds,
            threads=1,
            has=frozenset(LACKS) - {"gpu", "ranks", "workers"},
        )
        return run if turns is None or going is None else self.by_turns(run, turns, steps, going)

    def by_turns(
        self, run: Measured, turns: Turns, steps: int, going: Callable[[Measured], Sequence[int]]
    ) -> Measured:
        """Turns without and with each cure; their noise is a tenth of that between runs."""
        pairs: list[list[Turn]] = [[] for _ in turns.each]
        kept: Sequence[int] = range(1, len(pairs) + 1)
        left = steps // turns.stretch
        while kept and left > len(kept):
            left -= len(kept) + 1
            bare, *noise = np.exp(self.random.normal(0, self.noise / 10, len(pairs) + 1)).tolist()
            for turn in kept:
                cured = self.factor(turns.each[turn - 1]) * noise[turn - 1]
                pairs[turn - 1].append(Turn(1e7 * bare, 1e7 * cured))
            run = replace(run, turns=tuple(map(tuple, pairs)))
            kept = going(run)
        return run


def gputrace_try(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Ran:
    """Runs the command in this process."""
    code = run_command(["try", *map(str, words)])
    return Ran(code, *capsys.readouterr())


def row_of(cure: str, cured: Sequence[float] = (), hope: float = 1.0) -> Row:
    """A row with rounds in which steps as it is take 1."""
    [candidate] = read_candidates(cure)
    row = Row(candidate, Prediction(hope))
    row.bare, row.cured = [1.0] * len(cured), list(cured)
    row.ratio = compare(row.bare, row.cured)
    row.verdict = row.ratio.verdict if row.ratio else Verdict.OPEN
    return row


ENTRY: Final = ledger.Entry(
    time_ns=1,
    program="python train.py",
    host="node",
    gpu="",
    ranks=1,
    versions="torch 2.13.0",
    cure="workers=8",
    verdict="faster",
    why="",
    ratio=0.5,
    low=0.45,
    high=0.55,
    rounds=4,
    steps=40,
    bare_ns=1e6,
    predicted=0.6,
    predicted_low=0.5,
    predicted_high=0.7,
    numerics=False,
    loss_differs=None,
)
