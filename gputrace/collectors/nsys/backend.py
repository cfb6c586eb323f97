"""nsys as the recorder: `nsys profile` around the program, with options that it knows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Merged, Plan
from gputrace.collectors.cuda import other_recorder
from gputrace.collectors.nsys.run import run_under_nsys
from gputrace.collectors.program.supervised import supervised
from gputrace.collectors.program.tool import ask
from gputrace.errors import MissingError
from gputrace.traces.nsys.report import find_nsys, nsys_version

_INSTALL: Final = (
    "nsys is not on this machine; install NVIDIA Nsight Systems (nsight-systems-cli), name it with "
    "GPUTRACE_NSYS, or record with --backend cupti"
)
_NEEDED: Final = ("--trace", "--output", "--force-overwrite")
_WANTED: Final = {
    "--trace": "cuda,nvtx",
    "--sample": "none",
    "--cpuctxsw": "none",
    "--cuda-graph-trace": "graph",
    "--wait": "primary",
    "--kill": "none",
    "--stop-on-exit": "true",
    "--export": "none",
    "--force-overwrite": "true",
}
"""OS calls (osrt) are left out: they make a recording many times larger and slower."""
_OPTION: Final = re.compile(r"^\s*(?:-\w,\s*)?(--[a-z][a-z0-9-]*)(?:[=\[<].*)?$")
_SECOND: Final = 1_000_000_000


def options_known(nsys: str) -> dict[str, str]:
    """The options of `nsys profile` by name, each with what its help says of it.

    Raises MissingError where nsys cannot be run.
    """
    known: dict[str, str] = {}
    name = ""
    for line in ask([nsys, "profile", "--help"])[1].splitlines():
        found = _OPTION.match(line)
        if found:
            name = found[1]
            known[name] = ""
        elif name:
            known[name] += f"{line}\n"
    return known


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    if find_nsys() is None:
        return _INSTALL
    return other_recorder(inherited)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    nsys = find_nsys()
    if nsys is None:
        raise MissingError(_INSTALL)
    window = _window(plan)
    options = _options(nsys, window, folder)
    changed = dict(environment)
    if plan.steps is not None:
        changed["GPUTRACE_PROFILER_API"] = "1"
    words = (nsys, "profile", *options, *supervised(folder), *command)
    if not plan.duration_ns:
        return Launch(words, changed)
    stop = (nsys, "stop", f"--session={window['--session-new']}")
    return Launch(words, changed, stop, plan.delay_ns + plan.duration_ns)


def _options(nsys: str, window: dict[str, str], folder: Path) -> list[str]:
    """Those wanted that this nsys knows; raises MissingError where it lacks one that is needed."""
    known = options_known(nsys)
    missing = [name for name in (*_NEEDED, *window) if name not in known]
    if missing:
        raise MissingError(
            f"{nsys} (version {nsys_version(nsys)}) is too old: it does not know "
            f"{', '.join(missing)}; install Nsight Systems 2022.1 or newer, or name one with "
            "GPUTRACE_NSYS"
        )
    wanted = {n: v for n, v in _WANTED.items() if n in known and _takes(known[n], v)} | window
    # nsys replaces % in names.
    wanted["--output"] = str(folder.absolute() / "report").replace("%", "%%")
    return [f"{name}={value}" for name, value in wanted.items()]


def _window(plan: Plan) -> dict[str, str]:
    """The options that record a part; steps begin and end it by calls of CUDA's profiler API."""
    options = {}
    if plan.delay_ns:
        # All that every version takes are whole seconds.
        options["--delay"] = str(max(1, round(plan.delay_ns / _SECOND)))
    if plan.duration_ns:
        # With --duration nsys would end before the program.
        options["--session-new"] = f"gputrace{os.getpid()}"
    if plan.profiler_api or plan.steps is not None:
        options["--capture-range"] = "cudaProfilerApi"
        options["--capture-range-end"] = "stop"
    if options:
        # Else nsys ends the program with the window.
        options["--kill"] = "none"
    return options


def _takes(help_text: str, value: str) -> bool:
    """Whether an option's help lists the value, or lists none."""
    return "Possible values" not in help_text or value.split(",", maxsplit=1)[0] in help_text


def _merge(folder: Path, output: Path, told: Mapping[str, str]) -> Merged:
    from gputrace.collectors.nsys.convert import convert

    return convert(folder, output, told)


NSYS: Final = Backend("nsys", _obstacle, _launch, _merge, run_under_nsys)
