"""Imports on demand: a command that needs no numpy does not wait for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from tests.helpers import command
from tests.helpers.kineto import kernel, write

HEAVY: Final = (
    "numpy",
    "msgspec",
    "pyarrow",
    "pandas",
    "rich",
    "adbc_driver_manager",
    "bokeh",
    "textual",
    "distributed",
)
NOT_FOR_A_REPORT: Final = (
    "pandas",
    "textual",
    "bokeh",
    "dask",
    "distributed",
    "fsspec",
    "IPython",
)
NOT_FOR_A_SMALL_TRACE: Final = {
    *("subprocess", "csv", "rich", "pandas", "pyarrow"),
    *("gzip", "zlib", "glob", "shlex", "random", "hashlib"),
}


def imported(program: str, *arguments: str) -> set[str]:
    """The top-level modules that a program has imported at its end."""
    tail = "import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    ran = command.python("-c", f"{program}\n{tail}", *arguments)
    assert ran.code == 0
    return set(ran.err.split())


def test_an_analysis_that_is_cached_needs_no_numpy(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", kernel(1, 1), kernel(3, 1))
    program = (
        "import os, sys; os.environ['GPUTRACE_CACHE'] = sys.argv[2]\n"
        "from gputrace.cli import run; run(['analyze', sys.argv[1], '--json'])"
    )
    assert "numpy" in imported(program, str(path), str(tmp_path / "cache"))
    assert "numpy" not in imported(program, str(path), str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "program",
    [
        "import gputrace; gputrace.GputraceError; gputrace.__version__",
        "from gputrace.cli import run; run(['--help']); run(['--version'])",
        "from gputrace.cli import run; run(['completion', 'fish'])\n"
        "for name in ('analyze', 'demo', 'compare', 'check', 'bench', 'browse', 'report'):\n"
        "    run([name, '--help'])",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(program: str) -> None:
    modules = imported(program)
    assert "gputrace" in modules
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("forms", [["text"], ["json", "markdown", "csv"]])
def test_a_report_needs_no_notebook_and_no_browser(forms: list[str], h100: Path) -> None:
    program = (
        "import sys\nfrom gputrace.cli import run\n"
        "for form in sys.argv[2:]: run(['analyze', sys.argv[1], '--format', form])"
    )
    modules = imported(program, str(h100), *forms)
    assert "numpy" in modules
    assert not modules & set(NOT_FOR_A_REPORT)
    assert ("rich" in modules) == (forms == ["text"])


def test_a_small_trace_waits_for_no_module_that_it_does_not_need(
    tmp_path: Path, h100: Path
) -> None:
    """Masked arrays take as long as 5,000 kernels; several functions of numpy import them."""
    small = write(tmp_path / "trace.json", kernel(1, 1), kernel(3, 1))
    program = (
        "import sys\nfrom gputrace.cli import run; run(['analyze', sys.argv[1], '--json'])\n"
        "assert 'numpy.ma' not in sys.modules"
    )
    for path in (small, h100):
        assert not imported(program, str(path)) & NOT_FOR_A_SMALL_TRACE


def test_writing_the_cache_needs_no_more_than_its_codec(
    h100: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program waits at its end for the thread that writes, so also for what that imports."""
    monkeypatch.setenv("GPUTRACE_CACHE", str(tmp_path / "cache"))
    program = (
        "import sys, threading\nfrom gputrace.cli import run; run(['analyze', *sys.argv[1:]])\n"
        "for thread in threading.enumerate():\n"
        "    if thread.name == 'cache': thread.join()"
    )
    modules = imported(program, str(h100))
    assert "msgspec" in modules
    assert not modules & {*NOT_FOR_A_REPORT} - {"msgspec"}


@pytest.mark.parametrize("folder", ["benchmarks", "workloads"])
def test_no_program_hides_a_module_of_python(folder: str) -> None:
    """Files beside a program that is run are found before the standard library."""
    names = {path.stem for path in (command.ROOT / folder).glob("*.py")}
    assert names
    assert not names & sys.stdlib_module_names
