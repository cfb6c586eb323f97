"""Programs with the hooks, and libraries that stand for the recorders'."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.programs import TORCH, Program


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def torch(program: Program) -> Program:
    """With modules that have the names of PyTorch's and what the hooks use of them."""
    program.write(TORCH)
    return program


def built(program: Program, name: str, source: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here")
    library = program.folder / name
    library.with_suffix(".c").write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), f"{library.with_suffix('.c')}"]
    subprocess.run(command, check=True)
    return library


COLLECTOR: Final = """
#include <stdio.h>
#include <stdlib.h>
static void tell(const char *what, int on) {
    FILE *log = fopen(getenv("CALLS"), "a");
    fprintf(log, "%s %d\\n", what, on);
    fclose(log);
}
void gputrace_pause(int on) { tell("pause", on); }
void gputrace_capture(int on) { tell("capture", on); }
int steps;
void gputrace_step(void) { steps++; }
int gputrace_keep_cupti(void) { return getenv("KEEPS") ? 0 : -1; }
"""


@pytest.fixture
def library(program: Program) -> dict[str, str]:
    """A library with the collector's functions that writes down the calls; what to set for it."""
    path = built(program, "library.so", COLLECTOR)
    return {"GPUTRACE_LIBRARY": str(path), "CALLS": str(program.folder / "calls")}


DRIVER: Final = """
#include <stdio.h>
#include <stdlib.h>
static int ready;
static int tell(const char *what) {
    FILE *log = fopen(getenv("CALLS"), "a");
    fprintf(log, "%s\\n", what);
    fclose(log);
    return 0;
}
void start_cuda(void) { ready = 1; }
int cuProfilerStart(void) { return ready ? tell("start") : 201; }
int cuCtxSynchronize(void) { return tell("synchronize"); }
int cuProfilerStop(void) { return tell("stop"); }
"""


@pytest.fixture
def driver(program: Program) -> dict[str, str]:
    """A libcuda that writes down the calls; what to set for a recorder that follows them."""
    built(program, "libcuda.so.1", DRIVER)
    return {
        "GPUTRACE_PROFILER_API": "1",
        "CALLS": str(program.folder / "calls"),
        "LD_LIBRARY_PATH": str(program.folder),
    }
