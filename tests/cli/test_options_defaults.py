"""Defaults of options in `gputrace.toml` and `pyproject.toml`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gputrace.cli import run
from gputrace.errors import ExitCode
from tests.helpers.exports import Export


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = Export()
    for index in range(20):
        made.kernel(10 * index, 10 * index + 5)
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    return made.write(tmp_path / "trace.sqlite")


@pytest.mark.parametrize("name", ["gputrace.toml", "pyproject.toml"])
def test_options_come_from_the_nearest_file_unless_they_are_given(
    name: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "analyze" if name == "gputrace.toml" else "tool.gputrace.analyze"
    trace.with_name(name).write_text(f'[{table}]\nformat = "json"\ngaps = 3\n')
    assert run(["analyze", str(trace)]) == 0
    assert len(json.loads(capsys.readouterr().out)["gaps"]["largest"]) == 3
    assert run(["analyze", str(trace), "--gaps", "2"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gaps"]["largest"]) == 2
    assert run(["analyze", str(trace), "--format", "text"]) == 0
    assert not capsys.readouterr().out.startswith("{")
    Path("gputrace.toml").write_text("")
    assert run(["analyze", str(trace)]) == 0
    assert not capsys.readouterr().out.startswith("{")


def test_gates_and_the_baseline_by_the_file_that_names_it(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(trace)]) == ExitCode.USAGE
    text = '[check]\nmax-idle = "90%"\nbaseline = "trace.sqlite"\nfail-on = "high"\n'
    trace.with_name("gputrace.toml").write_text(text)
    run(["check", str(trace), "--json"])
    gates = {gate["id"] for gate in json.loads(capsys.readouterr().out)["gates"]}
    assert gates == {"max-idle", "max-slowdown", "fail-on high"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[analyse]\n", "analyse: not a command that it may set options of; did you mean analyze?"),
        (
            "[analyze]\ngap = 3\n",
            "gap: not an option of analyze that a file may set; did you mean gaps?",
        ),
        ("[analyze]\ngaps = 'many'\n", "'many' is not a valid integer"),
        ("[analyze]\nscheduler = 'tcp://there:1'\n", "scheduler: not an option"),
        ("analyze = 3\n", "analyze is not a table"),
        ("[analyze\n", "gputrace.toml: "),
    ],
)
def test_a_wrong_file_is_one_line(
    text: str, words: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("gputrace.toml").write_text(text)
    assert run(["analyze", str(trace)]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert run(["doctor", "--help"]) == 0


def test_an_error_for_record_has_its_exit_code(trace: Path) -> None:
    Path("gputrace.toml").write_text("[record]\noutput = 'elsewhere.sqlite'\n")
    assert run(["record", "true"]) == ExitCode.RECORDING_FAILED


def test_a_file_of_another_user_is_not_used(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("gputrace.toml").write_text('[analyze]\nformat = "json"\n')
    owner = Path("gputrace.toml").stat().st_uid
    if owner == 0:
        os.chown("gputrace.toml", 1234, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert run(["analyze", str(trace)]) == 0
    shown = capsys.readouterr()
    assert not shown.out.startswith("{")
    assert "not used, since it belongs to another user" in shown.err
