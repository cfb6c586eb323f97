"""An nvprof that records nothing: it runs the program as nvprof does, and leaves a file of rows.

FAKE_MODE says what goes wrong, FAKE_LOG gets the command lines, FAKE_OPTIONS the options that it
does not know. The program may leave the pthread id of its thread in the file FAKE_THREAD.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.nvprof import EPOCH, THREAD, Nvvp

MODE = os.environ.get("FAKE_MODE", "")
FLAGS = ("--profile-child-processes", "--force-overwrite")
OPTIONS = (
    *("--openacc-profiling", "--openmp-profiling", "--unified-memory-profiling"),
    *("--export-profile", "--log-file", "--profile-from-start", "--timeout"),
)
SAYS = {
    "too new a card": "Warning: nvprof is not supported on devices with compute capability 8.0 and "
    "higher.\n                  Use NVIDIA Nsight Systems for GPU tracing",
    "no driver": "Warning: unable to locate cuda driver library, GPU profiling skipped",
    "no library": "Error: unable to locate OpenACC profiling library libaccinj64.so.12.4.",
    "bad option": "Error: Encountered invalid option : --openacc-profiling",
    "no permission": "Warning: ERR_NVGPUCTRPERM - The user does not have permission to profile",
    "nothing": "Warning: No CUDA application was profiled, exiting",
    "skipped": "Warning: CUDA profiling error, GPU profiling skipped",
}
ENDS = {"too new a card": 26, "no library": 24, "bad option": 5}
"""What ends nvprof before it starts the program, and its exit code then."""


def main(words: list[str]) -> int:
    unknown = os.environ.get("FAKE_OPTIONS", "").split()
    if words == ["--help"]:
        known = [name for name in (*FLAGS, *OPTIONS) if name not in unknown]
        letters = {"--export-profile": "-o", "--force-overwrite": "-f"}
        for name in known:
            start = f"  {letters[name]},  " if name in letters else "       "
            sys.stdout.write(f"{start}{name} <value>\n                Text, as --bogus has.\n\n")
        return 0
    Path(os.environ["FAKE_LOG"]).write_text(json.dumps(words), encoding="utf-8")
    options, program = _parsed(words)
    log = Path(options["--log-file"].replace("%p", str(os.getpid())).replace("%%", "%"))
    with log.open("w", encoding="utf-8") as file:
        if MODE in SAYS:
            file.write(f"======== {SAYS[MODE]}\n")
    sys.stdout.write("==1== NVPROF is profiling process 1\n")
    sys.stdout.flush()
    return ENDS[MODE] if MODE in ENDS else _run(options["--export-profile"], program)


def _parsed(words: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    rest = list(words)
    while rest[0].startswith("--"):
        name = rest.pop(0)
        options[name] = "" if name in FLAGS else rest.pop(0)
    return options, rest


def _run(export: str, words: list[str]) -> int:
    """Run as nvprof: deaf to typed signals, dead of others with an exit code of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    with subprocess.Popen(words, close_fds=False, restore_signals=False) as running:
        code = running.wait()
    if MODE not in SAYS:
        program = Path(os.environ["GPUTRACE_DIR"], "program.pid").read_text(encoding="utf-8")
        _leave(Path(export.replace("%p", program).replace("%%", "%")), int(program))
    return 9 if code else 0


def _leave(path: Path, pid: int) -> None:
    """Two kernels, launched a second ago."""
    told = Path(os.environ.get("FAKE_THREAD", ""))
    thread = int(told.read_text(encoding="utf-8")) if told.is_file() else THREAD
    file = Nvvp(path, version=22, pid=pid)
    file.row("DEVICE", id=0, name=file.text("Tesla T4"), uuid=bytes(range(16)))
    now = time.time_ns() - EPOCH - 1_000_000_000
    for start in (now, now + 10_000):
        file.call(start, start + 4_000, threadId=(thread & 0xFFFFFFFF) - (1 << 32))
        file.kernel(start + 5_000, start + 8_000)
    file.save()
