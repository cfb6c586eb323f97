"""What works on this machine for recording, and what to do about what does not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.cupti import collector_library, has_driver
from gputrace.collectors.nsys_reports import importer_obstacle
from gputrace.collectors.nvprof import find_nvprof
from gputrace.collectors.record import HOOKS
from gputrace.errors import MissingError
from gputrace.traces.nsys.report import find_nsys, nsys_version

_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")
_PARAMETERS: Final = Path("/proc/driver/nvidia/params")
_CUPTI_PLACES: Final = (
    "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.1?",
    "/usr/local/cuda*/targets/*/lib/libcupti.so.1?",
    "/usr/lib/x86_64-linux-gnu/libcupti.so.1?",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: str
    """``ok``, ``missing`` (recording with CUPTI cannot work), or ``note``."""
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """All checks, in the order in which recording needs the things."""
    return [*_driver(), *_cards(), *_collector(), *_cupti(), *_in_the_way(), *_nsys(), *_nvprof()]


def _driver() -> Iterator[Check]:
    if not has_driver():
        advice = "on a machine with a GPU, install the driver; in a container, run with --gpus all"
        yield Check("NVIDIA driver", "missing", "not loaded", advice)
        return
    text = _VERSION_FILE.read_text() if _VERSION_FILE.exists() else ""
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    yield Check("NVIDIA driver", "ok", version[0] if version else "loaded")
    admin = re.search(r"RmProfilingAdminOnly: *1", _read(_PARAMETERS))
    if admin and os.geteuid():
        yield Check(
            "profiling permission",
            "note",
            "administrators only (RmProfilingAdminOnly)",
            "tracing works without; hardware counters need the module option "
            "NVreg_RestrictProfilingToAdminUsers=0",
        )


def _cards() -> Iterator[Check]:
    if not has_driver():
        return
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    except Exception as error:  # whatever NVML or the lack of it raises is the finding
        yield Check("NVML", "note", str(error), "clocks and power are not sampled without it")
        return
    yield Check("GPUs", "ok", ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)))
    if any(_is_split(nvml, handle) for handle in handles):
        yield Check("MIG", "note", "on", "NVML tells less of a GPU that is split")


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False


def _collector() -> Iterator[Check]:
    library = collector_library()
    if library is None:
        advice = "install a C compiler, and then gputrace again"
        yield Check("collector", "missing", "not built", advice)
    else:
        yield Check("collector", "ok", library.name)
    if not (HOOKS / "sitecustomize.py").exists():
        yield Check("host hooks", "note", "not installed", "steps and data waits go unrecorded")


def _cupti() -> Iterator[Check]:
    found = sorted({str(path) for path in _libcuptis()})
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Check("libcupti", "ok", f"{found[-1]}{more}")
    else:
        advice = "PyTorch and JAX bring their own; else install the nvidia-cuda-cupti wheel"
        yield Check("libcupti", "note", "none in this Python or the usual places", advice)


def _libcuptis() -> Iterator[Path]:
    if named := os.environ.get("GPUTRACE_CUPTI"):
        yield Path(named)
    for folder in map(Path, sys.path):
        yield from folder.glob("nvidia/*/lib/libcupti.so.1?")
    for pattern in _CUPTI_PLACES:
        yield from Path("/").glob(pattern.lstrip("/"))


def _in_the_way() -> Iterator[Check]:
    other = os.environ.get("CUDA_INJECTION64_PATH")
    if other:
        advice = "unset it to record: CUDA has room for one recorder"
        yield Check("CUDA_INJECTION64_PATH", "note", other, advice)


def _nsys() -> Iterator[Check]:
    nsys = find_nsys()
    if nsys is None:
        advice = "needed only for record --backend nsys, and to read .nsys-rep and .qdrep reports"
        yield Check("nsys", "note", "not found", advice)
        return
    try:
        found, obstacle = f"{nsys_version(nsys)} ({nsys})", importer_obstacle(nsys)
    except (OSError, MissingError) as error:
        found, obstacle = nsys, str(error)
    yield Check("nsys", "note" if obstacle else "ok", found, obstacle or "")


def _nvprof() -> Iterator[Check]:
    # Few machines have it, and few lack it.
    if nvprof := find_nvprof():
        advice = "for record --backend nvprof, on GPUs before compute capability 8.0"
        yield Check("nvprof", "ok", nvprof, advice)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
