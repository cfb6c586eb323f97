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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.collectors.child import run
from gputrace.collectors.merge import Merged, merge
from gputrace.errors import InputError, MissingError, UsageError

HOOKS: Final = Path(__file__).parent / "hooks"
_SECRET: Final = re.compile(
    r"(?i)(pass(word|wd)?|secret|token|api.?key|auth|credential)[\w-]*(=|$)"
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


def collector_library() -> Path | None:
    """The C library that processes load; None where the package was built without a compiler."""
    return next(iter(sorted(Path(__file__).parent.glob("_collector*.so"))), None)


def has_driver() -> bool:
    """Whether an NVIDIA kernel driver is there."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def spool_folder(output: Path) -> Path:
    """Where the processes of a recording leave their spools."""
    return output.with_name(f"{output.name}.spool")


def prepare(plan: Plan, force: bool) -> Path:
    """Makes the spool folder; raises UsageError where something of that name is in the way."""
    if plan.output.exists() and not force:
        raise UsageError(f"{plan.output}: exists; name another with -o, or give --force")
    folder = spool_folder(plan.output)
    if folder.exists():
        raise UsageError(
            f"{folder}: left by another recording; make its trace with "
            f"`gputrace recover {folder}`, or remove it"
        )
    try:
        folder.mkdir(mode=0o700, parents=False)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror})") from None
    return folder


def environment(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's environment: its own, and what makes its processes record themselves.

    Raises MissingError where the backend asked for cannot work here.
    """
    changed = dict(inherited) | {"GPUTRACE_DIR": str(folder.absolute())}
    if backend(plan) == "cupti":
        library = str(_usable_library(inherited))
        changed |= dict.fromkeys(
            ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "GPUTRACE_LIBRARY"), library
        )
    if HOOKS.is_dir():
        old = inherited.get("PYTHONPATH")
        changed["PYTHONPATH"] = os.pathsep.join([str(HOOKS), *([old] if old else [])])
    if plan.delay_ns:
        changed["GPUTRACE_DELAY_NS"] = str(plan.delay_ns)
    if plan.duration_ns:
        changed["GPUTRACE_DURATION_NS"] = str(plan.duration_ns)
    if plan.profiler_api:
        changed["GPUTRACE_CAPTURE"] = "profiler"
    if plan.steps is not None:
        changed["GPUTRACE_CAPTURE"] = "manual"
        changed["GPUTRACE_STEPS"] = f"{plan.steps[0]}:{plan.steps[1]}"
    return changed


def backend(plan: Plan) -> str:
    """The backend that a plan means on this machine."""
    if plan.backend != "auto":
        return plan.backend
    return "cupti" if has_driver() and collector_library() is not None else "host"


def _usable_library(inherited: Mapping[str, str]) -> Path:
    library = collector_library()
    if library is None:
        raise MissingError(
            "gputrace was installed without its collector, which needs a C compiler; install one "
            "and gputrace again, or record with --backend nsys"
        )
    for variable in _OTHER_TOOLS:
        if variable in inherited:
            raise MissingError(
                "this shell runs under nsys, and CUDA has room for one recorder; run without nsys"
            )
    other = inherited.get("CUDA_INJECTION64_PATH")
    if other and Path(other) != library:
        raise MissingError(
            f"CUDA_INJECTION64_PATH names another tool ({other}); unset it to record with gputrace"
        )
    return library


def record(plan: Plan, command: Sequence[str], folder: Path) -> int:
    """Runs the program; its exit code. Raises `child.CannotRun` where it cannot be started."""
    meta = {
        "command": json.dumps(masked(command)),
        "hostname": socket.gethostname(),
        "backend": backend(plan),
        "python": sys.version.split()[0],
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return run(command, environment(plan, folder, os.environ))


def masked(command: Sequence[str]) -> list[str]:
    """The command line with the values of options that look secret replaced."""
    shown: list[str] = []
    hide = False
    for word in command:
        match = _SECRET.search(word) if word.startswith("-") or "=" in word else None
        if hide:
            shown.append("***")
            hide = False
        elif match is None:
            shown.append(word)
        else:
            name, equals, _ = word.partition("=")
            shown.append(f"{name}=***" if equals else word)
            hide = not equals
    return shown


def finish(folder: Path, output: Path, keep: bool = False) -> Merged:
    """Makes the trace of a folder and removes the folder.

    Raises InputError where nothing in it can be read, OSError where the trace cannot be written;
    the folder stays then.
    """
    if not folder.is_dir():
        raise InputError(folder, "no such folder of a recording")
    merged = merge(folder, output, _meta(folder))
    if not keep:
        shutil.rmtree(folder)
    return merged


def _meta(folder: Path) -> dict[str, str]:
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
