"""Generated runs with a cause really taken away, beside what was predicted of that."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.analyzers.pipeline import analyze
from gputrace.model.results import WhatIf
from gputrace.readers.registry import open_trace
from tests.synthetic import Plan, Recording, simulate, write_nsys

CLOSE: Final = 0.05
"""Part of the true step by which a prediction may be off."""
CURED: Final[Mapping[str, Callable[[Plan], Plan]]] = {
    "prefetch": lambda plan: replace(plan, data_wait_ns=0),
    "pinned": lambda plan: replace(plan, pageable=False, copy_stream=plan.input_copies > 0),
    "straggler": lambda plan: replace(plan, slow_rank=-1),
    "late-host": lambda plan: replace(plan, late_host_rank=-1),
    "overlap": lambda plan: replace(plan, joined=not plan.allreduces),
    "graphs": lambda plan: replace(plan, graph=plan.gpus_per_process == 1 and plan.streams == 1),
    "sync": lambda plan: replace(plan, sync_every_step=False),
    "alloc": lambda plan: replace(plan, allocs_per_step=0),
}
"""For each cure, the plan with its cause taken away."""


@dataclass(frozen=True, slots=True)
class Score:
    """One cure of one run; times are nanoseconds a step."""

    seed: int
    cure: str
    before: float
    true: float
    predicted: WhatIf | None
    """None where the analysis lists no such cure: it would not be worth it."""

    @property
    def error(self) -> float:
        """Error of the predicted step as a part of the true one."""
        step = self.before if self.predicted is None else self.predicted.step_ns
        return (step - self.true) / self.true

    @property
    def inside(self) -> bool:
        """True if the true step is in the range, or rightly not worth a prediction."""
        if self.predicted is None:
            return abs(self.error) < CLOSE
        low, high = self.predicted.low_ns, self.predicted.high_ns
        return low * 0.99 <= self.true <= high * 1.01


def fair(plan: Plan) -> Plan:
    """The plan without what chance alone would change in the second run."""
    return replace(plan, hiccup_rate=0.0, edges_cut=False)


def compare(plan: Plan) -> Iterator[Score]:
    """Each cure whose cause the plan has: predicted, and made."""
    recording = simulate(plan)
    predicted = {cure.id: cure for cure in predictions(recording)}
    before = step_ns(recording)
    for cure, change in CURED.items():
        cured = change(plan)
        if cured != plan:
            true = step_ns(simulate(cured))
            yield Score(plan.seed, cure, before, true, predicted.get(cure))


def predictions(recording: Recording) -> tuple[WhatIf, ...]:
    """Return the predictions for a generated run, from an nsys export of it."""
    plan = recording.plan
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        # Without an input copy nothing but a named range can prove that data was waited for.
        write_nsys(recording, path, nvtx=("nccl",) if plan.input_copies else ("nccl", "data"))
        with open_trace(path) as trace:
            return analyze(trace).what_if


def step_ns(recording: Recording) -> float:
    """The mean steady step, from the end of one step's last operation to that of the next."""
    lengths = []
    for process in recording.processes:
        steady = [
            w for w in recording.truth.windows if (w.rank, w.phase) == (process.rank, "steady")
        ]
        ops = recording.ops[recording.ops["rank"] == process.rank]
        units = [w.unit for w in steady]
        ends = [int(ops["end"][ops["unit"] == unit].max()) for unit in units]
        together = np.diff(units) == 1
        lengths += np.diff(ends)[together].tolist()
    return float(np.mean(lengths))
