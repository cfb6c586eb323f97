"""Judges the first line of a tool's answer by the truth about a program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HONEST: Final = ("", "compute-bound", "idle-unexplained", "low-utilization", "no-gpu-activity")
"""First lines that accuse nothing."""
_LINE: Final = re.compile(r"([\w.-]+\.py):(\d+)")


@dataclass(frozen=True, slots=True)
class Answer:
    """The first line of what a tool says."""

    cause: str
    """Its id; empty if the tool says nothing."""
    words: str = ""
    """The line, and what stands below it."""
    ranks: tuple[int, ...] = ()
    saves: float | None = None
    """Part of a step that it is said to cost."""
    foretold: tuple[float, float, float] | None = None
    """Part of a step that its cure is predicted to save: at least, probably, at most."""
    means: tuple[str, ...] = ()
    """Findings of gputrace that a peer's answer counts as, where its words are others."""
    broad: bool = False
    """It says where the time went, but accuses no cause in particular."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Fault of a program; the fields are those of truth.toml."""

    name: str
    path: Path
    fault: str
    cause: str
    first: tuple[str, ...]
    says: str
    where: tuple[str, ...]
    rank: int | None
    gpus: int
    cpu: bool
    steps: int
    """How many steps it trains; 0 for as many as most programs do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Parts of an answer that are right; None where there is nothing to be judged."""

    cause: bool
    place: bool | None
    accuses: bool
    """It names a cause that is not the program's."""


def judge(truth: Truth, answer: Answer) -> Verdict:
    """Return whether an answer names the cause and the place, and whether it accuses another."""
    means = answer.means or (answer.cause,)
    named = not set(means).isdisjoint(truth.first)
    place: list[bool] = []
    if truth.where:
        lines = lines_of(truth, truth.where)
        place.append(any(found in lines for found in _said(answer.words)))
    if truth.rank is not None:
        place.append(truth.rank in answer.ranks)
    accuses = not (answer.broad or named or set(means) <= set(HONEST))
    right = named and bool(re.search(truth.says, answer.words, re.I))
    return Verdict(right, all(place) if place else None, accuses)


def of_gputrace(found: Mapping[str, Any], step_ms: float | None = None) -> Answer:
    """Return the first line of what ``gputrace analyze --json`` says.

    What it costs is a part of a step by the program's own clock, which has what lies between steps
    too; by the recording without one. What is foretold is of the first cure of the finding.
    """
    findings: Sequence[Mapping[str, Any]] = found["findings"]
    if not findings:
        return Answer("")
    first, step = findings[0], found["steps"].get("mean_ns")
    step = 1e6 * step_ms if step_ms else step
    words = "\n".join((first["message"], first["advice"], *first["details"]))
    saves = first["impact_ns"] / step if step and first["id"] not in HONEST else None
    cures = (one for one in found.get("what_if") or () if one["finding"] == first["id"])
    foretold = next(
        (
            tuple(1 - one[key] / one["now_ns"] for key in ("high_ns", "step_ns", "low_ns"))
            for one in cures
            if one["now_ns"]
        ),
        None,
    )
    return Answer(first["id"], words, tuple(first["ranks"]), saves, foretold)


def truths(table: Mapping[str, Mapping[str, Any]], root: Path) -> list[Truth]:
    """Return the truths of a table; `root` is the folder of the checkout."""
    programs = Path(__file__).with_name("programs")
    return [
        Truth(
            name,
            root / row["file"] if "file" in row else programs / f"{name}.py",
            row["class"],
            row["cause"],
            tuple(row["first"]),
            row.get("says", ""),
            tuple(row["where"]),
            row.get("rank"),
            row.get("gpus", 1),
            row.get("cpu", False),
            row.get("steps", 0),
        )
        for name, row in table.items()
    ]


def _said(words: str) -> Iterator[tuple[str, int]]:
    for name, line in _LINE.findall(words):
        yield name, int(line)


def lines_of(truth: Truth, functions: Sequence[str]) -> set[tuple[str, int]]:
    """Return the lines of some functions, in the program and the files beside it."""
    lines = set()
    for path in truth.path.parent.glob("*.py"):
        for name, first, last in _functions(ast.parse(path.read_text(encoding="utf-8")).body):
            if name in functions:
                lines |= {(path.name, line) for line in range(first, last + 1)}
    return lines


def _functions(body: Sequence[ast.stmt], within: str = "") -> Iterator[tuple[str, int, int]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{within}{node.name}", node.lineno, node.end_lineno or node.lineno
