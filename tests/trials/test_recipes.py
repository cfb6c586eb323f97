"""Recipes for causes that no cure takes away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gputrace.trials.choice import find_recipes

PROGRAM = """\
def auc(score):
    ranks = score.argsort()
    return ranks.mean()


for i, x in enumerate(data):
    loss.backward()
    optimizer.step()
    score = auc(x.cpu())
    norms.append(x.norm().item())
    gc.collect()
"""


def analysis(cause: str, line: str | None = None, share: float = 0.5) -> Any:
    """A step of 100 ns of which a cause takes a share."""
    finding = SimpleNamespace(id=cause, impact_ns=round(100 * share), advice="do less of it")
    return SimpleNamespace(
        causes=[SimpleNamespace(id=cause)],
        steps=SimpleNamespace(mean_ns=100),
        findings=[finding],
        ledger=[SimpleNamespace(cause=cause, line=line, ns=50)],
    )


@pytest.mark.parametrize(
    ("cause", "line", "lines"),
    [
        ("host-work", "train.py:10 <module>", ["10: if i % 50 == 0:"]),
        ("host-work", "train.py:2 auc", ["9: if i % 50 == 0:"]),
        ("sync-bound", "trials/train.py:10 <module>", ["10: if i % 50 == 0:"]),
        ("garbage-collection", "train.py:11 <module>", ["11: without gc.collect()"]),
    ],
)
def test_what_takes_most_of_a_step_is_changed_at_its_line(
    tmp_path: Path, cause: str, line: str, lines: list[str]
) -> None:
    main = tmp_path / "trials" / "train.py"
    main.parent.mkdir()
    main.write_text(PROGRAM, encoding="utf-8")
    [recipe] = find_recipes(analysis(cause, line), str(main))
    said = f"{cause} takes 50% of a step at {line.partition(' ')[0]}: do less of it ("
    assert recipe.startswith(said)
    changed = recipe.removeprefix(said).removesuffix(")").split("; ")
    assert [line for line in changed if "if i" in line or "without" in line] == lines


def test_only_what_matters_and_has_no_cure_gets_a_recipe(tmp_path: Path) -> None:
    main = str(tmp_path / "train.py")
    [recipe] = find_recipes(analysis("host-optimizer"), main)
    assert recipe == "host-optimizer takes 50% of a step: do less of it"
    assert find_recipes(analysis("host-optimizer", share=0.02), main) == []
    assert find_recipes(analysis("launch-bound"), main) == [], "cures are tried"
    assert find_recipes(analysis("warmup"), main) == []
    assert find_recipes(analysis("host-work", "gone.py:3 f"), main, {"host-work"}) == []
    [recipe] = find_recipes(analysis("host-work", "gone.py:3 f"), main)
    assert recipe.endswith(" at gone.py:3: do less of it")
