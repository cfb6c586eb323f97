"""Fixtures of all tests. ``pytest --update-golden`` writes the files of tests/golden anew."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

import gputrace
from gputrace.analyzers import findings, pipeline
from gputrace.analyzers.findings import Facts
from gputrace.api import Report
from gputrace.model import events, intervals
from gputrace.model.results import Finding
from gputrace.model.trace import Trace
from gputrace.native import library
from gputrace.readers.registry import open_trace
from tests.helpers import command
from tests.helpers.exports import Export, Opened
from tests.helpers.once import once
from tests.helpers.recordings import unpack
from tests.helpers.sentences import check_sentences
from tests.native.build import Machine, compile_all

GOLDEN: Final = Path(__file__).parent / "golden"

# The same examples in each run: make fuzz looks for others, and make matrix at more.
settings.register_profile("gputrace", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("release", settings.get_profile("gputrace"), max_examples=200)
settings.load_profile("gputrace")

# Hundreds of tests start the command; without compiled files, each of them would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The browser draws what changed once a key is answered, and not 60 times a second meanwhile.
os.environ["TEXTUAL_FPS"] = "8"

# Bokeh looks through all models of a page for mistakes, which it only writes to its log.
os.environ["BOKEH_VALIDATE_DOC"] = "no"

# A shell's background job is started with Ctrl+C ignored, which its children would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the files of tests/golden anew"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from going through modules and tests again and again."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in place of the user's cache folder; no answer is kept there, unless a test asks."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("GPUTRACE_CACHE", "off")
        yield folder


@pytest.fixture(scope="session", autouse=True)
def sentences() -> Iterator[None]:
    """Checks the sentences of all findings that the tests' traces have, plugins' left aside."""

    def find(facts: Facts, plugged: Sequence[Finding] = ()) -> tuple[Finding, ...]:
        return (*map(check_sentences, findings.find(facts)), *plugged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "find", find)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked(cache: Path) -> Iterator[None]:
    """Lets commands be forked, with the cache folder of the tests."""
    with command.forked():
        yield


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpacks one of the small recordings, once."""
    folder = tmp_path_factory.mktemp("recordings")

    def find(name: str) -> Path:
        path = folder / name
        return path if path.exists() else unpack(name, folder)

    return find


@pytest.fixture(scope="session")
def analyzed(recording: Callable[[str], Path]) -> Callable[[str], Report]:
    """Analyzes one of the small recordings, once."""

    @functools.cache
    def find(name: str) -> Report:
        with gputrace.open(recording(name)) as trace:
            return trace.analyze()

    return find


@pytest.fixture(scope="session")
def h100(recording: Callable[[str], Path]) -> Path:
    """Two GPUs that copy from the host nearly all the time."""
    return recording("nsys-ai-h100_2gpu_1s.sqlite")


@pytest.fixture(scope="session")
def saxpy(recording: Callable[[str], Path]) -> Path:
    """One GPU and a few calls: the smallest of them, for what any trace would do."""
    return recording("pipit-saxpy-mpi.sqlite")


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that test at a time, for what `once` makes."""
    ours = tmp_path_factory.getbasetemp()
    folder = (ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours) / "common"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def machine(common: Path) -> Machine:
    """The collector and what plays a GPU to it, compiled."""
    return Machine(once(common / "machine", compile_all))


@pytest.fixture(scope="module", params=["the C library", "numpy"])
def columns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has sets of intervals and ids computed by either of two twins."""
    if library() is None and request.param != "numpy":
        pytest.skip("there is no C library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_WORTH_A_CALL", 0)
        if request.param == "numpy":
            for module in (intervals, events):
                patch.setattr(module, "library", lambda: None)
        yield


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Writes an export and opens it; closes what it opened."""
    with ExitStack() as stack:

        def open_export(export: Export) -> Trace:
            path = export.write(tmp_path / "trace.sqlite")
            return stack.enter_context(open_trace(path))

        yield open_export


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), "pytest --update-golden accepts this"

    return check
