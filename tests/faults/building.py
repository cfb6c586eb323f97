"""The libraries that faults need, compiled: a machine's, and those that make faults."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.native.build import HERE as NATIVE
from tests.native.build import LIBRARIES, OPTIONS

HERE: Final = Path(__file__).parent


def build(folder: Path) -> None:
    """Puts the stand-ins of CUDA, CUPTI and NVML, and the shim, into a folder."""
    compiler = shutil.which("cc") or "cc"
    for name, sources in (
        ("libcupti.so.13", [NATIVE / "fake_cupti.c"]),
        ("broken_cupti.so", [HERE / "broken_cupti.c"]),
        ("libcuda.so.1", [NATIVE / "fake_cuda.c"]),
        ("libnvidia-ml.so.1", [NATIVE / "fake_nvml.c"]),
        ("gpu.so", [HERE / "gpu.c"]),
        ("shim.so", [HERE / "shim.c"]),
    ):
        files = [str(path) for path in (folder / name, *sources)]
        command = [compiler, *OPTIONS, "-shared", "-o", *files, *LIBRARIES]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
