"""The rows of results, from their dataclasses: names, types, and what is said of each."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

import msgspec

from gputrace.analyzers.ci_gates import Check
from gputrace.model.columns import Columns
from gputrace.model.comparison import Comparison
from gputrace.model.results import Analysis, GpuTotals
from gputrace.model.step import StepExplanation
from gputrace.studies.results import Summary

ROOTS: Final[dict[str, type]] = {
    "analysis": Analysis,
    "step": StepExplanation,
    "comparison": Comparison,
    "check": Check,
    "study": Summary,
}
"""Results that are printed as JSON, by what they are of."""

USUAL: Final = ("gpu", "gpu_known", "device", "rank", "rank_known", "host")
"""Names that mean in every row what they mean of a GPU."""


def markdown(name: str) -> str:
    """A table for each dataclass of a result, but those of an earlier one."""
    found = {each: rows(root) for each, root in ROOTS.items()}
    every = [row.__name__ for row in {row for of_root in found.values() for row in of_root}]
    known = {each for each in every if every.count(each) == 1}
    earlier = {row for each in list(ROOTS)[: list(ROOTS).index(name)] for row in found[each]}
    shown = (row for row in found[name] if row not in earlier)
    return "\n".join(line for row in shown for line in _table(row, known)).rstrip()


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a result, with the texts and the titles in tables of its fields."""
    made = msgspec.json.schema(ROOTS[name])
    for row in rows(ROOTS[name]):
        said, titles = meanings(row), _titles(row)
        properties = made["$defs"][row.__name__]["properties"]
        for field in fields(row):
            of = properties[field.name.rstrip("_")]
            of |= {"description": said[field.name]} if field.name in said else {}
            of |= {"title": titles[field.name]} if field.name in titles else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


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
    titles = _titles(row)
    yield f"| name | type | |{' column |' if titles else ''}"
    yield f"| :-- | :-- | :-- |{' :-- |' if titles else ''}"
    for field in fields(row):
        name, text = field.name.rstrip("_"), said.get(field.name) or usual.get(field.name, "")
        cells = [f"`{name}`", _type(str(field.type), rows), _cell(text) or _unit(name)]
        cells += [titles.get(field.name, "")] if titles else []
        yield f"| {' | '.join(cells)} |"
    yield ""


def _titles(row: type) -> dict[str, str]:
    """Return the titles of columns that show a field, by its name."""
    columns: Columns = getattr(row, "COLUMNS", ())
    return {column.of: column.title for column in columns if isinstance(column.of, str)}


def meanings(row: type) -> dict[str, str]:
    """Return the text below each field in the source."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(row))).body
    assert isinstance(made, ast.ClassDef)
    pairs = zip(made.body, made.body[1:], strict=False)
    return {
        field.target.id: _values(row, inspect.cleandoc(text.value.value))
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _values(row: type, text: str) -> str:
    """Return a text with the values of a constant of the row's module instead of its name."""

    def values(name: re.Match[str]) -> str:
        known = getattr(sys.modules[row.__module__], name[1], None)
        return name[0] if known is None else ", ".join(f"``{value}``" for value in known)

    return re.sub(r"(?<!`)`([A-Z_]{4,})`(?!`)", values, text)


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
    """RST's double backticks as Markdown's, and Python's None as JSON's."""
    return re.sub(r"\bNone\b", "null", re.sub(r"``(.+?)``", r"`\1`", text))
