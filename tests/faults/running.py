"""Runs the program twice, as it is and recorded, with the same fault."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from gputrace.collectors import armed
from gputrace.collectors.backend import SECOND_NS
from tests.faults import ledger
from tests.faults.model import Fault, Strike
from tests.helpers.command import ROOT

LIMIT_S: Final = 60.0
_POLL_S: Final = 0.005
_OURS: Final = ("GPUTRACE", "FAKE", "FAULT", "CUDA", "NVTX", "LEDGER")
_WITH_NVML: Final = (
    "import sys; from gputrace import cli; from gputrace.collectors import session as record\n"
    "record.has_driver = record.job_tasks.has_driver = lambda: True\n"
    "sys.exit(cli.run(sys.argv[1:]))"
)
"""A recorder that believes in a driver, which only the stand-in for NVML is."""
_ARMED: Final = (
    "import sys; from gputrace.collectors import backends; backends.has_driver = lambda: True\n"
    "from gputrace import cli; sys.exit(cli.run(sys.argv[1:]))"
)
"""`gputrace arm` that believes in a driver, so that it arms for CUPTI."""
_IGNORING: Final = (
    "import os, signal, sys\nfor number in sys.argv[1].split(','):\n"
    "    signal.signal(int(number), signal.SIG_IGN)\nos.execv(sys.argv[2], sys.argv[2:])"
)
"""Whoever starts the program, or its recorder, and ignores signals."""

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of one of the two runs.

    Attributes:
        folder: where it ran.
        code: as a shell has it; None where it did not end.
        said: what recorders said, of ``err``.
        began: CLOCK_MONOTONIC, ns.
    """

    folder: Path
    code: int | None
    out: bytes
    err: bytes
    said: tuple[str, ...]
    began: int


class Life:
    """One run of the program, recorded or not, in a folder of its own."""

    def __init__(self, fault: Fault, machine: Path, folder: Path, recorded: bool) -> None:
        self.fault, self.folder, self._recorded = fault, folder, recorded
        self._machine, self._is_armed = machine, fault.armed and recorded
        self.problems: list[str] = []
        self._began = time.monotonic_ns()
        for name in ("work", "temporary", "disk"):
            (folder / name).mkdir(parents=True)
        self.output = folder / ("disk" if fault.disk else "work") / "t.sqlite"
        self.trace = folder / "work" / "inner.sqlite" if fault.inner else self.output

    def environment(self) -> dict[str, str]:
        """Return the variables of the program, and of what starts it."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        machine = str(self._machine)
        jumps = [(int(at * 1e9) + self._began, int(by * 1e9)) for at, by in self.fault.jumps]
        told = {"FAULT_CLOCK": " ".join(f"{at} {by}" for at, by in jumps)} if jumps else {}
        nvml = self.folder / "nvml"
        nvml.write_text(self.fault.nvml or "", encoding="utf-8")
        return env | {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "LD_LIBRARY_PATH": machine,
            "LD_PRELOAD": f"{machine}/shim.so",
            "GPUTRACE_CUPTI": f"{machine}/libcupti.so.13",
            "FAKE_NVML": str(nvml),
            "SUBJECT_GPU": f"{machine}/gpu.so",
            "LEDGER": str(self.folder / "ledger"),
            "TMPDIR": str(self.folder / "temporary"),
            "FAULT_RUN": str(self.folder),
            **({"GPUTRACE_ARM": str(self.folder / "arm")} if self._is_armed else {}),
            **told,
            **{name: text.replace("MACHINE", machine) for name, text in self.fault.env.items()},
        }

    def command(self) -> list[str]:
        """The program, with its recorder where it has one."""
        program = [sys.executable, "-m", "tests.faults.subject", *self.fault.words]
        if not self._recorded:
            return program
        if self._is_armed:
            return [sys.executable, "-c", _ARMED, "arm", "--", *program]
        program = [*self.fault.inner, *program]
        nvml = self.fault.nvml is not None
        start = ["-c", _WITH_NVML] if nvml else ["-m", "gputrace"]
        options = [*self.fault.options, *(() if nvml else ("--no-nvml",))]
        options += () if self.fault.control else ("--no-control",)
        where = os.path.relpath(self.output, self.folder / "work")
        return [sys.executable, *start, "record", "-o", where, *options, "--", *program]

    def _starter(self) -> list[str]:
        numbers = ",".join(str(int(number)) for number in self.fault.ignored)
        return [sys.executable, "-c", _IGNORING, numbers] if numbers else []

    def run(self) -> Ran:
        """To the end of all its processes, or of the time that they may take."""
        paths = [self.folder / "out", self.folder / "err"]
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            started = subprocess.Popen(
                [*self._starter(), *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment(),
                cwd=self.folder / "work",
                start_new_session=True,
            )
        if self._is_armed:
            threading.Thread(target=self._toggle, args=(started,), daemon=True).start()
        try:
            self._strike_all(started)
            code: int | None = started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self._end_others(started, None if code is None else 5.0)
        out_text, err_text = (path.read_bytes() for path in paths)
        said, own = _divide(err_text)
        code = 128 - code if code is not None and code < 0 else code
        return Ran(self.folder, code, out_text, own, said, self._began)

    def _toggle(self, started: subprocess.Popen[bytes]) -> None:
        """Open and close windows in all processes that listen, until the first one has ended."""
        while started.poll() is None:
            # The program may remove its folder meanwhile.
            with suppress(FileNotFoundError):
                for path in self.folder.glob("arm/*/*.socket"):
                    self._toggle_one(path)
            time.sleep(0.02)

    def _toggle_one(self, path: Path) -> None:
        with suppress(OSError):
            step = int(armed.ask(path, "status").get("step", 0))
            armed.ask(path, "record", step + 2, step + 5, SECOND_NS)
            time.sleep(0.05)
            armed.ask(path, "end")
            armed.ask(path, "begin", SECOND_NS // 20)

    def _strike_all(self, started: subprocess.Popen[bytes]) -> None:
        told = _await(self._told, started)
        if self._recorded and told:
            self._disturb(started)
        for strike in self.fault.strikes:
            if strike.at == "merging":
                if self._recorded:
                    _await(lambda: any(self.output.parent.glob(".t.sqlite.*.tmp")), started)
                    self._send(started, strike, 0)
            elif (self._recorded or strike.reaches_program) and told:
                wait = told.ready / 1e9 + strike.after_s - time.monotonic()
                time.sleep(max(wait, 0))
                self._send(started, strike, told.pid)

    def _disturb(self, started: subprocess.Popen[bytes]) -> None:
        if self.fault.squeeze is not None:
            pages = int(Path(f"/proc/{started.pid}/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + (self.fault.squeeze << 20)
            resource.prlimit(started.pid, resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
        if self.fault.again:
            ran = subprocess.run(
                self.command(),
                env=self.environment(),
                cwd=self.folder / "work",
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )
            if (ran.returncode, ran.stdout, ran.stderr.count("\n")) != (125, "", 1):
                self.problems.append(f"the second recorder: {ran}")

    def _told(self) -> ledger.Told | None:
        found = ledger.read(self.folder / "ledger")
        return found if found and found.ready else None

    def _send(self, started: subprocess.Popen[bytes], strike: Strike, program: int) -> None:
        targets = {"program": [program], "both": [started.pid, program]}
        whom = targets.get(strike.at, [started.pid])
        if strike.at in ("each", "each_backwards"):
            whom = sorted(processes_of(self.folder), reverse=strike.at == "each_backwards")
        numbers = [strike.number, *([signal.SIGCONT] if strike.resume_s else [])]
        for number in numbers:
            for pid in dict.fromkeys(whom):
                try:
                    (os.killpg if strike.at == "group" else os.kill)(pid, number)
                except ProcessLookupError:
                    continue
            if number != numbers[-1]:
                time.sleep(strike.resume_s)

    def _end_others(self, started: subprocess.Popen[bytes], patience_s: float | None) -> None:
        """Waits for what the program started, or ends it where that is due; tells of it."""
        until = time.monotonic() + (LIMIT_S if patience_s is None else patience_s)
        if patience_s is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        if self.fault.recorder_dies:
            until = time.monotonic() + LIMIT_S
        while (left := processes_of(self.folder)) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in left:
            (self.folder / f"orphan.{pid}").write_bytes(_command_of(pid))
            os.kill(pid, signal.SIGKILL)


def _divide(err: bytes) -> tuple[tuple[str, ...], bytes]:
    """Split the output into what recorders said, and the rest."""
    lines = err.splitlines(keepends=True)
    said = [line for line in lines if line.startswith(b"gputrace: ")]
    own = b"".join(line for line in lines if not line.startswith(b"gputrace: "))
    return tuple(line.decode().strip() for line in said), own


def _await(look: Callable[[], _Found], started: subprocess.Popen[bytes]) -> _Found:
    until = time.monotonic() + LIMIT_S
    while not (found := look()) and started.poll() is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return found


def processes_of(folder: Path) -> list[int]:
    """All that were started for a run, by the variable that they inherit."""
    wanted, found = f"FAULT_RUN={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def recover(life: Life, env: Mapping[str, str]) -> tuple[int, str]:
    """`gputrace recover` of what a recorder left; its exit code and what it said."""
    words = ("recover", f"{life.output}.spool", "-o", str(life.output), "--force")
    ran = subprocess.run(
        [sys.executable, "-m", "gputrace", *words],
        env=dict(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return ran.returncode, ran.stderr
