"""The first line of real recordings with known truth, as a table.

A folder holds the recordings and their `truth.json`: a list of cases, each with `name`, `files`,
`why` (what is known, and how), and the ids of findings that may come `first`, that it `has` and
that it must `never` have. `GPUTRACE_CORPUS` names the folder.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gputrace
from benchmarks.options import Options
from gputrace.model.results import Finding
from tests.helpers.recordings import SHARED


def run(options: Options) -> int:
    """Print the table; 1 with ``--check`` if a case is wrong."""
    folder = Path(os.environ.get("GPUTRACE_CORPUS", SHARED / "traces" / "corpus"))
    if not (folder / "truth.json").is_file():
        print(f"{folder}: no truth.json there; name the folder in GPUTRACE_CORPUS")
        return 0
    print("| recording | what is known | found first | right |\n| :-- | :-- | :-- | :-- |")
    wrong = 0
    for case in json.loads((folder / "truth.json").read_text(encoding="utf-8")):
        findings = _findings(folder, case["files"])
        right = _is_right(case, findings)
        wrong += not right
        first = findings[0].id if findings else "none"
        print(f"| {case['name']} | {case['why']} | `{first}` | {'yes' if right else '**no**'} |")
    return int(options.check and wrong > 0)


def _findings(folder: Path, files: Sequence[str]) -> tuple[Finding, ...]:
    with tempfile.TemporaryDirectory() as unpacked:
        paths = []
        for name in files:
            path = folder / name
            if path.suffix == ".xz":
                path = Path(unpacked) / path.stem
                path.write_bytes(lzma.decompress((folder / name).read_bytes()))
            paths.append(path)
        with gputrace.open(*paths) as trace:
            return trace.analyze().findings


def _is_right(case: Mapping[str, Any], findings: Sequence[Finding]) -> bool:
    """Return whether the findings agree with what is known; the figures are not judged."""
    ids = [finding.id for finding in findings]
    first = not case.get("first") or ids[:1] in [[id] for id in case["first"]]
    has = all(
        any(
            finding.id in wanted["id"] and set(wanted.get("ranks", ())) <= {*finding.ranks}
            for finding in findings
        )
        for wanted in case.get("has", ())
    )
    return first and has and not set(ids) & set(case.get("never", ()))
