"""Cure of a statement in the loop that need not run in each step."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gputrace.trials.choice import choose
from gputrace.trials.cures import read_candidates
from gputrace.trials.patch import make_patch
from tests.helpers.tried_programs import Real

PROGRAM = '''\
"""A training that measures itself in each step."""

from __future__ import annotations

import sys

import measures
from torch.optim import SGD

optimizer, seen = SGD([], 0.1), []
for step in range(120):
    optimizer.step()
    if step >= 0:
        seen.append(measures.mean(step))
last = dict(measures=seen, main=[__name__, __file__, __spec__, __package__, sys.argv, sys.path[0]])
with open("FOLDER/seen", "w") as file:
    print(last, file=file)
'''
MEASURES = """\
def mean(step):
    value = step / 2
    return value
"""


@pytest.fixture
def program(real: Real) -> str:
    (real.folder / "measures.py").write_text(MEASURES, encoding="utf-8")
    return PROGRAM.replace("FOLDER", str(real.folder))


def seen(real: Real) -> dict[str, Any]:
    return eval((real.folder / "seen").read_text())  # type: ignore[no-any-return]


def test_a_statement_runs_in_one_of_fifty_steps_of_a_program_that_is_otherwise_the_same(
    real: Real, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the loop's first step, and of what is before it, all runs."""
    monkeypatch.chdir(real.folder)
    real.script.write_text(program, encoding="utf-8")
    subprocess.run([sys.executable, "train.py", "-x"], check=True)
    bare = seen(real)
    words = (sys.executable, "train.py", "-x")
    run = real.run("less-often=train.py:13", program, steps=999, command=words)
    cured = seen(real)
    assert cured["main"] == bare["main"]
    assert (cured["measures"], len(bare["measures"])) == ([0.0, 25.0, 50.0], 120)
    assert [(change.cure, change.line) for change in run.changes] == [("less-often", 13)]


def test_a_statement_of_every_few_steps_runs_in_one_of_fifty_of_them(
    real: Real, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(real.folder)
    real.run("less-often=train.py:13", program.replace("step >= 0", "step % 2 == 0"), steps=999)
    assert seen(real)["measures"] == [0.0, 50.0]


def test_it_may_be_in_a_module_that_the_program_imports(
    real: Real, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(real.folder)
    run = real.run("less-often=measures.py:2", program.replace("step >= 0", "step == 0"), steps=999)
    assert run.reasons == {}
    assert seen(real)["measures"] == [0.0]


def test_what_uses_a_result_runs_as_often(
    real: Real, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statements from a line to the beginning of the last one."""
    monkeypatch.chdir(real.folder)
    apart = program.replace("seen.append(measures.mean(step))", "value = measures.mean(step)")
    real.script.write_text(
        apart.replace("last =", "    if value:\n        seen.append(value)\nlast =")
    )
    run = real.run("less-often=train.py:13-15", real.script.read_text(), steps=999)
    assert (seen(real)["measures"], run.reasons) == ([25.0, 50.0], {})


@pytest.mark.parametrize("place", ["train.py:4", "other.py:13", "elsewhere/train.py:13"])
def test_a_place_without_a_statement_changes_nothing_and_is_said(
    real: Real, program: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(real.folder)
    run = real.run(f"less-often={place}", program, steps=999)
    assert len(seen(real)["measures"]) == 120
    assert run.changes == ()
    said = {} if place != "train.py:4" else {"less-often": f"no statement begins at {place}"}
    assert run.reasons == said


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        # In the loop; in a function, whose call is left out with what holds it.
        ("train.py:14 <module>", ["less-often=train.py:13"]),
        ("measures.py:2 mean", ["less-often=train.py:13"]),
        ("train.py:12 <module>", []),
        ("gone.py:2 f", []),
    ],
)
def test_the_lines_that_the_ledger_charges_are_tried_if_the_training_can_go_without(
    real: Real, program: str, row: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(real.folder)
    real.script.write_text(program, encoding="utf-8")
    analysis: Any = SimpleNamespace(
        steps=SimpleNamespace(mean_ns=1000),
        findings=[],
        breakdown=[SimpleNamespace(total_ns=1000)],
        ledger=[SimpleNamespace(cause="host-work", ns=500, line=row)],
        step_phases=[],
        loader=[],
    )
    pilot: Any = SimpleNamespace(
        gpu="", ranks=1, has=frozenset(), versions={}, threads=1, main=str(real.script)
    )
    chosen, _ = choose(analysis, pilot)
    assert [str(each) for each in chosen if "less-often" in str(each)] == wanted


def test_the_patch_puts_the_statement_under_a_condition(
    real: Real, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(real.folder)
    run = real.run("less-often=train.py:13", program, steps=999)
    [candidate] = read_candidates("less-often=train.py:13")
    patch = make_patch(candidate, run.changes, run.main, ["python", "train.py"])
    assert patch.by_hand == ()
    assert patch.edits[0].lines == [
        "13: if step % 50 == 0:",
        "14: if step >= 0:",
        "15: seen.append(measures.mean(step))",
    ]
