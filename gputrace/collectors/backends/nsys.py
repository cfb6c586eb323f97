"""NVIDIA Nsight Systems as the recorder, run around the program; its report is converted."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Merged, Plan, other_recorder
from gputrace.collectors.launch import Launch, supervised
from gputrace.errors import MissingError
from gputrace.readers.nsys_export import find_nsys, nsys_version

LOG: Final = "nsys.log"
"""nsys's own output, in the folder of a recording."""

_CAUSES: Final[supervised.Causes] = (
    (
        r"unrecogni[sz]ed option|illegal|cannot be specified",
        "nsys does not take an option that gputrace gave it ({said}); try another version of nsys",
    ),
    (
        r"permission denied|insufficient permission|operation not permitted",
        "nsys lacks a permission ({said}); in a container, start it with --cap-add=SYS_ADMIN or "
        "a seccomp profile that allows perf_event_open",
    ),
    (r"no space left", "no space is left for nsys's files ({said}); set TMPDIR to a larger folder"),
    (
        r"multiple.?subscribers|another (profiler|tool)|already (in use|subscribed)",
        "another tool holds CUDA's one place for a recorder ({said}); switch it off",
    ),
)
_NOTHING: Final = (
    "nsys recorded nothing, since the window never began: cudaProfilerStart was not called, "
    "no step of --steps was reached, or --delay is longer than the run"
)
"""nsys says no more than that it generated nothing."""
_COMPLAINT: Final = re.compile(r"\b(error|failed|fatal|unable|cannot|exception)\b", re.IGNORECASE)


def _cause(folder: Path) -> str | None:
    """Return the cause of a failure from nsys's output; None if it did not complain."""
    lines = _lines(folder)
    if (cause := supervised.find_cause(_CAUSES, lines)) is not None:
        return cause
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    return f"nsys left no report: {complaints[-1]}" if complaints else None


def _lines(folder: Path) -> list[str]:
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line and not re.match(r"\[\d+/\d+\] \[", line)]


_PATIENCE_S: Final = 3.0
"""Seconds that nsys may write after the program's end before the user is informed."""


def run_under_nsys(
    launch: Launch, folder: Path, log: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Run the program and nsys to their ends; return the program's exit code."""

    def why_not(code: int) -> str:
        said = _cause(folder) or (_lines(folder) or ["it said nothing"])[-1]
        return f"nsys did not start the program (exit code {code}): {said}"

    supervision = supervised.Supervision("nsys", launch, folder, apart=True, why_not=why_not)
    due, patient_until, stop = 0.0, 0.0, launch.stop

    def look() -> None:
        nonlocal due, patient_until, stop
        now = time.monotonic()
        if stop and supervision.has_begun():
            due = due or now + launch.stop_after_ns / 1e9
            if now >= due:
                with (folder / LOG).open("ab") as output:
                    # It ends when nsys has written the report; the program need not wait for that.
                    subprocess.Popen(stop, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                stop = ()
        if supervision.is_writing():
            patient_until = patient_until or now + _PATIENCE_S
            if now > patient_until:
                log("the program has ended; nsys is still writing its report")
                patient_until = float("inf")
        meanwhile()

    return supervision.run(look)


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
    """Return the options of `nsys profile` with their help; raise MissingError if it cannot run."""
    known: dict[str, str] = {}
    name = ""
    for line in supervised.ask([nsys, "profile", "--help"])[1].splitlines():
        if option := _OPTION.match(line):
            name = option[1]
            known[name] = ""
        elif name:
            known[name] += f"{line}\n"
    return known


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    return _INSTALL if find_nsys() is None else other_recorder(inherited)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    nsys = find_nsys()
    if nsys is None:
        raise MissingError(_INSTALL)
    window = {}
    if plan.delay_ns:
        # All that every version takes are whole seconds.
        window["--delay"] = str(max(1, round(plan.delay_ns / _SECOND)))
    if plan.duration_ns:
        # With --duration nsys would end before the program.
        window["--session-new"] = f"gputrace{os.getpid()}"
    if plan.profiler_api or plan.steps is not None:
        window["--capture-range"] = "cudaProfilerApi"
        window["--capture-range-end"] = "stop"
    if window:
        # Else nsys ends the program with the window.
        window["--kill"] = "none"
    options = _options(nsys, window, folder)
    changed = dict(environment)
    if plan.steps is not None:
        changed["GPUTRACE_PROFILER_API"] = "1"
    words = (nsys, "profile", *options, *supervised.prefix(folder), *command)
    if not plan.duration_ns:
        return Launch(words, changed)
    stop = (nsys, "stop", f"--session={window['--session-new']}")
    return Launch(words, changed, stop, plan.delay_ns + plan.duration_ns)


def _options(nsys: str, window: dict[str, str], folder: Path) -> list[str]:
    """Return the wanted options that nsys knows; raise MissingError if it lacks a needed one."""
    known = options_known(nsys)
    missing = [name for name in (*_NEEDED, *window) if name not in known]
    if missing:
        raise MissingError(
            f"{nsys} (version {nsys_version(nsys)}) is too old: it does not know "
            f"{', '.join(missing)}; install Nsight Systems 2022.1 or newer, or name one with "
            "GPUTRACE_NSYS"
        )
    wanted = {}
    for name, value in _WANTED.items():
        lists = "Possible values" in known.get(name, "")
        if name in known and (not lists or value.split(",", maxsplit=1)[0] in known[name]):
            wanted[name] = value
    wanted |= window
    # nsys replaces % in names.
    wanted["--output"] = str(folder.absolute() / "report").replace("%", "%%")
    return [f"{name}={value}" for name, value in wanted.items()]


def _merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Make the trace; the writer is imported once the program has ended."""
    from gputrace.collectors.tool_traces import convert_nsys

    supervised.check_ended(folder, "nsys")
    return convert_nsys(folder, output, meta, lambda: _cause(folder) or _NOTHING)


NSYS: Final = Backend("nsys", _obstacle, _launch, _merge, run_under_nsys)
