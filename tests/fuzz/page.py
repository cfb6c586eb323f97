"""The table of docs/fuzzing.md, from the counts of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.fuzz.targets import TARGETS

BEGIN: Final = "<!-- fuzz: begin -->\n"
END: Final = "<!-- fuzz: end -->\n"
_HEADER: Final = "| Target | Inputs | Read | Refused | Analyzed, too | Outcomes | Failed |\n"
_COLUMNS: Final = ("inputs", "read", "refused", "looked", "found", "failed")


def line(name: str, counts: Mapping[str, int]) -> str:
    """One target's counts, for a terminal."""
    told = ", ".join(f"{counts[column]:,} {column}" for column in _COLUMNS)
    return f"fuzz: {name}: {told} ({counts['seconds']:,} s)"


def table(summary: Mapping[str, Mapping[str, int]]) -> str:
    """A row for each target, in their order."""
    rows = [_HEADER, "| :-- |" + " --: |" * len(_COLUMNS) + "\n"]
    for target in TARGETS:
        if target.name in summary:
            cells = (f"{summary[target.name][column]:,}" for column in _COLUMNS)
            rows.append(f"| {target.name} | {' | '.join(cells)} |\n")
    return "".join(rows)


def write(summary: Mapping[str, Mapping[str, int]], page: Path) -> None:
    """Puts the table in its place on a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n{table(summary)}\n{END}{after}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
