"""CUDA graphs that several threads instantiate: CUPTI bears one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.native.build import Machine

SERIAL: Final = {"GPUTRACE_SERIAL_GRAPHS": "1"}
GRAPHS: Final = "graphs 20 4 at_once "


def said(machine: Machine, folder: Path, script: str, env: dict[str, str]) -> list[int]:
    done = machine.run(folder, f"inject {script}", env)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(line) for line in done.stdout.split()]


def test_one_waits_for_the_other(machine: Machine, tmp_path: Path) -> None:
    assert said(machine, tmp_path, GRAPHS, SERIAL) == [1]


def test_in_other_programs_nobody_waits_and_others_may_subscribe(
    machine: Machine, tmp_path: Path
) -> None:
    *taken, at_once = said(machine, tmp_path, f"taken {GRAPHS}", {})
    assert taken == [0]
    assert at_once > 1


def test_they_wait_in_each_window(machine: Machine, tmp_path: Path) -> None:
    env = SERIAL | {"GPUTRACE_CAPTURE": "manual", "GPUTRACE_HOLD_NS": "0"}
    window = "capture 1 plain graphs 10 4 capture 0 "
    script = f"{window}released 1 0 taken {window}at_once"
    assert said(machine, tmp_path, script, env) == [0, 1]


def test_another_profiler_has_the_place_meanwhile(machine: Machine, tmp_path: Path) -> None:
    script = f"taken pause 1 taken pause 0 taken {GRAPHS}"
    assert said(machine, tmp_path, script, SERIAL) == [1, 0, 1, 1]


@pytest.mark.parametrize("library", ["jaxlib/libjax_common.so", "libtensorflow_framework.so.2"])
def test_programs_that_do_so_are_known_by_their_libraries(
    machine: Machine, tmp_path: Path, library: str
) -> None:
    env = machine.with_library(tmp_path / "libs", library)
    (tmp_path / "spools").mkdir()
    assert said(machine, tmp_path / "spools", GRAPHS, env) == [1]
