"""README.md's first section is a script: from the installation to the cause, and to its cure.

By default it runs in the environment of the tests, which has gputrace already. With
GPUTRACE_README_VENV=1 in the environment it makes a new one, and runs `pip install .` there too,
which takes a minute and a package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.helpers import command, documented
from tests.project.test_packaging import LEFT_OUT

README: Final = command.ROOT / "README.md"
FIVE_MINUTES_S: Final = 300.0
INSTALL: Final = "pip install ."

OWN_TRAINING: Final = '''\
"""A training of one's own, in plain Python: it waits for its data."""

import time

import gputrace


def batches(count):
    for number in range(count):
        with gputrace.annotate("data"):
            time.sleep(0.020)
        yield [float(number + index) for index in range(64)]


weights = [0.0] * 64
for batch in batches(40):
    for _ in range(20):
        weights = [weight + 0.01 * (value - weight) for weight, value in zip(weights, batch)]
    gputrace.step()
print("trained")
'''
CURE: Final = ("time.sleep(0.020)", "time.sleep(0.001)")


def section(title: str) -> list[str]:
    """The commands below a heading of the README, in order."""
    lines = README.read_text(encoding="utf-8").splitlines()
    first = lines.index(f"## {title}") + 1
    last = next(n for n, line in enumerate(lines[first:], first) if line.startswith("## "))
    return [
        " ".join(documented.words(text))
        for block in documented.blocks(README)
        if first < block.line <= last and block.language == "sh"
        for text, _ in documented.commands(block)
    ]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python to run the README with, which need not have gputrace yet."""
    if not os.environ.get("GPUTRACE_README_VENV"):
        return Path(sys.executable)
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    return made / "bin" / "python"


def run(text: str, python: Path, folder: Path) -> str:
    """Runs a command of the README as its reader would; gives what it said."""
    if text == INSTALL:
        return _install(python, folder)
    started = {"gputrace": [str(python), "-m", "gputrace"], "python": [str(python)]}
    name, *rest = text.split()
    own = python != Path(sys.executable)
    env = command.environment({"PATH": f"{python.parent}:/usr/bin:/bin"})
    if own:
        del env["PYTHONPATH"]
    done = subprocess.run(
        [*started[name], *rest],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=FIVE_MINUTES_S,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def _install(python: Path, folder: Path) -> str:
    if python == Path(sys.executable):
        return "installed already"
    checkout = folder / "checkout"
    shutil.copytree(command.ROOT, checkout, symlinks=True, ignore=LEFT_OUT)
    pip = [str(python), "-m", "pip", "install", "-q", "."]
    done = subprocess.run(pip, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_leads_from_the_installation_to_the_cause_and_its_cure(
    python: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_TRAINING, encoding="utf-8")
    install, record, analyze, again, compare = section("Five minutes")

    assert install == INSTALL
    run(install, python, tmp_path)
    assert "trained" in run(record, python, tmp_path)

    cause = " ".join(run(analyze, python, tmp_path).split())
    assert cause.startswith("The program waits "), cause
    assert " for data " in cause
    assert "What to do: load and decode batches in parallel" in cause

    script.write_text(OWN_TRAINING.replace(*CURE), encoding="utf-8")
    run(again, python, tmp_path)
    brought = " ".join(run(compare, python, tmp_path).split())
    assert "faster" in brought.partition(":")[0], brought
    assert "less waiting for data on the host" in brought


def test_the_first_screen_leads_from_the_installation_to_the_cause() -> None:
    screen = "\n".join(README.read_text(encoding="utf-8").splitlines()[:40])
    told = [INSTALL, "gputrace record --", "gputrace analyze", "The GPUs wait", "What to do:"]
    assert sorted(map(screen.find, told)) == list(map(screen.find, told))
    assert min(map(screen.find, told)) > 0
