"""Pytest marker `gputrace`: record a training test and check it against limits.

    @pytest.mark.gputrace(max_data_feeding="10%", max_step_time="50ms")
    def test_training(): ...

The test runs in its own process under `gputrace record`, since the recorder must be loaded before
the process uses the GPU. Its fixtures are set up in that process only. The marker takes the options
of `gputrace check`, with ``_`` for ``-``, and ``backend`` of `gputrace record`. pytest imports this
module wherever gputrace is installed: everything else is imported by a marked test.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_REPORTS: Final = "GPUTRACE_PYTEST_REPORTS"
"""Environment variable with the file in which a recorded process reports its test."""
_CHILD: Final = "gputrace-child"
_SEES_FOLDER: Final = os.getcwd() in sys.path  # noqa: PTH109 (imported by every pytest)
"""True if pytest was started such that modules of the working folder come first, as by -m."""
_MARKER: Final = (
    'gputrace(max_data_feeding="10%", …): record the test in a process of its own, and hold it to '
    "these limits of `gputrace check`"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gputrace-dir``."""
    text = "keep the traces of marked tests in this folder"
    parser.getgroup("gputrace").addoption("--gputrace-dir", metavar="DIR", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; in a recorded process, also the reporter of the test's outcome."""
    config.addinivalue_line("markers", _MARKER)
    if path := os.environ.pop(_REPORTS, ""):
        config.pluginmanager.register(_Child(path), _CHILD)


class _Child:
    """Write the outcome of the test in a recorded process to a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        import json

        outcome = {
            "when": report.when,
            "outcome": report.outcome,
            "text": report.longreprtext,
            "reason": report.longrepr[2] if isinstance(report.longrepr, tuple) else "",
            "sections": report.sections,
        }
        with open(self._path, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(outcome) + "\n")


def _marker(item: pytest.Item) -> pytest.Mark | None:
    """Return the marker of a test; None in its recorded process."""
    in_child = item.config.pluginmanager.has_plugin(_CHILD)
    return None if in_child else item.get_closest_marker("gputrace")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave the fixtures of a marked test to its recorded process."""
    if _marker(item) is None:
        return
    from unittest import TestCase

    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, TestCase):
        problem = "the marker `gputrace` is for test functions and methods of plain classes"
        pytest.fail(problem, pytrace=False)
    item.setup = lambda: None  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test under `record`, replay its outcome, and check its trace."""
    if (marker := _marker(pyfuncitem)) is None:
        return None
    from re import sub
    from shutil import rmtree

    options = _options(marker)
    recording, checks = options.pop("backend", "auto"), list(_as_words(pyfuncitem, options))
    folder, is_kept = _folder(pyfuncitem)
    name = sub(r"[^\w.-]+", "-", pyfuncitem.nodeid.rpartition("/")[2]).strip("-")[:150]
    trace = folder / f"{name}.sqlite"
    try:
        _record(pyfuncitem, trace, recording)
    except BaseException:
        if not is_kept:
            rmtree(folder)
        raise
    if checks:
        code, output = _gputrace(["check", str(trace), *checks], dict(os.environ))
        if code:
            pytest.fail(f"{output}\nthe trace: {trace}", pytrace=False)
    if not is_kept:
        rmtree(folder)
    return True


def _options(marker: pytest.Mark) -> dict[str, Any]:
    """Return the marker's arguments; fails for options that `gputrace check` does not have."""
    from gputrace.cli.check import command

    known = {str(parameter.name) for parameter in command.params} - {"trace", "form"} | {"backend"}
    for name in marker.kwargs:
        if name not in known:
            problem = f"the marker `gputrace` knows no {name}; it takes {', '.join(sorted(known))}"
            pytest.fail(problem, pytrace=False)
    if marker.args:
        problem = 'the marker `gputrace` takes limits by name, as max_data_feeding="10%"'
        pytest.fail(problem, pytrace=False)
    return dict(marker.kwargs)


def _as_words(item: pytest.Item, options: dict[str, Any]) -> Iterator[str]:
    """Yield the options as command-line words; a baseline is relative to the test's file."""
    for name, given in options.items():
        for value in given if isinstance(given, (list, tuple)) else [given]:
            yield f"--{name.replace('_', '-')}"
            yield str(item.path.parent / value if name == "baseline" else value)


def _folder(item: pytest.Item) -> tuple[Path, bool]:
    """Return the folder of the trace, and whether it is kept regardless of the outcome."""
    from pathlib import Path
    from tempfile import mkdtemp

    if named := item.config.getoption("--gputrace-dir"):
        folder = item.config.invocation_params.dir / named
        folder.mkdir(parents=True, exist_ok=True)
        return folder, True
    return Path(mkdtemp(prefix="gputrace-")), False


def _record(item: pytest.Item, trace: Path, backend: str) -> None:
    """Record the test, and fail or skip as it did."""
    import json

    reports = trace.with_suffix(".reports")
    reports.unlink(missing_ok=True)
    isolated = [] if _SEES_FOLDER else ["-P"]
    program = [sys.executable, *isolated, "-m", "pytest", *_pytest_words(item)]
    recorder = ["record", "--force", "--backend", backend, "-o", str(trace)]
    gone = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    code, output = _gputrace([*recorder, "--", *program], environment | {_REPORTS: str(reports)})
    lines = reports.read_text(encoding="utf-8").splitlines() if reports.exists() else []
    reports.unlink(missing_ok=True)
    outcomes = [json.loads(line) for line in lines]
    for report in outcomes:
        _replay(item, report)
    if not any(report["when"] == "teardown" for report in outcomes):
        pytest.fail(f"the recorded process ended with exit code {code}:\n{output}", pytrace=False)
    if not trace.exists():
        pytest.fail(f"nothing was recorded:\n{output}", pytrace=False)


def _replay(item: pytest.Item, report: dict[str, Any]) -> None:
    """Fail or skip as the recorded test did, with its output."""
    if report["outcome"] == "passed":
        return
    for title, text in report["sections"]:
        what, _, when = title.removeprefix("Captured ").rpartition(" ")
        item.add_report_section(when, what, text)
    if report["outcome"] == "skipped":
        pytest.skip(report["reason"].removeprefix("Skipped: "))
    pytest.fail(report["text"], pytrace=False)


def _pytest_words(item: pytest.Item) -> Iterator[str]:
    """Yield the pytest arguments that run only this test, configured as here."""
    config = item.config
    yield f"--rootdir={config.rootpath}"
    if config.inipath is not None:
        yield f"--config-file={config.inipath}"
    this = config.pluginmanager.get_name(sys.modules[__name__])
    yield f"-p{this}"
    repeated = {"plugins": "-p", "override_ini": "--override-ini=", "pythonwarnings": "-W"}
    for option, prefix in repeated.items():
        yield from (f"{prefix}{value}" for value in config.getoption(option, None) or ())
    if hasattr(config.option, "numprocesses"):
        yield "-n0"
    yield from (f"--import-mode={config.getoption('importmode')}", "--runxfail")
    yield f"{item.path}::{item.nodeid.partition('::')[2]}"


def _gputrace(words: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a gputrace command; return its exit code and the output of it and its program."""
    import subprocess

    from gputrace.collectors.launch import gputrace_command

    run = subprocess.run(
        gputrace_command(*words),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return run.returncode, run.stdout.rstrip()
