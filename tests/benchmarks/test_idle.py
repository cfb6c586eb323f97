"""The benchmark of an idle CUPTI: what it does to one before it measures, and what it prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.idle import STATES, show
from tests.helpers.command import ROOT
from tests.native.build import Machine

PUT = """
import ctypes, sys
from benchmarks.idle import put
state, path = sys.argv[1:]
fake, seen = ctypes.CDLL(path), []
def look(): return fake.fake_records(), fake.fake_taken(), fake.fake_finalized()
put(state, path, lambda: seen.append(look()), lambda: fake.fake_profiler(1))
print(seen, look(), flush=True)
import os; os._exit(0)
"""
NOTHING, ON = "[]", "[(1, 0, 0)]"


@pytest.mark.parametrize(
    ("state", "meanwhile", "then"),
    [
        ("bare", NOTHING, (0, 0, 0)),
        ("loaded", NOTHING, (0, 0, 0)),
        ("asked", NOTHING, (0, 0, 0)),
        ("subscribed", NOTHING, (0, 1, 0)),
        ("unsubscribed", NOTHING, (0, 0, 0)),
        ("kernels off", ON, (0, 0, 0)),
        ("calls off", "[(0, 0, 0)]", (0, 0, 0)),
        ("all off", ON, (0, 0, 0)),
        ("taken out", ON, (0, 0, 1)),
        ("all on", ON, (1, 0, 0)),
    ],
)
def test_a_state_is_what_it_is_called(
    machine: Machine, state: str, meanwhile: str, then: tuple[int, int, int]
) -> None:
    """Whether kernels are recorded, a subscriber is there, and how often CUPTI was finalized."""
    command = [sys.executable, "-c", PUT, state, str(machine.folder / "libcupti.so.13")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, f"{meanwhile} {then}\n"), ran.stderr


def test_excess_is_that_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds differ by more than states do where the host is shared."""
    found = {state: [(10.0, 4.0), (20.0, 5.0), (30.0, 6.0)] for state in STATES}
    found["all off"] = [(11.0, 4.5), (22.0, 5.25), (31.5, 7.0)]
    show(found)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| all off"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:6] == [
        "22.000",
        "+1.500 (+1.000 to +2.000)",
        "5.250",
        "+0.500 (+0.250 to +1.000)",
    ]
