"""Where tools are found, and what they are asked."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gputrace.tools import ask_tool, find_tool


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], str]:
    def make(name: str) -> str:
        path = tmp_path / name / "ncu"
        path.parent.mkdir()
        path.touch(mode=0o755)
        return str(path)

    return make


def test_a_tool_is_the_one_named_or_on_the_path_or_the_newest_installed(
    install: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUTRACE_NCU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    patterns = (str(tmp_path / "cuda*" / "ncu"), str(tmp_path / "nsight" / "ncu"))
    assert find_tool("ncu", patterns) is None
    other, _, newest = map(install, ("nsight", "cuda-12.4", "cuda-12.8"))
    assert find_tool("ncu", patterns) == newest
    assert find_tool("ncu", patterns[1:]) == other
    on_path = install("bin")
    assert find_tool("ncu", patterns) == on_path
    monkeypatch.setenv("GPUTRACE_NCU", "/not/there")
    assert find_tool("ncu", patterns) == "/not/there"


def test_what_a_tool_says_is_text_whatever_it_writes_and_reads() -> None:
    program = "import os, sys; os.write(1, b'\\xff'); sys.exit(sys.stdin.read() or 3)"
    ran = ask_tool([sys.executable, "-c", program])
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "\N{REPLACEMENT CHARACTER}", "")
