"""Studies of scripts that stand for training: they say what they were asked, and a rate."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace import cli
from gputrace.studies.database import Database, Run
from tests.helpers import command

SCRIPT: Final = """
import json, os, sys, time, warnings
words = dict(zip((w.lstrip("-") for w in sys.argv[1::2]), sys.argv[2::2]))
gpus, batch = int(words.get("gpus", 1)), int(words.get("batch", 32))
with open(os.environ["RUNS"], "a") as file:
    file.write(json.dumps(words | {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\\n")
BODY
print("training", flush=True)
print(json.dumps({"framework": "stub", "model": words.get("model", "resnet20"), "gpus": gpus,
    "batch": batch, "steps": int(words.get("steps", 20)), "samples_per_second": 100.0 * gpus}))
"""
"""Writes a line with its options to the file that the variable RUNS names; BODY is replaced."""


class Bench:
    """A folder with a study, its scripts and its results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workloads = folder / "workloads"
        self.study = self.workloads / "studies" / "study.toml"
        self.results = folder / "results"
        self.ran = folder / "ran.jsonl"
        self.study.parent.mkdir(parents=True)

    def framework(self, name: str, body: str = "", **entry: Any) -> Bench:
        """Adds a framework whose script does ``body`` before it prints its result."""
        script = self.workloads / f"{name}.py"
        script.write_text(entry.pop("header", "") + SCRIPT.replace("BODY", body))
        table = {"title": name.title(), "script": script.name, "modules": ["json"]} | entry
        lines = [f"[{name}]", *(f"{key} = {json.dumps(table[key])}" for key in table)]
        with (self.workloads / "frameworks.toml").open("a") as file:
            file.write("\n".join(lines) + "\n")
        return self

    def write(self, text: str) -> Bench:
        """The study; bare runs unless it says otherwise."""
        self.study.write_text(text if "record" in text else f"record = false\n{text}")
        return self

    def run(self, *options: str | Path, env: Mapping[str, str] | None = None) -> command.Ran:
        """Run `gputrace bench` in this process, which has imported all that it takes."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            for name, value in ({"RUNS": str(self.ran)} | dict(env or {})).items():
                patch.setenv(name, value)
            code = cli.run(self.words(*options))
        return command.Ran(code, out.getvalue(), err.getvalue())

    def run_apart(self, *options: str | Path) -> command.Ran:
        """Start `gputrace bench` in a process of its own."""
        return command.gputrace(*self.words(*options), env={"RUNS": str(self.ran)})

    def words(self, *options: str | Path) -> list[str]:
        """The command line of `run`."""
        return ["bench", str(self.study), "-o", str(self.results), *map(str, options)]

    def runs(self) -> list[Run]:
        """The study's runs that are over."""
        with Database(self.results) as database:
            return database.runs()

    def started(self) -> list[dict[str, Any]]:
        """Return the arguments of each script that was started, in order."""
        if not self.ran.exists():
            return []
        return [json.loads(line) for line in self.ran.read_text().splitlines()]


def is_running(pid: int) -> bool:
    """Return true if a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
