"""Sums of what tools said first about trainings with planted faults, and a table of all of it.

``python -m benchmarks.causes.table RUN.json [MORE.json ...] TABLE.csv`` makes the table of several
runs of ``python -m benchmarks causes --save``; what a later one has replaces what an earlier one
has of the same recording.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.causes.judge import Answer, Truth, Verdict, judge, truths
from benchmarks.measure import ROOT

TRUTH: Final = Path(__file__).with_name("truth.toml")
TOOLS: Final = ("gputrace", "nsys", "nsys-ai", "HTA", "TraceLens")
Kept = Mapping[str, Sequence[Mapping[str, Any]]]
"""A run as it was kept: "answers" of tools, and "steps" of programs in milliseconds."""


def known_truths() -> list[Truth]:
    """Return the truths about all programs."""
    return truths(tomllib.loads(TRUTH.read_text(encoding="utf-8")), ROOT)


def judged(truth: Truth, kept: Kept, tool: str) -> list[tuple[Answer, Verdict]]:
    """Return what a tool said of each recording of a program, and how it is judged."""
    fields = Answer.__dataclass_fields__
    found = []
    for row in kept["answers"]:
        if row["part"] == truth.name and row["tool"] == tool:
            answer = Answer(**{name: row[name] for name in fields if name in row})
            found.append((answer, judge(truth, answer)))
    return found


def measured(truth: Truth, kept: Kept) -> float | None:
    """Return the part of a bare step that the cure saves; of a recorded one if none was bare."""
    took: dict[str, list[float]] = {}
    for row in kept["steps"]:
        if row["part"] == truth.name:
            took.setdefault(row["how"], []).append(row["ms"])
    sick, cured = took.get("sick") or took.get("recorded"), took.get("cured")
    return 1 - statistics.median(cured) / statistics.median(sick) if sick and cured else None


def sums(wanted: Sequence[Truth], kept: Kept) -> str:
    """Return a line for each tool: causes and places named, false accusations."""
    lines = []
    for tool in TOOLS:
        every = [pair for truth in wanted for pair in judged(truth, kept, tool)]
        if not every:
            continue
        verdicts = [verdict for _, verdict in every]
        placed = [verdict.place for verdict in verdicts if verdict.place is not None]
        lines.append(
            f"{tool}: {sum(verdict.cause for verdict in verdicts)} of {len(verdicts)} first lines "
            f"right, {sum(placed)} of {len(placed)} places, "
            f"{sum(verdict.accuses for verdict in verdicts)} false accusations"
        )
    return "\n".join(lines)


def table(wanted: Sequence[Truth], kept: Kept) -> Iterable[Sequence[str]]:
    """Yield the head, and a row for each program of which gputrace said anything."""
    peers = [tool for tool in TOOLS[1:] if any(row["tool"] == tool for row in kept["answers"])]
    yield ("program", "fault", "recordings", "first line", "right", "place", "accuses", "costs",
           "foretold", "measured", *peers)  # fmt: skip
    for truth in wanted:
        ours = judged(truth, kept, "gputrace")
        if not ours:
            continue
        verdicts = [verdict for _, verdict in ours]
        placed = [verdict.place for verdict in verdicts if verdict.place is not None]
        said = Counter(answer.cause for answer, _ in ours)
        yield (
            f"`{truth.name}`",
            truth.cause,
            str(len(ours)),
            ", ".join(_times(f"`{cause}`", count, len(ours)) for cause, count in said.items()),
            str(sum(verdict.cause for verdict in verdicts)),
            str(sum(placed)) if placed else "",
            str(sum(verdict.accuses for verdict in verdicts)),
            _percent([answer.saves for answer, _ in ours if answer.saves is not None]),
            _foretold([answer.foretold for answer, _ in ours if answer.foretold is not None]),
            _percent([saved] if (saved := measured(truth, kept)) is not None else []),
            *(_peer(judged(truth, kept, tool)) for tool in peers),
        )


def _times(what: str, count: int, of: int) -> str:
    return what if count == of else f"{what} ×{count}"


def _percent(parts: Sequence[float]) -> str:
    return f"{100 * statistics.median(parts):.0f} %" if parts else ""


def _foretold(ranges: Sequence[Sequence[float]]) -> str:
    if not ranges:
        return ""
    low, middle, high = (f"{100 * statistics.median(one):.0f}" for one in zip(*ranges, strict=True))
    return f"{middle} ({low} to {high}) %"


def _peer(found: Sequence[tuple[Answer, Verdict]]) -> str:
    """Say what a peer named and how it is judged; empty where it read no recording."""
    if not found:
        return ""
    answer, verdict = found[0]
    word = "right" if verdict.cause else "**wrong**" if verdict.accuses else "names no cause"
    return f"{answer.cause or 'nothing'}: {word}{', and the line' if verdict.place else ''}"


def write_csv(path: Path, wanted: Sequence[Truth], kept: Kept) -> None:
    """Write the table as a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table(wanted, kept))


def main(paths: Sequence[str]) -> None:
    """Sum up saved runs, and write their table."""
    answers: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    steps: list[Mapping[str, Any]] = []
    for path in paths[:-1]:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))["causes"]
        answers |= {(row["part"], row["tool"], row["run"]): row for row in saved["answers"]}
        steps += saved.get("steps", ())
    kept = {"answers": list(answers.values()), "steps": steps}
    print(sums(known_truths(), kept))
    write_csv(Path(paths[-1]), known_truths(), kept)


if __name__ == "__main__":
    main(sys.argv[1:])
