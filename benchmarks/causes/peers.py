"""First answers of other programs about the same recording, where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.causes.judge import Answer
from benchmarks.experiment import execute
from benchmarks.measure import Failed

_SAME: Final = {
    "idle": "idle-unexplained",
    "compute": "compute-bound",
    "launch_overhead": "launch-bound",
    "communication": "communication-exposed",
}
"""Findings of gputrace that mean what nsys-ai's categories do; idle time alone names no cause."""


def nsys_ai(trace: Path) -> Answer | None:
    """Return the first of nsys-ai's ranked findings; None where it is not installed."""
    named = os.environ.get("GPUTRACE_BENCH_NSYS_AI_PYTHON")
    program = str(Path(named).with_name("nsys-ai")) if named else shutil.which("nsys-ai")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        # It writes into its input, beside it, and into the current folder.
        copy, report = Path(folder, "trace.sqlite"), Path(folder, "findings.json")
        shutil.copy(trace, copy)
        command = ("diagnose", str(copy), "--format", "json", "-o", str(report))
        ended = execute(("env", "-C", folder, program, *command))
        if not report.exists():
            raise Failed(f"nsys-ai: {ended.last_words}")
        first = json.loads(report.read_text(encoding="utf-8"))["findings"][:1]
    if not first:
        return Answer("")
    category, words = first[0].get("category") or "", f"{first[0]['label']}\n{first[0]['note']}"
    return Answer(_SAME.get(category, category), words)
