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


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring of a module, those of attributes among them."""
    is_described = isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    )
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Expr(value=ast.Constant(value=str(text))) if is_described:
                yield child.lineno, text.strip()
            case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                yield from docstrings(child)


def pointing_back(path: Path) -> list[str]:
    found = docstrings(ast.parse(path.read_text(encoding="utf-8")))
    return [f"{path}:{line}: {text[:60]}" for line, text in found if POINTS_BACK.match(text)]


def test_no_docstring_points_back_at_another_sentence() -> None:
    assert [line for path in MODULES for line in pointing_back(path)] == []


@pytest.mark.parametrize(
    "text",
    ["What it does.", "Whether it is.", "Of a GPU.", "Those of it.", "As there.", "The same."],
)
def test_the_words_that_point_back_are_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'"""Good."""\n\n\ndef run():\n    """{text}"""\n')
    assert pointing_back(path) == [f"{path}:5: {text}"]
