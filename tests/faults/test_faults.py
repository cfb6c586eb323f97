"""Faults injected into recordings: the program is as without one, and its trace is whole.

`make faults` injects over a thousand (tests/faults, docs/faults.md). Here are one of each group,
always the same, and each fault that once did harm.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Final

import pytest

from gputrace.collectors.backends.cupti import collector_library
from gputrace.collectors.spool.activity import read_spool
from gputrace.errors import InputError
from tests.faults.building import build
from tests.faults.catalogue import KINDS
from tests.faults.checking import run_fault
from tests.faults.model import Fault, Kind, May, Outcome, Strike
from tests.native.build import Machine

SEED: Final = 4
AT_ONCE: Final = 4


@pytest.fixture(scope="module")
def folder(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine, and the libraries that do harm."""
    if collector_library() is None:
        pytest.skip("gputrace was installed without its collector")
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(machine.folder, folder, dirs_exist_ok=True)
    build(folder)
    return folder


def problems(outcome: Outcome) -> list[str]:
    return [f"{outcome.fault}: {line}" for line in outcome.changed + outcome.broken]


def of_each_group() -> list[Kind]:
    """The first kind of each, but those that need the rights of root."""
    groups = {kind.group: kind for kind in reversed(KINDS)}
    return list(groups.values())


def test_each_kind_of_fault_has_a_name_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_faults_change_no_program_and_cost_no_trace(folder: Path, tmp_path: Path) -> None:
    def inject(kind: Kind) -> Outcome:
        fault = kind.make(random.Random(f"{SEED} {kind.name}"))
        return run_fault(kind.name, 0, fault, folder, tmp_path / kind.group.replace(" ", "-"))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(inject, of_each_group()))
    assert [line for outcome in outcomes for line in problems(outcome)] == []
    assert len(outcomes) >= 12


COLLECTOR: Final = ("--backend", "cupti")
WITHOUT_CUPTI: Final = {"GPUTRACE_CUPTI": "MACHINE/broken_cupti.so"}


def fails(function: str) -> Fault:
    env = WITHOUT_CUPTI | {"FAULT_CUPTI": f"{function} 8 1"}
    return Fault(("plain", "0.2"), env, may_lack=May.GPU)


ONCE_HARMFUL: Final = {
    # The collector wrote into files of the program that had its number.
    "closes all files": Fault(("closes_files", "0.2")),
    # CUPTI before 12.9 may crash where it is refused a buffer.
    "no memory for a buffer": Fault(("short_of_memory", "1.2", "0"), may_lack=May.SECOND),
    # Records that there was no memory for were left out, and nobody was told.
    "no memory for the collector": Fault(("plain", "0.3"), {"FAULT_MEMORY": "1 1000000"}),
    # The signal of a limit ended the program, which had not reached it.
    "limit on files": Fault(("limits_files_unaware", "0.5", "3000"), may_lack=May.TOLD),
    # A thread that CUPTI starts for us took them, and the program ended.
    "blocked signals": Fault(("waits_for_signals", "0.3"), may_lack=May.SECOND),
    # Steps were not recorded any more.
    "no descriptor": Fault(("uses_all_files", "0.4", "start")),
    "end of the stack": Fault(("goes_deep", "0.2")),
    # The first step was missing, and times were off.
    "clock set back": Fault(("plain", "3"), jumps=((0.9, -30.0),)),
    # The program hung: no number of negative steps is long enough for a control stretch.
    "clock set back before a control stretch": Fault(
        ("plain", "3"), jumps=((0.9, -30.0),), control=True
    ),
    # What was half-made stayed; so it did after SIGKILL, even once it was recovered.
    "SIGTERM at the end": Fault(
        ("plain", "0.2"), strikes=(Strike(SIGTERM, 0.0, "merging"),), recorder_dies=True
    ),
    "SIGKILL at the end": Fault(
        ("plain", "0.2"), strikes=(Strike(SIGKILL, 0.0, "merging"),), recorder_dies=True
    ),
    # A traceback.
    "no memory for the trace": Fault(("plain", "0.2"), recorder_dies=True, squeeze=0),
    # Kernels were missing, and the trace did not say so; or CUPTI was used all the same.
    "no threads": Fault(("plain", "0.2"), {"FAULT_THREADS": "1"}, may_lack=May.GPU),
    "no callbacks": fails("cuptiActivityRegisterCallbacks"),
    "no records": fails("cuptiActivityEnable"),
    "no flush": fails("cuptiActivityFlushAll"),
    "no walk": fails("cuptiActivityGetNextRecord"),
}


@pytest.mark.parametrize("name", ONCE_HARMFUL)
def test_what_once_did_harm_does_none(name: str, folder: Path, tmp_path: Path) -> None:
    outcome = run_fault(name, 0, ONCE_HARMFUL[name], folder, tmp_path / "run")
    assert problems(outcome) == []


def test_files_of_a_process_are_its_owners_whatever_its_umask(folder: Path, tmp_path: Path) -> None:
    native = Machine(folder)
    command, env = native.command("inject sample"), native.environment(tmp_path)
    subprocess.run(command, env=env, umask=0o777, check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_written_of_a_chunk_is_read(folder: Path, tmp_path: Path) -> None:
    native = Machine(folder)
    assert native.run(tmp_path, "inject storm 100 1 exit 0").returncode == 0
    (path,) = tmp_path.glob("*.spool")
    raw, found = path.read_bytes(), []
    for size in range(0, len(raw), 90):
        path.write_bytes(raw[:size])
        try:
            found.append(len(read_spool(path).records[b"KERN"]))
        except InputError:
            found.append(0)
    assert found == sorted(found)
    # A kernel takes 96 bytes.
    assert max(after - before for before, after in pairwise(found)) == 1


def test_a_fault_that_does_harm_is_noticed(folder: Path, tmp_path: Path) -> None:
    """A recorder that is killed leaves no trace by itself, and its exit code is its own."""
    strike = Strike(SIGKILL, 0.1, "recorder")
    fault = Fault(("plain", "0.3"), strikes=(strike,))
    outcome = run_fault("", 0, fault, folder, tmp_path / "killed")
    assert outcome.changed == ["exit code 137 for 0"]
    assert outcome.broken == ["no trace, and exit code 137"]
    fault = Fault(("leaves", "0.4", "0"), {"FAULT_IN": "program"})
    outcome = run_fault("", 0, fault, folder, tmp_path / "lost")
    assert not outcome.changed
    assert any("are missing, the first" in line for line in outcome.broken)
