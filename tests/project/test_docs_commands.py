"""Every command and output of README.md and docs is run and compared, or says why not.

`tests/helpers/documented.py` lists the comments by which a page says which files a block needs, and
what cannot be run.
"""

from __future__ import annotations

import ast
import glob
import io
import re
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import click
import pytest

from gputrace.cli import cli, run
from tests.helpers import command, documented, documented_files
from tests.helpers.documented import PAGES, REASONS, ROOT, Block, blocks

PROCESSES: Final = ("record", "demo", "doctor", "browse")
"""Subcommands that need a process of their own: they start programs, or look at the terminal."""

RUN: Final = [page for page in PAGES if any(block.is_run for block in blocks(page))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="session")
def kept(common: Path) -> Path:
    """Where files that pages name are kept, once they are made."""
    folder = common / "documented"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_commands_do_what_the_page_shows(
    page: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        _prepare(block, kept)
        if block.is_run and block.language == "python":
            exec(compile(block.text, block.where, "exec"), names)
        elif block.is_run:
            _run_commands(block)


def _prepare(block: Block, kept: Path) -> None:
    """Do what the comments before a block ask for."""
    for given in filter(None, block.notes.get("files", "").split(",")):
        name, _, recipe = (part.strip() for part in given.partition("="))
        documented_files.make(recipe, Path(name), kept)


def _run_commands(block: Block) -> None:
    for text, shown in documented.commands(block):
        code, printed = _run(documented.words(text), block.where)
        # What a gate or a file that is left out says by its code is shown by the output too;
        # `doctor` tells by it that there is no GPU.
        allowed = (0, 1, 5) if shown else (0, 4, 5) if "doctor" in text else (0, 5)
        assert code in allowed, f"{block.where}: {text}\n{printed}"
        vary = "numbers vary" in block.notes
        same = not shown or documented.same_output(shown, printed, vary)
        assert same, f"{block.where}: {text}\n\nprints\n\n{printed}"


def _run(words: list[str], where: str) -> tuple[int, str]:
    """Runs a command; gives its exit code, and what it wrote to both streams."""
    words = [found for word in words for found in sorted(glob.glob(word)) or [word]]
    if words[0] == "cd":
        return 0, ""
    if words[0] == "gputrace" and words[1] not in PROCESSES:
        return _run_here(words[1:])
    started = {"gputrace": ["-m", "gputrace"], "python": []}
    assert words[0] in started, f"{where}: not run by tests: add <!-- not run: (a reason) -->"
    return _start([sys.executable, *started[words[0]], *words[1:]])


def _run_here(arguments: list[str]) -> tuple[int, str]:
    """In this process, which has imported everything already."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(written), redirect_stderr(written):
        code = run(arguments)
    return code, written.buffer.getvalue().decode()


def _start(arguments: list[str]) -> tuple[int, str]:
    """With this Python as ``python``."""
    python = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "COLUMNS": "80"}
    done = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=command.environment(python),
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout


ALL: Final = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_not_run_have_options_that_exist(page: Path) -> None:
    for block in blocks(page):
        for call in block.calls:
            _parse(call, f"{block.where}: gputrace {' '.join(call)}")


def _parse(call: list[str], where: str) -> None:
    if call[:1] in (["--version"], ["--help"]):
        return
    group = click.Context(cli, **cli.context_settings)
    subcommand = cli.get_command(group, call[0])
    assert subcommand is not None, where
    try:
        subcommand.make_context(call[0], list(call[1:]), parent=group)
    except click.exceptions.Exit:
        return
    except click.UsageError as error:
        pytest.fail(f"{where}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_in_sentences_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for called in re.findall(r"`gputrace ([a-z]+ [^`]*)`", text):
        name, *rest = called.partition(" -- ")[0].split()
        subcommand = cli.get_command(click.Context(cli), name)
        assert subcommand is not None, f"gputrace {called}"
        known = {"--help", *(option for one in subcommand.params for option in one.opts)}
        asked = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert asked <= known, f"gputrace {called}"


def test_python_that_is_not_run_is_python_and_toml_is_toml() -> None:
    for block in ALL:
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "python" and "%" not in block.text:
            ast.parse(block.text, block.where)


def test_what_is_not_run_says_why_and_most_is_run() -> None:
    reasons = Counter(block.notes["not run"] for block in ALL if "not run" in block.notes)
    unknown = [reason for reason in reasons if not reason.startswith(REASONS)]
    assert unknown == []
    elsewhere = reasons.pop("run by another test")
    run_here = sum(block.is_run for block in ALL) + elsewhere
    assert run_here > reasons.total(), f"{run_here} blocks are run, and not {reasons}"


def test_every_recipe_is_used() -> None:
    """And every file that a page asks for has one."""
    given = ",".join(block.notes.get("files", "") for block in ALL)
    asked = {one.partition("=")[2].strip() for one in given.split(",") if one.strip()}
    assert asked == documented_files.FILES.keys()


SAME: Final[list[tuple[str, str, bool, bool]]] = [
    ("a\nb", "a  \nb\n", False, True),
    ("a\n...\nd", "a\nb\nc\nd", False, True),
    ("a\n...\nd", "a\nd\n", False, True),
    ("a\n...\nd", "a\nb\nc", False, False),
    ("a\n...\nd", "a\nb\ncd", False, False),
    ("a\n...", "ab\nc", False, False),
    ("wrote ...html", "wrote a.html", False, True),
    ("a.c", "abc", False, False),
    ("waits 2 ms", "waits 3 ms", False, False),
    ("waits 2.10 ms", "waits\n13.1 ms", True, True),
    ("waits 2 ms", "slept 2 ms", True, False),
    ("...\nwaits 2 ms\n...", "so\nit waits 31 ms\nnow", True, True),
]


@pytest.mark.parametrize(("shown", "printed", "vary", "same"), SAME)
def test_an_output_is_compared_but_for_what_is_left_out(
    shown: str, printed: str, vary: bool, same: bool
) -> None:
    assert documented.same_output(shown, printed, vary) is same
