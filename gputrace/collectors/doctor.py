"""Checks of what works on this machine for recording, and what to do about what does not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shutil import which
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any, Final

from gputrace.collectors.backend import HOW_TO_BUILD, has_driver
from gputrace.collectors.backends.cupti import collector_library, cupti_folders, libcuptis
from gputrace.collectors.backends.nvprof import find_nvprof
from gputrace.collectors.ncu import find_ncu
from gputrace.collectors.neighbours import PROCESS, CardProcesses, RunProcesses
from gputrace.collectors.nvml.queries import ask
from gputrace.collectors.session import HOOKS
from gputrace.errors import MissingError
from gputrace.plugins import all_plugins
from gputrace.readers.nsys_export import find_nsys, nsys_version
from gputrace.tools import ask_tool

_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")
_PARAMETERS: Final = Path("/proc/driver/nvidia/params")
_NVPROF_ENDS: Final = (8, 0)
"""Compute capability from which on nvprof refuses cards."""
_RUNTIME: Final = "nvidia/*/lib/libcudart.so.1?"
_CUPTI_PLACES: Final = (
    "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.1?",
    "/usr/local/cuda*/targets/*/lib/libcupti.so.1?",
    "/usr/lib/x86_64-linux-gnu/libcupti.so.1?",
)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    what: str
    state: str
    """``ok``, ``missing`` (recording with CUPTI cannot work), or ``note``."""
    result: str
    advice: str = ""


def examine() -> list[Check]:
    """Return all checks, in the order in which recording needs their subjects."""
    cards, capabilities = _find_cards()
    checks = list(_driver())
    if name := container():
        checks.append(Check("container", "ok", name))
    for capability, what in missing_capabilities().items():
        advice = f"so no {what}; start the container with it in that list, or with all"
        result = f"without {capability}"
        checks.append(Check("NVIDIA_DRIVER_CAPABILITIES", "note", result, advice))
    checks += [*cards, *_collector(), *_nsys(), *_nvprof(capabilities)]
    # Recording needs neither ncu nor the plugins, of which none is imported.
    if ncu := find_ncu():
        checks.append(Check("ncu", "ok", f"{ncu}, which gputrace kernel hands kernels to"))
    if plugins := ", ".join(map(str, all_plugins())):
        advice = "gputrace plugins --check says whether each works"
        checks.append(Check("plugins", "ok", plugins, advice))
    return checks


def _driver() -> Iterator[Check]:
    if not has_driver():
        name = container()
        advice = how_to_get_gpus(name) if name else "on a machine with a GPU, install the driver"
        yield Check("NVIDIA driver", "missing", "not loaded", advice)
        return
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _read(_VERSION_FILE))
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


_Capability = tuple[int, int] | None


def _find_cards() -> tuple[list[Check], list[_Capability]]:
    """Check the cards by NVML; also return their compute capabilities, None if unknown."""
    if not has_driver():
        return [], []
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
        cards = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetName(card) for card in cards]
    except Exception as error:  # Whatever NVML, or the lack of it, raises.
        why = str(error) or type(error).__name__
        return [Check("NVML", "note", why, "clocks and power are not sampled without it")], []
    capabilities = [ask(nvml, "nvmlDeviceGetCudaComputeCapability", card) for card in cards]
    shown = [
        "{} (compute capability {}.{})".format(name, *capability) if capability else name
        for name, capability in zip(names, capabilities, strict=True)
    ]
    counted = ", ".join(f"{shown.count(card)} x {card}" for card in dict.fromkeys(shown))
    checks = [Check("GPUs", "ok", counted)]
    supports = [ask(nvml, "nvmlGpmQueryDeviceSupport", card) for card in cards]
    if all(support is not None and support.isSupportedDevice for support in supports):
        checks.append(Check("GPM", "ok", "what kernels do inside is sampled: SMs, memory, links"))
    else:
        advice = "Hopper and newer GPUs have it; the rest is recorded without"
        checks.append(Check("GPM", "note", "not here: what kernels do inside is unknown", advice))
    if any((ask(nvml, "nvmlDeviceGetMigMode", card) or [0])[0] for card in cards):
        checks.append(Check("MIG", "note", "on", "NVML reports less on a partitioned GPU"))
    run = RunProcesses(Path(), os.getpid())
    computing = []
    for row in CardProcesses(nvml, cards, run, _LAST_NS).look():
        use = dict(zip(PROCESS, row, strict=True))
        if use["pid"] is not None and (use["use"] is None or use["use"] >= _COMPUTES):
            who = ", ".join(filter(None, [f"pid {use['pid']}", use["name"]]))
            much = "" if use["use"] is None else f" {use['use']:.0%}"
            computing.append(f"GPU {use['gpu']}{much} ({who})")
    if computing:
        said = "; ".join(computing)
        checks.append(Check("in use", "note", said, "a program beside them takes turns with these"))
    return checks, capabilities


_LAST_NS: Final = 1_000_000_000
_COMPUTES: Final = 0.02
"""Time for which the use of the cards is asked, and the least part of it that is worth a note."""


def _collector() -> Iterator[Check]:
    library = collector_library()
    if library is None:
        yield Check("collector", "missing", "not built", HOW_TO_BUILD)
    else:
        yield Check("collector", "ok", library.name)
    yield from _hooks()
    cupti = {str(path) for path in libcuptis()}
    for pattern in _CUPTI_PLACES:
        cupti |= {str(path) for path in Path("/").glob(pattern.lstrip("/"))}
    if named := os.environ.get("GPUTRACE_CUPTI"):
        cupti.add(str(Path(named)))
    taken, why = _taken_cupti(library) if library is not None else ("", "")
    if cupti or taken:
        files = {Path(path).resolve(): path for path in sorted(cupti | {taken} - {""})}
        first = files.pop(Path(taken).resolve(), taken)
        others = ", ".join(f"{_cupti_version(path)} ({path})" for path in files.values())
        if first:
            also = f"; also there: {others}" if others else ""
            advice = f"programs of this Python take it, since {why}{also}"
            yield Check("libcupti", "ok", f"{_cupti_version(first)} ({first})", advice)
        else:
            advice = "a program first takes the one next to its CUDA runtime"
            yield Check("libcupti", "note", others, advice)
    else:
        advice = "PyTorch and JAX bring their own; else pip install 'gputrace[cuda13]', or cuda12"
        yield Check("libcupti", "note", "none in this Python or the usual places", advice)
    if other := os.environ.get("CUDA_INJECTION64_PATH"):
        advice = "unset it to record: CUDA has room for one recorder"
        yield Check("CUDA_INJECTION64_PATH", "note", other, advice)


_HOOKED: Final = """
import sys
print("_gputrace_hooks.imports" in sys.modules or sys.version_info < (3, 6))
"""


def _hooks() -> Iterator[Check]:
    """Check that the Python of this shell starts with the hooks, which a wrapper may prevent."""
    if not (HOOKS / "sitecustomize.py").exists():
        yield Check("host hooks", "note", "not installed", "steps and data waits go unrecorded")
        return
    python = which("python") or which("python3")
    if python is None:
        return
    paths = filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")])
    with TemporaryDirectory() as folder, suppress(OSError, TimeoutExpired):
        hooked = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GPUTRACE_DIR": folder}
        ran = ask_tool([python, "-c", _HOOKED], env=hooked, timeout=10)
        if ran.stdout.strip() == "False":
            advice = (
                "it, or a script of that name, replaces or ignores PYTHONPATH: no steps are seen"
            )
            yield Check("host hooks", "note", f"{python} starts without them", advice)


_FIND_CUPTI: Final = """
import ctypes, sys
for path in sys.argv[2:]:
    ctypes.CDLL(path)
find = ctypes.CDLL(sys.argv[1]).gputrace_find_cupti
find.restype = ctypes.c_char_p
file = ctypes.create_string_buffer(4096)
why = find(file)
if why:
    file = file.value.decode()
    with open("/proc/self/maps") as maps:
        files = [line.split()[-1] for line in maps if "/libcupti.so" in line]
    print(file if "/" in file else files[0], why.decode(), sep="\\n")
"""


def _taken_cupti(collector: Path) -> tuple[str, str]:
    """Return which libcupti the collector takes in a program with the CUDA runtime of this Python's
    wheels, and why; both empty if none, or if it cannot say.
    """
    runtimes = (path for folder in sys.path for path in Path(folder).glob(_RUNTIME))
    newest = sorted(map(str, runtimes), key=lambda path: path[-2:])[-1:]
    command = [sys.executable, "-c", _FIND_CUPTI, str(collector), *newest]
    ran = ask_tool(command, env=os.environ | cupti_folders())
    taken, _, why = ran.stdout.strip().partition("\n")
    return (taken, why) if not ran.returncode else ("", "")


def _cupti_version(path: str) -> str:
    """Ask a libcupti for its version, in a process that it may end."""
    program = """
import ctypes, sys
version = ctypes.c_uint32()
ctypes.CDLL(sys.argv[1]).cuptiGetVersion(ctypes.byref(version))
print(version.value)
"""
    ran = ask_tool([sys.executable, "-I", "-c", program, path])
    if ran.returncode or not ran.stdout.strip().isdecimal():
        return "cannot be loaded"
    number = int(ran.stdout)
    if number < 10_000:
        return f"API version {number}"
    major, rest = divmod(number, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _nsys() -> Iterator[Check]:
    nsys = find_nsys()
    if nsys is None:
        advice = "needed only for record --backend nsys, and to read .nsys-rep and .qdrep reports"
        yield Check("nsys", "note", "not found", advice)
        return
    from gputrace.collectors.tool_traces import importer_obstacle  # with numpy

    try:
        version, obstacle = f"{nsys_version(nsys)} ({nsys})", importer_obstacle(nsys)
    except (OSError, MissingError) as error:
        advice = "GPUTRACE_NSYS or the PATH names it; set either to one that runs"
        why = error.strerror if isinstance(error, OSError) else error
        yield Check("nsys", "note", f"{nsys} cannot be run ({why})", advice)
        return
    yield Check("nsys", "note" if obstacle else "ok", version, obstacle or "")


def _nvprof(capabilities: list[_Capability]) -> Iterator[Check]:
    """Check nvprof, if it is installed or there is a card that it supports."""
    serves = any(capability and capability < _NVPROF_ENDS for capability in capabilities)
    what = f"it serves cards of compute capability below {_NVPROF_ENDS[0]}.{_NVPROF_ENDS[1]} only"
    nvprof = find_nvprof()
    if nvprof is None:
        if serves:
            yield Check("nvprof", "note", "not found", f"{what}; CUDA 12 and older have it")
        return
    try:
        said = ask_tool([nvprof, "--version"]).stdout
    except OSError as error:
        yield Check("nvprof", "note", f"{nvprof} cannot be run ({error.strerror})")
        return
    version = re.search(r"Release version (\S+)", said)
    result = f"{version[1] if version else 'of unknown version'} ({nvprof})"
    none_here = ": none here" if capabilities and not serves else ""
    yield Check("nvprof", "note" if none_here else "ok", result, what + none_here)


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
    """Return the name of the runtime of this container, by its traces; None outside of one."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "Apptainer"
    for file, name in _FILES.items():
        if (root / file).exists():
            return name
    groups = _read(root / "proc/1/cgroup")
    return next((name for mark, name in _CGROUPS.items() if mark in groups), None)


def how_to_get_gpus(name: str) -> str:
    """Return what to do if the driver is not visible in such a container."""
    return _HOW.get(name, "give it the devices /dev/nvidia* and the driver's libraries of the host")


def missing_capabilities(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return needed capabilities missing in NVIDIA_DRIVER_CAPABILITIES, with their purposes."""
    given = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if not given or "all" in given.split(","):
        return {}
    return {name: what for name, what in _NEEDED.items() if name not in given.split(",")}
