"""The C libraries under sanitizers: the decoder with libFuzzer, the scans of SQLite's pages
and of Kineto's events on changed ones, the loops over columns on random ones, the collector's
tests with ASan and UBSan.

``python -m tests.fuzz.native`` does all. AddressSanitizer and UndefinedBehaviorSanitizer are part
of gcc and clang; libFuzzer is clang's alone, and left out where there is no clang.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from gputrace.collectors.spool.activity import read_spool
from tests.fuzz import pages
from tests.helpers.command import ROOT

SANITIZED: Final = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ASAN: Final = "detect_leaks=0:handle_segv=0:verify_asan_link_order=0"
"""What a program has not given back when it ends is no leak; its own signals are its own; what it
preloads comes before the sanitizer."""
_LEFT_OUT: Final = (
    "tests/collectors/test_session_ring.py"
    "::test_windows_of_steps_hold_those_steps_and_the_report_counts_them"
)
"""It loads the library into a Python that was not built with sanitizers, which they refuse."""
TESTS: Final = (
    "tests/collectors/native/test_capture_states.py",
    "tests/collectors/native/test_collector.py",
    "tests/collectors/spool/test_activity.py",
    "tests/collectors/test_session_ring.py",
)
SCANS: Final = 200_000
"""Tables with changed pages that are scanned."""
_NATIVE: Final = ROOT / "gputrace" / "collectors" / "native"
_SOURCES: Final = ("calls", "decode", "names", "nvtx", "spool", "system", "threads")
_DONE: Final = re.compile(r"Done (\d+) runs")


def build(folder: Path, compiler: str = "clang") -> Path:
    """The fuzz target of the decoder."""
    program = folder / "fuzz_decode"
    options = ["-std=gnu11", "-O1", "-g", "-fsanitize=fuzzer,address,undefined"]
    sources = [_NATIVE / f"{name}.c" for name in _SOURCES]
    sources.append(ROOT / "tests" / "native" / "fuzz_decode.c")
    options += ["-fno-sanitize-recover=all", "-o", str(program)]
    command = [compiler, *options, *map(str, sources), "-lpthread"]
    subprocess.run(command, check=True, timeout=300)
    return program


def fuzz(folder: Path, seconds: int, seed: int = 1, runs: int = -1) -> int:
    """Runs the target, and reads what it wrote; the number of inputs.

    Raises CalledProcessError where an input failed; it is in the folder.
    """
    program, spools = build(folder), folder / "spools"
    spools.mkdir(exist_ok=True)
    words = [f"-max_total_time={seconds}", f"-seed={seed}", f"-runs={runs}", "-max_len=2000"]
    environment = os.environ | {"GPUTRACE_DIR": str(spools)}
    command = [str(program), *words, f"-artifact_prefix={folder}/"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-6000:])
        raise subprocess.CalledProcessError(done.returncode, command)
    for path in spools.iterdir():
        spool = read_spool(path)
        known = spool.names.keys()
        assert {int(id) for id in spool.records[b"KERN"]["name"]} <= known | {0}
    found = _DONE.search(done.stderr)
    assert found is not None
    return int(found[1])


def scan_pages(folder: Path, runs: int, seed: int = 1) -> tuple[int, int]:
    """Scan tables with changed pages, under sanitizers; how many scans gave rows, and none.

    Raises CalledProcessError where a scan reads or writes what it may not.
    """
    program = folder / "scan_pages"
    source = ROOT / "tests" / "native" / "scan_pages.c"
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", *SANITIZED]
    subprocess.run(["cc", *options, "-o", str(program), str(source)], check=True, timeout=300)
    counts = [0, 0]
    for part, (rows, page) in enumerate(((3, 512), (300, 512), (900, 1024), (2000, 4096))):
        path = folder / f"pages-{part}.sqlite"
        root = pages.write_table(path, seed + part, rows, page)
        words = (path, root, len(pages.COLUMNS) - 1, runs // 4, seed)
        command = [str(program), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr[-6000:])
            raise subprocess.CalledProcessError(done.returncode, command)
        counts = [a + int(b) for a, b in zip(counts, done.stdout.split(), strict=True)]
    return counts[0], counts[1]


def scan_events(folder: Path, runs: int, seed: int = 1) -> tuple[int, int]:
    """Scan changed lists of Kineto's events, under sanitizers; how many gave rows, and none.

    Raises CalledProcessError where a scan reads or writes what it may not.
    """
    program, text = folder / "scan_events", folder / "events.json"
    source = ROOT / "tests" / "native" / "scan_events.c"
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", *SANITIZED]
    subprocess.run(["cc", *options, "-o", str(program), str(source)], check=True, timeout=300)
    events = [
        {"ph": "X", "cat": "kernel", "name": f"gemm {n % 9} \u00e9", "pid": 0, "tid": f"stream {n}",
         "ts": n * 1000.25, "dur": 7, "args": {"device": 0, "correlation": n, "grid": [1, {}]}}
        for n in range(60)
    ]  # fmt: skip
    text.write_text(json.dumps([*events, {"ph": "M", "args": {"dtype": "Half", "bytes": -1}}]))
    command = [str(program), str(text), str(runs), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-6000:])
        raise subprocess.CalledProcessError(done.returncode, command)
    scanned, left = map(int, done.stdout.split())
    return scanned, left


def loop_over_columns(folder: Path, runs: int, seed: int = 1) -> None:
    """Call the loops over columns under sanitizers.

    Raises CalledProcessError where one reads or writes what it may not.
    """
    program, source = folder / "columns", ROOT / "tests" / "native" / "columns.c"
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-fwrapv", *SANITIZED]
    subprocess.run(["cc", *options, "-o", str(program), str(source)], check=True, timeout=300)
    subprocess.run([str(program), str(runs), str(seed)], check=True, stdout=subprocess.DEVNULL)


def run_tests() -> int:
    """The tests of the C library, compiled with sanitizers; pytest's exit code."""
    environment = os.environ | {
        "GPUTRACE_TEST_CFLAGS": " ".join(SANITIZED),
        "ASAN_OPTIONS": ASAN,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--deselect", _LEFT_OUT, *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz.native", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for the decoder")
    parser.add_argument("--without-tests", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gputrace-fuzz-"))
    if shutil.which("clang") is None:
        sys.stdout.write("fuzz: decoder left out: clang, which has libFuzzer, is not installed\n")
    else:
        inputs = fuzz(folder, options.seconds)
        sys.stdout.write(f"fuzz: decoder: {inputs:,} inputs, none failed\n")
    scanned, refused = scan_pages(folder, SCANS)
    sys.stdout.write(f"fuzz: scans of pages: {scanned:,} gave rows, {refused:,} none\n")
    scanned, left = scan_events(folder, SCANS)
    sys.stdout.write(f"fuzz: scans of Kineto's events: {scanned:,} gave rows, {left:,} none\n")
    loop_over_columns(folder, SCANS)
    sys.stdout.write(f"fuzz: loops over columns: {SCANS:,} times each\n")
    return 0 if options.without_tests else run_tests()


if __name__ == "__main__":
    sys.exit(main())
