"""The collector, a libcupti and a libcuda of our own, and a program that uses them, compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.command import ROOT

HERE: Final = Path(__file__).parent
COLLECTOR: Final = ROOT / "gputrace" / "collectors" / "native"
OPTIONS: Final = ("-std=gnu11", "-Wall", "-Wextra", "-O2", "-fPIC")
LIBRARIES: Final = ("-ldl", "-lpthread")


def compile_all(folder: Path, *extra: str) -> None:
    """Puts libraries and the program into a folder; skips the test where there is no compiler.

    The folder need not be there.

    GPUTRACE_TEST_CFLAGS adds options: of sanitizers, say.
    """
    extra += tuple(os.environ.get("GPUTRACE_TEST_CFLAGS", "").split())
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder.mkdir(exist_ok=True)
    shared = ("-shared", "-fvisibility=hidden")
    for name, sources, options in (
        ("collector.so", sorted(COLLECTOR.glob("*.c")), (*shared, "-DGPUTRACE_STRICT")),
        ("libcupti.so.13", [HERE / "fake_cupti.c"], ("-shared",)),
        ("old_cupti.so", [HERE / "fake_cupti.c"], ("-shared", "-DOLD")),
        ("libcuda.so.1", [HERE / "fake_cuda.c"], ("-shared",)),
        ("workload", [HERE / "workload.c"], ()),
    ):
        subprocess.run(
            [compiler, *OPTIONS, *options, *extra, "-o", folder / name, *sources, *LIBRARIES],
            check=True,
            timeout=120,
        )


def compile_sampling(folder: Path) -> Path:
    """call_sampling.c alone, with clocks that a test sets; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "sampling.so"
    sources = [COLLECTOR / "call_sampling.c", HERE / "clocks.c"]
    subprocess.run(
        [compiler, *OPTIONS, "-shared", "-o", library, *sources], check=True, timeout=120
    )
    return library


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder of what `compile_all` made, and what it runs there."""

    folder: Path

    def environment(self, spools: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that `gputrace record` sets, and where the libraries are."""
        ours = ("GPUTRACE", "FAKE", "NSYS", "QUADD", "CUDA", "NVTX")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return kept | {
            "CUDA_INJECTION64_PATH": str(self.folder / "collector.so"),
            "NVTX_INJECTION64_PATH": str(self.folder / "collector.so"),
            "GPUTRACE_DIR": str(spools),
            "GPUTRACE_CUPTI": str(self.folder / "libcupti.so.13"),
            "LD_LIBRARY_PATH": str(self.folder),
            **(extra or {}),
        }

    def with_library(self, folder: Path, name: str = "jaxlib/libjax_common.so") -> dict[str, str]:
        """Return the variable with which a program loads a library of that name, as JAX's does."""
        library = folder / name
        library.parent.mkdir(parents=True)
        library.symlink_to(self.folder / "libcuda.so.1")
        return {"LD_PRELOAD": str(library)}

    def command(self, script: str | Sequence[str]) -> list[str]:
        """The program with the words of a script, which workload.c describes."""
        words = script.split() if isinstance(script, str) else script
        return [str(self.folder / "workload"), *words]

    def run(
        self, spools: Path, script: str | Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the program to its end."""
        return subprocess.run(
            self.command(script),
            env=self.environment(spools, env),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
