"""The manual pages, which are made of the commands when gputrace is built."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import click
import pytest

from gputrace.cli import COMMANDS, cli
from gputrace.cli.installation import pages
from gputrace.errors import ExitCode

DAY: Final = "2024-02-29"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder man1 with all pages."""
    made = tmp_path_factory.mktemp("manual") / "man1"
    made.mkdir()
    for name, text in pages(DAY).items():
        (made / name).write_text(text, encoding="utf-8")
    return made


def run(*words: str | Path, env: dict[str, str] | None = None) -> str:
    """Return the output of a program on both streams; skip the test where there is none."""
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"needs {words[0]}")
    plain = {"LC_ALL": "C.UTF-8", "MANWIDTH": "80", "GROFF_NO_SGR": "1"}
    ran = subprocess.run(
        words,
        env=os.environ | plain | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return ran.stdout


def test_there_is_a_page_of_gputrace_and_of_each_command() -> None:
    assert [*pages(DAY)] == ["gputrace.1", *(f"gputrace-{name}.1" for name in COMMANDS)]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_has_all_of_its_options(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    page = pages(DAY)[f"gputrace-{name}.1"].replace("\\-", "-")
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    for option in (text for one in shown for text in one.opts if text.startswith("-")):
        assert f"{option}" in page
    assert "-h, --help" in page


def test_the_page_of_gputrace_has_all_exit_codes() -> None:
    page = pages(DAY)["gputrace.1"]
    assert [code for code in ExitCode if f"\n.B {int(code)}\n" not in page] == []


def test_mandoc_finds_nothing_wrong(folder: Path) -> None:
    assert run("mandoc", "-T", "lint", "-W", "warning", *sorted(folder.iterdir())) == ""


def test_man_shows_a_page_with_its_name_and_without_warnings(folder: Path) -> None:
    shown = run("man", "--warnings", "-P", "cat", "-l", folder / "gputrace-completion.1")
    lines = shown.splitlines()
    assert lines[0].startswith("GPUTRACE-COMPLETION(1)")
    assert "gputrace completion [OPTIONS] SHELL" in shown
    # Lines that are to be copied are kept.
    assert '       bash: put  eval "$(gputrace completion bash)"  into ~/.bashrc' in lines
    assert DAY in lines[-1]


def test_what_troff_would_take_for_its_own_is_escaped() -> None:
    from gputrace.cli.installation import _text

    assert _text(".TH is no macro here") == "\\&.TH is no macro here"
    assert _text("'tis") == "\\&'tis"
    assert _text("a \\n and `--x`") == "a \\en and \\fB\\-\\-x\\fR"
