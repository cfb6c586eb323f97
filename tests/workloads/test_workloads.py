"""The workload scripts, each in its framework's environment: what they tell is what is recorded.

`make workloads` makes the environments; the tests of a framework that has none are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from gputrace.studies.framework_environments import Environments, Unavailable, read_frameworks
from gputrace.studies.measures import RunResult, measure
from gputrace.studies.results import RecordingCheck
from gputrace.studies.summary import check_run
from tests.helpers.command import ROOT, Ran, environment

WORKLOADS: Final = ROOT / "workloads"
FRAMEWORKS: Final = read_frameworks(WORKLOADS / "frameworks.toml")
STEPS: Final = 6
TRIES: Final = 3
"""A busy machine may take the processor away between the two clocks of a wait; not each time."""
USERS_CACHE: Final = {k: v for k, v in os.environ.items() if k == "XDG_CACHE_HOME"}
"""As it is before the tests get a cache folder of their own."""

Command = Callable[[str], list[str]]


def run(*words: str | Path) -> Ran:
    """On one thread, as several tests run at once; what XLA compiles need not be fast."""
    ran = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(
            {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        ),
        timeout=180,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images for ``--data``."""
    folder = tmp_path_factory.mktemp("pictures")
    made = run(sys.executable, WORKLOADS / "images.py", folder, "--count", "64", "--size", "264")
    assert made.code == 0, made.err
    return folder


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Command:
    """The words that start a framework's script; the test is skipped where they cannot."""

    def find(name: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("XDG_CACHE_HOME")
            for variable in USERS_CACHE.items():
                patch.setenv(*variable)
            try:
                python = Environments({}, None, print).find(FRAMEWORKS[name])
            except Unavailable as reason:
                pytest.skip(f"{name}: {reason}")
        return [str(python), str(FRAMEWORKS[name].script), *FRAMEWORKS[name].arguments]

    return find


OF_TOKENS: Final = {"torch-parallel": "fsdp2", "transformers": "ddp", "lightning": "ddp"}
"""Frameworks that take no pictures, each with a placement of two ranks."""


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name not in OF_TOKENS])
def test_a_recording_has_every_step_and_wait_that_a_script_tells(
    name: str, start: Command, pictures: Path, tmp_path: Path
) -> None:
    command = [*start(name), "--data", str(pictures)]
    for trial in range(TRIES):
        check = check_recording(name, command, tmp_path / f"{trial}.sqlite")
        if not check.reason.startswith("waits for data differ"):
            break
    assert (check.reason, check.steps_found) == ("", {0: STEPS})


@pytest.mark.parametrize(("name", "update"), OF_TOKENS.items())
def test_each_rank_of_training_on_tokens_has_every_step(
    name: str, update: str, start: Command, tmp_path: Path
) -> None:
    """`make workloads` records the other placements, too."""
    command = [*start(name), "--update", update]
    check = check_recording(name, command, tmp_path / "run.sqlite")
    assert (check.reason, check.steps_found) == ("", {0: STEPS, 1: STEPS})


def check_recording(name: str, command: Sequence[str], trace: Path) -> RecordingCheck:
    """A run of a few steps on the CPU, beside its recording."""
    record = [sys.executable, "-m", "gputrace", "record", "--backend", "host", "-o", str(trace)]
    options = ["--device", "cpu", "--batch", "8", "--steps", str(STEPS), "--warmup", "1"]
    ran = run(*record, "--", *command, *options)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out.splitlines()[-1])
    assert told["steps"] == STEPS
    return check_run(name, RunResult({}, 1, True, "done", result=told, measure=measure(trace)))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_a_script_cannot_do_is_told_in_one_line(name: str, start: Command) -> None:
    ran = run(*start(name), "--device", "cpu", "--steps", "3", "--warmup", "3")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith(f"{FRAMEWORKS[name].script.name}: error: --")
    assert "Traceback" not in ran.err
