"""nsys reports are exported by an nsys of this machine, once, into the user's cache folder."""

from __future__ import annotations

import json
import shutil
import sys
from glob import glob
from pathlib import Path
from typing import Final

import pytest

from gputrace.readers.nsys_export import _INSTALLED
from tests.helpers import command
from tests.helpers.command import Ran, assert_refused, state
from tests.helpers.exports import Export

FAKE: Final = """#!{python}
import os, shutil, sys
if "--version" in sys.argv:
    print("NVIDIA Nsight Systems version 2022.4.2.1-df9881f")
    sys.exit()
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + chr(10))
{action}
"""
FAILS: Final = """
print("Processing events...")
print("Error: importer version mismatch: the report is of 2025.3", file=sys.stderr)
sys.exit(1)
"""
COPIES: Final = """
shutil.copy(os.environ["FAKE_EXPORT"], sys.argv[sys.argv.index("-o") + 1])
"""


class Machine:
    """A folder with a report, a cache, and an nsys that does what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.report = folder / "in" / "run 7.nsys-rep"
        self.report.parent.mkdir()
        self.report.write_bytes(b"NSYSREP and what follows")
        self.cache, self.log, self.export = folder / "cache", folder / "log", folder / "export"
        self.nsys = folder / "nsys"

    def install(self, action: str) -> None:
        self.nsys.write_text(FAKE.format(python=sys.executable, action=action), encoding="utf-8")
        self.nsys.chmod(0o755)

    def analyze(self, *arguments: str, **variables: str) -> Ran:
        env = {
            "GPUTRACE_NSYS": str(self.nsys),
            "XDG_CACHE_HOME": str(self.cache),
            "FAKE_LOG": str(self.log),
            "FAKE_EXPORT": str(self.export),
        }
        before = state(self.report.parent)
        ran = command.gputrace("analyze", self.report, *arguments, env=env | variables)
        assert state(self.report.parent) == before
        return ran

    @property
    def exports(self) -> list[str]:
        """The command lines that nsys got."""
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []

    @property
    def cached(self) -> list[str]:
        return sorted(path.suffix for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep", ".NSYS-REP"])
def test_without_an_nsys_it_says_how_to_export(suffix: str, machine: Machine) -> None:
    if any(glob(pattern) for pattern in _INSTALLED):
        pytest.skip("an nsys is installed on this machine")
    machine.report = machine.report.rename(machine.report.with_suffix(suffix))
    ran = machine.analyze(GPUTRACE_NSYS="", PATH="")
    assert_refused(ran, 4, str(machine.report), "Nsight Systems", "nsys export -t sqlite")


def test_an_nsys_that_is_not_there(machine: Machine) -> None:
    assert_refused(machine.analyze(), 4, str(machine.nsys), "cannot be run")


def test_an_nsys_that_cannot_be_run(machine: Machine) -> None:
    machine.nsys.write_bytes(b"\x7fELF of another machine")
    machine.nsys.chmod(0o755)
    assert_refused(machine.analyze(), 4, str(machine.nsys), "cannot be run")


def test_an_nsys_older_than_the_report(machine: Machine) -> None:
    machine.install(FAILS)
    ran = machine.analyze()
    assert_refused(ran, 3, str(machine.report), "nsys 2022.4.2.1", "importer version mismatch")
    assert machine.cached == []


def test_an_nsys_that_writes_nothing(machine: Machine) -> None:
    machine.install("")
    assert_refused(machine.analyze(), 3, str(machine.report), "could not export it")


@pytest.mark.parametrize("content", [b"", b"text", b"SQLite format 3\0"])
def test_an_nsys_that_writes_no_database(content: bytes, machine: Machine) -> None:
    machine.export.write_bytes(content)
    machine.install(COPIES)
    assert_refused(machine.analyze(), 3, str(machine.report))


def test_a_report_without_gpu_activity_is_named_itself(machine: Machine) -> None:
    Export().call(0, 10, "cudaMalloc").write(machine.export)
    machine.install(COPIES)
    assert_refused(machine.analyze(), 3, str(machine.report), "no GPU activity")


def test_an_empty_report(machine: Machine) -> None:
    machine.report.write_bytes(b"")
    machine.install(COPIES)
    assert_refused(machine.analyze(), 3, str(machine.report), "empty")
    assert machine.exports == []


def test_a_report_is_exported_and_analyzed(machine: Machine) -> None:
    Export().kernel(0, 40).kernel(60, 100).write(machine.export)
    machine.install(COPIES)
    ran = machine.analyze("--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert (found["source"], found["path"]) == ("nsys", str(machine.report))
    assert found["gpus"][0]["idle_ns"] == 20
    assert machine.cached == [".sqlite"]


def test_an_nsys_on_the_path_will_do(machine: Machine) -> None:
    Export().kernel(0, 40).write(machine.export)
    machine.install(COPIES)
    ran = machine.analyze(GPUTRACE_NSYS="", PATH=str(machine.nsys.parent))
    assert ran.code == 0
    assert len(machine.exports) == 1


def test_a_report_is_exported_once(machine: Machine) -> None:
    Export().kernel(0, 40).write(machine.export)
    machine.install(COPIES)
    first = machine.analyze()
    machine.nsys.unlink()
    assert machine.analyze() == first
    assert len(machine.exports) == 1


def test_a_report_recorded_anew_is_exported_anew(machine: Machine) -> None:
    Export().kernel(0, 40).write(machine.export)
    machine.install(COPIES)
    assert machine.analyze().code == 0
    machine.report.write_bytes(b"NSYSREP of another run")
    Export().kernel(0, 70).write(_empty(machine.export))
    ran = machine.analyze("--json")
    assert json.loads(ran.out)["span_ns"] == 70
    assert len(machine.exports) == 2


def test_an_export_under_a_report_s_name_needs_no_nsys(machine: Machine) -> None:
    Export().kernel(0, 40).write(machine.export)
    shutil.copy(machine.export, machine.report)
    assert machine.analyze(GPUTRACE_NSYS="", PATH="").code == 0


def test_a_cache_folder_that_cannot_be_written(machine: Machine) -> None:
    machine.install(COPIES)
    machine.cache.write_bytes(b"a file, where the folder should be")
    assert_refused(machine.analyze(), 4, str(machine.cache))


def _empty(path: Path) -> Path:
    path.unlink()
    return path
