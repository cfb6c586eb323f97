"""The rows of results, from their dataclasses: names, types, and what is said of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Final

from gputrace.cli.json_schema import ROOTS, meanings, rows, titles_of
from gputrace.model.results import GpuTotals

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


def _table(row: type, rows: Collection[str]) -> Iterator[str]:
    said = meanings(row)
    usual = {name: text for name, text in meanings(GpuTotals).items() if name in USUAL}
    yield f"### {row.__name__}\n\n{_code(inspect.cleandoc(row.__doc__ or ''))}\n"
    titles = titles_of(row)
    yield f"| name | type | |{' column |' if titles else ''}"
    yield f"| :-- | :-- | :-- |{' :-- |' if titles else ''}"
    for field in fields(row):
        name, text = field.name.rstrip("_"), said.get(field.name) or usual.get(field.name, "")
        cells = [f"`{name}`", _type(str(field.type), rows), _cell(text) or _unit(name)]
        cells += [titles.get(field.name, "")] if titles else []
        yield f"| {' | '.join(cells)} |"
    yield ""


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
