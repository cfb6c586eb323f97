"""Recipes: changes of the source for causes of lost time that no cure takes away."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gputrace.model.results import Analysis
from gputrace.trials.cures import all_cures
from gputrace.trials.patch import Edit
from gputrace.trials.statements import (
    EVERY,
    Source,
    TextEdit,
    needless_statements,
    remove,
    run_every,
)

_LEAST: Final = 0.05
"""Minimum part of a step that a cause takes for a recipe."""
_MOST: Final = 3
_PLACE: Final = re.compile(r"(.*):(\d+) (\S+)")
"""Line of a ledger's row: end of the file's path, number, function."""
_UNCHANGEABLE: Final = ("warmup", "recorder-overhead", "idle-unexplained")
"""Causes that are once, ours or unknown: a change of the source does not help the steps."""
_THINNED: Final = ("host-work", "sync-bound", "checkpoint-stall")
"""Causes whose work can be done in some steps only, at the line where most of it is."""


def find_recipes(analysis: Analysis, main: str, cured: Collection[str] = ()) -> list[str]:
    """Return what to change in the source for the causes that take most of a step, in words, with
    the changed lines where the change is mechanical; nothing of it is proven.

    These are the causes that no cure is for, and those whose line is known. The words are the
    finding's advice.

    Args:
        analysis: of a recording of the program.
        main: path of the program.
        cured: causes that a cure has been proven to shorten.
    """
    recipes = list[str]()
    causes = {cause.id for cause in analysis.causes}.difference(cured, _UNCHANGEABLE)
    curable = {finding for cure in all_cures().values() for finding in cure.findings}
    step_ns = analysis.steps.mean_ns or math.inf
    for finding in sorted(analysis.findings, key=lambda each: -each.impact_ns):
        lines = Counter[str]()
        for row in analysis.ledger:
            if row.cause == finding.id and row.line is not None:
                lines[row.line] += row.ns
        share, line = finding.impact_ns / step_ns, max(lines, key=lambda at: lines[at], default="")
        wanted = finding.id in causes and finding.advice and share >= _LEAST
        if wanted and (line or finding.id not in curable):
            at = f" at {line.rpartition(' ')[0]}" if line else ""
            edit = _edit(finding.id, line, Path(main))
            changed = f" ({'; '.join(edit.lines)})" if edit else ""
            recipes.append(
                f"{finding.id} takes {share:.0%} of a step{at}: {finding.advice}{changed}"
            )
    return recipes[:_MOST]


def _edit(cause: str, line: str, main: Path) -> Edit | None:
    """Return the change of the file that a line is in; None if it is not mechanical."""
    if cause not in (*_THINNED, "garbage-collection") or (found := _find(line, main)) is None:
        return None
    path, source, number, function = found
    edits: set[TextEdit]
    if cause == "garbage-collection":
        edits = remove(source, number, "collect")
    else:
        # In a function, the calls of which can be fewer.
        places = [(number, ""), *((at, function) for at in source.calls(function))]
        changes = (run_every(source, at, call, EVERY) for at, call in places)
        edits = next(filter(None, changes), set())
    return Edit(path, source.data.decode(), source.edited(edits)) if edits else None


def _find(line: str, main: Path) -> tuple[Path, Source, int, str] | None:
    """Return the file that a ledger's line is in, its text, the number, and the function's name."""
    match = _PLACE.fullmatch(line)
    if match is None:
        return None
    folders = (main.parents[len(Path(match[1]).parts) - 1 :][:1], [main.parent, Path.cwd()])
    paths = (folder / match[1] for some in folders for folder in some)
    path = next((path for path in paths if path.is_file()), None)
    try:
        source = Source(path.read_bytes().decode()) if path else None
    except (OSError, ValueError, SyntaxError):
        return None
    return (path, source, int(match[2]), match[3].rpartition(".")[2]) if path and source else None


def find_needless(analysis: Analysis, main: str) -> list[str]:
    """Return the statements in which causes of lost time are that the training can go without, as
    ``train.py:14`` or ``train.py:14-16``, from the current folder; those that take most first.
    """
    charged = Counter[str]()
    for row in analysis.ledger:
        if row.cause in _THINNED and row.line is not None:
            charged[row.line] += row.ns
    places, here = Counter[str](), Path.cwd()
    for line, ns in charged.items():
        # A function of another file may be called by the program's.
        calls = f"{Path(main).name}:0 {line.partition(' ')[2]}"
        for path, source, number, function in filter(
            None, (_find(at, Path(main)) for at in (line, calls))
        ):
            if group := needless_statements(source, number, function):
                name = path.relative_to(here) if path.is_relative_to(here) else path
                lines = "-".join(
                    str(at) for at in dict.fromkeys(each.lineno for each in (group[0], group[-1]))
                )
                places[f"{name}:{lines}"] += ns
                break
    return [place for place, _ in places.most_common(_MOST)]
