"""The rows of results, from their dataclasses: names, types, and what is said of each."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

from gputrace.analyzers.ci_gates import Check
from gputrace.model.comparison import Comparison
from gputrace.model.results import Analysis, GpuTotals
from gputrace.studies.results import Summary

ROOTS: Final = {
    "Of an analysis": Analysis,
    "Of a comparison": Comparison,
    "Of a check": Check,
    "Of a study": Summary,
}
"""Results that are printed as JSON, and their names."""

USUAL: Final = ("gpu", "gpu_known", "device", "rank", "rank_known", "host")
"""Names that mean in every row what they mean of a GPU."""


def markdown() -> str:
    """A table for each dataclass of results."""
    found = {title: rows(root) for title, root in ROOTS.items()}
    names = [row.__name__ for row in {row for of_root in found.values() for row in of_root}]
    known = {name for name in names if names.count(name) == 1}
    lines: list[str] = []
    shown: set[type] = set()
    for title, of_root in found.items():
        lines.append(f"## {title}\n")
        for row in of_root:
            lines += [] if row in shown else _table(row, known)
        shown.update(of_root)
    return "\n".join(lines)


def rows(root: type) -> list[type]:
    """A dataclass and all those that its fields hold, in the order in which they come."""
    found: list[type] = []

    def look(value: Any) -> None:
        if isinstance(value, type) and is_dataclass(value) and value not in found:
            found.append(value)
            for held in get_type_hints(value).values():
                look(held)
        for part in get_args(value):
            look(part)

    look(root)
    return found


def _table(row: type, rows: Collection[str]) -> Iterator[str]:
    said = meanings(row)
    usual = {name: text for name, text in meanings(GpuTotals).items() if name in USUAL}
    yield f"### {row.__name__}\n\n{_code(inspect.cleandoc(row.__doc__ or ''))}\n"
    yield "| name | type | |\n| :-- | :-- | :-- |"
    for field in fields(row):
        name, told = (
            field.name.rstrip("_"),
            _cell(said.get(field.name) or usual.get(field.name, "")),
        )
        yield f"| `{name}` | {_type(str(field.type), rows)} | {told or _unit(name)} |"
    yield ""


def meanings(row: type) -> dict[str, str]:
    """Return the text below each field in the source."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(row))).body
    assert isinstance(made, ast.ClassDef)
    pairs = zip(made.body, made.body[1:], strict=False)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _type(written: str, rows: Collection[str]) -> str:
    """``tuple[Gap, ...]`` as a program that reads the JSON meets it: ``list of Gap``, linked."""
    text = written.replace(" | None", " or null")
    text = re.sub(r"tuple\[([^\]]*?), \.\.\.\]", r"list of \1", text)
    text = re.sub(r"Mapping\[str, (.*)\]", r"object of \1", text)
    text = _cell(text.replace("Evidence", "object").replace("str", "string"))
    return re.sub(r"\w+", lambda m: f"[{m[0]}](#{m[0].lower()})" if m[0] in rows else m[0], text)


def _unit(name: str) -> str:
    return "nanoseconds" if name.endswith("_ns") else ""


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    """RST's double backticks as Markdown's."""
    return re.sub(r"``(.+?)``", r"`\1`", text)
