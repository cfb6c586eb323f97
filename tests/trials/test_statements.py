"""Statements of a training loop that are left out, or run every few steps."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from gputrace.trials.cures import read_candidates
from gputrace.trials.patch import make_patch
from gputrace.trials.runs import Change
from gputrace.trials.statements import Source, needless_statements


def patched(folder: Path, cure: str, call: str, before: str) -> str | None:
    """Return the program with a cure, or None if what it changes is said instead."""
    path = folder / "train.py"
    path.write_text(dedent(before), encoding="utf-8")
    line = 1 + next(at for at, text in enumerate(before.splitlines()) if call in text)
    [candidate] = read_candidates(cure)
    change = Change(candidate.settings[0].cure.id, call, "", -1, "", "", str(path), line)
    patch = make_patch(candidate, [change], str(path), ["python", "train.py"])
    if patch.edits:
        ast.parse(patch.edits[0].after)
        assert patch.by_hand == ()
        return patch.edits[0].after
    assert f"train.py:{line}" in patch.by_hand[0]
    return None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "for x in data:\n    step(x)\n    gc.collect()  # memory\n",
            "for x in data:\n    step(x)\n",
        ),
        ("for x in data:\n    gc.collect()\n", "for x in data:\n    pass\n"),
        ("for x in data:\n    step(x); gc.collect()\n", "for x in data:\n    step(x); pass\n"),
        ("for x in data:\n    if x: gc.collect()\n", "for x in data:\n    if x: pass\n"),
        ("for x in data:\n    freed = gc.collect()\n", None),
    ],
)
def test_a_call_is_taken_out_of_the_loop(tmp_path: Path, before: str, after: str | None) -> None:
    assert patched(tmp_path, "skip-gc-collect", "collect", before) == after


STEP = """\
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            f"for i, x in enumerate(data):\n{STEP}"
            "    for n, p in weights:\n"
            "        w.add_histogram(\n"
            "            n, p)\n",
            f"for i, x in enumerate(data):\n{STEP}"
            "    if i % 50 == 0:\n"
            "        for n, p in weights:\n"
            "            w.add_histogram(\n"
            "                n, p)\n",
        ),
        (
            f"for x in data:\n{STEP}    n += 1\n    if n % 5 == 0:\n        w.add_histogram(x)\n",
            f"for x in data:\n{STEP}    n += 1\n    if n % 250 == 0:\n        w.add_histogram(x)\n",
        ),
        (
            f"for i, x in enumerate(d):\n{STEP}    if not i % a.often:\n"
            "        w.add_histogram(x)\n",
            f"for i, x in enumerate(d):\n{STEP}    if not i % (50 * (a.often)):\n"
            "        w.add_histogram(x)\n",
        ),
        (
            f"while True:\n    with scope:\n        w.add_histogram(x)\n{STEP}    n += 1\n",
            "while True:\n    if n % 50 == 0:\n        with scope:\n"
            "            w.add_histogram(x)\n"
            f"{STEP}    n += 1\n",
        ),
        (
            "for i in range(9):\n    with scope:\n        step()\n        w.add_histogram(x)\n",
            "for i in range(9):\n    with scope:\n        step()\n        if i % 50 == 0:\n"
            "            w.add_histogram(x)\n",
        ),
        # With what is done with the result.
        (
            f"for i in range(9):\n{STEP}    y = w.add_histogram(x)\n    n = 2\n"
            "    if y > n:\n        print(y)\n",
            f"for i in range(9):\n{STEP}    if i % 50 == 0:\n        y = w.add_histogram(x)\n"
            "        n = 2\n        if y > n:\n            print(y)\n",
        ),
        # Nothing counts the steps; the loop needs what is computed; the function has no loop.
        (f"for x in data:\n{STEP}    w.add_histogram(x)\n", None),
        (f"for i in range(9):\n    y = w.add_histogram(x)\n{STEP}    print(y)\n", None),
        (f"for i in range(9):\n{STEP}    if w.add_histogram(x): break\n", None),
        ("def log(x):\n    w.add_histogram(x)\n", None),
    ],
)
def test_logging_is_put_under_a_condition_by_the_loops_counter(
    tmp_path: Path, before: str, after: str | None
) -> None:
    assert patched(tmp_path, "less-often=train.py:1", "add_histogram", before) == after


TRAINER = """\
class Trainer:
    def fit(self):
        for batch in self.loader:
            self.train_one(batch)
            self.report()

    def train_one(self, batch):
        self.forward(batch)
        self.backward_all()
        self.optimizer.step()
        self.steps += 1
        self.log_norms()

    def forward(self, batch):
        self.out = self.model(batch)

    def backward_all(self):
        self.loss(self.out).backward()

    def log_norms(self):
        for p in self.weights:
            self.norms(p)

    def norms(self, p):
        self.log.append(p.norm().item())

    def average(self):
        for k in self.slow:
            k.lerp_(self.fast[k], 0.1)

    def report(self):
        self.average()
"""


@pytest.mark.parametrize(
    ("within", "wanted"),
    [
        ("p.norm()", ["self.log_norms()"]),
        ("self.model(batch)", []),
        (".backward()", []),
        ("k.lerp_(", []),
    ],
)
def test_a_step_may_be_a_function_that_a_loop_elsewhere_calls(
    within: str, wanted: list[str]
) -> None:
    source, lines = Source(TRAINER), TRAINER.splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if within in text)
    found = needless_statements(source, line, "")
    assert [lines[each.lineno - 1].strip() for each in found] == wanted


def test_the_condition_of_a_step_takes_the_counter_of_its_object(tmp_path: Path) -> None:
    after = patched(tmp_path, "less-often=train.py:1", "log_norms", TRAINER)
    indented = "        if self.steps % 50 == 0:\n            self.log_norms()\n"
    assert after == TRAINER.replace("        self.log_norms()\n", indented)
