"""Recording a program: the environment that makes it record itself, and the trace of that.

While the program runs, each of its processes appends to a spool file in a folder beside the output;
what is in that folder can be made a trace at any time (`recover`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.collectors.child import find_program, run
from gputrace.collectors.merge import Merged, merge
from gputrace.collectors.nvml import Sampler
from gputrace.errors import InputError, MissingError, UsageError

HOOKS: Final = Path(__file__).parent / "hooks"
_SECRET: Final = re.compile(
    r"(?i)(pass(word|wd|phrase)?|secret|token|api.?key|auth|credentials?)(?![a-z])[\w-]*(=|$)"
)
_OTHER_TOOLS: Final = ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to record, and when; times in nanoseconds from each process's start of CUDA."""

    output: Path
    backend: str = "auto"
    """``cupti``, ``host`` (no GPU activity), or ``auto``: cupti where there is an NVIDIA driver."""
    delay_ns: int = 0
    duration_ns: int = 0
    steps: tuple[int, int] | None = None
    profiler_api: bool = False
    """Record from cudaProfilerStart to cudaProfilerStop."""
    nvml: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording has become."""

    merged: Merged
    notes: tuple[str, ...]
    """What a person should know, a line each."""


def collector_library() -> Path | None:
    """The C library that processes load; None where the package was built without a compiler."""
    return next(iter(sorted(Path(__file__).parent.glob("_collector*.so"))), None)


def has_driver() -> bool:
    """Whether an NVIDIA kernel driver is there."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def backend(plan: Plan) -> str:
    """The backend that a plan means on this machine."""
    if plan.backend != "auto":
        return plan.backend
    return "cupti" if has_driver() and collector_library() is not None else "host"


def prepare(plan: Plan, command: Sequence[str], force: bool) -> tuple[Path, dict[str, str]]:
    """The folder for spools, made, and the environment for the program.

    Raises CannotRun where there is no such program, UsageError where something is in the way,
    MissingError where the backend asked for cannot work here.
    """
    find_program(command[0])
    folder = plan.output.with_name(f"{plan.output.name}.spool")
    environment = _environment(plan, folder, os.environ)
    if plan.output.exists() and not (force and plan.output.is_file()):
        raise UsageError(f"{plan.output}: exists; name another with -o, or give --force")
    if folder.exists():
        raise UsageError(
            f"{folder}: left by another recording; make its trace with "
            f"`gputrace recover {folder}`, or remove it"
        )
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror})") from None
    return folder, environment


def _environment(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's own environment, and what makes its processes record themselves."""
    changed = dict(inherited) | {"GPUTRACE_DIR": str(folder.absolute())}
    if backend(plan) == "cupti":
        library = str(_usable_library(inherited))
        variables = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "GPUTRACE_LIBRARY")
        changed |= dict.fromkeys(variables, library)
    if (HOOKS / "sitecustomize.py").exists():
        paths = [str(HOOKS), inherited.get("PYTHONPATH", "")]
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if plan.delay_ns:
        changed["GPUTRACE_DELAY_NS"] = str(plan.delay_ns)
    if plan.duration_ns:
        changed["GPUTRACE_DURATION_NS"] = str(plan.duration_ns)
    if plan.profiler_api:
        changed["GPUTRACE_CAPTURE"] = "profiler"
    if plan.steps is not None:
        if plan.steps[0]:
            changed["GPUTRACE_CAPTURE"] = "manual"
        changed["GPUTRACE_STEPS"] = f"{plan.steps[0]}:{plan.steps[1]}"
    return changed


def _usable_library(inherited: Mapping[str, str]) -> Path:
    library = collector_library()
    if library is None:
        raise MissingError(
            "gputrace was installed without its collector, which needs a C compiler; install one "
            "and then gputrace again"
        )
    if any(variable in inherited for variable in _OTHER_TOOLS):
        raise MissingError(
            "this shell runs under nsys, and CUDA has room for one recorder; run without nsys"
        )
    other = inherited.get("CUDA_INJECTION64_PATH")
    if other and Path(other) != library:
        raise MissingError(
            f"CUDA_INJECTION64_PATH names another tool ({other}); unset it to record with gputrace"
        )
    return library


def record(plan: Plan, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Runs the program to its end; its exit code. Raises CannotRun where it does not start."""
    meta = {
        "command": json.dumps(masked(command)),
        "hostname": socket.gethostname(),
        "backend": backend(plan),
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    sampler = Sampler() if plan.nvml else None
    if sampler is not None and has_driver():
        sampler.start(folder)
    try:
        return run(command, environment)
    finally:
        if sampler is not None:
            sampler.stop()


def masked(command: Sequence[str]) -> list[str]:
    """The command line with the values of options that look secret replaced."""
    shown: list[str] = []
    hide = False
    for word in command:
        secret = (word.startswith("-") or "=" in word) and _SECRET.search(word) is not None
        name, equals, _ = word.partition("=")
        shown.append("***" if hide else f"{name}=***" if secret and equals else word)
        hide = secret and not equals and not hide
    return shown


def finish(folder: Path, output: Path, keep: bool = False) -> Recorded:
    """Makes the trace of a folder and removes the folder.

    Raises InputError where nothing in it can be read, OSError where the trace cannot be written;
    the folder stays then.
    """
    if not folder.is_dir():
        raise InputError(folder, "no such folder of a recording")
    meta = _meta(folder)
    merged = merge(folder, output, meta)
    if not keep:
        shutil.rmtree(folder)
    return Recorded(merged, tuple(_notes(merged, meta)))


def _notes(merged: Merged, meta: Mapping[str, str]) -> list[str]:
    if meta.get("backend") == "host":
        return ["no NVIDIA driver here: only the host's signals were recorded"]
    if not merged.processes:
        return ["no process of the program started CUDA"]
    return []


def _meta(folder: Path) -> dict[str, str]:
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
