"""Checks of what works on this machine for recording, and what to do about what does not."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.backend import HOW_TO_BUILD, has_driver
from gputrace.collectors.backends.cupti import collector_library, libcuptis
from gputrace.collectors.backends.nvprof import find_nvprof
from gputrace.collectors.ncu import find_ncu
from gputrace.collectors.nvml.queries import ask
from gputrace.collectors.session import HOOKS
from gputrace.collectors.tool_traces import importer_obstacle
from gputrace.errors import MissingError
from gputrace.plugins import all_plugins
from gputrace.readers.nsys_export import find_nsys, nsys_version

_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")
_PARAMETERS: Final = Path("/proc/driver/nvidia/params")
_NVPROF_ENDS: Final = (8, 0)
"""The compute capability from which on nvprof refuses cards, in its own words."""
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
    cards = _cards_or_why_not()
    return [
        *_driver(),
        *_container(),
        *_cards(cards),
        *_collector(),
        *_cupti(),
        *_in_the_way(),
        *_nsys(),
        *_nvprof(cards),
        *_ncu(),
        *_plugins(),
    ]


def _driver() -> Iterator[Check]:
    if not has_driver():
        name = container()
        advice = how_to_get_gpus(name) if name else "on a machine with a GPU, install the driver"
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


def _container() -> Iterator[Check]:
    if name := container():
        yield Check("container", "ok", name)
    for capability, what in missing_capabilities().items():
        found = f"without {capability}"
        advice = f"so no {what}; start the container with it in that list, or with all"
        yield Check("NVIDIA_DRIVER_CAPABILITIES", "note", found, advice)


@dataclass(frozen=True, slots=True)
class _Card:
    name: str
    capability: tuple[int, int] | None
    """The compute capability, where NVML tells it."""
    is_split: bool

    def __str__(self) -> str:
        if self.capability is None:
            return self.name
        return "{} (compute capability {}.{})".format(self.name, *self.capability)


def _find_cards() -> list[_Card]:
    """Raises whatever NVML, or the lack of it, raises."""
    nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return [
        _Card(
            nvml.nvmlDeviceGetName(handle),
            ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle),
            bool((ask(nvml, "nvmlDeviceGetMigMode", handle) or [0])[0]),
        )
        for handle in handles
    ]


def _cards_or_why_not() -> list[_Card] | str:
    if not has_driver():
        return ""
    try:
        return _find_cards()
    except Exception as error:  # whatever NVML raises is the finding
        return str(error) or type(error).__name__


def _cards(cards: list[_Card] | str) -> Iterator[Check]:
    if isinstance(cards, str):
        if cards:
            yield Check("NVML", "note", cards, "clocks and power are not sampled without it")
        return
    shown = [str(card) for card in cards]
    yield Check("GPUs", "ok", ", ".join(f"{shown.count(n)} x {n}" for n in dict.fromkeys(shown)))
    if any(card.is_split for card in cards):
        yield Check("MIG", "note", "on", "NVML tells less of a GPU that is split")


def _collector() -> Iterator[Check]:
    library = collector_library()
    if library is None:
        yield Check("collector", "missing", "not built", HOW_TO_BUILD)
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
        advice = "PyTorch and JAX bring their own; else pip install 'gputrace[cuda13]', or cuda12"
        yield Check("libcupti", "note", "none in this Python or the usual places", advice)


def _libcuptis() -> Iterator[Path]:
    if named := os.environ.get("GPUTRACE_CUPTI"):
        yield Path(named)
    yield from libcuptis()
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
        advice = "GPUTRACE_NSYS or the PATH names it; let them name one that runs"
        yield Check("nsys", "note", f"{nsys} cannot be run ({_why(error)})", advice)
        return
    yield Check("nsys", "note" if obstacle else "ok", found, obstacle or "")


def _why(error: OSError | MissingError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


def _nvprof(cards: list[_Card] | str) -> Iterator[Check]:
    """Worth a word where it is there, or there is a card that it serves."""
    known = [] if isinstance(cards, str) else [card.capability for card in cards]
    serves = [capability for capability in known if capability and capability < _NVPROF_ENDS]
    what = f"it serves cards of compute capability below {_NVPROF_ENDS[0]}.{_NVPROF_ENDS[1]} only"
    nvprof = find_nvprof()
    if nvprof is None:
        if serves:
            yield Check("nvprof", "note", "not found", f"{what}; CUDA 12 and older have it")
        return
    try:
        run = subprocess.run([nvprof, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        yield Check("nvprof", "note", f"{nvprof} cannot be run ({error.strerror})")
        return
    version = re.search(r"Release version (\S+)", run.stdout)
    found = f"{version[1] if version else 'of unknown version'} ({nvprof})"
    none_here = ": none here" if known and not serves else ""
    yield Check("nvprof", "note" if none_here else "ok", found, what + none_here)


def _ncu() -> Iterator[Check]:
    """Worth a word where it is there: recording does without."""
    if ncu := find_ncu():
        yield Check("ncu", "ok", f"{ncu}, which gputrace kernel hands kernels to")


def _plugins() -> Iterator[Check]:
    """List the installed plugins without importing them."""
    if found := [str(plugin) for plugin in all_plugins()]:
        yield Check(
            "plugins", "ok", ", ".join(found), "gputrace plugins --check says whether each works"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_FILES: Final = {"run/.containerenv": "Podman", ".dockerenv": "Docker"}
_CGROUPS: Final = {
    "kubepods": "Kubernetes",
    "libpod": "Podman",
    "docker": "Docker",
    "containerd": "containerd",
    "lxc": "LXC",
}
_HOW: Final = {
    "Docker": "start it with --gpus all, which needs the NVIDIA Container Toolkit on the host",
    "Podman": "start it with --device nvidia.com/gpu=all, which needs the NVIDIA Container Toolkit",
    "Kubernetes": "ask for nvidia.com/gpu in the limits of the pod",
    "Apptainer": "start it with --nv",
}
_NEEDED: Final = {"compute": "recording", "utility": "clocks and power"}
"""Capabilities of the NVIDIA Container Toolkit, and what does not work without each."""


def container(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what runs the container that we are in, by the marks that each leaves; None outside
    one.
    """
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "Apptainer"
    for file, name in _FILES.items():
        if (root / file).exists():
            return name
    try:
        groups = (root / "proc/1/cgroup").read_text()
    except OSError:
        return None
    return next((name for mark, name in _CGROUPS.items() if mark in groups), None)


def how_to_get_gpus(name: str) -> str:
    """Return what to do if the driver is not visible in such a container."""
    return _HOW.get(name, "give it the devices /dev/nvidia* and the driver's libraries of the host")


def missing_capabilities(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the needed capabilities that NVIDIA_DRIVER_CAPABILITIES leaves out, and their
    purpose.
    """
    given = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if not given or "all" in given.split(","):
        return {}
    return {name: what for name, what in _NEEDED.items() if name not in given.split(",")}
