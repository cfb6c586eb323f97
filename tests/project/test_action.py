"""The GitHub Action: its steps as a runner runs them, over real traces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from tests.helpers import command
from tests.helpers.handmade import MS, Run, train

ACTION: Final = command.ROOT / "action.yml"
SHELL: Final = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
"""As GitHub's runners call it for ``shell: bash``."""
EXPRESSION: Final = re.compile(r"\$\{\{ *(.*?) *\}\}")


@pytest.fixture(scope="module")
def action() -> Any:
    return yaml.safe_load(ACTION.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a trace that waits for data, one that does not, and the command."""
    folder = tmp_path_factory.mktemp("workspace")
    for name, wait in (("slow run.sqlite", MS), ("quick.sqlite", 0)):
        made = Run()
        train(made, wait=wait)
        made.export.write(folder / name)
    ours = folder / "bin" / "gputrace"
    ours.parent.mkdir()
    ours.write_text(f'#!/bin/sh\nexec {sys.executable} -m gputrace "$@"\n')
    ours.chmod(0o755)
    return folder


class Job(NamedTuple):
    code: int
    log: str
    summary: str
    outputs: dict[str, str]


@pytest.fixture
def job(action: Any, folder: Path, tmp_path: Path) -> Any:
    """Runs the steps with some inputs, up to the first that fails."""

    def go(path: str = f"{folder}/bin:{os.environ['PATH']}", **inputs: str) -> Job:
        given = {name: one.get("default", "") for name, one in action["inputs"].items()} | inputs
        summary, output = tmp_path / "summary", tmp_path / "output"
        summary.touch()
        output.touch()
        env = command.environment({"PATH": path, "RUNNER_TEMP": str(tmp_path)})
        env |= {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(output)}
        env |= {"GITHUB_ACTION_PATH": str(command.ROOT)}
        code, log = 0, ""
        for step in action["runs"]["steps"]:
            own = {
                name: EXPRESSION.sub(lambda m: given[m[1].removeprefix("inputs.")], text)
                for name, text in step["env"].items()
            }
            script = tmp_path / "step.sh"
            script.write_text(step["run"])
            ran = subprocess.run(
                [*SHELL, script],
                env=env | own,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            code, log = ran.returncode, log + ran.stdout + ran.stderr
            if code:
                break
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        return Job(code, log, summary.read_text(), outputs)

    return go


def test_a_run_within_its_limits_passes(job: Any) -> None:
    done = job(trace="quick.sqlite", baseline="slow run.sqlite", options="--max-idle 50%")
    assert done.code == 0, done.log
    assert done.outputs["passed"] == "true"
    assert done.summary.startswith("All 2 gates are met.\n\n| gate | what came of it |\n")
    assert "| max-idle | the GPUs are idle for " in done.summary
    assert "<details><summary>Where the time goes</summary>" in done.summary
    assert Path(done.outputs["summary"]).read_text() == done.summary
    assert "All 2 gates are met." in done.log


def test_nothing_that_a_trace_says_is_a_command_to_the_runner(job: Any) -> None:
    done = job(trace="quick.sqlite", options="--max-idle 50%", report="false")
    before, token, after = re.split(r"^::stop-commands::([0-9a-f]{32})\n", done.log, flags=re.M)
    shown, end, rest = after.partition(f"::{token}::\n")
    assert shown == done.summary
    assert end
    assert "::" not in before + rest
    failed = job(trace="50%0A::add-path::.sqlite", options="--max-idle 50%")
    (line,) = failed.log.splitlines()[-1:]
    assert "50%250A::add-path::.sqlite" in line


@pytest.mark.parametrize(("fail", "code"), [("true", 1), ("false", 0)])
def test_one_past_them_fails_the_job_if_it_is_to(job: Any, fail: str, code: int) -> None:
    options = "--max-data-feeding 10% --max-alloc 5%"
    done = job(trace="slow run.sqlite", options=options, report="false", fail=fail)
    assert (done.code, done.outputs["passed"]) == (code, "false"), done.log
    assert "| **FAILED** max-data-feeding | data feeding takes 28.5% of a step" in done.summary
    assert "| max-alloc | " in done.summary
    assert "<details>" not in done.summary
    assert "::error title=gputrace::1 of 2 gates is not met." in done.log


@pytest.mark.parametrize(
    ("trace", "options", "code", "words"),
    [
        ("none.sqlite", "--max-idle 1%", 3, "none.sqlite"),
        ("quick.sqlite", "", 2, "no limit is given"),
        ("quick.sqlite; touch planted", "--max-idle 1%", 3, "touch planted"),
        ("quick.sqlite", "--max-idle $(touch${IFS}planted)", 2, "touch"),
    ],
)
def test_what_cannot_be_checked_fails_the_job(
    job: Any, folder: Path, trace: str, options: str, code: int, words: str
) -> None:
    done = job(trace=trace, options=options, fail="false")
    assert done.code == code
    (line,) = (line for line in done.log.splitlines() if line.startswith("::error"))
    assert line.startswith("::error title=gputrace::gputrace: ")
    assert words in line
    assert (done.summary, done.outputs) == ("", {})
    assert not (folder / "planted").exists()


@pytest.mark.parametrize("package", ["", "gputrace==0.1.0"])
def test_gputrace_is_installed_where_it_is_not(
    job: Any, action: Any, tmp_path: Path, package: str
) -> None:
    pip = tmp_path / "python3"
    pip.write_text('#!/bin/sh\necho "PIP:$*"\nexit 9\n')
    pip.chmod(0o755)
    done = job(path=f"{tmp_path}:/usr/bin:/bin", trace="quick.sqlite", package=package)
    assert done.code == 9
    assert f"PIP:-m pip install --quiet {package or command.ROOT}" in done.log


def test_inputs_reach_the_shell_as_variables_only(action: Any) -> None:
    steps = action["runs"]["steps"]
    assert not [step["name"] for step in steps if EXPRESSION.search(step["run"])]
    used = {
        name for step in steps for text in step["env"].values() for name in EXPRESSION.findall(text)
    }
    assert used == {f"inputs.{name}" for name in action["inputs"]}
    for one in action["outputs"].values():
        assert re.fullmatch(r"\$\{\{ steps\.check\.outputs\.(passed|summary) \}\}", one["value"])
