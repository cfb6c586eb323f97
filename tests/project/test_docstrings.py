"""Docstrings begin with a verb or with the noun that the thing is, and point at nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.command import ROOT

POINTS_BACK: Final = re.compile(r"(What|Whether|Of|Those|As|The same)\b")
FOLDERS: Final = ("gputrace", "benchmarks", "workloads", "docs", ".ci")
MODULES: Final = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring of a module, those of attributes among them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_points_back_at_another_sentence(path: Path) -> None:
    wrong = [f"{line}: {text[:60]}" for line, text in docstrings(path) if POINTS_BACK.match(text)]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    ["What it does.", "Whether it is.", "Of a GPU.", "Those of it.", "As there.", "The same."],
)
def test_the_words_that_point_back_are_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'"""Good."""\n\n\ndef run():\n    """{text}"""\n')
    assert [text for _, text in docstrings(path) if POINTS_BACK.match(text)] == [text]
