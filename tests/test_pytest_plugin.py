"""The marker of pytest: a test that trains is recorded, and held to limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Final
from xml.etree import ElementTree as ET

import pytest

from gputrace import pytest_plugin
from tests.helpers import command
from tests.helpers.command import Ran
from tests.helpers.installed_packages import install

TESTS: Final = """
import os, time, unittest
import pytest, gputrace

def train(step_s=0.01):
    for _ in range(12):
        time.sleep(step_s)
        gputrace.step()

@pytest.fixture
def place():
    print("set up by", os.getpid())
    yield tuple(os.environ.get("GPUTRACE_DIR", ""))
    print("torn down")

@pytest.mark.gputrace(max_step_time="10s", backend="host")
def test_quick(place):
    assert place  # Is recorded.
    train()

@pytest.mark.gputrace(max_step_time="1ms", max_data_feeding="10%", backend="host")
@pytest.mark.parametrize("word", ["a b"])
def test_slow(word):
    train()

@pytest.mark.gputrace(max_step_time="1ms", backend="host")
def test_broken(place):
    assert not place

@pytest.mark.gputrace(backend="host")
def test_that_skips():
    pytest.skip("no such luck")

@pytest.mark.gputrace(backend="host")
def test_that_dies():
    os._exit(7)

@pytest.mark.gputrace(max_stepp="1ms")
def test_misspelt():
    train()

@pytest.mark.gputrace("10%")
def test_unnamed():
    train()

class TestOld(unittest.TestCase):
    @pytest.mark.gputrace(max_step_time="1s")
    def test_case(self):
        train()

def test_beside(place):
    assert not place
"""


def run_tests(
    folder: Path,
    *words: str,
    source: str = TESTS,
    python: Sequence[str] = (),
    cwd: Path | None = None,
) -> Ran:
    """Runs pytest over tests in a process of its own, in which gputrace is installed."""
    entries = {"pytest11": {"gputrace": "gputrace.pytest_plugin"}}
    env = install(folder / "site", "gputrace", entries)
    (folder / "test_training.py").write_text(source)
    common = (
        "--strict-markers",
        f"--rootdir={folder}",
        "-pno:cacheprovider",
        "-pno:hypothesispytest",
    )
    run = subprocess.run(
        [sys.executable, *python, "-m", "pytest", *common, *words, str(folder)],
        cwd=cwd,
        env=command.environment(env),
        capture_output=True,
        text=True,
        check=False,
    )
    return Ran(run.returncode, run.stdout, run.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marked")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test, and why."""
    report = folder / "report.xml"
    ran = run_tests(folder, f"--junitxml={report}", f"--gputrace-dir={folder}/kept")
    assert ran.code == 1, ran.out
    found = {}
    for case in ET.parse(report).iter("testcase"):
        told = [(one.tag, one.get("message", "") + (one.text or "")) for one in case]
        found[str(case.get("name"))] = next(
            (one for one in told if one[0] in ("failure", "error", "skipped")), ("passed", "")
        )
    return found


def test_a_gputrace_of_the_working_folder_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "gputrace.py").write_text("raise SystemExit('of the folder')")
    source = """
        import pytest
        @pytest.mark.gputrace(backend="host")
        def test_quick():
            import gputrace, time
            for _ in range(12):
                time.sleep(0.01)
                gputrace.step()
    """
    ran = run_tests(tmp_path, source=dedent(source), python=("-P",), cwd=tmp_path)
    assert ran.code == 0, ran.out


def test_a_test_within_its_limits_passes(outcomes: dict[str, tuple[str, str]]) -> None:
    assert outcomes["test_quick"] == ("passed", "")
    assert outcomes["test_beside"] == ("passed", "")


def test_one_past_its_limits_fails_with_what_check_says(
    outcomes: dict[str, tuple[str, str]], folder: Path
) -> None:
    outcome, why = outcomes["test_slow[a b]"]
    assert outcome == "failure"
    words = " ".join(why.split())
    assert "2 of 2 gates are not met." in words
    assert re.search(r"FAILED max-step-time: a step takes .* ms; at most 1.00 ms asked for", words)
    assert "FAILED max-data-feeding: unknown: no GPU activity was recorded" in words
    trace = folder / "kept" / "test_training.py-test_slow-a-b.sqlite"
    assert f"the trace: {trace}" in words
    assert json.loads(command.gputrace("analyze", trace, "--json").out)["steps"]["count"] == 11


def test_a_test_that_fails_fails_as_ever(outcomes: dict[str, tuple[str, str]]) -> None:
    outcome, why = outcomes["test_broken"]
    assert outcome == "failure"
    assert "assert not place" in why
    assert "test_training.py:" in why


def test_one_that_skips_is_skipped(outcomes: dict[str, tuple[str, str]]) -> None:
    outcome, why = outcomes["test_that_skips"]
    assert (outcome, "no such luck" in why) == ("skipped", True)


def test_one_whose_process_ends_fails(outcomes: dict[str, tuple[str, str]]) -> None:
    outcome, why = outcomes["test_that_dies"]
    assert outcome == "failure"
    assert "the recorded process ended with exit code 7" in why


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_misspelt", "the marker `gputrace` knows no max_stepp; it takes backend, baseline, "),
        ("test_unnamed", 'takes limits by name, as max_data_feeding="10%"'),
        ("test_case", "is for test functions and methods of plain classes"),
    ],
)
def test_what_cannot_be_checked_does_not_pass(
    name: str, words: str, outcomes: dict[str, tuple[str, str]]
) -> None:
    outcome, why = outcomes[name]
    assert outcome in ("failure", "error")
    assert words in why


def test_every_sort_of_outcome_was_looked_at(outcomes: dict[str, tuple[str, str]]) -> None:
    assert len(outcomes) == TESTS.count("def test_")


def test_the_plugin_imports_nothing_before_a_test_is_marked(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "def test_it():\n"
        "    ours = {name for name in sys.modules if name.startswith('gputrace')}\n"
        "    assert ours == {'gputrace', 'gputrace.pytest_plugin'}\n"
        "    assert not {'numpy', 'click'} & sys.modules.keys()\n"
    )
    ran = run_tests(tmp_path, source=source)
    assert ran.code == 0, ran.out


def test_options_go_to_check_as_its_command_line_has_them(request: pytest.FixtureRequest) -> None:
    given = {"max_idle": "5%", "fail_on": ["high", "warmup"], "baseline": "b.sqlite", "batch": 32}
    words = list(pytest_plugin._as_words(request.node, given))
    here = str(Path(__file__).parent / "b.sqlite")
    fail_on = ["--fail-on", "high", "--fail-on", "warmup"]
    assert words == ["--max-idle", "5%", *fail_on, "--baseline", here, "--batch", "32"]


def test_the_package_tells_pytest_of_it() -> None:
    import tomllib

    project = tomllib.loads((command.ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"gputrace": "gputrace.pytest_plugin"}
    assert os.environ.get("GPUTRACE_PYTEST_REPORTS") is None
