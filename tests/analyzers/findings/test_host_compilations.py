"""Compilations in steps: what the hooks record of them, and what is said of a run that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gputrace.api import Report
from gputrace.model.results import Finding
from tests.helpers.exports import STEP, Export, global_id
from tests.helpers.handmade import MS, Run, analyze
from tests.helpers.programs import recorded_with_torch
from tests.helpers.sentences import words_of

PID: Final = 100
STEPS: Final = 40
RANGES: Final = "GPUTRACE_HOST_RANGE"
COLLECTION, COMPILATION = 3, 6
"""Kinds of such ranges."""


def give_host_ranges(export: Export) -> None:
    """Make room for what the hooks record."""
    export.give("GPUTRACE_META", "name", "value")
    export.rows.setdefault("GPUTRACE_META", [])
    export.give(RANGES, "start", "end", "globalTid", "nameId", "kind")


def add_range(export: Export, start: int, end: int, what: str, kind: int = COMPILATION) -> None:
    """The process is at something that the hooks record."""
    who = global_id(PID, thread=PID)
    export.add(RANGES, start=start, end=end, globalTid=who, nameId=export.string(what), kind=kind)


def of_compilations(folder: Path, *names: str, every: int, length_ms: float) -> Report:
    """Steps of 10 ms; every so many, something is compiled, by which the step is longer."""
    export = Export()
    give_host_ranges(export)
    who = {"globalTid": global_id(PID, thread=PID)}
    at, texts = 0, iter(names * STEPS)
    for number in range(STEPS):
        compiles = round(length_ms * MS) if number % every == every - 1 else 0
        if compiles:
            add_range(export, at + 1, at + compiles + 1, next(texts))
        end = at + 10 * MS + compiles
        step = {"start": at + 1, "end": end + 1, "step": number}
        export.add(STEP, **step, **who, nameId=export.string("torch.step"))
        at = end
    return analyze(export, folder)


def found(report: Report, id: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.id == id]


def test_compilations_in_measured_steps_are_named_with_their_reason(tmp_path: Path) -> None:
    report = of_compilations(
        tmp_path, "f (t.py:1): x == 3", "f (t.py:1): x == 4", every=4, length_ms=60
    )
    (finding,) = found(report, "recompilation")
    assert report.findings[0] is finding
    assert finding.severity == "high"
    assert finding.impact_ns == pytest.approx(15 * MS, rel=0.05)
    assert "60% of each step (" in finding.message
    assert "9 compilations in 36 steps, mostly f (t.py:1)" in finding.details
    assert finding.details[1].startswith("reason: x == ")
    assert "torch.compile(dynamic=True)" in finding.advice
    (slow,) = found(report, "slow-steps")
    assert "in each, parts of the program are compiled for 60.0 ms" in slow.details


@pytest.mark.parametrize(
    ("what", "cure"), [("Triton add", "constexpr"), ("tf.function train", "reduce_retracing")]
)
def test_the_cure_is_that_of_the_compiler(tmp_path: Path, what: str, cure: str) -> None:
    (finding,) = found(of_compilations(tmp_path, what, every=4, length_ms=60), "recompilation")
    assert cure in finding.advice


@pytest.mark.parametrize(
    ("kind", "id"), [(COLLECTION, "garbage-collection"), (COMPILATION, "recompilation")]
)
def test_the_line_that_the_host_is_at_is_told(tmp_path: Path, kind: int, id: str) -> None:
    run = Run()
    give_host_ranges(run.export)
    for _ in range(20):
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
        start = run.now
        run.wait_at(*["train.py:7 main"] * 4)
        add_range(run.export, start, run.now, "generation 2", kind)
    (finding,) = found(analyze(run, tmp_path), id)
    assert "the host is at train.py:7 main in 100% of 76 samples" in finding.details


def test_rare_and_short_compilations_are_none(tmp_path: Path) -> None:
    report = of_compilations(tmp_path, "f", every=20, length_ms=2)
    assert not found(report, "recompilation")


# ---- real torch ----

PLANTED: Final = """
import time, torch, torch._dynamo.config as config
torch.set_num_threads(1)
config.automatic_dynamic_shapes, config.recompile_limit = False, 100
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@torch.compile(backend="eager", dynamic=False)
def loss_of(x): return model(x).square().mean()

for step in range(40):
    loss_of(torch.ones(step if step > 12 and step % 3 == 0 else 2, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
"""


def test_batches_of_many_shapes_are_found_in_a_real_program(tmp_path: Path) -> None:
    _, report = recorded_with_torch(tmp_path, PLANTED)
    (finding,) = found(report, "recompilation")
    assert "mostly loss_of (" in words_of(finding)
    assert "size mismatch at index 0" in words_of(finding)
    assert finding.evidence["compilations"] == 9
