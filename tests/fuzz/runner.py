"""Starts a worker for each target in turn, and adds up what became of the inputs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tests.fuzz.session import COUNTS
from tests.fuzz.targets import target_of
from tests.helpers.command import ROOT

_WAITED_S: Final = 120
"""Of wall time without a further input: one waits for something that never comes."""
_LOOKED_S: Final = 0.5
_UNLIMITED: Final = (1 << 31) - 1

Summary = dict[str, dict[str, int]]
"""The counts of each target, and the seconds that its workers ran."""


@dataclass(slots=True)
class Runner:
    """Runs workers one after the other.

    Attributes:
        folder: what they leave: counts, which further runs add to, and the inputs that failed.
        engine: ``random`` or ``atheris``.
        died: what ended workers, by target.
    """

    folder: Path
    engine: str = "random"
    died: dict[str, list[str]] = field(default_factory=dict)

    def run(self, name: str, seed: int, inputs: int | None, seconds: float) -> None:
        """Gives inputs to one target, in another process where one was ended."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        began, before = time.monotonic(), self._inputs(name)
        while True:
            done = self._inputs(name) - before
            left = began + seconds - time.monotonic()
            if left <= 0 or (inputs is not None and done >= inputs):
                break
            more = _UNLIMITED if inputs is None else inputs - done
            code = self._work(name, seed + done, more, left)
            if code == 0:
                break
            self._bury(name, code)
        self._add_seconds(name, round(time.monotonic() - began))

    def _work(self, name: str, seed: int, inputs: int, seconds: float) -> int:
        words = [name, self.folder, self.engine, seed, inputs, int(seconds) + 1]
        command = [sys.executable, "-m", "tests.fuzz.worker", *map(str, words)]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / name / "log").open("wb") as log:
            worker = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | threads, stdout=log, stderr=log
            )
            try:
                return self._watch(worker, name)
            finally:
                worker.kill()
                worker.wait()

    def _watch(self, worker: subprocess.Popen[bytes], name: str) -> int:
        """Its exit code; that of SIGALRM where no input came to its end for long."""
        last, since = -1, time.monotonic()
        while (code := worker.poll()) is None:
            time.sleep(_LOOKED_S)
            if (now := self._inputs(name)) != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > _WAITED_S:
                return -signal.SIGALRM
        return code

    def _bury(self, name: str, code: int) -> None:
        """Keeps the input that ended a worker, and what the worker said."""
        self.died.setdefault(name, []).append(_why(code))
        failures = self.folder / name / "failures"
        failures.mkdir(exist_ok=True)
        path = failures / f"{name}-died-{len(list(failures.glob('*died*.txt')))}"
        log = (self.folder / name / "log").read_text("utf-8", "replace")
        path.with_suffix(".txt").write_text(f"{_why(code)}\n{log[-4000:]}", "utf-8")
        given = self.folder / name / "in" / target_of(name).file
        if given.exists():
            path.write_bytes(given.read_bytes())

    def _inputs(self, name: str) -> int:
        return self.counts(name)["inputs"]

    def counts(self, name: str) -> dict[str, int]:
        """Sum up the counts of all workers of a target."""
        path = self.folder / name / "counts"
        numbers = np.fromfile(path, np.int64) if path.exists() else np.zeros(len(COUNTS), int)
        return dict(zip(COUNTS, numbers.tolist(), strict=True))

    def _add_seconds(self, name: str, seconds: int) -> None:
        path = self.folder / name / "seconds"
        path.write_text(str(seconds + (int(path.read_text()) if path.exists() else 0)))

    def summary(self, names: Iterable[str]) -> Summary:
        """The counts of targets; inputs that ended a worker are among those that failed."""
        found = {}
        for name in names:
            counts, seconds = self.counts(name), self.folder / name / "seconds"
            counts["failed"] += len(list((self.folder / name / "failures").glob("*-died-*.txt")))
            # Without one that was under way when its worker was stopped.
            counts["inputs"] = sum(counts[kind] for kind in ("read", "refused", "failed"))
            told = int(seconds.read_text()) if seconds.exists() else 0
            found[name] = counts | {"seconds": told}
        return found

    def failures(self, names: Iterable[str]) -> Mapping[Path, str]:
        """The inputs that failed, one of each kind, and why."""
        return {
            path.with_suffix(""): path.read_text("utf-8").partition("\n")[0]
            for name in names
            for path in sorted((self.folder / name / "failures").glob("*.txt"))
        }


def best_engine() -> str:
    """The guided one where atheris is installed."""
    return "atheris" if importlib.util.find_spec("atheris") else "random"


def write_summary(summary: Summary, path: Path) -> None:
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return "took over 10 s of processor time"
    if code == -signal.SIGALRM:
        return f"waited for over {_WAITED_S} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
