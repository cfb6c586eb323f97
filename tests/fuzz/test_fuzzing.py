"""The fuzzers, for a moment: no input fails, and what may not be is seen (docs/fuzzing.md)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz import native, page
from tests.fuzz.runner import Runner
from tests.fuzz.targets import CORPUS, TARGETS
from tests.helpers import command
from tests.helpers.command import ROOT
from tests.native.build import Machine, compile_all

INPUTS: Final = 30
NAMES: Final = [target.name for target in TARGETS]
_MOST_BYTES: Final = 500_000


def test_no_input_fails(tmp_path: Path) -> None:
    """Inputs are equal each time, and one process reads those of all targets."""
    words = ["-m", "tests.fuzz.worker", ",".join(NAMES), str(tmp_path), "random", "1", str(INPUTS)]
    run = subprocess.run([sys.executable, *words, "600"], cwd=ROOT, env=command.environment())
    assert run.returncode == 0
    runner = Runner(tmp_path)
    assert runner.failures(NAMES) == {}
    for name, counts in runner.summary(NAMES).items():
        assert counts["inputs"] >= INPUTS + counts["failed"], name
        assert counts["read"], name
        assert counts["refused"] or name in ("kept", "reports"), name


GUARDED: Final = """
import sys, warnings
from pathlib import Path
from gputrace.errors import GputraceError, InputError
from tests.fuzz import guard

own = Path(sys.argv[1])
watcher = guard.Guard(own)

def crash(): return [][1]
def refuse(): raise InputError("trace", "is none")
def warn(): warnings.warn("odd"); return "ok"
def write_inside(): (own / "a").write_text("a"); return "ok"
def write_outside(): (own.parent / "b").write_text("b"); return "ok"
def start(): import subprocess; subprocess.run(["true"]); return "ok"
def take_memory(): return str(len(b"x" * (guard.MEMORY + (1 << 26))))
def say_nothing(): raise GputraceError()
def hang():
    while True: pass

if sys.argv[2] == "hang":
    guard.LONGEST_S = 0.2
print(watcher.judge(globals()[sys.argv[2]], 10).kind)
"""


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("refuse", "refused"),
        ("write_inside", "read"),
        ("crash", "failed"),
        ("warn", "failed"),
        ("write_outside", "failed"),
        ("start", "failed"),
        ("take_memory", "failed"),
        ("say_nothing", "failed"),
    ],
)
def test_what_may_not_be_is_a_failure(what: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    ran = command.python("-c", GUARDED, str(tmp_path / "own"), what)
    assert (ran.code, ran.out) == (0, f"{kind}\n"), ran.err


def test_an_input_that_never_ends_ends_the_process(tmp_path: Path) -> None:
    ran = command.python("-c", GUARDED, str(tmp_path), "hang")
    assert ran.code == -signal.SIGPROF
    assert "in hang" in ran.err


def test_the_runner_keeps_the_input_that_ended_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(tmp_path)
    codes = iter((-signal.SIGSEGV, 0))

    def work(name: str, seed: int, inputs: int, seconds: float) -> int:
        given = tmp_path / name / "in"
        given.mkdir(exist_ok=True)
        (given / "run.xplane.pb").write_bytes(b"deadly")
        (tmp_path / name / "log").write_text("what it said")
        return next(codes)

    monkeypatch.setattr(Runner, "_work", lambda _, *asked: work(*asked))
    runner.run("xplane", 1, 10, 60)
    ((path, why),) = runner.failures(["xplane"]).items()
    assert path.read_bytes() == b"deadly"
    assert why == "ended by SIGSEGV"
    assert runner.summary(["xplane"])["xplane"]["failed"] == 1


def test_the_page_has_the_targets_that_there_are() -> None:
    text = (ROOT / "docs" / "fuzzing.md").read_text(encoding="utf-8")
    rows = text.partition(page.BEGIN)[2].partition(page.END)[0].splitlines()[3:-1]
    assert [row.split()[1] for row in rows if row] == [target.name for target in TARGETS]


def test_the_page_gets_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}old\n{page.END}after\n")
    counts = {"inputs": 100_000, "read": 60_000, "refused": 40_000, "looked": 70, "found": 3}
    page.write({"own": counts | {"failed": 0}}, path)
    text = path.read_text()
    assert "| own | 100,000 | 60,000 | 40,000 | 70 | 3 | 0 |" in text
    assert (text.startswith("before\n"), text.endswith("after\n"), "old" in text) == (
        True,
        True,
        False,
    )


def test_the_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(NAMES)
    assert sum(path.stat().st_size for path in files) < _MOST_BYTES


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    try:
        compile_all(folder, *native.SANITIZED)
    except subprocess.CalledProcessError:
        pytest.skip("the C compiler has no AddressSanitizer")
    return Machine(folder)


def test_the_c_library_does_nothing_undefined(sanitized: Machine, tmp_path: Path) -> None:
    script = (
        "inject nvtx sample copies ranges deep 80 storm 5000 2 capture 0 ranges capture 1 sample "
        "profiler 1 profiler 0 fork exit fork _exit storm 100 1 exit 3"
    )
    environment = {"ASAN_OPTIONS": native.ASAN, "GPUTRACE_SEGMENT_NS": "1000000"}
    done = sanitized.run(tmp_path, script, environment)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.skipif(shutil.which("clang") is None, reason="libFuzzer comes with clang")
def test_the_decoder_takes_records_of_anything(tmp_path: Path) -> None:
    assert native.fuzz(tmp_path, 60, runs=20_000) >= 20_000
