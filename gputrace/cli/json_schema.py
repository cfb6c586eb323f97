"""JSON Schemas of results, from their structs: names, types, and what is said of each field."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, get_args, get_type_hints

import msgspec

from gputrace.analyzers.ci_gates import Check
from gputrace.model.comparison import Comparison, StepExplanation
from gputrace.model.memory import MemoryReport
from gputrace.model.results import Analysis
from gputrace.model.sketches import SketchReport
from gputrace.model.struct import Columns
from gputrace.studies.results import Summary

ROOTS: Final[dict[str, type]] = {
    "analysis": Analysis,
    "step": StepExplanation,
    "comparison": Comparison,
    "check": Check,
    "memory": MemoryReport,
    "sketches": SketchReport,
    "study": Summary,
}
"""Results that are printed as JSON, by what they are of."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a result, with the texts and the titles in tables of its fields."""
    made = msgspec.json.schema(ROOTS[name])
    for row in rows(ROOTS[name]):
        said, titles = meanings(row), titles_of(row)
        properties = made["$defs"][row.__name__]["properties"]
        for field in fields(row):
            of = properties[field.name.rstrip("_")]
            of |= {"description": said[field.name]} if field.name in said else {}
            of |= {"title": titles[field.name]} if field.name in titles else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def rows(root: type) -> list[type]:
    """Return a struct and all those that its fields hold, in the order in which they come."""
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


def titles_of(row: type) -> dict[str, str]:
    """Return the titles of columns that show a field, by its name."""
    columns: Columns = getattr(row, "COLUMNS", ())
    return {column.of: column.title for column in columns if isinstance(column.of, str)}


def meanings(row: type) -> dict[str, str]:
    """Return the text below each field in the source."""
    made = _classes(row.__module__)[row.__name__]
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


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes in a module's source, parsed once for all of them."""
    made = ast.parse(inspect.getsource(sys.modules[module])).body
    return {one.name: one for one in made if isinstance(one, ast.ClassDef)}


def _values(row: type, text: str) -> str:
    """Return a text with the values of a constant of the row's module instead of its name."""

    def values(name: re.Match[str]) -> str:
        known = getattr(sys.modules[row.__module__], name[1], None)
        return name[0] if known is None else ", ".join(f"``{value}``" for value in known)

    return re.sub(r"(?<!`)`([A-Z_]{4,})`(?!`)", values, text)
